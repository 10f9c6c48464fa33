// The gradients of attention of bf16, two numbers at a time.

#pragma once

#include "paired.h"

namespace superstep {

class PairedBackward {
 public:
  explicit PairedBackward(const Call& call) : call_(call) {}

  // One key head of a sequence, with all query heads that see it.
  void run(int64_t batch, int64_t kv_head) {
    const auto of = [&](const View& view) { return Rows<true>::of(view, batch, kv_head); };
    const auto k = of(call_.k), v = of(call_.v), dk = of(call_.dk), dv = of(call_.dv);
    lay_rows(k, call_.keys, padded_, call_.width, words_, keys_.words());
    lay_rows(v, call_.keys, padded_, call_.width, words_, values_.words());
    lay_turned(k, call_.keys, call_.width, wide_, keys_turned_.words());
    for (float* sums : {dk_.floats(), dv_.floats()}) std::fill(sums, sums + padded_ * wide_, 0.0f);
    const int64_t group = call_.heads / call_.kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
      for (int64_t at = 0; at < call_.queries; at += kSide) block(batch, head, at, std::min(kSide, call_.queries - at));
    for (int64_t key = 0; key < call_.keys; ++key)
      for (int64_t d = 0; d < call_.width; d += kLanes) {
        dk.store16(key, d, load(dk_.floats() + key * wide_ + d) * call_.scale);
        dv.store16(key, d, load(dv_.floats() + key * wide_ + d));
      }
  }

 private:
  void block(int64_t batch, int64_t head, int64_t begin, int64_t rows) {
    const auto of = [&](const View& view) { return Rows<true>::of(view, batch, head).from(begin); };
    const auto q = of(call_.q), grad = of(call_.grad), out = of(call_.out);
    const Sight sight(call_, batch, begin, rows);
    lay_columns(q, rows, call_.width, words_, queries_across_.words());
    lay_columns(grad, rows, call_.width, words_, grads_across_.words());
    lay_pairs(q, rows, call_.width, wide_, queries_along_.words());
    lay_pairs(grad, rows, call_.width, wide_, grads_along_.words());
    const float* lse = call_.lse + (batch * call_.heads + head) * call_.queries + begin;
    for (int64_t r = 0; r < kSide; ++r) {
      Floats sum{};
      for (int64_t d = 0; d < (r < rows ? call_.width : 0); d += kLanes) sum += grad.load16(r, d) * out.load16(r, d);
      mean_[r / kLanes][r % kLanes] = total(sum);
      lse_[r / kLanes][r % kLanes] = r < rows ? lse[r] * kLog2OfE : 0.0f;
    }
    std::fill(dq_.floats(), dq_.floats() + wide_ * kSide, 0.0f);
    for (int64_t key = sight.low; key < sight.high; key += kSide) {
      const auto across = [&](Room& rows_of, Room& columns, Room& to) {
        multiply_tiles(rows_of.words() + key * words_, words_, columns.words(), kSide, kSide, kSide, words_, to.floats(),
                       kSide, false);
      };
      across(keys_, queries_across_, scores_);
      across(values_, grads_across_, slopes_);
      for (int64_t r = 0; r < kSide; r += 2) {
        if (sight.is_whole(key)) slope<true>(sight, key, r);
        else slope<false>(sight, key, r);
      }
      const auto along = [&](Room& rows_of, Room& columns, Room& to) {
        multiply_tiles(rows_of.words(), kHalf, columns.words(), wide_, kSide, wide_, kHalf, to.floats() + key * wide_,
                       wide_, true);
      };
      along(chances_, grads_along_, dv_);
      along(slopes_rows_, queries_along_, dk_);
      multiply_tiles(keys_turned_.words() + key * words_, kHalf, slopes_pairs_.words(), kSide, wide_, kSide, kHalf,
                     dq_.floats(), kSide, true);
    }
    alignas(64) float by[kSide];
    std::fill(by, by + kSide, call_.scale);
    put_columns(dq_.floats(), by, rows, call_.width, of(call_.dq));
  }

  // Of two keys and a block of queries: chances P, and dS without the scale.
  template <bool kIsWhole>
  void slope(const Sight& sight, int64_t key, int64_t r) {
    const float by = call_.scale * kLog2OfE;
    for (int64_t g = 0; g < kGroups; ++g) {
      Floats ds[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t at = (r + i) * kSide + g * kLanes;
        Floats x = load(scores_.floats() + at) * by - lse_[g];
        if constexpr (!kIsWhole) x = sight.hide(x, key + r + i, g);
        const Floats p = power_of_two(x);
        ds[i] = p * (load(slopes_.floats() + at) - mean_[g]);
        *reinterpret_cast<Halves*>(reinterpret_cast<bf16*>(chances_.words()) + at) = narrow(p);
        *reinterpret_cast<Halves*>(reinterpret_cast<bf16*>(slopes_rows_.words()) + at) = narrow(ds[i]);
      }
      *reinterpret_cast<Words*>(slopes_pairs_.words() + r / 2 * kSide + g * kLanes) = paired(ds[0], ds[1]);
    }
  }

  const Call& call_;
  const int64_t wide_ = padded(call_.width, kFour), words_ = wide_ / 2, padded_ = padded(call_.keys, kSide);
  const Tiles tiles_;
  Room keys_{padded_ * words_}, values_{padded_ * words_}, keys_turned_{padded_ * words_};
  Room dk_{padded_ * wide_}, dv_{padded_ * wide_};
  Room queries_across_{words_ * kSide}, grads_across_{words_ * kSide}, queries_along_{words_ * kSide},
      grads_along_{words_ * kSide};
  Room scores_{kSide * kSide}, slopes_{kSide * kSide}, dq_{wide_ * kSide};
  // P and dS as factors that are summed over queries, and dS as one that is summed over keys.
  Room chances_{kSide * kHalf}, slopes_rows_{kSide * kHalf}, slopes_pairs_{kSide * kHalf};
  Floats mean_[kGroups], lse_[kGroups];
};

}  // namespace superstep
