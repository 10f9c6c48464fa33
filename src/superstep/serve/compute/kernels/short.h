// Weights of bf16 in three quarters of their bytes, to the bit: a token's time is that of reading them.
//
// The weights of 64 outputs nearly all have one of 16 neighbouring exponents (that of the largest and those below it:
// Zhang 2025, DFloat11, finds the same of whole models). So a sign, 7 bits of fraction and 4 of exponent are kept. A step
// of a panel is 4 registers of 32 weights: three lie in 12 bits of the words of three registers, the fourth in the 4 bits
// that these leave. A step that holds another exponent is kept whole, beside the panels.

#pragma once

#include "tile.h"

namespace superstep {

constexpr int64_t kWords = 2 * kPanel;      // weights of a step of a panel
constexpr int64_t kShortWords = 96;         // words that they take
constexpr int64_t kBlockSteps = 32;         // of a panel, that are made long at once: they stay in the first cache
constexpr int64_t kAhead = 4096;            // bytes, asked of the memory before they are needed
constexpr int kExponents = 16;
constexpr uint16_t kSign = 0x8000, kLeft = 0x7800;  // in the words of three registers: the sign, and what belongs to the fourth

// What panels of short weights have beside them.
struct Short {
  const uint16_t* base;        // [P]: the least exponent of a panel, in its place in a number; null where weights are long
  const int64_t* whole_begin;  // [P + 1]: where the whole steps of a panel begin in the next two
  const int32_t* whole_steps;
  const bf16* whole;           // [.., 128]
};

// A step of a panel, long.
inline __attribute__((always_inline)) void lengthen(const uint16_t* from, __m512i base, __m512i (&to)[kRegisters]) {
  const auto every = [](uint16_t bits) { return _mm512_set1_epi16(static_cast<int16_t>(bits)); };
  const auto add_bits = [](__m512i sum, __m512i x, __m512i mask) { return _mm512_ternarylogic_epi32(sum, x, mask, 0xF8); };
  __m512i of[3];
  times<3>([&]<int n>() __attribute__((always_inline)) {
    of[n] = _mm512_loadu_si512(from + 32 * n);
    to[n] = _mm512_add_epi16(_mm512_andnot_si512(every(kLeft), of[n]), base);
  });
  __m512i fourth = _mm512_and_si512(_mm512_srli_epi16(of[0], 11), every(0x000F));
  fourth = add_bits(fourth, _mm512_srli_epi16(of[1], 7), every(0x00F0));
  fourth = add_bits(fourth, _mm512_srli_epi16(of[2], 3), every(0x0700));
  fourth = add_bits(fourth, _mm512_slli_epi16(of[2], 1), every(kSign));
  to[3] = _mm512_add_epi16(fourth, base);
}

// Some steps of a panel of so many, long: [count, 128].
inline void lengthen(const void* panels, const Short& shorts, int64_t panel, int64_t steps, int64_t first, int64_t count,
                     bf16* to) {
  const uint16_t* from = static_cast<const uint16_t*>(panels) + (panel * steps + first) * kShortWords;
  const __m512i base = _mm512_set1_epi16(static_cast<int16_t>(shorts.base[panel]));
  for (int64_t k = 0; k < count; ++k, from += kShortWords) {
    for (int n = 0; n < 3; ++n) _mm_prefetch(reinterpret_cast<const char*>(from + 32 * n) + kAhead, _MM_HINT_T0);
    __m512i step[kRegisters];
    lengthen(from, base, step);
    for (int n = 0; n < kRegisters; ++n) _mm512_store_si512(to + k * kWords + 32 * n, step[n]);
  }
  const int32_t* end = shorts.whole_steps + shorts.whole_begin[panel + 1];
  const int32_t* at = std::lower_bound(shorts.whole_steps + shorts.whole_begin[panel], end, first);
  for (; at < end && *at < first + count; ++at)
    std::memcpy(to + (*at - first) * kWords, shorts.whole + (at - shorts.whole_steps) * kWords, 2 * kWords);
}

inline int exponent_of(bf16 x) { return x >> 7 & 0xFF; }

inline bool is_whole(const bf16* step, int base) {
  for (int64_t i = 0; i < kWords; ++i)
    if (static_cast<unsigned>(exponent_of(step[i]) - base) >= kExponents) return true;
  return false;
}

// The least of the 16 exponents that most weights of a panel have.
inline int base_of(const bf16* panel, int64_t steps) {
  int64_t of[256] = {}, now = 0, most = -1;
  for (int64_t i = 0; i < steps * kWords; ++i) ++of[exponent_of(panel[i])];
  int base = 0;
  for (int e = 0; e < 256; ++e) {
    now += of[e] - (e < kExponents ? 0 : of[e - kExponents]);
    if (e >= kExponents - 1 && now > most) most = now, base = e - kExponents + 1;
  }
  return base;
}

inline void shorten(const bf16* step, int base, uint16_t* to) {
  const auto less = [=](int64_t i) { return static_cast<uint16_t>((step[i] & kSign) | ((step[i] & 0x7FFF) - (base << 7))); };
  for (int64_t i = 0; i < 32; ++i) {
    const uint16_t fourth = less(96 + i);
    to[i] = less(i) | (fourth & 0x000F) << 11;
    to[32 + i] = less(32 + i) | (fourth >> 4 & 0x000F) << 11;
    to[64 + i] = less(64 + i) | (fourth >> 8 & 0x0007) << 11 | (fourth >> 15) << 14;
  }
}

}  // namespace superstep
