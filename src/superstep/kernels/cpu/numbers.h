// Numbers as they lie in memory, fp32 or bf16, sixteen at a time: computed with in fp32, and rounded when they are stored.

#pragma once

#include <type_traits>

#include "vector.h"

namespace superstep {

template <bool kIsBf16>
struct Numbers {
  using Number = std::conditional_t<kIsBf16, bf16, float>;
  Number* at;

  explicit Numbers(const void* from) : at(static_cast<Number*>(const_cast<void*>(from))) {}
  Numbers operator+(int64_t by) const { return Numbers(at + by); }
  Floats operator[](int64_t first) const {
    if constexpr (kIsBf16) return widen(at + first);
    else return load(at + first);
  }
  void put(int64_t first, Floats x) const {
    if constexpr (kIsBf16) *reinterpret_cast<Halves*>(at + first) = narrow(x);
    else store(at + first, x);
  }
  // Up to 16 of them, where no more may be touched; what is not there is 0.
  Floats some(int64_t first, int64_t count) const {
    Number held[kLanes] = {};
    std::memcpy(held, at + first, count * sizeof(Number));
    return Numbers(held)[0];
  }
  void put_some(int64_t first, int64_t count, Floats x) const {
    Number held[kLanes];
    Numbers(held).put(0, x);
    std::memcpy(at + first, held, count * sizeof(Number));
  }
};

// 1 / (1 + e^-x), for any x.
inline Floats sigmoid(Floats x) {
  const Floats most = all(87.0f);
  x = x < -most ? -most : x;
  return 1.0f / (1.0f + exponential(-x));
}

}  // namespace superstep
