// The gradients of attention: of the queries of a block, and their share of those of the keys they see.
//
// What queries give a key is summed over a part of them. In exact mode each part's sum is put on a grid and added there as
// integers: then a part's sum hangs on that part alone, and all that is of one query on that query and the keys it sees.

#pragma once

#include "attention.h"
#include "grid.h"

namespace superstep {

template <bool kIsBf16>
class Backward {
 public:
  explicit Backward(const Call& call) : call_(call) {}

  // One key head of a sequence, with all query heads that see it.
  void run(int64_t batch, int64_t kv_head) {
    batch_ = batch, kv_head_ = kv_head;
    const auto k = Rows<kIsBf16>::of(call_.k, batch, kv_head), v = Rows<kIsBf16>::of(call_.v, batch, kv_head);
    lay_across(k, call_.keys, width_, keys_across_.words());
    lay_across(v, call_.keys, width_, values_across_.words());
    lay_along(k, call_.keys, keys_, width_, keys_along_.floats());
    clear(keys_);
    const int64_t group = call_.heads / call_.kv_heads;
    for (int64_t part = 0, begin = 0; part < call_.parts; ++part) {
      const int64_t end = call_.ends ? call_.ends[part] : call_.queries;
      seen_ = 0;
      for (int64_t head = kv_head_ * group; head < (kv_head_ + 1) * group; ++head)
        for (int64_t at = begin; at < end; at += kQueries) block(head, at, std::min(kQueries, end - at));
      if (call_.outside) put_on_grid();
      begin = end;
    }
    if (!call_.outside) put();
  }

 private:
  void block(int64_t head, int64_t begin, int64_t rows) {
    const auto q = Rows<kIsBf16>::of(call_.q, batch_, head), grad = Rows<kIsBf16>::of(call_.grad, batch_, head);
    const auto out = Rows<kIsBf16>::of(call_.out, batch_, head), dq = Rows<kIsBf16>::of(call_.dq, batch_, head);
    const float* lse = call_.lse + (batch_ * call_.heads + head) * call_.queries + begin;
    const Seen seen(call_, batch_, begin, rows);
    seen_ = std::max(seen_, std::min(seen.high, call_.keys));
    lay_along(q.from(begin), rows, rows, width_, queries_along_.floats());
    lay_along(grad.from(begin), rows, rows, width_, grads_along_.floats());
    float mean[kQueries];
    for (int64_t r = 0; r < rows; ++r) {
      Floats sum{};
      for (int64_t d = 0; d < width_; d += kLanes) sum += grad.load16(begin + r, d) * out.load16(begin + r, d);
      mean[r] = total(sum);
    }
    std::fill(dq_.floats(), dq_.floats() + rows * width_, 0.0f);
    for (int64_t key = seen.low; key < seen.high; key += kKeys) {
      const int64_t sees = seen_of(seen.high - key), count = std::min(sees, call_.keys - key);
      multiply<false>({queries_along_.words(), width_, 1}, {keys_across_.words() + key * width_, kKeys}, rows, sees,
                      width_, scores_.floats(), kKeys, false);
      multiply<false>({grads_along_.words(), width_, 1}, {values_across_.words() + key * width_, kKeys}, rows, sees,
                      width_, slopes_.floats(), kKeys, false);
      for (int64_t r = 0; r < rows; ++r) slope(r, seen.first[r] - key, seen.end[r] - key, lse[r], mean[r]);
      multiply<false>({scores_.words(), 1, kKeys}, {grads_along_.words(), width_}, count, width_, rows,
                      dv_.floats() + key * width_, width_, true);
      multiply<false>({slopes_.words(), 1, kKeys}, {queries_along_.words(), width_}, count, width_, rows,
                      dk_.floats() + key * width_, width_, true);
      multiply<false>({slopes_.words(), kKeys, 1}, {keys_along_.words() + key * width_, width_}, rows, width_, sees,
                      dq_.floats(), width_, true);
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < width_; d += kLanes) dq.store16(begin + r, d, load(dq_.floats() + r * width_ + d));
  }

  // Of a query and a block of keys, of which it sees those from `first` to `end`: its chances P, and dS.
  void slope(int64_t r, int64_t first, int64_t end, float lse, float mean) {
    float *score = scores_.floats() + r * kKeys, *slope = slopes_.floats() + r * kKeys;
    Floats x[kRegisters];
    for (int c = 0; c < kRegisters; ++c) x[c] = load(score + c * kLanes) * call_.scale - lse;
    if (first > 0 || end < kKeys) hide(x, first, end);
    for (int c = 0; c < kRegisters; ++c) {
      const Floats p = exponential(x[c]), ds = p * (load(slope + c * kLanes) - mean) * call_.scale;
      store(score + c * kLanes, p);
      store(slope + c * kLanes, ds);
    }
  }

  void put() {
    const auto dk = Rows<kIsBf16>::of(call_.dk, batch_, kv_head_), dv = Rows<kIsBf16>::of(call_.dv, batch_, kv_head_);
    for (int64_t key = 0; key < call_.keys; ++key)
      for (int64_t d = 0; d < width_; d += kLanes) {
        dk.store16(key, d, load(dk_.floats() + key * width_ + d));
        dv.store16(key, d, load(dv_.floats() + key * width_ + d));
      }
  }

  // What a part gave the keys that it saw; their sums begin anew.
  void put_on_grid() {
    int64_t wrong = 0;
    auto add = [&](const View& to, const float* sums) {
      int64_t* at = static_cast<int64_t*>(to.at) + batch_ * to.batch + kv_head_ * to.head;
      for (int64_t key = 0; key < seen_; ++key)
        wrong += add_run_to_grid(at + key * to.token, sums + key * width_, width_, call_.grid_scale, call_.grid_limit);
    };
    add(call_.dk, dk_.floats());
    add(call_.dv, dv_.floats());
    if (wrong) {
#pragma omp critical
      for (const float* sums : {dk_.floats(), dv_.floats()})
        for (int64_t i = 0; i < seen_ * width_; ++i)
          if (const float size = std::fabs(sums[i]); !(size < call_.grid_limit) && !(size <= *call_.outside))
            *call_.outside = size;
    }
    clear(seen_);
  }

  void clear(int64_t keys) {
    std::fill(dk_.floats(), dk_.floats() + keys * width_, 0.0f);
    std::fill(dv_.floats(), dv_.floats() + keys * width_, 0.0f);
  }

  const Call& call_;
  const int64_t width_ = call_.width, keys_ = padded(call_.keys, kKeys);
  int64_t batch_ = 0, kv_head_ = 0;
  int64_t seen_ = 0;  // keys that a part saw: none behind them
  Room keys_across_{keys_ * width_}, values_across_{keys_ * width_}, keys_along_{keys_ * width_};
  Room dk_{keys_ * width_}, dv_{keys_ * width_};
  Room queries_along_{kQueries * width_}, grads_along_{kQueries * width_};
  Room scores_{kQueries * kKeys}, slopes_{kQueries * kKeys}, dq_{kQueries * width_};
};

}  // namespace superstep
