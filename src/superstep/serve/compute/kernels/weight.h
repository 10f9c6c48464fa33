// Weights as they lie in memory, and what a product reads of them.
//
//   O  outputs     I  inputs     P  panels

#pragma once

#include "short.h"

namespace superstep {

// Outputs in panels of 64: [O / 64, I / 2, 64, 2] bf16, or [O / 64, I / 4, 64, 4] codes of 8 bits. What
// is told of each output is told of those too with which the last panel is filled up.
struct Weight {
  const void* panels;
  const float* scale;   // of each output, where there are codes
  const int32_t* sums;  // of an output's codes
  const float* bias;    // null where there is none
  Short shorts;
  int64_t outputs;
  int64_t inputs;
  int64_t is_int8;
  int64_t cells;  // of exact mode's sums, a power of two; 0 in fast mode

  int64_t row_bytes() const { return inputs * (is_int8 ? 1 : 2); }
  int64_t steps() const { return row_bytes() / 4; }
  int64_t all_panels() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const { return row_bytes() * kPanel; }
};

// A panel's columns. Short ones are made long as they are read, or once in a room where several tiles of rows read them.
class Columns {
 public:
  Columns(const Weight& weight, int64_t panel, int64_t rows, char* room) : weight(weight), panel(panel) {
    const bool is_short = weight.shorts.base, has_tiles = rows > kRows;
    const int64_t size = is_short ? weight.steps() * kShortWords * 2 : weight.panel_bytes();
    const char* mine = static_cast<const char*>(weight.panels) + panel * size;
    if (has_tiles && panel + 1 < weight.all_panels()) next_ = mine + size, end_ = next_ + size;
    if (!is_short) {
      columns = mine;
    } else if (has_tiles) {
      lengthen(weight.panels, weight.shorts, panel, weight.steps(), 0, weight.steps(), reinterpret_cast<bf16*>(room));
      columns = room;
    } else {
      columns = nullptr;
    }
  }

  // While tiles are computed the next panel is asked of the memory, a line at each step: from here on, if any is left.
  const char* next(int64_t steps) const {
    if (next_ >= end_) return nullptr;
    const char* at = next_;
    next_ += 64 * steps;
    return at;
  }

  const Weight& weight;
  const int64_t panel;
  const char* columns;  // null where they are short

 private:
  mutable const char* next_ = nullptr;
  const char* end_ = nullptr;
};

// sums[r][n] += row r times the columns, over some steps.
template <class Kind, int R>
inline void add_columns(typename Kind::Sum (&sums)[R][kRegisters], const Columns& of, const char* rows, int64_t first,
                        int64_t count) {
  constexpr int64_t kBytes = 4 * kPanel;
  const int64_t steps = of.weight.steps();
  if (of.columns) {
    const char *from = of.columns + first * kBytes, *next = of.next(count), *ahead = next ? next : from;
    const int64_t by = next ? 64 : 0;
    add_tile<Kind, R, kRegisters>(sums, rows + 4 * first, 4 * steps, count, [=](int64_t k, int n) {
      if (n == 0) _mm_prefetch(ahead + by * k, _MM_HINT_T1);
      return from + k * kBytes + n * 64;
    });
    return;
  }
  alignas(64) bf16 block[kBlockSteps * kWords];
  const char* from = reinterpret_cast<const char*>(block);
  for (const int64_t end = first + count; first < end; first += kBlockSteps) {
    const int64_t now = std::min(kBlockSteps, end - first);
    lengthen(of.weight.panels, of.weight.shorts, of.panel, steps, first, now, block);
    add_tile<Kind, R, kRegisters>(sums, rows + 4 * first, 4 * steps, now,
                                  [=](int64_t k, int n) { return from + k * kBytes + n * 64; });
  }
}

}  // namespace superstep
