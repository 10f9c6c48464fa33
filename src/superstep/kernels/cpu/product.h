// The one loop that all products of a kernel are made of: some rows of sums, 16 columns to a register.
//
// Inputs are counted in words of 4 bytes: one number of fp32, or two neighbouring ones of bf16, whose products go into
// one sum. So one loop serves both, and a product of bf16 is half as long.

#pragma once

#include "vector.h"

namespace superstep {

using Word = uint32_t;

constexpr int kRows = 6;       // of a tile: 6 times 4 sums, 4 columns and an input are 29 of 32 registers
constexpr int kRegisters = 4;  // side by side
constexpr int kPanel = kRegisters * kLanes;

// Left factors: row i, step k at `at[i * row + k * step]`.
struct Left {
  const Word* at;
  int64_t row, step;
};

// Right factors: step k, column c at `at[k * step + c]`.
struct Right {
  const Word* at;
  int64_t step;
};

template <bool kIsBf16>
inline Floats added(Floats sum, Word left, const Word* right) {
  if constexpr (!kIsBf16) {
    float x;
    std::memcpy(&x, &left, 4);
    return sum + x * load(reinterpret_cast<const float*>(right));
  } else {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(left)),
                                    (__m512bh)_mm512_loadu_si512(right));
#else
    const Words pairs = *reinterpret_cast<const Words*>(right);
    sum += widen(static_cast<bf16>(left)) * floats(pairs << 16);
    return sum + widen(static_cast<bf16>(left >> 16)) * floats(pairs & 0xFFFF0000u);
#endif
  }
}

template <bool kIsBf16, int kTileRows, int kColumns>
inline void tile(Left a, Right b, int64_t steps, float* out, int64_t out_row, bool adds) {
  Floats sums[kTileRows][kColumns];
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) sums[i][c] = Floats{};
  for (int64_t k = 0; k < steps; ++k) {
    const Word* right = b.at + k * b.step;
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; ++i) {
      const Word left = a.at[i * a.row + k * a.step];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) sums[i][c] = added<kIsBf16>(sums[i][c], left, right + c * kLanes);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      float* to = out + i * out_row + c * kLanes;
      store(to, adds ? load(to) + sums[i][c] : sums[i][c]);
    }
}

template <bool kIsBf16, int kColumns>
inline void rows_of(Left a, Right b, int64_t rows, int64_t steps, float* out, int64_t out_row, bool adds) {
  int64_t i = 0;
  auto at = [&](int64_t row) { return Left{a.at + row * a.row, a.row, a.step}; };
  for (; i + kRows <= rows; i += kRows)
    tile<kIsBf16, kRows, kColumns>(at(i), b, steps, out + i * out_row, out_row, adds);
  switch (rows - i) {
    case 1: tile<kIsBf16, 1, kColumns>(at(i), b, steps, out + i * out_row, out_row, adds); break;
    case 2: tile<kIsBf16, 2, kColumns>(at(i), b, steps, out + i * out_row, out_row, adds); break;
    case 3: tile<kIsBf16, 3, kColumns>(at(i), b, steps, out + i * out_row, out_row, adds); break;
    case 4: tile<kIsBf16, 4, kColumns>(at(i), b, steps, out + i * out_row, out_row, adds); break;
    case 5: tile<kIsBf16, 5, kColumns>(at(i), b, steps, out + i * out_row, out_row, adds); break;
  }
}

// out [rows, columns] = a · b, or that much more; columns is a multiple of 16. What is there is added to what was summed,
// and not summed upon: a long sum is one of short ones, and rounds the less.
template <bool kIsBf16>
inline void multiply(Left a, Right b, int64_t rows, int64_t columns, int64_t steps, float* out, int64_t out_row,
                     bool adds) {
  int64_t c = 0;
  auto at = [&](int64_t column) { return Right{b.at + column, b.step}; };
  for (; c + kPanel <= columns; c += kPanel)
    rows_of<kIsBf16, 4>(a, at(c), rows, steps, out + c, out_row, adds);
  switch ((columns - c) / kLanes) {
    case 1: rows_of<kIsBf16, 1>(a, at(c), rows, steps, out + c, out_row, adds); break;
    case 2: rows_of<kIsBf16, 2>(a, at(c), rows, steps, out + c, out_row, adds); break;
    case 3: rows_of<kIsBf16, 3>(a, at(c), rows, steps, out + c, out_row, adds); break;
  }
}

}  // namespace superstep
