"""Signals that ask a run to end: remembered until the running step is over.

A scheduler warns before it takes a machine away (Slurm sends what `--signal` says, torchrun and kill send SIGTERM). The
handler only notes the signal. After each step the engine looks at `received`, agrees with the other ranks in the
exchange that every step has anyway, saves and ends. A second signal of the same kind goes to the previous handler, so
repeating it terminates the process as usual.
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


class PreemptionHandler:
    """Listens to signals by name until `close`. Only Python's main thread can listen; elsewhere a warning says so."""

    def __init__(self, names: Sequence[str]) -> None:
        # The name of the first signal that came; "" before.
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
            # None: a handler that was not installed from Python, and cannot be put back.
            self._before[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, self._note)

    def close(self) -> None:
        """Put the previous handlers back, where no others were installed since."""
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


_listening: weakref.WeakSet[PreemptionHandler] = weakref.WeakSet()


def _after_fork() -> None:
    # A forked child, such as a data loader's worker, is told to end by the same signals, and has no step to finish.
    for handler in list(_listening):
        handler.close()


os.register_at_fork(after_in_child=_after_fork)
