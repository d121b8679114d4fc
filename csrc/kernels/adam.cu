// Every update rule on the device: csrc/adam/arithmetic.inl over a grid, with the same bits as on the CPU.
//
// A launch steps up to kPiecesMax pieces, which are cut into tiles, one for each block of threads. Aligned arrays are
// accessed in vectors; the end of a piece and unaligned arrays element by element, with the same arithmetic. Each family
// of rules has a kernel, so that none pays for another's registers; with moments in 8 bits a block of threads steps one
// block of elements.

#include "grid.cuh"
#include "vec.inl"

#include "../adam/arithmetic.inl"

namespace infinity::adam {
namespace {

template <Dtype grad_dtype, Storage storage, Form form>
INFINITY_FN Pointers pointers(const Piece& piece, uint64_t index) {
    return Pointers{static_cast<char*>(piece.param) + index * param_nbytes<storage>(),
                    static_cast<const char*>(piece.grad) + index * dtype_nbytes<grad_dtype>(),
                    piece.exp_avg + index,
                    two_states<form>() ? piece.exp_avg_sq + index : nullptr,
                    storage == kSplit ? piece.remainder + index : nullptr,
                    storage >= kMasterHalf ? piece.master + index : nullptr};
}

// The rules that share a kernel.
enum Family { kAdams, kPlains, kOnes };

constexpr Family family_of(Rule rule) {
    return rule == kAdam || rule == kAdamW ? kAdams : rule == kPlainAdamW ? kPlains : kOnes;
}

template <Family family>
struct StepKernel {
    static constexpr int kThreads = 256;
    static constexpr uint32_t kTileNumel = kThreads * kPack;
    static constexpr int kPiecesMax = 28;

    static bool takes(Rule rule) { return family_of(rule) == family && rule != kCodedAdamW; }

    Piece pieces[kPiecesMax];
    Tiles<kPiecesMax> tiles;
    // Receives the number of elements that keep their state because their gradient is not finite.
    uint64_t* nonfinite;

    INFINITY_FN void operator()(uint32_t block) const {
        const int run = tiles.run_of(block);
        const Piece& piece = pieces[run];
        const uint64_t begin = static_cast<uint64_t>(block - tiles.first[run]) * kTileNumel;
        each_thread<kThreads>([&](int thread) {
            const int left_out = step_rule(piece, begin, thread);
            if (left_out) add_to_count(nonfinite, static_cast<uint64_t>(left_out));
        });
    }

    INFINITY_FN static int step_rule(const Piece& piece, uint64_t begin, int thread) {
        if constexpr (family == kOnes) return step_dtype<kOneState>(piece, begin, thread);
        if constexpr (family == kPlains) return step_dtype<kPlainForm>(piece, begin, thread);
        return piece.rule == kAdamW ? step_dtype<kAdamWForm>(piece, begin, thread)
                                    : step_dtype<kAdamForm>(piece, begin, thread);
    }

    template <Form form>
    INFINITY_FN static int step_dtype(const Piece& piece, uint64_t begin, int thread) {
        switch (piece.grad_dtype) {
            case kFloat32: return step_storage<kFloat32, form>(piece, begin, thread);
            case kBfloat16: return step_storage<kBfloat16, form>(piece, begin, thread);
            case kFloat16: return step_storage<kFloat16, form>(piece, begin, thread);
        }
        return 0;
    }

    template <Dtype grad_dtype, Form form>
    INFINITY_FN static int step_storage(const Piece& piece, uint64_t begin, int thread) {
        switch (piece.storage) {
            case kPlain: return step_tile<grad_dtype, kPlain, form>(piece, begin, thread);
            case kSplit: return step_tile<grad_dtype, kSplit, form>(piece, begin, thread);
            case kMasterHalf: return step_tile<grad_dtype, kMasterHalf, form>(piece, begin, thread);
            case kMasterBfloat: return step_tile<grad_dtype, kMasterBfloat, form>(piece, begin, thread);
        }
        return 0;
    }

    // One thread's share of a tile.
    template <Dtype grad_dtype, Storage storage, Form form>
    INFINITY_FN static int step_tile(const Piece& piece, uint64_t begin, int thread) {
        const Constants constants(piece);
        const bool aligned = starts_a_pack<param_nbytes<storage>()>(piece.param) &&
                             starts_a_pack<dtype_nbytes<grad_dtype>()>(piece.grad) &&
                             starts_a_pack<4>(piece.exp_avg) && starts_a_pack<4>(piece.exp_avg_sq) &&
                             starts_a_pack<2>(piece.remainder) && starts_a_pack<4>(piece.master);
        if (aligned && begin + kTileNumel <= piece.numel) {
            return step_pack<grad_dtype, storage, form>(piece, begin + thread * kPack, constants);
        }
        int left_out = 0;
        for (int pass = 0; pass < kPack; ++pass) {
            const uint64_t index = begin + pass * kThreads + thread;
            if (index < piece.numel) left_out += step_one<grad_dtype, storage, form>(piece, index, constants);
        }
        return left_out;
    }

    template <Dtype grad_dtype, Storage storage, Form form>
    INFINITY_FN static int step_one(const Piece& piece, uint64_t index, const Constants& constants) {
        const Pointers at = pointers<grad_dtype, storage, form>(piece, index);
        if (nonfinite_lanes<grad_dtype>(at.grad, constants)) return 1;
        step_lanes<grad_dtype, storage, form>(at, constants);
        return 0;
    }

    // Steps four elements through copies that the compiler keeps in registers.
    template <Dtype grad_dtype, Storage storage, Form form>
    INFINITY_FN static int step_pack(const Piece& piece, uint64_t index, const Constants& constants) {
        constexpr uint64_t grad_nbytes = dtype_nbytes<grad_dtype>();
        const Pointers at = pointers<grad_dtype, storage, form>(piece, index);
        alignas(16) char grad[kPack * 4];
        move_pack<grad_nbytes>(grad, at.grad);
        int left_out = 0;
        INFINITY_UNROLL
        for (int lane = 0; lane < kPack; ++lane) {
            left_out += nonfinite_lanes<grad_dtype>(grad + lane * grad_nbytes, constants);
        }
        if (left_out) {
            for (int lane = 0; lane < kPack; ++lane) {
                step_one<grad_dtype, storage, form>(piece, index + lane, constants);
            }
            return left_out;
        }
        alignas(16) char param[kPack * 4];
        alignas(16) float exp_avg[kPack];
        alignas(16) float exp_avg_sq[kPack];
        alignas(16) int16_t remainder[kPack];
        alignas(16) float master[kPack];
        // The rounded copy of a master is only written.
        if constexpr (storage < kMasterHalf) move_pack<param_nbytes<storage>()>(param, at.param);
        move_pack<4>(exp_avg, at.exp_avg);
        if constexpr (two_states<form>()) move_pack<4>(exp_avg_sq, at.exp_avg_sq);
        if constexpr (storage == kSplit) move_pack<2>(remainder, at.remainder);
        if constexpr (storage >= kMasterHalf) move_pack<4>(master, at.master);
        INFINITY_UNROLL
        for (int lane = 0; lane < kPack; ++lane) {
            const Pointers local{param + lane * param_nbytes<storage>(), grad + lane * grad_nbytes, exp_avg + lane,
                                 exp_avg_sq + lane, remainder + lane, master + lane};
            step_lanes<grad_dtype, storage, form>(local, constants);
        }
        move_pack<param_nbytes<storage>()>(at.param, param);
        move_pack<4>(at.exp_avg, exp_avg);
        if constexpr (two_states<form>()) move_pack<4>(at.exp_avg_sq, exp_avg_sq);
        if constexpr (storage == kSplit) move_pack<2>(at.remainder, remainder);
        if constexpr (storage >= kMasterHalf) move_pack<4>(at.master, master);
        return 0;
    }

};

// A block of threads steps a block of elements: each thread one, and all of them find the two largest magnitudes.
struct CodedKernel {
    static constexpr int kThreads = kCodedNumel;
    static constexpr uint32_t kTileNumel = kCodedNumel;
    static constexpr int kPiecesMax = 28;

    static bool takes(Rule rule) { return rule == kCodedAdamW; }

    Piece pieces[kPiecesMax];
    Tiles<kPiecesMax> tiles;
    // Receives the number of elements whose gradient is not finite. Their blocks keep their state.
    uint64_t* nonfinite;

    // What the threads tell each other, by thread.
    struct Shared {
        float moments[2][kThreads];
        float most[2][kThreads];
        int bad[kThreads];
    };

    INFINITY_FN void operator()(uint32_t block) const {
        INFINITY_SHARED Shared shared;
        const int run = tiles.run_of(block);
        const Piece& piece = pieces[run];
        const uint64_t tile = block - tiles.first[run];
        switch (piece.grad_dtype) {
            case kFloat32: return step_storage<kFloat32>(piece, tile, shared);
            case kBfloat16: return step_storage<kBfloat16>(piece, tile, shared);
            case kFloat16: return step_storage<kFloat16>(piece, tile, shared);
        }
    }

    template <Dtype grad_dtype>
    INFINITY_FN void step_storage(const Piece& piece, uint64_t tile, Shared& shared) const {
        switch (piece.storage) {
            case kPlain: return step_block<grad_dtype, kPlain>(piece, tile, shared);
            case kSplit: return step_block<grad_dtype, kSplit>(piece, tile, shared);
            case kMasterHalf: return step_block<grad_dtype, kMasterHalf>(piece, tile, shared);
            case kMasterBfloat: return step_block<grad_dtype, kMasterBfloat>(piece, tile, shared);
        }
    }

    template <Dtype grad_dtype, Storage storage>
    INFINITY_FN void step_block(const Piece& piece, uint64_t tile, Shared& shared) const {
        float(&moments)[2][kThreads] = shared.moments;
        float(&most)[2][kThreads] = shared.most;
        int(&bad)[kThreads] = shared.bad;
        const Constants constants(piece);
        const uint64_t begin = tile * kCodedNumel;
        each_thread<kThreads>([&](int thread) {
            const uint64_t index = begin + thread;
            bad[thread] = 0;
            for (int which = 0; which < 2; ++which) moments[which][thread] = most[which][thread] = 0.0f;
            if (index >= piece.numel) return;
            const Pointers at = pointers<grad_dtype, storage, kOneState>(piece, index);
            bad[thread] = nonfinite_lanes<grad_dtype>(at.grad, constants);
            Vec each[2];
            for (int which = 0; which < 2; ++which) {
                const float value = piece.maps->values[which][codes_of(piece, which)[index]];
                each[which] = mul(broadcast(value), broadcast(piece.absmax[which][tile]));
            }
            move_coded<grad_dtype>(at.grad, constants, each[0], each[1]);
            for (int which = 0; which < 2; ++which) {
                moments[which][thread] = each[which].value;
                const Vec magnitude = max(each[which], sub(broadcast(0.0f), each[which]));
                most[which][thread] = max(magnitude, broadcast(0.0f)).value;
            }
        });
        for (int half = kThreads / 2; half > 0; half /= 2) {
            each_thread<kThreads>([&](int thread) {
                if (thread >= half) return;
                bad[thread] += bad[thread + half];
                for (int which = 0; which < 2; ++which) {
                    float& here = most[which][thread];
                    here = max(broadcast(most[which][thread + half]), broadcast(here)).value;
                }
            });
        }
        each_thread<kThreads>([&](int thread) {
            const uint64_t index = begin + thread;
            if (bad[0]) {
                if (thread == 0) add_to_count(nonfinite, static_cast<uint64_t>(bad[0]));
                return;
            }
            if (index >= piece.numel) return;
            const Pointers at = pointers<grad_dtype, storage, kOneState>(piece, index);
            step_coded<storage>(at, constants, broadcast(moments[0][thread]), broadcast(moments[1][thread]));
            for (int which = 0; which < 2; ++which) {
                const Vec inverse = div(broadcast(1.0f), broadcast(most[which][0]));
                // A comparison with a NaN is false, so that it becomes 0.
                const float cell = cell_of(broadcast(moments[which][thread]), inverse).value;
                const float bounded = cell > 0.0f ? (cell < 65535.0f ? cell : 65535.0f) : 0.0f;
                codes_of(piece, which)[index] = piece.maps->cells[which][static_cast<uint32_t>(bounded)];
                if (thread == 0) piece.absmax[which][tile] = most[which][0];
            }
        });
    }

    INFINITY_FN static uint8_t* codes_of(const Piece& piece, int which) {
        return reinterpret_cast<uint8_t*>(which ? piece.exp_avg_sq : piece.exp_avg);
    }
};

// Launches the pieces whose rule a kernel takes. Returns 0 or an error code.
template <class Kernel>
int32_t launch_steps(const Piece* pieces, uint64_t count, uint64_t* nonfinite, void* stream) {
    Kernel kernel{};
    kernel.nonfinite = nonfinite;
    for (uint64_t done = 0; done < count;) {
        uint32_t tiles = 0;
        int run = 0;
        for (; run < Kernel::kPiecesMax && done < count; ++done) {
            const Piece& piece = pieces[done];
            if (!Kernel::takes(piece.rule)) continue;
            kernel.pieces[run] = piece;
            kernel.tiles.first[run++] = tiles;
            tiles += static_cast<uint32_t>(ceil_div(piece.numel, Kernel::kTileNumel));
        }
        kernel.tiles.first[run] = tiles;
        if (const int32_t error = launch(kernel, tiles, stream)) return error;
    }
    return 0;
}

}  // namespace
}  // namespace infinity::adam

using namespace infinity::adam;

// Returns 0 if `device` can step pieces, else an error code.
INFINITY_EXPORT int32_t infinity_kernels_runs_on(int32_t device) { return runs_on<StepKernel<kAdams>>(device); }

// Steps pieces on `device` and `stream` without waiting. Adds to `nonfinite`, on the device, the number of elements
// that keep their state because their gradient is not finite. Returns 0 or an error code.
INFINITY_EXPORT int32_t infinity_kernels_adam_step(int32_t device, void* stream, const Piece* pieces, uint64_t count,
                                                   uint64_t* nonfinite) {
    if (const int32_t error = use_device(device)) return error;
    if (const int32_t error = launch_steps<StepKernel<kAdams>>(pieces, count, nonfinite, stream)) return error;
    if (const int32_t error = launch_steps<StepKernel<kPlains>>(pieces, count, nonfinite, stream)) return error;
    if (const int32_t error = launch_steps<StepKernel<kOnes>>(pieces, count, nonfinite, stream)) return error;
    return launch_steps<CodedKernel>(pieces, count, nonfinite, stream);
}
