// Products of bf16 by tiles: 16 rows of 16 words, two numbers a word, which a processor with AMX multiplies at once.
//
// A left factor has rows of numbers as they are. A right one has rows of words: a word is two neighbouring rows' numbers of
// a column. A sum is four tiles, 32 rows and columns; what comes here is padded to that.

#pragma once

#include "product.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace superstep {

constexpr int64_t kTile = 16;      // rows of a tile, and words of a row
constexpr int64_t kFour = 2 * kTile;  // rows and columns of a sum

// Whether the processor has tiles, and Linux gives them to this process: a thread's registers are 8 KiB larger with them.
// Without, pairs are multiplied in registers.
inline bool may_use_tiles() {
#ifdef __AMX_BF16__
  constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
  return may;
#else
  return false;
#endif
}

// While there is one, a thread's eight tiles have the shape that `multiply_tiles` needs.
class Tiles {
 public:
  Tiles() {
#ifdef __AMX_BF16__
    if (!may_use_tiles()) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) shape.row_bytes[i] = 4 * kTile, shape.rows[i] = kTile;
    asm volatile("" ::"r"(&shape) : "memory");  // the compiler believes that no more than a word of it is read
    _tile_loadconfig(&shape);
#endif
  }
  ~Tiles() {
#ifdef __AMX_BF16__
    if (may_use_tiles()) _tile_release();
#endif
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// out [rows, columns] = left [rows, words] · right [words, columns], or that much more. Rows and columns are multiples of
// 32, words of 16.
inline void multiply_tiles(const Word* left, int64_t left_row, const Word* right, int64_t right_row, int64_t rows,
                           int64_t columns, int64_t words, float* out, int64_t out_row, bool adds) {
  if (!may_use_tiles())
    return multiply<true>({left, left_row, 1}, {right, right_row}, rows, columns, words, out, out_row, adds);
#ifdef __AMX_BF16__
  asm volatile("" ::: "memory");  // the compiler does not know that a tile is read from memory
  for (int64_t i = 0; i < rows; i += kFour)
    for (int64_t c = 0; c < columns; c += kFour) {
      float *upper = out + i * out_row + c, *lower = upper + kTile * out_row;
      if (adds) {
        _tile_loadd(0, upper, 4 * out_row);
        _tile_loadd(1, upper + kTile, 4 * out_row);
        _tile_loadd(2, lower, 4 * out_row);
        _tile_loadd(3, lower + kTile, 4 * out_row);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t k = 0; k < words; k += kTile) {
        const Word *a = left + i * left_row + k, *b = right + k * right_row + c;
        _tile_loadd(4, a, 4 * left_row);
        _tile_loadd(6, b, 4 * right_row);
        _tile_loadd(7, b + kTile, 4 * right_row);
        _tile_loadd(5, a + kTile * left_row, 4 * left_row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, upper, 4 * out_row);
      _tile_stored(1, upper + kTile, 4 * out_row);
      _tile_stored(2, lower, 4 * out_row);
      _tile_stored(3, lower + kTile, 4 * out_row);
    }
  asm volatile("" ::: "memory");
#endif
}

}  // namespace superstep
