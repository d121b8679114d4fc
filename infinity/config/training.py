"""The sections about precision, learning-rate schedules and the optimizer: one class for each type of the latter two.

Types other than Adam use torch's names and defaults, Lion those of its paper (Chen et al. 2023, arXiv:2302.06675). A
program passes any other optimizer with an elementwise step to `initialize(optimizer=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from infinity.config.section import (
    TYPE_NAMED,
    Absent,
    AdjustLr,
    Betas,
    Coefficients,
    Count,
    Differs,
    Dtype,
    Flag,
    Half,
    Int,
    Natural,
    NoEffect,
    NsDtype,
    NsMethod,
    NsSteps,
    OptimBits,
    Positive,
    Refused,
    Section,
    Splits,
    Texts,
    Unusable,
    WarmupType,
    Weight,
    types_of,
)

_IN_16_BITS = Refused(
    "master weights and moments are always exact fp32: a 16-bit parameter and its states take 12 bytes at rest, where "
    "16 bits for all would take 6 and lose small updates",
    "Remove the key; offload_optimizer to NVMe leaves 2 of the 12 in memory, and Lion, with one moment, takes 8",
)


class ScheduleParams(Section):
    """The keys that every schedule has."""

    last_batch_iteration: Annotated[
        Int,
        Refused("a schedule starts at its beginning", "Leave it out: load_checkpoint() restores the schedule"),
        Field(exclude=True),
    ] = -1
    """Step after which the schedule starts."""


class LRRangeTestParams(ScheduleParams):
    """Keys of a learning-rate range test."""

    lr_range_test_min_lr: Weight = 1e-3
    """Learning rate at the start of the sweep."""
    lr_range_test_step_size: Count = 2000
    """Steps of one interval."""
    lr_range_test_step_rate: Weight = 1.0
    """Increase over one interval, as a multiple of the initial rate."""
    lr_range_test_staircase: Flag = False
    """Raise the rate once an interval instead of at every step."""


class OneCycleParams(ScheduleParams):
    """Keys of one cycle of the learning rate and the decay after it."""

    cycle_min_lr: Weight | None = None
    """Learning rate at both ends of the cycle. Required."""
    cycle_max_lr: Weight | None = None
    """Learning rate at the top of the cycle. Required."""
    decay_lr_rate: Weight = 0.0
    """Decay of the learning rate after the cycle, for each interval."""
    cycle_first_step_size: Count = 2000
    """Steps of the rising half."""
    cycle_second_step_size: Count | None = None
    """Steps of the falling half; absent: as many as in the rising half."""
    cycle_first_stair_count: Natural = 0
    """Stairs in the rising half; 0: a straight line."""
    cycle_second_stair_count: Natural | None = None
    """Stairs in the falling half; absent: as many as in the rising half."""
    decay_step_size: Natural = 0
    """Steps of one decay interval; 0 turns the decay off."""
    cycle_momentum: Flag = True
    """Cycle betas[0] inversely to the learning rate."""
    cycle_min_mom: Weight = 0.8
    """Momentum at the top of the cycle."""
    cycle_max_mom: Weight = 0.9
    """Momentum at both ends of the cycle."""
    decay_mom_rate: Weight = 0.0
    """Increase of the momentum after the cycle, for each interval."""


class WarmupLRParams(ScheduleParams):
    """Keys of a warm-up to a constant rate."""

    warmup_min_lr: Weight = 0.0
    """Learning rate at the start of the warm-up."""
    warmup_max_lr: Weight | None = None
    """Learning rate at the end of the warm-up; absent: the optimizer's own rate."""
    warmup_num_steps: Natural = 1000
    """Steps of the warm-up."""
    warmup_type: WarmupType = "log"
    """Shape of the warm-up."""


class WarmupDecayLRParams(WarmupLRParams):
    """Keys of a warm-up and a linear decay to zero."""

    warmup_max_lr: Weight | None = 1e-3
    """Learning rate at the end of the warm-up; null: the optimizer's own rate."""
    total_num_steps: Count | None = None
    """Steps of the whole run, warm-up included. Required."""


class WarmupCosineLRParams(ScheduleParams):
    """Keys of a warm-up and a cosine decay."""

    total_num_steps: Count | None = None
    """Steps of the whole run, warm-up included. Required."""
    warmup_min_ratio: Weight = 0.0
    """Learning rate at the start of the warm-up, as a share of the optimizer's rate."""
    warmup_num_steps: Natural = 1000
    """Steps of the warm-up."""
    cos_min_ratio: Weight = 1e-4
    """Learning rate at the end of the cosine, as a share of the optimizer's rate."""
    warmup_type: WarmupType = "log"
    """Shape of the warm-up."""


class LRRangeTestConfig(Section):
    """A sweep that finds a usable learning rate."""

    type: Annotated[Literal["LRRangeTest"], TYPE_NAMED]
    """Names the schedule."""
    params: LRRangeTestParams = LRRangeTestParams()


class OneCycleConfig(Section):
    """One rise and fall of the rate, with inverse momentum, then a decay."""

    type: Annotated[Literal["OneCycle"], TYPE_NAMED]
    """Names the schedule."""
    params: OneCycleParams = OneCycleParams()


class WarmupLRConfig(Section):
    """A warm-up, then a constant rate."""

    type: Annotated[Literal["WarmupLR"], TYPE_NAMED]
    """Names the schedule."""
    params: WarmupLRParams = WarmupLRParams()


class WarmupDecayLRConfig(Section):
    """A warm-up, then a linear decay to zero."""

    type: Annotated[Literal["WarmupDecayLR"], TYPE_NAMED]
    """Names the schedule."""
    params: WarmupDecayLRParams = WarmupDecayLRParams()


class WarmupCosineLRConfig(Section):
    """A warm-up, then half a cosine."""

    type: Annotated[Literal["WarmupCosineLR"], TYPE_NAMED]
    """Names the schedule."""
    params: WarmupCosineLRParams = WarmupCosineLRParams()


Scheduler = LRRangeTestConfig | OneCycleConfig | WarmupLRConfig | WarmupDecayLRConfig | WarmupCosineLRConfig


class Fp16(Section):
    """Half precision, with a loss scale."""

    enabled: Flag = False
    """Compute in fp16."""
    auto_cast: Flag = False
    """Cast forward's positional arguments of floating point, and those inside lists, tuples and dictionaries, to
    fp16."""
    loss_scale: Weight = 0.0
    """A fixed loss scale; 0: a dynamic one."""
    initial_scale_power: Natural = 16
    """The dynamic scale starts at two to this power."""
    loss_scale_window: Count = 1000
    """Steps without overflow after which the scale doubles."""
    hysteresis: Count = 2
    """The scale is halved at this number of overflows; earlier ones only skip their step."""
    consecutive_hysteresis: Flag = False
    """Reset the count of overflows at every step without one, not only when the scale doubles."""
    min_loss_scale: Positive = 1.0
    """The scale never falls below this."""
    fp16_master_weights_and_grads: Annotated[Flag, _IN_16_BITS] = False
    """Keep master weights and gradients in fp16."""


class Bf16(Section):
    """bfloat16; needs no loss scale."""

    enabled: Flag = False
    """Compute in bf16."""
    immediate_grad_update: Annotated[Flag, NoEffect("gradients are always consumed as they arrive")] = False
    """Accumulate a gradient as soon as it exists."""
    check_grad_overflow: Annotated[Flag, Differs("it works at every stage")] = True
    """The same as the top-level key of this name, for bf16 only. The check is off if either key is false."""
    bf16_master_weights_and_grads: Annotated[Flag, _IN_16_BITS] = False
    """Keep master weights and gradients in bf16."""
    bf16_optimizer_states: Annotated[Flag, _IN_16_BITS] = False
    """Keep the moments in bf16."""


class DataTypes(Section):
    """Types beside the compute precision."""

    grad_accum_dtype: Dtype | None = None
    """Type in which gradients are accumulated. Absent: fp32 if a step has several micro-batches or the program decides
    when to step (managed_gradient_accumulation false); otherwise the model's type, because a single gradient needs no
    addition."""
    param_dtype: Dtype | None = None
    """Checked against the type that sections bf16 and fp16 give the parameters."""
    buffer_dtype: Annotated[
        Dtype | None, Refused("infinity does not cast a module's buffers", "Cast the buffers in the model")
    ] = None
    """Type of the buffers."""
    keep_in_fp32_modules: Annotated[Texts | None, NoEffect("a module's buffers always keep their type")] = None
    """Names of buffers that stay in fp32."""


class TorchAutocast(Section):
    """Forward under torch.autocast: weights, gradients and moments are fp32, and torch chooses the operations that
    compute in 16 bits (docs/precision.md)."""

    enabled: Flag = False
    """Run forward under torch.autocast."""
    dtype: Half = "bf16"
    """The 16-bit type. With fp16 the loss is scaled by the keys of section fp16, whose `enabled` stays false."""
    lower_precision_safe_modules: Annotated[
        Texts | None, NoEffect("communication_data_type applies to all weights and gradients")
    ] = None
    """Classes of modules whose weights and gradients are communicated in 16 bits."""


Amp = Annotated[None, Refused("apex is not used", 'Enable "bf16" or "fp16" and remove the section'), Absent()]


class AdamParams(Section):
    """Hyper-parameters of Adam and AdamW."""

    lr: Positive = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the first and of the second moment."""
    eps: Weight = 1e-8
    """Added to the denominator."""
    weight_decay: Weight = 0.0
    """Weight decay; decoupled from the gradient in AdamW."""
    bias_correction: Flag = True
    """Correct the moments for their initial value of zero."""
    adam_w_mode: Flag = True
    """Decoupled weight decay. With type "Adam", true selects AdamW; type "AdamW" ignores this key."""
    torch_adam: Annotated[Flag, NoEffect("one optimizer serves every tier, with torch's arithmetic")] = False
    """Use torch's own Adam."""
    fp32_optimizer_states: Annotated[
        Flag, Refused("16-bit moments are not supported", "Leave fp32_optimizer_states out, or set it to true")
    ] = True
    """Keep the moments in fp32."""
    max_grad_norm: Annotated[
        Weight | None, Refused("the optimizer does not clip", 'Set "gradient_clipping" at the top level instead')
    ] = None
    """Gradient norm bound inside the optimizer."""


class Optimizer(Section):
    """The keys that every type has."""

    legacy_fusion: Annotated[Flag, NoEffect("the optimizer's kernels are always fused")] = False
    """Fuse kernels in the older way."""

    @classmethod
    def rewrite(cls, raw: Any) -> Any:
        kind = raw.get("type") if isinstance(raw, Mapping) else None
        if not isinstance(kind, str) or kind.lower() == "auto":
            return raw
        names = {name.lower(): name for name in OPTIMIZER_TYPES}
        if kind.lower() not in names:
            raise Unusable(
                f"type {kind!r} is refused: the configuration knows {', '.join(OPTIMIZER_TYPES)}. Set the type to "
                '"AdamW", or pass any elementwise torch.optim optimizer to initialize(optimizer=...)'
            )
        return {**raw, "type": names[kind.lower()]}


class Adam(Optimizer):
    """Adam and AdamW."""

    type: Annotated[Literal["AdamW", "Adam"], TYPE_NAMED]
    """Name of the optimizer, in any case of letters."""
    params: AdamParams = AdamParams()

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is decoupled from the gradient, as in AdamW."""
        return self.type == "AdamW" or self.params.adam_w_mode


class LionParams(Section):
    """Hyper-parameters of Lion."""

    lr: Positive = 1e-4
    """Learning rate."""
    betas: Betas = (0.9, 0.99)
    """Weight of the momentum in the update, and decay rate of the momentum."""
    weight_decay: Weight = 0.0
    """Weight decay, decoupled from the gradient."""


class Lion(Optimizer):
    """Lion: an update by the sign of the momentum; one state an element."""

    type: Annotated[Literal["Lion"], TYPE_NAMED]
    """Name of the optimizer."""
    params: LionParams = LionParams()


class AdagradParams(Section):
    """Hyper-parameters of Adagrad."""

    lr: Positive = 1e-2
    """Learning rate."""
    lr_decay: Weight = 0.0
    """Decay of the learning rate with the number of steps."""
    weight_decay: Weight = 0.0
    """Added to the gradient, times the weight."""
    initial_accumulator_value: Weight = 0.0
    """Initial value of the sums of squares."""
    eps: Weight = 1e-10
    """Added to the denominator."""


class Adagrad(Optimizer):
    """Adagrad: a learning rate divided by the root of the sum of squared gradients; one state an element."""

    type: Annotated[Literal["Adagrad"], TYPE_NAMED]
    """Name of the optimizer."""
    params: AdagradParams = AdagradParams()


class SgdParams(Section):
    """Hyper-parameters of SGD."""

    lr: Positive = 1e-3
    """Learning rate."""
    momentum: Weight = 0.0
    """Decay rate of the momentum buffer; 0: no state at all."""
    dampening: Weight = 0.0
    """The momentum buffer adds each gradient times (1 - dampening)."""
    weight_decay: Weight = 0.0
    """Added to the gradient, times the weight."""
    nesterov: Flag = False
    """Use Nesterov momentum."""


class Sgd(Optimizer):
    """SGD, with momentum or without."""

    type: Annotated[Literal["SGD"], TYPE_NAMED]
    """Name of the optimizer."""
    params: SgdParams = SgdParams()


class RmspropParams(Section):
    """Hyper-parameters of RMSprop."""

    lr: Positive = 1e-2
    """Learning rate."""
    alpha: Weight = 0.99
    """Decay rate of the mean of squares."""
    eps: Weight = 1e-8
    """Added to the denominator."""
    weight_decay: Weight = 0.0
    """Added to the gradient, times the weight."""
    momentum: Weight = 0.0
    """Decay rate of the momentum buffer; 0: no buffer."""
    centered: Flag = False
    """Divide by the estimated standard deviation; adds one state."""


class Rmsprop(Optimizer):
    """RMSprop; torch runs it on the partitions."""

    type: Annotated[Literal["RMSprop"], TYPE_NAMED]
    """Name of the optimizer."""
    params: RmspropParams = RmspropParams()


class AdamaxParams(Section):
    """Hyper-parameters of Adamax."""

    lr: Positive = 2e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the mean and of the infinity norm."""
    eps: Weight = 1e-8
    """Added to the denominator."""
    weight_decay: Weight = 0.0
    """Added to the gradient, times the weight."""


class Adamax(Optimizer):
    """Adamax: Adam with the infinity norm; torch runs it on the partitions."""

    type: Annotated[Literal["Adamax"], TYPE_NAMED]
    """Name of the optimizer."""
    params: AdamaxParams = AdamaxParams()


class NadamParams(Section):
    """Hyper-parameters of NAdam."""

    lr: Positive = 2e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the first and of the second moment."""
    eps: Weight = 1e-8
    """Added to the denominator."""
    weight_decay: Weight = 0.0
    """Weight decay."""
    momentum_decay: Weight = 4e-3
    """Decay of the momentum schedule."""
    decoupled_weight_decay: Flag = False
    """Decouple weight decay from the gradient, as AdamW does."""


class Nadam(Optimizer):
    """NAdam: Adam with Nesterov momentum; torch runs it on the partitions."""

    type: Annotated[Literal["NAdam"], TYPE_NAMED]
    """Name of the optimizer."""
    params: NadamParams = NadamParams()


class MuonParams(Section):
    """Hyper-parameters of Muon, which steps hidden matrices, and of AdamW, which steps everything else. A parameter
    group or a parameter with `use_muon` says which of them steps it.
    """

    lr: Positive = 1e-3
    """Learning rate of both."""
    muon_lr: Positive | None = None
    """Learning rate of Muon; absent: `lr`."""
    adam_lr: Positive | None = None
    """Learning rate of AdamW; absent: `lr`."""
    weight_decay: Weight = 0.1
    """Weight decay of both, decoupled from the gradient."""
    momentum: Weight = 0.95
    """Decay rate of Muon's momentum."""
    nesterov: Flag = True
    """Use Nesterov momentum."""
    ns_steps: NsSteps = 5
    """Steps of the Newton-Schulz iteration that makes a matrix orthogonal."""
    ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315)
    """Coefficients of its polynomial."""
    eps: Weight = 1e-7
    """The least norm by which it divides a matrix at first."""
    ns_dtype: NsDtype = "bf16"
    """Ours. Precision of the iteration: "bf16", as torch's, or "fp32"."""
    adjust_lr_fn: AdjustLr | None = None
    """How the rate follows a matrix's shape: "original", sqrt(max(1, rows / columns)), which is also the default, or
    "match_rms_adamw", 0.2 sqrt(max(rows, columns))."""
    split: Splits = None
    """Ours. Packed weights to step as several matrices, by a module's or a parameter's name: a number of equal parts of
    their rows, or the rows of each, such as {"gate_up_proj": 2, "qkv_proj": [2048, 512, 512]}; of stacked experts, of
    each expert's. Absent: each is one matrix, as in torch."""
    betas: Betas = (0.9, 0.999)
    """AdamW's decay rates of the first and of the second moment."""
    adam_eps: Weight = 1e-8
    """Ours. Added to AdamW's denominator."""
    ns_method: Annotated[
        NsMethod,
        Refused(
            "the iteration runs on the matrix itself, as torch's Muon does", 'Remove it, or set it to "standard"',
            ignored='"standard" runs instead, as in torch.optim.Muon',
        ),
    ] = "standard"
    """Way of the iteration."""
    per_head_muon: Annotated[
        Flag, Refused("heads have no rate of their own", 'Remove it; split steps a packed weight as several matrices')
    ] = False
    """Make the matrices of attention heads orthogonal one by one."""


class Muon(Optimizer):
    """Muon for hidden matrices, AdamW for embeddings, the output head and what is no matrix."""

    type: Annotated[Literal["Muon"], TYPE_NAMED]
    """Name of the optimizer."""
    params: MuonParams = MuonParams()


class AdamW8bitParams(Section):
    """Hyper-parameters of AdamW with moments in 8 bits, by bitsandbytes' names. A parameter group or a parameter with
    `optim_bits` 32 keeps fp32 moments.
    """

    lr: Positive = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the first and of the second moment."""
    eps: Weight = 1e-8
    """Added to the denominator."""
    weight_decay: Weight = 0.01
    """Weight decay, decoupled from the gradient."""
    min_8bit_size: Natural = 4096
    """Parameters of fewer elements keep fp32 moments."""
    optim_bits: OptimBits = 8
    """Bits of the moments: 8, or 32 for those of every parameter."""
    amsgrad: Annotated[
        Flag, Refused("the largest second moment is not kept", "Remove it, or pass torch.optim.AdamW(amsgrad=True)")
    ] = False
    """Divide by the largest second moment so far."""
    max_unorm: Annotated[
        Weight,
        Refused("an update is not cut by the norm of its parameter", "Remove it; gradient_clipping cuts gradients"),
    ] = 0.0
    """Bound of an update's norm, as a multiple of its parameter's."""


class AdamW8bit(Optimizer):
    """AdamW with moments in 8 bits, in blocks of 256 that share a scale, with the bits of bitsandbytes'."""

    type: Annotated[Literal["AdamW8bit"], TYPE_NAMED]
    """Name of the optimizer."""
    params: AdamW8bitParams = AdamW8bitParams()


AnyOptimizer = Adam | Lion | Adagrad | Sgd | Rmsprop | Adamax | Nadam | Muon | AdamW8bit
# The values of `type`.
OPTIMIZER_TYPES = tuple(name for section in get_args(AnyOptimizer) for name in types_of(section))
