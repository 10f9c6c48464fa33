// A whole step through a dense decoder. Threads share each phase and meet behind it; what one phase writes, the next reads.
//
//   T  rows     D  width     N  query heads     K  key heads     H  width of one head     F  inner width

#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "low_rank.h"
#include "product.h"

namespace superstep {

inline float inverse_root_fast(const bf16* x, int64_t width, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t d = 0; d < width; d += kLanes) {
    const __m512 of = load(x + d, lanes_before(width, d));
    sum = _mm512_fmadd_ps(of, of, sum);
  }
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / static_cast<float>(width) + eps);
}

// RMSNorm (Zhang 2019) of a row, statistics in fp32, rounded once.
inline void norm_row(const bf16* x, const bf16* weight, bf16* out, int64_t width, float eps, Function roots) {
  const __m512 by = _mm512_set1_ps(roots ? inverse_root(x, width, eps, roots) : inverse_root_fast(x, width, eps));
  for (int64_t d = 0; d < width; d += kLanes) {
    const __mmask16 lanes = lanes_before(width, d);
    store(out + d, _mm512_mul_ps(_mm512_mul_ps(load(x + d, lanes), by), load(weight + d, lanes)), lanes);
  }
}

// Turns pairs half a head apart (Su 2021), in place; the sine carries the sign of its half.
inline void turn(bf16* x, const bf16* cosine, const bf16* sine, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t h = 0; h < half; h += kLanes) {
    const __mmask16 lanes = lanes_before(half, h);
    const __m512 a = load(x + h, lanes), b = load(x + h + half, lanes);
    // The first product is rounded, as the model's code does it.
    const __m512 c = rounded(_mm512_mul_ps(a, load(cosine + h, lanes)));
    const __m512 d = rounded(_mm512_mul_ps(b, load(cosine + half + h, lanes)));
    store(x + h, _mm512_fmadd_ps(b, load(sine + h, lanes), c), lanes);
    store(x + half + h, _mm512_fmadd_ps(a, load(sine + half + h, lanes), d), lanes);
  }
}


// silu(gate) times up (Shazeer 2020), given exp(-gate). Each step is rounded, as the model's code does it.
inline __m512 gated(__m512 gate, __m512 back, __m512 up) {
  const __m512 open = rounded(_mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), back)));
  return _mm512_mul_ps(open, up);
}

inline __m512 gated(__m512 gate, __m512 up) {
  return gated(gate, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)), up);
}

// From a row of both.
inline void gate_row(const bf16* both, bf16* out, int64_t width, Function exponentials) {
  Floats exact(exponentials ? width : 0);
  if (exponentials) {
    for (int64_t f = 0; f < width; ++f) exact.data()[f] = -to_float(both[f]);
    exponentials(static_cast<int32_t>(width), exact.data(), exact.data(), kMode);
  }
  for (int64_t f = 0; f < width; f += kLanes) {
    const __mmask16 lanes = lanes_before(width, f);
    const __m512 gate = load(both + f, lanes), up = load(both + width + f, lanes);
    store(out + f, exponentials ? gated(gate, _mm512_maskz_loadu_ps(lanes, exact.data() + f), up) : gated(gate, up), lanes);
  }
}

inline void to_codes_of_rows(const Team& team, const bf16* x, int64_t rows, int64_t width, uint8_t* codes, float* scale) {
  for (int64_t t = team.begin(rows); t < team.end(rows); ++t)
    scale[t] = to_codes(x + t * width, codes + t * width, width);
}

struct Block {
  const bf16* norm;
  const bf16* q_norm;  // null where there is none
  const bf16* k_norm;
  const bf16* norm_after;
  Weight qkv, out, gate_up, down;
};

struct Model {
  const bf16* embedding;  // [V, D]
  const Block* blocks;
  int64_t layers, width, heads, kv_heads, head_dim, inner;
  double eps;
  const bf16* norm;
  Ways ways;  // exact mode's
  Weight head;

  int64_t mixed() const { return heads * head_dim; }
  int64_t qkv() const { return (heads + 2 * kv_heads) * head_dim; }
  int64_t room() const { return 2 * 2 * kPanel * std::max({width, mixed(), inner}); }  // of a thread: two panels
};

struct Keys {
  bf16* keys;  // of all layers
  bf16* values;
  int64_t layer_size;
};

struct Step {
  int64_t rows;
  const int64_t* tokens;
  const bf16* cosine;  // of each place in a text: [.., H]
  const bf16* sine;
  Places places;
  const int64_t* wanted;  // rows whose logits are asked for, ascending
  int64_t wants;
  float* logits;  // [wants, V]
  char* scratch;  // as many bytes as superstep_scratch says
  Adapted adapted;
};

// What lies between two phases.
struct Scratch {
  bf16 *h, *x, *qkv, *mixed, *both, *inner;  // h is the residual stream
  bf16 *wanted_h, *wanted_q;
  uint8_t* codes;
  float* scale;
  char* rooms;  // of each thread one
  int64_t bytes = 0;

  Scratch(const Model& m, int64_t rows, int64_t threads, char* at) {
    const auto take = [&](int64_t size) {
      char* mine = at + bytes;
      bytes += (size + 63) / 64 * 64;
      return mine;
    };
    h = reinterpret_cast<bf16*>(take(2 * rows * m.width));
    x = reinterpret_cast<bf16*>(take(2 * rows * m.width));
    qkv = reinterpret_cast<bf16*>(take(2 * rows * m.qkv()));
    mixed = reinterpret_cast<bf16*>(take(2 * rows * m.mixed()));
    both = reinterpret_cast<bf16*>(take(4 * rows * m.inner));
    inner = reinterpret_cast<bf16*>(take(2 * rows * m.inner));
    wanted_h = reinterpret_cast<bf16*>(take(2 * rows * m.width));
    wanted_q = reinterpret_cast<bf16*>(take(2 * rows * m.mixed()));
    codes = reinterpret_cast<uint8_t*>(take(rows * std::max({m.width, m.mixed(), m.inner})));
    scale = reinterpret_cast<float*>(take(4 * rows));
    rooms = take(threads * m.room());
  }
};

// One thread's way through a step.
class Forward {
 public:
  Forward(Team& team, const Model& model, const Keys& keys, const Step& step, std::atomic<int64_t>* next)
      : team_(team), model_(model), keys_(keys), step_(step), next_(next), at_(model, step.rows, team.size, step.scratch),
        rows_(step.rows), h_(at_.h), places_(step.places) {}

  void run() {
    const int64_t width = model_.width;
    for (int64_t t = team_.begin(rows_); t < team_.end(rows_); ++t)
      std::memcpy(h_ + t * width, model_.embedding + step_.tokens[t] * width, 2 * width);
    team_.wait();
    for (int64_t layer = 0; layer < model_.layers; ++layer) {
      const Block& block = model_.blocks[layer];
      const Store store{keys_.keys + layer * keys_.layer_size, keys_.values + layer * keys_.layer_size, model_.kv_heads,
                        model_.head_dim};
      norm(block.norm, block.qkv);
      product(block.qkv, at_.x, PutRounded{at_.qkv, block.qkv});
      const int64_t q = model_.mixed(), kv = model_.kv_heads * model_.head_dim;
      add(layer, at_.x, model_.width, at_.qkv, model_.qkv(), {{0, 0, q}, {1, q, kv}, {2, q + kv, kv}});
      turn_and_write(block, store);
      Queries queries{at_.qkv, model_.qkv(), at_.mixed, model_.heads};
      if (layer == model_.layers - 1 && step_.wants < step_.rows) queries = leave_wanted(queries);
      attend_in(queries, store, next_[layer]);
      code(block.out, at_.mixed);
      product(block.out, at_.mixed, PutAdded{h_, block.out});
      add(layer, at_.mixed, model_.mixed(), h_, model_.width, {{3, 0, model_.width}});
      norm(block.norm_after, block.gate_up);
      gate_and_up(layer, block);
      code(block.down, at_.inner);
      product(block.down, at_.inner, PutAdded{h_, block.down});
      add(layer, at_.inner, model_.inner, h_, model_.width, {{6, 0, model_.width}});
    }
    norm(model_.norm, model_.head);
    product(model_.head, at_.x, PutWide{step_.logits, model_.head});
  }

 private:
  // Where the last layer's keys are written, nobody asks for the other rows any more: those that are wanted go on alone.
  Queries leave_wanted(const Queries& all) {
    const int64_t width = model_.width, mixed = model_.mixed();
    for (int64_t w = team_.begin(step_.wants); w < team_.end(step_.wants); ++w) {
      std::memcpy(at_.wanted_h + w * width, h_ + step_.wanted[w] * width, 2 * width);
      std::memcpy(at_.wanted_q + w * mixed, all.rows + step_.wanted[w] * all.stride, 2 * mixed);
    }
    const Part* of = step_.places.parts;
    for (int64_t w = 0; w < step_.wants; ++w) {
      const int64_t row = step_.wanted[w];
      const bool goes_on = w > 0 && row == step_.wanted[w - 1] + 1 && row < of->row + of->count;
      while (row >= of->row + of->count) ++of;
      if (goes_on) ++wanted_.back().count;
      else wanted_.push_back({w, of->first + row - of->row, 1, of->pages});
    }
    rows_ = step_.wants;
    h_ = at_.wanted_h;
    places_.parts = wanted_.data();
    places_.count = static_cast<int64_t>(wanted_.size());
    which_ = step_.wanted;
    team_.wait();
    return {at_.wanted_q, mixed, all.out, all.heads};
  }

  void attend_in(const Queries& queries, const Store& store, std::atomic<int64_t>& next) const {
    if (model_.ways.attend) attend<ExactTile>(queries, store, places_, next, model_.ways.attend);
    else attend<Tile>(queries, store, places_, next);
    team_.wait();
  }

  void norm(const bf16* weight, const Weight& next) const {
    const int64_t width = model_.width;
    for (int64_t t = team_.begin(rows_); t < team_.end(rows_); ++t) {
      norm_row(h_ + t * width, weight, at_.x + t * width, width, static_cast<float>(model_.eps),
               model_.ways.roots);
      if (next.is_int8) at_.scale[t] = to_codes(at_.x + t * width, at_.codes + t * width, width);
    }
    team_.wait();
  }

  // In one go where nothing comes between, and where numbers need not be as MKL computes a whole row.
  void gate_and_up(int64_t layer, const Block& block) const {
    const int64_t width = model_.inner;
    const Weight& weight = block.gate_up;
    if (!step_.adapted.count && !model_.ways.exponentials && width % kPanel == 0) {
      multiply_halves(team_, weight, inputs(weight, at_.x), rows_,
                      [this, width](int64_t row, int64_t panel, const __m512* gate, const __m512* up) {
                        bf16* to = at_.inner + row * width + panel * kPanel;
                        for (int n = 0; n < kRegisters; ++n)
                          store(to + n * kLanes, gated(rounded(gate[n]), rounded(up[n])));
                      });
      team_.wait();
      return;
    }
    product(weight, at_.x, PutRounded{at_.both, weight});
    add(layer, at_.x, model_.width, at_.both, 2 * width, {{4, 0, width}, {5, width, width}});
    for (int64_t t = team_.begin(rows_); t < team_.end(rows_); ++t)
      gate_row(at_.both + 2 * t * width, at_.inner + t * width, width, model_.ways.exponentials);
    team_.wait();
  }

  void code(const Weight& next, const bf16* x) const {
    if (!next.is_int8) return;
    to_codes_of_rows(team_, x, rows_, next.inputs, at_.codes, at_.scale);
    team_.wait();
  }

  Inputs inputs(const Weight& weight, const bf16* x) const {
    return {weight.is_int8 ? static_cast<const void*>(at_.codes) : x, at_.scale,
            at_.rooms + team_.id * model_.room()};
  }

  template <class Put>
  void product(const Weight& weight, const bf16* x, Put put) const {
    multiply(team_, weight, inputs(weight, x), rows_, put);
    team_.wait();
  }

  // What adapters add to linears that read the same rows: their numbers, and the columns of the output that are theirs.
  struct Columns {
    int64_t linear, first, count;
  };
  void add(int64_t layer, const bf16* x, int64_t width, bf16* out, int64_t stride,
           std::initializer_list<Columns> linears) const {
    if (!step_.adapted.count) return;
    for (int64_t t = team_.begin(rows_); t < team_.end(rows_); ++t)
      for (const Columns& at : linears)
        if (const LowRank* part = step_.adapted.of(layer, at.linear, which_ ? which_[t] : t))
          add_low_rank(*part, x + t * width, width, out + t * stride + at.first, at.count);
    team_.wait();
  }

  void turn_and_write(const Block& block, const Store& store) const {
    const int64_t heads = model_.heads, kv_heads = model_.kv_heads, width = model_.head_dim, all = heads + kv_heads;
    int64_t p = 0;
    for (int64_t at = team_.begin(step_.rows * all); at < team_.end(step_.rows * all); ++at) {
      const int64_t t = at / all, n = at % all;
      while (t >= step_.places.parts[p].row + step_.places.parts[p].count) ++p;
      const Part& part = step_.places.parts[p];
      const int64_t place = part.first + t - part.row;
      bf16* x = at_.qkv + t * model_.qkv() + n * width;
      const bf16* of_head = n < heads ? block.q_norm : block.k_norm;
      if (of_head) norm_row(x, of_head, x, width, static_cast<float>(model_.eps), model_.ways.roots);
      turn(x, step_.cosine + place * width, step_.sine + place * width, width);
      if (n >= heads) store.write(step_.places.slot(part, place), n - heads, x, x + kv_heads * width);
    }
    team_.wait();
  }

  Team& team_;
  const Model& model_;
  const Keys& keys_;
  const Step& step_;
  std::atomic<int64_t>* next_;
  const Scratch at_;
  // The rows that are computed, from somewhere in the last layer on the wanted ones: their numbers, stream and places.
  int64_t rows_;
  const int64_t* which_ = nullptr;
  bf16* h_;
  Places places_;
  std::vector<Part> wanted_;
};

}  // namespace superstep
