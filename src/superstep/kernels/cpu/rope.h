// The rotary embedding: each pair (i, i + H/2) of a head is turned by its token's angle (Su 2021).
//
//   y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin;  gradients are turned back, by the angle's negative

#pragma once

#include "numbers.h"

namespace superstep {

struct Turning {
  const void* x;  // [batch, tokens, heads, width], strides in numbers; a head's width lies side by side
  int64_t batch_stride, token_stride, head_stride;
  const void *cos, *sin;      // [tables, tokens, width]: both halves of a row alike, but that the first of sin is negative
  int64_t tables;             // 1, or a table for each sequence
  void* y;                    // whole
  int64_t batch, tokens, heads, width;
};

template <bool kIsBf16>
void turn(const Turning& call, float sign, int64_t threads) {
  const int64_t half = call.width / 2, row = call.heads * call.width;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t at = 0; at < call.batch * call.tokens; ++at) {
    const int64_t batch = at / call.tokens, token = at % call.tokens;
    const int64_t table = ((call.tables > 1 ? batch : 0) * call.tokens + token) * call.width;
    const Numbers<kIsBf16> cos = Numbers<kIsBf16>(call.cos) + table, sin = Numbers<kIsBf16>(call.sin) + table + half;
    const Numbers<kIsBf16> from = Numbers<kIsBf16>(call.x) + batch * call.batch_stride + token * call.token_stride;
    const Numbers<kIsBf16> to = Numbers<kIsBf16>(call.y) + at * row;
    for (int64_t head = 0; head < call.heads; ++head) {
      const Numbers<kIsBf16> x = from + head * call.head_stride, y = to + head * call.width;
      for (int64_t d = 0; d < half; d += kLanes) {
        const Floats one = x[d], two = x[d + half], c = cos[d], s = sin[d] * sign;
        y.put(d, one * c - two * s);
        y.put(d + half, two * c + one * s);
      }
    }
  }
}

}  // namespace superstep
