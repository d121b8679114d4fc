"""Signals that ask a run to end: remembered until the running step is over.

A scheduler warns before it takes a machine away (Slurm sends what `--signal` says, torchrun and kill send SIGTERM).
The handler only notes the signal; who looks for it acts. A second one of the same kind finds the handler that was there
before: who insists ends the process as if nobody had listened.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from infinity.log import warn_once


class Signals:
    """Listens to signals by name until `close`. Only Python's main thread can listen; elsewhere a warning says so."""

    def __init__(self, names: Sequence[str]) -> None:
        # The first that came.
        self.received = ""
        self._before: dict[int, Any] = {}
        _listening.add(self)
        if names and threading.current_thread() is not threading.main_thread():
            warn_once(
                "signals-elsewhere",
                f"checkpoint.on_signal: {', '.join(names)} cannot be heard, because the engine was made outside of the "
                "program's main thread: make it there, or call engine.save_checkpoint() yourself",
            )
            return
        for name in names:
            number = signal.Signals[name].value
            # None: somebody else's, not Python's; it cannot be put back.
            self._before[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, self._note)

    def close(self) -> None:
        """Put the handlers from before back, where nobody has put others since."""
        while self._before:
            number, before = self._before.popitem()
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received == name:
            signal.signal(number, self._before.pop(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
            return
        self.received = self.received or name


_listening: weakref.WeakSet[Signals] = weakref.WeakSet()


def _after_fork() -> None:
    # A forked child, such as a data loader's worker, is told to end by the same signals, and has no step to finish.
    for signals in list(_listening):
        signals.close()


os.register_at_fork(after_in_child=_after_fork)
