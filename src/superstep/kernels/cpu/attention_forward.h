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
template <bool kPairs>
__attribute__((noinline)) void add_block(const Looking& at, const Mixed& to, Room& score_room, Room& chance_room) {
  const int64_t width = at.width, words = kPairs ? width / 2 : width, steps = kPairs ? kKeys / 2 : kKeys;
  const int64_t keys = seen_of(*std::max_element(at.end, at.end + at.rows) - at.key);
  multiply<kPairs>(at.q, {at.keys_across, kKeys}, at.rows, keys, words, score_room.floats(), kKeys, false);
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
      if constexpr (kPairs)
        *reinterpret_cast<Halves*>(reinterpret_cast<bf16*>(chance_room.words() + r * steps) + c * kLanes) = narrow(x[c]);
      else
        store(chance_room.floats() + r * steps + c * kLanes, x[c]);
    }
    to.total[r] += total(sum);
  }
  multiply<kPairs>({chance_room.words(), steps, 1}, {at.values_along, width}, at.rows, width, kPairs ? keys / 2 : keys,
                   to.sums, width, true);
}

template <bool kIsBf16, bool kPairs>
void forward(const Call& call, int64_t batch, int64_t kv_head) {
  const int64_t width = call.width, words = kPairs ? width / 2 : width, keys = padded(call.keys, kKeys);
  Room queries(kPairs ? 0 : kQueries * width), across(keys * words), along(keys * words), scores(kQueries * kKeys), chances(kQueries * kKeys);
  Room sums(kQueries * width);
  float tops[kQueries], totals[kQueries];
  const Mixed mixed{sums.floats(), totals, tops};
  lay_across<kPairs>(Rows<kIsBf16>::of(call.k, batch, kv_head), call.keys, width, across.words());
  lay_along<kPairs>(Rows<kIsBf16>::of(call.v, batch, kv_head), call.keys, keys, width, along.words());
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const auto q = Rows<kIsBf16>::of(call.q, batch, head), out = Rows<kIsBf16>::of(call.out, batch, head);
    float* lse = call.lse + (batch * call.heads + head) * call.queries;
    for (int64_t begin = 0; begin < call.queries; begin += kQueries) {
      const int64_t rows = std::min(kQueries, call.queries - begin);
      const Seen seen(call, batch, begin, rows);
      if constexpr (!kPairs) lay_along<false>(q.from(begin), rows, rows, width, queries.words());
      const Left left = kPairs ? q.left(begin) : Left{queries.words(), width, 1};
      mixed.clear(rows, width);
      for (int64_t key = seen.low; key < seen.high; key += kKeys)
        add_block<kPairs>({left, rows, width, call.scale, across.words() + key * words,
                            along.words() + key * words, key, seen.first, seen.end},
                           mixed, scores, chances);
      for (int64_t r = 0; r < rows; ++r) {
        const float by = totals[r] > 0 ? 1.0f / totals[r] : 0.0f;
        for (int64_t d = 0; d < width; d += kLanes)
          out.store16(begin + r, d, load(sums.floats() + r * width + d) * by);
        lse[begin + r] = tops[r] + std::log(totals[r]);
      }
    }
  }
}

}  // namespace superstep
