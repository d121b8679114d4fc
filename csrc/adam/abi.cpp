// The C ABI that infinity/ops/adam.py calls. Functions return 0 or an errno value; they never throw.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <vector>

#include "pool.h"
#include "types.h"

#define INFINITY_EXPORT extern "C" __attribute__((visibility("default")))

namespace infinity::adam {
namespace {

// Threads take work in chunks of this many elements: about 0.9 MB of memory traffic and 20 us each.
constexpr uint64_t kChunkNumel = 32768;
static_assert(kChunkNumel % kBlockNumel == 0, "a block must not be cut");

const Kernels* kernels_of(int32_t isa) {
    switch (isa) {
        case kScalar: return kScalarKernels;
#if defined(__x86_64__)
        case kAvx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")
                       ? kAvx2Kernels
                       : nullptr;
        case kAvx512: return kernels_of(kAvx2) && __builtin_cpu_supports("avx512f") ? kAvx512Kernels : nullptr;
#endif
        case kNeon: return kNeonKernels;
        default: return nullptr;
    }
}

// Calls visit(run, begin, end) for every chunk of every run, on the pool's threads.
template <class Run, class Visit>
void for_chunks(Pool& pool, const Run* runs, uint64_t count, const Visit& visit) {
    std::vector<uint64_t> first_chunk(count + 1, 0);
    for (uint64_t run = 0; run < count; ++run) {
        first_chunk[run + 1] = first_chunk[run] + (runs[run].numel + kChunkNumel - 1) / kChunkNumel;
    }
    pool.run(first_chunk.back(), [&](uint64_t chunk) {
        const auto after = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk);
        const uint64_t run = static_cast<uint64_t>(after - first_chunk.begin()) - 1;
        const uint64_t begin = (chunk - first_chunk[run]) * kChunkNumel;
        visit(run, begin, std::min(begin + kChunkNumel, runs[run].numel));
    });
}

template <class Body>
int32_t guarded(const Body& body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    } catch (...) {
        return EIO;
    }
}

}  // namespace
}  // namespace infinity::adam

using namespace infinity::adam;

INFINITY_EXPORT int32_t infinity_adam_isa_best() {
    for (const int32_t isa : {kAvx512, kAvx2, kNeon}) {
        if (kernels_of(isa)) return isa;
    }
    return kScalar;
}

INFINITY_EXPORT int32_t infinity_adam_isa_supported(int32_t isa) { return kernels_of(isa) ? 1 : 0; }

INFINITY_EXPORT const char* infinity_adam_isa_name(int32_t isa) {
    switch (isa) {
        case kScalar: return "scalar";
        case kAvx2: return "avx2";
        case kAvx512: return "avx512";
        case kNeon: return "neon";
        default: return "unknown";
    }
}

// `cores`: the cores of the pool's threads; with none the threads keep the affinity of their creator. Returns null if
// there is no memory.
INFINITY_EXPORT void* infinity_adam_pool_new(int32_t threads, const int32_t* cores, uint64_t count) {
    try {
        return new Pool(threads, std::vector<int>(cores, cores + count));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

INFINITY_EXPORT void infinity_adam_pool_delete(void* pool) { delete static_cast<Pool*>(pool); }

// Writes to `nonfinite` the number of elements that keep their state because their gradient is not finite.
INFINITY_EXPORT int32_t infinity_adam_step(void* pool, int32_t isa, const Piece* pieces, uint64_t count,
                                           uint64_t* nonfinite) {
    const Kernels* kernels = kernels_of(isa);
    if (!kernels) return EINVAL;
    return guarded([&] {
        std::atomic<uint64_t> left_out{0};
        for_chunks(*static_cast<Pool*>(pool), pieces, count, [&](uint64_t run, uint64_t begin, uint64_t end) {
            left_out.fetch_add(kernels->step(pieces[run], begin, end), std::memory_order_relaxed);
        });
        *nonfinite = left_out.load();
        return 0;
    });
}

// Writes one sum of squares (finite elements) and one count of non-finite elements per span.
INFINITY_EXPORT int32_t infinity_adam_stats(void* pool, int32_t isa, const Span* spans, uint64_t count, double* sums,
                                            uint64_t* nonfinite) {
    const Kernels* kernels = kernels_of(isa);
    if (!kernels) return EINVAL;
    return guarded([&] {
        std::vector<uint64_t> first_block(count + 1, 0);
        for (uint64_t run = 0; run < count; ++run) {
            first_block[run + 1] = first_block[run] + (spans[run].numel + kBlockNumel - 1) / kBlockNumel;
        }
        std::vector<BlockSum> blocks(first_block.back());
        for_chunks(*static_cast<Pool*>(pool), spans, count, [&](uint64_t run, uint64_t begin, uint64_t end) {
            kernels->sum(spans[run], begin, end, &blocks[first_block[run] + begin / kBlockNumel]);
        });
        for (uint64_t run = 0; run < count; ++run) {
            BlockSum total{0.0, 0};
            for (uint64_t block = first_block[run]; block < first_block[run + 1]; ++block) {
                total.sum_of_squares += blocks[block].sum_of_squares;
                total.nonfinite += blocks[block].nonfinite;
            }
            sums[run] = total.sum_of_squares;
            nonfinite[run] = total.nonfinite;
        }
        return 0;
    });
}

INFINITY_EXPORT int32_t infinity_adam_split(void* pool, int32_t isa, const float* values, uint16_t* param,
                                            int16_t* remainder, uint64_t numel) {
    const Kernels* kernels = kernels_of(isa);
    if (!kernels) return EINVAL;
    const Span whole{values, numel, kFloat32};
    return guarded([&] {
        for_chunks(*static_cast<Pool*>(pool), &whole, 1, [&](uint64_t, uint64_t begin, uint64_t end) {
            kernels->split(values + begin, param + begin, remainder + begin, end - begin);
        });
        return 0;
    });
}

INFINITY_EXPORT int32_t infinity_adam_join(void* pool, int32_t isa, const uint16_t* param, const int16_t* remainder,
                                           float* values, uint64_t numel) {
    const Kernels* kernels = kernels_of(isa);
    if (!kernels) return EINVAL;
    const Span whole{values, numel, kFloat32};
    return guarded([&] {
        for_chunks(*static_cast<Pool*>(pool), &whole, 1, [&](uint64_t, uint64_t begin, uint64_t end) {
            kernels->join(param + begin, remainder + begin, values + begin, end - begin);
        });
        return 0;
    });
}
