// The CPU kernels: every isa_*.cpp includes this file once. Before it, the includer defines, in an anonymous namespace,
// the names that arithmetic.inl needs and
//
//   finite_or_zero            replaces lanes that are infinite or NaN by zero
//   store_cells               cells cut to whole numbers of [0, 65535] (int32_t), NaN to 0
//   SumLanes                  kSumLanes doubles: zero(), add_squares(Vec, first lane), store()
//   BfloatSums                an equivalent of RowSums<kBfloat16, false> with the same bits, possibly faster
//
// Everything has internal linkage, because the linker must never merge code compiled for two instruction sets. For the
// same reason no std template is instantiated here.

#include "arithmetic.inl"

namespace infinity::adam {
namespace {

// One iteration steps a strip: two cache lines of every 16-bit array, four of every fp32 array. Memory delivers pairs
// of lines slightly faster than single ones.
constexpr uint64_t kStripNumel = 64;
constexpr uint64_t kLineNbytes = 64;
// Blocks that are summed at the same time.
constexpr int kBlocksAtOnce = 2;
constexpr uint64_t kPrefetchNbytes = 2048;
// Farther than for steps, because sums do less work with each byte.
constexpr uint64_t kSumPrefetchNbytes = 4096;
static_assert(kStripNumel % kLanes == 0 && kSumLanes % kLanes == 0, "strips and sums are whole vectors");

template <Dtype grad_dtype, Storage storage, Form form>
inline Pointers pointers(const Piece& piece, uint64_t index) {
    return Pointers{static_cast<char*>(piece.param) + index * param_nbytes<storage>(),
                    static_cast<const char*>(piece.grad) + index * dtype_nbytes<grad_dtype>(),
                    piece.exp_avg + index,
                    two_states<form>() ? piece.exp_avg_sq + index : nullptr,
                    storage == kSplit ? piece.remainder + index : nullptr,
                    storage >= kMasterHalf ? piece.master + index : nullptr};
}

// Steps copies of `count` <= kLanes elements with the same vector code, so that an element's bits do not depend on its
// position.
template <Dtype grad_dtype, Storage storage, Form form>
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
    if constexpr (two_states<form>()) __builtin_memcpy(exp_avg_sq, at.exp_avg_sq, count * sizeof(float));
    if (at.remainder) __builtin_memcpy(remainder, at.remainder, count * sizeof(int16_t));
    if (at.master) __builtin_memcpy(master, at.master, count * sizeof(float));
    step_lanes<grad_dtype, storage, form>(Pointers{param, grad, exp_avg, exp_avg_sq, remainder, master}, constants);
    __builtin_memcpy(at.param, param, count * param_nbytes<storage>());
    __builtin_memcpy(at.exp_avg, exp_avg, count * sizeof(float));
    if constexpr (two_states<form>()) __builtin_memcpy(at.exp_avg_sq, exp_avg_sq, count * sizeof(float));
    if (at.remainder) __builtin_memcpy(at.remainder, remainder, count * sizeof(int16_t));
    if (at.master) __builtin_memcpy(at.master, master, count * sizeof(float));
}

// Steps partial strips and strips with non-finite gradients, through copies: `width` elements at a time, and one by one
// if one of them must keep its state. Returns the number of elements that keep their state.
template <Dtype grad_dtype, Storage storage, Form form>
uint64_t step_finite(const Piece& piece, uint64_t begin, uint64_t end, const Constants& constants,
                     uint64_t width = kLanes) {
    uint64_t left_out = 0;
    for (uint64_t index = begin; index < end; index += width) {
        const uint64_t count = end - index < width ? end - index : width;
        const Pointers at = pointers<grad_dtype, storage, form>(piece, index);
        alignas(64) char grad[kLanes * 4] = {};
        __builtin_memcpy(grad, at.grad, count * dtype_nbytes<grad_dtype>());
        if (nonfinite_lanes<grad_dtype>(grad, constants) == 0) {
            step_few<grad_dtype, storage, form>(at, count, constants);
        } else if (count == 1) {
            ++left_out;
        } else {
            left_out += step_finite<grad_dtype, storage, form>(piece, index, index + count, constants, 1);
        }
    }
    return left_out;
}

// Prefetches the cache lines of a strip kPrefetchNbytes ahead, because the processor's prefetchers stop at the end of a
// page. Beyond the end of an array a prefetch has no effect.
template <Dtype grad_dtype, Storage storage, Form form>
inline void prefetch_strip(const Pointers& at) {
    const auto ahead = [](const void* stream, uint64_t nbytes) {
        for (uint64_t line = 0; line < nbytes; line += kLineNbytes) {
            __builtin_prefetch(static_cast<const char*>(stream) + kPrefetchNbytes + line);
        }
    };
    ahead(at.param, kStripNumel * param_nbytes<storage>());
    ahead(at.grad, kStripNumel * dtype_nbytes<grad_dtype>());
    ahead(at.exp_avg, kStripNumel * sizeof(float));
    if (two_states<form>()) ahead(at.exp_avg_sq, kStripNumel * sizeof(float));
    if (storage == kSplit) ahead(at.remainder, kStripNumel * sizeof(int16_t));
    if (storage >= kMasterHalf) ahead(at.master, kStripNumel * sizeof(float));
}

template <Dtype grad_dtype, Storage storage, Form form>
uint64_t step_range(const Piece& piece, uint64_t begin, uint64_t end) {
    const Constants constants(piece);
    uint64_t left_out = 0;
    uint64_t index = begin;
    for (; index + kStripNumel <= end; index += kStripNumel) {
        const Pointers strip = pointers<grad_dtype, storage, form>(piece, index);
        prefetch_strip<grad_dtype, storage, form>(strip);
        int bad = 0;
        for (uint64_t lane = 0; lane < kStripNumel; lane += kLanes) {
            bad += nonfinite_lanes<grad_dtype>(strip.grad + lane * dtype_nbytes<grad_dtype>(), constants);
        }
        if (__builtin_expect(bad != 0, 0)) {
            left_out += step_finite<grad_dtype, storage, form>(piece, index, index + kStripNumel, constants);
            continue;
        }
        // Consecutive vectors are independent, so the processor overlaps their divisions and roots.
        for (uint64_t lane = 0; lane < kStripNumel; lane += kLanes) {
            step_lanes<grad_dtype, storage, form>(pointers<grad_dtype, storage, form>(piece, index + lane), constants);
        }
    }
    return left_out + step_finite<grad_dtype, storage, form>(piece, index, end, constants);
}

// The largest magnitude of a block; NaNs do not count.
inline float largest(const float* moments) {
    Vec found = broadcast(0.0f);
    for (uint64_t lane = 0; lane < kCodedNumel; lane += kLanes) {
        const Vec each = load(moments + lane);
        found = max(max(each, sub(broadcast(0.0f), each)), found);
    }
    alignas(64) float lanes[kLanes];
    store(lanes, found);
    float most = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
    return most;
}

// Steps one block of at most kCodedNumel elements; `at` has room for a whole one, whose rest is zero.
template <Dtype grad_dtype, Storage storage>
void step_block(const Pointers& at, uint8_t* const (&codes)[2], float* const (&absmax)[2], const Maps& maps,
                uint64_t count, const Constants& c) {
    alignas(64) float moments[2][kCodedNumel];
    alignas(64) int32_t cells[kCodedNumel];
    const Vec scale[2] = {broadcast(*absmax[0]), broadcast(*absmax[1])};
    // Looked up one by one, eight codes in a register: instructions that gather take longer.
    for (int which = 0; which < 2; ++which) {
        for (uint64_t index = 0; index < kCodedNumel; index += 8) {
            uint64_t eight;
            __builtin_memcpy(&eight, codes[which] + index, 8);
            for (int part = 0; part < 8; ++part) {
                moments[which][index + part] = maps.values[which][eight >> 8 * part & 0xFF];
            }
        }
    }
    for (uint64_t lane = 0; lane < kCodedNumel; lane += kLanes) {
        Vec m = mul(load(moments[0] + lane), scale[0]);
        Vec v = mul(load(moments[1] + lane), scale[1]);
        const Pointers here{at.param + lane * param_nbytes<storage>(), at.grad + lane * dtype_nbytes<grad_dtype>(),
                            nullptr, nullptr, storage == kSplit ? at.remainder + lane : nullptr,
                            storage >= kMasterHalf ? at.master + lane : nullptr};
        move_coded<grad_dtype>(here.grad, c, m, v);
        step_coded<storage>(here, c, m, v);
        store(moments[0] + lane, m);
        store(moments[1] + lane, v);
    }
    for (int which = 0; which < 2; ++which) {
        for (uint64_t index = count; index < kCodedNumel; ++index) moments[which][index] = 0.0f;
        const float most = largest(moments[which]);
        *absmax[which] = most;
        const Vec inverse = broadcast(1.0f / most);
        for (uint64_t lane = 0; lane < kCodedNumel; lane += kLanes) {
            store_cells(cells + lane, cell_of(load(moments[which] + lane), inverse));
        }
        for (uint64_t index = 0; index < kCodedNumel; index += 8) {
            uint64_t eight = 0;
            for (int part = 0; part < 8; ++part) {
                eight |= static_cast<uint64_t>(maps.cells[which][cells[index + part]]) << 8 * part;
            }
            __builtin_memcpy(codes[which] + index, &eight, 8);
        }
    }
}

template <Dtype grad_dtype, Storage storage>
uint64_t step_coded_range(const Piece& piece, uint64_t begin, uint64_t end) {
    const Constants constants(piece);
    uint64_t left_out = 0;
    for (uint64_t index = begin; index < end; index += kCodedNumel) {
        const uint64_t count = end - index < kCodedNumel ? end - index : kCodedNumel;
        // Without the moments, which `pointers` would take for fp32.
        const Pointers at = pointers<grad_dtype, storage, kOneState>(piece, index);
        uint8_t* const codes[2] = {reinterpret_cast<uint8_t*>(piece.exp_avg) + index,
                                   reinterpret_cast<uint8_t*>(piece.exp_avg_sq) + index};
        float* const absmax[2] = {piece.absmax[0] + index / kCodedNumel, piece.absmax[1] + index / kCodedNumel};
        alignas(64) char grad[kCodedNumel * 4] = {};
        const char* grads = at.grad;
        if (count < kCodedNumel) {
            __builtin_memcpy(grad, at.grad, count * dtype_nbytes<grad_dtype>());
            grads = grad;
        }
        int bad = 0;
        for (uint64_t lane = 0; lane < kCodedNumel; lane += kLanes) {
            bad += nonfinite_lanes<grad_dtype>(grads + lane * dtype_nbytes<grad_dtype>(), constants);
        }
        if (__builtin_expect(bad != 0, 0)) {
            left_out += static_cast<uint64_t>(bad);
            continue;
        }
        if (count == kCodedNumel) {
            step_block<grad_dtype, storage>(at, codes, absmax, *piece.maps, count, constants);
            continue;
        }
        alignas(64) char param[kCodedNumel * 4] = {};
        alignas(64) float master[kCodedNumel] = {};
        alignas(64) int16_t remainder[kCodedNumel] = {};
        alignas(64) uint8_t copies[2][kCodedNumel] = {};
        __builtin_memcpy(param, at.param, count * param_nbytes<storage>());
        if (at.remainder) __builtin_memcpy(remainder, at.remainder, count * sizeof(int16_t));
        if (at.master) __builtin_memcpy(master, at.master, count * sizeof(float));
        for (int which = 0; which < 2; ++which) __builtin_memcpy(copies[which], codes[which], count);
        uint8_t* const copied[2] = {copies[0], copies[1]};
        const Pointers whole{param, grads, nullptr, nullptr, remainder, master};
        step_block<grad_dtype, storage>(whole, copied, absmax, *piece.maps, count, constants);
        __builtin_memcpy(at.param, param, count * param_nbytes<storage>());
        if (at.remainder) __builtin_memcpy(at.remainder, remainder, count * sizeof(int16_t));
        if (at.master) __builtin_memcpy(at.master, master, count * sizeof(float));
        for (int which = 0; which < 2; ++which) __builtin_memcpy(codes[which], copies[which], count);
    }
    return left_out;
}

template <Dtype grad_dtype>
uint64_t step_coded_storage(const Piece& piece, uint64_t begin, uint64_t end) {
    switch (piece.storage) {
        case kPlain: return step_coded_range<grad_dtype, kPlain>(piece, begin, end);
        case kSplit: return step_coded_range<grad_dtype, kSplit>(piece, begin, end);
        case kMasterHalf: return step_coded_range<grad_dtype, kMasterHalf>(piece, begin, end);
        case kMasterBfloat: return step_coded_range<grad_dtype, kMasterBfloat>(piece, begin, end);
    }
    return 0;
}

uint64_t step_coded_dtype(const Piece& piece, uint64_t begin, uint64_t end) {
    switch (piece.grad_dtype) {
        case kFloat32: return step_coded_storage<kFloat32>(piece, begin, end);
        case kBfloat16: return step_coded_storage<kBfloat16>(piece, begin, end);
        case kFloat16: return step_coded_storage<kFloat16>(piece, begin, end);
    }
    return 0;
}

template <Dtype grad_dtype, Form form>
uint64_t step_storage(const Piece& piece, uint64_t begin, uint64_t end) {
    switch (piece.storage) {
        case kPlain: return step_range<grad_dtype, kPlain, form>(piece, begin, end);
        case kSplit: return step_range<grad_dtype, kSplit, form>(piece, begin, end);
        case kMasterHalf: return step_range<grad_dtype, kMasterHalf, form>(piece, begin, end);
        case kMasterBfloat: return step_range<grad_dtype, kMasterBfloat, form>(piece, begin, end);
    }
    return 0;
}

template <Form form>
uint64_t step_dtype(const Piece& piece, uint64_t begin, uint64_t end) {
    switch (piece.grad_dtype) {
        case kFloat32: return step_storage<kFloat32, form>(piece, begin, end);
        case kBfloat16: return step_storage<kBfloat16, form>(piece, begin, end);
        case kFloat16: return step_storage<kFloat16, form>(piece, begin, end);
    }
    return 0;
}

uint64_t step(const Piece& piece, uint64_t begin, uint64_t end) {
    switch (piece.rule) {
        case kAdam: return step_dtype<kAdamForm>(piece, begin, end);
        case kAdamW: return step_dtype<kAdamWForm>(piece, begin, end);
        case kPlainAdamW: return step_dtype<kPlainForm>(piece, begin, end);
        case kCodedAdamW: return step_coded_dtype(piece, begin, end);
        default: return step_dtype<kOneState>(piece, begin, end);
    }
}

template <Dtype dtype, bool finite_only>
inline void add_row(SumLanes& lanes, const char* at, uint64_t& left_out) {
    for (int lane = 0; lane < kSumLanes; lane += kLanes) {
        Vec values = load_as<dtype>(at + lane * dtype_nbytes<dtype>());
        if constexpr (finite_only) {
            left_out += static_cast<uint64_t>(nonfinite(values));
            values = finite_or_zero(values);
        }
        lanes.add_squares(values, lane);
    }
}

// Sums of squares that add one row of kSumLanes elements after the other.
template <Dtype dtype, bool finite_only>
struct RowSums {
    static constexpr uint64_t kNumel = kSumLanes;
    SumLanes lanes = SumLanes::zero();
    uint64_t left_out = 0;

    static RowSums zero() { return RowSums{}; }
    void add_squares(const char* at) { add_row<dtype, finite_only>(lanes, at, left_out); }
    void store(double* out) const { lanes.store(out); }
};

inline double added_pairwise(double* sums) {
    for (int stride = kSumLanes / 2; stride > 0; stride /= 2) {
        for (int lane = 0; lane < stride; ++lane) sums[lane] += sums[lane + stride];
    }
    return sums[0];
}

// Adds the squares of `blocks` blocks of `numel` elements each, the first at `bytes`, in double. A block has kSumLanes
// lanes (lane = index in the block % kSumLanes), each summed in the order of the elements. The lanes are then added
// pairwise: i and i + 8, i and i + 4, i and i + 2, i and i + 1. Squares of fp32 values are exact in double. The
// additions of a lane depend on each other, so several blocks at the same time keep the adders busy.
template <Dtype dtype, class Sums, int blocks>
inline void sum_of_squares(const char* bytes, uint64_t numel, Sums* sums) {
    constexpr uint64_t kBlockNbytes = kBlockNumel * dtype_nbytes<dtype>();
    uint64_t index = 0;
    for (; index + Sums::kNumel <= numel; index += Sums::kNumel) {
#pragma GCC unroll 8
        for (int block = 0; block < blocks; ++block) {
            const char* const at = bytes + block * kBlockNbytes + index * dtype_nbytes<dtype>();
            __builtin_prefetch(at + kSumPrefetchNbytes);
            sums[block].add_squares(at);
        }
    }
    for (int block = 0; block < blocks && index < numel; ++block) {
        // Zeros beyond the end do not change the sums, which are never -0.
        alignas(64) char tail[Sums::kNumel * 4] = {};
        __builtin_memcpy(tail, bytes + block * kBlockNbytes + index * dtype_nbytes<dtype>(),
                         (numel - index) * dtype_nbytes<dtype>());
        sums[block].add_squares(tail);
    }
}

// Computes for each block the sum of squares of its finite elements and the number of the others. A sum over finite
// fp32 values never overflows a double, so a finite sum proves that all elements are finite. Only a block with other
// elements is summed again without them.
template <Dtype dtype, class Sums, int blocks>
void sum_blocks(const char* bytes, uint64_t numel, BlockSum* out) {
    Sums sums[blocks];
    for (Sums& each : sums) each = Sums::zero();
    sum_of_squares<dtype, Sums, blocks>(bytes, numel, sums);
    for (int block = 0; block < blocks; ++block) {
        alignas(64) double lanes[kSumLanes];
        sums[block].store(lanes);
        out[block] = BlockSum{added_pairwise(lanes), 0};
        if (__builtin_isfinite(out[block].sum_of_squares)) continue;
        RowSums<dtype, true> finite;
        const char* const at = bytes + block * kBlockNumel * dtype_nbytes<dtype>();
        sum_of_squares<dtype, RowSums<dtype, true>, 1>(at, numel, &finite);
        finite.store(lanes);
        out[block] = BlockSum{added_pairwise(lanes), finite.left_out};
    }
}

template <Dtype dtype, class Sums>
void sum_range(const void* data, uint64_t begin, uint64_t end, BlockSum* out) {
    const char* const bytes = static_cast<const char*>(data);
    for (; begin + kBlocksAtOnce * kBlockNumel <= end; begin += kBlocksAtOnce * kBlockNumel, out += kBlocksAtOnce) {
        sum_blocks<dtype, Sums, kBlocksAtOnce>(bytes + begin * dtype_nbytes<dtype>(), kBlockNumel, out);
    }
    for (; begin < end; begin += kBlockNumel, ++out) {
        const uint64_t numel = end - begin < kBlockNumel ? end - begin : kBlockNumel;
        sum_blocks<dtype, Sums, 1>(bytes + begin * dtype_nbytes<dtype>(), numel, out);
    }
}

void sum(const Span& span, uint64_t begin, uint64_t end, BlockSum* out) {
    switch (span.dtype) {
        case kFloat32: return sum_range<kFloat32, RowSums<kFloat32, false>>(span.data, begin, end, out);
        case kBfloat16: return sum_range<kBfloat16, BfloatSums>(span.data, begin, end, out);
        case kFloat16: return sum_range<kFloat16, RowSums<kFloat16, false>>(span.data, begin, end, out);
    }
}

// Integer arithmetic in simple loops, which the compiler vectorizes for the current instruction set.
void split(const float* values, uint16_t* param, int16_t* remainder, uint64_t numel) {
    for (uint64_t index = 0; index < numel; ++index) {
        uint32_t bits;
        __builtin_memcpy(&bits, values + index, sizeof bits);
        // As one_nan does.
        bits = (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits;
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
