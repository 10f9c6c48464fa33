// Attention of rows over keys in pages: what decoding does. Keys and values are read where they lie, once for all query
// heads that share them, and the softmax is made as they come (Milakov 2018), in blocks.
//
//   T  rows     N  query heads     K  key heads, each of G = N / K query heads     H  width of one head

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define HAS_BF16 1
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 64;      // keys between two looks at the largest score
constexpr int64_t kMostGroup = 16;  // query heads of a key head
constexpr int64_t kMostWidth = 256;

bool has_bf16() {
#ifdef HAS_BF16
  return true;
#else
  return false;
#endif
}

#ifdef HAS_BF16
// e to the power of x <= 0: 2^n times a polynomial of the rest (Cephes' expf; 2 units in the last place).
inline __m512 exp_512(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

inline __m512 widen(const at::BFloat16* at) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

struct Text {
  const at::BFloat16* keys;    // of this key head, at place 0
  const at::BFloat16* values;
  const int32_t* pages;
  int64_t page_tokens;
  int64_t stride;  // between two places
  int64_t first;   // the first place that is seen
  int64_t end;

  int64_t offset(int64_t place) const { return (pages[place / page_tokens] * page_tokens + place % page_tokens) * stride; }
};

void attend(const Text& text, const at::BFloat16* q, at::BFloat16* out, int64_t group, int64_t width, float scale) {
  alignas(64) float scores[kMostGroup][kBlock];
  alignas(64) float mixed[kMostGroup][kMostWidth] = {};
  float largest[kMostGroup], total[kMostGroup] = {};
  for (int64_t g = 0; g < group; ++g) largest[g] = -std::numeric_limits<float>::infinity();
  int64_t offsets[kBlock];
  for (int64_t begin = text.first; begin < text.end; begin += kBlock) {
    const int64_t count = std::min(kBlock, text.end - begin);
    for (int64_t j = 0; j < count; ++j) {
      offsets[j] = text.offset(begin + j);
      const at::BFloat16* key = text.keys + offsets[j];
      for (int64_t g = 0; g < group; ++g) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t h = 0; h < width; h += 32)
          sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(q + g * width + h), (__m512bh)_mm512_loadu_si512(key + h));
        scores[g][j] = _mm512_reduce_add_ps(sum) * scale;
      }
    }
    for (int64_t g = 0; g < group; ++g) {
      for (int64_t j = count; j < kBlock; ++j) scores[g][j] = -std::numeric_limits<float>::infinity();
      __m512 most = _mm512_load_ps(scores[g]);
      for (int64_t j = 16; j < kBlock; j += 16) most = _mm512_max_ps(most, _mm512_load_ps(scores[g] + j));
      const float top = std::max(largest[g], _mm512_reduce_max_ps(most));
      __m512 sum = _mm512_setzero_ps();
      for (int64_t j = 0; j < kBlock; j += 16) {
        const __m512 share = exp_512(_mm512_sub_ps(_mm512_load_ps(scores[g] + j), _mm512_set1_ps(top)));
        const int64_t left = count - j;
        const __mmask16 held = left >= 16 ? 0xFFFF : left <= 0 ? 0 : (1 << left) - 1;
        const __m512 kept = _mm512_maskz_mov_ps(held, share);
        _mm512_store_ps(scores[g] + j, kept);
        sum = _mm512_add_ps(sum, kept);
      }
      if (top > largest[g] && begin > text.first) {
        const float by = std::exp(largest[g] - top);
        total[g] *= by;
        for (int64_t h = 0; h < width; h += 16)
          _mm512_store_ps(mixed[g] + h, _mm512_mul_ps(_mm512_load_ps(mixed[g] + h), _mm512_set1_ps(by)));
      }
      largest[g] = top;
      total[g] += _mm512_reduce_add_ps(sum);
    }
    for (int64_t h = 0; h < width; h += 16)
      for (int64_t g0 = 0; g0 < group; g0 += 4) {
        const int64_t n = std::min<int64_t>(4, group - g0);
        __m512 sums[4];
        for (int64_t g = 0; g < n; ++g) sums[g] = _mm512_load_ps(mixed[g0 + g] + h);
        for (int64_t j = 0; j < count; ++j) {
          const __m512 value = widen(text.values + offsets[j] + h);
          for (int64_t g = 0; g < n; ++g) sums[g] = _mm512_fmadd_ps(_mm512_set1_ps(scores[g0 + g][j]), value, sums[g]);
        }
        for (int64_t g = 0; g < n; ++g) _mm512_store_ps(mixed[g0 + g] + h, sums[g]);
      }
  }
  for (int64_t g = 0; g < group; ++g)
    for (int64_t h = 0; h < width; ++h) out[g * width + h] = mixed[g][h] / total[g];
}
#endif

// q [T, N, H]; keys and values [places, K, H]; pages [T, most pages of a text]; rows see places first[t] to ends[t] - 1.
at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& pages, const at::Tensor& first, const at::Tensor& ends,
                           int64_t page_tokens, double scale) {
#ifdef HAS_BF16
  const int64_t rows = q.size(0), heads = q.size(1), width = q.size(2), kv_heads = keys.size(1);
  const int64_t group = heads / kv_heads;
  TORCH_CHECK(q.is_contiguous() && keys.is_contiguous() && values.is_contiguous() && pages.is_contiguous());
  TORCH_CHECK(group <= kMostGroup && width <= kMostWidth && width % 32 == 0 && heads % kv_heads == 0);
  at::Tensor out = at::empty_like(q);
  const auto* qs = q.const_data_ptr<at::BFloat16>();
  const auto* ks = keys.const_data_ptr<at::BFloat16>();
  const auto* vs = values.const_data_ptr<at::BFloat16>();
  const auto* table = pages.const_data_ptr<int32_t>();
  const auto* begins = first.const_data_ptr<int32_t>();
  const auto* stops = ends.const_data_ptr<int32_t>();
  auto* to = out.mutable_data_ptr<at::BFloat16>();
  const int64_t most_pages = pages.size(1), stride = kv_heads * width;
  at::parallel_for(0, rows * kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t t = task / kv_heads, k = task % kv_heads;
      const Text text{ks + k * width, vs + k * width, table + t * most_pages, page_tokens, stride, begins[t], stops[t]};
      const int64_t at = (t * heads + k * group) * width;
      attend(text, qs + at, to + at, group, width, static_cast<float>(scale));
    }
  });
  return out;
#else
  TORCH_CHECK(false, "this machine has no products of bf16");
#endif
}

}  // namespace

TORCH_LIBRARY(SUPERSTEP_OPS, m) {
  m.def("has_bf16() -> bool", &has_bf16);
  m.def(
      "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor pages, Tensor first, Tensor ends, int page_tokens, "
      "float scale) -> Tensor",
      &paged_attention);
}
