// Every operator without a kernel here: its meta kernel tells shapes now, its CPU kernel computes them later.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include "dtypes.h"
#include "tensors.h"

namespace strict {

using torch::jit::Stack;

struct Operation {
  const c10::OperatorHandle& handle;
  std::vector<c10::IValue> arguments;
  std::string name;
  int device = -1;
  std::vector<Range> ranges;
  std::vector<at::Tensor> written;
  bool writes_empty = false;
  bool brings_indices = false;  // on the host

  const c10::FunctionSchema& schema() const { return handle.schema(); }
  c10::Device place() const { return {CUDA, c10::DeviceIndex(device)}; }
  bool writes(size_t argument) const {
    auto* alias = schema().arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }
};

// Indexing moves indices of the host's to the tensor's device (aten/src/ATen/native/TensorAdvancedIndexing.cpp).
inline bool takes_indices(const std::string& name) {
  return name.rfind("aten::index.", 0) == 0 || name.rfind("aten::index_put", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
}

// Where a number of the host's may come along: with operators that go by elements (allow_cpu_scalars of
// aten/src/ATen/TensorIterator.h), of which few lack the tag, and as these arguments of masked_fill_, fill_, index_put_,
// bernoulli_ and _fused_adamw_. Other kernels would read it at an address of the host's, or ask for one device
// (ForeachBinaryOpScalarTensor.cu).
inline bool takes_number(const Operation& call, const at::Tensor& tensor, size_t argument) {
  if (!tensor.is_cpu() || tensor.dim() > 0 || call.writes(argument)) return false;
  if (call.handle.hasTag(at::Tag::pointwise)) return true;
  static const std::set<std::string> names = {"other", "value", "values", "p", "lr"};
  return names.count(call.schema().arguments()[argument].name()) && call.name.rfind("aten::_foreach", 0) != 0;
}

inline Operation read_operation(const c10::OperatorHandle& handle, const Stack& stack) {
  const auto& schema = handle.schema();
  Operation call{handle, torch::jit::last(stack, schema.arguments().size()).vec(), schema.operator_name().name};
  if (!schema.overload_name().empty()) call.name += "." + schema.overload_name();
  for (size_t i = 0; i < call.arguments.size(); i++)
    map_tensors(call.arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      if (!tensor.is_cuda()) {  // of indices too, for which it waits
        bool is_index = takes_indices(call.name) && call.arguments[i].isList() && tensor.is_cpu();
        call.brings_indices |= is_index;
        TORCH_CHECK(is_index || takes_number(call, tensor, i), call.name,
                    ": Expected all tensors to be on the same device, but found ", tensor.device(), " beside cuda for argument ",
                    schema.arguments()[i].name(), " (strict device)");
        return tensor;
      }
      TORCH_CHECK(call.device < 0 || call.device == tensor.get_device(), call.name,
                  ": Expected all tensors to be on the same device, but found cuda:", call.device, " and ", tensor.device(),
                  " (strict device)");
      call.device = tensor.get_device();
      call.ranges.push_back(range_of(tensor, call.writes(i)));
      if (call.writes(i)) {
        call.written.push_back(tensor);
        call.writes_empty |= tensor.numel() == 0;
      }
      return tensor;
    });
  if (call.device < 0) call.device = current_device;
  return call;
}

// The argument that a result is, where an operator returns one.
inline c10::IValue returned_argument(const Operation& call, size_t result) {
  auto* alias = call.schema().returns()[result].alias_info();
  for (size_t i = 0; i < call.arguments.size(); i++) {
    auto* own = call.schema().arguments()[i].alias_info();
    if (own && alias && alias->isWrite() && own->beforeSets() == alias->beforeSets()) return call.arguments[i];
  }
  TORCH_CHECK(false, call.name, " gives a view, and has no kernel of its own on the strict device");
}

inline bool is_about_meta(const std::string& error) {
  return error.find("meta") != std::string::npos || error.find("Meta") != std::string::npos;
}

// Results on the meta device, and outputs resized as it says; none where the shapes follow from values.
inline std::optional<Stack> infer_shapes(Operation& call) {
  bool has_fresh = false;
  for (auto& result : call.schema().returns()) {
    has_fresh |= !result.alias_info();
    auto kind = result.type()->kind();
    bool is_known = kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType || kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType;
    if (!is_known) return std::nullopt;
  }
  Stack metas;
  if (!has_fresh && !call.writes_empty) return metas;
  for (auto& argument : call.arguments)
    metas.push_back(argument.isDevice() ? c10::IValue(c10::Device(c10::kMeta)) : map_tensors(argument, on_meta));
  Stack given = metas;
  try {
    call.handle.callBoxed(metas);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (pybind11::error_already_set& error) {  // of a meta kernel in Python
    pybind11::gil_scoped_acquire gil;
    if (!error.matches(PyExc_NotImplementedError) && !is_about_meta(error.what())) throw;
    return std::nullopt;
  } catch (const c10::Error& error) {
    if (is_about_meta(error.what())) return std::nullopt;
    throw;  // shapes that do not fit: as the operator says
  }
  size_t written = 0;
  for (size_t i = 0; i < given.size(); i++)
    if (call.writes(i))
      map_tensors(given[i], [&](const at::Tensor& meta) {
        if (meta.defined() && written < call.written.size()) {
          auto& output = call.written[written++];
          if (output.sizes() != meta.sizes()) output.resize_(meta.sizes());
        }
        return meta;
      });
  return metas;
}

inline Stack kernel_arguments(const Operation& call) {
  Stack arguments;
  for (auto& argument : call.arguments) {
    if (argument.isDevice()) arguments.emplace_back(c10::Device(c10::kCPU));
    else  // numbers of the host are read now
      arguments.push_back(map_tensors(argument, [](const at::Tensor& each) { return each.defined() && each.is_cpu() ? each.clone() : kernel_view(each); }));
  }
  return arguments;
}

inline at::Tensor empty_like_on(const at::Tensor& tensor, c10::Device place) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(place).requires_grad(false));
}

// Numbers that were computed early, as a task of the stream writes them.
inline void write_later(const Operation& call, const at::Tensor& target, const at::Tensor& values) {
  auto run = [view = kernel_view(target), values] {
    at::AutoDispatchBelowADInplaceOrView below;
    view.copy_(values);
  };
  issue(current_stream(call.device), {.ranges = {range_of(target, true)}, .what = call.name, .run = run});
}

// Shapes that follow from values: the host waits for these, as it does on a GPU, and the numbers are written after.
inline Stack compute_now(Operation& call) {
  wait_for(issue(current_stream(call.device), {.ranges = call.ranges, .what = call.name}), call.name);
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs;  // an output may grow: the operator is given a copy
  Stack computed = kernel_arguments(call), results;
  for (size_t i = 0; i < computed.size(); i++) {
    if (!call.writes(i)) continue;
    size_t next = outputs.size();
    map_tensors(call.arguments[i], [&](const at::Tensor& each) { return outputs.emplace_back(each, at::Tensor()).first; });
    computed[i] = map_tensors(computed[i], [&](const at::Tensor& each) { return outputs[next++].second = each.defined() ? each.clone() : each; });
  }
  call.handle.callBoxed(computed);
  for (auto& [output, values] : outputs) {
    if (!output.defined()) continue;
    if (output.sizes() != values.sizes()) output.resize_(values.sizes());
    write_later(call, output, values);
  }
  for (size_t i = 0; i < computed.size(); i++)
    results.push_back(call.schema().returns()[i].alias_info() ? returned_argument(call, i) : map_tensors(computed[i], [&](const at::Tensor& each) {
      if (!each.defined()) return each;
      at::Tensor made = empty_like_on(each, call.place());
      write_later(call, made, each);
      return made;
    }));
  return results;
}

inline Stack compute_later(Operation& call, const Stack& metas) {
  Stack results;
  std::vector<at::Tensor> into;  // as kernels see the results
  const auto& returns = call.schema().returns();
  for (size_t i = 0; i < returns.size(); i++)
    results.push_back(returns[i].alias_info() ? returned_argument(call, i) : map_tensors(metas[i], [&](const at::Tensor& meta) {
      at::Tensor made = meta;
      if (meta.defined()) made = empty_like_on(meta, meta.is_cpu() ? c10::Device(c10::kCPU) : call.place());
      if (made.defined() && made.is_cuda()) call.ranges.push_back(range_of(made, true));
      into.push_back(made.defined() && made.is_cuda() ? kernel_view(made) : made);
      return made;
    }));
  // Made before the outputs of an operator were resized, their views would be of the old bytes.
  auto stack = std::make_shared<Stack>(kernel_arguments(call));
  auto handle = call.handle;
  int64_t seed = seed_of_dropout(call.schema(), call.device, call.arguments);
  auto run = [handle, stack, into, seed] {
    at::AutoDispatchBelowADInplaceOrView below;
    task_seed = seed;
    handle.callBoxed(*stack);
    size_t next = 0;
    for (size_t i = 0; i < stack->size(); i++)
      if (!handle.schema().returns()[i].alias_info())
        map_tensors((*stack)[i], [&](const at::Tensor& each) {
          auto& result = into[next++];
          bool is_of_both = result.defined() && each.defined() && result.numel() && each.numel();  // and not CUDA's or the CPU's alone
          if (is_of_both) result.copy_(each);
          return each;
        });
    stack->clear();
  };
  issue(current_stream(call.device), {.ranges = call.ranges, .what = call.name, .run = run});
  return results;
}

// What a GPU's kernel refuses at the call, by the operator's name: given its arguments, raises.
using Rule = std::function<void(const std::vector<c10::IValue>&)>;
inline auto& rules = *new std::map<std::string, Rule>;

inline void require_kernel(const Operation& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(call.handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), call.name,
                              ": the emulated GPU has no kernel for it, and the CPU has none that stands in (", caller(), ")");
}

inline void refuse_sparse(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, handle.schema().operator_name(), ": the emulated GPU has no sparse tensors (", caller(), ")");
}

inline void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
  if (state.owner) require_owner();
  TORCH_CHECK(last_error.empty(), "CUDA error: ", std::exchange(last_error, {}));
  Operation call = read_operation(handle, *stack);
  c10::OptionalDeviceGuard guard(call.place());
  at::AutoDispatchBelowADInplaceOrView below;
  if (auto rule = rules.find(call.name); rule != rules.end()) rule->second(call.arguments);
  require_kernel(call);
  require_dtype(call.schema(), call.arguments);
  give_generator(call.schema(), call.device, call.arguments);
  if (call.brings_indices) wait_for(issue(current_stream(call.device), {.what = call.name}), call.name);
  auto metas = infer_shapes(call);
  Stack results = metas ? compute_later(call, *metas) : compute_now(call);
  torch::jit::drop(*stack, handle.schema().arguments().size());
  for (auto& result : results) stack->push_back(result);
}

// The bag of each index, which the CPU's kernel leaves out of what it gives where it has no use for it, and CUDA's does
// not (aten/src/ATen/native/cuda/EmbeddingBag.cu).
inline void embedding_bag(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t INDICES = 1, OFFSETS = 2, RESULTS = 4;
  auto given = torch::jit::last(*stack, handle.schema().arguments().size()).vec();
  fallback(handle, keys, stack);
  auto indices = given[INDICES].toTensor(), offsets = given[OFFSETS].toTensor();
  auto bags = at::searchsorted(offsets, at::arange(indices.size(0), offsets.options()), offsets.scalar_type() == at::kInt, /*right=*/true);
  (*stack)[stack->size() - RESULTS + 1] = bags.sub_(1);
}

}  // namespace strict
