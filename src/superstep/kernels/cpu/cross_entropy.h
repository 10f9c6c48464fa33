// Rows of logits to what a cross entropy needs of them: log-sum-exp and the target's logit; then to their gradients,
//
//   lse = m + log sum e^(x / t - m);   dx = factor / t (e^(x / t - lse) - [x is the target's])
//
// where t is the temperature. Each row is read from memory once for either, and gradients take the place of the logits.

#pragma once

#include <algorithm>
#include <limits>

#include "numbers.h"

namespace superstep {

struct Logits {
  void* at;
  int64_t rows, columns, width;  // columns that count, of rows so wide; those behind them have no probability
  const int64_t* targets;        // [rows]; one that is no column has no logit here
  float by;                      // what logits are multiplied by: one over the temperature
};

template <bool kIsBf16>
Floats logits_at(Numbers<kIsBf16> x, int64_t at, int64_t columns) {
  if (at + kLanes <= columns) return x[at];
  Floats held = x.some(at, columns - at);
  for (int64_t i = columns - at; i < kLanes; ++i) held[i] = -std::numeric_limits<float>::infinity();
  return held;
}

template <bool kIsBf16>
void row_sums(const Logits& call, float* lse, float* score, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < call.rows; ++row) {
    const Numbers<kIsBf16> x = Numbers<kIsBf16>(call.at) + row * call.width;
    Floats most = all(-std::numeric_limits<float>::infinity());
    for (int64_t c = 0; c < call.columns; c += kLanes) most = larger(most, logits_at(x, c, call.columns));
    const float top = largest(most) * call.by;
    Floats sum{};
    for (int64_t c = 0; c < call.columns; c += kLanes) {
      sum += exponential(logits_at(x, c, call.columns) * call.by - top);
    }
    lse[row] = call.columns > 0 ? top + std::log(total(sum)) : top;
    const int64_t target = call.targets[row];
    score[row] = target >= 0 && target < call.columns ? x.some(target, 1)[0] * call.by : 0.0f;
  }
}

template <bool kIsBf16>
void row_gradients(const Logits& call, const float* lse, const float* factor, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < call.rows; ++row) {
    const Numbers<kIsBf16> x = Numbers<kIsBf16>(call.at) + row * call.width;
    const int64_t target = call.targets[row];
    const bool is_here = target >= 0 && target < call.columns;
    const float slope = factor[row] * call.by;
    const Floats score = is_here ? x.some(target, 1) : Floats{};
    for (int64_t c = 0; c < call.width; c += kLanes) {
      const int64_t here = std::min<int64_t>(kLanes, call.width - c);
      Floats p{};
      if (slope != 0.0f && c < call.columns) {
        p = exponential(logits_at(x, c, call.columns) * call.by - lse[row]) * slope;
      }
      here == kLanes ? x.put(c, p) : x.put_some(c, here, p);
    }
    if (is_here && slope != 0.0f) x.put_some(target, 1, (exponential(score * call.by - lse[row]) - 1.0f) * slope);
  }
}

}  // namespace superstep
