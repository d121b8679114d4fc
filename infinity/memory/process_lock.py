"""A lock of one process: a forked child that takes it gets an error instead of a deadlock."""

from __future__ import annotations

import os
import threading

from infinity.errors import of_another_process


class ProcessLock(threading.Condition):
    """A lock and condition whose holder may have been another thread of the parent when a child was forked.

    In the child that thread does not exist, so the lock might never be released there: entering it raises StateError.
    """

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self._owner = os.getpid()

    def __enter__(self) -> bool:
        self.check_process("use partitions")
        return super().__enter__()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a forked child, so that what the lock guards belongs to another process."""
        return os.getpid() != self._owner

    def check_process(self, verb: str) -> None:
        """Raise StateError in a forked child, which cannot do what `verb` says."""
        if self.is_elsewhere:
            raise of_another_process(verb, self._owner)
