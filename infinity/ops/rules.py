"""The update rules of an element: their hyper-parameters, and the constants of one step.

Adam: Kingma and Ba, 2015; AdamW: Loshchilov and Hutter, 2019; Lion: Chen et al., "Symbolic discovery of optimization
algorithms", 2023; Adagrad: Duchi et al., 2011; SGD with momentum as torch defines it. Each class has the
hyper-parameters of a rule, the constants of one of its steps and its arithmetic in torch; csrc/adam/arithmetic.inl has
the same for native code. A kernel takes ten constants, named by their meaning in Adam; the class of another rule says
what it puts there.

`Piece` is the unit of work of a step. Below it: tensors as arguments of native code.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Rule(IntEnum):
    """An update rule, numbered as in csrc/adam/arithmetic.inl."""

    ADAM = 0
    ADAMW = 1
    LION = 2
    ADAGRAD = 3
    MOMENTUM = 4
    # AdamW in the operations of bitsandbytes, with fp32 moments and with moments in 8 bits.
    PLAIN_ADAMW = 5
    CODED_ADAMW = 6

    @property
    def two_states(self) -> bool:
        """Whether the rule keeps two values an element; otherwise one, in the place of Adam's first moment."""
        return self in (Rule.ADAM, Rule.ADAMW, Rule.PLAIN_ADAMW, Rule.CODED_ADAMW)

    @property
    def decoupled(self) -> bool:
        """Whether weight decay shrinks the weight; otherwise it is added to the gradient."""
        return self in (Rule.ADAMW, Rule.LION, Rule.PLAIN_ADAMW, Rule.CODED_ADAMW)


@dataclass(frozen=True, slots=True)
class StepConstants:
    """The constants of one step, computed in fp64 and rounded once to fp32; order and names as in types.h."""

    grad_scale: float = 1.0
    weight_decay: float = 0.0
    decay: float = 0.0
    # Negative: the first moment interpolates from the gradient instead of from the state; see `_lerp`.
    one_minus_beta1: float = 0.0
    beta2: float = 0.0
    one_minus_beta2: float = 0.0
    sqrt_bias_correction2: float = 0.0
    eps: float = 0.0
    minus_step_size: float = 0.0
    # Infinite: gradient elements are not bounded.
    grad_bound: float = math.inf

    COUNT: ClassVar[int] = 10

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, ctypes.c_float(getattr(self, name)).value)

    def floats(self) -> tuple[float, ...]:
        """Return the values in the order of the fields."""
        return tuple(getattr(self, name) for name in self.__slots__)


class Hyper(Protocol):
    """Hyper-parameters of one rule."""

    @property
    def rule(self) -> Rule: ...

    def constants(self, *, step: int, grad_scale: float) -> StepConstants:
        """Return the constants of optimizer step `step`, counted from 1, for gradients multiplied by `grad_scale`."""
        ...

    def stepped(self, weight: Tensor, grad: Tensor, states: Sequence[Tensor], c: StepConstants) -> Tensor:
        """Update the states in place and return the new weight. All fp32, flat, of one size; weight decay is done."""
        ...


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Hyper-parameters of Adam and AdamW; with `adamw` weight decay is decoupled, else added to the gradient."""

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
        """See `Hyper.constants`."""
        correction1 = 1.0 - self.beta1**step if self.bias_correction else 1.0
        correction2 = 1.0 - self.beta2**step if self.bias_correction else 1.0
        return StepConstants(
            grad_scale=grad_scale, weight_decay=self.weight_decay, decay=1.0 - self.lr * self.weight_decay,
            one_minus_beta1=_lerp(1.0 - self.beta1), beta2=self.beta2, one_minus_beta2=1.0 - self.beta2,
            sqrt_bias_correction2=math.sqrt(correction2), eps=self.eps,
            minus_step_size=-(self.lr / correction1),
        )  # fmt: skip

    def stepped(self, weight: Tensor, grad: Tensor, states: Sequence[Tensor], c: StepConstants) -> Tensor:
        """See `Hyper.stepped`."""
        mean, squares = states
        from_grad = math.copysign(1.0, c.one_minus_beta1) < 0
        mean.copy_(fma(c.one_minus_beta1, grad - mean, grad if from_grad else mean))
        squares.copy_(fma(grad * c.one_minus_beta2, grad, squares * c.beta2))
        # Divide by a tensor, because an accelerator divides by a number through multiplication with its reciprocal.
        denominator = _root(squares) / squares.new_full((), c.sqrt_bias_correction2) + c.eps
        return weight + (mean * c.minus_step_size) / denominator


@dataclass(frozen=True, slots=True)
class LionHyper:
    """Hyper-parameters of Lion: the update is the sign of a mean (beta1) of momentum and gradient, then the momentum
    decays by beta2. Weight decay is decoupled.
    """

    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    @property
    def rule(self) -> Rule:
        return Rule.LION

    def constants(self, *, step: int, grad_scale: float) -> StepConstants:
        """See `Hyper.constants`."""
        return StepConstants(
            grad_scale=grad_scale, decay=1.0 - self.lr * self.weight_decay, one_minus_beta1=1.0 - self.beta1,
            one_minus_beta2=1.0 - self.beta2, minus_step_size=-self.lr,
        )  # fmt: skip

    def stepped(self, weight: Tensor, grad: Tensor, states: Sequence[Tensor], c: StepConstants) -> Tensor:
        """See `Hyper.stepped`."""
        (mean,) = states
        update = fma(c.one_minus_beta1, grad - mean, mean).sign()
        mean.copy_(fma(c.one_minus_beta2, grad - mean, mean))
        return fma(c.minus_step_size, update, weight)


@dataclass(frozen=True, slots=True)
class AdagradHyper:
    """Hyper-parameters of Adagrad: the state is the sum of squares, the rate lr / (1 + (step - 1) * lr_decay)."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float

    @property
    def rule(self) -> Rule:
        return Rule.ADAGRAD

    def constants(self, *, step: int, grad_scale: float) -> StepConstants:
        """See `Hyper.constants`."""
        return StepConstants(
            grad_scale=grad_scale, weight_decay=self.weight_decay, eps=self.eps,
            minus_step_size=-self.lr / (1.0 + (step - 1) * self.lr_decay),
        )  # fmt: skip

    def stepped(self, weight: Tensor, grad: Tensor, states: Sequence[Tensor], c: StepConstants) -> Tensor:
        """See `Hyper.stepped`."""
        (squares,) = states
        squares.copy_(fma(grad, grad, squares))
        return fma(c.minus_step_size, grad / (_root(squares) + c.eps), weight)


@dataclass(frozen=True, slots=True)
class MomentumHyper:
    """Hyper-parameters of SGD with momentum.

    Its constants: `beta2` is the momentum, `one_minus_beta1` the factor of a gradient in the buffer (1 in the first
    step), `sqrt_bias_correction2` and `decay` are the factors of buffer and gradient in the update.
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
        """See `Hyper.constants`."""
        return StepConstants(
            grad_scale=grad_scale, weight_decay=self.weight_decay, beta2=self.momentum,
            one_minus_beta1=1.0 if step == 1 else 1.0 - self.dampening,
            sqrt_bias_correction2=self.momentum if self.nesterov else 1.0, decay=1.0 if self.nesterov else 0.0,
            minus_step_size=-self.lr,
        )  # fmt: skip

    def stepped(self, weight: Tensor, grad: Tensor, states: Sequence[Tensor], c: StepConstants) -> Tensor:
        """See `Hyper.stepped`."""
        (buffer,) = states
        buffer.copy_(fma(c.beta2, buffer, grad * c.one_minus_beta1))
        return fma(c.minus_step_size, fma(c.sqrt_bias_correction2, buffer, grad * c.decay), weight)


@dataclass(frozen=True, slots=True)
class CodedAdamHyper:
    """Hyper-parameters of AdamW as bitsandbytes steps it: `coded`: moments in 8 bits, as `infinity.ops.codes` has them.

    Its constant `weight_decay` is beta1. The two kinds of moments have formulas of their own: with fp32 moments the
    correction of the second one is in `eps` and in the step size.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    coded: bool = True

    @property
    def rule(self) -> Rule:
        return Rule.CODED_ADAMW if self.coded else Rule.PLAIN_ADAMW

    def constants(self, *, step: int, grad_scale: float) -> StepConstants:
        """See `Hyper.constants`."""
        correction1, correction2 = 1.0 - self.beta1**step, math.sqrt(1.0 - self.beta2**step)
        return StepConstants(
            grad_scale=grad_scale, weight_decay=self.beta1, decay=1.0 - self.lr * self.weight_decay,
            one_minus_beta1=1.0 - self.beta1, beta2=self.beta2, one_minus_beta2=1.0 - self.beta2,
            sqrt_bias_correction2=correction2, eps=self.eps if self.coded else self.eps * correction2,
            minus_step_size=-self.lr / correction1 if self.coded else -self.lr * correction2 / correction1,
        )  # fmt: skip

    def stepped(self, weight: Tensor, grad: Tensor, states: Sequence[Tensor], c: StepConstants) -> Tensor:
        """See `Hyper.stepped`; the states are fp32, whatever they are kept in."""
        mean, squares = states
        mean.copy_(fma(c.one_minus_beta1, grad, mean * c.weight_decay))
        squares.copy_(fma(grad * c.one_minus_beta2, grad, squares * c.beta2))
        if not self.coded:
            return fma(mean / (_root(squares) + c.eps), c.minus_step_size, weight)
        denominator = _root(squares) / squares.new_full((), c.sqrt_bias_correction2) + c.eps
        return weight + (mean * c.minus_step_size) / denominator


def fma(a: Tensor | float, b: Tensor | float, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once to fp32. Tensors are fp32, and floats must be fp32 values.

    torch has no fused multiply-add. In fp64 the product of two fp32 values is exact, TwoSum gives the error of the sum,
    and rounding the sum to odd (Boldo and Melquiond, 2008) makes the final rounding to fp32 that of the exact value.
    """
    first, second = (
        factor.double() if isinstance(factor, Tensor) else torch.full((), factor, dtype=torch.float64, device=c.device)
        for factor in (a, b)
    )
    product, addend = first * second, c.double()
    total = product + addend
    # TwoSum (Knuth): total + error is the exact sum.
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    inexact_even = (error != 0) & error.isfinite() & (bits & 1 == 0)
    return torch.where(inexact_even, bits + toward, bits).view(torch.float64).float()


def _root(squares: Tensor) -> Tensor:
    # Computed in fp64, because torch's fp32 root may be one bit off. The exact root of an fp32 value is farther from a
    # rounding boundary of fp32 than the error of the fp64 root.
    return squares.double().sqrt().float()


def _lerp(weight: float) -> float:
    """Return the fp32 factor of (gradient - state) that moves a state towards a gradient by `weight`.

    As torch's lerp, the kernel interpolates from the nearer end. The factor is negative, or minus zero, if that is the
    gradient.
    """
    rounded = ctypes.c_float(weight).value
    return rounded if rounded < 0.5 else -(1.0 - rounded)


@dataclass(slots=True)
class Piece:
    """Contiguous tensors of one device and number of elements (0 is allowed) that are stepped in place.

    A bf16 `param` has a `remainder` or a `master`, an fp16 `param` has a `master`, an fp32 `param` has neither. A rule
    with one state keeps it in `exp_avg` and has no `exp_avg_sq`. Moments in 8 bits are codes, and have `scales`: the
    absmax of the first and of the second one's blocks. The first element begins a block.
    """

    param: Tensor  # [numel] fp32, bf16 or fp16
    grad: Tensor  # [numel] fp32, bf16 or fp16, independent of param
    exp_avg: Tensor  # [numel] fp32, or uint8
    exp_avg_sq: Tensor | None = None  # [numel] fp32, or uint8
    remainder: Tensor | None = None  # [numel] int16
    master: Tensor | None = None  # [numel] fp32
    scales: tuple[Tensor, Tensor] | None = None  # each [blocks] fp32
    hyper: Hyper = field(kw_only=True)


# The codes of csrc/adam/types.h and csrc/kernels.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOATS = tuple(DTYPE_CODES)
CPU = torch.device("cpu")


def check_tensor(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int, device: torch.device = CPU
) -> None:
    """Raise ValueError that begins with `name` unless `tensor` is contiguous and has one of `dtypes`, `numel` elements
    and `device`.
    """
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}: a tensor on {device} is needed")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {numel}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {tensor.stride()} for shape {tuple(tensor.shape)}")


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Return the address of the tensor's first element as a C pointer; the caller keeps the tensor alive."""
    return ctypes.c_void_p(tensor.data_ptr())
