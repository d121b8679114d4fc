// Sixteen lanes: AVX-512 Foundation (Skylake server, Zen 4 and later).

#include <cmath>
#include <cstring>

#include "types.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if !defined(__clang__)
// GCC's header leaves the unused source of its masked built-ins undefined on purpose, and GCC 12 warns about that.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// This stands after every standard header, so that their inline functions are not compiled for this instruction set.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx2,fma,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx2,fma,f16c,popcnt")
#endif

namespace infinity::adam {
namespace {

using Vec = __m512;
constexpr int kLanes = 16;

inline __m512i widen(const void* data) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(data)));
}
inline void store_narrow(void* data, __m512i values) {
    _mm256_storeu_si256(static_cast<__m256i*>(data), _mm512_cvtepi32_epi16(values));
}

inline Vec load(const float* data) { return _mm512_loadu_ps(data); }
inline void store(float* data, Vec a) { _mm512_storeu_ps(data, a); }
inline Vec load_bf16(const uint16_t* data) { return _mm512_castsi512_ps(_mm512_slli_epi32(widen(data), 16)); }
inline void store_bf16(uint16_t* data, Vec a) {
    const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x8000));
    store_narrow(data, _mm512_srli_epi32(bits, 16));
}
inline Vec load_f16(const uint16_t* data) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)));
}
inline void store_f16(uint16_t* data, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec load_split(const uint16_t* param, const int16_t* remainder) {
    const __m512i low = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(remainder)));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(widen(param), 16), low));
}
inline void store_split(uint16_t* param, int16_t* remainder, Vec a) {
    store_bf16(param, a);
    store_narrow(remainder, _mm512_castps_si512(a));
}

inline Vec broadcast(float value) { return _mm512_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec one_nan(Vec a) {
    const Vec nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), nan);
}
inline Vec sign(Vec a) {
    const Vec none = _mm512_setzero_ps(), one = _mm512_set1_ps(1.0f);
    const Vec above = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, none, _CMP_GT_OQ), one);
    return _mm512_mask_sub_ps(above, _mm512_cmp_ps_mask(a, none, _CMP_LT_OQ), none, one);
}

inline __mmask16 finite_lanes(Vec a) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7FFFFFFF));
    return _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
}
inline int nonfinite(Vec a) { return kLanes - __builtin_popcount(finite_lanes(a)); }
inline void store_cells(int32_t* out, Vec cell) {
    // Of a NaN `max` returns its second argument.
    const Vec bounded = _mm512_min_ps(_mm512_max_ps(cell, _mm512_setzero_ps()), _mm512_set1_ps(65535.0f));
    _mm512_storeu_si512(out, _mm512_cvttps_epi32(bounded));
}

inline Vec finite_or_zero(Vec a) { return _mm512_maskz_mov_ps(finite_lanes(a), a); }

struct SumLanes {
    __m512d low, high;

    static SumLanes zero() { return SumLanes{_mm512_setzero_pd(), _mm512_setzero_pd()}; }
    void add_squares(Vec a, int) {
        const __m512d first = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
        const __m512d second = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
        // The square is exact in double, so fusing it with the addition does not change the result.
        low = _mm512_fmadd_pd(first, first, low);
        high = _mm512_fmadd_pd(second, second, high);
    }
    void store(double* out) const {
        _mm512_storeu_pd(out, low);
        _mm512_storeu_pd(out + 8, high);
    }
};

// Sums of bf16 squares in the lanes and the order of SumLanes. One shift and one mask for 32 elements make a vector of
// the even elements of two rows and a vector of the odd ones. Their halves are converted from memory instead of a
// register, which saves the operation that extracts a half.
struct BfloatSums {
    static constexpr uint64_t kNumel = 32;
    __m512d even, odd;

    static BfloatSums zero() { return BfloatSums{_mm512_setzero_pd(), _mm512_setzero_pd()}; }
    void add_squares(const char* at) {
        const __m512i pairs = _mm512_loadu_si512(at);
        even = add_halves(_mm512_slli_epi32(pairs, 16), even);
        odd = add_halves(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))), odd);
    }
    void store(double* out) const {
        double columns[2][8];
        _mm512_storeu_pd(columns[0], even);
        _mm512_storeu_pd(columns[1], odd);
        for (int lane = 0; lane < kSumLanes; ++lane) out[lane] = columns[lane % 2][lane / 2];
    }

  private:
    // Adds the first row before the second.
    static __m512d add_halves(__m512i values, __m512d sums) {
        alignas(64) float rows[16];
        _mm512_store_si512(rows, values);
        __asm__("" : "+m"(rows));
        const __m512d first = _mm512_cvtps_pd(_mm256_load_ps(rows));
        const __m512d second = _mm512_cvtps_pd(_mm256_load_ps(rows + 8));
        return _mm512_fmadd_pd(second, second, _mm512_fmadd_pd(first, first, sums));
    }
};

}  // namespace
}  // namespace infinity::adam

#include "kernel.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace infinity::adam {
const Kernels* const kAvx512Kernels = &kKernels;
}

#else

namespace infinity::adam {
const Kernels* const kAvx512Kernels = nullptr;
}

#endif
