// The one loop that all products are made of, and the small things around it.
//
// A register holds 16 columns of a product, and of each column the 4 bytes that one instruction multiplies: two numbers
// of bf16 or four of 8 bits. Weights, keys and values lie so in memory. Every sum has one order, that of its inputs,
// whatever else is computed beside it: a row's bits do not depend on the other rows.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

namespace superstep {

constexpr int kRows = 6;        // of a tile: 6 times 4 sums, 4 columns and an input are 29 of 32 registers
constexpr int kRegisters = 4;   // side by side
constexpr int kLanes = 16;      // columns of a register
constexpr int kPanel = kRegisters * kLanes;

using bf16 = uint16_t;

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m512 load(const bf16* at, __mmask16 lanes = 0xFFFF) { return widen(_mm256_maskz_loadu_epi16(lanes, at)); }
inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline void store(bf16* at, __m512 x, __mmask16 lanes = 0xFFFF) { _mm256_mask_storeu_epi16(at, lanes, narrow(x)); }
inline __m512 rounded(__m512 x) { return widen(narrow(x)); }

// The lanes of a register that begins at `at` which lie before `end`.
inline __mmask16 lanes_before(int64_t end, int64_t at) {
  const int64_t left = end - at;
  return left >= kLanes ? 0xFFFF : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
}

// e to the power of x: 2^n times a polynomial of the rest (Cephes' expf; 2 units in the last place). Below -87 it is
// that of -87, above 88 that of 88; of two operands these give the second where one is no number.
inline __m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// Written as instructions: told in intrinsics, compilers keep sums in two places and columns in memory.
struct Bf16 {
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static void add(Sum& sum, __m512i a, __m512i b) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
};

struct Int8 {
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  static void add(Sum& sum, __m512i a, __m512i b) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
};

// Calls f<0>(), f<1>() ... with numbers that the compiler knows, so that arrays become registers.
template <int Count, class F>
inline __attribute__((always_inline)) void times(F f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) { (f.template operator()<I>(), ...); }
  (std::make_integer_sequence<int, Count>{});
}

// sums[r][n] += row r times column register n, 4 bytes of each row a step; at(k, n) is where step k of register n lies.
template <class Kind, int R, int N, class At>
inline __attribute__((always_inline)) void add_tile(typename Kind::Sum (&sums)[R][N], const void* rows, int64_t stride,
                                                    int64_t steps, At at) {
  const char* from = static_cast<const char*>(rows);
  typename Kind::Sum of[R][N];
  times<R * N>([&]<int i>() __attribute__((always_inline)) { of[i / N][i % N] = sums[i / N][i % N]; });
  for (int64_t k = 0; k < steps; ++k) {
    __m512i columns[N];
    times<N>([&]<int n>() __attribute__((always_inline)) { columns[n] = _mm512_loadu_si512(at(k, n)); });
    times<R>([&]<int r>() __attribute__((always_inline)) {
      int32_t four;
      std::memcpy(&four, from + r * stride + 4 * k, 4);
      const __m512i input = _mm512_set1_epi32(four);
      times<N>([&]<int n>() __attribute__((always_inline)) { Kind::add(of[r][n], input, columns[n]); });
    });
  }
  times<R * N>([&]<int i>() __attribute__((always_inline)) { sums[i / N][i % N] = of[i / N][i % N]; });
}

// Calls do_tile<R>(first) for groups of neighbouring rows, of as even a size as can be.
template <class Do>
inline void in_tiles(int64_t begin, int64_t end, Do do_tile) {
  const int64_t groups = (end - begin + kRows - 1) / kRows;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = begin + (end - begin) * g / groups, last = begin + (end - begin) * (g + 1) / groups;
    switch (last - first) {
      case 1: do_tile.template operator()<1>(first); break;
      case 2: do_tile.template operator()<2>(first); break;
      case 3: do_tile.template operator()<3>(first); break;
      case 4: do_tile.template operator()<4>(first); break;
      case 5: do_tile.template operator()<5>(first); break;
      case 6: do_tile.template operator()<6>(first); break;
    }
  }
}

// The threads that share a call. All of them come by every barrier, and by every share in turn.
class Team {
 public:
  Team(int64_t id, int64_t size, std::atomic<int64_t>* taken) : id(id), size(size), taken_(taken) {}

  int64_t begin(int64_t total) const { return total * id / size; }
  int64_t end(int64_t total) const { return total * (id + 1) / size; }

  // Calls do_task(n) for this thread's share of some tasks, neighbours one after the other, and then for what is left of
  // the others': a thread may have lost its core to another program.
  template <class Do>
  void share(int64_t tasks, Do do_task) {
    std::atomic<int64_t>* taken = taken_;
    taken_ += size;
    for (int64_t other = 0; other < size; ++other) {
      const Team whose((id + other) % size, size, nullptr);
      const int64_t begin = whose.begin(tasks), count = whose.end(tasks) - begin;
      while (taken[whose.id].load(std::memory_order_relaxed) < count) {
        const int64_t at = taken[whose.id].fetch_add(1, std::memory_order_relaxed);
        if (at < count) do_task(begin + at);
      }
    }
  }

  void wait() const {
#pragma omp barrier
  }

  const int64_t id, size;

 private:
  std::atomic<int64_t>* taken_;  // of each thread's share, for this share and those to come
};

template <class Do>
inline void with_team(int64_t threads, int64_t shares, Do work) {
  const std::unique_ptr<std::atomic<int64_t>[]> taken(new std::atomic<int64_t>[shares * threads]());
#pragma omp parallel num_threads(threads)
  {
    Team team(omp_get_thread_num(), omp_get_num_threads(), taken.get());
    work(team);
  }
}

}  // namespace superstep
