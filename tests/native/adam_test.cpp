// csrc/adam through its C ABI, for the sanitizers: pools of several sizes, used by several threads at once, over pieces
// of every storage, gradient and odd length in memory of exact size. Bits are compared with those of one thread without
// vector instructions.

#include "../../csrc/adam/abi.cpp"

#include <sched.h>

#include <thread>

#include "check.h"
#include "pieces.h"

namespace {

// Steps, sums, splits and joins one set of pieces; what came out.
struct Outcome {
    std::vector<Arrays> arrays;
    std::vector<double> sums;
    std::vector<uint64_t> nonfinite;
    std::vector<float> joined;

    bool operator==(const Outcome& other) const {
        return arrays == other.arrays && sums == other.sums && nonfinite == other.nonfinite &&
               Arrays::same(joined, other.joined);
    }
};

Outcome work(void* pool, int32_t isa, uint64_t seed) {
    static constexpr uint64_t kSizes[] = {0, 1, 15, 17, 4096, 4099, 40001, 70000};
    Outcome outcome;
    std::vector<Piece> pieces;
    std::vector<Span> spans;
    uint64_t count = 0;
    outcome.arrays.reserve(64);
    for (int index = 0; index < 40; ++index) {
        const uint64_t numel = kSizes[(index + seed) % 8];
        const auto storage = static_cast<Storage>(index % 4);
        const auto dtype = static_cast<Dtype>(index % 3);
        outcome.arrays.push_back(make_arrays(numel, storage, dtype, seed * 1000 + index));
        pieces.push_back(piece_of(outcome.arrays.back(), numel, storage, dtype, static_cast<Rule>(index % 5)));
        spans.push_back(Span{outcome.arrays.back().grad.data(), numel, dtype});
    }
    outcome.sums.resize(spans.size());
    outcome.nonfinite.resize(spans.size());
    CHECK(infinity_adam_step(pool, isa, pieces.data(), pieces.size(), &count) == 0);
    CHECK(count > 0);
    outcome.nonfinite.push_back(count);
    CHECK(infinity_adam_stats(pool, isa, spans.data(), spans.size(), outcome.sums.data(), outcome.nonfinite.data()) == 0);
    const std::vector<float>& values = outcome.arrays[7].exp_avg;
    std::vector<uint16_t> param(values.size());
    std::vector<int16_t> remainder(values.size());
    outcome.joined.resize(values.size());
    CHECK(infinity_adam_split(pool, isa, values.data(), param.data(), remainder.data(), values.size()) == 0);
    CHECK(infinity_adam_join(pool, isa, param.data(), remainder.data(), outcome.joined.data(), values.size()) == 0);
    CHECK(Arrays::same(outcome.joined, values));
    return outcome;
}

}  // namespace

int main(int argument_count, char** arguments) {
    if (planted(argument_count, arguments)) return 0;
    void* const plain = infinity_adam_pool_new(1, nullptr, 0);
    std::vector<Outcome> expected;
    for (uint64_t seed = 0; seed < 3; ++seed) expected.push_back(work(plain, kScalar, seed));
    infinity_adam_pool_delete(plain);
    // Some pools keep to the cores that they are told.
    cpu_set_t allowed;
    CHECK(::sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    std::vector<int32_t> cores;
    for (int32_t core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &allowed)) cores.push_back(core);
    }
    int isas = 0;
    for (int32_t isa = 0; isa < kIsaCount; ++isa) {
        if (!infinity_adam_isa_supported(isa)) continue;
        ++isas;
        for (const int threads : {1, 2, 5}) {
            void* const pool = infinity_adam_pool_new(threads, cores.data(), threads == 2 ? cores.size() : 0);
            // Several callers share a pool, and find it busy.
            std::vector<std::thread> callers;
            for (uint64_t seed = 0; seed < 3; ++seed) {
                callers.emplace_back([&, seed] { CHECK(work(pool, isa, seed) == expected[seed]); });
            }
            for (std::thread& caller : callers) caller.join();
            infinity_adam_pool_delete(pool);
        }
    }
    // Pools that end right after a job, or without one.
    for (int round = 0; round < 20; ++round) {
        void* const pool = infinity_adam_pool_new(1 + round % 4, nullptr, 0);
        if (round % 3) CHECK(work(pool, infinity_adam_isa_best(), 0).nonfinite == expected[0].nonfinite);
        infinity_adam_pool_delete(pool);
    }
    uint64_t count = 0;
    void* const pool = infinity_adam_pool_new(2, nullptr, 0);
    CHECK(infinity_adam_step(pool, 99, nullptr, 0, &count) == EINVAL);
    CHECK(infinity_adam_step(pool, kScalar, nullptr, 0, &count) == 0 && count == 0);
    infinity_adam_pool_delete(pool);
    std::printf("adam: %d instruction sets, pools of 1, 2 and 5 threads, 3 callers each: same bits\n", isas);
    return 0;
}
