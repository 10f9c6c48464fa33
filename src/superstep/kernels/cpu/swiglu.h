// SwiGLU: silu(a) b, and its gradients (Shazeer 2020).
//
//   s = 1 / (1 + e^-a);  y = a s b;  db = g a s,  da = g b s (1 + a (1 - s))

#pragma once

#include <algorithm>

#include "numbers.h"

namespace superstep {

constexpr int64_t kGatedOfTask = 1 << 14;

// Whole registers one by one, then what is left: `each` is given where it begins, and how many there are of 16.
template <class Each>
void each_register(int64_t count, int64_t threads, Each each) {
  const int64_t tasks = (count + kGatedOfTask - 1) / kGatedOfTask;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t end = std::min(count, (task + 1) * kGatedOfTask);
    int64_t at = task * kGatedOfTask;
    for (; at + kLanes <= end; at += kLanes) each(at, std::integral_constant<int64_t, kLanes>{});
    if (at < end) each(at, end - at);
  }
}

template <class From>
inline Floats taken(From from, int64_t at, int64_t count) {
  return count == kLanes ? from[at] : from.some(at, count);
}
template <class To>
inline void given(To to, int64_t at, int64_t count, Floats x) {
  count == kLanes ? to.put(at, x) : to.put_some(at, count, x);
}

template <bool kIsBf16>
void swiglu(const void* a_at, const void* b_at, void* y_at, int64_t count, int64_t threads) {
  const Numbers<kIsBf16> a(a_at), b(b_at), y(y_at);
  each_register(count, threads, [&](int64_t at, auto here) {
    const Floats x = taken(a, at, here);
    given(y, at, here, x * sigmoid(x) * taken(b, at, here));
  });
}

template <bool kIsBf16>
void swiglu_backward(const void* g_at, const void* a_at, const void* b_at, void* da_at, void* db_at, int64_t count,
                     int64_t threads) {
  const Numbers<kIsBf16> g(g_at), a(a_at), b(b_at), da(da_at), db(db_at);
  each_register(count, threads, [&](int64_t at, auto here) {
    const Floats x = taken(a, at, here), grad = taken(g, at, here), s = sigmoid(x);
    given(db, at, here, grad * x * s);
    given(da, at, here, grad * taken(b, at, here) * s * (1.0f + x * (1.0f - s)));
  });
}

}  // namespace superstep
