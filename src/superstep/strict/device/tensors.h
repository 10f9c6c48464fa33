// Tensors as tasks see them: the bytes that they use, the same bytes at addresses that a kernel may touch, their shapes.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include "guard.h"

namespace strict {

inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Without the check of a lazily copied storage, which would touch it.
inline char* storage_address(const at::Tensor& tensor) { return static_cast<char*>(storage_of(tensor)->mutable_data_ptr().get()); }

// From the first to the last element, gaps of its strides among them.
inline Range range_of(const at::Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) return {nullptr, nullptr, writes};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  size_t needed = (tensor.storage_offset() + last + 1) * tensor.element_size(), held = storage_of(tensor)->nbytes();
  TORCH_CHECK(needed <= held, "CUDA error: an illegal memory access: a tensor ends at byte ", needed, " of a storage that has ", held,
              " (strict device; ", caller(), ")");
  char* begin = storage_address(tensor) + tensor.storage_offset() * tensor.element_size();
  return {begin, begin + (last + 1) * tensor.element_size(), writes};
}

// A tensor of its own kind, whatever mode the caller is in: what runs it later is in none.
inline at::Tensor kernel_view(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  c10::InferenceMode normal(false);
  auto options = tensor.options().device(c10::kCPU).requires_grad(false).pinned_memory(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  char* address = kernel_address(storage_address(tensor));
  if (!address) return tensor;  // plain memory of the host
  return at::from_blob(address + tensor.storage_offset() * tensor.element_size(), tensor.sizes(), tensor.strides(), [](void*) {}, options);
}

inline at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).requires_grad(false).pinned_memory(false));
}

// A value with each tensor in it replaced.
template <class Function>
c10::IValue map_tensors(const c10::IValue& value, Function replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorList()) made.push_back(replace(each));
    return made;
  }
  if (!value.isList() || value.toList().elementType()->kind() != c10::TypeKind::OptionalType) return value;
  c10::List<std::optional<at::Tensor>> made;
  for (const c10::IValue& each : value.toList()) {
    if (!each.isNone() && !each.isTensor()) return value;
    made.push_back(each.isNone() ? std::nullopt : std::optional<at::Tensor>(replace(each.toTensor())));
  }
  return made;
}

}  // namespace strict
