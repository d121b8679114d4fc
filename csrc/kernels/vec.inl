// The vector of csrc/adam/arithmetic.inl with one element, and memory accesses of four elements.
//
// A thread processes four consecutive elements. fp32 values then move in accesses of 128 bits and 16-bit values in
// accesses of 64 bits, and the accesses of neighbouring threads are adjacent, so that nothing is loaded twice.

#include "../adam/types.h"

namespace infinity::adam {
namespace {

using namespace infinity::kernels;

struct Vec {
    float value;
};
constexpr int kLanes = 1;
constexpr int kPack = 4;

INFINITY_FN Vec load(const float* data) { return {*data}; }
INFINITY_FN void store(float* data, Vec a) { *data = a.value; }
INFINITY_FN Vec load_bf16(const uint16_t* data) { return {float_of(static_cast<uint32_t>(*data) << 16)}; }
INFINITY_FN void store_bf16(uint16_t* data, Vec a) {
    *data = static_cast<uint16_t>((bits_of(a.value) + 0x8000u) >> 16);
}
INFINITY_FN Vec load_f16(const uint16_t* data) { return {float_of_half(*data)}; }
INFINITY_FN void store_f16(uint16_t* data, Vec a) { *data = half_of_float(a.value); }
INFINITY_FN Vec load_split(const uint16_t* param, const int16_t* remainder) {
    return {float_of((static_cast<uint32_t>(*param) << 16) + static_cast<uint32_t>(static_cast<int32_t>(*remainder)))};
}
INFINITY_FN void store_split(uint16_t* param, int16_t* remainder, Vec a) {
    store_bf16(param, a);
    *remainder = static_cast<int16_t>(bits_of(a.value) & 0xFFFFu);
}

INFINITY_FN Vec broadcast(float value) { return {value}; }
INFINITY_FN Vec add(Vec a, Vec b) { return {sum(a.value, b.value)}; }
INFINITY_FN Vec sub(Vec a, Vec b) { return {difference(a.value, b.value)}; }
INFINITY_FN Vec mul(Vec a, Vec b) { return {product(a.value, b.value)}; }
INFINITY_FN Vec div(Vec a, Vec b) { return {quotient(a.value, b.value)}; }
INFINITY_FN Vec sqrt(Vec a) { return {square_root(a.value)}; }
INFINITY_FN Vec fma(Vec a, Vec b, Vec c) { return {fma_once(a.value, b.value, c.value)}; }

INFINITY_FN Vec min(Vec a, Vec b) { return a.value < b.value ? a : b; }
INFINITY_FN Vec max(Vec a, Vec b) { return a.value > b.value ? a : b; }
INFINITY_FN Vec one_nan(Vec a) { return {a.value == a.value ? a.value : float_of(0x7FC00000)}; }
INFINITY_FN Vec sign(Vec a) { return {a.value > 0.0f ? 1.0f : a.value < 0.0f ? -1.0f : 0.0f}; }

INFINITY_FN int nonfinite(Vec a) { return (bits_of(a.value) & 0x7F800000u) == 0x7F800000u; }

// Four elements as one memory access.
template <uint64_t nbytes>
struct alignas(nbytes) Pack {
    uint32_t words[nbytes / 4];
};

template <uint64_t element_nbytes>
INFINITY_FN void move_pack(void* to, const void* from) {
    using Whole = Pack<kPack * element_nbytes>;
    *static_cast<Whole*>(to) = *static_cast<const Whole*>(from);
}

template <uint64_t element_nbytes>
INFINITY_FN bool starts_a_pack(const void* data) {
    return reinterpret_cast<uintptr_t>(data) % (kPack * element_nbytes) == 0;
}

// The first tile of each of several runs, numbered consecutively; the last entry is the number of all tiles.
template <int runs_max>
struct Tiles {
    uint32_t first[runs_max + 1];

    INFINITY_FN int run_of(uint32_t tile) const {
        int run = 0;
        while (first[run + 1] <= tile) ++run;
        return run;
    }
};

constexpr uint64_t ceil_div(uint64_t value, uint64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace
}  // namespace infinity::adam
