"""A lock of one process: a forked child that takes it gets an error instead of a deadlock."""

from __future__ import annotations

import os
import threading
import weakref

from infinity.errors import of_another_process


class ProcessLock(threading.Condition):
    """A lock and condition whose holder may have been another thread of the parent when a child was forked.

    In the child that thread does not exist, so the lock might never be released there: entering it raises StateError.
    """

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self._owner = os.getpid()
        _locks.add(self)

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
