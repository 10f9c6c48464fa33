// Numbers that CUDA's kernels do not take and the CPU's do: for which ``dtypes`` has what ``dtypesIfCUDA`` has not in
// torch/testing/_internal/common_methods_invocations.py. Names of kernels are those of their AT_DISPATCH.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/function_schema.h>

#include <unordered_map>

namespace strict {

inline bool is_integer(at::ScalarType type) { return at::isIntegralType(type, /*includeBool=*/true); }
inline bool is_byte(at::ScalarType type) { return type == at::kByte; }
inline bool is_reduced(at::ScalarType type) { return at::isReducedFloatingType(type); }

struct Untaken {
  const char* kernel;
  bool (*is_untaken)(at::ScalarType);
};

inline const std::unordered_map<std::string, Untaken> untaken = {
    {"aten::mm", {"addmm_cuda", is_integer}},
    {"aten::addmm", {"addmm_cuda", is_integer}},
    {"aten::_addmm_activation", {"addmm_cuda", is_integer}},
    {"aten::bmm", {"baddbmm_cuda", is_integer}},
    {"aten::baddbmm", {"baddbmm_cuda", is_integer}},
    {"aten::addbmm", {"addmm_cuda", is_integer}},
    {"aten::mv", {"addmv_impl_cuda", is_integer}},
    {"aten::addmv", {"addmv_impl_cuda", is_integer}},
    {"aten::dot", {"dot", is_integer}},
    {"aten::vdot", {"vdot", is_integer}},
    {"aten::convolution", {"slow_conv2d_cuda", is_integer}},
    {"aten::avg_pool2d", {"avg_pool2d_out_cuda_frame", is_integer}},
    {"aten::avg_pool3d", {"avg_pool3d_out_cuda", is_integer}},
    {"aten::max_pool2d_with_indices", {"max_pool2d_with_indices_out_cuda_frame", is_integer}},
    {"aten::max_pool3d_with_indices", {"max_pool3d_with_indices_out_frame", is_integer}},
    {"aten::upsample_bilinear2d", {"upsample_bilinear2d_out_frame", is_byte}},
    {"aten::upsample_bicubic2d", {"upsample_bicubic2d_out_frame", is_byte}},
    {"aten::histc", {"histc", is_reduced}},
    {"aten::angle", {"angle_cuda", is_reduced}},
    {"aten::igamma", {"igamma_cuda", is_reduced}},
    {"aten::igammac", {"igamma_cuda", is_reduced}},
};

// Raises what a kernel says of the dtype of its tensors; of none where there are no numbers, as it is not launched then.
inline void require_dtype(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& arguments) {
  std::string name = schema.operator_name().name;
  if (name.ends_with("_")) name.pop_back();
  auto found = untaken.find(name);
  if (found == untaken.end()) return;
  for (auto& argument : arguments)
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().numel() == 0) return;
  const auto& [kernel, is_untaken] = found->second;
  auto type = arguments.front().toTensor().scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(!is_untaken(type), '"', kernel, "\" not implemented for '", c10::toString(type), "'");
}

}  // namespace strict
