// Which attention torch chooses on CUDA: flash, else the efficient one, else plain mathematics, of which no rule is broken.
//
// Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and, for what it shares with CPUs, ../sdp_utils_cpp.h. cuDNN's
// attention, which newer GPUs may try first, is not there: flash and mathematics stand for it.
#pragma once
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

namespace strict {

constexpr int64_t WIDEST_FLASH = 256;

inline bool is_half(const sdp::sdp_params& call) { return call.query.scalar_type() == at::kHalf || call.query.scalar_type() == at::kBFloat16; }

inline bool has_one_dtype(const sdp::sdp_params& call) {
  return call.key.scalar_type() == call.query.scalar_type() && call.value.scalar_type() == call.query.scalar_type();
}

inline bool takes_flash(const sdp::sdp_params& call) {
  bool is_square = call.query.size(-2) == call.key.size(-2);
  bool is_one_width = call.query.size(-1) == call.key.size(-1) && call.query.size(-1) == call.value.size(-1);
  return sdp::check_runtime_disabled_flash(call, false) && is_half(call) && has_one_dtype(call) && sdp::check_for_attn_mask(call, false) && is_one_width &&
         call.query.size(-1) <= WIDEST_FLASH && (is_square || !call.is_causal) &&
         sdp::check_batch_size_and_num_heads_dense<true>(call, false) && sdp::check_nonzero_sequence_lengths_dense(call, false) &&
         sdp::check_last_dim_stride_equals_1_dense<true>(call, false);
}

inline bool takes_efficient(const sdp::sdp_params& call) {
  int64_t alignment = is_half(call) ? 8 : 4, width = call.query.size(-1);  // minimum_gemm_alignment, from compute capability 8.0 on
  bool is_aligned = width == call.key.size(-1) && width > 0 && width % alignment == 0 && call.value.size(-1) % alignment == 0;
  return sdp::check_runtime_disabled_mem_efficient(call, false) && (is_half(call) || call.query.scalar_type() == at::kFloat) && has_one_dtype(call) &&
         is_aligned && sdp::check_nonzero_sequence_lengths_dense(call, false) && sdp::check_last_dim_stride_equals_1_dense<false>(call, false) &&
         sdp::check_batch_size_and_num_heads_dense<false>(call, false);
}

// select_sdp_backend
inline int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double dropout,
                                bool is_causal, std::optional<double>, bool enable_gqa) {
  sdp::sdp_params call{q, k, v, mask, dropout, is_causal, enable_gqa};
  auto& context = at::globalContext();
  bool is_dense = sdp::check_tensor_shapes(call, false);
  for (auto backend : context.sDPPriorityOrder()) {
    bool is_taken = backend == at::SDPBackend::flash_attention       ? is_dense && takes_flash(call)
                    : backend == at::SDPBackend::efficient_attention ? is_dense && takes_efficient(call)
                                                                     : backend == at::SDPBackend::math && context.userEnabledMathSDP();
    if (is_taken) return static_cast<int64_t>(backend);
  }
  bool is_any = context.userEnabledFlashSDP() || context.userEnabledMemEfficientSDP() || context.userEnabledCuDNNSDP();
  TORCH_CHECK(!is_any, "No available kernel. Aborting execution. (strict device, which has no attention by cuDNN)");
  return static_cast<int64_t>(at::SDPBackend::error);
}

}  // namespace strict
