"""The end of a process that has engines open: the other ranks are told before it goes."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import traceback
import weakref
from types import FrameType, TracebackType

from infinity.distributed.hang_detection.job_end import SIGNAL
from infinity.distributed.hang_detection.judge import INTERRUPT_ENDED_SECONDS
from infinity.distributed.hang_detection.watchdog import Watchdog

# Watchdogs of engines that are open in this process.
_live: weakref.WeakSet[Watchdog] = weakref.WeakSet()
# All whose thread may run still, closed or not.
_running: weakref.WeakSet[Watchdog] = weakref.WeakSet()
# The latest one that was closed, if this process keeps the store.
_farewells: list[Watchdog] = []
_guarded = threading.Event()


def guard(watchdog: Watchdog) -> None:
    """Have the other ranks told if this process ends before `close` is called."""
    _live.add(watchdog)
    _running.add(watchdog)
    main = threading.current_thread() is threading.main_thread()
    if main and SIGNAL is not None and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, _on_signal)
    if _guarded.is_set():
        return
    _guarded.set()
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        for each in list(_live):
            ended = f"rank {each.place} has ended with an exception:\n{text}"
            each.leave(ended, interrupt_seconds=INTERRUPT_ENDED_SECONDS)
        before(kind, error, trace)

    sys.excepthook = tell
    atexit.register(leave)


def close(watchdog: Watchdog) -> None:
    """Close a watchdog with its engine; the process goes on."""
    watchdog.close()
    if watchdog in _live:
        _live.discard(watchdog)
        if watchdog.world.index == 0:
            _farewells[:] = [watchdog]


def leave() -> None:
    """Tell the other ranks of engines that are still open that this process ends; wait until they have heard."""
    for watchdog in list(_live):
        latest = f"its latest collective was {watchdog.log.latest or 'none'}"
        watchdog.leave(
            f"rank {watchdog.place}'s process has ended with its engine open; {latest}", interrupt_seconds=None
        )
    for watchdog in [*_live, *_farewells]:
        watchdog.linger()
    for watchdog in list(_live):
        watchdog.stop()
    for watchdog in list(_running):
        watchdog.join()
    _running.clear()
    _live.clear()
    _farewells.clear()


def _on_signal(_: int, __: FrameType | None) -> None:
    for watchdog in list(_live):
        watchdog.end.on_interrupt()


def _after_fork() -> None:
    # A forked child is no rank: how it ends is no other rank's business. It keeps the latest watchdog to its end, whose
    # connections' destructors wait for threads of the parent, or fail without them.
    for watchdog in _farewells:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(watchdog))
    _live.clear()
    _running.clear()
    _farewells.clear()


os.register_at_fork(after_in_child=_after_fork)
