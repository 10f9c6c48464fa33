// Philox 4x32-10 (Salmon 2011), a generator without a state: a key and a counter give four random words. Element e of a
// tensor has word e % 4 of the counter {e / 4 (two words), sample, step}. Dropout uses each word once and keeps none.

#pragma once

#include <algorithm>

#include "swiglu.h"

namespace superstep {

constexpr int kBlocks = 16;             // counters at a time
constexpr int kWords = 4 * kBlocks;     // their words
constexpr int64_t kDrawnOfTask = 4096;  // elements of a task

// Rows of consecutive elements: row r of sample s begins at element firsts[r] of the whole tensor.
struct Drawn {
  uint64_t key;
  uint32_t step, sample;  // of the first sample; the others follow it
  const int64_t* firsts;  // [rows]
  int64_t samples, rows, width;
};

// The words of elements 4 * block and those after it.
inline void draw(uint64_t block, const Drawn& of, uint32_t sample, uint32_t* words) {
  uint32_t a[kBlocks], b[kBlocks], c[kBlocks], d[kBlocks];
  uint32_t low = uint32_t(of.key), high = uint32_t(of.key >> 32);
  for (int i = 0; i < kBlocks; ++i) {
    a[i] = uint32_t(block + i), b[i] = uint32_t((block + i) >> 32);
    c[i] = sample, d[i] = of.step;
  }
  for (int round = 0; round < 10; ++round, low += 0x9E3779B9u, high += 0xBB67AE85u)
#pragma omp simd
    for (int i = 0; i < kBlocks; ++i) {
      const uint64_t one = uint64_t(a[i]) * 0xD2511F53u, two = uint64_t(c[i]) * 0xCD9E8D57u;
      a[i] = uint32_t(two >> 32) ^ b[i] ^ low, b[i] = uint32_t(two);
      c[i] = uint32_t(one >> 32) ^ d[i] ^ high, d[i] = uint32_t(one);
    }
  for (int i = 0; i < kBlocks; ++i)
    words[4 * i] = a[i], words[4 * i + 1] = b[i], words[4 * i + 2] = c[i], words[4 * i + 3] = d[i];
}

// Calls `each` with words, the place of the first of them in [samples, rows, width], and their number.
template <class Each>
void each_drawn(const Drawn& of, int64_t threads, Each each) {
  const int64_t parts = (of.width + kDrawnOfTask - 1) / kDrawnOfTask;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < of.samples * of.rows * parts; ++task) {
    const int64_t row = task / parts, first = of.firsts[row % of.rows];
    const uint32_t sample = of.sample + uint32_t(row / of.rows);
    int64_t at = task % parts * kDrawnOfTask;
    const int64_t end = std::min(of.width, at + kDrawnOfTask);
    uint32_t words[kWords + kLanes];  // a register is read beyond the last
    while (at < end) {
      const int64_t skipped = (first + at) % 4, count = std::min(kWords - skipped, end - at);
      draw(uint64_t(first + at) / 4, of, sample, words);
      each(words + skipped, row * of.width + at, count);
      at += count;
    }
  }
}

inline void random_words(const Drawn& of, uint32_t* out, int64_t threads) {
  each_drawn(of, threads, [&](const uint32_t* words, int64_t at, int64_t count) {
    std::copy(words, words + count, out + at);
  });
}

// y = x * scale where the word is at least the threshold, else 0. Each word decides on `spread` numbers.
template <bool kIsBf16>
void drop(const Drawn& of, const void* x_at, void* y_at, int64_t spread, int64_t threshold, float scale,
          int64_t threads) {
  const Numbers<kIsBf16> x(x_at), y(y_at);
  const uint32_t least = uint32_t(threshold);
  each_drawn(of, threads, [&](const uint32_t* words, int64_t at, int64_t count) {
    if (spread > 1) {
      for (int64_t i = 0; i < count; ++i)
        each_register(spread, 1, [&](int64_t j, auto here) {
          const int64_t place = (at + i) * spread + j;
          given(y, place, here, words[i] >= least ? taken(x, place, here) * scale : Floats{});
        });
      return;
    }
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t here = std::min<int64_t>(kLanes, count - i);
      const Words w = *reinterpret_cast<const Words*>(words + i);
      given(y, at + i, here, w >= least ? taken(x, at + i, here) * scale : Floats{});
    }
  });
}

}  // namespace superstep
