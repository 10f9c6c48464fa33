// What a step does between its products, each in one pass over memory: norms, the rotary embedding, gates, and the rows
// of a cross entropy; and exact mode's sums. Plain C to whom calls it; all memory that is told of is the caller's.

#include "packed.h"
#include "cross_entropy.h"
#include "grid.h"
#include "grid_product.h"
#include "norm.h"
#include "outer.h"
#include "philox.h"
#include "rope.h"
#include "swiglu.h"

using namespace superstep;

extern "C" {

void superstep_norm(int64_t is_bf16, const void* x, const void* w, void* y, float* r, int64_t rows, int64_t width,
                    float eps, int64_t threads) {
  (is_bf16 ? norm<true> : norm<false>)(x, w, y, r, rows, width, eps, threads);
}

void superstep_norm_backward(int64_t is_bf16, const void* g, const void* x, const void* w, const float* r, void* dx,
                             float* dw, int64_t rows, int64_t width, int64_t threads) {
  (is_bf16 ? norm_backward<true> : norm_backward<false>)(g, x, w, r, dx, dw, rows, width, threads);
}

void superstep_norm_backward_on_grid(int64_t is_bf16, const void* g, const void* x, const void* w, const float* r,
                                     void* dx, int64_t* dw, int64_t rows, int64_t width, float scale, float limit,
                                     int64_t* wrong, int64_t) {
  *wrong = (is_bf16 ? norm_backward_on_grid<true> : norm_backward_on_grid<false>)(g, x, w, r, dx, dw, rows, width, scale,
                                                                                  limit);
}

void superstep_turn(int64_t is_bf16, const void* x, int64_t batch_stride, int64_t token_stride, int64_t head_stride,
                    const void* cos, const void* sin, int64_t tables, void* y, int64_t batch, int64_t tokens,
                    int64_t heads, int64_t width, float sign, int64_t threads) {
  const Turning call{x, batch_stride, token_stride, head_stride, cos, sin, tables, y, batch, tokens, heads, width};
  (is_bf16 ? turn<true> : turn<false>)(call, sign, threads);
}

void superstep_swiglu(int64_t is_bf16, const void* a, const void* b, void* y, int64_t count, int64_t threads) {
  (is_bf16 ? swiglu<true> : swiglu<false>)(a, b, y, count, threads);
}

void superstep_swiglu_backward(int64_t is_bf16, const void* g, const void* a, const void* b, void* da, void* db,
                               int64_t count, int64_t threads) {
  (is_bf16 ? swiglu_backward<true> : swiglu_backward<false>)(g, a, b, da, db, count, threads);
}

void superstep_unpack_blocks(int64_t is_bf16, int64_t is_nf4, const uint8_t* packed, const float* scales, void* out,
                             int64_t rows, int64_t blocks, int64_t number, int64_t whole, int64_t threads) {
  const auto unpack = is_nf4 ? (is_bf16 ? unpack_blocks<true, true> : unpack_blocks<false, true>)
                             : (is_bf16 ? unpack_blocks<true, false> : unpack_blocks<false, false>);
  unpack(packed, scales, out, rows, blocks, number, whole, threads);
}

void superstep_random_words(int64_t key, int64_t step, int64_t sample, const int64_t* firsts, int64_t samples,
                            int64_t rows, int64_t width, uint32_t* out, int64_t threads) {
  random_words({uint64_t(key), uint32_t(step), uint32_t(sample), firsts, samples, rows, width}, out, threads);
}

void superstep_drop(int64_t is_bf16, int64_t key, int64_t step, int64_t sample, const int64_t* firsts, int64_t samples,
                    int64_t rows, int64_t width, const void* x, void* y, int64_t spread, int64_t threshold, float scale,
                    int64_t threads) {
  const Drawn call{uint64_t(key), uint32_t(step), uint32_t(sample), firsts, samples, rows, width};
  (is_bf16 ? drop<true> : drop<false>)(call, x, y, spread, threshold, scale, threads);
}

void superstep_row_sums(int64_t is_bf16, void* x, int64_t rows, int64_t columns, int64_t width, const int64_t* targets,
                        float* lse, float* score, float temperature, int64_t threads) {
  const Logits call{x, rows, columns, width, targets, 1.0f / temperature};
  (is_bf16 ? row_sums<true> : row_sums<false>)(call, lse, score, threads);
}

void superstep_row_gradients(int64_t is_bf16, void* x, int64_t rows, int64_t columns, int64_t width,
                             const int64_t* targets, const float* lse, const float* factor, float temperature,
                             int64_t threads) {
  const Logits call{x, rows, columns, width, targets, 1.0f / temperature};
  (is_bf16 ? row_gradients<true> : row_gradients<false>)(call, lse, factor, threads);
}

void superstep_add_to_grid(int64_t* into, const float* values, int64_t count, float scale, float limit, int64_t* wrong,
                           int64_t threads) {
  *wrong = add_to_grid(into, values, count, scale, limit, threads);
}

int64_t superstep_may_use_tiles() { return may_use_tiles(); }

void superstep_add_outer(float* into, int64_t into_row, const bf16* left, int64_t left_row, const bf16* right,
                         int64_t right_row, int64_t tokens, int64_t rows, int64_t columns, float scale, int64_t threads) {
  add_outer({left, right, left_row, right_row, tokens, rows, columns, into, into_row, scale}, threads);
}

// Of ``groups`` weights side by side, each with as many chunks of its own.
void superstep_add_products_to_grid(int64_t is_bf16, int64_t* into, int64_t group, int64_t row, const void* grad,
                                    const int64_t* grad_begins, const void* x, const int64_t* x_begins,
                                    const int64_t* starts, int64_t groups, int64_t chunks, int64_t outputs,
                                    int64_t inputs, float scale, float limit, int64_t* wrong, int64_t threads) {
  *wrong = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const GridProduct call{into + g * group,    row,    {grad, grad_begins}, {x, x_begins},
                           starts + g * chunks, chunks, outputs,             inputs,
                           scale,               limit};
    *wrong += (is_bf16 ? add_products_to_grid<true> : add_products_to_grid<false>)(call, threads);
  }
}

}  // extern "C"
