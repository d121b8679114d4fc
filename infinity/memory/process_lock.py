"""A lock of one process: a forked child that takes it gets an error instead of a deadlock, and no signal keeps it held.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from infinity.errors import of_another_process

# The C class, which `threading` gives only a function for.
_RLock: Any = type(threading.RLock())


class ProcessLock(_RLock):  # type: ignore[misc]
    """A lock and condition whose holder may have been another thread of the parent when a child was forked.

    In the child that thread does not exist, so the lock might never be released there: entering it raises StateError.

    It is taken and released in C, between two bytecodes. What a signal's handler raises could leave a lock whose
    `__enter__` is Python's taken for good.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(self)
        self._owner = os.getpid()
        _locks.add(self)

    def wait(self) -> None:
        """Give the lock up until `notify_all`."""
        self._condition.wait()

    def wait_for(self, holds: Callable[[], bool], timeout: float) -> None:
        """Give the lock up until `holds()`, or until as many seconds are over."""
        self._condition.wait_for(holds, timeout)

    def notify_all(self) -> None:
        """Wake all that wait. Call it with the lock held."""
        self._condition.notify_all()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a forked child, so that what the lock guards belongs to another process."""
        return os.getpid() != self._owner

    def check_process(self, verb: str) -> None:
        """Raise StateError in a forked child, which cannot do what `verb` says."""
        if self.is_elsewhere:
            raise of_another_process(verb, self._owner)


class _ForkedLock(ProcessLock):
    """What every `ProcessLock` becomes in a forked child: each lease enters it many times, so entering asks nothing."""

    def __enter__(self) -> bool:
        raise of_another_process("use partitions", self._owner)


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_locks):
        lock.__class__ = _ForkedLock


os.register_at_fork(after_in_child=_after_fork)
