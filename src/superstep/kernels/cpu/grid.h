// Numbers put on a grid of 2^-bits and added there as integers (numerics/fixed_point.py): what lies below the grid is cut
// off, so that each number's integer hangs on it alone, and no order of sums changes a bit.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace superstep {

constexpr int64_t kRun = 1 << 14;  // numbers that a thread adds at once

// into += values on the grid; how many of them are no smaller in size than the limit, or are no numbers. Of those what is
// added means nothing, and nobody will use the sum.
inline int64_t add_run_to_grid(int64_t* into, const float* values, int64_t count, float scale, float limit) {
  int64_t wrong = 0;
#pragma omp simd reduction(+ : wrong)
  for (int64_t i = 0; i < count; ++i) {
    wrong += !(std::fabs(values[i]) < limit);
    into[i] += static_cast<int64_t>(values[i] * scale);
  }
  return wrong;
}

// The same by several threads.
inline int64_t add_to_grid(int64_t* into, const float* values, int64_t count, float scale, float limit,
                           int64_t threads) {
  int64_t wrong = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : wrong) if (threads > 1)
  for (int64_t at = 0; at < count; at += kRun)
    wrong += add_run_to_grid(into + at, values + at, std::min(kRun, count - at), scale, limit);
  return wrong;
}

}  // namespace superstep
