// Weights in blocks of 64 with one constant of 8 bits, and one scale for 256 blocks of the whole matrix: unpacked as
// level * (constant * scale), rounded once.
//
//   nf4    constant, 32 bytes: the low halves are codes 0 to 31, the high ones 32 to 63
//   int8   constant, 64 signed codes

#pragma once

#include "numbers.h"

namespace superstep {

constexpr int64_t kBlock = 64, kGroup = 256;

alignas(64) constexpr float kNf4[kLanes] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// The levels of sixteen codes, a byte each, shifted right first.
inline Floats levels_of(const uint8_t* codes, int shift) {
#ifdef __AVX512F__
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32(wide, shift), _mm512_load_ps(kNf4));
#else
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = kNf4[(codes[i] >> shift) & 15];
  return out;
#endif
}

inline Floats signed_codes(const uint8_t* codes) {
  typedef int8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(codes), Floats);
}

template <bool kIsBf16, bool kIsNf4>
void unpack_block(const uint8_t* block, float scale, Numbers<kIsBf16> out) {
  const Floats step = all(static_cast<float>(block[0]) * scale);
  const uint8_t* codes = block + 1;
  for (int64_t at = 0; at < kBlock; at += kLanes) {
    if constexpr (kIsNf4) {
      const bool is_high = at >= kBlock / 2;
      out.put(at, levels_of(codes + at % (kBlock / 2), is_high ? 4 : 0) * step);
    } else {
      out.put(at, signed_codes(codes + at) * step);
    }
  }
}

// `rows` rows of `blocks` blocks; the first is block `number` of the whole, whose rows have `whole` blocks.
template <bool kIsBf16, bool kIsNf4>
void unpack_blocks(const uint8_t* packed, const float* scales, void* out_at, int64_t rows, int64_t blocks,
                   int64_t number, int64_t whole, int64_t threads) {
  constexpr int64_t bytes = kIsNf4 ? kBlock / 2 + 1 : kBlock + 1;
  const Numbers<kIsBf16> out(out_at);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t at = row * blocks + block;
      const float scale = scales[(number + row * whole + block) / kGroup];
      unpack_block<kIsBf16, kIsNf4>(packed + at * bytes, scale, out + at * kBlock);
    }
}

}  // namespace superstep
