"""The optimizer object that a training loop holds: live parameter groups, states in the tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.errors import ConfigError


class TieredOptimizer(torch.optim.Optimizer):
    """An optimizer whose states live where the plan says.

    `param_groups` are live: what a scheduler or the program writes there holds from the next step on. It is a
    `torch.optim.Optimizer`, so that torch's schedulers take it; `step` is called by the engine.
    """

    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any],
        run: Callable[[Sequence[dict[str, Any]]], None], *, kind: str,
    ) -> None:  # fmt: skip
        """run: steps the partitions with live parameter groups. kind: the name of the rule, such as "AdamW"."""
        self._run = run
        self.kind = kind
        super().__init__(groups, defaults)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step once from the gradients that the engine has accumulated. A closure is refused: backward is the
        engine's.
        """
        if closure is not None:
            raise ConfigError(
                "the optimizer of an engine takes no closure: call engine.backward(loss), then engine.step()"
            )
        self._run(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients are consumed by the step; `engine.zero_grad()` throws away accumulated ones."""
