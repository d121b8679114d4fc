// One lane without any instruction set extension: runs on every processor, and is the reference of the vector paths.

#include <cmath>
#include <cstring>

#include "types.h"

namespace infinity::adam {
namespace {

struct Vec {
    float value;
};
constexpr int kLanes = 1;

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline Vec load(const float* data) { return {*data}; }
inline void store(float* data, Vec a) { *data = a.value; }
inline Vec load_bf16(const uint16_t* data) { return {float_of(static_cast<uint32_t>(*data) << 16)}; }
inline void store_bf16(uint16_t* data, Vec a) { *data = static_cast<uint16_t>((bits_of(a.value) + 0x8000u) >> 16); }

inline Vec load_f16(const uint16_t* data) {
    const uint32_t sign = static_cast<uint32_t>(*data & 0x8000u) << 16;
    const uint32_t exponent = (*data >> 10) & 0x1Fu;
    const uint32_t fraction = *data & 0x3FFu;
    if (exponent == 0x1F) return {float_of(sign | 0x7F800000u | fraction << 13)};
    if (exponent != 0) return {float_of(sign | (exponent + 112) << 23 | fraction << 13)};
    // Zero or subnormal: fraction * 2^-24, exact in fp32.
    return {float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f))};
}

inline void store_f16(uint16_t* data, Vec a) {
    const uint32_t bits = bits_of(a.value);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t half;
    if (magnitude > 0x7F800000u) {
        half = 0x7E00u | (magnitude >> 13 & 0x3FFu);
    } else if (magnitude >= 0x477FF000u) {
        // 65520 and above rounds to infinity.
        half = 0x7C00u;
    } else if (magnitude >= 0x38800000u) {
        half = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
    } else {
        // Subnormal in fp16: adding 0.5 leaves multiples of 2^-24 in the fraction, rounded to nearest even.
        half = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    }
    *data = static_cast<uint16_t>(sign | half);
}

inline Vec load_split(const uint16_t* param, const int16_t* remainder) {
    return {float_of((static_cast<uint32_t>(*param) << 16) + static_cast<uint32_t>(static_cast<int32_t>(*remainder)))};
}
inline void store_split(uint16_t* param, int16_t* remainder, Vec a) {
    store_bf16(param, a);
    *remainder = static_cast<int16_t>(bits_of(a.value) & 0xFFFFu);
}

inline Vec broadcast(float value) { return {value}; }
inline Vec add(Vec a, Vec b) { return {a.value + b.value}; }
inline Vec sub(Vec a, Vec b) { return {a.value - b.value}; }
inline Vec mul(Vec a, Vec b) { return {a.value * b.value}; }
inline Vec div(Vec a, Vec b) { return {a.value / b.value}; }
inline Vec sqrt(Vec a) { return {std::sqrt(a.value)}; }
inline int nonfinite(Vec a) { return (bits_of(a.value) & 0x7F800000u) == 0x7F800000u; }
inline Vec fma(Vec a, Vec b, Vec c) { return {__builtin_fmaf(a.value, b.value, c.value)}; }
inline Vec min(Vec a, Vec b) { return a.value < b.value ? a : b; }
inline Vec max(Vec a, Vec b) { return a.value > b.value ? a : b; }
inline Vec one_nan(Vec a) { return {a.value == a.value ? a.value : float_of(0x7FC00000)}; }
inline Vec sign(Vec a) { return {a.value > 0.0f ? 1.0f : a.value < 0.0f ? -1.0f : 0.0f}; }

inline void store_cells(int32_t* out, Vec cell) {
    const float bounded = cell.value > 0.0f ? cell.value : 0.0f;
    *out = static_cast<int32_t>(bounded < 65535.0f ? bounded : 65535.0f);
}

inline Vec finite_or_zero(Vec a) { return nonfinite(a) ? Vec{0.0f} : a; }

struct SumLanes {
    double sums[kSumLanes];

    static SumLanes zero() { return SumLanes{}; }
    void add_squares(Vec a, int lane) { sums[lane] += static_cast<double>(a.value) * static_cast<double>(a.value); }
    void store(double* out) const { std::memcpy(out, sums, sizeof sums); }
};

template <Dtype dtype, bool finite_only>
struct RowSums;
using BfloatSums = RowSums<kBfloat16, false>;

}  // namespace
}  // namespace infinity::adam

#include "kernel.inl"

namespace infinity::adam {
const Kernels* const kScalarKernels = &kKernels;
}
