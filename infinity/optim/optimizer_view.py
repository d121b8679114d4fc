"""The optimizer object that a training loop holds: live parameter groups; the states are in the tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.errors import ConfigError


class TieredOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer`, so that torch's schedulers accept it, whose states live where the plan says.

    `param_groups` are live: values that a scheduler or the program writes there apply from the next step on. The engine
    calls `step`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any],
        run: Callable[[Sequence[dict[str, Any]]], None], *, kind: str,
    ) -> None:  # fmt: skip
        """run: steps the partitions with live parameter groups. kind: the update rule's name, such as "AdamW"."""
        self._run = run
        self.kind = kind
        super().__init__(groups, defaults)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step from the accumulated gradients. ConfigError for a closure: the engine runs backward itself."""
        if closure is not None:
            raise ConfigError(
                "the optimizer of an engine takes no closure: call engine.backward(loss), then engine.step()"
            )
        self._run(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the step consumes gradients. `engine.zero_grad()` drops accumulated ones."""
