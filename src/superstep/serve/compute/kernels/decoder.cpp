// A dense decoder of bf16 on this machine's cores: a whole step in one call, and its parts one by one. Plain C to whom
// calls it; all memory is the caller's.

#include "forward.h"
#include "totals.h"

using namespace superstep;

extern "C" {

int64_t superstep_scratch(const Model* model, int64_t rows, int64_t threads) {
  return Scratch(*model, rows, threads, nullptr).bytes;
}

// Rows in, logits of the wanted ones out; their keys and values are in their places then.
void superstep_forward(const Model* model, const Keys* keys, const Step* step, int64_t threads) {
  const std::unique_ptr<std::atomic<int64_t>[]> next(new std::atomic<int64_t>[model->layers]());
  with_team(threads, 4 * model->layers + 1, [&](Team& team) { Forward(team, *model, *keys, *step, next.get()).run(); });
}

// Of each row of logits [R, V] the largest, its place, and the logarithm of the sum of exp(logit - largest).
void superstep_totals(const float* logits, int64_t rows, int64_t vocab, int64_t stride, float* largest, float* log_total,
                      int64_t* likeliest, int64_t threads) {
  constexpr int64_t parts = 8;  // of every row, so that its sum does not depend on who else is asking
  std::vector<Total> found(rows * parts);
  with_team(threads, 0, [&](const Team& team) {
    for (int64_t at = team.begin(rows * parts); at < team.end(rows * parts); ++at) {
      const int64_t row = at / parts, part = at % parts;
      found[at] = total_of(logits + row * stride, vocab * part / parts, vocab * (part + 1) / parts);
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    Total total = found[row * parts];
    for (int64_t part = 1; part < parts; ++part) total = total.with(found[row * parts + part]);
    largest[row] = total.largest;
    log_total[row] = std::log(total.sum);
    likeliest[row] = total.place;
  }
}

// x [T, I] bf16 times a weight: [T, O] bf16. Codes [T, I] and scales [T] are scratch of weights of 8 bits, and a panel for
// each thread that of short ones.
void superstep_product(const Weight* weight, const bf16* x, int64_t rows, bf16* out, uint8_t* codes, float* scale,
                       char* rooms, int64_t threads) {
  with_team(threads, 1, [&](Team& team) {
    if (weight->is_int8) {
      to_codes_of_rows(team, x, rows, weight->inputs, codes, scale);
      team.wait();
    }
    const void* from = weight->is_int8 ? static_cast<const void*>(codes) : x;
    char* room = rooms + team.id * weight->panel_bytes();
    multiply(team, *weight, {from, scale, room}, rows, PutRounded{out, *weight});
  });
}

// For each panel of [P, steps, 128] the least exponent of its short weights, and how many steps are kept whole.
void superstep_bases(const bf16* panels, int64_t count, int64_t steps, uint16_t* base, int64_t* whole, int64_t threads) {
  with_team(threads, 0, [&](const Team& team) {
    for (int64_t p = team.begin(count); p < team.end(count); ++p) {
      const bf16* panel = panels + p * steps * kWords;
      const int least = base_of(panel, steps);
      base[p] = static_cast<uint16_t>(least << 7);
      whole[p] = 0;
      for (int64_t k = 0; k < steps; ++k) whole[p] += is_whole(panel + k * kWords, least);
    }
  });
}

// The same panels, short: words [P, steps, 96], and the steps that are kept whole.
void superstep_shorten(const bf16* panels, int64_t count, int64_t steps, const Short* shorts, uint16_t* words,
                       int32_t* whole_steps, bf16* whole, int64_t threads) {
  with_team(threads, 0, [&](const Team& team) {
    for (int64_t p = team.begin(count); p < team.end(count); ++p) {
      int64_t kept = shorts->whole_begin[p];
      const int base = shorts->base[p] >> 7;
      for (int64_t k = 0; k < steps; ++k) {
        const bf16* step = panels + (p * steps + k) * kWords;
        uint16_t* to = words + (p * steps + k) * kShortWords;
        if (!is_whole(step, base)) {
          shorten(step, base, to);
          continue;
        }
        std::memset(to, 0, 2 * kShortWords);
        std::memcpy(whole + kept * kWords, step, 2 * kWords);
        whole_steps[kept++] = static_cast<int32_t>(k);
      }
    }
  });
}

// Puts keys and values [T, K, H] of one layer into their places, and mixes the values that queries [T, N, H] see.
void superstep_attend(const Queries* queries, const bf16* keys, const bf16* values, const Store* store,
                      const Places* places, int64_t threads) {
  std::atomic<int64_t> next{0};
  const int64_t width = store->width, heads = store->kv_heads;
  with_team(threads, 0, [&](const Team& team) {
    for (int64_t p = 0; p < places->count; ++p) {
      const Part& part = places->parts[p];
      for (int64_t t = team.begin(part.count); t < team.end(part.count); ++t)
        for (int64_t k = 0; k < heads; ++k) {
          const int64_t from = ((part.row + t) * heads + k) * width;
          store->write(places->slot(part, part.first + t), k, keys + from, values + from);
        }
    }
    team.wait();
    attend<Tile>(*queries, *store, *places, next);
  });
}

}  // extern "C"
