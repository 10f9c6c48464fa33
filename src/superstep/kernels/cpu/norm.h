// RMSNorm of rows, and its gradient (Zhang 2019):
//
//   y = w x r,  r = 1 / sqrt(mean(x^2) + eps)
//   dx = r (g w) - x r^3 sum(g w x) / D,  dw = sum over rows of g x r

#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "grid.h"
#include "numbers.h"

namespace superstep {

// Rows of a task: its share of dw is summed by itself, so that the number of threads changes no bit.
constexpr int64_t kNormRows = 128;

template <bool kIsBf16>
void norm(const void* x_at, const void* w_at, void* y_at, float* r_at, int64_t rows, int64_t width, float eps,
          int64_t threads) {
  const Numbers<kIsBf16> w(w_at);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const Numbers<kIsBf16> x = Numbers<kIsBf16>(x_at) + row * width, y = Numbers<kIsBf16>(y_at) + row * width;
    Floats sum{}, other{};
    int64_t d = 0;
    for (; d + 2 * kLanes <= width; d += 2 * kLanes) {
      const Floats a = x[d], b = x[d + kLanes];
      sum += a * a;
      other += b * b;
    }
    if (d < width) sum += x[d] * x[d];
    const float r = 1.0f / std::sqrt(total(sum + other) / static_cast<float>(width) + eps);
    r_at[row] = r;
    for (d = 0; d < width; d += kLanes) y.put(d, x[d] * r * w[d]);
  }
}

// One row's dx; its share of dw goes to `give`, sixteen numbers at a time.
template <bool kIsBf16, class Give>
inline void norm_backward_row(Numbers<kIsBf16> g, Numbers<kIsBf16> x, Numbers<kIsBf16> w, float r, Numbers<kIsBf16> dx,
                              int64_t width, Give give) {
  Floats sum{};
  for (int64_t d = 0; d < width; d += kLanes) {
    const Floats gx = g[d] * x[d];
    sum += gx * w[d];
    give(d, gx);
  }
  const float shift = total(sum) * r * r * r / static_cast<float>(width);
  for (int64_t d = 0; d < width; d += kLanes) dx.put(d, g[d] * w[d] * r - x[d] * shift);
}

template <bool kIsBf16>
void norm_backward(const void* g_at, const void* x_at, const void* w_at, const float* r_at, void* dx_at, float* dw,
                   int64_t rows, int64_t width, int64_t threads) {
  const Numbers<kIsBf16> w(w_at);
  const int64_t tasks = (rows + kNormRows - 1) / kNormRows;
  std::vector<float> shares(dw ? tasks * width : 0);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    float* share = dw ? shares.data() + task * width : nullptr;
    for (int64_t row = task * kNormRows; row < std::min(rows, (task + 1) * kNormRows); ++row) {
      const Numbers<kIsBf16> g = Numbers<kIsBf16>(g_at) + row * width, x = Numbers<kIsBf16>(x_at) + row * width;
      const Numbers<kIsBf16> dx = Numbers<kIsBf16>(dx_at) + row * width;
      const float r = r_at[row];
      norm_backward_row(g, x, w, r, dx, width, [&](int64_t d, Floats gx) {
        if (share) store(share + d, load(share + d) + gx * r);
      });
    }
  }
  if (!dw) return;
  std::memcpy(dw, shares.data(), width * sizeof(float));
  for (int64_t task = 1; task < tasks; ++task)
    for (int64_t d = 0; d < width; d += kLanes) store(dw + d, load(dw + d) + load(shares.data() + task * width + d));
}

// The same with exact mode's dw: each row's share is put on a grid, and added there; how many were no smaller in size than
// the limit, or are no numbers. `dw` is null where nobody asks for it.
template <bool kIsBf16>
int64_t norm_backward_on_grid(const void* g_at, const void* x_at, const void* w_at, const float* r_at, void* dx_at,
                              int64_t* dw, int64_t rows, int64_t width, float scale, float limit) {
  const Numbers<kIsBf16> w(w_at);
  const std::unique_ptr<float[]> share(new float[width]);
  int64_t wrong = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const Numbers<kIsBf16> g = Numbers<kIsBf16>(g_at) + row * width, x = Numbers<kIsBf16>(x_at) + row * width;
    const Numbers<kIsBf16> dx = Numbers<kIsBf16>(dx_at) + row * width;
    const float r = r_at[row];
    norm_backward_row(g, x, w, r, dx, width, [&](int64_t d, Floats gx) { store(share.get() + d, gx * r); });
    if (dw) wrong += add_run_to_grid(dw, share.get(), width, scale, limit);
  }
  return wrong;
}

}  // namespace superstep
