"""The data loader that `initialize` returns: torch's, with an order that a checkpoint can resume.

The order of an epoch depends on a seed and the epoch's number only. It is the same on all ranks, each of which takes
every n-th sample. A position is therefore one number, the samples that all ranks together have drawn, and a run resumes
from it with any number of ranks and any batch size. The loader draws nothing from the program's random generators.

With worker processes, batches that are ready but not drawn do not count. Random numbers in workers follow from the
seed, the epoch and the rank: an epoch that is resumed in its middle begins their sequence again.

Batches are on the engine's device. On the CPU they are the collated objects themselves, unless workers made them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from infinity.config import ResolvedConfig
from infinity.distributed.collectives import exchange
from infinity.distributed.groups import ProcessGroups
from infinity.memory.tiers.device import Device
from infinity.parallel.sequence import SequenceCutter


class SampleOrder(Sampler[int]):
    """This rank's samples of an epoch: a permutation from `start` on, dealt out in turn.

    Equal shares are completed from the epoch's beginning, or cut with `drop_last`.
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
        """Return the samples of a whole epoch for this rank."""
        return self._count // self._ranks if self._drop_last else -(-self._count // self._ranks)


@dataclass(frozen=True, slots=True)
class Workers:
    """torch's options of the same names for worker processes and the batches that they prepare."""

    count: int = 0
    prefetch_factor: int | None = None
    persistent: bool = False
    pin_memory: bool = False


class Loader(DataLoader[Any]):
    """Each `iter()` begins a new epoch, except the first after `load_state_dict`, which resumes the saved one."""

    def __init__(
        self, data: Dataset[Any], *, rank: int, ranks: int, batch: int, seed: int, collate: Callable[..., Any] | None,
        drop_last: bool, device: torch.device, workers: Workers = Workers(), cutter: SequenceCutter | None = None,
    ) -> None:  # fmt: skip
        self._device = device
        # Of ranks that share each sequence, and have the same samples.
        self._cutter = cutter
        self._rank, self._ranks = rank, ranks
        self._order = SampleOrder(len(cast(Sized, data)), rank=rank, ranks=ranks, seed=seed, drop_last=drop_last)
        # Samples of a full batch over all ranks.
        self._step = batch * ranks
        # Epochs begun; samples that all ranks have drawn in the latest; whether the next `iter()` resumes it.
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
        # Workers' seeds are drawn from it, the same in a process that resumes the run.
        self.generator.manual_seed((self._order.seed + self._order.epoch) * self._ranks + self._rank)
        # torch draws a seed for its workers on the default device, which may differ from its generator's.
        with torch.device("cpu"):
            batches = super().__iter__()
        return self._counted(self._epochs, batches)

    def _counted(self, epoch: int, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if epoch == self._epochs:
                self._drawn += self._step
            batch = batch if self._device.type == "cpu" else moved(batch, self._device)
            yield batch if self._cutter is None else self._cutter.cut(batch)

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a model for a micro-batch of the data's first samples, as `train_batch` reads it. The
        position stays, and so do random numbers.
        """
        count = min(self.batch_size or 1, len(self._order))
        with torch.random.fork_rng([]):
            batch = moved(self.collate_fn([self.dataset[index] for index in range(count)]), self._device)
        if isinstance(batch, Mapping):
            return (), dict(batch)
        return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data; the same on every rank."""
        return {"seed": self._order.seed, "epochs": self._epochs, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the last batch that was drawn when `state` was taken."""
        self._order.reseed(int(state["seed"]))
        self._epochs, self._drawn = int(state["epochs"]), int(state["drawn"])
        left = len(cast(Sized, self.dataset)) - self._drawn
        # An epoch without another batch is over.
        self._goes_on = self._epochs > 0 and left >= (self._step if self.drop_last else 1)


def open_loader(
    config: ResolvedConfig, model: nn.Module, data: Dataset[Any] | None, collate: Any, groups: ProcessGroups,
    device: Device,
) -> Loader | None:  # fmt: skip
    """Return the loader of a program's training data; None without data. Collective."""
    if data is None:
        return None
    # Rank 0's, so that its `torch.manual_seed` alone decides the order.
    seed = exchange([float(torch.initial_seed() % 2**32)], groups.world, "seed of the data")
    given = config.sections
    workers = Workers(
        given.dataloader_num_workers, given.dataloader_prefetch_factor, persistent=given.dataloader_persistent_workers,
        pin_memory=given.dataloader_pin_memory,
    )  # fmt: skip
    return Loader(
        data, rank=groups.replica, ranks=groups.topology.replicas, batch=config.micro_batch, seed=int(seed[0][0]),
        collate=collate, drop_last=given.dataloader_drop_last, device=device.torch, workers=workers,
        cutter=SequenceCutter(model, groups.sequence) if groups.sequence.size > 1 else None,
    )  # fmt: skip


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on `device`, in containers of the same types.

    A value with a `to` method (a tokenizer's output) is moved by that; other values stay. Copies from pinned memory do
    not block.
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
