// The strict device: an emulated GPU under torch's name "cuda", in a build of torch for CPUs.
//
//     state.h      what it is made of          memory.h     memory that the host cannot touch
//     clock.h      vector clocks               allocator.h  blocks of it
//     streams.h    queues of tasks             races.h      uses of memory that nothing orders
//     guard.h      what torch asks of a device
//     tensors.h    tensors as tasks see them   kernels.h    operators with kernels of their own
//     draws.h      random numbers              dtypes.h     what kernels take
//     fallback.h   all other operators         attention.h  which attention is chosen
//     caller.h     the line of Python that a call is in
//     registered.h memory of the host that CUDA is to know
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "attention.h"
#include "fallback.h"
#include "kernels.h"
#include "registered.h"

namespace py = pybind11;
using namespace strict;
using namespace pybind11::literals;

C10_REGISTER_GUARD_IMPL(CUDA, strict::Guard);
namespace at {
using CUDAHooks = strict::Hooks;  // torch asks for hooks of this name
REGISTER_CUDA_HOOKS(CUDAHooks);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&strict::fallback>()); }
TORCH_LIBRARY_IMPL(_, SparseCUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&strict::refuse_sparse>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrCUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&strict::refuse_sparse>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &strict::empty);
  library.impl("empty_strided", &strict::empty_strided);
  library.impl("resize_", &strict::resize);
  library.impl("copy_", &strict::copy);
  library.impl("_local_scalar_dense", &strict::item);
  library.impl("record_stream", &strict::record_stream);
  library.impl("set_.source_Storage_storage_offset", &strict::set_view);
  library.impl("set_.source_Storage", &strict::set_storage);
  library.impl("set_.source_Tensor", &strict::set_tensor);
  library.impl("as_strided", &strict::as_strided);
  library.impl("view", &strict::view);
  library.impl("_reshape_alias", &strict::reshape_alias);
  library.impl("_embedding_bag", torch::CppFunction::makeFromBoxedFunction<&strict::embedding_bag>());
  library.impl("_embedding_bag_forward_only", torch::CppFunction::makeFromBoxedFunction<&strict::embedding_bag>());
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  // CUDA has kernels of its own, where others are given operators that make more or keep more (what has both in
  // aten/src/ATen/native/native_functions.yaml); and for many tensors by one factor, which ask for it on their device.
  for (const char* name : {"_fused_rms_norm", "addr", "convolution", "convolution_backward", "mish_backward", "native_group_norm", "native_layer_norm", "silu_backward", "_foreach_add.Tensor", "_foreach_add_.Tensor",
                           "_foreach_mul.Tensor", "_foreach_mul_.Tensor", "_foreach_div.Tensor", "_foreach_div_.Tensor"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&strict::fallback>());
}

static bool is_communicator(int stream) {
  Lock lock(state.lock);
  return state.streams.at(stream)->is_communicator;
}

// A collective, or a kernel in Triton: a function of Python that is given the kernels' views of what it reads and writes.
static void launch(int stream, std::vector<at::Tensor> reads, std::vector<at::Tensor> writes, py::function function, std::string what) {
  std::vector<Range> ranges;
  std::vector<at::Tensor> read_views, written_views;
  for (auto& each : reads) ranges.push_back(range_of(each, false)), read_views.push_back(kernel_view(each));
  for (auto& each : writes) ranges.push_back(range_of(each, true)), written_views.push_back(kernel_view(each));
  std::shared_ptr<py::function> held(new py::function(std::move(function)), [](py::function* last) {
    py::gil_scoped_acquire gil;  // a task that is aborted goes on a thread that does not hold it
    delete last;
  });
  auto run = [held, read_views, written_views]() mutable {
    py::gil_scoped_acquire gil;
    std::exception_ptr failure;
    try {
      (*held)(read_views, written_views);
    } catch (py::error_already_set&) {
      failure = std::current_exception();
    }
    held.reset();  // and the tensors that it holds, before the task is over
    if (failure) std::rethrow_exception(failure);
  };
  issue(stream, {.ranges = ranges, .what = what, .run = std::move(run), .is_communication = is_communicator(stream)});
}

// A call is over that nobody has waited for: what it used may be freed. No stream and no thread learns of its end.
static void mark_over(const std::vector<at::Tensor>& tensors, int64_t event) {
  Lock lock(state.lock);
  const Clock& known = event_of(reinterpret_cast<void*>(event))->known;
  for (auto& tensor : tensors)
    if (Block* block = block_at(storage_address(tensor)))
      for (auto& access : block->accesses) access.is_released |= known.covers(access.stream, access.task);
}

static py::dict statistics(int device) {
  start();
  Lock lock(state.lock);
  Region region = state.regions.at(device);
  lock.unlock();
  auto numbers = [](const Count& count) {
    return py::dict("current"_a = count.current, "peak"_a = count.peak, "allocated"_a = count.allocated, "freed"_a = count.freed);
  };
  return py::dict("allocated_bytes"_a = numbers(region.allocated_bytes), "reserved_bytes"_a = numbers(region.reserved_bytes),
                  "allocations"_a = numbers(region.allocations), "segments"_a = numbers(region.segments), "retries"_a = region.retries,
                  "ooms"_a = region.ooms);
}

template <class Function>
static void for_each_count(int device, Function change) {
  start();
  Lock lock(state.lock);
  Region& region = state.regions.at(device);
  for (Count* count : {&region.allocated_bytes, &region.reserved_bytes, &region.allocations, &region.segments}) change(*count);
}

static std::vector<std::string> under_way() {
  Lock lock(state.lock);
  std::vector<std::string> found;
  for (auto& stream : state.streams)
    if (!stream->tasks.empty())
      found.push_back("stream " + std::to_string(stream->number) + (stream->is_busy ? " runs " : " waits at ") + stream->tasks.front().what);
  return found;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(CUDA, &device_memory, 100);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  module.def("configure", [](int devices, size_t device_bytes, uint64_t seed, int delay_us, std::string order, bool raises) {
    Lock lock = lock_as_owner();
    TORCH_CHECK(!state.is_started || devices == state.settings.devices, "the strict device was used already with ", state.settings.devices, " devices");
    auto which = order == "issued" ? Order::issued : order == "latest" ? Order::latest : Order::seeded;
    state.settings = {devices, device_bytes, seed, delay_us, which, raises};
    state.random.seed(seed);
  });
  module.def("take_races", [] {
    Lock lock = lock_as_owner();
    return std::exchange(state.races, {});
  });
  module.def("take_host_waits", [] {
    Lock lock = lock_as_owner();
    return std::exchange(state.host_waits, {});
  });
  module.def("contexts", [] {
    Lock lock = lock_as_owner();
    std::set<int> devices;
    for (auto& [device, line] : state.contexts) devices.insert(device);
    return devices;
  });
  module.def("context_lines", [] {
    Lock lock = lock_as_owner();
    return state.contexts;
  });
  module.def("record", [](bool is_recording) {
    Lock lock = lock_as_owner();
    state.is_recording = is_recording;
  });
  module.def("take_trace", [] {
    Lock lock = lock_as_owner();
    std::vector<std::tuple<int, bool, std::string, double, double>> events;
    for (auto& each : std::exchange(state.trace, {})) events.emplace_back(each.stream, each.is_communicator, each.what, each.begin_s, each.end_s);
    return events;
  });
  module.def("make_context", &open_context);
  module.def("register_memory", &register_memory);
  module.def("unregister_memory", &unregister_memory);
  module.def("set_last_error", [](std::string why) { last_error = why; });
  module.def("default_generator", &default_generator);
  module.def("is_in_bad_fork", [] { return state.owner && state.owner != getpid(); });
  module.def("devices", [] { return state.settings.devices; });
  module.def("launches", [] {
    Lock lock = lock_as_owner();
    return state.launches;
  });
  module.def("device_bytes", [] { return state.settings.device_bytes; });
  module.def("statistics", &statistics);
  module.def("reset_peak", [](int device) { for_each_count(device, [](Count& count) { count.peak = count.current; }); });
  module.def("reset_accumulated", [](int device) {
    for_each_count(device, [](Count& count) { count.allocated = count.freed = 0; });
    Lock lock(state.lock);
    state.regions.at(device).retries = state.regions.at(device).ooms = 0;
  });
  module.def("empty_cache", [] {
    start();
    Lock lock(state.lock);
    for (int device = 0; device < state.settings.devices; device++) release_cached_blocks(state.regions[device]);
  });
  module.def("add_communicator", [](int device, int blocks) { return add_stream(device, true, blocks); });
  module.def("resize_storage", [](const at::Tensor& tensor, size_t bytes) { resize_storage(storage_of(tensor), bytes); });
  module.def("launch", &launch);
  module.def("mark_over", &mark_over);
  module.def("elapsed_ms", [](int64_t begin, int64_t end) {
    return Guard().elapsedTime(reinterpret_cast<void*>(begin), reinterpret_cast<void*>(end), 0);
  });
  module.def("task_seed", [] { return task_seed; });
  module.def("add_rule", [](std::string name, py::function rule) {
    auto* held = new py::function(std::move(rule));  // never released: operators outlive the interpreter
    rules["aten::" + name] = [held](const std::vector<c10::IValue>& arguments) {
      py::gil_scoped_acquire gil;
      py::list given;
      for (auto& argument : arguments) given.append(torch::jit::toPyObject(argument));
      (*held)(*given);
    };
  });
  module.def("under_way", &under_way);
  module.def("caller", &caller);
  module.def("drain", [](int number) { wait_for(Guard::last_of(number), "the end of a communicator"); });
  module.def("abort", &abort_stream);
  module.def("close", &close_stream);
  module.def("stop", &stop);
}
