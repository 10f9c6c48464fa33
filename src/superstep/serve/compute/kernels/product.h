// Products of rows with a weight: for one row their time is that of reading the weight, for many that of multiplying.
//
//   T  rows     O  outputs     I  inputs

#pragma once

#include "exact.h"

namespace superstep {

constexpr int64_t kInCache = 384 << 10;  // bytes of rows that stay in the second cache while weights go by

struct Exact {
  using Sum = __m512;
};

// Rows as a weight takes them.
struct Inputs {
  const void* rows;    // [T, I] bf16, or codes without a sign, of which 128 stands for 0
  const float* scale;  // of each row's codes
  char* room;          // of this thread, for two panels of short weights
};

// One row to codes; gives their scale.
inline float to_codes(const bf16* x, uint8_t* codes, int64_t inputs) {
  __m512 most = _mm512_setzero_ps();
  __mmask16 none = 0;  // what is no number must stay so
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const __m512 of = load(x + i, lanes_before(inputs, i));
    most = _mm512_max_ps(most, _mm512_abs_ps(of));
    none |= _mm512_cmp_ps_mask(of, of, _CMP_UNORD_Q);
  }
  const float scale = none ? NAN : std::max(_mm512_reduce_max_ps(most) / 127.0f, FLT_MIN);
  const __m512 by = _mm512_set1_ps(scale), zero = _mm512_set1_ps(128.0f);
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const __mmask16 lanes = lanes_before(inputs, i);
    const __m512 at = _mm512_roundscale_ps(_mm512_div_ps(load(x + i, lanes), by), 8);
    _mm_mask_storeu_epi8(codes + i, lanes, _mm512_cvtusepi32_epi8(_mm512_cvttps_epu32(_mm512_add_ps(at, zero))));
  }
  return scale;
}

template <class Kind, int R, class Put>
inline void panel_of_rows(const Columns& columns, const Inputs& x, int64_t first, Put& put) {
  const Weight& weight = columns.weight;
  const int64_t panel = columns.panel, steps = weight.steps();
  const char* rows = static_cast<const char*>(x.rows) + first * steps * 4;
  typename Kind::Sum sums[R][kRegisters];
  if constexpr (std::is_same_v<Kind, Exact>) {
    sum_of_cells<R>(columns, rows, sums);
  } else {
    for (auto& row : sums)
      for (auto& sum : row) sum = Kind::zero();
    add_columns<Kind, R>(sums, columns, rows, 0, steps);
  }
  for (int r = 0; r < R; ++r) {
    __m512 out[kRegisters];
    for (int n = 0; n < kRegisters; ++n) {
      const int64_t column = panel * kPanel + n * kLanes;
      if constexpr (std::is_same_v<Kind, Int8>) {
        const __m512i of_128 = _mm512_slli_epi32(_mm512_loadu_si512(weight.sums + column), 7);
        const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(x.scale[first + r]), _mm512_loadu_ps(weight.scale + column));
        out[n] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][n], of_128)), scale);
      } else {
        out[n] = std::is_same_v<Kind, Exact> && weight.bias ? rounded(sums[r][n]) : sums[r][n];
      }
      if (weight.bias) out[n] = _mm512_add_ps(out[n], _mm512_loadu_ps(weight.bias + column));
    }
    put(first + r, panel, out);
  }
}

template <int R, class Put>
inline void panel_of_rows(const Columns& columns, const Inputs& x, int64_t first, Put& put) {
  if (columns.weight.is_int8) panel_of_rows<Int8, R>(columns, x, first, put);
  else if (columns.weight.cells) panel_of_rows<Exact, R>(columns, x, first, put);
  else panel_of_rows<Bf16, R>(columns, x, first, put);
}

// This thread's share of a product's panels, each for some rows: do_panel(panel, begin, end). The rows stay in the cache
// while panels go by.
template <class Do>
inline void in_panels(Team& team, const Weight& weight, int64_t panels, int64_t rows, Do do_panel) {
  const int64_t most = std::max<int64_t>(kRows, kInCache / weight.row_bytes());
  const int64_t chunks = (rows + most - 1) / most, tasks = chunks * panels;
  team.share(tasks, [&](int64_t task) {
    const int64_t chunk = task / panels;
    do_panel(task % panels, rows * chunk / chunks, rows * (chunk + 1) / chunks);
  });
}

// This thread's share of a product: put(row, panel, 4 registers of outputs) for each panel of each row.
template <class Put>
inline void multiply(Team& team, const Weight& weight, const Inputs& x, int64_t rows, Put put) {
  in_panels(team, weight, weight.all_panels(), rows, [&](int64_t panel, int64_t begin, int64_t end) {
    const Columns columns(weight, panel, end - begin, x.room);
    in_tiles(begin, end, [&]<int R>(int64_t first) { panel_of_rows<R>(columns, x, first, put); });
  });
}

// The same of a weight whose outputs are two halves of whole panels: join(row, panel, 4 registers of the first half, 4 of
// the second) for each panel of a half.
template <class Join>
inline void multiply_halves(Team& team, const Weight& weight, const Inputs& x, int64_t rows, Join join) {
  const int64_t panels = weight.outputs / 2 / kPanel;
  in_panels(team, weight, panels, rows, [&](int64_t panel, int64_t begin, int64_t end) {
    const Columns left(weight, panel, end - begin, x.room);
    const Columns right(weight, panels + panel, end - begin, x.room + weight.panel_bytes());
    in_tiles(begin, end, [&]<int R>(int64_t first) {
      __m512 kept[R][kRegisters];
      const auto keep = [&](int64_t row, int64_t, const __m512* of) {
        std::memcpy(kept[row - first], of, sizeof(kept[0]));
      };
      const auto put = [&](int64_t row, int64_t, const __m512* of) { join(row, panel, kept[row - first], of); };
      panel_of_rows<R>(left, x, first, keep);
      panel_of_rows<R>(right, x, first, put);
    });
  });
}

// What becomes of the outputs.

// Calls put(first column, lanes, outputs) for each register of a panel that has outputs of the weight.
template <class Put>
inline void in_registers(const Weight& weight, int64_t panel, const __m512* of, Put put) {
  for (int n = 0; n < kRegisters; ++n) {
    const int64_t column = panel * kPanel + n * kLanes;
    const __mmask16 lanes = lanes_before(weight.outputs, column);
    if (lanes) put(column, lanes, of[n]);
  }
}

struct PutRounded {  // [T, O] bf16
  bf16* out;
  const Weight& weight;
  void operator()(int64_t row, int64_t panel, const __m512* of) const {
    bf16* to = out + row * weight.outputs;
    in_registers(weight, panel, of, [=](int64_t column, __mmask16 lanes, __m512 x) { store(to + column, x, lanes); });
  }
};

struct PutAdded {  // to [T, O] bf16, which holds the residual stream
  bf16* out;
  const Weight& weight;
  void operator()(int64_t row, int64_t panel, const __m512* of) const {
    bf16* to = out + row * weight.outputs;
    in_registers(weight, panel, of, [=](int64_t column, __mmask16 lanes, __m512 x) {
      store(to + column, _mm512_add_ps(load(to + column, lanes), rounded(x)), lanes);
    });
  }
};

struct PutWide {  // [T, O] fp32
  float* out;
  const Weight& weight;
  void operator()(int64_t row, int64_t panel, const __m512* of) const {
    float* to = out + row * weight.outputs;
    in_registers(weight, panel, of,
                 [=](int64_t column, __mmask16 lanes, __m512 x) { _mm512_mask_storeu_ps(to + column, lanes, x); });
  }
};

}  // namespace superstep
