// Attention of some queries to some keys, and its gradients, block by block: no row of scores is ever whole (Dao 2023,
// FlashAttention-2; the backward pass computes scores again from the log-sum-exp, Dao 2022, algorithm 4).
//
//   queries, 48 or 64        x    keys, 64 at a time        P = exp(scale q·k - m)
//   forward     out = P·v / sum(P), lse = m + log sum(P)
//   backward    P = exp(scale q·k - lse), dS = scale P (grad·v - rowsum(grad · out));
//               dv += P'·grad, dk += dS'·q, dq += dS·k
//
// A task is a key head of a sequence, with all query heads that see it: its keys and values are laid out once, and its
// gradients have one writer. Plain C to whom calls it; all memory that is told of is the caller's.

#include <chrono>

#include "attention_backward.h"
#include "attention_forward.h"
#include "paired_backward.h"
#include "paired_forward.h"

namespace superstep {
namespace {

// A thread has one room for all its tasks: new memory is dearer than what is computed in it.
template <class Pass>
void each_key_head(const Call& call, int64_t threads) {
  const int64_t tasks = call.batch * call.kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Pass pass(call);
#pragma omp for schedule(dynamic)
    for (int64_t at = 0; at < tasks; ++at) pass.run(at / call.kv_heads, at % call.kv_heads);
  }
}

}  // namespace
}  // namespace superstep

using namespace superstep;

extern "C" {

void superstep_attention(const Call* call, int64_t threads) {
  if (call->in_pairs) each_key_head<PairedForward>(*call, threads);
  else if (call->is_bf16) each_key_head<Forward<true>>(*call, threads);
  else each_key_head<Forward<false>>(*call, threads);
}

// Some rows of fp32, 48 at most, and a block of 64 keys, as `Forward` looks at it: for who has its keys elsewhere. Keys are
// [width, 64], values [64, width]; nothing is what no row sees.
void superstep_attend_block(const float* q, int64_t rows, int64_t width, float scale, const float* keys,
                            const float* values, int64_t key, const int64_t* first, const int64_t* end, float* sums,
                            float* total, float* top) {
  static thread_local Room scores(kQueries * kKeys), chances(kQueries * kKeys);
  const auto words = [](const float* x) { return reinterpret_cast<const Word*>(x); };
  add_block({{words(q), width, 1}, rows, width, scale, words(keys), words(values), key, first, end},
                   {sums, total, top}, scores, chances);
}

void superstep_attention_backward(const Call* call, int64_t threads) {
  if (call->in_pairs) each_key_head<PairedBackward>(*call, threads);
  else if (call->is_bf16) each_key_head<Backward<true>>(*call, threads);
  else each_key_head<Backward<false>>(*call, threads);
}

// Whether this process may multiply by tiles; to be asked before it does.
int64_t superstep_may_use_tiles() { return may_use_tiles(); }

// How many times as long a product of bf16 takes in pairs, without tiles, as in fp32; where pairs have no instruction, no
// less.
double superstep_pairs_over_floats() {
#ifndef __AVX512BF16__
  return 2.0;
#endif
  constexpr int64_t kTimes = 200;
  Room a(kQueries * kKeys), b(kKeys * kKeys), out(kQueries * kKeys);
  std::fill(a.floats(), a.floats() + kQueries * kKeys, 1.0f);
  std::fill(b.floats(), b.floats() + kKeys * kKeys, 1.0f);
  using Clock = std::chrono::steady_clock;
  Clock::duration least[2] = {Clock::duration::max(), Clock::duration::max()};
  for (int64_t i = 0; i < 2 * kTimes; ++i) {
    const auto begin = Clock::now();
    if (i % 2)
      multiply<true>({a.words(), kKeys / 2, 1}, {b.words(), kKeys}, kQueries, kKeys, kKeys / 2, out.floats(), kKeys, false);
    else
      multiply<false>({a.words(), kKeys, 1}, {b.words(), kKeys}, kQueries, kKeys, kKeys, out.floats(), kKeys, false);
    least[i % 2] = std::min(least[i % 2], Clock::now() - begin);
  }
  return std::chrono::duration<double>(least[1]) / std::chrono::duration<double>(least[0]);
}

}  // extern "C"
