"""Collectives of the simulated accelerator: a back end of torch.distributed named "simulated_ccl".

As NCCL's, each runs on a stream of its group's own, after what the current stream had queued, and the host does not
wait: `Work.wait` makes the current stream wait. The bytes go over gloo, from the stream's thread. Sums are those of
`infinity.distributed.collectives`: in the order of ranks, 16-bit types in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.distributed.collectives import _add_up
from tests.support import accelerator

NAME = "simulated_ccl"


class Work:
    """A collective on its group's stream. It keeps its tensors until it is waited for, as NCCL's does."""

    def __init__(self, event: torch.Event, tensors: Sequence[Tensor]) -> None:
        self._event = event
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream(self._event.device).wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())


class Group(dist.ProcessGroup):
    """The ranks of one group."""

    count = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        # That of collectives, and one for the messages with each other rank.
        self._streams: dict[int | None, torch.Stream] = {}
        # As every rank makes the same groups in the same order.
        Group.count += 1
        self._name = f"{NAME} {Group.count}"

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def allgather_base(self, output: Tensor, input: Tensor, options: Any = None) -> Work:
        def run(mine: Tensor, everyone: Tensor) -> None:
            everyone.copy_(self._gather(mine).view(everyone.shape))

        return self._queue("all-gather", run, [input], [output])

    def reduce_scatter_base(self, output: Tensor, input: Tensor, options: Any = None) -> Work:
        def run(mine: Tensor, total: Tensor) -> None:
            rows = self._gather(mine).view(self.size(), self.size(), -1)
            total.copy_(_add_up([row[self.rank()] for row in rows]).view(total.shape))

        return self._queue("reduce-scatter", run, [input], [output])

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        def run(values: Tensor) -> None:
            values.copy_(_add_up([*self._gather(values).view(self.size(), *values.shape)]))

        return self._queue("all-reduce", run, [], tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Work:
        source = options.rootRank

        def run(values: Tensor) -> None:
            values.copy_(self._gather(values).view(self.size(), *values.shape)[source])

        return self._queue("broadcast", run, [], tensors)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        def run(values: Tensor) -> None:
            self._gloo.send([values.contiguous().view(-1).view(torch.uint8)], peer, tag).wait()

        return self._queue("send", run, tensors, [], peer=peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        def run(values: Tensor) -> None:
            received = torch.empty(values.nbytes, dtype=torch.uint8, device="cpu")
            self._gloo.recv([received], peer, tag).wait()
            values.copy_(received.view(values.dtype).view(values.shape))

        return self._queue("receive", run, [], tensors, peer=peer)

    # torch 2.13 has new names for two.
    all_gather_single = _allgather_base = allgather_base
    reduce_scatter_single = _reduce_scatter_base = reduce_scatter_base

    def abort(self) -> None:
        self._gloo.abort()

    def _gather(self, mine: Tensor) -> Tensor:
        """Every rank's tensor, one after the other, as bytes on the wire."""
        sent = mine.contiguous().view(-1).view(torch.uint8)
        rows = [torch.empty_like(sent) for _ in range(self.size())]
        self._gloo.allgather([rows], [sent]).wait()
        return torch.cat(rows).view(mine.dtype)

    def _queue(
        self, name: str, run: Callable[..., None], reads: list[Tensor], writes: list[Tensor], peer: int | None = None
    ) -> Work:
        device = (*reads, *writes)[0].device
        if peer not in self._streams:
            self._streams[peer] = torch.Stream(device)
        stream = self._streams[peer]
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            accelerator.call(run, reads=reads, writes=writes, name=name)
            event = torch.Event(device)
            event.record(stream)
        return Work(event, (*reads, *writes))


def register() -> None:
    """Make torch.distributed know the back end."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, Group, devices=["simulated"])
