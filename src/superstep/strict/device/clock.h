// Vector clocks (Lamport 1978, Mattern 1989): what is known to be over.
//
// Each stream counts its tasks from 1. A clock holds, for each stream, the number of the last task that is known to be
// over: of the host, what it has waited for; of a stream, what its next task comes after.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace strict {

struct Clock {
  std::vector<uint64_t> last;

  uint64_t of(int stream) const { return size_t(stream) < last.size() ? last[stream] : 0; }

  bool covers(int stream, uint64_t task) const { return of(stream) >= task; }

  void set(int stream, uint64_t task) {
    if (last.size() <= size_t(stream)) last.resize(stream + 1);
    last[stream] = task;
  }

  void merge(const Clock& other) {
    if (last.size() < other.last.size()) last.resize(other.last.size());
    for (size_t i = 0; i < other.last.size(); i++) last[i] = std::max(last[i], other.last[i]);
  }
};

}  // namespace strict
