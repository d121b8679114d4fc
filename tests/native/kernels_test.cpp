// The kernels of an accelerator, run as loops (grid_on_host.h), for the sanitizers: no access leaves an array or is
// off its alignment, whatever the length. Bits are compared with csrc/adam.

#include "../../csrc/adam/abi.cpp"

#include "check.h"
#include "pieces.h"

// struct Cast of csrc/kernels/cast.cu.
struct Cast {
    const void* source;
    void* target;
    uint64_t numel;
    Dtype source_dtype;
    int32_t target_dtype;
    float scale;
};

extern "C" {
int32_t infinity_kernels_adam_step(int32_t device, void* stream, const Piece* pieces, uint64_t count,
                                   uint64_t* nonfinite);
uint64_t infinity_kernels_cast_workspace(const Cast* casts, uint64_t count);
int32_t infinity_kernels_cast(int32_t device, void* stream, const Cast* casts, uint64_t count, void* workspace,
                              double* sums, uint64_t* nonfinite);
}

namespace {

constexpr uint64_t kSizes[] = {0, 1, 3, 4, 5, 1023, 1024, 1025, 4099, 20003};

void steps(void* pool) {
    std::vector<Arrays> ours, fallbacks;
    std::vector<Piece> our_pieces, fallback_pieces;
    constexpr int kPieces = 300;
    ours.reserve(kPieces);
    fallbacks.reserve(kPieces);
    for (int index = 0; index < kPieces; ++index) {
        const uint64_t numel = kSizes[index % 10];
        const auto storage = static_cast<Storage>(index % 4);
        const auto dtype = static_cast<Dtype>(index % 3);
        // Every rule with every storage, gradient and size.
        const auto rule = static_cast<Rule>(index / 60);
        for (auto [arrays, pieces] : {std::pair{&ours, &our_pieces}, std::pair{&fallbacks, &fallback_pieces}}) {
            arrays->push_back(make_arrays(numel, storage, dtype, static_cast<uint64_t>(index)));
            pieces->push_back(piece_of(arrays->back(), numel, storage, dtype, rule));
        }
    }
    uint64_t our_count = 0, fallback_count = 0;
    CHECK(infinity_kernels_adam_step(0, nullptr, our_pieces.data(), our_pieces.size(), &our_count) == 0);
    CHECK(infinity_adam_step(pool, kScalar, fallback_pieces.data(), fallback_pieces.size(), &fallback_count) == 0);
    CHECK(ours == fallbacks && our_count == fallback_count && our_count > 0);
}

void casts(void* pool) {
    for (const int32_t target_dtype : {-1, 0, 1, 2}) {
        std::vector<std::vector<char>> sources, targets;
        std::vector<Cast> casts;
        std::vector<Span> spans;
        for (int index = 0; index < 90; ++index) {
            const uint64_t numel = kSizes[index % 10];
            const auto dtype = static_cast<Dtype>(index % 3);
            sources.push_back(make_arrays(numel, kPlain, dtype, static_cast<uint64_t>(index)).grad);
            targets.emplace_back(target_dtype < 0 ? 0 : numel * (target_dtype == kFloat32 ? 4 : 2));
            const auto held = target_dtype < 0 ? dtype : static_cast<Dtype>(target_dtype);
            casts.push_back(Cast{sources.back().data(), targets.back().data(), numel, dtype, target_dtype, 0.25f});
            spans.push_back(Span{target_dtype < 0 ? sources.back().data() : targets.back().data(), numel, held});
        }
        std::vector<double> workspace(infinity_kernels_cast_workspace(casts.data(), casts.size()));
        std::vector<double> sums(casts.size()), fallback_sums(casts.size());
        std::vector<uint64_t> counts(casts.size()), fallback_counts(casts.size());
        CHECK(infinity_kernels_cast(0, nullptr, casts.data(), casts.size(), workspace.data(), sums.data(),
                                    counts.data()) == 0);
        CHECK(infinity_adam_stats(pool, kScalar, spans.data(), spans.size(),
                                  fallback_sums.data(), fallback_counts.data()) == 0);
        CHECK(sums == fallback_sums && counts == fallback_counts);
    }
}

}  // namespace

int main(int argument_count, char** arguments) {
    if (planted(argument_count, arguments)) return 0;
    void* const pool = infinity_adam_pool_new(1, nullptr, 0);
    steps(pool);
    casts(pool);
    infinity_adam_pool_delete(pool);
    std::printf("kernels: 300 pieces of five rules, 360 casts: bits of the CPU, within their arrays\n");
    return 0;
}
