// The checksum of 32-bit words, taken alone or while they are copied: the sum of word i · (2 i + 1), modulo 2^64. And
// their plain sum.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kBlock = 4096;  // words whose places fit 32 bits, so that a product is one instruction

struct Nothing {
  void operator()(int64_t, int32_t) const {}
};

struct Store {
  int32_t* __restrict into;
  void operator()(int64_t i, int32_t word) const { into[i] = word; }
};

// Words at first, first + 1, ...: of a block that begins at b, each counts (2 j + 1) + 2 b.
template <class Each>
int64_t checksum(const int32_t* __restrict words, int64_t count, int64_t first, Each each) {
  uint64_t total = 0;
  for (int64_t low = 0; low < count; low += kBlock) {
    const int64_t here = std::min(kBlock, count - low);
    const int32_t* block = words + low;
    int64_t plain = 0, placed = 0;
    for (int64_t j = 0; j < here; ++j) {
      const int32_t word = block[j];
      each(low + j, word);
      plain += word;
      placed += int64_t(word) * int32_t(2 * j + 1);
    }
    total += uint64_t(placed) + 2 * uint64_t(first + low) * uint64_t(plain);
  }
  return int64_t(total);
}

}  // namespace

extern "C" {

int64_t superstep_checksum(const int32_t* words, int64_t count, int64_t first) {
  return checksum(words, count, first, Nothing{});
}

int64_t superstep_word_sum(const int32_t* words, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += words[i];
  return total;
}

int64_t superstep_copy_summed(int32_t* into, const int32_t* words, int64_t count, int64_t first) {
  return checksum(words, count, first, Store{into});
}
}
