"""A process group whose collectives have numbers and names, so that the watchdog knows where each rank is.

[Note: tags] gloo ends the process when a message is longer than the buffer that waits for it. Ranks that submit
different collectives must therefore never exchange their bytes. Every message carries a tag, made of what its
collective is: number, name and size. A message only meets the receive of the same tag, so diverged ranks wait instead,
the watchdog compares their names, and all raise. Nothing is sent for it. Collectives whose messages gloo makes itself
begin with a meeting (`collectives`), which is one tagged message of no meaning.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from infinity.distributed.cma_transport import RowCopier
from infinity.distributed.hang_detection.flight_record import Wait
from infinity.distributed.hang_detection.watchdog import Watchdog
from infinity.ops.transfer import WorkTransfer

# Of a tag's 31 bits, those that say what the collective is; the ones above say which of its messages it is.
_SAID_BITS = 28
# Kinds of message. Tags of other uses (`abort`) are smaller than each.
DATA, MEETING, PLACE, TAKEN = (kind << _SAID_BITS for kind in (1, 2, 3, 4))


@dataclass(slots=True)
class Group:
    """`index` is the group's among those that the watchdog knows; without a watchdog nothing is counted. `reader`: what
    copies from the memory of members on this host, where there are any.
    """

    process_group: Any
    index: int = 0
    watchdog: Watchdog | None = None
    reader: RowCopier | None = None

    def start(
        self, name: str, submit: Callable[[int], Any], keep: Sequence[Tensor], *, nbytes: int
    ) -> CollectiveTransfer:
        """Submit a collective of `nbytes`, the same on every rank. `submit` takes the tag of its messages, to which the
        kind of message is added ([Note: tags]), and returns a work.
        """
        if self.watchdog is None:
            return CollectiveTransfer(self, submit(_tag(0, name, nbytes)), keep, 0, name)
        number = self.watchdog.submit(self.index, name, nbytes)
        try:
            work = submit(_tag(number, name, nbytes))
        except RuntimeError as error:
            raise self.watchdog.explain(error) from error
        return CollectiveTransfer(self, work, keep, number, name)

    def wait(self, work: Any, number: int, name: str) -> None:
        """Wait for a work. Where the group's device is no CPU, the host only enqueues the wait."""
        watchdog = self.watchdog
        if watchdog is None:
            work.wait()
            return
        watchdog.wait = Wait(self.index, number, name, time.monotonic())
        try:
            work.wait()
        except RuntimeError as error:
            raise watchdog.explain(error) from error
        finally:
            watchdog.wait = None


def _tag(number: int, name: str, nbytes: int) -> int:
    return zlib.crc32(f"{number} {nbytes} {name}".encode()) & ((1 << _SAID_BITS) - 1)


class CollectiveTransfer(WorkTransfer):
    """A collective in flight."""

    def __init__(self, group: Group, work: Any, keep: Sequence[Tensor], number: int, name: str) -> None:
        super().__init__(work, keep)
        self._group = group
        self._number = number
        self._name = name

    def wait(self) -> None:
        if self._work is not None:
            self._group.wait(self._work, self._number, self._name)
            self._work = None
            self._keep = ()
