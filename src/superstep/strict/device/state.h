// What the device is made of: settings, blocks of memory, streams, events. One lock guards all of it.
#pragma once
#include <c10/core/Device.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <sys/types.h>
#include <thread>
#include <vector>

#include "clock.h"

namespace strict {

using Moment = std::chrono::steady_clock::time_point;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int HOST = -1;  // the device of pinned memory

// The order in which tasks of different streams run. Of one stream they run as issued.
enum class Order {
  issued,   // a task runs as soon as it can, of the lowest stream first
  seeded,   // the next stream is drawn
  latest,   // no kernel runs until the host waits or issues nothing for a while; then the next stream is drawn
};

struct Settings {
  int devices = 1;
  size_t device_bytes = size_t(4) << 30;
  uint64_t seed = 0;
  int delay_us = 0;  // the longest pause before a task, drawn for one in four
  Order order = Order::seeded;
  bool raises = true;                 // a race is an error of the call that makes it
};

// A task's access to bytes [begin, end).
struct Access {
  char *begin, *end;
  bool writes;
  int stream = 0;
  uint64_t task = 0;
  std::string what;
  bool is_released = false;  // a call of a communicator that is over, and whose tensors it has let go of
};

// Pages that the host may not use, or only read.
struct ShutPages {
  char *begin, *end;
  int rights;
  bool operator==(const ShutPages&) const = default;
};

// A piece of memory that the allocator gives out whole.
struct Block {
  char* begin;
  size_t bytes;
  int device, stream;  // the stream that it was allocated on
  bool is_live = true;
  std::set<int> recorded;  // other streams, by record_stream
  std::vector<Access> accesses;
  size_t used_bytes = 0;        // of its tensor; what follows fills the last page
  std::vector<ShutPages> shut;  // where it is pinned
  bool is_registered = false;   // with CUDA, by whoever made it
  char* kernel_begin = nullptr; // of what is registered, where kernels see it at an address of its own
  char* end() const { return begin + bytes; }
};

struct EventState {
  bool is_done = false;
  Clock known;
  Moment when;
};

struct Task {
  std::function<void()> run;
  std::shared_ptr<EventState> after, sets;
  std::string what;
  int blocks = 0;      // of the device that it holds, where it is bound to a few
  uint64_t exclusive = 0;  // its number among those that may take the whole device; 0 for others
};

// When a task ran, by the clock of all processes of the host.
struct TraceEvent {
  int stream;
  bool is_communicator;
  std::string what;
  double begin_s, end_s;
};

struct StreamState {
  int number, device;
  bool is_communicator = false;
  int blocks = 0;  // that a communicator's kernels are bound to; 0 where they may take the whole device
  std::deque<Task> tasks;
  uint64_t issued = 0, done = 0;
  Clock known;
  bool is_busy = false, is_aborted = false, is_closed = false;
  std::thread thread;  // of a communicator
};

// As c10/core/CachingDeviceAllocator.h counts.
struct Count {
  size_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(size_t amount) {
    current += amount, allocated += amount;
    peak = std::max(peak, current);
  }
  void take(size_t amount) { current -= amount, freed += amount; }
};

// Addresses of one device, or of pinned memory, mapped twice: tensors hold addresses from ``base``, kernels use those from ``kernel_base``.
struct Region {
  char *base = nullptr, *kernel_base = nullptr;
  size_t next = 0;
  Count allocated_bytes, reserved_bytes, allocations, segments;
  size_t retries = 0, ooms = 0;
  std::map<std::pair<int, size_t>, std::vector<Block*>> cached;  // by stream and bytes
  std::vector<std::pair<Block*, std::map<int, uint64_t>>> pending;  // free once these tasks are over
};

struct State {
  std::mutex lock;
  std::condition_variable changed;
  Settings settings;
  std::mt19937_64 random;  // of the order of tasks
  pid_t owner = 0;
  bool is_started = false, is_stopping = false;
  bool has_kernels = false;  // the thread that runs them has begun
  std::vector<std::unique_ptr<StreamState>> streams;  // the first ones are the devices' default streams
  std::vector<Region> regions;                        // the last one is pinned memory
  std::map<char*, Block*> blocks;
  std::set<Block*> protected_blocks;  // pinned blocks that the host may not use now
  std::map<char*, Block*> registered;  // memory of the host that was made elsewhere
  std::mutex registered_lock;          // of that alone: who wants an address may have the other lock
  Clock host;
  std::vector<std::string> races;
  bool is_recording = false;
  std::vector<TraceEvent> trace;  // while it records
  std::exception_ptr failure;  // of a task: raised by the next call
  int waiting = 0;      // threads of the host that wait
  uint64_t exclusive_issued = 0;
  std::map<int, std::set<uint64_t>> exclusive;  // those that have not ended, by device
  std::map<int, int> bounded_blocks;  // in use, by device
  Moment last_issue;
  std::map<std::string, size_t> host_waits;  // by what waited, and where
  std::map<int, std::string> contexts;       // devices that this process has used, and the line that did so first
  size_t launches = 0;
  std::thread kernels;  // runs what no communicator does
};

// Never destroyed: its threads use it until the process is gone.
inline State& state = *new State;

inline thread_local int current_device = 0;
inline thread_local std::map<int, int> current_streams;  // by device
inline thread_local bool has_issued = false;
inline thread_local bool is_emptying = false;  // frees memory that tensors still have
inline thread_local std::string last_error;  // of CUDA's runtime: the thread's next kernel raises it

inline int current_stream(int device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? device : found->second;
}

}  // namespace strict
