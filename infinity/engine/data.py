"""The data loader that `initialize` returns: torch's, in an order that can be taken up where it was left.

The order of an epoch follows from a seed and the epoch's number alone, and is the same on all ranks, which take every
n-th sample of it. So a position is one number, of samples that all ranks together have drawn, and a run goes on behind
it with any number of ranks and any batch size. The loader takes no numbers from the program's own generators.

With worker processes, batches that are ready and not yet drawn do not count. What workers draw at random follows from
the seed, the epoch and the rank: an epoch that is taken up in its middle begins that anew.

Batches come on the engine's device. On the CPU they are the very objects that were collated, unless workers made them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class SampleOrder(Sampler[int]):
    """This rank's samples of an epoch: a permutation from `start` on, dealt out in turn.

    What is missing for equal shares is taken from the epoch's beginning, or with `drop_last` left out.
    """

    def __init__(self, count: int, *, rank: int, ranks: int, seed: int, drop_last: bool) -> None:
        self.seed = seed
        self.epoch = 0
        self.start = 0
        self._count = count
        self._rank = rank
        self._ranks = ranks
        self._drop_last = drop_last

    def move_to(self, epoch: int, start: int) -> None:
        """Have the next `iter()` begin at sample `start` (of all ranks) of an epoch."""
        self.epoch, self.start = epoch, start

    def reseed(self, seed: int) -> None:
        """Take the order of another run."""
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._count, generator=generator, device="cpu").tolist()
        mine = order[self.start :]
        missing = -len(mine) % self._ranks
        if self._drop_last and missing:
            mine = mine[: len(mine) + missing - self._ranks]
        elif missing:
            mine += (order * (missing // len(order) + 1))[:missing]
        return iter(mine[self._rank :: self._ranks])

    def __len__(self) -> int:
        """Samples of a whole epoch for this rank."""
        return self._count // self._ranks if self._drop_last else -(-self._count // self._ranks)


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes that read and collate, and where batches lie that wait: torch's options of the same names."""

    count: int = 0
    prefetch_factor: int | None = None
    persistent: bool = False
    pin_memory: bool = False


class Loader(DataLoader[Any]):
    """Each `iter()` begins a new epoch, but the first after `load_state_dict`: it goes on in the one of that time."""

    def __init__(
        self, data: Dataset[Any], *, rank: int, ranks: int, batch: int, seed: int, collate: Callable[..., Any] | None,
        drop_last: bool, device: torch.device, workers: Workers = Workers(),
    ) -> None:  # fmt: skip
        self._device = device
        self._rank, self._ranks = rank, ranks
        self._order = SampleOrder(len(cast(Sized, data)), rank=rank, ranks=ranks, seed=seed, drop_last=drop_last)
        # Samples of all ranks in a full batch.
        self._step = batch * ranks
        # Epochs that have begun, samples of all ranks that were drawn in the latest, and whether that goes on.
        self._epochs = 0
        self._drawn = 0
        self._goes_on = False
        super().__init__(
            data, batch_size=batch, sampler=self._order, collate_fn=collate, drop_last=drop_last,
            generator=torch.Generator(), num_workers=workers.count, prefetch_factor=workers.prefetch_factor,
            persistent_workers=workers.persistent, pin_memory=workers.pin_memory and device.type != "cpu",
        )  # fmt: skip

    def __iter__(self) -> Any:
        if not self._goes_on:
            self._epochs, self._drawn = self._epochs + 1, 0
        self._goes_on = False
        self._order.move_to(self._epochs - 1, self._drawn)
        # Workers' seeds are drawn of it, also in a process that takes the run up.
        self.generator.manual_seed((self._order.seed + self._order.epoch) * self._ranks + self._rank)
        # torch draws a seed for its workers on the default device, which may be another than its generator's.
        with torch.device("cpu"):
            batches = super().__iter__()
        return self._counted(self._epochs, batches)

    def _counted(self, epoch: int, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if epoch == self._epochs:
                self._drawn += self._step
            yield batch if self._device.type == "cpu" else moved(batch, self._device)

    def state_dict(self) -> dict[str, Any]:
        """Where the program is in its data; the same on every rank."""
        return {"seed": self._order.seed, "epochs": self._epochs, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that was drawn last when `state` was told."""
        self._order.reseed(int(state["seed"]))
        self._epochs, self._drawn = int(state["epochs"]), int(state["drawn"])
        left = len(cast(Sized, self.dataset)) - self._drawn
        # An epoch that has no batch left is over.
        self._goes_on = self._epochs > 0 and left >= (self._step if self.drop_last else 1)


def moved(batch: Any, device: torch.device) -> Any:
    """The same with its tensors on `device`, in containers of the same types.

    Whatever has a `to` of its own (a tokenizer's output) is asked; other values stay as they are. From pinned memory
    the copy does not stop the host.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        made.update((name, moved(value, device)) for name, value in batch.items())
        return made
    if isinstance(batch, tuple):
        values = [moved(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return [moved(value, device) for value in batch] if isinstance(batch, list) else batch
