"""Random numbers that belong to a layer: the same values and the same dropout, however layers are divided.

A layer is built, and runs forward on a micro-batch, with generators that are seeded with a number of its own. The
program's random numbers go on behind it as if it had drawn none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from infinity.parallel.random_state import seeded


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
