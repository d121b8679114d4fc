"""Which micro-batches make an optimizer step: those that the engine counts, or those that the program says.

By default the engine counts: `step()` follows every micro-batch, and every `gradient_accumulation_steps`-th call acts.
A program that calls `set_boundary` says instead whether the micro-batch at hand is the last of its step; then each
backward is a micro-batch, and `step()` may be called once for all of them, however many there were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infinity.checkpoint.state import Counters
from infinity.config.resolve import ResolvedConfig
from infinity.errors import ConfigError, StateError


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
        managed = self._config.config.managed_gradient_accumulation
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
        if not self._config.config.managed_gradient_accumulation:
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
