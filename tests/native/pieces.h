// Pieces of every storage and gradient in memory of exact size, for the drivers of csrc/adam and csrc/kernels.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "../../csrc/adam/types.h"

using namespace infinity::adam;

namespace {

inline uint32_t next_number(uint64_t* state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(*state >> 33);
}

// Values around one, some tiny, some not finite.
inline float next_value(uint64_t* state, bool finite) {
    const uint32_t number = next_number(state);
    if (number % 97 == 0) return 0.0f;
    if (number % 89 == 0) return 1e-41f;
    if (!finite && number % 83 == 0) return number & 64 ? INFINITY : NAN;
    return static_cast<float>(static_cast<int32_t>(number % 20001) - 10000) / 7919.0f;
}

struct Arrays {
    std::vector<char> param, grad;
    std::vector<float> exp_avg, exp_avg_sq, master;
    std::vector<int16_t> remainder;

    bool operator==(const Arrays& other) const {
        return param == other.param && same(exp_avg, other.exp_avg) && same(exp_avg_sq, other.exp_avg_sq) &&
               same(master, other.master) && remainder == other.remainder;
    }
    static bool same(const std::vector<float>& left, const std::vector<float>& right) {
        return left.size() == right.size() &&
               (left.empty() || std::memcmp(left.data(), right.data(), left.size() * sizeof(float)) == 0);
    }
};

inline Arrays make_arrays(uint64_t numel, Storage storage, Dtype grad_dtype, uint64_t seed) {
    Arrays made;
    made.param.resize(numel * (storage == kPlain ? 4 : 2));
    made.grad.resize(numel * (grad_dtype == kFloat32 ? 4 : 2));
    made.exp_avg.resize(numel);
    made.exp_avg_sq.resize(numel);
    made.master.resize(storage >= kMasterHalf ? numel : 0);
    made.remainder.resize(storage == kSplit ? numel : 0);
    for (uint64_t index = 0; index < numel; ++index) {
        const float weight = next_value(&seed, true);
        const float grad = next_value(&seed, false);
        made.exp_avg[index] = next_value(&seed, true);
        made.exp_avg_sq[index] = next_value(&seed, true) * 0.01f + 2.0f;
        uint32_t bits;
        std::memcpy(&bits, &weight, sizeof bits);
        const auto upper = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        if (storage == kPlain) std::memcpy(made.param.data() + index * 4, &weight, 4);
        if (storage != kPlain) std::memcpy(made.param.data() + index * 2, &upper, 2);
        if (storage == kSplit) made.remainder[index] = static_cast<int16_t>(bits & 0xFFFFu);
        if (storage >= kMasterHalf) made.master[index] = weight;
        std::memcpy(&bits, &grad, sizeof bits);
        const auto half = static_cast<uint16_t>(bits >> 16);
        // As fp16 these bits are some other value, which is as good.
        std::memcpy(made.grad.data() + index * (grad_dtype == kFloat32 ? 4 : 2),
                    grad_dtype == kFloat32 ? static_cast<const void*>(&grad) : &half, grad_dtype == kFloat32 ? 4 : 2);
    }
    return made;
}

inline Piece piece_of(Arrays& arrays, uint64_t numel, Storage storage, Dtype grad_dtype, Rule rule) {
    Piece piece{};
    piece.param = arrays.param.data();
    piece.grad = arrays.grad.data();
    piece.exp_avg = arrays.exp_avg.data();
    piece.exp_avg_sq = rule == kAdam || rule == kAdamW ? arrays.exp_avg_sq.data() : nullptr;
    piece.remainder = storage == kSplit ? arrays.remainder.data() : nullptr;
    piece.master = storage >= kMasterHalf ? arrays.master.data() : nullptr;
    piece.numel = numel;
    piece.storage = storage;
    piece.grad_dtype = grad_dtype;
    piece.rule = rule;
    // Constants in the order of types.h; the values do not matter.
    float* const constants = &piece.grad_scale;
    const float values[] = {0.5f, 0.01f, 0.001f, 0.1f, 0.999f, 0.001f, 1.5f, 1e-8f, 0.003f, 0.4f};
    for (size_t index = 0; index < sizeof values / sizeof *values; ++index) constants[index] = values[index];
    return piece;
}

}  // namespace
