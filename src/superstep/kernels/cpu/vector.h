// Sixteen numbers at a time, in whatever registers the processor has: the compiler makes two of one where they are
// narrower. What a processor has an instruction for, and the language no word, is chosen here and nowhere else.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace superstep {

constexpr int kLanes = 16;

using bf16 = uint16_t;
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline void store(float* at, Floats x) { *reinterpret_cast<Floats*>(at) = x; }
inline Floats all(float x) { return x - Floats{}; }
inline Words bits(Floats x) { return reinterpret_cast<Words&>(x); }
inline Floats floats(Words x) { return reinterpret_cast<Floats&>(x); }

inline Floats widen(const bf16* at) {
  return floats(__builtin_convertvector(*reinterpret_cast<const Halves*>(at), Words) << 16);
}
inline float widen(bf16 x) {
  const uint32_t word = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &word, 4);
  return out;
}

// To the nearest, of two as near to the even one; nothing that comes here is no number.
inline Halves narrow(Floats x) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
  const Words w = bits(x);
  return __builtin_convertvector((w + 0x7FFFu + ((w >> 16) & 1u)) >> 16, Halves);
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float largest(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float out = x[0];
  for (int i = 1; i < kLanes; ++i) out = x[i] > out ? x[i] : out;
  return out;
#endif
}
inline float total(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
#endif
}

// Of each pair of rows that lie so far apart, the halves that are in each other's place change places.
template <uint32_t kApart, uint32_t... kAt>
inline void change_places(Words (&x)[kLanes], std::integer_sequence<uint32_t, kAt...>) {
#pragma GCC unroll 16
  for (uint32_t r = 0; r < kLanes; ++r)
    if (!(r & kApart)) {
      const Words a = x[r], b = x[r + kApart];
      x[r] = __builtin_shufflevector(a, b, (kAt & kApart ? kAt - kApart + kLanes : kAt)...);
      x[r + kApart] = __builtin_shufflevector(a, b, (kAt & kApart ? kAt + kLanes : kAt + kApart)...);
    }
}

// Sixteen rows of as many words become columns.
inline void turn_over(Words (&x)[kLanes]) {
  constexpr auto each = std::make_integer_sequence<uint32_t, kLanes>{};
  change_places<1>(x, each);
  change_places<2>(x, each);
  change_places<4>(x, each);
  change_places<8>(x, each);
}

// e to the power of x for x at most 88: 2^n times a polynomial of the rest (Cephes' expf, 2 units in the last place).
// Below -87 it is nothing.
inline Floats exponential(Floats x) {
  const Ints is_small = x < all(-87.0f);
  x = is_small ? all(-87.0f) : x;
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to a whole number
  const Floats shifted = x * 1.44269504f + magic, n = shifted - magic;
  Floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Words power = (bits(shifted) + 127u) << 23;  // the low bits of `shifted` are n
  return is_small ? Floats{} : p * floats(power);
}

}  // namespace superstep
