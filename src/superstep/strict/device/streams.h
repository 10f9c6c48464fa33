// Streams: queues of tasks that threads run late, in an order that the settings choose.
//
// One thread runs the kernels and copies of all devices, one task at a time; each communicator has a thread of its own,
// since what it runs waits for other processes.
#pragma once
#include <ATen/Parallel.h>
#include <pthread.h>
#include <pybind11/pybind11.h>

#include "caller.h"
#include "races.h"

namespace strict {

using Lock = std::unique_lock<std::mutex>;

constexpr size_t MOST_QUEUED = 1024;  // as on a GPU, whose host waits where more is launched
constexpr int MOST_BOUNDED_BLOCKS = 32;  // that communicators with a bound may hold at once
constexpr auto BEFORE_FORK = std::chrono::seconds(1);  // the longest wait for a kernel
constexpr auto QUIET = std::chrono::milliseconds(20);  // of a host that issues nothing: "latest" goes on then

inline void require_owner() {
  TORCH_CHECK(state.owner == getpid(), "Cannot re-initialize CUDA in forked subprocess: the strict device was used before the fork");
}

// The lock, for what a fork of the process may call: there a thread of the parent may have had it.
inline Lock lock_as_owner() {
  if (state.owner) require_owner();
  return Lock(state.lock);
}

inline void raise_failure(Lock& lock) {
  std::exception_ptr failure = std::exchange(state.failure, nullptr);
  if (!failure) return;
  lock.unlock();
  std::rethrow_exception(failure);
}

// Waits, and lets "latest" see that the host does. Once the threads have ended nothing comes any more.
template <class Condition>
void host_waits_until(Lock& lock, Condition condition) {
  state.waiting++;
  state.changed.notify_all();
  state.changed.wait(lock, [&] { return condition() || state.is_stopping; });
  state.waiting--;
  TORCH_CHECK(condition(), "strict device: the host waits for a GPU whose threads ended with the interpreter");
}

inline bool is_ready(const StreamState& stream) {
  return !stream.tasks.empty() && !stream.is_busy && (!stream.tasks.front().after || stream.tasks.front().after->is_done);
}

inline double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

inline void run_first(StreamState& stream, Lock& lock, int delay_us) {
  stream.is_busy = true;
  Task task = std::move(stream.tasks.front());
  stream.tasks.front().what = task.what;  // for who asks what is under way
  lock.unlock();
  if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  std::exception_ptr failure;
  auto named = [&](const char* why) { return std::make_exception_ptr(c10::Error({__func__, __FILE__, __LINE__}, task.what + ": " + why)); };
  double begin_s = now_s();
  try {
    if (task.run) task.run();
  } catch (const pybind11::error_already_set&) {
    failure = std::current_exception();  // says itself where it is from
  } catch (const c10::Error& error) {
    failure = named(error.what_without_backtrace());
  } catch (const std::exception& error) {
    failure = named(error.what());
  }
  task.run = nullptr;  // frees what it held, before anybody is told that it is over
  lock.lock();
  if (state.is_recording) state.trace.push_back({stream.number, stream.is_communicator, task.what, begin_s, now_s()});
  stream.is_busy = false;
  if (task.sets) {
    task.sets->is_done = true;
    task.sets->when = std::chrono::steady_clock::now();
  }
  if (stream.is_aborted) {
    auto dropped = std::exchange(stream.tasks, {});
    lock.unlock();
    dropped.clear();  // frees tensors, which takes the lock
    failure = nullptr;
    lock.lock();
    return;
  }
  stream.tasks.pop_front();
  stream.done++;
  state.exclusive[stream.device].erase(task.exclusive);
  if (!state.failure) state.failure.swap(failure);
  state.changed.notify_all();
  if (!failure) return;
  lock.unlock();
  failure = nullptr;  // one of Python's takes the interpreter's lock
  lock.lock();
}

inline void run_kernels() {
  at::set_num_threads(1);
  Lock lock(state.lock);
  state.has_kernels = true;
  state.changed.notify_all();
  while (!state.is_stopping) {
    std::vector<StreamState*> ready;
    for (auto& stream : state.streams)
      if (!stream->is_communicator && is_ready(*stream)) ready.push_back(stream.get());
    if (ready.empty()) {
      state.changed.wait(lock);
      continue;
    }
    if (state.settings.order == Order::latest && !state.waiting &&
        std::chrono::steady_clock::now() - state.last_issue < QUIET) {
      state.changed.wait_for(lock, QUIET / 4);
      continue;
    }
    auto& stream = *ready[state.settings.order == Order::issued ? 0 : state.random() % ready.size()];
    int most_us = state.settings.delay_us;
    run_first(stream, lock, most_us && state.random() % 4 == 0 ? int(state.random() % most_us) : 0);
  }
}

// A kernel of NCCL holds its blocks until the other ranks have come to it. So those that may take the whole device run
// one at a time, as issued: two ranks that issue them in opposite orders never end. Beside them run those of
// communicators that are bound to a few blocks (max_ctas), while these are few together.
inline void run_communicator(StreamState& stream) {
  at::set_num_threads(1);
  Lock lock(state.lock);
  auto is_over = [&] { return state.is_stopping || stream.is_closed; };
  while (!is_over()) {
    int& in_use = state.bounded_blocks[stream.device];
    auto has_place = [&] {
      auto& next = stream.tasks.front();
      bool is_first = !next.exclusive || next.exclusive == *state.exclusive[stream.device].begin();
      return is_first && in_use + next.blocks <= MOST_BOUNDED_BLOCKS;
    };
    state.changed.wait(lock, [&] { return is_over() || (is_ready(stream) && has_place()); });
    if (is_over()) return;
    int blocks = stream.tasks.front().blocks;
    in_use += blocks;
    run_first(stream, lock, 0);
    in_use -= blocks;
    state.changed.notify_all();
  }
}

// A fork copies locks as they are, and none of the threads that would open them: torch's own within a kernel, and the
// device's. So it comes between two kernels, and has the device's lock. A kernel in Python waits for the interpreter,
// which whoever forks has: so it is waited for no longer than a moment.
inline void before_fork() {
  Lock lock(state.lock);
  auto is_at_rest = [] {
    auto runs = [](auto& stream) { return stream->is_busy && !stream->is_communicator; };
    return state.has_kernels && std::none_of(state.streams.begin(), state.streams.end(), runs);
  };
  if (state.owner == getpid() && !state.is_stopping) state.changed.wait_for(lock, BEFORE_FORK, is_at_rest);
  lock.release();
}

inline void after_fork() { state.lock.unlock(); }

inline void start() {
  Lock lock = lock_as_owner();
  if (state.is_started) return;
  state.owner = getpid();
  int devices = state.settings.devices;
  state.regions.resize(devices + 1);
  for (int device = 0; device < devices; device++) map_region(state.regions[device], PROT_NONE);
  map_region(state.regions[devices], READ_WRITE);
  for (int device = 0; device < devices; device++) {
    state.streams.push_back(std::make_unique<StreamState>());
    state.streams.back()->number = state.streams.back()->device = device;
  }
  struct sigaction act {};
  act.sa_sigaction = on_fault;
  act.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &act, &previous_handler);
  pthread_atfork(before_fork, after_fork, after_fork);
  state.kernels = std::thread(run_kernels);
  state.is_started = true;
}

inline int add_stream(int device, bool is_communicator, int blocks = 0) {
  start();
  require_owner();
  Lock lock(state.lock);
  auto made = std::make_unique<StreamState>();
  StreamState* stream = made.get();
  stream->number = int(state.streams.size());
  stream->device = device;
  stream->is_communicator = is_communicator;
  stream->blocks = blocks;
  stream->known = state.host;
  state.streams.push_back(std::move(made));
  if (is_communicator) stream->thread = std::thread([stream] { run_communicator(*stream); });
  return stream->number;
}

// Ends what a communicator has under way: events are set, and what its thread still waits for comes to nothing.
inline void abort_stream(int number) {
  std::deque<Task> dropped;  // goes after the lock, which is taken to free its tensors
  Lock lock(state.lock);
  StreamState& stream = *state.streams[number];
  stream.is_aborted = true;
  for (auto& task : stream.tasks) {
    if (task.sets) task.sets->is_done = true;
    state.exclusive[stream.device].erase(task.exclusive);
  }
  stream.done = stream.issued;
  if (!stream.is_busy) dropped.swap(stream.tasks);
  state.changed.notify_all();
}

// Waits for the end of a communicator's thread; one that waits for what does not come is left behind.
inline void end_thread(StreamState& stream) {
  if (!stream.thread.joinable()) return;
  Lock lock(state.lock);
  bool is_left = stream.is_aborted && stream.is_busy;
  lock.unlock();
  if (is_left) stream.thread.detach();
  else stream.thread.join();
}

// Ends the threads once they have run what they run: before the interpreter goes, whose objects tasks hold.
inline void stop() {
  if (state.owner != getpid()) return;  // before the lock, which a thread of the parent may have had
  WithoutGil without;
  {
    Lock lock(state.lock);
    state.is_stopping = true;
    state.changed.notify_all();
  }
  state.kernels.join();
  for (auto& stream : state.streams) end_thread(*stream);
}

// No call of a communicator comes any more.
inline void close_stream(int number) {
  WithoutGil without;
  Lock lock(state.lock);
  StreamState& stream = *state.streams[number];
  stream.is_closed = true;
  state.changed.notify_all();
  lock.unlock();
  end_thread(stream);
}

struct Issue {
  std::vector<Range> ranges;
  std::string what;
  std::function<void()> run;
  std::shared_ptr<EventState> after, sets;
  bool is_communication = false;
  bool is_peer = false;  // a copy between devices, which uses the memory of both
};

// A task that was issued, and what is over once it is.
struct Issued {
  int stream;
  uint64_t task;
  Clock known;
};

// The last one of a stream. The lock is held.
inline Issued last_issued(const StreamState& stream) { return {stream.number, stream.issued, stream.known}; }

// Puts a task into a stream. Raises what is wrong with its use of memory, and what a task before it came to.
inline Issued issue(int number, Issue call) {
  start();
  require_owner();
  has_issued = true;
  std::string line = caller();
  call.what += " (" + line + ")";
  bool is_launch = call.run || !call.ranges.empty();  // and no event
  WithoutGil without;
  Lock lock(state.lock);
  StreamState& stream = *state.streams[number];
  if (stream.tasks.size() >= MOST_QUEUED) host_waits_until(lock, [&] { return stream.tasks.size() < MOST_QUEUED / 2; });
  stream.known.merge(state.host);
  if (call.after) stream.known.merge(call.after->known);
  stream.known.set(number, ++stream.issued);
  std::string race = note_accesses(stream, call.ranges, call.what, call.is_peer);
  if (call.sets) call.sets->known = stream.known;
  Issued issued = last_issued(stream);
  uint64_t exclusive = call.is_communication && !stream.blocks ? ++state.exclusive_issued : 0;
  if (exclusive) state.exclusive[stream.device].insert(exclusive);
  int blocks = call.is_communication ? stream.blocks : 0;
  stream.tasks.push_back({std::move(call.run), call.after, call.sets, call.what, blocks, exclusive});
  state.contexts.try_emplace(stream.device, line);
  state.launches += is_launch;
  state.last_issue = std::chrono::steady_clock::now();
  state.changed.notify_all();
  raise_failure(lock);
  bool raises = state.settings.raises && !race.empty();
  lock.unlock();
  TORCH_CHECK(!raises, "race: ", race);
  return issued;
}

// The host waits for a task, and learns of no task that another thread has issued behind it; ``why`` is counted, unless
// it is empty.
inline void wait_for(const Issued& last, const std::string& why) {
  require_owner();
  std::string at = why + " (" + caller() + ")";
  WithoutGil without;
  Lock lock(state.lock);
  if (!why.empty()) state.host_waits[at]++;
  StreamState& stream = *state.streams[last.stream];
  host_waits_until(lock, [&] { return stream.done >= last.task || state.failure; });
  if (stream.done >= last.task) advance_host(last.known);
  raise_failure(lock);
}

}  // namespace strict
