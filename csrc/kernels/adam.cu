// Every update rule on the device: csrc/adam/arithmetic.inl over a grid, with the same bits as on the CPU.
//
// A launch steps up to kPiecesMax pieces, which are cut into tiles, one for each block of threads. Aligned arrays are
// accessed in vectors; the end of a piece and unaligned arrays element by element, with the same arithmetic. Rules with
// two states and rules with one have a kernel each, so that neither pays for the other's registers.

#include "grid.cuh"
#include "vec.inl"

#include "../adam/arithmetic.inl"

namespace infinity::adam {
namespace {

template <bool with_two_states>
struct StepKernel {
    static constexpr int kThreads = 256;
    static constexpr uint32_t kTileNumel = kThreads * kPack;
    static constexpr int kPiecesMax = 32;

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
        if constexpr (!with_two_states) return step_dtype<kOneState>(piece, begin, thread);
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

    template <Dtype grad_dtype, Storage storage, Form form>
    INFINITY_FN static Pointers pointers(const Piece& piece, uint64_t index) {
        return Pointers{static_cast<char*>(piece.param) + index * param_nbytes<storage>(),
                        static_cast<const char*>(piece.grad) + index * dtype_nbytes<grad_dtype>(),
                        piece.exp_avg + index,
                        two_states<form>() ? piece.exp_avg_sq + index : nullptr,
                        storage == kSplit ? piece.remainder + index : nullptr,
                        storage >= kMasterHalf ? piece.master + index : nullptr};
    }
};

// Launches the pieces whose rule keeps two states, or those whose rule keeps one. Returns 0 or an error code.
template <bool with_two_states>
int32_t launch_steps(const Piece* pieces, uint64_t count, uint64_t* nonfinite, void* stream) {
    using Kernel = StepKernel<with_two_states>;
    Kernel kernel{};
    kernel.nonfinite = nonfinite;
    for (uint64_t done = 0; done < count;) {
        uint32_t tiles = 0;
        int run = 0;
        for (; run < Kernel::kPiecesMax && done < count; ++done) {
            const Piece& piece = pieces[done];
            if ((piece.rule == kAdam || piece.rule == kAdamW) != with_two_states) continue;
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
INFINITY_EXPORT int32_t infinity_kernels_runs_on(int32_t device) { return runs_on<StepKernel<true>>(device); }

// Steps pieces on `device` and `stream` without waiting. Adds to `nonfinite`, on the device, the number of elements
// that keep their state because their gradient is not finite. Returns 0 or an error code.
INFINITY_EXPORT int32_t infinity_kernels_adam_step(int32_t device, void* stream, const Piece* pieces, uint64_t count,
                                                   uint64_t* nonfinite) {
    if (const int32_t error = use_device(device)) return error;
    if (const int32_t error = launch_steps<true>(pieces, count, nonfinite, stream)) return error;
    return launch_steps<false>(pieces, count, nonfinite, stream);
}
