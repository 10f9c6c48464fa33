// What attention's two passes have in common: how they are called, how keys are laid out, and what a query sees.

#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <new>

#include "product.h"

namespace superstep {

constexpr int64_t kQueries = 48;
constexpr int64_t kKeys = kPanel;
constexpr int64_t kMost = 64;  // queries of any block

// A tensor [batch, token, head, width]; strides in numbers, those of a head's width lie side by side.
struct View {
  void* at;
  int64_t batch, token, head;
};

struct Call {
  int64_t batch, heads, kv_heads, queries, keys, width;
  int64_t is_bf16, in_pairs, is_causal;  // in pairs: two numbers of bf16 are multiplied at once (paired.h)
  float scale;
  const int64_t* starts;  // [batch, queries]: the first key that each query sees; null for 0
  const int64_t* behind;  // [batch, queries]: one past the last that it sees; null where `is_causal` says it
  View q, k, v, out;
  float* lse;  // [batch, heads, queries]
  View grad, dq, dk, dv;
  int64_t first;  // of a causal call: the place of the first query among the keys
  // Parts of the queries, whose shares of the gradients of keys and values are summed part by part.
  const int64_t* ends;  // [parts]: where each ends; null for one that is all
  int64_t parts;
  // Exact mode's grid: dk and dv are int64 there, multiples of 1 / grid_scale, and are added to. Without one,
  // `outside` is null.
  float grid_scale, grid_limit;
  float* outside;  // where a part's sum was no smaller in size than the limit, the largest, or what is no number; else 0
};

class Room {
 public:
  explicit Room(int64_t words) : at_(static_cast<Word*>(::operator new(4 * words, std::align_val_t{64}))) {}
  ~Room() { ::operator delete(at_, std::align_val_t{64}); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  Word* words() { return at_; }
  float* floats() { return reinterpret_cast<float*>(at_); }

 private:
  Word* at_;
};

inline int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// The rows of one head.
template <bool kIsBf16>
struct Rows {
  using Number = std::conditional_t<kIsBf16, bf16, float>;
  Number* at;
  int64_t stride;

  static Rows of(const View& view, int64_t batch, int64_t head) {
    return {static_cast<Number*>(view.at) + batch * view.batch + head * view.head, view.token};
  }
  Number* row(int64_t r) const { return at + r * stride; }
  Rows from(int64_t r) const { return {row(r), stride}; }
  const Word* words(int64_t r) const { return reinterpret_cast<const Word*>(row(r)); }
  Floats load16(int64_t r, int64_t d) const {
    if constexpr (kIsBf16) return widen(row(r) + d);
    else return load(row(r) + d);
  }
  void store16(int64_t r, int64_t d, Floats x) const {
    if constexpr (kIsBf16) *reinterpret_cast<Halves*>(row(r) + d) = narrow(x);
    else store(row(r) + d, x);
  }
};

// Factors are laid out in fp32, to which bf16 is widened where the processor is slow with pairs of it.

// Right factors for products that sum over the width: blocks of 64 rows, [block, width, row].
template <bool kIsBf16>
void lay_across(const Rows<kIsBf16>& from, int64_t rows, int64_t width, Word* to) {
  for (int64_t begin = 0; begin < rows; begin += kKeys, to += width * kKeys) {
    const int64_t count = std::min(kKeys, rows - begin);
    if (count < kKeys) std::fill(to, to + width * kKeys, 0);
    for (int64_t r = 0; r < count; r += kLanes)
      for (int64_t d = 0; d < width; d += kLanes) {
        Words x[kLanes];
        for (int i = 0; i < kLanes; ++i) x[i] = r + i < count ? bits(from.load16(begin + r + i, d)) : Words{};
        turn_over(x);
        for (int i = 0; i < kLanes; ++i) *reinterpret_cast<Words*>(to + (d + i) * kKeys + r) = x[i];
      }
  }
}

// Right factors for products that sum over rows, and left ones: [row, width]. Up to `end` rows, what is not there 0.
template <bool kIsBf16>
void lay_along(const Rows<kIsBf16>& from, int64_t rows, int64_t end, int64_t width, float* to) {
  for (int64_t r = 0; r < end; ++r, to += width)
    for (int64_t d = 0; d < width; d += kLanes) store(to + d, r < rows ? from.load16(r, d) : Floats{});
}

// Which keys the queries of a block see: of each the first, and behind the last.
struct Seen {
  int64_t first[kMost], end[kMost], low, high;

  Seen(const Call& call, int64_t batch, int64_t begin, int64_t rows) {
    low = call.keys, high = 0;
    for (int64_t r = 0; r < rows; ++r) {
      first[r] = call.starts ? call.starts[batch * call.queries + begin + r] : 0;
      end[r] = call.behind      ? call.behind[batch * call.queries + begin + r]
               : call.is_causal ? call.first + begin + r + 1
                                : call.keys;
      end[r] = std::min(end[r], call.keys);
      low = std::min(low, first[r]);
      high = std::max(high, end[r]);
    }
    low = low / kKeys * kKeys;
  }
};

// How many of a block's keys anybody sees: those behind them need no products.
inline int64_t seen_of(int64_t end) { return std::min(kKeys, padded(end, kLanes)); }

// Scores of a row and a block of keys that are not seen become -inf.
inline void hide(Floats (&x)[kRegisters], int64_t first, int64_t end) {
  Ints place;
  for (int i = 0; i < kLanes; ++i) place[i] = i;
  for (int c = 0; c < kRegisters; ++c) {
    const Ints at = place + static_cast<int32_t>(c * kLanes);
    const Ints is_seen = (at >= static_cast<int32_t>(std::clamp<int64_t>(first, 0, kKeys))) &
                         (at < static_cast<int32_t>(std::clamp<int64_t>(end, 0, kKeys)));
    x[c] = is_seen ? x[c] : all(-std::numeric_limits<float>::infinity());
  }
}

}  // namespace superstep
