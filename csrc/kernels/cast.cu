// Cast, scale and norm in one pass: target = scale * source in the target's dtype, with the sum of squares of the
// target's finite elements (fp64) and the count of the others. Without a target, the sums are those of the unscaled
// source.
//
// The order of additions is that of sum_blocks in csrc/adam/kernel.inl, so that a norm has the same bits on every tier:
// a block of 4096 elements has 16 fp64 lanes, which are added pairwise, and blocks are added in order. Four threads
// share a block of elements, each with four neighbouring lanes.

#include "grid.cuh"
#include "vec.inl"

#include "../adam/arithmetic.inl"

namespace infinity::adam {
namespace {

// One tensor. Mirrored by a ctypes structure in infinity/ops/kernels.py.
struct Cast {
    const void* source;
    // [numel] of target_dtype, or null; may be the source if both have the same dtype.
    void* target;
    uint64_t numel;
    Dtype source_dtype;
    // A Dtype, or -1 without a target.
    int32_t target_dtype;
    float scale;
};

// Rounds to nearest even, as torch's casts do. (store_bf16 rounds ties of split weights away from zero.)
template <Dtype dtype>
INFINITY_FN void store_cast(void* target, Vec a) {
    if constexpr (dtype == kFloat32) store(static_cast<float*>(target), a);
    if constexpr (dtype == kFloat16) store_f16(static_cast<uint16_t*>(target), a);
    if constexpr (dtype == kBfloat16) {
        const uint32_t bits = bits_of(a.value);
        const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
        *static_cast<uint16_t*>(target) =
            static_cast<uint16_t>(nan ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    }
}

// Sums of squares of four neighbouring lanes of a block.
struct Quarter {
    double sums[kPack];
    uint64_t nonfinite;

    INFINITY_FN void add(Vec a, int lane) {
        // The square of an fp32 value is exact in fp64, so the sum is rounded once, fused or not.
        const int left_out = infinity::adam::nonfinite(a);
        const double value = left_out ? 0.0 : static_cast<double>(a.value);
        sums[lane] = fma_once(value, value, sums[lane]);
        nonfinite += static_cast<uint64_t>(left_out);
    }
};

struct CastKernel {
    static constexpr int kThreads = 64;
    static constexpr int kQuarters = kSumLanes / kPack;
    static constexpr int kBlocksPerTile = kThreads / kQuarters;
    static constexpr int kCastsMax = 64;
    static constexpr int kAhead = 4;

    Cast casts[kCastsMax];
    Tiles<kCastsMax> tiles;
    // Index in `blocks` of each tensor's first block.
    uint64_t first_block[kCastsMax + 1];
    BlockSum* blocks;

    INFINITY_FN void operator()(uint32_t block) const {
        INFINITY_SHARED Quarter quarters[kThreads];
        const int run = tiles.run_of(block);
        const Cast& cast = casts[run];
        const uint64_t first = static_cast<uint64_t>(block - tiles.first[run]) * kBlocksPerTile;
        each_thread<kThreads>([&](int thread) {
            const uint64_t begin = (first + thread / kQuarters) * kBlockNumel;
            const uint64_t end = begin + kBlockNumel < cast.numel ? begin + kBlockNumel : cast.numel;
            quarters[thread] = quarter_of(cast, begin, end, thread % kQuarters);
        });
        BlockSum* const sums = blocks + first_block[run] + first;
        each_thread<kThreads>([&](int thread) {
            const int index = thread / kQuarters;
            if (thread % kQuarters != 0 || (first + index) * kBlockNumel >= cast.numel) return;
            sums[index] = fold(quarters + thread);
        });
    }

    // Lanes i and i + 8, i and i + 4, i and i + 2, i and i + 1.
    INFINITY_FN static BlockSum fold(const Quarter* quarters) {
        double sums[kSumLanes];
        uint64_t nonfinite = 0;
        INFINITY_UNROLL
        for (int lane = 0; lane < kSumLanes; ++lane) sums[lane] = quarters[lane / kPack].sums[lane % kPack];
        INFINITY_UNROLL
        for (int quarter = 0; quarter < kQuarters; ++quarter) nonfinite += quarters[quarter].nonfinite;
        // Constant bounds keep the lanes in registers.
        INFINITY_UNROLL
        for (int level = 1; level <= 4; ++level) {
            INFINITY_UNROLL
            for (int lane = 0; lane < kSumLanes / 2; ++lane) {
                const int stride = kSumLanes >> level;
                if (lane < stride) sums[lane] = total(sums[lane], sums[lane + stride]);
            }
        }
        return BlockSum{sums[0], nonfinite};
    }

    INFINITY_FN static Quarter quarter_of(const Cast& cast, uint64_t begin, uint64_t end, int quarter) {
        switch (cast.source_dtype) {
            case kFloat32: return quarter_from<kFloat32>(cast, begin, end, quarter);
            case kBfloat16: return quarter_from<kBfloat16>(cast, begin, end, quarter);
            case kFloat16: return quarter_from<kFloat16>(cast, begin, end, quarter);
        }
        return Quarter{};
    }

    template <Dtype from>
    INFINITY_FN static Quarter quarter_from(const Cast& cast, uint64_t begin, uint64_t end, int quarter) {
        switch (cast.target_dtype) {
            case kFloat32: return pass<from, kFloat32, true>(cast, begin, end, quarter);
            case kBfloat16: return pass<from, kBfloat16, true>(cast, begin, end, quarter);
            case kFloat16: return pass<from, kFloat16, true>(cast, begin, end, quarter);
        }
        return pass<from, from, false>(cast, begin, end, quarter);
    }

    // One thread's share of a block: the four elements from 4 * quarter on of every 16.
    template <Dtype from, Dtype to, bool writes>
    INFINITY_FN static Quarter pass(const Cast& cast, uint64_t begin, uint64_t end, int quarter) {
        constexpr uint64_t from_nbytes = dtype_nbytes<from>();
        constexpr uint64_t to_nbytes = dtype_nbytes<to>();
        const char* const source = static_cast<const char*>(cast.source);
        char* const target = static_cast<char*>(cast.target);
        const bool aligned = starts_a_pack<from_nbytes>(source) && (!writes || starts_a_pack<to_nbytes>(target));
        const auto pack = [&](Quarter& result, const char* in, uint64_t at) {
            alignas(16) char out[kPack * 4];
            INFINITY_UNROLL
            for (int lane = 0; lane < kPack; ++lane) {
                result.add(one<from, to, writes>(in + lane * from_nbytes, out + lane * to_nbytes, cast.scale), lane);
            }
            if constexpr (writes) move_pack<to_nbytes>(target + at * to_nbytes, out);
        };
        Quarter result{};
        uint64_t at = begin + quarter * kPack;
        // Load several packs before the first use: additions depend on each other, loads do not.
        for (; aligned && at + (kAhead - 1) * kSumLanes + kPack <= end; at += kAhead * kSumLanes) {
            alignas(16) char in[kAhead][kPack * 4];
            INFINITY_UNROLL
            for (int row = 0; row < kAhead; ++row) {
                move_pack<from_nbytes>(in[row], source + (at + row * kSumLanes) * from_nbytes);
            }
            INFINITY_UNROLL
            for (int row = 0; row < kAhead; ++row) pack(result, in[row], at + row * kSumLanes);
        }
        for (; at < end; at += kSumLanes) {
            INFINITY_UNROLL
            for (int lane = 0; lane < kPack; ++lane) {
                const uint64_t index = at + lane;
                if (index >= end) break;
                result.add(one<from, to, writes>(source + index * from_nbytes, target + index * to_nbytes, cast.scale),
                           lane);
            }
        }
        return result;
    }

    // Casts one element if there is a target, and returns the value to sum.
    template <Dtype from, Dtype to, bool writes>
    INFINITY_FN static Vec one(const char* source, char* target, float scale) {
        const Vec value = load_as<from>(source);
        if constexpr (!writes) return value;
        store_cast<to>(target, mul(value, broadcast(scale)));
        return load_as<to>(target);
    }
};

// Adds the blocks of each tensor in order. One chain of additions a tensor makes the bits reproducible.
struct AddBlocks {
    static constexpr int kThreads = 32;
    static constexpr int kCastsMax = CastKernel::kCastsMax;

    uint64_t first_block[kCastsMax + 1];
    const BlockSum* blocks;
    double* sums;
    uint64_t* nonfinite;

    INFINITY_FN void operator()(uint32_t run) const {
        INFINITY_SHARED BlockSum ahead[kThreads];
        INFINITY_SHARED BlockSum result;
        const uint64_t end = first_block[run + 1];
        each_thread<kThreads>([&](int thread) {
            if (thread == 0) result = BlockSum{0.0, 0};
        });
        for (uint64_t begin = first_block[run]; begin < end; begin += kThreads) {
            // All threads load, one thread adds.
            each_thread<kThreads>([&](int thread) {
                if (begin + thread < end) ahead[thread] = blocks[begin + thread];
            });
            each_thread<kThreads>([&](int thread) {
                if (thread != 0) return;
                for (int index = 0; index < kThreads && begin + index < end; ++index) {
                    result.sum_of_squares = total(result.sum_of_squares, ahead[index].sum_of_squares);
                    result.nonfinite += ahead[index].nonfinite;
                }
            });
        }
        each_thread<kThreads>([&](int thread) {
            if (thread != 0) return;
            sums[run] = result.sum_of_squares;
            nonfinite[run] = result.nonfinite;
        });
    }
};

}  // namespace
}  // namespace infinity::adam

using namespace infinity::adam;

// Returns the number of doubles, two a block, that `workspace` below must hold.
INFINITY_EXPORT uint64_t infinity_kernels_cast_workspace(const Cast* casts, uint64_t count) {
    uint64_t blocks = 0;
    for (uint64_t index = 0; index < count; ++index) blocks += ceil_div(casts[index].numel, kBlockNumel);
    static_assert(sizeof(BlockSum) == 2 * sizeof(double), "a sum and a count");
    return 2 * blocks;
}

// Casts, scales and sums on `device` and `stream` without waiting. `workspace`, `sums` and `nonfinite` lie on the
// device; the latter two have one value for each tensor. Returns 0 or an error code.
INFINITY_EXPORT int32_t infinity_kernels_cast(int32_t device, void* stream, const Cast* casts, uint64_t count,
                                              void* workspace, double* sums, uint64_t* nonfinite) {
    if (const int32_t error = use_device(device)) return error;
    CastKernel kernel{};
    AddBlocks add{};
    BlockSum* blocks = static_cast<BlockSum*>(workspace);
    for (uint64_t done = 0; done < count;) {
        const uint64_t before = done;
        uint32_t tiles = 0;
        uint64_t blocks_of_launch = 0;
        int run = 0;
        for (; run < CastKernel::kCastsMax && done < count; ++run, ++done) {
            const uint64_t blocks_of_run = ceil_div(casts[done].numel, kBlockNumel);
            kernel.casts[run] = casts[done];
            kernel.tiles.first[run] = tiles;
            add.first_block[run] = kernel.first_block[run] = blocks_of_launch;
            tiles += static_cast<uint32_t>(ceil_div(blocks_of_run, CastKernel::kBlocksPerTile));
            blocks_of_launch += blocks_of_run;
        }
        kernel.tiles.first[run] = tiles;
        add.first_block[run] = kernel.first_block[run] = blocks_of_launch;
        kernel.blocks = blocks;
        add.blocks = blocks;
        add.sums = sums + before;
        add.nonfinite = nonfinite + before;
        if (const int32_t error = launch(kernel, tiles, stream)) return error;
        if (const int32_t error = launch(add, static_cast<uint32_t>(run), stream)) return error;
        blocks += blocks_of_launch;
    }
    return 0;
}
