// Attention of bf16, two numbers at a time: how factors are laid out as words, and what a block's queries see.
//
// Scores lie with a key to a row and a query to a column. So what is of a query, its largest score, its sum, its share of
// the gradients, is a number in a register's lane, and no register is ever summed across.

#pragma once

#include "attention.h"
#include "tiles.h"

namespace superstep {

constexpr int64_t kSide = 64;                      // queries and keys of a block
constexpr int64_t kHalf = kSide / 2;               // words of a row of as many numbers
constexpr int64_t kGroups = kSide / kLanes;        // registers of a row
constexpr float kLog2OfE = 1.44269504f;

// 2 to the power of x, to 2.9 millionths, and 1 of 0: a polynomial of what lies above the next whole number below.
inline Floats power_of_two(Floats x) {
#ifdef __AVX512DQ__
  constexpr int kAboveFloor = 0x09;
  const Floats r = (Floats)_mm512_reduce_ps((__m512)x, kAboveFloor);
#else
  x = larger(x, all(-126.0f));
  const Ints cut = __builtin_convertvector(x, Ints), whole = cut + (__builtin_convertvector(cut, Floats) > x);
  const Floats r = x - __builtin_convertvector(whole, Floats);
#endif
  Floats p = r * 1.342668724e-02f + 5.224246943e-02f;
  p = p * r + 2.412802070e-01f;
  p = p * r + 6.930448446e-01f;
  p = p * r + 1.0f;
#ifdef __AVX512DQ__
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return x > all(-126.0f) ? p * floats((Words)(whole + 127) << 23) : Floats{};
#endif
}

// Numbers of two rows become words of bf16, to the nearest: the first row's are the low halves.
inline Words paired(Floats low, Floats high) {
  return ((bits(low) + 0x8000u) >> 16) | ((bits(high) + 0x8000u) & 0xFFFF0000u);
}

// The numbers of a key head or of a block of queries, as words. What is not there is 0.

// Left factors [row, words of the width].
inline void lay_rows(const Rows<true>& from, int64_t rows, int64_t end, int64_t width, int64_t words, Word* to) {
  for (int64_t r = 0; r < end; ++r, to += words) {
    if (r < rows) std::memcpy(to, from.row(r), 2 * width);
    std::fill(to + (r < rows ? width / 2 : 0), to + words, 0);
  }
}

// Two neighbouring rows' words, 16 columns from d; the first behind `rows` is 0.
inline Words pair_of(const Rows<true>& from, int64_t r, int64_t rows, int64_t d) {
  const auto half = [&](int64_t at) {
    return at < rows ? __builtin_convertvector(*reinterpret_cast<const Halves*>(from.row(at) + d), Words) : Words{};
  };
  return half(r) | half(r + 1) << 16;
}

// Right factors that are summed over rows: [64 / 2, width].
inline void lay_pairs(const Rows<true>& from, int64_t rows, int64_t width, int64_t wide, Word* to) {
  for (int64_t r = 0; r < kSide; r += 2, to += wide)
    for (int64_t d = 0; d < wide; d += kLanes)
      *reinterpret_cast<Words*>(to + d) = d < width ? pair_of(from, r, rows, d) : Words{};
}

// Left factors that are summed over rows: [width, 64 / 2] of each block.
inline void lay_turned(const Rows<true>& from, int64_t rows, int64_t width, int64_t wide, Word* to) {
  for (int64_t begin = 0; begin < rows; begin += kSide, to += wide * kHalf)
    for (int64_t d = 0; d < wide; d += kLanes)
      for (int64_t at = 0; at < kHalf; at += kLanes) {
        Words x[kLanes];
        for (int i = 0; i < kLanes; ++i) x[i] = d < width ? pair_of(from, begin + 2 * (at + i), rows, d) : Words{};
        turn_over(x);
        for (int i = 0; i < kLanes; ++i) *reinterpret_cast<Words*>(to + (d + i) * kHalf + at) = x[i];
      }
}

// Right factors that are summed over the width: [word of the width, 64].
inline void lay_columns(const Rows<true>& from, int64_t rows, int64_t width, int64_t words, Word* to) {
  for (int64_t w = 0; w < words; w += kLanes)
    for (int64_t r = 0; r < kSide; r += kLanes) {
      Words x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x[i] = Words{};
        if (r + i < rows) std::memcpy(&x[i], from.words(r + i) + w, 4 * std::min<int64_t>(kLanes, width / 2 - w));
      }
      turn_over(x);
      for (int i = 0; i < kLanes; ++i) *reinterpret_cast<Words*>(to + (w + i) * kSide + r) = x[i];
    }
}

// Sums [width, 64] back as rows, each column times a number of its own.
inline void put_columns(const float* sums, const float* by, int64_t rows, int64_t width, const Rows<true>& to) {
  for (int64_t d = 0; d < width; d += kLanes)
    for (int64_t r = 0; r < rows; r += kLanes) {
      Words x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = bits(load(sums + (d + i) * kSide + r) * load(by + r));
      turn_over(x);
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, rows - r); ++i) to.store16(r + i, d, floats(x[i]));
    }
}

// What a block's queries see, a query to a lane: those behind the last see all, of what is nothing.
struct Sight {
  Ints first[kGroups], end[kGroups];
  int64_t low, high, all_from, all_to;  // blocks of keys begin at low; all queries see the keys between the last two

  Sight(const Call& call, int64_t batch, int64_t begin, int64_t rows) {
    const Seen seen(call, batch, begin, rows);
    low = seen.low, high = seen.high;
    all_from = 0, all_to = call.keys;
    for (int64_t r = 0; r < kSide; ++r) {
      const int64_t from = r < rows ? seen.first[r] : 0, to = r < rows ? seen.end[r] : call.keys;
      first[r / kLanes][r % kLanes] = static_cast<int32_t>(from);
      end[r / kLanes][r % kLanes] = static_cast<int32_t>(to);
      all_from = std::max(all_from, from);
      all_to = std::min(all_to, to);
    }
  }

  bool is_whole(int64_t key) const { return key >= all_from && key + kSide <= all_to; }
  Floats hide(Floats x, int64_t key, int64_t group) const {
    const Ints at = Ints{} + static_cast<int32_t>(key);
    return ((at >= first[group]) & (at < end[group])) ? x : all(-std::numeric_limits<float>::infinity());
  }
};

}  // namespace superstep
