"""A process group whose collectives have numbers and names, so that the watchdog knows where each rank is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from infinity.comm.neighbours import Reader
from infinity.comm.positions import Wait
from infinity.comm.watchdog import Watchdog
from infinity.transfer import WorkTransfer


@dataclass(slots=True)
class Group:
    """`index` is the group's among those that the watchdog knows; without a watchdog nothing is counted. `reader`: what
    copies from the memory of members on this host, where there are any.
    """

    process_group: Any
    index: int = 0
    watchdog: Watchdog | None = None
    reader: Reader | None = None

    def start(self, name: str, submit: Callable[[], Any], keep: Sequence[Tensor]) -> CollectiveTransfer:
        """Submit a collective; `submit` returns a work."""
        if self.watchdog is None:
            return CollectiveTransfer(self, submit(), keep, 0, name)
        number = self.watchdog.submit(self.index, name)
        try:
            work = submit()
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
