// The types of the C ABI, and the table of functions that every instruction set provides.
//
// The arithmetic is defined once, in arithmetic.inl: fp32 with explicit fused multiply-adds and IEEE square root and
// division. Every instruction set, any number of threads and the Python fallback (infinity/ops/rules.py) give the
// same bits for every input without NaNs; a NaN stays a NaN.
#pragma once

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "codes are packed in little-endian order"
#endif

#include <cmath>
#include <cstdint>

namespace infinity::adam {

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// The storage of the fp32 weight.
enum Storage : int32_t {
    // PARAM is fp32 and is the weight.
    kPlain = 0,
    // PARAM bf16 and REMAINDER int16: bits = (param << 16) + remainder.
    kSplit = 1,
    // MASTER fp32 is the weight, PARAM fp16 its copy rounded to nearest even.
    kMasterHalf = 2,
    // MASTER fp32 is the weight, PARAM bf16 its copy rounded to nearest, ties away from zero (as in kSplit).
    kMasterBfloat = 3,
};

// The update rule of an element: see arithmetic.inl.
enum Rule : int32_t;

// Of moments in 8 bits, as infinity/ops/codes.py makes them: what each code stands for, and the code of each of the
// cells between -1 and 1. Signed: of the first moment. Behind `cells` lie bytes that a vector may read and does not use.
struct Maps {
    float values[2][256];
    uint8_t cells[2][65536];
};

// Elements whose moments in 8 bits share an absmax.
constexpr uint64_t kCodedNumel = 256;

// One contiguous run of elements that share hyper-parameters. Mirrored by a struct in infinity/ops/adam.py.
struct Piece {
    void* param;
    const void* grad;
    float* exp_avg;
    float* exp_avg_sq;
    int16_t* remainder;
    float* master;
    // Of moments in 8 bits; exp_avg and exp_avg_sq are codes then (uint8_t), and the first element begins a block.
    float* absmax[2];
    const Maps* maps;
    uint64_t numel;
    Storage storage;
    Dtype grad_dtype;
    Rule rule;
    // Named by their meaning in Adam; infinity/ops/rules.py says what the other rules put there.
    float grad_scale;
    float weight_decay;
    float decay;
    // Negative, -0 included: the first moment interpolates from the gradient instead of from the state.
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float sqrt_bias_correction2;
    float eps;
    float minus_step_size;
    // A scaled gradient is clamped to [-grad_bound, grad_bound]; infinite: no clamping.
    float grad_bound;
};

// A tensor to be summed. Mirrored in infinity/ops/adam.py.
struct Span {
    const void* data;
    uint64_t numel;
    Dtype dtype;
};

// Sums are computed over blocks of this many elements from the start of a tensor, so that the order of additions
// depends on the tensor alone.
constexpr uint64_t kBlockNumel = 4096;
constexpr int kSumLanes = 16;

struct BlockSum {
    double sum_of_squares;
    uint64_t nonfinite;
};

struct Kernels {
    // Returns the number of elements whose gradient is not finite. They keep their state, and with moments in 8 bits
    // their whole block does; `begin` begins a block.
    uint64_t (*step)(const Piece& piece, uint64_t begin, uint64_t end);
    // Writes one BlockSum for each block of [begin, end); `begin` is the start of a block, `end` the end of one.
    void (*sum)(const Span& span, uint64_t begin, uint64_t end, BlockSum* out);
    void (*split)(const float* values, uint16_t* param, int16_t* remainder, uint64_t numel);
    void (*join)(const uint16_t* param, const int16_t* remainder, float* values, uint64_t numel);
};

enum Isa : int32_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 3, kIsaCount = 4 };

// Null if the library was compiled for another architecture.
extern const Kernels* const kScalarKernels;
extern const Kernels* const kAvx2Kernels;
extern const Kernels* const kAvx512Kernels;
extern const Kernels* const kNeonKernels;

}  // namespace infinity::adam
