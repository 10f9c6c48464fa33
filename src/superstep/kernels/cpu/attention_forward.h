// Attention of some queries to some keys: of one head at a time, from left to right over blocks of its keys.

#pragma once

#include "attention.h"

namespace superstep {

// What rows have seen so far: their values' sums, weighted by exp(score - top), the weights' sum, and the largest score.
struct Mixed {
  float* sums;  // [rows, width]
  float* total;
  float* top;

  void clear(int64_t rows, int64_t width) const {
    std::fill(sums, sums + rows * width, 0.0f);
    std::fill(total, total + rows, 0.0f);
    std::fill(top, top + rows, -std::numeric_limits<float>::infinity());
  }
};

// A block of keys, laid out, and the rows that look at it.
struct Looking {
  Left q;
  int64_t rows, width;  // at most kQueries
  float scale;
  const Word *keys_across, *values_along;
  int64_t key;                // the first of the block
  const int64_t *first, *end;  // of each row: the first key that it sees, and one past the last
};

// Not inline: whoever asks has the same code, and so the same bits.
__attribute__((noinline)) inline void add_block(const Looking& at, const Mixed& to, Room& score_room, Room& chance_room) {
  const int64_t width = at.width;
  const int64_t keys = seen_of(*std::max_element(at.end, at.end + at.rows) - at.key);
  multiply<false>(at.q, {at.keys_across, kKeys}, at.rows, keys, width, score_room.floats(), kKeys, false);
  for (int64_t r = 0; r < at.rows; ++r) {
    const int64_t first = at.first[r] - at.key, end = at.end[r] - at.key;
    Floats x[kRegisters];
    for (int c = 0; c < kRegisters; ++c) x[c] = load(score_room.floats() + r * kKeys + c * kLanes) * at.scale;
    if (first > 0 || end < kKeys) hide(x, first, end);
    const float before = to.top[r];
    const float top = std::max(before, largest(larger(larger(x[0], x[1]), larger(x[2], x[3]))));
    const float shift = std::isinf(top) ? 0.0f : top;  // where nothing was seen yet, all is -inf
    if (top > before && !std::isinf(before)) {
      const float by = exponential(all(before - top))[0];
      to.total[r] *= by;
      float* row = to.sums + r * width;
      for (int64_t d = 0; d < width; d += kLanes) store(row + d, load(row + d) * by);
    }
    to.top[r] = top;
    Floats sum{};
    for (int c = 0; c < kRegisters; ++c) {
      x[c] = exponential(x[c] - shift);
      sum += x[c];
      store(chance_room.floats() + r * kKeys + c * kLanes, x[c]);
    }
    to.total[r] += total(sum);
  }
  multiply<false>({chance_room.words(), kKeys, 1}, {at.values_along, width}, at.rows, width, keys, to.sums, width, true);
}

template <bool kIsBf16>
class Forward {
 public:
  explicit Forward(const Call& call) : call_(call) {}

  // One key head of a sequence, with all query heads that see it.
  void run(int64_t batch, int64_t kv_head) {
    lay_across(Rows<kIsBf16>::of(call_.k, batch, kv_head), call_.keys, width_, across_.words());
    lay_along(Rows<kIsBf16>::of(call_.v, batch, kv_head), call_.keys, keys_, width_, along_.floats());
    const int64_t group = call_.heads / call_.kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
      for (int64_t at = 0; at < call_.queries; at += kQueries)
        block(batch, head, at, std::min(kQueries, call_.queries - at));
  }

 private:
  void block(int64_t batch, int64_t head, int64_t begin, int64_t rows) {
    const auto q = Rows<kIsBf16>::of(call_.q, batch, head), out = Rows<kIsBf16>::of(call_.out, batch, head);
    float* lse = call_.lse + (batch * call_.heads + head) * call_.queries;
    float tops[kQueries], totals[kQueries];
    const Mixed mixed{sums_.floats(), totals, tops};
    const Seen seen(call_, batch, begin, rows);
    lay_along(q.from(begin), rows, rows, width_, queries_.floats());
    mixed.clear(rows, width_);
    for (int64_t key = seen.low; key < seen.high; key += kKeys)
      add_block({{queries_.words(), width_, 1}, rows, width_, call_.scale, across_.words() + key * width_,
                 along_.words() + key * width_, key, seen.first, seen.end},
                mixed, scores_, chances_);
    for (int64_t r = 0; r < rows; ++r) {
      const float by = totals[r] > 0 ? 1.0f / totals[r] : 0.0f;
      for (int64_t d = 0; d < width_; d += kLanes)
        out.store16(begin + r, d, load(sums_.floats() + r * width_ + d) * by);
      lse[begin + r] = tops[r] + std::log(totals[r]);
    }
  }

  const Call& call_;
  const int64_t width_ = call_.width, keys_ = padded(call_.keys, kKeys);
  Room across_{keys_ * width_}, along_{keys_ * width_};
  Room queries_{kQueries * width_}, sums_{kQueries * width_}, scores_{kQueries * kKeys}, chances_{kQueries * kKeys};
};

}  // namespace superstep
