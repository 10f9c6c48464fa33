// Products of few rows with a weight as it lies: what decoding does. Each weight is read once, in order, by all cores;
// the time is that of reading them. Built for the machine it runs on.
//
//   T  rows (few)     O  outputs     I  inputs

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512BF16__)
#define HAS_BF16 1
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define HAS_INT8 1
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kOutputs = 4;  // of four rows each: sixteen sums in flight hide what a multiplication takes
constexpr int64_t kLeast = 64;   // outputs of a thread

bool has_bf16() {
#ifdef HAS_BF16
  return true;
#else
  return false;
#endif
}

bool has_int8() {
#ifdef HAS_INT8
  return true;
#else
  return false;
#endif
}

#ifdef HAS_BF16
// The sums of four registers' numbers, side by side.
inline __m128 sums_of_four(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 low = _mm512_shuffle_ps(ab, cd, 0x44), high = _mm512_shuffle_ps(ab, cd, 0xEE);
  const __m512 all = _mm512_add_ps(low, high);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

template <int T, int O>
void bf16_block(const at::BFloat16* x, const at::BFloat16* w, const float* bias, at::BFloat16* out, int64_t inputs,
                int64_t outputs) {
  __m512 sums[T][O];
  for (int t = 0; t < T; ++t)
    for (int o = 0; o < O; ++o) sums[t][o] = _mm512_setzero_ps();
  for (int64_t i = 0; i < inputs; i += 32) {
    __m512bh xs[T];
    for (int t = 0; t < T; ++t) xs[t] = (__m512bh)_mm512_loadu_si512(x + t * inputs + i);
    for (int o = 0; o < O; ++o) {
      const at::BFloat16* at = w + o * inputs + i;
      if (O > 1) _mm_prefetch(reinterpret_cast<const char*>(at + O * inputs), _MM_HINT_T0);  // of the next outputs
      const __m512bh ws = (__m512bh)_mm512_loadu_si512(at);
      for (int t = 0; t < T; ++t) sums[t][o] = _mm512_dpbf16_ps(sums[t][o], xs[t], ws);
    }
  }
  for (int t = 0; t < T; ++t) {
    alignas(16) float of[kOutputs];
    if (O == kOutputs) _mm_store_ps(of, sums_of_four(sums[t][0], sums[t][1 % O], sums[t][2 % O], sums[t][3 % O]));
    else of[0] = _mm512_reduce_add_ps(sums[t][0]);
    for (int o = 0; o < O; ++o) out[t * outputs + o] = of[o] + (bias ? bias[o] : 0.0f);
  }
}

// All rows with a few outputs: their weights stay in the first cache meanwhile.
template <int O>
void bf16_outputs(const at::BFloat16* x, const at::BFloat16* w, const float* bias, at::BFloat16* out, int64_t rows,
                  int64_t inputs, int64_t outputs) {
  int64_t t = 0;
  for (; t + 4 <= rows; t += 4) bf16_block<4, O>(x + t * inputs, w, bias, out + t * outputs, inputs, outputs);
  x += t * inputs;
  out += t * outputs;
  switch (rows - t) {
    case 1: bf16_block<1, O>(x, w, bias, out, inputs, outputs); break;
    case 2: bf16_block<2, O>(x, w, bias, out, inputs, outputs); break;
    case 3: bf16_block<3, O>(x, w, bias, out, inputs, outputs); break;
  }
}
#endif

#ifdef HAS_INT8
inline __m128i sums_of_four(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

template <int T, int O>
void int8_block(const uint8_t* x, const float* x_scale, const int8_t* w, const float* scale, const int32_t* sums_of_w,
                const float* bias, at::BFloat16* out, int64_t inputs, int64_t outputs) {
  __m512i sums[T][O];
  for (int t = 0; t < T; ++t)
    for (int o = 0; o < O; ++o) sums[t][o] = _mm512_setzero_si512();
  for (int64_t i = 0; i < inputs; i += 64) {
    __m512i xs[T];
    for (int t = 0; t < T; ++t) xs[t] = _mm512_loadu_si512(x + t * inputs + i);
    for (int o = 0; o < O; ++o) {
      const int8_t* at = w + o * inputs + i;
      if (O > 1) _mm_prefetch(reinterpret_cast<const char*>(at + O * inputs), _MM_HINT_T0);  // of the next outputs
      const __m512i ws = _mm512_loadu_si512(at);
      for (int t = 0; t < T; ++t) sums[t][o] = _mm512_dpbusd_epi32(sums[t][o], xs[t], ws);
    }
  }
  for (int t = 0; t < T; ++t) {
    alignas(16) int32_t of[kOutputs];
    if (O == kOutputs) _mm_store_si128(reinterpret_cast<__m128i*>(of), sums_of_four(sums[t][0], sums[t][1 % O], sums[t][2 % O], sums[t][3 % O]));
    else of[0] = _mm512_reduce_add_epi32(sums[t][0]);
    for (int o = 0; o < O; ++o)
      out[t * outputs + o] =
          static_cast<float>(of[o] - 128 * sums_of_w[o]) * (x_scale[t] * scale[o]) + (bias ? bias[o] : 0.0f);
  }
}

template <int O>
void int8_outputs(const uint8_t* x, const float* x_scale, const int8_t* w, const float* scale, const int32_t* sums_of_w,
                  const float* bias, at::BFloat16* out, int64_t rows, int64_t inputs, int64_t outputs) {
  int64_t t = 0;
  for (; t + 4 <= rows; t += 4)
    int8_block<4, O>(x + t * inputs, x_scale + t, w, scale, sums_of_w, bias, out + t * outputs, inputs, outputs);
  x += t * inputs;
  x_scale += t;
  out += t * outputs;
  switch (rows - t) {
    case 1: int8_block<1, O>(x, x_scale, w, scale, sums_of_w, bias, out, inputs, outputs); break;
    case 2: int8_block<2, O>(x, x_scale, w, scale, sums_of_w, bias, out, inputs, outputs); break;
    case 3: int8_block<3, O>(x, x_scale, w, scale, sums_of_w, bias, out, inputs, outputs); break;
  }
}

// One row to codes without a sign, of which 128 stands for 0. Gives the scale.
float to_codes(const at::BFloat16* x, uint8_t* codes, int64_t inputs) {
  float most = 0.0f;
  for (int64_t i = 0; i < inputs; ++i) most = std::max(most, std::fabs(static_cast<float>(x[i])));
  const float scale = std::max(most / 127.0f, 1.17549435e-38f);
  const float by = 1.0f / scale;
  for (int64_t i = 0; i < inputs; ++i)
    codes[i] = static_cast<uint8_t>(std::nearbyint(std::min(127.0f, std::max(-127.0f, static_cast<float>(x[i]) * by))) + 128.0f);
  return scale;
}
#endif

// [T, I] bf16 times [O, I] bf16: [T, O] bf16. I is a multiple of 32; the bias is fp32.
at::Tensor bf16_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const int64_t rows = x.size(0), inputs = x.size(1), outputs = weight.size(0);
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && weight.size(1) == inputs && inputs % 32 == 0);
  at::Tensor out = at::empty({rows, outputs}, x.options());
#ifdef HAS_BF16
  const auto* xs = x.const_data_ptr<at::BFloat16>();
  const auto* w = weight.const_data_ptr<at::BFloat16>();
  const float* b = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  auto* to = out.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, outputs, kLeast, [&](int64_t begin, int64_t end) {
    int64_t o = begin;
    for (; o + kOutputs <= end; o += kOutputs)
      bf16_outputs<kOutputs>(xs, w + o * inputs, b ? b + o : nullptr, to + o, rows, inputs, outputs);
    for (; o < end; ++o) bf16_outputs<1>(xs, w + o * inputs, b ? b + o : nullptr, to + o, rows, inputs, outputs);
  });
#else
  TORCH_CHECK(false, "this machine has no products of bf16");
#endif
  return out;
}

// [T, I] bf16, each row rounded to 8 bits, times codes [O, I], their scales [O] and sums [O]: [T, O] bf16.
// I is a multiple of 64; the bias is fp32.
at::Tensor int8_product(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& sums,
                        const std::optional<at::Tensor>& bias) {
  const int64_t rows = x.size(0), inputs = x.size(1), outputs = codes.size(0);
  TORCH_CHECK(x.is_contiguous() && codes.is_contiguous() && codes.size(1) == inputs && inputs % 64 == 0);
  at::Tensor out = at::empty({rows, outputs}, x.options());
#ifdef HAS_INT8
  std::vector<uint8_t> rounded(rows * inputs);
  std::vector<float> by(rows);
  const auto* xs = x.const_data_ptr<at::BFloat16>();
  for (int64_t t = 0; t < rows; ++t) by[t] = to_codes(xs + t * inputs, rounded.data() + t * inputs, inputs);
  const auto* from = rounded.data();
  const auto* w = codes.const_data_ptr<int8_t>();
  const auto* s = scale.const_data_ptr<float>();
  const auto* of_w = sums.const_data_ptr<int32_t>();
  const float* b = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  auto* to = out.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, outputs, kLeast, [&](int64_t begin, int64_t end) {
    int64_t o = begin;
    for (; o + kOutputs <= end; o += kOutputs)
      int8_outputs<kOutputs>(from, by.data(), w + o * inputs, s + o, of_w + o, b ? b + o : nullptr, to + o, rows, inputs,
                             outputs);
    for (; o < end; ++o)
      int8_outputs<1>(from, by.data(), w + o * inputs, s + o, of_w + o, b ? b + o : nullptr, to + o, rows, inputs, outputs);
  });
#else
  TORCH_CHECK(false, "this machine has no products of 8 bits");
#endif
  return out;
}

// RMSNorm over the last dim (Zhang 2019), statistics in fp32: one pass where torch's operations make eight.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t width = x.size(-1), rows = x.numel() / std::max<int64_t>(width, 1);
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && weight.numel() == width);
  at::Tensor out = at::empty(x.sizes(), x.options());
  const auto* xs = x.const_data_ptr<at::BFloat16>();
  const auto* w = weight.const_data_ptr<at::BFloat16>();
  auto* to = out.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const auto* from = xs + t * width;
      float parts[16] = {};
      for (int64_t d = 0; d + 16 <= width; d += 16)
        for (int64_t l = 0; l < 16; ++l) parts[l] += static_cast<float>(from[d + l]) * static_cast<float>(from[d + l]);
      float sum = 0.0f;
      for (int64_t d = width / 16 * 16; d < width; ++d) sum += static_cast<float>(from[d]) * static_cast<float>(from[d]);
      for (const float part : parts) sum += part;
      const float by = 1.0f / std::sqrt(sum / static_cast<float>(width) + static_cast<float>(eps));
      for (int64_t d = 0; d < width; ++d)
        to[t * width + d] = static_cast<float>(from[d]) * by * static_cast<float>(w[d]);
    }
  });
  return out;
}

// silu(gate) · up (Shazeer 2020): rows may lie apart, as the halves of one product do.
at::Tensor gated(const at::Tensor& gate, const at::Tensor& up) {
  const int64_t width = gate.size(-1), rows = gate.numel() / std::max<int64_t>(width, 1);
  TORCH_CHECK(gate.sizes() == up.sizes() && gate.stride(-1) == 1 && up.stride(-1) == 1);
  at::Tensor out = at::empty(gate.sizes(), gate.options());
  const auto* gates = gate.const_data_ptr<at::BFloat16>();
  const auto* ups = up.const_data_ptr<at::BFloat16>();
  auto* to = out.mutable_data_ptr<at::BFloat16>();
  const int64_t gate_stride = gate.stride(-2), up_stride = up.stride(-2);
  at::parallel_for(0, rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t f = 0; f < width; ++f) {
        const float x = gates[t * gate_stride + f];
        to[t * width + f] = x / (1.0f + std::exp(-x)) * static_cast<float>(ups[t * up_stride + f]);
      }
  });
  return out;
}

// Turns pairs half a head apart (Su 2021): x [T, N, H], whose rows may lie apart; cosine and signed sine [T, H].
at::Tensor turned(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine) {
  const int64_t rows = x.size(0), heads = x.size(1), width = x.size(2), half = width / 2;
  TORCH_CHECK(x.stride(2) == 1 && cosine.is_contiguous() && sine.is_contiguous() && cosine.numel() == rows * width);
  at::Tensor out = at::empty(x.sizes(), x.options());
  const auto* xs = x.const_data_ptr<at::BFloat16>();
  const auto* cosines = cosine.const_data_ptr<at::BFloat16>();
  const auto* sines = sine.const_data_ptr<at::BFloat16>();
  auto* to = out.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t n = 0; n < heads; ++n) {
        const auto* from = xs + t * x.stride(0) + n * x.stride(1);
        const auto *c = cosines + t * width, *s = sines + t * width;
        auto* into = to + (t * heads + n) * width;
        for (int64_t h = 0; h < half; ++h) {
          const float a = from[h], b = from[h + half];
          into[h] = a * static_cast<float>(c[h]) + b * static_cast<float>(s[h]);
          into[h + half] = b * static_cast<float>(c[h + half]) + a * static_cast<float>(s[h + half]);
        }
      }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(SUPERSTEP_OPS, m) {
  m.def("has_bf16() -> bool", &has_bf16);
  m.def("has_int8() -> bool", &has_int8);
  m.def("bf16_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor", &bf16_product);
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", &rms_norm);
  m.def("gated(Tensor gate, Tensor up) -> Tensor", &gated);
  m.def("turned(Tensor x, Tensor cosine, Tensor sine) -> Tensor", &turned);
  m.def("int8_product(Tensor x, Tensor codes, Tensor scale, Tensor sums, Tensor? bias) -> Tensor", &int8_product);
}
