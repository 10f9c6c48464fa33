// word2vec's pairs (Mikolov 2013): each word's neighbours, or their mean, predict the rows of its outputs.
//
//   p = sigmoid(x . o);  loss = -log p, or -log (1 - p) for the label 0;  do += (p - label) x;  dx += (p - label) o
//
// Gradients are summed in compact tables, which have a row for each row that is touched, in the order of the first touch.
// Rows are padded to whole registers. The vectors around the word, and their gradients, are kept by their place in a ring,
// so that a word is read once and its gradient is added to its row once.

#pragma once

#include <algorithm>
#include <cmath>
#include <memory>

#include "numbers.h"

namespace superstep {

constexpr int kMostReach = 16, kMostContexts = 2 * kMostReach, kMostOutputs = 64, kMostRegisters = 20;
constexpr int64_t kRing = 64;   // places: more than a window on both sides
constexpr int64_t kAhead = 20;  // words: further than a window reaches

struct PairsCall {
  const int32_t* words;    // [samples, length]: rows of the input table; below 0 nothing, and no window reaches over it
  const int32_t* reach;    // [samples, length]: the window's words on each side
  const int32_t* outputs;  // [samples, length, most]: 2 * row + label of the output table; below 0 nothing
  int64_t samples, length, most;
  const float *in, *out;  // [in_rows, width], [out_rows, width]
  int64_t in_rows, out_rows, width;
};

struct CompactTable {
  int32_t* places;  // [rows of the table]: where a row is in `sums`; below 0 nowhere
  int64_t* rows;    // of each sum
  float* sums;      // [rows, padded]
  int64_t count, padded;

  float* at(int64_t row) {
    int32_t& place = places[row];
    if (place < 0) {
      place = int32_t(count);
      rows[count++] = row;
      for (int64_t j = 0; j < padded; j += kLanes) store(sums + place * padded + j, Floats{});
    }
    return sums + place * padded;
  }
};

// The sum of the logarithms of many numbers between 0 and 1: a product whose exponent is kept beside it.
struct LogSum {
  Floats product = all(1.0f);
  Ints exponent{};

  void add(Floats p) {
    const Words word = bits(product * p);
    exponent += Ints(word >> 23) - 127;
    product = floats((word & 0x7FFFFFu) | 0x3F800000u);
  }
  float sum() const {
    double out = 0;
    for (int i = 0; i < kLanes; ++i) out += std::log(double(product[i])) + exponent[i] * 0.6931471805599453;
    return float(out);
  }
};

template <int kRegisters>
struct PairsOfWidth {
  static constexpr int kPadded = kRegisters * kLanes;
  const PairsCall& call;
  CompactTable &in, &out;
  Words mask;  // of the last register
  Ints lane;
  alignas(64) float x[kRing * kPadded], dx[kRing * kPadded], o[kMostOutputs * kPadded], mean[kPadded];
  alignas(64) float p[kMostContexts * kMostOutputs + kLanes], labels[kMostContexts * kMostOutputs + kLanes];

  PairsOfWidth(const PairsCall& of, CompactTable& in_, CompactTable& out_) : call(of), in(in_), out(out_) {
    const int64_t last = call.width - (kRegisters - 1) * kLanes;
    for (int i = 0; i < kLanes; ++i) mask[i] = i < last ? ~0u : 0u, lane[i] = i;
  }

  void take(float* to, const float* table, int64_t row, int64_t rows) {
    const float* from = table + row * call.width;
    for (int r = 0; r < kRegisters - 1; ++r) store(to + r * kLanes, load(from + r * kLanes));
    constexpr int64_t done = (kRegisters - 1) * kLanes;
    Floats last{};
    if (row + 1 < rows) last = load(from + done);
    else std::memcpy(&last, from + done, (call.width - done) * sizeof(float));
    store(to + done, floats(bits(last) & mask));
  }

  static void add(float* to, const Floats* sum) {
    for (int r = 0; r < kRegisters; ++r) store(to + r * kLanes, load(to + r * kLanes) + sum[r]);
  }

  static float dot(const float* a, const float* b) {
    Floats sum = load(a) * load(b);
    for (int r = 1; r < kRegisters; ++r) sum += load(a + r * kLanes) * load(b + r * kLanes);
    return total(sum);
  }

  // What the word at a place will read and write.
  void prefetch(int64_t at) const {
    const int32_t* outputs = call.outputs + at * call.most;
    prefetch(in, call.in, call.words[at]);
    for (int64_t n = 0; n < call.most; ++n)
      if (outputs[n] >= 0) prefetch(out, call.out, outputs[n] >> 1);
  }
  void prefetch(const CompactTable& sums, const float* table, int64_t row) const {
    const int32_t place = sums.places[row];
    for (int r = 0; r < kRegisters; ++r) {
      __builtin_prefetch(table + row * call.width + r * kLanes);
      if (place >= 0) __builtin_prefetch(sums.sums + place * kPadded + r * kLanes, 1);
    }
  }

  static int64_t ring(int64_t place) { return place % kRing * kPadded; }

  void enter(const int32_t* words, int64_t place) {
    if (place >= call.length || words[place] < 0) return;
    take(x + ring(place), call.in, words[place], call.in_rows);
    for (int r = 0; r < kRegisters; ++r) store(dx + ring(place) + r * kLanes, Floats{});
  }

  void leave(const int32_t* words, int64_t place) {
    if (place < 0 || words[place] < 0) return;
    float* to = in.at(words[place]);
    for (int r = 0; r < kRegisters; ++r) store(to + r * kLanes, load(to + r * kLanes) + load(dx + ring(place) + r * kLanes));
  }

  // The places of the words around one, within the window.
  int64_t list_contexts(int64_t begin, int64_t at, int64_t* contexts) const {
    const int32_t* words = call.words + begin;
    const int64_t reach = std::min<int64_t>(call.reach[begin + at], kMostReach);
    int64_t count = 0;
    for (int64_t j = at - 1; j >= std::max<int64_t>(0, at - reach) && words[j] >= 0; --j) contexts[count++] = ring(j);
    for (int64_t j = at + 1; j <= std::min(call.length - 1, at + reach) && words[j] >= 0; ++j) contexts[count++] = ring(j);
    return count;
  }

  // p - label of each pair of an output and a vector, [outputs, taken].
  template <class At>
  void score(int64_t taken, int64_t outputs, const int32_t* chosen, LogSum& loss, At vector) {
    const int64_t pairs = taken * outputs;
    for (int64_t n = 0; n < outputs; ++n)
      for (int64_t c = 0; c < taken; ++c) {
        p[n * taken + c] = dot(o + n * kPadded, vector(c));
        labels[n * taken + c] = float(chosen[n] & 1);
      }
    for (int64_t i = 0; i < pairs; i += kLanes) {
      const Floats label = load(labels + i), s = sigmoid(load(p + i));
      const Floats right = larger(label > 0.5f ? s : 1.0f - s, all(1e-30f));
      loss.add(lane < int32_t(pairs - i) ? right : all(1.0f));
      store(p + i, s - label);
    }
  }

  template <class At>
  void add_outputs(int64_t taken, int64_t outputs, const int32_t* chosen, At vector) {
    for (int64_t n = 0; n < outputs; ++n) {
      Floats sum[kRegisters] = {};
      for (int64_t c = 0; c < taken; ++c)
        for (int r = 0; r < kRegisters; ++r) sum[r] += load(vector(c) + r * kLanes) * p[n * taken + c];
      add(out.at(chosen[n] >> 1), sum);
    }
  }

  // The gradient of a vector from all outputs.
  void gather(int64_t taken, int64_t outputs, int64_t c, Floats* sum) const {
    for (int64_t n = 0; n < outputs; ++n)
      for (int r = 0; r < kRegisters; ++r) sum[r] += load(o + n * kPadded + r * kLanes) * p[n * taken + c];
  }

  void learn_each(const int64_t* contexts, int64_t count, int64_t outputs, const int32_t* chosen, LogSum& loss) {
    const auto vector = [&](int64_t c) { return x + contexts[c]; };
    score(count, outputs, chosen, loss, vector);
    add_outputs(count, outputs, chosen, vector);
    for (int64_t c = 0; c < count; ++c) {
      Floats sum[kRegisters] = {};
      gather(count, outputs, c, sum);
      add(dx + contexts[c], sum);
    }
  }

  void learn_bag(const int64_t* contexts, int64_t count, int64_t outputs, const int32_t* chosen, LogSum& loss) {
    Floats sum[kRegisters] = {};
    for (int64_t c = 0; c < count; ++c)
      for (int r = 0; r < kRegisters; ++r) sum[r] += load(x + contexts[c] + r * kLanes);
    for (int r = 0; r < kRegisters; ++r) store(mean + r * kLanes, sum[r] * (1.0f / float(count))), sum[r] = Floats{};
    const auto vector = [&](int64_t) { return mean; };
    score(1, outputs, chosen, loss, vector);
    add_outputs(1, outputs, chosen, vector);
    gather(1, outputs, 0, sum);
    for (int64_t c = 0; c < count; ++c) add(dx + contexts[c], sum);
  }

  float sample(int64_t number, bool is_bag) {
    LogSum loss;
    const int64_t begin = number * call.length;
    const int32_t* words = call.words + begin;
    for (int64_t place = 0; place < kMostReach; ++place) enter(words, place);
    for (int64_t at = 0; at < call.length; ++at) {
      const int64_t ahead = at + kAhead;
      if (ahead < call.length && words[ahead] >= 0) prefetch(begin + ahead);
      leave(words, at - kMostReach - 1);
      enter(words, at + kMostReach);
      if (words[at] < 0) continue;
      int64_t contexts[kMostContexts];
      int32_t chosen[kMostOutputs];
      const int64_t count = list_contexts(begin, at, contexts);
      if (!count) continue;
      int64_t outputs = 0;
      for (int64_t n = 0; n < call.most && outputs < kMostOutputs; ++n) {
        const int32_t output = call.outputs[(begin + at) * call.most + n];
        if (output < 0) continue;
        take(o + outputs * kPadded, call.out, output >> 1, call.out_rows);
        chosen[outputs++] = output;
      }
      is_bag ? learn_bag(contexts, count, outputs, chosen, loss) : learn_each(contexts, count, outputs, chosen, loss);
    }
    for (int64_t place = call.length - kMostReach - 1; place < call.length; ++place) leave(words, place);
    return -loss.sum();
  }
};

template <int kRegisters = 1>
void word_pairs(const PairsCall& call, bool is_bag, CompactTable& in, CompactTable& out, float* losses) {
  if constexpr (kRegisters < kMostRegisters) {
    if (call.width > kRegisters * kLanes) return word_pairs<kRegisters + 1>(call, is_bag, in, out, losses);
  }
  const auto pairs = std::make_unique<PairsOfWidth<kRegisters>>(call, in, out);
  for (int64_t n = 0; n < call.samples; ++n) losses[n] = pairs->sample(n, is_bag);
}

}  // namespace superstep
