// Eight lanes: AVX2 with FMA and F16C (Haswell, Zen and later).

#include <cmath>
#include <cstring>

#include "types.h"

#if defined(__x86_64__)

#include <immintrin.h>

// This stands after every standard header, so that their inline functions are not compiled for this instruction set.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,popcnt")
#endif

namespace infinity::adam {
namespace {

using Vec = __m256;
constexpr int kLanes = 8;

inline __m256i widen(const void* data) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(data)));
}
// Values below 2^16 only.
inline void store_narrow(void* data, __m256i values) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(values, values), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(data), _mm256_castsi256_si128(packed));
}

inline Vec load(const float* data) { return _mm256_loadu_ps(data); }
inline void store(float* data, Vec a) { _mm256_storeu_ps(data, a); }
inline Vec load_bf16(const uint16_t* data) { return _mm256_castsi256_ps(_mm256_slli_epi32(widen(data), 16)); }
inline void store_bf16(uint16_t* data, Vec a) {
    const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(0x8000));
    store_narrow(data, _mm256_srli_epi32(bits, 16));
}
inline Vec load_f16(const uint16_t* data) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
}
inline void store_f16(uint16_t* data, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(data), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec load_split(const uint16_t* param, const int16_t* remainder) {
    const __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(remainder)));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(widen(param), 16), low));
}
inline void store_split(uint16_t* param, int16_t* remainder, Vec a) {
    store_bf16(param, a);
    store_narrow(remainder, _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0xFFFF)));
}

inline Vec broadcast(float value) { return _mm256_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec one_nan(Vec a) {
    const Vec nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    return _mm256_blendv_ps(a, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
inline Vec sign(Vec a) {
    const Vec none = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f);
    return _mm256_sub_ps(_mm256_and_ps(_mm256_cmp_ps(a, none, _CMP_GT_OQ), one),
                         _mm256_and_ps(_mm256_cmp_ps(a, none, _CMP_LT_OQ), one));
}

inline __m256i finite_lanes(Vec a) {
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7FFFFFFF));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), magnitude);
}
inline int nonfinite(Vec a) {
    return kLanes - __builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(finite_lanes(a))));
}

inline void store_cells(int32_t* out, Vec cell) {
    // Of a NaN `max` returns its second argument.
    const Vec bounded = _mm256_min_ps(_mm256_max_ps(cell, _mm256_setzero_ps()), _mm256_set1_ps(65535.0f));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_cvttps_epi32(bounded));
}

inline Vec finite_or_zero(Vec a) { return _mm256_and_ps(a, _mm256_castsi256_ps(finite_lanes(a))); }

struct SumLanes {
    __m256d sums[4];

    static SumLanes zero() {
        const __m256d none = _mm256_setzero_pd();
        return SumLanes{{none, none, none, none}};
    }
    void add_squares(Vec a, int lane) {
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
        const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
        // The square is exact in double, so fusing it with the addition does not change the result.
        sums[lane / 4] = _mm256_fmadd_pd(low, low, sums[lane / 4]);
        sums[lane / 4 + 1] = _mm256_fmadd_pd(high, high, sums[lane / 4 + 1]);
    }
    void store(double* out) const {
        for (int part = 0; part < 4; ++part) _mm256_storeu_pd(out + 4 * part, sums[part]);
    }
};

template <Dtype dtype, bool finite_only>
struct RowSums;
using BfloatSums = RowSums<kBfloat16, false>;

}  // namespace
}  // namespace infinity::adam

#include "kernel.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace infinity::adam {
const Kernels* const kAvx2Kernels = &kKernels;
}

#else

namespace infinity::adam {
const Kernels* const kAvx2Kernels = nullptr;
}

#endif
