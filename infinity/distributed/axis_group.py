"""The ranks along one axis: what code that communicates is given, instead of a rank and a world size.

Collectives of a group have numbers and names, so that the watchdog knows where each rank is.

[Note: tags] gloo ends the process if a message is longer than the buffer that waits for it. Ranks that submit different
collectives must therefore never exchange their bytes. Every message carries a tag, computed from its collective's
number, name and size, and only meets a receive of the same tag. So ranks that differ wait instead, the watchdog
compares the names, and all ranks raise; no extra message is sent. A collective whose messages gloo makes itself begins
with a barrier of tagged, empty messages (`collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.cma_transport import RowCopier
from infinity.distributed.flight_record import words_and_digest
from infinity.distributed.watchdog import Watchdog
from infinity.errors import StateError

# Of a tag's 31 bits, those that identify the collective; the ones above tell its messages apart.
_SAID_BITS, _FACTOR = 28, 2_654_435_761
# Kinds of message. Tags of other uses (`abort`) are smaller than each.
DATA, MEETING, PLACE, TAKEN = (kind << _SAID_BITS for kind in (1, 2, 3, 4))


@dataclass(slots=True)
class AxisGroup(AxisPlace):
    """The ranks along one axis, with which this rank communicates.

    channel: the number by which the watchdog knows the process group. Without a watchdog no collective is counted.
    host_waits: whether a wait for a collective stops the host (gloo's does), or only the device.
    reader: copies rows from the memory of members on this host; None if there are none or the device is no CPU.
    """

    channel: int = 0
    watchdog: Watchdog | None = None
    host_waits: bool = True
    reader: RowCopier | None = None

    def read_memory_of(self, pids: Mapping[int, int], limit_seconds: float) -> None:
        """Copy rows from the memory of these members (by index, with their processes) instead of through sockets."""
        self.reader = RowCopier(self.process_group, pids, limit_seconds)

    @property
    def places(self) -> list[str]:
        """Its ranks with their coordinates, for messages."""
        place = str if self.watchdog is None else self.watchdog.channels.place
        return [f"rank {place(member)}" for member in self.members]

    def close(self) -> None:
        """Destroy the process group; idempotent."""
        if self.reader is not None:
            self.reader.close()
        if self.process_group is not None and dist.is_initialized():
            dist.destroy_process_group(self.process_group)
        self.process_group = self.reader = None

    def start(
        self, name: str, submit: Callable[[int], Any], keep: Sequence[Tensor], *, nbytes: int
    ) -> CollectiveTransfer:
        """Submit a collective; returns at once. StateError if the group has no process group.

        submit: takes the tag of the collective's messages, to which each adds its kind ([Note: tags]); returns a work.
        keep: the tensors that must live until it is over. nbytes: the same on every rank.
        """
        if self.process_group is None:
            raise StateError(f"{name}: the {self.axis} group has no process group: it is closed, or has one rank only")
        if self.watchdog is None:
            return CollectiveTransfer(self, submit(_tag(0, name, nbytes)), keep, 0, name)
        number = self.watchdog.submit(self.channel, name, nbytes)
        try:
            work = submit(_tag(number, name, nbytes))
        except RuntimeError as error:
            raise self.watchdog.explain(error) from error
        return CollectiveTransfer(self, work, keep, number, name)

    def note(self, act: str) -> None:
        """Take a place among the collectives for an act that each rank does alone and all do alike: a rank that does
        not is found, and both acts are named, at its next collective.
        """
        if self.watchdog is not None:
            self.watchdog.submit(self.channel, act, 0)

    def message(
        self, call: Callable[[list[Tensor], int, int], Any], peer: int, tensor: Tensor, name: str, *, waits_for: str
    ) -> CollectiveTransfer:
        """Submit a message between two members; returns at once. As `start`, in less host time.

        call: a process group's `send` or `recv`, for `peer`, an index in that group. waits_for: what a rank that waits
        for it says that it waits for.
        """
        nbytes, watchdog = tensor.nbytes, self.watchdog
        number = 0 if watchdog is None else watchdog.submit(self.channel, name, nbytes)
        try:
            work = call([tensor], peer, DATA | _tag(number, name, nbytes))
        except RuntimeError as error:
            if watchdog is None:
                raise
            raise watchdog.explain(error) from error
        return CollectiveTransfer(self, work, (tensor,), number, waits_for)

    def wait(self, work: Any, number: int, name: str) -> None:
        """Wait for a work. On an accelerator's own back end the host only queues the wait; the watchdog then asks the
        work itself whether it is over.
        """
        watchdog = self.watchdog
        if watchdog is None:
            work.wait()
            return
        watchdog.log.begin_wait(self.channel, number, name)
        try:
            work.wait()
        except RuntimeError as error:
            raise watchdog.explain(error) from error
        finally:
            watchdog.log.end_wait()
        if not self.host_waits:
            watchdog.log.queued(self.channel, number, name, work)


def _tag(number: int, name: str, nbytes: int) -> int:
    # Each number gives another tag to one name, because the factor is odd.
    return (words_and_digest(name, nbytes)[1] + number * _FACTOR) & ((1 << _SAID_BITS) - 1)


class CollectiveTransfer:
    """A collective in flight; it keeps the tensors `keep` alive until `wait` returns."""

    def __init__(self, group: AxisGroup, work: Any, keep: Sequence[Tensor], number: int, name: str) -> None:
        self._work = work
        self._keep: Sequence[Tensor] = keep
        self._group = group
        self._number = number
        self._name = name

    @property
    def kept(self) -> Sequence[Tensor]:
        """The tensors that it keeps alive; none once it has been waited for."""
        return self._keep

    def done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._work is not None:
            self._group.wait(self._work, self._number, self._name)
            self._work = None
            self._keep = ()
