// Exact mode's gradient of a weight: of each chunk of tokens a product, put on a grid and added there as integers.
//
//   into [O, I] += sum over chunks of grid(grad' · x)        grad [B, S, O]    x [B, S, I]
//
// A chunk is the same tokens of all sequences. Of a tile of the weight all chunks are added one after the other, so that its
// integers come from memory once. An element is the sum over its chunk's tokens in their order, whatever tile it is in.

#pragma once

#include <memory>
#include <new>

#include "grid.h"
#include "numbers.h"
#include "product.h"

namespace superstep {

constexpr int64_t kGridRows = 48;  // of a tile of the weight

// [batch, token, width], of which the last dim lies side by side.
struct Tokens {
  const void* at;
  int64_t batch, token;  // strides in numbers
};

struct GridProduct {
  int64_t* into;
  int64_t row;  // stride of `into`
  Tokens grad, x;
  int64_t sequences, tokens, chunks, outputs, inputs;  // chunks divide the tokens, 16 the inputs
  float scale, limit;
};

// Some columns of all tokens as fp32, chunk by chunk: [chunk, sequence, token of it, count].
template <bool kIsBf16>
void pack_columns(const GridProduct& call, const Tokens& from, int64_t first, int64_t count, float* to) {
  const int64_t length = call.tokens / call.chunks;
  for (int64_t chunk = 0; chunk < call.chunks; ++chunk)
    for (int64_t b = 0; b < call.sequences; ++b)
      for (int64_t s = chunk * length; s < (chunk + 1) * length; ++s, to += count) {
        const Numbers<kIsBf16> row = Numbers<kIsBf16>(from.at) + (b * from.batch + s * from.token + first);
        int64_t d = 0;
        for (; d + kLanes <= count; d += kLanes) store(to + d, row[d]);
        if (d < count) {
          const Floats rest = row.some(d, count - d);
          std::memcpy(to + d, &rest, (count - d) * sizeof(float));
        }
      }
}

// How many terms were no smaller in size than the limit, or are no numbers.
template <bool kIsBf16>
int64_t add_products_to_grid(const GridProduct& call, int64_t threads) {
  const int64_t rows = call.sequences * call.tokens, steps = rows / call.chunks;
  const std::unique_ptr<float[]> x(new float[rows * call.inputs]);
  int64_t wrong = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for
    for (int64_t first = 0; first < call.inputs; first += kPanel)
      pack_columns<kIsBf16>(call, call.x, first, std::min<int64_t>(kPanel, call.inputs - first), x.get() + first * rows);
    const std::unique_ptr<float[]> grad(new float[rows * kGridRows]);
    float tile[kGridRows * kPanel];
    int64_t sums[kGridRows * kPanel];
#pragma omp for reduction(+ : wrong)
    for (int64_t o = 0; o < call.outputs; o += kGridRows) {
      const int64_t count = std::min(kGridRows, call.outputs - o);
      pack_columns<kIsBf16>(call, call.grad, o, count, grad.get());
      for (int64_t first = 0; first < call.inputs; first += kPanel) {
        const int64_t columns = std::min<int64_t>(kPanel, call.inputs - first);
        std::fill(sums, sums + count * columns, 0);
        for (int64_t chunk = 0; chunk < call.chunks; ++chunk) {
          const auto* left = reinterpret_cast<const Word*>(grad.get() + chunk * steps * count);
          const auto* right = reinterpret_cast<const Word*>(x.get() + first * rows + chunk * steps * columns);
          multiply<false>({left, 1, count}, {right, columns}, count, columns, steps, tile, columns, false);
          wrong += add_run_to_grid(sums, tile, count * columns, call.scale, call.limit);
        }
        for (int64_t r = 0; r < count; ++r) {
          int64_t* to = call.into + (o + r) * call.row + first;
          for (int64_t c = 0; c < columns; ++c) to[c] += sums[r * columns + c];
        }
      }
    }
  }
  return wrong;
}

}  // namespace superstep
