// A weight's gradient: the product of two tables of bf16, summed over their rows, is added to a buffer of fp32.
//
// Both have tokens as rows, and tiles want them as columns of one and as pairs in the other: each is laid out so once. 64
// rows of sums stay in the cache while they meet 256 tokens at a time; the buffer, which lies in memory, is read and
// written once, and what is added to it was summed by itself.

#pragma once

#include "paired.h"

namespace superstep {

constexpr int64_t kSlab = 128;   // words, of two tokens each, that meet at a time
constexpr int64_t kOuter = 64;   // rows of sums
constexpr int64_t kAcross = 512;  // their columns, at most

struct Outer {
  const bf16 *left, *right;  // [tokens, rows], [tokens, columns]
  int64_t left_row, right_row, tokens, rows, columns;
  float* into;  // [rows, columns]
  int64_t into_row;
  float scale;
};

// Columns of a table, 64 at most, as a left factor: [slab, column, word].
inline void lay_outer_left(const Rows<true>& from, int64_t tokens, int64_t columns, Word* to) {
  for (int64_t w = 0; 2 * w < tokens; w += kTile) {
    for (int64_t r = 0; r < 2 * kTile; ++r)  // a row has two lines of them: the processor does not see what comes next
      for (int64_t c = 0; c < columns; c += kFour)
        __builtin_prefetch(from.row(std::min(2 * (w + kTile) + r, tokens - 1)) + c);
    Word* slab = to + w / kSlab * kSlab * kOuter + w % kSlab;
    for (int64_t c = 0; c < columns; c += kTile) {
      Words x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = pair_of(from, 2 * (w + i), tokens, c);
      turn_over(x);
      for (int i = 0; i < kLanes; ++i) *reinterpret_cast<Words*>(slab + (c + i) * kSlab) = x[i];
    }
  }
}

// A word of all columns as a right factor: of each 32 columns [word, column].
inline void lay_outer_right(const Rows<true>& from, int64_t tokens, int64_t columns, int64_t w, int64_t words, Word* to) {
  for (int64_t c = 0; c < columns; c += kTile)
    *reinterpret_cast<Words*>(to + (c / kFour * words + w) * kFour + c % kFour) = pair_of(from, 2 * w, tokens, c);
}

// into += scale · left' · right. Rows and columns are multiples of 32.
inline void add_outer(const Outer& call, int64_t threads) {
  if (call.tokens == 0) return;  // an expert that got none
  const int64_t words = padded(call.tokens, 2 * kTile) / 2;
  const Rows<true> lefts{const_cast<bf16*>(call.left), call.left_row}, rights{const_cast<bf16*>(call.right), call.right_row};
  Room right(call.columns * words);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const Tiles tiles;
    Room left(kOuter * padded(words, kSlab)), sums(kOuter * kAcross);
#pragma omp for
    for (int64_t w = 0; w < words; ++w) lay_outer_right(rights, call.tokens, call.columns, w, words, right.words());
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < call.rows; row += kOuter) {
      const int64_t rows = std::min(kOuter, call.rows - row);
      lay_outer_left({lefts.at + row, lefts.stride}, call.tokens, rows, left.words());
      for (int64_t column = 0; column < call.columns; column += kAcross) {
        const int64_t columns = std::min(kAcross, call.columns - column);
        for (int64_t w = 0; w < words; w += kSlab)
          for (int64_t c = 0; c < columns; c += kFour)
            multiply_tiles(left.words() + w * kOuter, kSlab, right.words() + (column + c) * words + w * kFour, kFour, rows,
                           kFour, std::min(kSlab, words - w), sums.floats() + c * kOuter, kFour, w > 0);
        for (int64_t r = 0; r < rows; ++r) {
          float* into = call.into + (row + r) * call.into_row + column;
          for (int64_t c = 0; c < columns; c += kTile)
            store(into + c, load(into + c) + load(sums.floats() + c / kFour * kFour * kOuter + r * kFour + c % kFour) *
                                                 call.scale);
        }
      }
    }
  }
}

}  // namespace superstep
