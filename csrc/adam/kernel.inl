// The kernel text: included once by every isa_*.cpp, after it has defined, in an anonymous namespace,
//
//   Vec                       kLanes floats
//   load, store               fp32
//   load_bf16, load_f16       16-bit bits -> fp32, exact
//   store_bf16, store_f16     nearest with ties away from zero; nearest with ties to even
//   load_split, store_split   fp32 <-> (bf16 bits, int16 remainder)
//   broadcast, add, sub, mul, div, root, fma(a, b, c) = a * b + c rounded once
//   SumLanes                  kSumLanes doubles: zero(), add_squares(Vec, first lane) -> count of non-finite, store()
//
// Everything has internal linkage: the same text compiled for two instruction sets must never be merged by the linker.
// No std template is instantiated here, for the same reason.

namespace infinity::adam {
namespace {

struct Constants {
    Vec grad_scale, weight_decay, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias_correction2, eps,
        minus_step_size;

    explicit Constants(const Piece& piece)
        : grad_scale(broadcast(piece.grad_scale)),
          weight_decay(broadcast(piece.weight_decay)),
          decay(broadcast(piece.decay)),
          one_minus_beta1(broadcast(piece.one_minus_beta1)),
          beta2(broadcast(piece.beta2)),
          one_minus_beta2(broadcast(piece.one_minus_beta2)),
          inv_sqrt_bias_correction2(broadcast(piece.inv_sqrt_bias_correction2)),
          eps(broadcast(piece.eps)),
          minus_step_size(broadcast(piece.minus_step_size)) {}
};

struct Pointers {
    char* param;
    const char* grad;
    float* exp_avg;
    float* exp_avg_sq;
    int16_t* remainder;
    float* master;
};

template <Dtype dtype>
inline Vec load_as(const void* data) {
    if constexpr (dtype == kFloat32) return load(static_cast<const float*>(data));
    if constexpr (dtype == kBfloat16) return load_bf16(static_cast<const uint16_t*>(data));
    if constexpr (dtype == kFloat16) return load_f16(static_cast<const uint16_t*>(data));
}

template <Storage storage>
constexpr uint64_t param_nbytes() {
    return storage == kPlain ? 4 : 2;
}

template <Dtype dtype>
constexpr uint64_t dtype_nbytes() {
    return dtype == kFloat32 ? 4 : 2;
}

template <Storage storage>
inline Vec load_weight(const Pointers& at) {
    if constexpr (storage == kPlain) return load(reinterpret_cast<const float*>(at.param));
    if constexpr (storage == kSplit) return load_split(reinterpret_cast<const uint16_t*>(at.param), at.remainder);
    if constexpr (storage == kMasterHalf || storage == kMasterBfloat) return load(at.master);
}

template <Storage storage>
inline void store_weight(const Pointers& at, Vec weight) {
    if constexpr (storage == kPlain) store(reinterpret_cast<float*>(at.param), weight);
    if constexpr (storage == kSplit) store_split(reinterpret_cast<uint16_t*>(at.param), at.remainder, weight);
    if constexpr (storage == kMasterHalf) {
        store(at.master, weight);
        store_f16(reinterpret_cast<uint16_t*>(at.param), weight);
    }
    if constexpr (storage == kMasterBfloat) {
        store(at.master, weight);
        store_bf16(reinterpret_cast<uint16_t*>(at.param), weight);
    }
}

// The definition of Adam. reference.py says the same in torch; change both or neither.
template <Dtype grad_dtype, Storage storage, bool adamw>
inline void step_lanes(const Pointers& at, const Constants& c) {
    Vec p = load_weight<storage>(at);
    Vec g = mul(load_as<grad_dtype>(at.grad), c.grad_scale);
    if constexpr (adamw) {
        p = mul(p, c.decay);
    } else {
        g = fma(c.weight_decay, p, g);
    }
    Vec m = load(at.exp_avg);
    m = fma(c.one_minus_beta1, sub(g, m), m);
    const Vec v = fma(c.beta2, load(at.exp_avg_sq), mul(c.one_minus_beta2, mul(g, g)));
    const Vec d = fma(root(v), c.inv_sqrt_bias_correction2, c.eps);
    p = fma(c.minus_step_size, div(m, d), p);
    store(at.exp_avg, m);
    store(at.exp_avg_sq, v);
    store_weight<storage>(at, p);
}

template <Dtype grad_dtype, Storage storage, bool adamw>
void step_range(const Piece& piece, uint64_t begin, uint64_t end) {
    constexpr uint64_t grad_nbytes = dtype_nbytes<grad_dtype>();
    const Constants constants(piece);
    const auto pointers = [&piece](uint64_t index) {
        return Pointers{static_cast<char*>(piece.param) + index * param_nbytes<storage>(),
                        static_cast<const char*>(piece.grad) + index * grad_nbytes,
                        piece.exp_avg + index,
                        piece.exp_avg_sq + index,
                        storage == kSplit ? piece.remainder + index : nullptr,
                        storage >= kMasterHalf ? piece.master + index : nullptr};
    };
    uint64_t index = begin;
    for (; index + kLanes <= end; index += kLanes) {
        step_lanes<grad_dtype, storage, adamw>(pointers(index), constants);
    }
    if (index == end) return;
    // The tail runs through the same lanes in copies, so that an element's bits do not depend on where it stands.
    const uint64_t left = end - index;
    alignas(64) char param[kLanes * 4] = {};
    alignas(64) char grad[kLanes * 4] = {};
    alignas(64) float exp_avg[kLanes] = {};
    alignas(64) float exp_avg_sq[kLanes] = {};
    alignas(64) float master[kLanes] = {};
    alignas(64) int16_t remainder[kLanes] = {};
    const Pointers at = pointers(index);
    __builtin_memcpy(param, at.param, left * param_nbytes<storage>());
    __builtin_memcpy(grad, at.grad, left * grad_nbytes);
    __builtin_memcpy(exp_avg, at.exp_avg, left * sizeof(float));
    __builtin_memcpy(exp_avg_sq, at.exp_avg_sq, left * sizeof(float));
    if (at.remainder) __builtin_memcpy(remainder, at.remainder, left * sizeof(int16_t));
    if (at.master) __builtin_memcpy(master, at.master, left * sizeof(float));
    step_lanes<grad_dtype, storage, adamw>(Pointers{param, grad, exp_avg, exp_avg_sq, remainder, master}, constants);
    __builtin_memcpy(at.param, param, left * param_nbytes<storage>());
    __builtin_memcpy(at.exp_avg, exp_avg, left * sizeof(float));
    __builtin_memcpy(at.exp_avg_sq, exp_avg_sq, left * sizeof(float));
    if (at.remainder) __builtin_memcpy(at.remainder, remainder, left * sizeof(int16_t));
    if (at.master) __builtin_memcpy(at.master, master, left * sizeof(float));
}

template <Dtype grad_dtype, bool adamw>
void step_storage(const Piece& piece, uint64_t begin, uint64_t end) {
    switch (piece.storage) {
        case kPlain: return step_range<grad_dtype, kPlain, adamw>(piece, begin, end);
        case kSplit: return step_range<grad_dtype, kSplit, adamw>(piece, begin, end);
        case kMasterHalf: return step_range<grad_dtype, kMasterHalf, adamw>(piece, begin, end);
        case kMasterBfloat: return step_range<grad_dtype, kMasterBfloat, adamw>(piece, begin, end);
    }
}

template <bool adamw>
void step_dtype(const Piece& piece, uint64_t begin, uint64_t end) {
    switch (piece.grad_dtype) {
        case kFloat32: return step_storage<kFloat32, adamw>(piece, begin, end);
        case kBfloat16: return step_storage<kBfloat16, adamw>(piece, begin, end);
        case kFloat16: return step_storage<kFloat16, adamw>(piece, begin, end);
    }
}

void step(const Piece& piece, uint64_t begin, uint64_t end) {
    piece.adamw ? step_dtype<true>(piece, begin, end) : step_dtype<false>(piece, begin, end);
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
