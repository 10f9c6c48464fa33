// A caching allocator: blocks are of the stream that they were allocated on, and poisoned when they are freed.
#pragma once
#include <c10/core/Allocator.h>

#include "streams.h"

namespace strict {

constexpr size_t DEVICE_GRAIN_BYTES = 512;  // as torch's allocator rounds
constexpr int POISON = 0xff;                // NaN in every floating-point format

inline size_t round_up(size_t bytes, size_t grain) { return (bytes + grain - 1) / grain * grain; }

inline std::map<int, uint64_t> last_tasks(const Block& block) {
  std::map<int, uint64_t> last;
  for (auto& access : block.accesses) last[access.stream] = std::max(last[access.stream], access.task);
  return last;
}

// Blocks whose last tasks are over can be given out again.
inline void reclaim(Region& region) {
  for (auto it = region.pending.begin(); it != region.pending.end();) {
    auto& [block, tasks] = *it;
    bool is_over = std::all_of(tasks.begin(), tasks.end(), [](auto& each) { return state.streams[each.first]->done >= each.second; });
    if (!is_over) {
      ++it;
      continue;
    }
    block->accesses.clear();
    if (block->device != HOST) memset(kernel_address(block->begin), POISON, block->bytes);
    region.cached[{block->stream, block->bytes}].push_back(block);
    it = region.pending.erase(it);
  }
}

// What a stream may still do to a block that is freed is a fault, unless the block's own stream or one that
// record_stream has named comes after it. A call of a communicator keeps its tensors until it is over; so their end is
// none, but that of their storage's bytes is.
inline void report_uses_after_free(const Block& block, const std::string& line) {
  std::set<int> after = block.recorded;
  after.insert(block.stream);
  for (auto& access : block.accesses) {
    if (access.is_released && !is_emptying) continue;
    auto covers = [&](int stream) { return state.streams[stream]->known.covers(access.stream, access.task); };
    if (state.host.covers(access.stream, access.task) || std::any_of(after.begin(), after.end(), covers)) continue;
    report("memory of stream " + std::to_string(block.stream) + " is freed (" + line + ") while " +
           describe(access.what, access.writes, access.stream) + " it: neither record_stream nor an event keeps it");
  }
}

// A block goes back to the cache of its stream.
inline void free_on_own_stream(Region& region, Block* block) {
  StreamState& stream = *state.streams[block->stream];
  stream.known.merge(state.host);
  block->accesses.clear();
  char* memory = kernel_address(block->begin);
  size_t bytes = block->bytes;
  stream.known.set(stream.number, ++stream.issued);
  stream.tasks.push_back({[memory, bytes] { memset(memory, POISON, bytes); }, nullptr, nullptr, "poison"});
  Access poison{block->begin, block->end(), true, stream.number, stream.issued, "the allocator, which got the block back,"};
  block->accesses.push_back(poison);
  region.cached[{block->stream, block->bytes}].push_back(block);
  state.changed.notify_all();
}

inline void release(void* context) {
  Block* block = static_cast<Block*>(context);
  if (state.owner != getpid()) return;
  std::string line = caller();
  WithoutGil without;
  Lock lock(state.lock);
  bool is_pinned = block->device == HOST;
  Region& region = is_pinned ? state.regions.back() : state.regions[block->device];
  region.allocated_bytes.take(block->bytes), region.allocations.take(1);
  block->is_live = false;
  if (is_pinned) {
    region.pending.push_back({block, last_tasks(*block)});
    return;
  }
  report_uses_after_free(*block, line);
  if (block->recorded.empty()) {
    free_on_own_stream(region, block);
  } else {
    std::map<int, uint64_t> tasks{{block->stream, state.streams[block->stream]->issued}};
    for (int stream : block->recorded) tasks[stream] = state.streams[stream]->issued;
    region.pending.push_back({block, tasks});
  }
}

inline void release_cached_blocks(Region& region) {
  for (auto& [key, cached] : region.cached)
    for (Block* block : cached) {
      region.reserved_bytes.take(block->bytes), region.segments.take(1);
      state.blocks.erase(block->begin);  // its addresses are never used again
      delete block;
    }
  region.cached.clear();
}

// Where memory runs out torch waits for the blocks that other streams hold by record_stream, and gives back what it has
// cached (release_cached_blocks in c10/cuda/CUDACachingAllocator.cpp).
inline void make_room(Region& region, Lock& lock) {
  region.retries++;
  host_waits_until(lock, [&] {
    reclaim(region);
    return region.pending.empty() || state.failure;
  });
  release_cached_blocks(region);
}

inline Block* new_block(Region& region, Lock& lock, size_t bytes, int device, int stream) {
  auto is_full = [&] { return device != HOST && region.reserved_bytes.current + bytes > state.settings.device_bytes; };
  if (is_full()) make_room(region, lock);
  region.ooms += is_full();
  TORCH_CHECK_WITH(OutOfMemoryError, !is_full(), "CUDA out of memory. Tried to allocate ", bytes, " bytes on cuda:", device,
                   " (strict device), of which ", region.allocated_bytes.current, " of ", state.settings.device_bytes, " are allocated and ",
                   region.reserved_bytes.current, " reserved.");
  TORCH_CHECK(region.next + bytes + PAGE_BYTES <= REGION_BYTES, "strict device: no addresses are left");
  auto* block = new Block{region.base + region.next, bytes, device, stream};
  region.next += round_up(bytes, PAGE_BYTES) + PAGE_BYTES;  // what runs over the end of a block is in none
  region.reserved_bytes.add(bytes), region.segments.add(1);
  state.blocks[block->begin] = block;
  return block;
}

// Notes the first use of a device, and its line. Without the lock, which nobody holds who waits for the interpreter's.
inline void open_context(int device) {
  std::string line = caller();
  Lock lock = lock_as_owner();
  state.contexts.try_emplace(device, line);
}

struct Memory final : public c10::Allocator {
  bool is_pinned;
  explicit Memory(bool pinned) : is_pinned(pinned) {}

  c10::DataPtr allocate(size_t bytes) override {
    start();
    require_owner();
    int device = is_pinned ? HOST : current_device;
    int stream = is_pinned ? 0 : current_stream(device);
    auto place = is_pinned ? c10::Device(c10::kCPU) : c10::Device(CUDA, c10::DeviceIndex(device));
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, place};
    size_t used_bytes = bytes;
    bytes = round_up(bytes, is_pinned ? PAGE_BYTES : DEVICE_GRAIN_BYTES);
    WithoutGil without;
    Lock lock(state.lock);
    Region& region = is_pinned ? state.regions.back() : state.regions[device];
    reclaim(region);
    auto& cached = region.cached[{stream, bytes}];
    Block* block;
    if (cached.empty()) {
      block = new_block(region, lock, bytes, device, stream);
    } else {
      block = cached.back();
      cached.pop_back();
      block->is_live = true;
      block->recorded.clear();
    }
    block->used_bytes = used_bytes;
    region.allocated_bytes.add(bytes), region.allocations.add(1);
    // Pinned memory belongs to a context that is there (getDeviceIndexWithPrimaryContext in
    // aten/src/ATen/cuda/CachingHostAllocator.cpp), and makes one only where there is none.
    bool opens = is_pinned ? state.contexts.empty() : !state.contexts.count(device);
    if (is_pinned) protect(block);
    lock.unlock();
    if (opens) open_context(is_pinned ? current_device : device);
    return {block->begin, block, &release, place};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "strict device: copy_data"); }
};

inline Memory device_memory(false), pinned_memory(true);

}  // namespace strict
