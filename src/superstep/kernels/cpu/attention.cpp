// Attention of some queries to some keys, and its gradients, block by block: no row of scores is ever whole (Dao 2023,
// FlashAttention-2; the backward pass computes scores again from the log-sum-exp, Dao 2022, algorithm 4).
//
//   queries, 48 at a time    x    keys, 64 at a time        P = exp(scale q·k - m)
//   forward     out = P·v / sum(P), lse = m + log sum(P)
//   backward    P = exp(scale q·k - lse), dS = scale P (grad·v - rowsum(grad · out));
//               dv += P'·grad, dk += dS'·q, dq += dS·k
//
// A task is a key head of a sequence, with all query heads that see it: its keys and values are laid out once, and its
// gradients have one writer. Plain C to whom calls it; all memory that is told of is the caller's.

#include <algorithm>
#include <limits>
#include <memory>
#include <new>

#include "product.h"

namespace superstep {
namespace {

constexpr int64_t kQueries = 48;
constexpr int64_t kKeys = kPanel;

// A tensor [batch, token, head, width]; strides in numbers, those of a head's width lie side by side.
struct View {
  void* at;
  int64_t batch, token, head;
};

struct Call {
  int64_t batch, heads, kv_heads, queries, keys, width;
  int64_t is_bf16, is_causal;
  float scale;
  const int64_t* starts;  // [batch, queries]: the first key that each query sees; null for 0
  View q, k, v, out;
  float* lse;  // [batch, heads, queries]
  View grad, dq, dk, dv;
};

class Room {
 public:
  explicit Room(int64_t words) : at_(static_cast<Word*>(::operator new(4 * words, std::align_val_t{64}))) {}
  ~Room() { ::operator delete(at_, std::align_val_t{64}); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  Word* words() { return at_; }
  float* floats() { return reinterpret_cast<float*>(at_); }

 private:
  Word* at_;
};

inline int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// The rows of one head.
template <bool kIsBf16>
struct Rows {
  using Number = std::conditional_t<kIsBf16, bf16, float>;
  Number* at;
  int64_t stride;

  static Rows of(const View& view, int64_t batch, int64_t head) {
    return {static_cast<Number*>(view.at) + batch * view.batch + head * view.head, view.token};
  }
  Number* row(int64_t r) const { return at + r * stride; }
  const Word* words(int64_t r) const { return reinterpret_cast<const Word*>(row(r)); }
  Left left(int64_t r) const { return {words(r), kIsBf16 ? stride / 2 : stride, 1}; }
  Floats load16(int64_t r, int64_t d) const {
    if constexpr (kIsBf16) return widen(row(r) + d);
    else return load(row(r) + d);
  }
  void store16(int64_t r, int64_t d, Floats x) const {
    if constexpr (kIsBf16) *reinterpret_cast<Halves*>(row(r) + d) = narrow(x);
    else store(row(r) + d, x);
  }
};

// Right factors for products that sum over the width: blocks of 64 rows, [block, word of the width, row].
template <bool kIsBf16>
void lay_across(const Rows<kIsBf16>& from, int64_t rows, int64_t width, Word* to) {
  const int64_t words = kIsBf16 ? width / 2 : width;
  for (int64_t begin = 0; begin < rows; begin += kKeys, to += words * kKeys) {
    const int64_t count = std::min(kKeys, rows - begin);
    for (int64_t r = 0; r < count; ++r) {
      const Word* row = from.words(begin + r);
      for (int64_t w = 0; w < words; ++w) to[w * kKeys + r] = row[w];
    }
    for (int64_t w = 0; w < words; ++w) std::fill(to + w * kKeys + count, to + (w + 1) * kKeys, 0);
  }
}

// Right factors for products that sum over rows: [row, or two neighbours, column]. Up to `end` rows, what is not there 0.
template <bool kIsBf16>
void lay_along(const Rows<kIsBf16>& from, int64_t rows, int64_t end, int64_t width, Word* to) {
  for (int64_t r = 0; r < end; r += kIsBf16 ? 2 : 1, to += width) {
    if (r >= rows) {
      std::fill(to, to + width, 0);
    } else if constexpr (kIsBf16) {
      const bf16 *low = from.row(r), *high = from.row(r + 1);
      if (r + 1 < rows)
        for (int64_t d = 0; d < width; ++d) to[d] = low[d] | static_cast<Word>(high[d]) << 16;
      else
        for (int64_t d = 0; d < width; ++d) to[d] = low[d];
    } else {
      std::memcpy(to, from.row(r), 4 * width);
    }
  }
}

// Which keys the queries of a block see: of each the first, and behind the last.
struct Seen {
  int64_t first[kQueries], end[kQueries], low, high;

  Seen(const Call& call, int64_t batch, int64_t begin, int64_t rows) {
    low = call.keys, high = 0;
    for (int64_t r = 0; r < rows; ++r) {
      first[r] = call.starts ? call.starts[batch * call.queries + begin + r] : 0;
      end[r] = call.is_causal ? begin + r + 1 : call.keys;
      low = std::min(low, first[r]);
      high = std::max(high, end[r]);
    }
    low = low / kKeys * kKeys;
  }
};

// Scores of a row and a block of keys that are not seen become -inf.
inline void hide(Floats (&x)[kRegisters], int64_t first, int64_t end) {
  Ints place;
  for (int i = 0; i < kLanes; ++i) place[i] = i;
  for (int c = 0; c < kRegisters; ++c) {
    const Ints at = place + static_cast<int32_t>(c * kLanes);
    const Ints is_seen = (at >= static_cast<int32_t>(std::clamp<int64_t>(first, 0, kKeys))) &
                         (at < static_cast<int32_t>(std::clamp<int64_t>(end, 0, kKeys)));
    x[c] = is_seen ? x[c] : all(-std::numeric_limits<float>::infinity());
  }
}

template <bool kIsBf16>
void forward(const Call& call, int64_t batch, int64_t kv_head) {
  const int64_t width = call.width, words = kIsBf16 ? width / 2 : width, keys = padded(call.keys, kKeys);
  const int64_t steps = kIsBf16 ? kKeys / 2 : kKeys;  // words of a row of P, and of a block of values
  Room across(keys * words), along(keys * words), scores(kQueries * kKeys), chances(kQueries * kKeys);
  Room sums(kQueries * width);
  lay_across(Rows<kIsBf16>::of(call.k, batch, kv_head), call.keys, width, across.words());
  lay_along(Rows<kIsBf16>::of(call.v, batch, kv_head), call.keys, keys, width, along.words());
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const auto q = Rows<kIsBf16>::of(call.q, batch, head), out = Rows<kIsBf16>::of(call.out, batch, head);
    float* lse = call.lse + (batch * call.heads + head) * call.queries;
    for (int64_t begin = 0; begin < call.queries; begin += kQueries) {
      const int64_t rows = std::min(kQueries, call.queries - begin);
      const Seen seen(call, batch, begin, rows);
      float largest_of[kQueries], total_of[kQueries];
      std::fill(largest_of, largest_of + rows, -std::numeric_limits<float>::infinity());
      std::fill(total_of, total_of + rows, 0.0f);
      std::fill(sums.floats(), sums.floats() + rows * width, 0.0f);
      for (int64_t key = seen.low; key < seen.high; key += kKeys) {
        multiply<kIsBf16>(q.left(begin), {across.words() + key * words, kKeys}, rows, kKeys, words, scores.floats(),
                          kKeys, false);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t first = seen.first[r] - key, end = seen.end[r] - key;
          Floats x[kRegisters];
          for (int c = 0; c < kRegisters; ++c) x[c] = load(scores.floats() + r * kKeys + c * kLanes) * call.scale;
          if (first > 0 || end < kKeys) hide(x, first, end);
          const float before = largest_of[r];
          const float top = std::max(before, largest(larger(larger(x[0], x[1]), larger(x[2], x[3]))));
          const float shift = std::isinf(top) ? 0.0f : top;  // where nothing was seen yet, all is -inf
          if (top > before && !std::isinf(before)) {
            const float by = std::exp(before - top);
            total_of[r] *= by;
            float* row = sums.floats() + r * width;
            for (int64_t d = 0; d < width; d += kLanes) store(row + d, load(row + d) * by);
          }
          largest_of[r] = top;
          Floats sum{};
          for (int c = 0; c < kRegisters; ++c) {
            x[c] = exponential(x[c] - shift);
            sum += x[c];
            if constexpr (kIsBf16)
              *reinterpret_cast<Halves*>(reinterpret_cast<bf16*>(chances.words() + r * steps) + c * kLanes) = narrow(x[c]);
            else
              store(chances.floats() + r * steps + c * kLanes, x[c]);
          }
          total_of[r] += total(sum);
        }
        multiply<kIsBf16>({chances.words(), steps, 1}, {along.words() + key * words, width}, rows, width, steps,
                          sums.floats(), width, true);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const float by = total_of[r] > 0 ? 1.0f / total_of[r] : 0.0f;
        for (int64_t d = 0; d < width; d += kLanes)
          out.store16(begin + r, d, load(sums.floats() + r * width + d) * by);
        lse[begin + r] = largest_of[r] + std::log(total_of[r]);
      }
    }
  }
}

template <bool kIsBf16>
void backward(const Call& call, int64_t batch, int64_t kv_head) {
  const int64_t width = call.width, words = kIsBf16 ? width / 2 : width, keys = padded(call.keys, kKeys);
  const int64_t steps = kIsBf16 ? kKeys / 2 : kKeys;
  Room keys_across(keys * words), values_across(keys * words), keys_along(keys * words);
  Room queries_along(kQueries * words), grads_along(kQueries * words);
  Room scores(kQueries * kKeys), slopes(kQueries * kKeys), dq_sums(kQueries * width);
  // For bf16: P and dS as factors that are summed over queries, and dS as one that is summed over keys.
  Room chances_pairs(kQueries * kKeys / 2), slopes_pairs(kQueries * kKeys / 2), slopes_rows(kQueries * kKeys / 2);
  Room dk_sums(keys * width), dv_sums(keys * width);
  std::fill(dk_sums.floats(), dk_sums.floats() + keys * width, 0.0f);
  std::fill(dv_sums.floats(), dv_sums.floats() + keys * width, 0.0f);
  const auto k = Rows<kIsBf16>::of(call.k, batch, kv_head), v = Rows<kIsBf16>::of(call.v, batch, kv_head);
  lay_across(k, call.keys, width, keys_across.words());
  lay_across(v, call.keys, width, values_across.words());
  lay_along(k, call.keys, keys, width, keys_along.words());
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const auto q = Rows<kIsBf16>::of(call.q, batch, head), grad = Rows<kIsBf16>::of(call.grad, batch, head);
    const auto out = Rows<kIsBf16>::of(call.out, batch, head), dq = Rows<kIsBf16>::of(call.dq, batch, head);
    const float* lse = call.lse + (batch * call.heads + head) * call.queries;
    for (int64_t begin = 0; begin < call.queries; begin += kQueries) {
      const int64_t rows = std::min(kQueries, call.queries - begin), even = padded(rows, 2);
      const Seen seen(call, batch, begin, rows);
      const Rows<kIsBf16> q_block{q.row(begin), q.stride}, grad_block{grad.row(begin), grad.stride};
      lay_along(q_block, rows, even, width, queries_along.words());
      lay_along(grad_block, rows, even, width, grads_along.words());
      float mean[kQueries];
      for (int64_t r = 0; r < rows; ++r) {
        Floats sum{};
        for (int64_t d = 0; d < width; d += kLanes) sum += grad.load16(begin + r, d) * out.load16(begin + r, d);
        mean[r] = total(sum);
      }
      std::fill(dq_sums.floats(), dq_sums.floats() + rows * width, 0.0f);
      for (int64_t key = seen.low; key < seen.high; key += kKeys) {
        const int64_t count = std::min(kKeys, call.keys - key);
        multiply<kIsBf16>(q.left(begin), {keys_across.words() + key * words, kKeys}, rows, kKeys, words,
                          scores.floats(), kKeys, false);
        multiply<kIsBf16>(grad.left(begin), {values_across.words() + key * words, kKeys}, rows, kKeys, words,
                          slopes.floats(), kKeys, false);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t first = seen.first[r] - key, end = seen.end[r] - key;
          float *score = scores.floats() + r * kKeys, *slope = slopes.floats() + r * kKeys;
          Floats x[kRegisters];
          for (int c = 0; c < kRegisters; ++c) x[c] = load(score + c * kLanes) * call.scale - lse[begin + r];
          if (first > 0 || end < kKeys) hide(x, first, end);
          for (int c = 0; c < kRegisters; ++c) {
            const Floats p = exponential(x[c]), ds = p * (load(slope + c * kLanes) - mean[r]) * call.scale;
            if constexpr (kIsBf16) {
              // Two neighbouring queries are a word: the even one its low half.
              const Halves p16 = narrow(p), ds16 = narrow(ds);
              *reinterpret_cast<Halves*>(reinterpret_cast<bf16*>(slopes_rows.words() + r * steps) + c * kLanes) = ds16;
              Words& p_pair = *reinterpret_cast<Words*>(chances_pairs.words() + r / 2 * kKeys + c * kLanes);
              Words& ds_pair = *reinterpret_cast<Words*>(slopes_pairs.words() + r / 2 * kKeys + c * kLanes);
              const Words p32 = __builtin_convertvector(p16, Words), ds32 = __builtin_convertvector(ds16, Words);
              p_pair = r % 2 ? p_pair | p32 << 16 : p32;
              ds_pair = r % 2 ? ds_pair | ds32 << 16 : ds32;
            } else {
              store(score + c * kLanes, p);
              store(slope + c * kLanes, ds);
            }
          }
        }
        const Word* p = kIsBf16 ? chances_pairs.words() : scores.words();
        const Word* ds = kIsBf16 ? slopes_pairs.words() : slopes.words();
        const Word* ds_rows = kIsBf16 ? slopes_rows.words() : slopes.words();
        const int64_t over = kIsBf16 ? even / 2 : rows;
        multiply<kIsBf16>({p, 1, kKeys}, {grads_along.words(), width}, count, width, over,
                          dv_sums.floats() + key * width, width, true);
        multiply<kIsBf16>({ds, 1, kKeys}, {queries_along.words(), width}, count, width, over,
                          dk_sums.floats() + key * width, width, true);
        multiply<kIsBf16>({ds_rows, steps, 1}, {keys_along.words() + key * words, width}, rows, width, steps,
                          dq_sums.floats(), width, true);
      }
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < width; d += kLanes)
          dq.store16(begin + r, d, load(dq_sums.floats() + r * width + d));
    }
  }
  const auto dk = Rows<kIsBf16>::of(call.dk, batch, kv_head), dv = Rows<kIsBf16>::of(call.dv, batch, kv_head);
  for (int64_t key = 0; key < call.keys; ++key)
    for (int64_t d = 0; d < width; d += kLanes) {
      dk.store16(key, d, load(dk_sums.floats() + key * width + d));
      dv.store16(key, d, load(dv_sums.floats() + key * width + d));
    }
}

template <class Task>
void each_key_head(const Call& call, int64_t threads, Task task) {
  const int64_t tasks = call.batch * call.kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t at = 0; at < tasks; ++at) task(at / call.kv_heads, at % call.kv_heads);
}

}  // namespace
}  // namespace superstep

using namespace superstep;

extern "C" {

void superstep_attention(const Call* call, int64_t threads) {
  each_key_head(*call, threads, [&](int64_t batch, int64_t head) {
    call->is_bf16 ? forward<true>(*call, batch, head) : forward<false>(*call, batch, head);
  });
}

void superstep_attention_backward(const Call* call, int64_t threads) {
  each_key_head(*call, threads, [&](int64_t batch, int64_t head) {
    call->is_bf16 ? backward<true>(*call, batch, head) : backward<false>(*call, batch, head);
  });
}

}  // extern "C"
