// Memory of the host that is registered with CUDA (cudaHostRegister): pinned from then on, though others have made it.
#pragma once
#include <ATen/Context.h>

#include "races.h"

namespace strict {

// Kernels keep an address of shared memory of their own, so that the host's can be shut; private memory has one address.
inline char* map_again(char* begin, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(begin) % PAGE_BYTES) return nullptr;
  void* again = mremap(begin, 0, bytes, MREMAP_MAYMOVE);  // of length 0: a second mapping of the same pages (mremap(2))
  return again == MAP_FAILED ? nullptr : static_cast<char*>(again);
}

// Whether no part of the memory is registered already; then it is.
inline bool register_memory(uintptr_t address, size_t bytes) {
  start();
  require_owner();
  at::globalContext().lazyInitDevice(CUDA);  // as torch.cuda.cudart() does: before, torch takes no memory for pinned
  char* begin = reinterpret_cast<char*>(address);
  Lock lock(state.lock);
  std::lock_guard<std::mutex> registering(state.registered_lock);
  for (auto& [other, block] : state.registered)
    if (begin < block->end() && other < begin + bytes) return false;
  auto* block = new Block{begin, bytes, HOST, 0};
  block->used_bytes = bytes;
  block->kernel_begin = map_again(begin, bytes);
  block->is_registered = true;
  state.registered[begin] = state.blocks[begin] = block;
  return true;
}

// Whether it was registered; copies that still use it are noted as a race.
inline bool unregister_memory(uintptr_t address) {
  require_owner();
  std::string line = caller();
  WithoutGil without;
  Lock lock(state.lock);
  auto found = state.registered.find(reinterpret_cast<char*>(address));
  if (found == state.registered.end()) return false;
  Block* block = found->second;
  bool is_used = false;
  for (auto& access : block->accesses) {
    if (state.host.covers(access.stream, access.task)) continue;
    is_used = true;
    report("registered memory is given back (" + line + ") while " + describe(access.what, access.writes, access.stream) + " it");
  }
  block->accesses.clear();
  protect(block);
  state.protected_blocks.erase(block);
  state.blocks.erase(block->begin);
  std::lock_guard<std::mutex> registering(state.registered_lock);
  state.registered.erase(found);
  if (block->kernel_begin && !is_used) munmap(block->kernel_begin, block->bytes);
  delete block;
  return true;
}

}  // namespace strict
