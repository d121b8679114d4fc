"""The optimizer section: one class for each type, with the hyper-parameters that it has.

Types beyond Adam's have torch's names and defaults; Lion has its paper's. Any other optimizer whose step is elementwise
is passed to `initialize(optimizer=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from infinity.config.section import HONOURED, NoAuto, NoEffect, Refused, Section
from infinity.config.values import Betas, Flag, Positive, Unusable, Weight

_NAMED = NoAuto("name the type")


class AdamParams(Section):
    """Hyper-parameters of Adam and AdamW."""

    lr: Annotated[Positive, HONOURED] = 1e-3
    """Learning rate."""
    betas: Annotated[Betas, HONOURED] = (0.9, 0.999)
    """Decay of the first and of the second moment."""
    eps: Annotated[Weight, HONOURED] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[Weight, HONOURED] = 0.0
    """Weight decay; decoupled from the gradient in AdamW."""
    bias_correction: Annotated[Flag, HONOURED] = True
    """Correct the moments for their start at zero."""
    adam_w_mode: Annotated[Flag, HONOURED] = True
    """Decoupled weight decay. Type "Adam" is AdamW too unless this is false; "AdamW" is always AdamW."""
    torch_adam: Annotated[Flag, NoEffect("one optimizer serves every tier, with torch's arithmetic")] = False
    """Use torch's own Adam."""
    fp32_optimizer_states: Annotated[
        Flag, Refused("16-bit moments do not exist here yet", "Leave fp32_optimizer_states out, or set it to true")
    ] = True
    """Keep the moments in fp32."""
    max_grad_norm: Annotated[
        Weight | None, Refused("the optimizer does not clip", 'Set "gradient_clipping" at the top level instead')
    ] = None
    """Clipping bound of some optimizers."""


class Optimizer(Section):
    """What every type has."""

    legacy_fusion: Annotated[Flag, NoEffect("the optimizer's kernels are always fused")] = False
    """Fuse kernels in the older way."""

    @classmethod
    def rewrite(cls, raw: Any) -> Any:
        kind = raw.get("type") if isinstance(raw, Mapping) else None
        if not isinstance(kind, str) or kind.lower() == "auto":
            return raw
        names = {name.lower(): name for name in TYPES}
        if kind.lower() not in names:
            raise Unusable(
                f"type {kind!r} is refused: the configuration knows {', '.join(TYPES)}. Set the type to \"AdamW\", or "
                "pass any elementwise optimizer of torch's kind to initialize(optimizer=...)"
            )
        return {**raw, "type": names[kind.lower()]}


class Adam(Optimizer):
    """Adam and AdamW."""

    type: Annotated[Literal["AdamW", "Adam"], HONOURED, _NAMED]
    """Names the optimizer, in any case of letters."""
    params: AdamParams = AdamParams()

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is AdamW's."""
        return self.type == "AdamW" or self.params.adam_w_mode


class LionParams(Section):
    """Hyper-parameters of Lion."""

    lr: Annotated[Positive, HONOURED] = 1e-4
    """Learning rate."""
    betas: Annotated[Betas, HONOURED] = (0.9, 0.99)
    """Weight of the momentum in the update, and its decay."""
    weight_decay: Annotated[Weight, HONOURED] = 0.0
    """Weight decay, decoupled from the gradient."""


class Lion(Optimizer):
    """The sign of a momentum; one state an element."""

    type: Annotated[Literal["Lion"], HONOURED, _NAMED]
    """Names the optimizer."""
    params: LionParams = LionParams()


class AdagradParams(Section):
    """Hyper-parameters of Adagrad."""

    lr: Annotated[Positive, HONOURED] = 1e-2
    """Learning rate."""
    lr_decay: Annotated[Weight, HONOURED] = 0.0
    """How fast the rate falls with the steps."""
    weight_decay: Annotated[Weight, HONOURED] = 0.0
    """Added to the gradient, times the weight."""
    initial_accumulator_value: Annotated[Weight, HONOURED] = 0.0
    """Where the sums of squares start."""
    eps: Annotated[Weight, HONOURED] = 1e-10
    """Added to the denominator."""


class Adagrad(Optimizer):
    """Rates that fall with the sum of squared gradients; one state an element."""

    type: Annotated[Literal["Adagrad"], HONOURED, _NAMED]
    """Names the optimizer."""
    params: AdagradParams = AdagradParams()


class SgdParams(Section):
    """Hyper-parameters of SGD."""

    lr: Annotated[Positive, HONOURED] = 1e-3
    """Learning rate."""
    momentum: Annotated[Weight, HONOURED] = 0.0
    """Share of the buffer that is kept; with 0 there is no state at all."""
    dampening: Annotated[Weight, HONOURED] = 0.0
    """What a gradient lacks when it is added to the buffer."""
    weight_decay: Annotated[Weight, HONOURED] = 0.0
    """Added to the gradient, times the weight."""
    nesterov: Annotated[Flag, HONOURED] = False
    """Look ahead along the buffer."""


class Sgd(Optimizer):
    """SGD, with momentum or without."""

    type: Annotated[Literal["SGD"], HONOURED, _NAMED]
    """Names the optimizer."""
    params: SgdParams = SgdParams()


class RmspropParams(Section):
    """Hyper-parameters of RMSprop."""

    lr: Annotated[Positive, HONOURED] = 1e-2
    """Learning rate."""
    alpha: Annotated[Weight, HONOURED] = 0.99
    """Decay of the mean of squares."""
    eps: Annotated[Weight, HONOURED] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[Weight, HONOURED] = 0.0
    """Added to the gradient, times the weight."""
    momentum: Annotated[Weight, HONOURED] = 0.0
    """Share of the buffer that is kept; with 0 there is no buffer."""
    centered: Annotated[Flag, HONOURED] = False
    """Divide by the standard deviation; one more state."""


class Rmsprop(Optimizer):
    """RMSprop, run by torch on the partitions."""

    type: Annotated[Literal["RMSprop"], HONOURED, _NAMED]
    """Names the optimizer."""
    params: RmspropParams = RmspropParams()


class AdamaxParams(Section):
    """Hyper-parameters of Adamax."""

    lr: Annotated[Positive, HONOURED] = 2e-3
    """Learning rate."""
    betas: Annotated[Betas, HONOURED] = (0.9, 0.999)
    """Decay of the mean and of the largest gradient."""
    eps: Annotated[Weight, HONOURED] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[Weight, HONOURED] = 0.0
    """Added to the gradient, times the weight."""


class Adamax(Optimizer):
    """Adam with the infinity norm, run by torch on the partitions."""

    type: Annotated[Literal["Adamax"], HONOURED, _NAMED]
    """Names the optimizer."""
    params: AdamaxParams = AdamaxParams()


class NadamParams(Section):
    """Hyper-parameters of NAdam."""

    lr: Annotated[Positive, HONOURED] = 2e-3
    """Learning rate."""
    betas: Annotated[Betas, HONOURED] = (0.9, 0.999)
    """Decay of the first and of the second moment."""
    eps: Annotated[Weight, HONOURED] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[Weight, HONOURED] = 0.0
    """Weight decay."""
    momentum_decay: Annotated[Weight, HONOURED] = 4e-3
    """How fast the momentum grows."""
    decoupled_weight_decay: Annotated[Flag, HONOURED] = False
    """Decay as AdamW does."""


class Nadam(Optimizer):
    """Adam with Nesterov momentum, run by torch on the partitions."""

    type: Annotated[Literal["NAdam"], HONOURED, _NAMED]
    """Names the optimizer."""
    params: NadamParams = NadamParams()


AnyOptimizer = Adam | Lion | Adagrad | Sgd | Rmsprop | Adamax | Nadam
TYPES = ("AdamW", "Adam", "Lion", "Adagrad", "SGD", "RMSprop", "Adamax", "NAdam")
