// Attention of bf16, two numbers at a time: of one head at a time, from left to right over blocks of its keys.

#pragma once

#include "paired.h"

namespace superstep {

class PairedForward {
 public:
  explicit PairedForward(const Call& call) : call_(call) {}

  // One key head of a sequence, with all query heads that see it.
  void run(int64_t batch, int64_t kv_head) {
    lay_rows(Rows<true>::of(call_.k, batch, kv_head), call_.keys, padded_, call_.width, words_, keys_.words());
    lay_turned(Rows<true>::of(call_.v, batch, kv_head), call_.keys, call_.width, wide_, values_.words());
    const int64_t group = call_.heads / call_.kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
      for (int64_t at = 0; at < call_.queries; at += kSide) block(batch, head, at, std::min(kSide, call_.queries - at));
  }

 private:
  void block(int64_t batch, int64_t head, int64_t begin, int64_t rows) {
    const Sight sight(call_, batch, begin, rows);
    lay_columns(Rows<true>::of(call_.q, batch, head).from(begin), rows, call_.width, words_, queries_.words());
    std::fill(sums_.floats(), sums_.floats() + wide_ * kSide, 0.0f);
    for (int64_t g = 0; g < kGroups; ++g) total_[g] = Floats{}, top_[g] = all(-std::numeric_limits<float>::infinity());
    for (int64_t key = sight.low; key < sight.high; key += kSide) {
      multiply_tiles(keys_.words() + key * words_, words_, queries_.words(), kSide, kSide, kSide, words_,
                     scores_.floats(), kSide, false);
      for (int64_t g = 0; g < kGroups; ++g) weigh(sight, key, g);
      multiply_tiles(values_.words() + key * words_, kHalf, chances_.words(), kSide, wide_, kSide, kHalf, sums_.floats(),
                     kSide, true);
    }
    alignas(64) float by[kSide];
    float* lse = call_.lse + (batch * call_.heads + head) * call_.queries + begin;
    for (int64_t r = 0; r < kSide; ++r) {
      const float total = total_[r / kLanes][r % kLanes];
      by[r] = total > 0 ? 1.0f / total : 0.0f;
      if (r < rows) lse[r] = top_[r / kLanes][r % kLanes] / kLog2OfE + std::log(total);
    }
    put_columns(sums_.floats(), by, rows, call_.width, Rows<true>::of(call_.out, batch, head).from(begin));
  }

  // Scores of 16 queries become chances, as powers of two. What they are counted from is made larger where a chance would
  // be above 2^8: sums are as exact, and seldom multiplied (so does FlashAttention-4, as Modal found in 2025).
  void weigh(const Sight& sight, int64_t key, int64_t g) {
    constexpr float kLater = 8.0f;
    const float by = call_.scale * kLog2OfE;
    float* at = scores_.floats() + g * kLanes;
    const float none = -std::numeric_limits<float>::infinity();
    Floats most[2] = {all(none), all(none)};
    if (sight.is_whole(key)) {
      for (int64_t r = 0; r < kSide; r += 2)
        for (int i = 0; i < 2; ++i) most[i] = larger(load(at + (r + i) * kSide), most[i]);
    } else {
      for (int64_t r = 0; r < kSide; ++r) {
        const Floats x = sight.hide(load(at + r * kSide), key + r, g);
        store(at + r * kSide, x);
        most[0] = larger(x, most[0]);
      }
    }
    const Floats found = larger(most[0], most[1]) * by;
    const Ints is_more = found > top_[g] + kLater;
    if (any(is_more)) {
      const Floats before = top_[g];
      top_[g] = is_more ? found : before;
      const Floats less = before > all(none) ? power_of_two(before - top_[g]) : Floats{};
      total_[g] *= less;
      float* sums = sums_.floats() + g * kLanes;
      for (int64_t d = 0; d < wide_; ++d) store(sums + d * kSide, load(sums + d * kSide) * less);
    }
    const Floats shift = top_[g] > all(none) ? top_[g] : Floats{};  // where nothing was seen yet, all is -inf
    Floats total[2] = {};
    for (int64_t r = 0; r < kSide; r += 2) {
      const Floats low = power_of_two(load(at + r * kSide) * by - shift);
      const Floats high = power_of_two(load(at + (r + 1) * kSide) * by - shift);
      total[0] += low;
      total[1] += high;
      *reinterpret_cast<Words*>(chances_.words() + r / 2 * kSide + g * kLanes) = paired(low, high);
    }
    total_[g] += total[0] + total[1];
  }

  static bool any(Ints x) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#else
    int32_t out = 0;
    for (int i = 0; i < kLanes; ++i) out |= x[i];
    return out;
#endif
  }

  const Call& call_;
  const int64_t wide_ = padded(call_.width, kFour), words_ = wide_ / 2, padded_ = padded(call_.keys, kSide);
  const Tiles tiles_;
  Room keys_{padded_ * words_}, values_{padded_ * words_};  // rows; turned over
  Room queries_{words_ * kSide}, scores_{kSide * kSide}, chances_{kHalf * kSide}, sums_{wide_ * kSide};
  Floats total_[kGroups], top_[kGroups];
};

}  // namespace superstep
