// What crosses the C ABI and the table of functions that every instruction set provides.
//
// The arithmetic is defined once, in arithmetic.inl. All of it is fp32 with explicit fused multiply-adds and IEEE square
// root and division, so that every instruction set, any number of threads and the Python fallback
// (infinity/ops/reference.py) give the same bits for every input that is not a NaN; a NaN stays a NaN.
#pragma once

#include <cmath>
#include <cstdint>

namespace infinity::adam {

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// How the fp32 weight is stored.
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

// How an element is stepped: see step_lanes. kLion, kAdagrad and kMomentum keep one state, in exp_avg.
enum Rule : int32_t { kAdam = 0, kAdamW = 1, kLion = 2, kAdagrad = 3, kMomentum = 4 };

// What code is made for: Adam's rules apart, for speed; those of one state together, which asks for the rule at every
// vector and still waits for memory.
enum Form : int32_t { kAdamForm = kAdam, kAdamWForm = kAdamW, kOneState = 2 };

// One contiguous run of elements that share hyper-parameters. Mirrored by a ctypes structure in infinity/ops/adam.py.
struct Piece {
    void* param;
    const void* grad;
    float* exp_avg;
    float* exp_avg_sq;
    int16_t* remainder;
    float* master;
    uint64_t numel;
    Storage storage;
    Dtype grad_dtype;
    Rule rule;
    // Named after what they are to Adam; infinity/ops/rules.py says what the other rules put there.
    float grad_scale;
    float weight_decay;
    float decay;
    // With a minus, -0 included: the state is moved from the gradient, not from where it is.
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float sqrt_bias_correction2;
    float eps;
    float minus_step_size;
    // A gradient, once scaled, is moved into [-grad_bound, grad_bound]; infinite: it stays as it is.
    float grad_bound;
};

// A tensor to be summed. Mirrored in infinity/ops/adam.py.
struct Span {
    const void* data;
    uint64_t numel;
    Dtype dtype;
};

// Sums are taken over blocks of this many elements, counted from the start of a tensor: the reduction tree depends on
// the tensor alone.
constexpr uint64_t kBlockNumel = 4096;
constexpr int kSumLanes = 16;

struct BlockSum {
    double sum_of_squares;
    uint64_t nonfinite;
};

struct Kernels {
    // Returns the number of elements that were left as they are, because their gradient is not finite.
    uint64_t (*step)(const Piece& piece, uint64_t begin, uint64_t end);
    // One BlockSum for each block of [begin, end); `begin` is where a block begins, `end` where one ends.
    void (*sum)(const Span& span, uint64_t begin, uint64_t end, BlockSum* out);
    void (*split)(const float* values, uint16_t* param, int16_t* remainder, uint64_t numel);
    void (*join)(const uint16_t* param, const int16_t* remainder, float* values, uint64_t numel);
};

enum Isa : int32_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 3, kIsaCount = 4 };

// Null where the library was compiled for another architecture.
extern const Kernels* const kScalarKernels;
extern const Kernels* const kAvx2Kernels;
extern const Kernels* const kAvx512Kernels;
extern const Kernels* const kNeonKernels;

}  // namespace infinity::adam
