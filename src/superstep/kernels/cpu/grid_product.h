// Exact mode's gradient of a weight: of each chunk of tokens a product, put on a grid and added there as integers.
//
//   into [O, I] += sum over chunks of grid(grad' · x)        grad [R, O]    x [R, I]
//
// Which rows are a chunk's is told: the same tokens of all sequences, or those that an expert has of a part of them. Of a
// tile of the weight all chunks are added one after the other, so that its integers come from memory once. An element is the
// sum over its chunk's rows in their order, whatever tile it is in.

#pragma once

#include <memory>
#include <new>

#include "grid.h"
#include "numbers.h"
#include "product.h"

namespace superstep {

constexpr int64_t kGridRows = 48;  // of a tile of the weight

// Rows in the order of chunks: where each begins, in numbers, which lie side by side.
struct Chunked {
  const void* at;
  const int64_t* begins;
};

struct GridProduct {
  int64_t* into;
  int64_t row;  // stride of `into`
  Chunked grad, x;
  const int64_t* starts;  // chunk c is rows [starts[c], starts[c + 1])
  int64_t chunks, outputs, inputs;  // 16 divides the inputs
  float scale, limit;
};

// Some columns of the rows as fp32: [row, count].
template <bool kIsBf16>
void pack_columns(const Chunked& from, int64_t first_row, int64_t last_row, int64_t first, int64_t count, float* to) {
  for (int64_t r = first_row; r < last_row; ++r, to += count) {
    const Numbers<kIsBf16> row = Numbers<kIsBf16>(from.at) + (from.begins[r] + first);
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
  if (call.starts[0] == call.starts[call.chunks]) return 0;
  const int64_t first_row = call.starts[0], last_row = call.starts[call.chunks], rows = last_row - first_row;
  const std::unique_ptr<float[]> x(new float[rows * call.inputs]);
  int64_t wrong = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for
    for (int64_t first = 0; first < call.inputs; first += kPanel)
      pack_columns<kIsBf16>(call.x, first_row, last_row, first, std::min<int64_t>(kPanel, call.inputs - first),
                            x.get() + first * rows);
    const std::unique_ptr<float[]> grad(new float[rows * kGridRows]);
    float tile[kGridRows * kPanel];
    int64_t sums[kGridRows * kPanel];
#pragma omp for reduction(+ : wrong)
    for (int64_t o = 0; o < call.outputs; o += kGridRows) {
      const int64_t count = std::min(kGridRows, call.outputs - o);
      pack_columns<kIsBf16>(call.grad, first_row, last_row, o, count, grad.get());
      for (int64_t first = 0; first < call.inputs; first += kPanel) {
        const int64_t columns = std::min<int64_t>(kPanel, call.inputs - first);
        std::fill(sums, sums + count * columns, 0);
        for (int64_t chunk = 0; chunk < call.chunks; ++chunk) {
          const int64_t at = call.starts[chunk] - first_row, steps = call.starts[chunk + 1] - call.starts[chunk];
          if (steps == 0) continue;
          const auto* left = reinterpret_cast<const Word*>(grad.get() + at * count);
          const auto* right = reinterpret_cast<const Word*>(x.get() + first * rows + at * columns);
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
