// What adapters add to products: out += scale * B (A x), for the rows that have one (Hu 2021).
//
//   T  rows     I  inputs     O  outputs     R  rank

#pragma once

#include "tile.h"

namespace superstep {

constexpr int64_t kMostRanks = 512;  // at once

// Of one adapter, for one linear. Its sums are made in the order of the inputs, then of the ranks, for each row alone.
struct LowRank {
  const bf16* a;  // [R, I]; null where the adapter adds nothing here
  const bf16* b;  // [R, O]
  int64_t rank;
  double scale;
};

// Of all adapters of a step.
struct Adapted {
  const LowRank* parts;   // [layers, 7, count]
  int64_t count;          // 0 where no row has one
  const int64_t* of_row;  // which of them each row has; -1 is none

  const LowRank* of(int64_t layer, int64_t linear, int64_t row) const {
    const LowRank* found = of_row[row] < 0 ? nullptr : parts + (layer * 7 + linear) * count + of_row[row];
    return found && found->a ? found : nullptr;
  }
};

inline float dot(const bf16* a, const bf16* x, int64_t inputs) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const __mmask16 lanes = lanes_before(inputs, i);
    sum = _mm512_fmadd_ps(load(a + i, lanes), load(x + i, lanes), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

// One row's addition; the sum over ranks is rounded once, together with what was there, but for very many ranks.
inline void add_low_rank(const LowRank& part, const bf16* x, int64_t inputs, bf16* out, int64_t outputs) {
  float inner[kMostRanks];
  for (int64_t first = 0; first < part.rank; first += kMostRanks) {
    const int64_t ranks = std::min(kMostRanks, part.rank - first);
    for (int64_t r = 0; r < ranks; ++r)
      inner[r] = static_cast<float>(part.scale) * dot(part.a + (first + r) * inputs, x, inputs);
    for (int64_t o = 0; o < outputs; o += kLanes) {
      const __mmask16 lanes = lanes_before(outputs, o);
      __m512 sum = _mm512_setzero_ps();
      for (int64_t r = 0; r < ranks; ++r)
        sum = _mm512_fmadd_ps(_mm512_set1_ps(inner[r]), load(part.b + (first + r) * outputs + o, lanes), sum);
      store(out + o, _mm512_add_ps(load(out + o, lanes), sum), lanes);
    }
  }
}

}  // namespace superstep
