// The step of one vector of elements: the only definition of the arithmetic. CPU kernels include it through kernel.inl,
// the CUDA kernel includes it with one lane. Before it, the includer defines, in an anonymous namespace of
// infinity::adam,
//
//   Vec                       kLanes floats
//   load, store               fp32
//   load_bf16, load_f16       16-bit bits -> fp32, exact
//   store_bf16, store_f16     nearest with ties away from zero (no NaN); nearest with ties to even
//   load_split, store_split   fp32 <-> (bf16 bits, int16 remainder)
//   one_nan                   any NaN as 0x7FC00000: a GPU's is 0x7FFFFFFF, of which store_bf16 would make -0
//   broadcast, add, sub, mul, div, sqrt, fma(a, b, c) = a * b + c rounded once, all to nearest even, denormals kept
//   min, max                  of two vectors without NaNs, lane by lane; where `a` alone is a NaN, `max` is `b`
//   sign                      1, -1, or 0 for both zeros and NaN
//   nonfinite                 the number of lanes that are infinite or NaN
//
// and, if functions need another prefix (such as CUDA's), the macro INFINITY_FN.

#ifndef INFINITY_FN
#define INFINITY_FN inline
#endif

namespace infinity::adam {

// The update rules, numbered as in infinity/ops/rules.py. Those but Adam's two keep one state, in exp_avg.
enum Rule : int32_t {
    kAdam = 0, kAdamW = 1, kLion = 2, kAdagrad = 3, kMomentum = 4, kPlainAdamW = 5, kCodedAdamW = 6
};

// The rules that are compiled separately. Adam's two rules have their own code for speed. The rules with one state
// share code that tests the rule at every vector, because memory bandwidth limits it anyway.
enum Form : int32_t { kAdamForm = kAdam, kAdamWForm = kAdamW, kOneState = 2, kPlainForm = 3 };
namespace {

struct Constants {
    Vec grad_scale, weight_decay, decay, one_minus_beta1, beta2, one_minus_beta2, sqrt_bias_correction2, eps,
        minus_step_size, grad_bound, minus_grad_bound;
    Rule rule;
    bool from_grad;

    INFINITY_FN explicit Constants(const Piece& piece)
        : grad_scale(broadcast(piece.grad_scale)),
          weight_decay(broadcast(piece.weight_decay)),
          decay(broadcast(piece.decay)),
          one_minus_beta1(broadcast(piece.one_minus_beta1)),
          beta2(broadcast(piece.beta2)),
          one_minus_beta2(broadcast(piece.one_minus_beta2)),
          sqrt_bias_correction2(broadcast(piece.sqrt_bias_correction2)),
          eps(broadcast(piece.eps)),
          minus_step_size(broadcast(piece.minus_step_size)),
          grad_bound(broadcast(piece.grad_bound)),
          minus_grad_bound(broadcast(-piece.grad_bound)),
          rule(piece.rule),
          from_grad(std::signbit(piece.one_minus_beta1)) {}
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
INFINITY_FN Vec load_as(const void* data) {
    if constexpr (dtype == kFloat32) return load(static_cast<const float*>(data));
    if constexpr (dtype == kBfloat16) return load_bf16(static_cast<const uint16_t*>(data));
    if constexpr (dtype == kFloat16) return load_f16(static_cast<const uint16_t*>(data));
}

template <Storage storage>
INFINITY_FN constexpr uint64_t param_nbytes() {
    return storage == kPlain ? 4 : 2;
}

template <Form form>
INFINITY_FN constexpr bool two_states() {
    return form != kOneState;
}

template <Dtype dtype>
INFINITY_FN constexpr uint64_t dtype_nbytes() {
    return dtype == kFloat32 ? 4 : 2;
}

template <Storage storage>
INFINITY_FN Vec load_weight(const Pointers& at) {
    if constexpr (storage == kPlain) return load(reinterpret_cast<const float*>(at.param));
    if constexpr (storage == kSplit) return load_split(reinterpret_cast<const uint16_t*>(at.param), at.remainder);
    if constexpr (storage == kMasterHalf || storage == kMasterBfloat) return load(at.master);
}

template <Storage storage>
INFINITY_FN void store_weight(const Pointers& at, Vec weight) {
    if constexpr (storage == kPlain) store(reinterpret_cast<float*>(at.param), weight);
    if constexpr (storage == kSplit) store_split(reinterpret_cast<uint16_t*>(at.param), at.remainder, one_nan(weight));
    if constexpr (storage == kMasterHalf) {
        store(at.master, weight);
        store_f16(reinterpret_cast<uint16_t*>(at.param), weight);
    }
    if constexpr (storage == kMasterBfloat) {
        store(at.master, weight);
        store_bf16(reinterpret_cast<uint16_t*>(at.param), one_nan(weight));
    }
}

template <Dtype grad_dtype>
INFINITY_FN Vec scaled_grad(const void* grad, const Constants& c) {
    return mul(load_as<grad_dtype>(grad), c.grad_scale);
}

// Returns the number of lanes with a non-finite gradient. The caller must not step them: such an element keeps every
// bit of its state.
template <Dtype grad_dtype>
INFINITY_FN int nonfinite_lanes(const void* grad, const Constants& c) {
    return nonfinite(scaled_grad<grad_dtype>(grad, c));
}

// Moves both moments in the operations of bitsandbytes, where `weight_decay` is beta1.
INFINITY_FN void moments(Vec g, const Constants& c, Vec& m, Vec& v) {
    m = fma(c.one_minus_beta1, g, mul(m, c.weight_decay));
    v = fma(mul(c.one_minus_beta2, g), g, mul(v, c.beta2));
}

// Of moments in 8 bits, which the caller decodes and encodes: their move, and the step of the weights that follows.
template <Dtype grad_dtype>
INFINITY_FN void move_coded(const void* grad, const Constants& c, Vec& m, Vec& v) {
    moments(max(min(scaled_grad<grad_dtype>(grad, c), c.grad_bound), c.minus_grad_bound), c, m, v);
}
template <Storage storage>
INFINITY_FN void step_coded(const Pointers& at, const Constants& c, Vec m, Vec v) {
    const Vec denominator = add(div(sqrt(v), c.sqrt_bias_correction2), c.eps);
    const Vec p = mul(load_weight<storage>(at), c.decay);
    store_weight<storage>(at, add(p, div(mul(m, c.minus_step_size), denominator)));
}

// The cell of a moment, to be cut to a whole number, given the inverse of its block's largest magnitude.
INFINITY_FN Vec cell_of(Vec moment, Vec inverse) {
    return add(mul(add(mul(moment, inverse), broadcast(1.0f)), broadcast(32767.5f)), broadcast(0.5f));
}

// The definition of every rule. infinity/ops/rules.py repeats it in torch; change both or neither.
//
// Adam's operations and their order are those of torch's fused optimizers on processors with fused multiply-adds, so
// that weights and moments have the same bits. (The last elements of a tensor, which torch steps without vectors, are
// the exception.) Fusing decay and update would reduce the rounding
// error by up to a half, adding them first by three quarters or more, but either result differs from torch's by more
// than 1e-6 in 10 steps.
template <Dtype grad_dtype, Storage storage, Form form>
INFINITY_FN void step_lanes(const Pointers& at, const Constants& c) {
    Vec p = load_weight<storage>(at);
    // The gradient is finite: the caller skips other lanes.
    Vec g = max(min(scaled_grad<grad_dtype>(at.grad, c), c.grad_bound), c.minus_grad_bound);
    if (form == kAdamWForm || form == kPlainForm || (form == kOneState && c.rule == kLion)) {
        p = mul(p, c.decay);
    } else {
        g = fma(c.weight_decay, p, g);
    }
    Vec m = load(at.exp_avg);
    if constexpr (form == kPlainForm) {
        Vec v = load(at.exp_avg_sq);
        moments(g, c, m, v);
        store(at.exp_avg, m);
        store(at.exp_avg_sq, v);
        store_weight<storage>(at, fma(div(m, add(sqrt(v), c.eps)), c.minus_step_size, p));
        return;
    }
    if constexpr (two_states<form>()) {
        m = fma(c.one_minus_beta1, sub(g, m), c.from_grad ? g : m);
        const Vec v = fma(mul(c.one_minus_beta2, g), g, mul(c.beta2, load(at.exp_avg_sq)));
        const Vec denominator = add(div(sqrt(v), c.sqrt_bias_correction2), c.eps);
        store(at.exp_avg, m);
        store(at.exp_avg_sq, v);
        store_weight<storage>(at, add(p, div(mul(c.minus_step_size, m), denominator)));
        return;
    }
    Vec u;
    if (c.rule == kLion) {
        u = sign(fma(c.one_minus_beta1, sub(g, m), m));
        m = fma(c.one_minus_beta2, sub(g, m), m);
    } else if (c.rule == kAdagrad) {
        m = fma(g, g, m);
        u = div(g, add(sqrt(m), c.eps));
    } else {
        m = fma(c.beta2, m, mul(c.one_minus_beta1, g));
        // The buffer, or Nesterov's combination of buffer and gradient.
        u = fma(c.sqrt_bias_correction2, m, mul(c.decay, g));
    }
    store(at.exp_avg, m);
    store_weight<storage>(at, fma(c.minus_step_size, u, p));
}

}  // namespace
}  // namespace infinity::adam
