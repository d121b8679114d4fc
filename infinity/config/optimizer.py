"""The optimizer section: one class for each type, with its hyper-parameters.

Types other than Adam use torch's names and defaults, Lion those of its paper (Chen et al. 2023, arXiv:2302.06675). A
program passes any other optimizer with an elementwise step to `initialize(optimizer=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from infinity.config.section import TYPE_NAMED, NoEffect, Refused, Section, types_of
from infinity.config.values import Betas, Flag, Positive, Unusable, Weight


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


AnyOptimizer = Adam | Lion | Adagrad | Sgd | Rmsprop | Adamax | Nadam
# The values of `type`.
OPTIMIZER_TYPES = tuple(name for section in get_args(AnyOptimizer) for name in types_of(section))
