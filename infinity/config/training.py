"""The sections about arithmetic: learning-rate schedule, precision."""

from __future__ import annotations

from typing import Annotated, Literal

from infinity.config.section import HONOURED, Absent, NoAuto, NoEffect, Refused, Section
from infinity.config.values import (
    Count,
    Dtype,
    Flag,
    Half,
    Natural,
    Positive,
    Texts,
    WarmupType,
    Weight,
)

_NAMED = NoAuto("name the type")
_KEPT_FP32 = "master weights and moments are kept exactly, split so that they take 12 bytes a parameter in all"


class LRRangeTestParams(Section):
    """A learning-rate range test."""

    lr_range_test_min_lr: Annotated[Weight, HONOURED] = 1e-3
    """Where the sweep starts."""
    lr_range_test_step_size: Annotated[Count, HONOURED] = 2000
    """Steps in one interval."""
    lr_range_test_step_rate: Annotated[Weight, HONOURED] = 1.0
    """How much an interval adds, in units of the start."""
    lr_range_test_staircase: Annotated[Flag, HONOURED] = False
    """Rise once an interval instead of at every step."""


class OneCycleParams(Section):
    """One cycle of the learning rate, and its decay."""

    cycle_min_lr: Annotated[Weight | None, HONOURED] = None
    """Learning rate at both ends of the cycle. Required."""
    cycle_max_lr: Annotated[Weight | None, HONOURED] = None
    """Learning rate at its top. Required."""
    decay_lr_rate: Annotated[Weight, HONOURED] = 0.0
    """How fast the rate falls after the cycle."""
    cycle_first_step_size: Annotated[Count, HONOURED] = 2000
    """Steps of the rising half."""
    cycle_second_step_size: Annotated[Count | None, HONOURED] = None
    """Steps of the falling half; as many as the rising half when absent."""
    cycle_first_stair_count: Annotated[Natural, HONOURED] = 0
    """Stairs in the rising half; 0 is a straight line."""
    cycle_second_stair_count: Annotated[Natural | None, HONOURED] = None
    """Stairs in the falling half; as many as in the rising half when absent."""
    decay_step_size: Annotated[Natural, HONOURED] = 0
    """Steps of one interval of the decay; 0 turns the decay off."""
    cycle_momentum: Annotated[Flag, HONOURED] = True
    """Move betas[0] against the learning rate."""
    cycle_min_mom: Annotated[Weight, HONOURED] = 0.8
    """Momentum at the top of the cycle."""
    cycle_max_mom: Annotated[Weight, HONOURED] = 0.9
    """Momentum at both ends of the cycle."""
    decay_mom_rate: Annotated[Weight, HONOURED] = 0.0
    """How fast the momentum rises after the cycle."""


class WarmupLRParams(Section):
    """A warm-up, then a constant rate."""

    warmup_min_lr: Annotated[Weight, HONOURED] = 0.0
    """Where the warm-up starts."""
    warmup_max_lr: Annotated[Weight | None, HONOURED] = None
    """Where it ends; the optimizer's own rate when absent."""
    warmup_num_steps: Annotated[Natural, HONOURED] = 1000
    """Steps of the warm-up."""
    warmup_type: Annotated[WarmupType, HONOURED] = "log"
    """Shape of the warm-up."""


class WarmupDecayLRParams(Section):
    """A warm-up, then a linear decay to zero."""

    total_num_steps: Annotated[Count | None, HONOURED] = None
    """Steps of the whole run, warm-up included. Required."""
    warmup_min_lr: Annotated[Weight, HONOURED] = 0.0
    """Where the warm-up starts."""
    warmup_max_lr: Annotated[Weight | None, HONOURED] = 1e-3
    """Where it ends; null is the optimizer's own rate."""
    warmup_num_steps: Annotated[Natural, HONOURED] = 1000
    """Steps of the warm-up."""
    warmup_type: Annotated[WarmupType, HONOURED] = "log"
    """Shape of the warm-up."""


class WarmupCosineLRParams(Section):
    """A warm-up, then a cosine."""

    total_num_steps: Annotated[Count | None, HONOURED] = None
    """Steps of the whole run, warm-up included. Required."""
    warmup_min_ratio: Annotated[Weight, HONOURED] = 0.0
    """Where the warm-up starts, as a share of the optimizer's rate."""
    warmup_num_steps: Annotated[Natural, HONOURED] = 1000
    """Steps of the warm-up."""
    cos_min_ratio: Annotated[Weight, HONOURED] = 1e-4
    """Where the cosine ends, as a share of the optimizer's rate."""
    warmup_type: Annotated[WarmupType, HONOURED] = "log"
    """Shape of the warm-up."""


class LRRangeTestConfig(Section):
    """A sweep that finds a usable learning rate."""

    type: Annotated[Literal["LRRangeTest"], HONOURED, _NAMED]
    """Names the schedule."""
    params: LRRangeTestParams = LRRangeTestParams()


class OneCycleConfig(Section):
    """One rise and fall of the rate, momentum against it, then a decay."""

    type: Annotated[Literal["OneCycle"], HONOURED, _NAMED]
    """Names the schedule."""
    params: OneCycleParams = OneCycleParams()


class WarmupLRConfig(Section):
    """A warm-up, then a constant rate."""

    type: Annotated[Literal["WarmupLR"], HONOURED, _NAMED]
    """Names the schedule."""
    params: WarmupLRParams = WarmupLRParams()


class WarmupDecayLRConfig(Section):
    """A warm-up, then a straight line to zero."""

    type: Annotated[Literal["WarmupDecayLR"], HONOURED, _NAMED]
    """Names the schedule."""
    params: WarmupDecayLRParams = WarmupDecayLRParams()


class WarmupCosineLRConfig(Section):
    """A warm-up, then half a cosine."""

    type: Annotated[Literal["WarmupCosineLR"], HONOURED, _NAMED]
    """Names the schedule."""
    params: WarmupCosineLRParams = WarmupCosineLRParams()


Scheduler = LRRangeTestConfig | OneCycleConfig | WarmupLRConfig | WarmupDecayLRConfig | WarmupCosineLRConfig


class Fp16(Section):
    """Half precision, with a loss scale."""

    enabled: Annotated[Flag, HONOURED] = False
    """Compute in fp16."""
    auto_cast: Annotated[
        Flag,
        Refused("inputs are not cast for you", "Cast them in the data loader, or use bf16, and leave auto_cast out"),
    ] = False
    """Cast the inputs of forward."""
    loss_scale: Annotated[Weight, HONOURED] = 0.0
    """A fixed loss scale; 0 is a dynamic one."""
    initial_scale_power: Annotated[Natural, HONOURED] = 16
    """The dynamic scale starts at two to this power."""
    loss_scale_window: Annotated[Count, HONOURED] = 1000
    """Steps without overflow after which the scale doubles."""
    hysteresis: Annotated[Count, HONOURED] = 2
    """Overflows that are borne before the scale is halved."""
    consecutive_hysteresis: Annotated[Flag, HONOURED] = False
    """Forget borne overflows at every good step, not only when the scale doubles."""
    min_loss_scale: Annotated[Positive, HONOURED] = 1.0
    """The scale never falls below this."""
    fp16_master_weights_and_grads: Annotated[
        Flag, Refused(_KEPT_FP32, "Remove the key; to save memory move the optimizer states to CPU or NVMe")
    ] = False
    """Keep master weights and gradients in fp16."""


class Bf16(Section):
    """bfloat16; needs no loss scale."""

    enabled: Annotated[Flag, HONOURED] = False
    """Compute in bf16."""
    immediate_grad_update: Annotated[Flag, NoEffect("gradients are always consumed as they arrive")] = False
    """Accumulate a gradient as soon as it exists."""
    check_grad_overflow: Annotated[Flag, HONOURED] = True
    """The same as the key of this name at the top level, for bf16 alone. Either false is enough."""
    bf16_master_weights_and_grads: Annotated[
        Flag, Refused(_KEPT_FP32, "Remove the key; to save memory move the optimizer states to CPU or NVMe")
    ] = False
    """Keep master weights and gradients in bf16."""
    bf16_optimizer_states: Annotated[
        Flag, Refused("16-bit moments do not exist here yet", "Remove the key; offload_optimizer saves more memory")
    ] = False
    """Keep the moments in bf16."""


class DataTypes(Section):
    """Types beside the compute precision."""

    grad_accum_dtype: Annotated[Dtype | None, HONOURED] = None
    """Type in which gradients are accumulated. Absent: fp32 where several micro-batches add up, or the program decides
    when to step (managed_gradient_accumulation false); else the model's, for a single gradient is kept as it
    arrives."""
    param_dtype: Annotated[
        Dtype | None, Refused("the parameters' type follows from the precision section", 'Enable "bf16" or "fp16"')
    ] = None
    """Type of the parameters."""
    buffer_dtype: Annotated[
        Dtype | None, Refused("a module's buffers keep the type they have", "Cast the buffers in the model")
    ] = None
    """Type of the buffers."""


class TorchAutocast(Section):
    """Forward under torch.autocast: weights, gradients and moments are fp32, and torch chooses by operation what is
    computed in 16 bits (docs/precision.md)."""

    enabled: Annotated[Flag, HONOURED] = False
    """Run forward under torch.autocast."""
    dtype: Annotated[Half, HONOURED] = "bf16"
    """The 16-bit type. With fp16 the loss is scaled, by the keys of the section fp16, which stays off."""
    lower_precision_safe_modules: Annotated[
        Texts | None, NoEffect("all weights and gradients travel alike: see communication_data_type")
    ] = None
    """Classes of modules whose weights and gradients travel in 16 bits."""


Amp = Annotated[None, Refused("apex is not used", 'Enable "bf16" or "fp16" and remove the section'), Absent()]
