// Sums and maxima of what several ranks hold, in rank order: in fp32 where the numbers are narrower, and rounded once.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

enum Type : int64_t { FLOAT32, FLOAT64, BFLOAT16, INT32, INT64, UINT8, FLOAT16 };
enum Rule : int64_t { SUM, MAX, MIN };

inline int64_t width(Type type) {
    constexpr int64_t widths[] = {4, 8, 2, 4, 8, 1, 2};
    return widths[type];
}

struct Bfloat16 {
    uint16_t bits;
};

inline float wide(Bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

struct Float16 {
    uint16_t bits;
};

inline float wide(Float16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 0x3ff;
    float out = float(fraction) * 0x1p-24f;  // below the least exponent
    uint32_t bits;
    std::memcpy(&bits, &out, 4);
    if (exponent == 31) bits = 0x7f800000 | (fraction << 13);
    else if (exponent) bits = ((exponent + 112) << 23) | (fraction << 13);
    bits |= sign;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <class T>
inline T wide(T x) {
    return x;
}

inline void narrow(float x, Bfloat16& out) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    out.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

inline void narrow(float x, Float16& out) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits & 0x80000000;
    bits ^= sign;
    uint32_t half;
    if (bits >= 0x47800000) {  // 65536
        half = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
    } else if (bits < 0x38800000) {  // 2^-14: the sum with 1/2 has the last bits of the result
        float sum;
        std::memcpy(&sum, &bits, 4);
        sum += 0.5f;
        std::memcpy(&half, &sum, 4);
        half -= 0x3f000000;
    } else {
        half = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;
    }
    out.bits = uint16_t(half | (sign >> 16));
}

template <class T>
inline void narrow(T x, T& out) {
    out = x;
}

struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return T(a + b);
    }
};

// As torch has it: what is compared with no number is none.
struct Larger {
    template <class T>
    T operator()(T a, T b) const {
        return a > b || a != a ? a : b;
    }
};

struct Smaller {
    template <class T>
    T operator()(T a, T b) const {
        return a < b || a != a ? a : b;
    }
};

template <class T, class F>
void combine_as(const char* const* from, int64_t ranks, char* out, int64_t count, F f) {
    using W = decltype(wide(T{}));
    constexpr int64_t PIECE = 1024;
    W sums[PIECE];
    T* to = reinterpret_cast<T*>(out);
    for (int64_t first = 0; first < count; first += PIECE) {
        const int64_t here = std::min(PIECE, count - first);
        const T* x = reinterpret_cast<const T*>(from[0]) + first;
        for (int64_t i = 0; i < here; ++i) sums[i] = wide(x[i]);
        for (int64_t q = 1; q < ranks; ++q) {
            const T* y = reinterpret_cast<const T*>(from[q]) + first;
            for (int64_t i = 0; i < here; ++i) sums[i] = f(sums[i], W(wide(y[i])));
        }
        for (int64_t i = 0; i < here; ++i) narrow(sums[i], to[first + i]);
    }
}

template <class T>
void combine_by(Rule rule, const char* const* from, int64_t ranks, char* out, int64_t count) {
    if (rule == SUM) combine_as<T>(from, ranks, out, count, Add{});
    else if (rule == MAX) combine_as<T>(from, ranks, out, count, Larger{});
    else combine_as<T>(from, ranks, out, count, Smaller{});
}

// ``out`` may be one of ``from``.
inline void combine(Type type, Rule rule, const char* const* from, int64_t ranks, char* out, int64_t count) {
    switch (type) {
        case FLOAT32: return combine_by<float>(rule, from, ranks, out, count);
        case FLOAT64: return combine_by<double>(rule, from, ranks, out, count);
        case BFLOAT16: return combine_by<Bfloat16>(rule, from, ranks, out, count);
        case INT32: return combine_by<int32_t>(rule, from, ranks, out, count);
        case INT64: return combine_by<int64_t>(rule, from, ranks, out, count);
        case FLOAT16: return combine_by<Float16>(rule, from, ranks, out, count);
        case UINT8: return combine_by<uint8_t>(rule, from, ranks, out, count);
    }
}
