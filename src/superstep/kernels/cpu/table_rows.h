// Chosen rows of a table [rows, width]: added to, squared, updated. Each row is summed in one order, whatever the others.

#pragma once

#include <algorithm>
#include <cmath>

#include "numbers.h"

namespace superstep {

struct Rows {
  static constexpr int64_t kAhead = 8;
  const int64_t* chosen;
  int64_t count, width;

  // The row that is `kAhead` behind row i.
  void prefetch(const float* table, int64_t i) const {
    if (i + kAhead < count)
      for (int64_t j = 0; j < width; j += kLanes) __builtin_prefetch(table + chosen[i + kAhead] * width + j, 1);
  }

  template <class Each>
  void each(Each work) const {
    for (int64_t i = 0; i < count; ++i) work(i, chosen[i] * width);
  }
};

inline void add_rows(float* table, const Rows& rows, const float* values, int64_t stride) {
  rows.each([&](int64_t i, int64_t at) {
    rows.prefetch(table, i);
    for (int64_t j = 0; j < rows.width; ++j) table[at + j] += values[i * stride + j];
  });
}

// Lanes are summed first, then over them by halves: element j is in lane j % 16.
inline float square_of(const float* row, int64_t width) {
  Floats sum{};
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) {
    const Floats x = load(row + j);
    sum += x * x;
  }
  if (j < width) {
    Floats x{};
    std::memcpy(&x, row + j, (width - j) * sizeof(float));
    sum += x * x;
  }
  return total(sum);
}

inline double square_rows(const float* table, const Rows& rows) {
  double sum = 0;
  rows.each([&](int64_t, int64_t at) { sum += square_of(table + at, rows.width); });
  return sum;
}

// w = w - lr min(1, most / |g / scale|) g / scale; gradients lie like the table, or packed: those of the chosen rows.
inline void update_rows(float* table, const float* grads, bool is_packed, const Rows& rows, float lr, float scale,
                        float most) {
  rows.each([&](int64_t i, int64_t at) {
    rows.prefetch(table, i);
    const float* const g = grads + (is_packed ? i * rows.width : at);
    const float norm = std::sqrt(square_of(g, rows.width)) / scale;
    const float by = norm > most ? lr * (most / norm) / scale : lr / scale;
    for (int64_t j = 0; j < rows.width; ++j) table[at + j] -= by * g[j];
  });
}

// Chosen rows of a table next to each other in `packed`, and zeros in their places; and back.
inline void cut_rows(float* table, const Rows& rows, float* packed) {
  rows.each([&](int64_t i, int64_t at) {
    rows.prefetch(table, i);
    std::copy_n(table + at, rows.width, packed + i * rows.width);
    std::fill_n(table + at, rows.width, 0.0f);
  });
}

inline void put_rows(float* table, const Rows& rows, const float* packed) {
  rows.each([&](int64_t i, int64_t at) {
    rows.prefetch(table, i);
    std::copy_n(packed + i * rows.width, rows.width, table + at);
  });
}

inline void zero_rows(float* table, const Rows& rows) {
  rows.each([&](int64_t, int64_t at) { std::fill_n(table + at, rows.width, 0.0f); });
}

}  // namespace superstep
