// Memory that the host cannot touch: a file in memory, mapped once without rights and once for the kernels.
#pragma once
#include <c10/util/Exception.h>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

namespace strict {

constexpr size_t REGION_BYTES = size_t(1) << 38;  // addresses of a device; none is given to blocks of two sizes
constexpr size_t PAGE_BYTES = 4096;
constexpr int READ_WRITE = PROT_READ | PROT_WRITE;

inline bool is_within(const Region& region, const void* address) {
  return region.base && address >= region.base && address < region.base + REGION_BYTES;
}

inline Block* registered_block(const void* address) {
  std::lock_guard<std::mutex> registering(state.registered_lock);
  auto next = state.registered.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  if (next == state.registered.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return address < block->end() ? block : nullptr;
}

// The address under which kernels see a byte; null for memory of the host, which they see as the host does.
inline char* kernel_address(char* address) {
  for (auto& region : state.regions)
    if (is_within(region, address)) return region.kernel_base + (address - region.base);
  Block* block = registered_block(address);
  return block && block->kernel_begin ? block->kernel_begin + (address - block->begin) : nullptr;
}

inline Block* block_at(char* address) {
  auto next = state.blocks.upper_bound(address);
  if (next == state.blocks.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return address < block->end() ? block : nullptr;
}

inline struct sigaction previous_handler;

constexpr char USED_BY_A_COPY[] = "strict device: the host touched pinned memory that a copy still uses\n";

// The host has touched what it may not: say so, and let Python's faulthandler say where before the process dies.
inline void on_fault(int signal, siginfo_t* info, void*) {
  for (size_t device = 0; device < state.regions.size(); device++) {
    if (!is_within(state.regions[device], info->si_addr)) continue;
    char text[200];
    bool is_pinned = device + 1 == state.regions.size();
    int size = is_pinned ? snprintf(text, sizeof text, "%s", USED_BY_A_COPY)
                         : snprintf(text, sizeof text, "strict device: the host touched memory of cuda:%zu\n", device);
    (void)!write(STDERR_FILENO, text, size);
  }
  for (auto& [begin, block] : state.registered)
    if (info->si_addr >= begin && info->si_addr < block->end())
      (void)!write(STDERR_FILENO, USED_BY_A_COPY, sizeof USED_BY_A_COPY - 1);
  sigaction(SIGSEGV, &previous_handler, nullptr);
}

inline void map_region(Region& region, int host_rights) {
  int file = memfd_create("strict device", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, REGION_BYTES) == 0, "strict device: no file in memory can be made");
  void* base = mmap(nullptr, REGION_BYTES, host_rights, MAP_SHARED | MAP_NORESERVE, file, 0);
  void* kernel_base = mmap(nullptr, REGION_BYTES, READ_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  TORCH_CHECK(base != MAP_FAILED && kernel_base != MAP_FAILED, "strict device: no addresses are left");
  region.base = static_cast<char*>(base), region.kernel_base = static_cast<char*>(kernel_base);
}

// The pages of a pinned block that hold nothing but what an access uses: who writes to another part of it touches none.
inline ShutPages pages_of(const Block& block, const Access& access) {
  auto page = [&](char* address, size_t rounding) { return block.begin + (address - block.begin + rounding) / PAGE_BYTES * PAGE_BYTES; };
  bool is_to_the_end = access.end >= block.begin + block.used_bytes;
  return {page(access.begin, PAGE_BYTES - 1), is_to_the_end ? block.end() : page(access.end, 0), access.writes ? PROT_NONE : PROT_READ};
}

// Opens or shuts a pinned block by what the host covers to be over: what a copy still reads may be read, not written.
inline void protect(Block* block) {
  if (block->is_registered && !block->kernel_begin) return;  // kernels use it where the host does
  std::vector<ShutPages> shut;
  for (auto& access : block->accesses) {
    ShutPages pages = pages_of(*block, access);
    if (pages.begin < pages.end && !state.host.covers(access.stream, access.task)) shut.push_back(pages);
  }
  if (shut == block->shut) return;
  mprotect(block->begin, block->bytes, READ_WRITE);
  for (int rights : {PROT_READ, PROT_NONE})
    for (auto& pages : shut)
      if (pages.rights == rights) mprotect(pages.begin, pages.end - pages.begin, rights);
  block->shut = std::move(shut);
}

// The host has waited for something: pinned memory opens with it.
inline void advance_host(const Clock& known) {
  state.host.merge(known);
  for (auto it = state.protected_blocks.begin(); it != state.protected_blocks.end();) {
    protect(*it);
    it = (*it)->shut.empty() ? state.protected_blocks.erase(it) : std::next(it);
  }
}

// It has asked, and got a yes. Of a thread that only watches, as the watchdog does, the others hear nothing.
inline void advance_host_by_query(const Clock& known) {
  if (has_issued) advance_host(known);
}

}  // namespace strict
