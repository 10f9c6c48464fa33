// AdamW of moments in 8 bits: a block of 256 numbers is decoded, updated and encoded in registers and its cache lines.
// Plain C to its callers. Each operation rounds once, in the order of kernels/blocks/dynamic_map.py and of
// numerics/update_rules.py: it is compiled without contraction, and its bits are theirs.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "vector.h"

namespace superstep {

constexpr int kBlock = 256;
constexpr int kBorders = 8;
constexpr float kLeastScale = 0x1p-120f;  // a block of smaller numbers is zero

typedef uint8_t Codes __attribute__((vector_size(16), aligned(1), may_alias));

inline Floats root(Floats x) {
#ifdef __AVX512F__
  return (Floats)_mm512_sqrt_ps((__m512)x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

inline Floats nearest(Floats x) {
#ifdef __AVX512F__
  return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = std::nearbyint(x[i]);
  return x;
#endif
}

inline Floats magnitude(Floats x) { return floats(bits(x) & 0x7FFFFFFFu); }

// The tables of a dynamic map: five by level, and by the exponent of a quotient from 2^-31 to 1 the level of its lower
// numbers, and the border from which the next one begins. A binade has at most one border, as decades are wider.
struct Map {
  static constexpr uint32_t kLeast = 96u << 23;  // 2^-31
  Floats offset, step, inverse, shift, last;
  Ints levels[2];
  Floats borders[2];

  explicit Map(const float* at)
      : offset(load(at)), step(load(at + 16)), inverse(load(at + 32)), shift(load(at + 48)), last(load(at + 64)) {
    for (int i = 0; i < 2 * kLanes; ++i) {
      const Floats low = floats(Words{} + (kLeast + (uint32_t(i) << 23)));
      int level = 0;
      while (level < kBorders && low[0] >= at[80 + level]) ++level;
      levels[i / kLanes][i % kLanes] = level;
      borders[i / kLanes][i % kLanes] = level < kBorders ? at[80 + level] : std::numeric_limits<float>::infinity();
    }
  }
};

#ifdef __AVX512CD__
inline Ints widened(const uint8_t* codes) { return (Ints)_mm512_cvtepu8_epi32(*reinterpret_cast<const __m128i_u*>(codes)); }
inline Floats look_up(const Floats& table, Ints level) {
  return (Floats)_mm512_permutexvar_ps((__m512i)level, (__m512)table);
}
inline Ints bit_length(Ints x) { return 32 - (Ints)_mm512_lzcnt_epi32((__m512i)x); }
inline Ints level_of(Floats size, const Map& map) {
  const __m512 above = _mm512_max_ps((__m512)size, _mm512_castsi512_ps(_mm512_set1_epi32(Map::kLeast)));
  const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(above), 23);  // its five low bits count
  const __m512i level = _mm512_permutex2var_epi32((__m512i)map.levels[0], exponent, (__m512i)map.levels[1]);
  const __m512 border = _mm512_permutex2var_ps((__m512)map.borders[0], exponent, (__m512)map.borders[1]);
  const __mmask16 is_next = _mm512_cmp_ps_mask(above, border, _CMP_GE_OQ);
  return (Ints)_mm512_mask_add_epi32(level, is_next, level, _mm512_set1_epi32(1));
}
#else
inline Ints widened(const uint8_t* codes) {
  return __builtin_convertvector(*reinterpret_cast<const Codes*>(codes), Ints);
}
inline Floats look_up(const Floats& table, Ints level) {
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = table[level[i]];
  return out;
}
inline Ints bit_length(Ints x) {
  for (int i = 0; i < kLanes; ++i) x[i] = std::bit_width(uint32_t(x[i]));
  return x;
}
inline Ints level_of(Floats size, const Map& map) {
  Ints out;
  for (int i = 0; i < kLanes; ++i) {
    const Floats above = larger(size, floats(Words{} + Map::kLeast));
    const uint32_t at = (bits(above)[i] >> 23) & 31u;
    out[i] = map.levels[at / kLanes][at % kLanes] + (above[i] >= map.borders[at / kLanes][at % kLanes]);
  }
  return out;
}
#endif

template <bool kIsSigned>
inline Floats decoded(const uint8_t* at, const Map& map) {
  Ints rank = widened(at);
  Ints is_negative{};
  if (kIsSigned) {
    rank -= 127;
    is_negative = rank >> 31;
    rank = (rank ^ is_negative) - is_negative;
  }
  const Ints level = kIsSigned ? bit_length(rank) : bit_length(rank + 1) - 1;
  const Floats value = __builtin_convertvector(rank, Floats) * look_up(map.step, level) + look_up(map.offset, level);
  return kIsSigned ? floats(bits(value) | (Words(is_negative) & 0x80000000u)) : value;
}

template <bool kIsSigned>
inline void encode(Floats y, const Map& map, uint8_t* at) {
  const Floats size = magnitude(y);
  const Ints level = level_of(size, map);
  Floats rank = nearest(size * look_up(map.inverse, level) + look_up(map.shift, level));
  const Floats last = look_up(map.last, level);
  rank = rank < last ? rank : last;
  if (kIsSigned) {
    const Floats most = all(127.0f);
    rank = (y < 0.0f ? -(rank < most ? rank : most) : rank) + most;
  }
  *reinterpret_cast<Codes*>(at) = __builtin_convertvector(__builtin_convertvector(rank, Ints), Codes);
}

// A block of a moment in fp32, and the bits of its largest magnitudes: those of NaN are above all others.
struct Decoded {
  alignas(64) float values[kBlock];
  Words largest{};

  void put(int at, Floats x) {
    store(values + at, x);
    const Words size = bits(magnitude(x));
    largest = size > largest ? size : largest;
  }

  template <bool kIsSigned>
  void encode_into(uint8_t* codes, float* scale, const Map& map) const {
    uint32_t word = 0;
    for (int i = 0; i < kLanes; ++i) word = std::max(word, largest[i]);
    float most;
    std::memcpy(&most, &word, 4);
    const bool is_finite = word < 0x7F800000u;
    if (!is_finite || most < kLeastScale) {
      std::memset(codes, kIsSigned ? 127 : 0, kBlock);
      *scale = is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      return;
    }
    const float inverse = 1.0f / most;
    for (int i = 0; i < kBlock; i += kLanes) encode<kIsSigned>(load(values + i) * inverse, map, codes + i);
    *scale = most;
  }
};

struct Moment {
  uint8_t* codes;
  float* scales;
  Map map;
};

struct AdamW {
  float scale, beta1, rest1, beta2, rest2, root_by, eps, keep, rate;
};

inline void update_block(float* param, const float* grad, const Moment& first, const Moment& second, int64_t block,
                         const AdamW& by) {
  const int64_t start = block * kBlock;
  const float scale1 = first.scales[block], scale2 = second.scales[block];
  Decoded m, v;
  for (int i = 0; i < kBlock; i += kLanes) {
    const int64_t at = start + i;
    const Floats g = load(grad + at) / by.scale;
    const Floats m_now = decoded<true>(first.codes + at, first.map) * scale1 * by.beta1 + g * by.rest1;
    const Floats v_now = decoded<false>(second.codes + at, second.map) * scale2 * by.beta2 + g * g * by.rest2;
    m.put(i, m_now), v.put(i, v_now);
    store(param + at, load(param + at) * by.keep - m_now / (root(v_now) * by.root_by + by.eps) * by.rate);
  }
  m.encode_into<true>(first.codes + start, first.scales + block, first.map);
  v.encode_into<false>(second.codes + start, second.scales + block, second.map);
}

}  // namespace superstep

using namespace superstep;

extern "C" {

void superstep_update_blocks(float* param, const float* grad, uint8_t* first, float* first_scales,
                             const float* first_map, uint8_t* second, float* second_scales, const float* second_map,
                             int64_t blocks, const float* numbers, int64_t threads) {
  const Moment m{first, first_scales, Map(first_map)}, v{second, second_scales, Map(second_map)};
  AdamW by;
  std::memcpy(&by, numbers, sizeof(by));
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t block = 0; block < blocks; ++block) update_block(param, grad, m, v, block, by);
}

}  // extern "C"
