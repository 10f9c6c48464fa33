// The operators that need kernels of their own: memory, copies, numbers read back, views.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include "tensors.h"

namespace strict {

using MaybeDtype = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<c10::Device>;

inline at::Tensor empty(c10::SymIntArrayRef size, MaybeDtype dtype, MaybeLayout, MaybeDevice device, std::optional<bool>,
                        std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, MaybeDtype dtype, MaybeLayout, MaybeDevice device,
                                std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// As CUDA's: a new block, into which the old bytes are copied on the current stream.
inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  if (bytes == storage->nbytes()) return;
  c10::OptionalDeviceGuard guard(storage->device());
  c10::DataPtr made = device_memory.allocate(bytes);
  char *from = static_cast<char*>(storage->mutable_data_ptr().get()), *to = static_cast<char*>(made.get());
  size_t kept = std::min(bytes, storage->nbytes());
  if (kept && from) {
    char *source = kernel_address(from), *target = kernel_address(to);
    issue(current_stream(storage->device().index()), {.ranges = {{from, from + kept, false}, {to, to + kept, true}},
                                                      .what = "resize_",
                                                      .run = [=] { memcpy(target, source, kept); }});
  }
  is_emptying = true;
  storage->set_data_ptr_noswap(std::move(made));
  is_emptying = false;
  storage->set_nbytes(bytes);
}

inline const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (tensor->storage_offset() + tensor->numel()) * tensor->itemsize();
  if (bytes > storage_of(self)->nbytes()) resize_storage(storage_of(self), bytes);
  if (format && *format != at::MemoryFormat::Contiguous) tensor->empty_tensor_restride(*format);
  return self;
}

// What comes next on one stream is after all that is on another.
inline void order_after(int stream, int other) {
  auto done = std::make_shared<EventState>();
  issue(other, {.what = "event.record", .sets = done});
  issue(stream, {.what = "event.wait", .after = done});
}

// Copies on the device's stream. The host waits for one that blocks, from plain memory too (memcpy_and_sync in
// aten/src/ATen/native/cuda/Copy.cu), and for every one into plain memory. Of those that do not block, bytes of plain
// memory are staged before the call returns, and what is from or to pinned memory goes on after it.
inline at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  bool between = self.is_cuda() && source.is_cuda() && self.get_device() != source.get_device();
  int device = source.is_cuda() ? source.get_device() : self.get_device();
  c10::OptionalDeviceGuard guard(c10::Device(CUDA, c10::DeviceIndex(device)));
  at::AutoDispatchBelowADInplaceOrView below;
  std::vector<Range> ranges;
  at::Tensor from = source, to = kernel_view(self);
  if (source.is_cuda() || source.is_pinned()) {
    ranges.push_back(range_of(source, false));
    from = kernel_view(source);
  } else {
    from = source.clone();
  }
  if (self.is_cuda() || self.is_pinned()) ranges.push_back(range_of(self, true));
  bool goes_on = non_blocking && (self.is_cuda() || self.is_pinned());
  bool waits = !(self.is_cuda() && source.is_cuda()) && !goes_on;
  std::string what = source.is_cuda() ? (self.is_cuda() ? "copy_" : "copy_ to the host") : "copy_ to the device";
  auto run = [from, to] {
    at::AutoDispatchBelowADInplaceOrView below;
    auto target = to;
    target.copy_(from);
  };
  int stream = current_stream(device);
  if (between) order_after(stream, current_stream(self.get_device()));
  Issued issued = issue(stream, {.ranges = ranges, .what = what, .run = run, .is_peer = between});
  if (between) order_after(current_stream(self.get_device()), stream);
  if (waits) wait_for(issued, what);
  return self;
}

inline at::Scalar item(const at::Tensor& self) {
  int stream = current_stream(self.get_device());
  wait_for(issue(stream, {.ranges = {range_of(self, false)}, .what = "item"}), "item");
  return kernel_view(self).item();
}

inline void record_stream(at::Tensor& self, c10::Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

// checkSetStorage in aten/src/ATen/native/Resize.h
inline void require_device(const at::Tensor& self, const at::Storage& storage) {
  TORCH_CHECK(self.device() == storage.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", storage.device(), "\". This is no longer allowed; the devices must match.");
}

inline at::Tensor& set_view(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  require_device(self, storage);
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  require_device(self, storage);
  auto* tensor = self.unsafeGetTensorImpl();
  auto numbers = int64_t(storage.nbytes() / tensor->itemsize());
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(0);
  tensor->set_sizes_contiguous({numbers});
  return self;
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  require_device(self, other.storage());
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(other.storage());
  tensor->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  return self;
}

inline at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto at = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

inline at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

inline at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

}  // namespace strict
