// The sums of exact mode, in the trainer's own order: products as numerics/invariant_matmul.py has them, attention as
// numerics/invariant_attention.py, norms and gates as runtime/exact/linear.py, and torch's way of summing a row.
// serve/compute/exactly.py asks at every start whether they have the bits of torch.
//
//   T  rows     K  key heads, each of G query heads     H  width of one head     P  places

#pragma once

#include <new>

#include "attention.h"
#include "weight.h"

namespace superstep {

constexpr int64_t kPiece = 256;      // inputs of one product, and keys of a block
constexpr int kLevels = 7;           // of a tree over cells: 64 of them at most
constexpr int64_t kScores = 1 << 18;  // of one tile, at most, where one query has fewer

// What torch computes in MKL's way: functions, (count, from, to, mode), neither of which rounds correctly everywhere;
// and how many values of a block it sums in one go, which MKL's kernel for the processor decides.
using Function = void (*)(int32_t, const float*, float*, int64_t);
struct Ways {
  Function exponentials;  // null in fast mode
  Function roots;
  int64_t stretch;  // divides kPiece
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

inline float sum_of_block(const float* x) {
  __m256 sums[4];
  for (int j = 0; j < 4; ++j) sums[j] = _mm256_loadu_ps(x + 8 * j);
  for (int64_t p = 32; p < kPiece; p += 32)
    for (int j = 0; j < 4; ++j) sums[j] = _mm256_add_ps(sums[j], _mm256_loadu_ps(x + p + 8 * j));
  return sum_of_lanes(_mm256_add_ps(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), sums[2]), sums[3]));
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

// Some queries of one part with one key head; of all their scores the largest comes first.
class ExactTile {
 public:
  ExactTile(const Queries& queries, const Store& store, const Places& places, const Part& part, int64_t head,
            int64_t first, int64_t count, const Ways& ways)
      : queries_(queries), store_(store), places_(places), part_(part), head_(head), first_(first),
        group_(queries.heads / store.kv_heads), size_(count * group_), end_(part.first + first + count),
        seen_((end_ + kPiece - 1) / kPiece * kPiece), ways_(ways), q_(size_ * store.width),
        shares_(size_ * seen_), mixed_(size_ * store.width), total_(size_) {}

  void run() {
    const int64_t width = store_.width;
    for (int64_t m = 0; m < size_; ++m) {
      const bf16* from = queries_.rows + row(m) * queries_.stride + head_of(m) * width;
      for (int64_t h = 0; h < width; ++h) q_.data()[m * width + h] = to_float(from[h]);
    }
    for (int64_t p = 0; p < end_; p += kLanes) in_tiles(0, size_, [&]<int R>(int64_t m) { score<R>(m, p); });
    for (int64_t m = 0; m < size_; ++m) share(m);
    for (int64_t h = 0; h < width; h += kLanes) in_tiles(0, size_, [&]<int R>(int64_t m) { mix<R>(m, h); });
    for (int64_t m = 0; m < size_; ++m) {
      bf16* out = queries_.out + (row(m) * queries_.heads + head_of(m)) * width;
      const __m512 total = _mm512_set1_ps(total_.data()[m]);
      const float* mixed = mixed_.data() + m * width;
      for (int64_t h = 0; h < width; h += kLanes)
        superstep::store(out + h, _mm512_div_ps(_mm512_loadu_ps(mixed + h), total));
    }
  }

 private:
  int64_t row(int64_t m) const { return part_.row + first_ + m / group_; }
  int64_t place(int64_t m) const { return part_.first + first_ + m / group_; }
  int64_t head_of(int64_t m) const { return head_ * group_ + m % group_; }

  template <int R>
  void score(int64_t m, int64_t p) {
    const int64_t width = store_.width;
    const bf16* keys = store_.of(store_.keys, places_.slot(part_, p) / kLanes, head_);
    const float* q = q_.data() + m * width;
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000));
    __m512 sums[R];
    times<R>([&]<int r>() __attribute__((always_inline)) { sums[r] = _mm512_setzero_ps(); });
    for (int64_t h = 0; h < width; h += 2) {
      const __m512i both = _mm512_loadu_si512(keys + h * kLanes);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
      times<R>([&]<int r>() __attribute__((always_inline)) {
        sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(q[r * width + h]), even, sums[r]);
        sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(q[r * width + h + 1]), odd, sums[r]);
      });
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(shares_.data() + (m + r) * seen_ + p, sums[r]);
  }

  void share(int64_t m) {
    float* of = shares_.data() + m * seen_;
    const float scale = static_cast<float>(std::pow(static_cast<double>(store_.width), -0.5));
    const int64_t end = place(m) + 1, first = places_.window ? std::max<int64_t>(0, end - places_.window) : 0;
    float top = -INFINITY;
    for (int64_t p = first; p < end; ++p) top = std::max(top, of[p] *= scale);
    for (int64_t p = first; p < end; ++p) of[p] -= top;
    // What is hidden counts as exp(-inf): MKL computes whole registers in another way than what is left behind them.
    std::fill(of, of + first, -INFINITY);
    std::fill(of + end, of + seen_, -INFINITY);
    ways_.exponentials(static_cast<int32_t>(seen_), of, of, kMode);
    float total = sum_of_block(of);
    for (int64_t p = kPiece; p < seen_; p += kPiece) total += sum_of_block(of + p);
    total_.data()[m] = total;
  }

  template <int R>
  void mix(int64_t m, int64_t h) {
    const int64_t width = store_.width;
    const float* shares = shares_.data() + m * seen_;
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000));
    for (int64_t begin = 0; begin < end_; begin += ways_.stretch) {
      __m512 sums[R];
      times<R>([&]<int r>() __attribute__((always_inline)) { sums[r] = _mm512_setzero_ps(); });
      for (int64_t p = begin; p < std::min(begin + ways_.stretch, end_); ++p) {
        const bf16* values = store_.of(store_.values, places_.slot(part_, p) / kLanes, head_);
        const __m512i both = _mm512_loadu_si512(values + p % kLanes / 2 * 2 * width + 2 * h);
        const __m512i high = p % 2 ? _mm512_and_si512(both, upper) : _mm512_slli_epi32(both, 16);
        times<R>([&]<int r>() __attribute__((always_inline)) {
          sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(shares[r * seen_ + p]), _mm512_castsi512_ps(high), sums[r]);
        });
      }
      for (int r = 0; r < R; ++r) {
        float* at = mixed_.data() + (m + r) * width + h;
        _mm512_storeu_ps(at, begin ? _mm512_add_ps(_mm512_loadu_ps(at), sums[r]) : sums[r]);
      }
    }
  }

  const Queries& queries_;
  const Store& store_;
  const Places& places_;
  const Part& part_;
  const int64_t head_, first_, group_, size_, end_, seen_;
  const Ways ways_;
  Floats q_, shares_, mixed_, total_;
};

}  // namespace superstep
