// Four lanes: NEON, which every 64-bit ARM processor has.

#include <cmath>
#include <cstring>

#include "types.h"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace infinity::adam {
namespace {

using Vec = float32x4_t;
constexpr int kLanes = 4;

inline Vec load(const float* data) { return vld1q_f32(data); }
inline void store(float* data, Vec a) { vst1q_f32(data, a); }
inline Vec load_bf16(const uint16_t* data) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(data), 16)); }
inline void store_bf16(uint16_t* data, Vec a) {
    vst1_u16(data, vshrn_n_u32(vaddq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x8000)), 16));
}
inline Vec load_f16(const uint16_t* data) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(data))); }
inline void store_f16(uint16_t* data, Vec a) { vst1_u16(data, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
inline Vec load_split(const uint16_t* param, const int16_t* remainder) {
    const int32x4_t high = vreinterpretq_s32_u32(vshll_n_u16(vld1_u16(param), 16));
    return vreinterpretq_f32_s32(vaddw_s16(high, vld1_s16(remainder)));
}
inline void store_split(uint16_t* param, int16_t* remainder, Vec a) {
    store_bf16(param, a);
    vst1_s16(remainder, vmovn_s32(vreinterpretq_s32_f32(a)));
}

inline Vec broadcast(float value) { return vdupq_n_f32(value); }
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec sqrt(Vec a) { return vsqrtq_f32(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec min(Vec a, Vec b) { return vminq_f32(a, b); }
inline Vec max(Vec a, Vec b) { return vmaxnmq_f32(a, b); }
inline Vec one_nan(Vec a) {
    return vbslq_f32(vceqq_f32(a, a), a, vreinterpretq_f32_u32(vdupq_n_u32(0x7FC00000)));
}
inline Vec sign(Vec a) {
    const uint32x4_t one = vreinterpretq_u32_f32(vdupq_n_f32(1.0f));
    return vsubq_f32(vreinterpretq_f32_u32(vandq_u32(vcgtzq_f32(a), one)),
                     vreinterpretq_f32_u32(vandq_u32(vcltzq_f32(a), one)));
}

inline uint32x4_t finite_lanes(Vec a) {
    const uint32x4_t magnitude = vandq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x7FFFFFFF));
    return vcltq_u32(magnitude, vdupq_n_u32(0x7F800000));
}
inline int nonfinite(Vec a) { return kLanes - static_cast<int>(vaddvq_u32(vshrq_n_u32(finite_lanes(a), 31))); }
inline void store_cells(int32_t* out, Vec cell) {
    // The conversion makes 0 of what is below it and of a NaN.
    vst1q_s32(out, vreinterpretq_s32_u32(vminq_u32(vcvtq_u32_f32(cell), vdupq_n_u32(65535))));
}

inline Vec finite_or_zero(Vec a) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), finite_lanes(a)));
}

struct SumLanes {
    float64x2_t sums[8];

    static SumLanes zero() {
        SumLanes lanes;
        for (auto& part : lanes.sums) part = vdupq_n_f64(0.0);
        return lanes;
    }
    void add_squares(Vec a, int lane) {
        const float64x2_t low = vcvt_f64_f32(vget_low_f32(a));
        const float64x2_t high = vcvt_high_f64_f32(a);
        // The square is exact in double, so fusing it with the addition does not change the result.
        sums[lane / 2] = vfmaq_f64(sums[lane / 2], low, low);
        sums[lane / 2 + 1] = vfmaq_f64(sums[lane / 2 + 1], high, high);
    }
    void store(double* out) const {
        for (int part = 0; part < 8; ++part) vst1q_f64(out + 2 * part, sums[part]);
    }
};

template <Dtype dtype, bool finite_only>
struct RowSums;
using BfloatSums = RowSums<kBfloat16, false>;

}  // namespace
}  // namespace infinity::adam

#include "kernel.inl"

namespace infinity::adam {
const Kernels* const kNeonKernels = &kKernels;
}

#else

namespace infinity::adam {
const Kernels* const kNeonKernels = nullptr;
}

#endif
