// The kernel text: included once by every isa_*.cpp, after it has defined, in an anonymous namespace, what
// arithmetic.inl asks for and
//
//   SumLanes                  kSumLanes doubles: zero(), add_squares(Vec, first lane) -> count of non-finite, store()
//
// Everything has internal linkage: the same text compiled for two instruction sets must never be merged by the linker.
// No std template is instantiated here, for the same reason.

#include "arithmetic.inl"

namespace infinity::adam {
namespace {

template <Dtype grad_dtype, Storage storage>
inline Pointers pointers(const Piece& piece, uint64_t index) {
    return Pointers{static_cast<char*>(piece.param) + index * param_nbytes<storage>(),
                    static_cast<const char*>(piece.grad) + index * dtype_nbytes<grad_dtype>(),
                    piece.exp_avg + index,
                    piece.exp_avg_sq + index,
                    storage == kSplit ? piece.remainder + index : nullptr,
                    storage >= kMasterHalf ? piece.master + index : nullptr};
}

// Steps `count` < kLanes elements through the same lanes in copies, so that an element's bits do not depend on where it
// stands.
template <Dtype grad_dtype, Storage storage, bool adamw>
void step_few(const Pointers& at, uint64_t count, const Constants& constants) {
    alignas(64) char param[kLanes * 4] = {};
    alignas(64) char grad[kLanes * 4] = {};
    alignas(64) float exp_avg[kLanes] = {};
    alignas(64) float exp_avg_sq[kLanes] = {};
    alignas(64) float master[kLanes] = {};
    alignas(64) int16_t remainder[kLanes] = {};
    __builtin_memcpy(param, at.param, count * param_nbytes<storage>());
    __builtin_memcpy(grad, at.grad, count * dtype_nbytes<grad_dtype>());
    __builtin_memcpy(exp_avg, at.exp_avg, count * sizeof(float));
    __builtin_memcpy(exp_avg_sq, at.exp_avg_sq, count * sizeof(float));
    if (at.remainder) __builtin_memcpy(remainder, at.remainder, count * sizeof(int16_t));
    if (at.master) __builtin_memcpy(master, at.master, count * sizeof(float));
    step_lanes<grad_dtype, storage, adamw>(Pointers{param, grad, exp_avg, exp_avg_sq, remainder, master}, constants);
    __builtin_memcpy(at.param, param, count * param_nbytes<storage>());
    __builtin_memcpy(at.exp_avg, exp_avg, count * sizeof(float));
    __builtin_memcpy(at.exp_avg_sq, exp_avg_sq, count * sizeof(float));
    if (at.remainder) __builtin_memcpy(at.remainder, remainder, count * sizeof(int16_t));
    if (at.master) __builtin_memcpy(at.master, master, count * sizeof(float));
}

// The slow way: element by element, leaving out those whose gradient is not finite. Returns how many those are.
template <Dtype grad_dtype, Storage storage, bool adamw>
uint64_t step_finite(const Piece& piece, uint64_t begin, uint64_t end, const Constants& constants) {
    uint64_t left_out = 0;
    for (uint64_t index = begin; index < end; ++index) {
        const Pointers at = pointers<grad_dtype, storage>(piece, index);
        alignas(64) char grad[kLanes * 4] = {};
        __builtin_memcpy(grad, at.grad, dtype_nbytes<grad_dtype>());
        if (nonfinite_lanes<grad_dtype>(grad, constants)) {
            ++left_out;
        } else {
            step_few<grad_dtype, storage, adamw>(at, 1, constants);
        }
    }
    return left_out;
}

template <Dtype grad_dtype, Storage storage, bool adamw>
uint64_t step_range(const Piece& piece, uint64_t begin, uint64_t end) {
    const Constants constants(piece);
    uint64_t left_out = 0;
    uint64_t index = begin;
    for (; index + kLanes <= end; index += kLanes) {
        const Pointers at = pointers<grad_dtype, storage>(piece, index);
        if (__builtin_expect(nonfinite_lanes<grad_dtype>(at.grad, constants) != 0, 0)) {
            left_out += step_finite<grad_dtype, storage, adamw>(piece, index, index + kLanes, constants);
        } else {
            step_lanes<grad_dtype, storage, adamw>(at, constants);
        }
    }
    return left_out + step_finite<grad_dtype, storage, adamw>(piece, index, end, constants);
}

template <Dtype grad_dtype, bool adamw>
uint64_t step_storage(const Piece& piece, uint64_t begin, uint64_t end) {
    switch (piece.storage) {
        case kPlain: return step_range<grad_dtype, kPlain, adamw>(piece, begin, end);
        case kSplit: return step_range<grad_dtype, kSplit, adamw>(piece, begin, end);
        case kMasterHalf: return step_range<grad_dtype, kMasterHalf, adamw>(piece, begin, end);
        case kMasterBfloat: return step_range<grad_dtype, kMasterBfloat, adamw>(piece, begin, end);
    }
    return 0;
}

template <bool adamw>
uint64_t step_dtype(const Piece& piece, uint64_t begin, uint64_t end) {
    switch (piece.grad_dtype) {
        case kFloat32: return step_storage<kFloat32, adamw>(piece, begin, end);
        case kBfloat16: return step_storage<kBfloat16, adamw>(piece, begin, end);
        case kFloat16: return step_storage<kFloat16, adamw>(piece, begin, end);
    }
    return 0;
}

uint64_t step(const Piece& piece, uint64_t begin, uint64_t end) {
    return piece.adamw ? step_dtype<true>(piece, begin, end) : step_dtype<false>(piece, begin, end);
}

// Squares of finite elements in double, in kSumLanes lanes (lane = index in the block % kSumLanes), lanes then added
// pairwise: i and i + 8, i and i + 4, i and i + 2, i and i + 1. Squares of fp32 values are exact in double.
template <Dtype dtype>
BlockSum sum_block(const void* data, uint64_t begin, uint64_t end) {
    const char* const bytes = static_cast<const char*>(data);
    SumLanes lanes = SumLanes::zero();
    uint64_t nonfinite = 0;
    uint64_t index = begin;
    for (; index + kSumLanes <= end; index += kSumLanes) {
        for (int lane = 0; lane < kSumLanes; lane += kLanes) {
            nonfinite += lanes.add_squares(load_as<dtype>(bytes + (index + lane) * dtype_nbytes<dtype>()), lane);
        }
    }
    if (index < end) {
        // Zeros beyond the end add nothing: the sums are never -0.
        alignas(64) char tail[kSumLanes * 4] = {};
        __builtin_memcpy(tail, bytes + index * dtype_nbytes<dtype>(), (end - index) * dtype_nbytes<dtype>());
        for (int lane = 0; lane < kSumLanes; lane += kLanes) {
            nonfinite += lanes.add_squares(load_as<dtype>(tail + lane * dtype_nbytes<dtype>()), lane);
        }
    }
    double sums[kSumLanes];
    lanes.store(sums);
    for (int stride = kSumLanes / 2; stride > 0; stride /= 2) {
        for (int lane = 0; lane < stride; ++lane) sums[lane] += sums[lane + stride];
    }
    return BlockSum{sums[0], nonfinite};
}

BlockSum sum(const Span& span, uint64_t begin, uint64_t end) {
    switch (span.dtype) {
        case kFloat32: return sum_block<kFloat32>(span.data, begin, end);
        case kBfloat16: return sum_block<kBfloat16>(span.data, begin, end);
        case kFloat16: return sum_block<kFloat16>(span.data, begin, end);
    }
    return BlockSum{0.0, 0};
}

// Integer arithmetic only: simple loops, left to the compiler's vectorizer for the instruction set in force.
void split(const float* values, uint16_t* param, int16_t* remainder, uint64_t numel) {
    for (uint64_t index = 0; index < numel; ++index) {
        uint32_t bits;
        __builtin_memcpy(&bits, values + index, sizeof bits);
        param[index] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        remainder[index] = static_cast<int16_t>(bits & 0xFFFFu);
    }
}

void join(const uint16_t* param, const int16_t* remainder, float* values, uint64_t numel) {
    for (uint64_t index = 0; index < numel; ++index) {
        const uint32_t bits = (static_cast<uint32_t>(param[index]) << 16) +
                              static_cast<uint32_t>(static_cast<int32_t>(remainder[index]));
        __builtin_memcpy(values + index, &bits, sizeof bits);
    }
}

constexpr Kernels kKernels{step, sum, split, join};

}  // namespace
}  // namespace infinity::adam
