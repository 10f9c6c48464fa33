// Who uses the same bytes without an order: found when a call is issued, whatever the tasks then do.
#pragma once
#include "memory.h"

namespace strict {

struct Range {
  char *begin, *end;
  bool writes;
};

inline std::string describe(const std::string& what, bool writes, int stream) {
  return what + (writes ? " writes" : " reads") + " on stream " + std::to_string(stream);
}

inline std::string report(std::string race) {
  state.races.push_back(race);
  return race;
}

// Looks for accesses that meet a new one and are not known to be over, and keeps those that still count.
inline std::string race_in(Block* block, const StreamState& stream, const Access& next) {
  std::string race;
  std::vector<Access> kept;
  for (auto& past : block->accesses) {
    if (state.host.covers(past.stream, past.task)) continue;  // and so every stream covers it from its next task on
    bool is_own = past.stream == stream.number, is_over = stream.known.covers(past.stream, past.task);
    bool meets = past.begin < next.end && next.begin < past.end && (past.writes || next.writes);
    if (meets && !is_own && !is_over)
      race = report(describe(next.what, next.writes, next.stream) + " bytes that " +
                    describe(past.what, past.writes, past.stream) + ", and no event orders the two");
    bool is_within = next.begin <= past.begin && past.end <= next.end;
    bool is_replaced = is_within && (is_own || is_over) && (next.writes || !past.writes);
    if (!is_replaced) kept.push_back(past);
  }
  kept.push_back(next);
  block->accesses = std::move(kept);
  return race;
}

// Notes what a task of a stream uses; what is wrong with it, or nothing. The lock is held.
inline std::string note_accesses(StreamState& stream, const std::vector<Range>& ranges, const std::string& what, bool is_peer) {
  std::string race;
  for (auto& range : ranges) {
    if (range.begin >= range.end) continue;
    Block* block = block_at(range.begin);
    if (!block || !block->is_live) {
      race = report(what + " uses memory that was freed");
      continue;
    }
    if (block->device != HOST && block->device != stream.device && !is_peer)
      race = report(what + " uses memory of cuda:" + std::to_string(block->device) + " on cuda:" + std::to_string(stream.device));
    Access next{range.begin, range.end, range.writes, stream.number, stream.issued, what};
    auto found = race_in(block, stream, next);
    if (!found.empty()) race = found;
    if (block->device == HOST) {
      protect(block);
      state.protected_blocks.insert(block);
    }
  }
  return race;
}

}  // namespace strict
