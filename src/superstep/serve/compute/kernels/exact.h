// The sums of exact mode, in the trainer's own order: products as numerics/invariant_matmul.py has them, norms and gates
// as engine/exact/linear.py, with torch's way of summing a row; attention by the trainer's own function, a block of keys
// at a time (kernels/exact_attention.py). serve/compute/compiled/compiled_exact.py asks at every start whether they have the same bits.
//
//   T  rows     K  key heads, each of G query heads     H  width of one head     P  places

#pragma once

#include <new>

#include "attention.h"
#include "weight.h"

namespace superstep {

constexpr int64_t kPiece = 256;  // inputs of one product
constexpr int kLevels = 7;       // of a tree over cells: 64 of them at most

// What torch computes in MKL's way: functions, (count, from, to, mode), neither of which rounds correctly everywhere. And
// the trainer's attention of some rows to a block of keys [H, 64] and values [64, H], which begins at a place.
using Function = void (*)(int32_t, const float*, float*, int64_t);
using Attend = void (*)(const float* q, int64_t rows, int64_t width, float scale, const float* keys, const float* values,
                        int64_t place, const int64_t* first, const int64_t* end, float* sums, float* total, float* top);
struct Ways {
  Function exponentials;  // null in fast mode
  Function roots;
  Attend attend;
};
constexpr int64_t kMode = 0x00140102;  // high accuracy, denormal numbers kept, no errors raised

// Numbers that begin where a cache line does, as torch's do: MKL computes those before it in another way.
class Floats {
 public:
  explicit Floats(int64_t count) : at_(static_cast<float*>(::operator new(4 * count, std::align_val_t{64}))) {}
  ~Floats() { ::operator delete(at_, std::align_val_t{64}); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  float* data() { return at_; }

 private:
  float* at_;
};

inline float sum_of_lanes(__m256 x) {
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, x);
  float sum = lanes[0];
  for (int i = 1; i < 8; ++i) sum += lanes[i];
  return sum;
}

// 1 / sqrt(mean of squares + eps) of a row of a multiple of 8 numbers, as torch's norm sums them.
inline float inverse_root(const bf16* x, int64_t width, float eps, Function roots) {
  __m256 sum = _mm256_setzero_ps();
  for (int64_t d = 0; d < width; d += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + d));
    const __m256 of = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    sum = _mm256_add_ps(sum, _mm256_mul_ps(of, of));
  }
  const float norm = std::sqrt(sum_of_lanes(sum));
  float root = norm * norm / static_cast<float>(width) + eps;
  roots(1, &root, &root, kMode);
  return 1.0f / root;
}

// Partial sums of a tree over neighbours, which come from left to right.
template <int R>
struct Tree {
  __m512 levels[kLevels][R][kRegisters];

  void add(int64_t cell, __m512 (&sum)[R][kRegisters]) {
    int level = 0;
    for (; cell >> level & 1; ++level)
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < kRegisters; ++n) sum[r][n] = _mm512_add_ps(levels[level][r][n], sum[r][n]);
    std::memcpy(levels[level], sum, sizeof(sum));
  }
};

// A panel of some rows: cells of inputs as a tree, their pieces from left to right, each rounded as torch gives it.
template <int R>
inline void sum_of_cells(const Columns& columns, const char* rows, __m512 (&total)[R][kRegisters]) {
  Tree<R> tree;
  const int64_t cells = columns.weight.cells, width = columns.weight.steps() / cells;
  for (int64_t cell = 0; cell < cells; ++cell) {
    for (int64_t at = 0; at < width; at += kPiece / 2) {
      __m512 sums[R][kRegisters];
      for (auto& row : sums)
        for (auto& sum : row) sum = Bf16::zero();
      add_columns<Bf16, R>(sums, columns, rows, cell * width + at, std::min(kPiece / 2, width - at));
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < kRegisters; ++n)
          total[r][n] = at ? _mm512_add_ps(total[r][n], rounded(sums[r][n])) : rounded(sums[r][n]);
    }
    tree.add(cell, total);
  }
}

// Some queries of one part with one key head.
class ExactTile {
 public:
  ExactTile(const Queries& queries, const Store& store, const Places& places, const Part& part, int64_t head,
            int64_t first, int64_t count, Attend attend)
      : queries_(queries), store_(store), places_(places), part_(part), head_(head), first_(first),
        group_(queries.heads / store.kv_heads), size_(count * group_), end_(part.first + first + count),
        attend_(attend) {}

  void run() {
    const int64_t width = store_.width;
    for (int64_t m = 0; m < size_; ++m) {
      const bf16* from = queries_.rows + row(m) * queries_.stride + head_of(m) * width;
      for (int64_t h = 0; h < width; h += kLanes) _mm512_store_ps(q_ + m * width + h, load(from + h));
      ends_[m] = place(m) + 1;
      firsts_[m] = places_.window ? std::max<int64_t>(0, ends_[m] - places_.window) : 0;
      top_[m] = -INFINITY;
      total_[m] = 0.0f;
    }
    std::memset(mixed_, 0, sizeof(float) * size_ * width);
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(width)));
    for (int64_t block = firsts_[0] / kBlock * kBlock; block < end_; block += kBlock) {
      lay_out(block);
      attend_(q_, size_, width, scale, keys_, values_, block, firsts_, ends_, mixed_, total_, top_);
    }
    for (int64_t m = 0; m < size_; ++m) {
      bf16* out = queries_.out + (row(m) * queries_.heads + head_of(m)) * width;
      const __m512 by = _mm512_set1_ps(1.0f / total_[m]);
      const float* mixed = mixed_ + m * width;
      for (int64_t h = 0; h < width; h += kLanes)
        superstep::store(out + h, _mm512_mul_ps(_mm512_load_ps(mixed + h), by));
    }
  }

 private:
  int64_t row(int64_t m) const { return part_.row + first_ + m / group_; }
  int64_t place(int64_t m) const { return part_.first + first_ + m / group_; }
  int64_t head_of(int64_t m) const { return head_ * group_ + m % group_; }

  // Keys and values of a block as the trainer has them; zeros behind the last that is seen, where memory may hold anything.
  void lay_out(int64_t block) {
    const int64_t width = store_.width, seen = std::min(kBlock, end_ - block);
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000));
    for (int64_t at = 0; at < kBlock; at += kLanes) {
      const __mmask16 lanes = lanes_before(seen, at);
      const bf16* keys = at < seen ? group(store_.keys, block + at) : nullptr;
      for (int64_t h = 0; h < width; h += 2) {
        const __m512i both = _mm512_maskz_loadu_epi32(lanes, keys + h * kLanes);
        _mm512_store_si512(keys_ + h * kBlock + at, _mm512_slli_epi32(both, 16));
        _mm512_store_si512(keys_ + (h + 1) * kBlock + at, _mm512_and_si512(both, upper));
      }
    }
    for (int64_t p = 0; p < kBlock; ++p) {
      float* to = values_ + p * width;
      if (p >= seen) {
        std::memset(to, 0, sizeof(float) * width);
        continue;
      }
      const bf16* from = group(store_.values, block + p) + p % kLanes / 2 * 2 * width;
      for (int64_t h = 0; h < width; h += kLanes) {
        const __m512i both = _mm512_loadu_si512(from + 2 * h);
        _mm512_store_si512(to + h, p % 2 ? _mm512_and_si512(both, upper) : _mm512_slli_epi32(both, 16));
      }
    }
  }

  const bf16* group(bf16* all, int64_t place) const {
    return store_.of(all, places_.slot(part_, place) / kLanes, head_);
  }

  const Queries& queries_;
  const Store& store_;
  const Places& places_;
  const Part& part_;
  const int64_t head_, first_, group_, size_, end_;
  const Attend attend_;
  alignas(64) float q_[kTileRows * kMostWidth];
  alignas(64) float mixed_[kTileRows * kMostWidth];
  alignas(64) float keys_[kBlock * kMostWidth];
  alignas(64) float values_[kBlock * kMostWidth];
  int64_t firsts_[kTileRows], ends_[kTileRows];
  float top_[kTileRows], total_[kTileRows];
};

}  // namespace superstep
