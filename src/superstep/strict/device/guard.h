// What torch asks of a kind of device: current devices and streams of a thread, events, and whether there is any.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"
#include "draws.h"

namespace strict {

// Stream 0 of a device, as torch writes it, is its default stream, whose number is the device's.
inline int number_of(const c10::Stream& stream) { return stream.id() == 0 ? int(stream.device_index()) : int(stream.id()); }

inline c10::Stream stream_of(int device, int number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, c10::DeviceIndex(device)), number == device ? 0 : number);
}

inline int index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }

using Event = std::shared_ptr<EventState>;
inline Event& event_of(void* event) { return *static_cast<Event*>(event); }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = CUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(state.settings.devices); }

  c10::Device getDevice() const override { return {CUDA, c10::DeviceIndex(current_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < state.settings.devices, "CUDA error: invalid device ordinal: cuda:", int(device.index()), " of ",
                state.settings.devices, " (strict device)");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return stream_of(index_of(device), current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), index_of(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(index_of(device), add_stream(index_of(device), false)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int device = stream.device_index();
    auto before = stream_of(device, current_stream(device));
    current_streams[device] = number_of(stream);
    return before;
  }
  bool queryStream(const c10::Stream& which) const override {
    start();
    Lock lock(state.lock);
    StreamState& stream = *state.streams[number_of(which)];
    bool is_over = stream.done == stream.issued;
    if (is_over) advance_host_by_query(stream.known);
    return is_over;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    start();
    wait_for(last_of(number_of(stream)), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    start();
    std::string why = "cuda.synchronize";
    for (auto& last : last_of_all(device)) wait_for(last, std::exchange(why, ""));
  }
  static Issued last_of(int number) {
    Lock lock(state.lock);
    return last_issued(*state.streams[number]);
  }
  static std::vector<Issued> last_of_all(int device) {
    Lock lock(state.lock);
    std::vector<Issued> all;
    for (auto& stream : state.streams)
      if (stream->device == device) all.push_back(last_issued(*stream));
    return all;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto made = std::make_shared<EventState>();
    issue(number_of(stream), {.what = "event.record", .sets = made});
    if (*event) event_of(*event) = made;
    else *event = new Event(made);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) issue(number_of(stream), {.what = "event.wait", .after = event_of(event)});
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    require_owner();
    Lock lock(state.lock);
    if (event_of(event)->is_done) advance_host_by_query(event_of(event)->known);
    return event_of(event)->is_done;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    require_owner();
    std::string at = "event.synchronize (" + caller() + ")";
    WithoutGil without;
    Lock lock(state.lock);
    auto waited = event_of(event);
    state.host_waits[at]++;
    host_waits_until(lock, [&] { return waited->is_done || state.failure; });
    if (waited->is_done) advance_host(waited->known);
    raise_failure(lock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    require_owner();
    Lock lock(state.lock);
    bool is_over = event_of(begin)->is_done && event_of(end)->is_done;
    auto took = event_of(end)->when - event_of(begin)->when;
    lock.unlock();
    TORCH_CHECK(is_over, "CUDA error: device not ready: elapsed_time of events that are not over (strict device)");
    return std::chrono::duration<double, std::milli>(took).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    Lock lock(state.lock);
    Block* block = block_at(static_cast<char*>(pointer.get()));
    if (block && block->stream != number_of(stream)) block->recorded.insert(number_of(stream));
  }
};

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    if (state.owner && state.owner != getpid()) return false;  // a fork has none
    Lock lock(state.lock);
    return state.contexts.count(device) > 0;
  }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(state.settings.devices); }
  int getNumGPUs() const override { return state.settings.devices; }
  c10::DeviceIndex current_device() const override { return c10::DeviceIndex(strict::current_device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(c10::Device(CUDA, device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return Guard().exchangeDevice(c10::Device(CUDA, device)).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return state.is_started && (is_within(state.regions.back(), address) || registered_block(address)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? strict::current_device : device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  c10::Device getDeviceFromPtr(void* address) const override {
    Lock lock(state.lock);
    Block* block = block_at(static_cast<char*>(address));
    return {CUDA, c10::DeviceIndex(block ? block->device : 0)};
  }
};

}  // namespace strict
