// What a row of logits says of its distribution.

#pragma once

#include "tile.h"

namespace superstep {

struct Total {
  float largest;
  int64_t place;  // of the largest; the first of equals
  float sum;      // of exp(logit - largest); no number where a logit is none

  // Of two parts of a row, of which this is the first.
  Total with(const Total& next) const {
    const bool is_next = next.largest > largest;
    const float top = is_next ? next.largest : largest;
    const auto by = [=](float of) { return _mm512_cvtss_f32(exponential(_mm512_set1_ps(of - top))); };
    return {top, is_next ? next.place : place, sum * by(largest) + next.sum * by(next.largest)};
  }
};

inline Total total_of(const float* logits, int64_t begin, int64_t end) {
  if (begin == end) return {-FLT_MAX, begin, 0.0f};
  const __m512 least = _mm512_set1_ps(-FLT_MAX);
  __m512 most = least;
  for (int64_t i = begin; i < end; i += kLanes)
    most = _mm512_max_ps(_mm512_mask_loadu_ps(least, lanes_before(end, i), logits + i), most);
  const float largest = _mm512_reduce_max_ps(most);
  int64_t place = begin;
  while (place < end - 1 && logits[place] != largest) ++place;
  __m512 sum = _mm512_setzero_ps();
  const __m512 top = _mm512_set1_ps(largest);
  for (int64_t i = begin; i < end; i += kLanes) {
    const __mmask16 lanes = lanes_before(end, i);
    const __m512 of = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, logits + i), top));
    sum = _mm512_mask_add_ps(sum, lanes, sum, of);
  }
  return {largest, place, _mm512_reduce_add_ps(sum)};
}

}  // namespace superstep
