"""The optimizer object that a training loop holds: live parameter groups, states in the tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from infinity.errors import ConfigError


class TieredAdam(torch.optim.Optimizer):
    """Adam or AdamW whose states live where the plan says.

    `param_groups` are live: what a scheduler or the program writes there holds from the next step on. It is a
    `torch.optim.Optimizer`, so that torch's schedulers take it; `step` is called by the engine.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], run: Callable[[], None]) -> None:
        self._run = run
        super().__init__(groups, defaults)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step once from the gradients that the engine has accumulated. A closure is refused: backward is the
        engine's.
        """
        if closure is not None:
            raise ConfigError(
                "the optimizer of an engine takes no closure: call engine.backward(loss), then engine.step()"
            )
        self._run()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients are consumed by the step; `engine.zero_grad()` throws away accumulated ones."""


def groups_from_torch(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    """Parameter groups, defaults and whether weight decay is decoupled, of a torch Adam or AdamW that has not
    stepped.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} cannot be run on partitions yet: pass torch.optim.AdamW or Adam, "
            f"or name one "
            'in the configuration (optimizer.type = "AdamW")'
        )
    if optimizer.state:
        raise ConfigError("the optimizer has stepped already; pass it to initialize() before its first step")
    for group in optimizer.param_groups:
        wrong = [key for key in ("amsgrad", "maximize") if group.get(key)]
        if wrong:
            raise ConfigError(f"optimizer option {wrong[0]}=True is not supported; leave it out")
    decoupled = isinstance(optimizer, torch.optim.AdamW) or optimizer.param_groups[0].get(
        "decoupled_weight_decay", False
    )
    # The very dictionaries: what a scheduler of the given optimizer writes there is read here.
    defaults = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    return optimizer.param_groups, defaults, bool(decoupled)
