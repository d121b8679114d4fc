// The names of csrc/kernels/grid.cuh for a C++ compiler: a grid is a loop over its blocks, a block a loop over its
// threads. Included before a kernel's text, it takes the place of that header.
#pragma once
#define INFINITY_GRID

#include <cmath>
#include <cstdint>
#include <cstring>

#define INFINITY_FN inline
#define INFINITY_SHARED static
#define INFINITY_UNROLL
#define INFINITY_EXPORT extern "C" __attribute__((visibility("default")))

namespace infinity::kernels {
namespace {

inline float fma_once(float a, float b, float c) { return std::fma(a, b, c); }
inline double fma_once(double a, double b, double c) { return std::fma(a, b, c); }
inline float product(float a, float b) { return a * b; }
inline float sum(float a, float b) { return a + b; }
inline float difference(float a, float b) { return a - b; }
inline float quotient(float a, float b) { return a / b; }
inline float square_root(float a) { return std::sqrt(a); }
inline double total(double a, double b) { return a + b; }

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
inline float float_of_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const int exponent = half >> 10 & 0x1F;
    const int fraction = half & 0x3FF;
    if (exponent == 0x1F) return float_of(sign | 0x7F800000u | static_cast<uint32_t>(fraction) << 13);
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                          : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    return float_of(sign | bits_of(magnitude));
}
inline uint16_t half_of_float(float value) {
    const uint32_t sign = bits_of(value) >> 16 & 0x8000u;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7E00u);
    if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00u);
    // The unit in the last place of the result; what rounds up into the next binade carries into the exponent.
    const int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
    const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
    const uint32_t half = exponent == -14 ? units : (static_cast<uint32_t>(exponent + 14) << 10) + units;
    return static_cast<uint16_t>(sign | half);
}

inline void add_to_count(uint64_t* count, uint64_t more) { *count += more; }

// Every other call takes the threads backwards: a text that relies on an order among them gives other bits.
template <int threads, class Body>
void each_thread(const Body& body) {
    static bool backwards = false;
    backwards = !backwards;
    for (int thread = 0; thread < threads; ++thread) body(backwards ? threads - 1 - thread : thread);
}

template <class Kernel>
int32_t launch(const Kernel& kernel, uint32_t blocks, void*) {
    static_assert(sizeof(Kernel) <= 4096, "all drivers take this much as an argument");
    for (uint32_t block = 0; block < blocks; ++block) kernel(block);
    return 0;
}

template <class Kernel>
int32_t runs_on(int32_t) {
    return 0;
}

inline int32_t use_device(int32_t) { return 0; }
inline int32_t driver_version() { return 0; }
inline int32_t runtime_version() { return 0; }
inline const char* error_text(int32_t) { return "no error"; }

}  // namespace
}  // namespace infinity::kernels
