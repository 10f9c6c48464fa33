// Attention of rows over keys in pages. Keys and values are read where they lie, once for all query heads that share
// them, and the softmax is made as they come (Milakov 2018; Dao 2022), in blocks that begin at multiples of 64 places:
// so a row's bits depend neither on the rows beside it nor on how its text was cut into steps.
//
//   T  rows     N  query heads     K  key heads, each of G = N / K query heads     H  width of one head

#pragma once

#include <atomic>

#include "tile.h"

namespace superstep {

constexpr int64_t kBlock = 64;      // keys between two looks at the largest score
constexpr int64_t kTileRows = 48;   // queries times heads that share keys, at most, where one query has fewer heads
constexpr int64_t kMostWidth = 256;

// Keys and values of one layer, in groups of 16 places: keys [groups, K, H / 2, 16, 2], values [groups, K, 8, H, 2].
struct Store {
  bf16* keys;
  bf16* values;
  int64_t kv_heads;
  int64_t width;

  int64_t group_size() const { return kLanes * width; }
  bf16* of(bf16* all, int64_t group, int64_t head) const { return all + (group * kv_heads + head) * group_size(); }

  void write(int64_t slot, int64_t head, const bf16* key, const bf16* value) const {
    const int64_t lane = slot % kLanes;
    bf16* k = of(keys, slot / kLanes, head) + 2 * lane;
    bf16* v = of(values, slot / kLanes, head) + lane / 2 * 2 * width + lane % 2;
    for (int64_t h = 0; h < width; h += 2) std::memcpy(k + h * kLanes, key + h, 4);
    // Another thread may write the place beside it: only every other number is touched.
    const int odd = lane % 2;
    for (int64_t h = 0; h < width; h += kLanes) {
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + h)));
      _mm512_mask_storeu_epi16(v - odd + 2 * h, odd ? 0xAAAAAAAA : 0x55555555, odd ? _mm512_slli_epi32(wide, 16) : wide);
    }
  }
};

// Neighbouring rows of one text.
struct Part {
  int64_t row;     // the first
  int64_t first;   // its place in the text
  int64_t count;
  int64_t pages;   // where its pages begin in the step's list
};

// What all layers of a step have in common.
struct Places {
  const Part* parts;
  int64_t count;
  const int32_t* pages;
  int64_t page_tokens;  // a multiple of 16
  int64_t window;       // places that a row sees back to, itself among them; 0 means all

  int64_t slot(const Part& part, int64_t place) const {
    return pages[part.pages + place / page_tokens] * page_tokens + place % page_tokens;
  }
};

struct Queries {
  const bf16* rows;   // of a row all heads, one behind the other
  int64_t stride;     // from row to row
  bf16* out;          // [T, N, H]
  int64_t heads;
};

// Some queries of one part with one key head.
class Tile {
 public:
  Tile(const Queries& queries, const Store& store, const Places& places, const Part& part, int64_t head, int64_t first,
       int64_t count)
      : queries_(queries), store_(store), places_(places), part_(part), head_(head), first_(first),
        group_(queries.heads / store.kv_heads), size_(count * group_), end_(part.first + first + count) {}

  void run() {
    const int64_t width = store_.width;
    for (int64_t m = 0; m < size_; ++m) {
      std::memcpy(q_ + m * width, queries_.rows + row(m) * queries_.stride + head_of(m) * width, 2 * width);
      top_[m] = -FLT_MAX;
      total_[m] = 0.0f;
    }
    std::memset(mixed_, 0, sizeof(float) * size_ * width);
    const int64_t begin = places_.window ? std::max<int64_t>(0, place(0) + 1 - places_.window) : 0;
    for (int64_t block = begin / kBlock * kBlock; block < end_; block += kBlock) add_block(block);
    for (int64_t m = 0; m < size_; ++m) {
      bf16* out = queries_.out + (row(m) * queries_.heads + head_of(m)) * width;
      const __m512 total = _mm512_set1_ps(total_[m]);
      const float* mixed = mixed_ + m * width;
      for (int64_t h = 0; h < width; h += kLanes) store(out + h, _mm512_div_ps(_mm512_load_ps(mixed + h), total));
    }
  }

 private:
  int64_t row(int64_t m) const { return part_.row + first_ + m / group_; }
  int64_t place(int64_t m) const { return part_.first + first_ + m / group_; }
  int64_t head_of(int64_t m) const { return head_ * group_ + m % group_; }

  void add_block(int64_t block) {
    const int64_t width = store_.width, seen = std::min(kBlock, end_ - block);
    const bf16* keys[kRegisters];
    const bf16* values[kRegisters];
    for (int64_t n = 0; n < kRegisters; ++n) {
      const int64_t at = n * kLanes < seen ? n * kLanes : 0;  // behind the text any keys do: nobody sees them
      const int64_t group = places_.slot(part_, block + at) / kLanes;
      keys[n] = store_.of(store_.keys, group, head_);
      values[n] = store_.of(store_.values, group, head_);
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(width));
    in_tiles(0, size_, [&]<int R>(int64_t m) {
      __m512 sums[R][kRegisters];
      for (auto& of : sums)
        for (auto& sum : of) sum = Bf16::zero();
      add_tile<Bf16, R, kRegisters>(sums, q_ + m * width, 2 * width, width / 2,
                                    [&](int64_t k, int n) { return keys[n] + k * 2 * kLanes; });
      for (int r = 0; r < R; ++r) add_scores(m + r, block, sums[r], scale);
    });
    // Of the last pair of places the second may hold anything: a share of zero times what is no number is none.
    const int64_t pairs = (seen + 1) / 2;
    const bf16* last = values[(pairs - 1) / 8] + (pairs - 1) % 8 * 2 * width;
    if (seen % 2) {
      for (int64_t h = 0; h < width; ++h) tail_[2 * h] = last[2 * h], tail_[2 * h + 1] = 0;
      last = tail_;
    }
    for (int64_t h = 0; h < width; h += kPanel) {
      if (h + kPanel <= width) mix<kRegisters>(values, last, pairs, h);
      else for (int64_t at = h; at < width; at += kLanes) mix<1>(values, last, pairs, at);
    }
  }

  // One row's scores of a block to shares, and what that changes of those before.
  void add_scores(int64_t m, int64_t block, __m512 (&scores)[kRegisters], float scale) {
    const int64_t at = place(m), first = places_.window ? std::max<int64_t>(0, at + 1 - places_.window) : 0;
    __mmask16 seen[kRegisters];
    __m512 most = _mm512_set1_ps(-FLT_MAX);
    for (int n = 0; n < kRegisters; ++n) {
      const int64_t begin = block + n * kLanes;
      seen[n] = lanes_before(at + 1, begin) & ~lanes_before(first, begin);
      scores[n] = _mm512_mul_ps(scores[n], _mm512_set1_ps(scale));
      most = _mm512_mask_max_ps(most, seen[n], most, scores[n]);
    }
    const float top = std::max(top_[m], _mm512_reduce_max_ps(most));
    __m512 sum = _mm512_setzero_ps();
    for (int n = 0; n < kRegisters; ++n) {
      const __m512 share = _mm512_maskz_mov_ps(seen[n], exponential(_mm512_sub_ps(scores[n], _mm512_set1_ps(top))));
      store(share_ + m * kBlock + n * kLanes, share);
      sum = _mm512_add_ps(sum, share);
    }
    by_[m] = top > top_[m] ? _mm512_cvtss_f32(exponential(_mm512_set1_ps(top_[m] - top))) : 1.0f;
    total_[m] = total_[m] * by_[m] + _mm512_reduce_add_ps(sum);
    top_[m] = top;
  }

  template <int N>
  void mix(const bf16* const* values, const bf16* last, int64_t pairs, int64_t h) {
    const int64_t width = store_.width;
    in_tiles(0, size_, [&]<int R>(int64_t m) {
      __m512 sums[R][N];
      float* mixed = mixed_ + m * width + h;
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n)
          sums[r][n] = _mm512_mul_ps(_mm512_set1_ps(by_[m + r]), _mm512_load_ps(mixed + r * width + n * kLanes));
      const bf16* shares = share_ + m * kBlock;
      for (int64_t begin = 0; begin < pairs; begin += 8) {
        const int64_t whole = std::min<int64_t>(8, pairs - 1 - begin);
        const bf16* from = values[begin / 8] + 2 * h;
        add_tile<Bf16, R, N>(sums, shares + 2 * begin, 2 * kBlock, whole,
                             [=](int64_t k, int n) { return from + k * 2 * width + n * 2 * kLanes; });
      }
      add_tile<Bf16, R, N>(sums, shares + 2 * (pairs - 1), 2 * kBlock, 1,
                           [=](int64_t, int n) { return last + 2 * h + n * 2 * kLanes; });
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) _mm512_store_ps(mixed + r * width + n * kLanes, sums[r][n]);
    });
  }

  const Queries& queries_;
  const Store& store_;
  const Places& places_;
  const Part& part_;
  const int64_t head_, first_, group_, size_, end_;
  alignas(64) bf16 q_[kTileRows * kMostWidth];
  alignas(64) bf16 share_[kTileRows * kBlock];
  alignas(64) bf16 tail_[2 * kMostWidth];
  alignas(64) float mixed_[kTileRows * kMostWidth];
  float top_[kTileRows], total_[kTileRows], by_[kTileRows];
};

// All rows of a step; threads take what comes next: do_tile(part, head, first, count) for some queries of a part.
template <class Do>
inline void in_parts(const Places& places, int64_t heads, int64_t most, std::atomic<int64_t>& next, Do do_tile) {
  int64_t before = 0, at = next.fetch_add(1);
  for (int64_t p = 0; p < places.count; ++p) {
    const Part& part = places.parts[p];
    const int64_t tiles = (part.count + most - 1) / most, tasks = tiles * heads;
    for (; at < before + tasks; at = next.fetch_add(1)) {
      // The last rows see most: they go first.
      const int64_t tile = tiles - 1 - (at - before) / heads, head = (at - before) % heads;
      do_tile(part, head, tile * most, std::min(most, part.count - tile * most));
    }
    before += tasks;
  }
}

template <class Tile, class... Ways>
inline void attend(const Queries& queries, const Store& store, const Places& places, std::atomic<int64_t>& next,
                   Ways... ways) {
  const int64_t most = std::max<int64_t>(1, kTileRows / (queries.heads / store.kv_heads));
  in_parts(places, store.kv_heads, most, next, [&](const Part& part, int64_t head, int64_t first, int64_t count) {
    Tile(queries, store, places, part, head, first, count, ways...).run();
  });
}

}  // namespace superstep
