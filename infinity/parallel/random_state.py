"""Random numbers of a tensor group: one generator that its ranks share, and numbers of a rank's own inside regions.

The shared numbers are those of torch's default generators, which `share_random_state` makes equal once. Where ranks
compute different things, each seeds them with a number drawn from the shared ones plus its index, and restores the
shared state behind. So nothing else is kept: a resumed run, and a block that is computed again from the state at its
entry, draw the same numbers.

Random numbers that belong to a layer: the same values and the same dropout, however layers are divided.

A layer is built, and runs forward on a micro-batch, with generators that are seeded with a number of its own. The
program's random numbers go on behind it as if it had drawn none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup


def share_random_state(group: AxisGroup, device: torch.device) -> None:
    """Set torch's default generators, of the CPU and of `device`, to those of the group's first rank. Collective."""
    if group.process_group is None:
        return
    generators: list[tuple[Any, tuple[torch.device, ...]]] = [(torch, ())]
    if device.type != "cpu":
        generators.append((torch.get_device_module(device), (device,)))
    for module, where in generators:
        # On the device, because a group may move nothing else.
        state = module.get_rng_state(*where).to(device)
        collectives.broadcast(state, group, 0, "broadcast of the random state")
        module.set_rng_state(state.cpu(), *where)


def has_dropout(model: nn.Module) -> bool:
    """Return whether the model has a dropout above zero: a module, or a number so named of a module or its config."""
    looked_at = set()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        for owner in (module, getattr(module, "config", None)):
            if id(owner) in looked_at:
                continue
            looked_at.add(id(owner))
            for name, value in getattr(owner, "__dict__", {}).items():
                named = "dropout" in name.lower() or "pdrop" in name.lower()
                if named and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                    return True
    return False


class OwnNumbers:
    """Gives a rank of a tensor group random numbers of its own, or back those that it shares."""

    def __init__(self, group: AxisGroup) -> None:
        self._group = group

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Draw from own numbers in the block, on the CPU and on `device`; restore the former ones behind it."""
        with seeded(draw_seed() + self._group.index, device):
            yield

    @contextmanager
    def common_on(self, device: torch.device) -> Iterator[None]:
        """The same with numbers that all ranks share, where former ones are own. Collective."""
        seed = torch.tensor(draw_seed(), device=device)
        collectives.broadcast(seed, self._group, 0, "broadcast of a random number")
        with seeded(int(seed), device):
            yield


def draw_seed() -> int:
    """Return a seed that follows from the state of torch's default generator, and changes it."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's default generators of the CPU and of `device`; restore their states behind the block."""
    former = torch.get_rng_state()
    accelerator = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    former_there = None if accelerator is None else accelerator.get_rng_state(device)
    try:
        # `torch.manual_seed` would seed every device.
        torch.default_generator.manual_seed(seed)
        if accelerator is not None:
            accelerator.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(former)
        if accelerator is not None:
            accelerator.set_rng_state(former_there, device)


@dataclass(frozen=True, slots=True)
class LayerSeeds:
    """Seeds of the layers of one model.

    enabled: without it, nothing is seeded. function: called with each seed in place of torch's generators; nothing is
    restored behind it. base: where the numbers begin.
    """

    enabled: bool = False
    function: Callable[[int], Any] | None = None
    base: int = 1234

    @contextmanager
    def on(self, seed: int, device: torch.device | None = None) -> Iterator[None]:
        """Draw from a seed's numbers in the block, on the CPU and on `device` (torch's default one)."""
        if not self.enabled:
            yield
        elif self.function is not None:
            self.function(seed)
            yield
        else:
            with seeded(seed, device or torch.get_default_device()):
                yield

    def of_building(self, layer: int) -> int:
        """The seed with which a layer is built."""
        return self.base + layer

    def of_forward(self, layer: int, layers: int, micro_batch: int) -> int:
        """The seed with which one of `layers` layers runs on a micro-batch of the run; no other has it."""
        return self.base + layers * (micro_batch + 1) + layer
