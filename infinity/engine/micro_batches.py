"""Which micro-batches make an optimizer step: those that the engine counts, or those that the program says.

By default the engine counts: `step()` follows every micro-batch, and every `gradient_accumulation_steps`-th call acts.
A program that calls `set_boundary` says instead whether the micro-batch at hand is the last of its step; then each
backward is a micro-batch, and `step()` may be called once for all of them, however many there were.

Precision of a pass: the dtype that forward computes in, and the scaled loss that backward begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from infinity.checkpoint.run_state import Counters
from infinity.config.resolve import ResolvedConfig
from infinity.config.training import TorchAutocast
from infinity.errors import ConfigError, StateError
from infinity.memory.partition import DTYPES
from infinity.zero.forwards import set_forward


class Accumulation:
    """The micro-batches since the latest optimizer step: where the boundary is, how many they are, their losses."""

    def __init__(self, config: ResolvedConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        # Micro-batches of a step, and the number of micro-batches when the present step began.
        self.steps = config.accumulation
        self._first = 0
        # Whether the micro-batch at hand is the last of its step; None while the engine counts.
        self._said: bool | None = None
        # Micro-batches since the latest optimizer step that `step()` has counted, and backwards that it has not.
        self._counted = self._uncounted = 0
        # Unscaled, and those whose scale is the program's own. They stay on the device until a line or a monitor reads
        # them.
        self._losses: list[Tensor] = []
        self._shares: list[Tensor] = []

    @property
    def at_boundary(self) -> bool:
        """Whether the next `step()` applies the gradients."""
        if self._said is not None:
            return self._said
        managed = self._config.sections.managed_gradient_accumulation
        return not managed or (self._counters.micro_steps + 1 - self._first) % self.steps == 0

    @property
    def losses(self) -> list[Tensor]:
        """Losses whose mean is the step's: of its micro-batches, or one where the program has scaled them to add up."""
        if not self._shares:
            return self._losses
        scaled = [loss.reshape(()).float() / self.steps for loss in self._losses]
        return [torch.stack([*scaled, *(share.reshape(()).float() for share in self._shares)]).sum()]

    def set_boundary(self, is_boundary: bool) -> None:
        """Say whether the micro-batch at hand is the last of its step; it holds until the next call.

        Raises ConfigError where `managed_gradient_accumulation` is false, and for None.
        """
        if not self._config.sections.managed_gradient_accumulation:
            raise ConfigError(
                "set_gradient_accumulation_boundary() has no meaning with managed_gradient_accumulation false: every "
                "engine.step() applies the gradients. Leave one of the two out"
            )
        if is_boundary is None:
            raise ConfigError(
                "set_gradient_accumulation_boundary() takes True or False: once it is called, the program says where "
                "each optimizer step ends"
            )
        self._said = bool(is_boundary)

    def set_steps(self, count: int) -> None:
        """Change the number of micro-batches of a step. StateError while gradients accumulate."""
        if self.begun:
            raise StateError(
                f"{self._counted + self._uncounted} micro-batches of a step are accumulated: change their number after "
                "its last one, or call engine.zero_grad() before"
            )
        self.steps, self._first = count, self._counters.micro_steps

    def ran_backward(self, loss: Tensor, *, scaled: bool) -> None:
        """Note a backward. scaled: the engine has divided its loss by `gradient_accumulation_steps`."""
        self._uncounted += 1
        (self._losses if scaled else self._shares).append(loss.detach())

    @property
    def begun(self) -> bool:
        """Whether a micro-batch was run since the latest optimizer step."""
        return self._counted + self._uncounted > 0

    def count(self, calls: int) -> None:
        """Count the micro-batches of calls of `step()`: as many, or where the program says the boundary each backward.
        """
        count = calls if self._said is None else max(calls, self._uncounted)
        self._counted += count
        self._uncounted = 0
        self._counters.count_micro_steps(count)

    def end_step(self, calls: int, *, skipped: bool) -> None:
        """Count its last micro-batches, as `count` does, and an optimizer step with its samples. The program's own
        boundary may give it any number of them.
        """
        self.count(calls)
        part = self._config.train_batch // self._config.accumulation
        samples = part * (self.steps if self._said is None else self._counted)
        self._counters.count_step(samples, skipped=skipped)
        self.forget()

    def begin_anew(self) -> None:
        """Drop the micro-batches since the latest step: they are not counted, so that the next is a step's first."""
        self._counters.count_micro_steps(-self._counted)
        self.forget()

    def forget(self) -> None:
        """The micro-batches before are over."""
        self._counted = self._uncounted = 0
        self._first = self._counters.micro_steps
        self._losses = []
        self._shares = []


def autocast(section: TorchAutocast, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that `torch_autocast` asks for, without torch's cache: it would keep a 16-bit copy of every
    weight until the end of forward.
    """
    if not section.enabled:
        # The program may have opened an autocast itself.
        return nullcontext()
    return torch.autocast(device.type, DTYPES[section.dtype], cache_enabled=False)


def half(values: Any) -> Any:
    """Return `values`, a tensor or lists, tuples and dictionaries of them, with floating-point tensors cast to fp16."""
    if isinstance(values, Tensor):
        return values.half() if values.is_floating_point() else values
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*map(half, values))
    if isinstance(values, (list, tuple)):
        return type(values)(map(half, values))
    if isinstance(values, dict):
        return {key: half(value) for key, value in values.items()}
    return values


def widen_batch_norms(model: nn.Module) -> None:
    """Let batch norms take their weights in the dtype of their running statistics, which torch demands of them.

    Buffers keep their dtype, and statistics that move by a tenth of a difference need more than 16 bits. Values in and
    out stay narrow.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and "forward" not in vars(module):
            set_forward(module, partial(_widened, module))


def _widened(module: Any, *args: Any, **kwargs: Any) -> Any:
    params, dtype = module._parameters, module.running_mean.dtype
    module._parameters = {name: None if each is None else each.to(dtype) for name, each in params.items()}
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module._parameters = params


def scaled(loss: Tensor, factor: float) -> Tensor:
    """Return the loss times a factor, in fp32 unless that is 1. StateError for anything but one element that requires a
    gradient.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise StateError(
            f"engine.backward needs a loss of one element that requires a gradient, got {_not_a_loss(loss)}"
        )
    return loss if factor == 1.0 else loss.float() * factor


def _not_a_loss(given: Any) -> str:
    """Describe what the program passes instead of a loss, without its values, and say what to pass."""
    kind = type(given).__name__
    if isinstance(given, Tensor):
        shape = f"a tensor of shape {tuple(given.shape)}"
        if given.numel() != 1:
            return f"{shape}: reduce it, as with .mean()"
        return f"{shape} without a gradient: compute it with gradients on, and do not detach it"
    if isinstance(given, (int, float)):
        return f"{kind}: pass the tensor itself, not its .item()"
    if isinstance(given, Mapping) and "loss" in given and not hasattr(given, "loss"):
        return f'{kind}: pass its ["loss"]'
    if hasattr(given, "loss"):
        none = given.loss is None
        return f"{kind}: " + ("its .loss is None, so call the model with labels" if none else "pass .loss")
    if isinstance(given, (tuple, list)):
        return f"{kind} of {len(given)}: pass the loss alone"
    return f"{kind}: pass the loss"
