"""The rules by which an element is stepped: their hyper-parameters, and the constants of one step.

Adam: Kingma and Ba, 2015; AdamW: Loshchilov and Hutter, 2019; Lion: Chen et al., "Symbolic discovery of optimization
algorithms", 2023; Adagrad: Duchi et al., 2011; SGD with momentum as torch defines it. csrc/adam/arithmetic.inl is the
arithmetic, `infinity.ops.reference` says it again.

A kernel knows ten constants, named after what they are to Adam. What another rule puts there stands at its class.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Protocol


class Rule(IntEnum):
    """Numbers as in csrc/adam/types.h."""

    ADAM = 0
    ADAMW = 1
    LION = 2
    ADAGRAD = 3
    MOMENTUM = 4

    @property
    def two_states(self) -> bool:
        """Whether it keeps two fp32 values an element; else one, which lies where Adam's first moment does."""
        return self in (Rule.ADAM, Rule.ADAMW)


@dataclass(frozen=True, slots=True)
class StepConstants:
    """What one step multiplies by: computed in fp64, each rounded once to fp32. Order and names as in types.h."""

    grad_scale: float = 1.0
    weight_decay: float = 0.0
    decay: float = 0.0
    # With a minus: the state is moved from the gradient, not from where it is.
    one_minus_beta1: float = 0.0
    beta2: float = 0.0
    one_minus_beta2: float = 0.0
    sqrt_bias_correction2: float = 0.0
    eps: float = 0.0
    minus_step_size: float = 0.0
    # Infinite: gradients are not bounded one by one.
    grad_bound: float = math.inf

    COUNT: ClassVar[int] = 10

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, ctypes.c_float(getattr(self, name)).value)

    def floats(self) -> tuple[float, ...]:
        """The values in the order of the fields."""
        return tuple(getattr(self, name) for name in self.__slots__)


class Hyper(Protocol):
    """Hyper-parameters of one rule."""

    @property
    def rule(self) -> Rule: ...

    def constants(self, *, step: int, grad_scale: float) -> StepConstants:
        """Constants of optimizer step `step`, counted from 1, on gradients that are multiplied by `grad_scale`."""
        ...


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """`weight_decay` is decoupled (AdamW) where `adamw`, else added to the gradient."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adamw: bool
    bias_correction: bool = True

    @property
    def rule(self) -> Rule:
        return Rule.ADAMW if self.adamw else Rule.ADAM

    def constants(self, *, step: int, grad_scale: float) -> StepConstants:
        """See Hyper."""
        correction1 = 1.0 - self.beta1**step if self.bias_correction else 1.0
        correction2 = 1.0 - self.beta2**step if self.bias_correction else 1.0
        return StepConstants(
            grad_scale=grad_scale, weight_decay=self.weight_decay, decay=1.0 - self.lr * self.weight_decay,
            one_minus_beta1=_lerp(1.0 - self.beta1), beta2=self.beta2, one_minus_beta2=1.0 - self.beta2,
            sqrt_bias_correction2=math.sqrt(correction2), eps=self.eps,
            minus_step_size=-(self.lr / correction1),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LionHyper:
    """The sign of a mean of momentum and gradient (beta1); then the momentum moves by beta2. The decay is decoupled."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    @property
    def rule(self) -> Rule:
        return Rule.LION

    def constants(self, *, step: int, grad_scale: float) -> StepConstants:
        """See Hyper."""
        return StepConstants(
            grad_scale=grad_scale, decay=1.0 - self.lr * self.weight_decay, one_minus_beta1=1.0 - self.beta1,
            one_minus_beta2=1.0 - self.beta2, minus_step_size=-self.lr,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdagradHyper:
    """The state is the sum of squares; the rate falls as 1 / (1 + (step - 1) * lr_decay)."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float

    @property
    def rule(self) -> Rule:
        return Rule.ADAGRAD

    def constants(self, *, step: int, grad_scale: float) -> StepConstants:
        """See Hyper."""
        return StepConstants(
            grad_scale=grad_scale, weight_decay=self.weight_decay, eps=self.eps,
            minus_step_size=-self.lr / (1.0 + (step - 1) * self.lr_decay),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MomentumHyper:
    """SGD with momentum. `beta2`: the momentum; `one_minus_beta1`: what a gradient adds to the buffer (all of it in the
    first step); `sqrt_bias_correction2` and `decay`: the shares of buffer and gradient in the update.
    """

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool

    @property
    def rule(self) -> Rule:
        return Rule.MOMENTUM

    def constants(self, *, step: int, grad_scale: float) -> StepConstants:
        """See Hyper."""
        return StepConstants(
            grad_scale=grad_scale, weight_decay=self.weight_decay, beta2=self.momentum,
            one_minus_beta1=1.0 if step == 1 else 1.0 - self.dampening,
            sqrt_bias_correction2=self.momentum if self.nesterov else 1.0, decay=1.0 if self.nesterov else 0.0,
            minus_step_size=-self.lr,
        )  # fmt: skip


def _lerp(weight: float) -> float:
    """What a difference is multiplied with on the way to a gradient, in fp32: from the nearer end, as torch's lerp.
    With a minus, be it that of zero, where that is the gradient.
    """
    rounded = ctypes.c_float(weight).value
    return rounded if rounded < 0.5 else -(1.0 - rounded)
