"""The optimizer object that a training loop holds: live parameter groups; the states are in the tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from infinity.errors import ConfigError


class TieredOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer`, so that torch's schedulers accept it, whose states live where the plan says.

    `param_groups` are live: values that a scheduler or the program writes there apply from the next step on. The engine
    calls `step`. What DeepSpeed's optimizers have besides is here under its names: `overflow`, `optimizer`,
    `parameter_offload`, `train` and `eval`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any],
        run: Callable[[Sequence[dict[str, Any]]], None], *, kind: str, steps: dict[str, int],
        skipped: Callable[[], bool] = lambda: False, given: torch.optim.Optimizer | None = None,
        parameter_offload: object = None,
    ) -> None:  # fmt: skip
        """run: steps the partitions with live parameter groups. kind: the update rule's name, such as "AdamW". steps:
        how often each trained parameter has been stepped, by name, live. skipped: whether the latest step was skipped.
        given: the program's own optimizer. parameter_offload: what DeepSpeed's optimizer keeps of its hooks.
        """
        self._run = run
        self._steps = steps
        self._skipped = skipped
        self.kind = kind
        self.parameter_offload = parameter_offload
        super().__init__(groups, defaults)
        self._inner = given if given is not None else torch.optim.Optimizer(self.param_groups, self.defaults)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step from the accumulated gradients. ConfigError for a closure: the engine runs backward itself."""
        if closure is not None:
            raise ConfigError(
                "the optimizer of an engine takes no closure: call engine.backward(loss), then engine.step()"
            )
        self._run(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the step consumes gradients. `engine.zero_grad()` drops accumulated ones."""

    def train(self, mode: bool = True) -> None:
        """Do nothing: only optimizers that keep two sets of weights have modes, and these are refused."""

    def eval(self) -> None:
        """Do nothing, as `train`."""

    @property
    def overflow(self) -> bool:
        """Whether the latest step was skipped, because a gradient was not finite."""
        return self._skipped()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the program has brought, or one without a rule; both have these parameter groups."""
        return self._inner

    @property
    def step_counts(self) -> dict[str, int]:
        """How often each trained parameter has been stepped, by name; what Adam corrects its bias with."""
        return dict(self._steps)

    def set_step_counts(self, counts: int | Mapping[str, int]) -> None:
        """Set how often parameters have been stepped: all of them, or some by their names; the same on every rank.

        For states that come from another program, beside `infinity.state(param).exp_avg = ...`. ConfigError for a name
        that is not trained, or a count below 0.
        """
        given = dict.fromkeys(self._steps, counts) if isinstance(counts, int) else dict(counts)
        if unknown := given.keys() - self._steps.keys():
            raise ConfigError(f"set_step_counts: {min(unknown)} is no trained parameter of this engine")
        for name, count in given.items():
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**31:
                raise ConfigError(f"set_step_counts: {name} was stepped {count!r} times: pass a whole number from 0 on")
        self._steps.update(given)
