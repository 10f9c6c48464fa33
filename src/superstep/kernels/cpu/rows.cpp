// Tables with sparse gradients: the pairs of word2vec, and rows added and updated. Plain C to its callers, in one thread.

#include "table_rows.h"
#include "word_pairs.h"

using namespace superstep;

extern "C" {

void superstep_word_pairs(int64_t is_bag, const int32_t* words, const int32_t* reach, const int32_t* outputs,
                          int64_t samples, int64_t length, int64_t most, const float* in, int64_t in_rows,
                          const float* out, int64_t out_rows, int64_t width, float* losses, int32_t* in_places,
                          int64_t* in_touched, float* in_sums, int32_t* out_places, int64_t* out_touched,
                          float* out_sums, int64_t* counts) {
  const PairsCall call{words, reach, outputs, samples, length, most, in, out, in_rows, out_rows, width};
  const int64_t padded = (width + kLanes - 1) / kLanes * kLanes;
  CompactTable in_table{in_places, in_touched, in_sums, 0, padded};
  CompactTable out_table{out_places, out_touched, out_sums, 0, padded};
  word_pairs(call, is_bag, in_table, out_table, losses);
  counts[0] = in_table.count, counts[1] = out_table.count;
}

void superstep_add_rows(float* table, const int64_t* rows, int64_t count, int64_t width, const float* values,
                        int64_t stride) {
  add_rows(table, {rows, count, width}, values, stride);
}

double superstep_square_rows(const float* table, const int64_t* rows, int64_t count, int64_t width) {
  return square_rows(table, {rows, count, width});
}

void superstep_update_rows(float* table, const int64_t* rows, int64_t count, int64_t width, const float* grads,
                           int64_t is_packed, float lr, float scale, float most) {
  update_rows(table, grads, is_packed, {rows, count, width}, lr, scale, most);
}

void superstep_cut_rows(float* table, const int64_t* rows, int64_t count, int64_t width, float* packed) {
  cut_rows(table, {rows, count, width}, packed);
}

void superstep_put_rows(float* table, const int64_t* rows, int64_t count, int64_t width, const float* packed) {
  put_rows(table, {rows, count, width}, packed);
}

void superstep_zero_rows(float* table, const int64_t* rows, int64_t count, int64_t width) {
  zero_rows(table, {rows, count, width});
}

}  // extern "C"
