"""Signals inside a verb of the engine: the verb ends whole, or it is known that something has cut it short.

[Note: interrupts] Python runs a signal's handler between any two bytecodes of the main thread, and an exception of the
handler leaves a verb right there: some weights stepped and the step not counted, a lease that nothing returns. So

- SIGINT and the other signals by which a user or a scheduler asks a program for something wait while the engine's own
  code is at work, until the verb is over, and their handlers run then. The module's code in forward is the program's.
  A second signal of the same number does not wait: a verb that hangs can be left.
- The handlers of all other signals (timers, children) run at once, as without an engine.
- A verb that changes anything has its mark on while it does (`Health.begin`), and takes it off as its last act. It
  leaves the mark on when it is cut short: by what a handler has raised inside the engine's code, or by any other
  exception that is no `Exception`. A verb that finds the mark of another one refuses, unless it is called inside one:
  a module's forward may read weights.

An error of the program's own code (a batch of the wrong shape, a timer's in the module's forward) and an ordinary one
of the engine's (no memory) are no such cut: the verb puts everything in order, takes the mark off, and the engine goes
on.

Signals that ask a run to end are only remembered: a scheduler warns before it takes a machine away (Slurm sends what
`--signal` says, torchrun and kill send SIGTERM). After each step the engine looks at `PreemptionHandler.received`,
agrees with the other ranks in the exchange that every step has anyway, saves and ends. A second signal of the same kind
goes to the previous handler, so repeating it terminates the process as usual.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import functools
import inspect
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

from infinity.distributed.watchdog import SIGNAL
from infinity.log import logger, warn_once

_Method = TypeVar("_Method", bound=Callable[..., Any])
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# What runs the module: file and function.
_CALLS_MODULE = os.path.join(_PACKAGE, "engine", "engine.py"), "forward"
_WAIT = frozenset({"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"})
_WAITING = frozenset(number for number in signal.valid_signals() if getattr(number, "name", "") in _WAIT)
# Those beneath `signal`, which makes enumerations of all values, in 20 to 100 times the time.
_get: Callable[[int], Any] = _signal.getsignal
_set: Callable[[int, Any], Any] = _signal.signal
# The watchdog's own ends a job that cannot go on.
_HANDLED = tuple(sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, SIGNAL})))


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


def _stop_listening() -> None:
    # A forked child, such as a data loader's worker, is told to end by the same signals, and has no step to finish.
    for handler in list(_listening):
        handler.close()


os.register_at_fork(after_in_child=_stop_listening)


class HeldSignals:
    """Stands in for the handlers of the process while a verb runs. Verbs may nest, those of several engines too."""

    def __init__(self) -> None:
        # Whether what a handler has raised, inside the verb under way or the latest one, came in the engine's own code;
        # None where none has raised.
        self._cut: bool | None = None
        # Verbs under way, one inside the other: in the main thread, and in others.
        self._depth = self._elsewhere = 0
        # The handlers of before, by signal. They stay here when they are back: a signal may come meanwhile.
        self._before: dict[int, Any] = {}
        # Signals that wait for the end of the verb.
        self._arrived: list[int] = []
        self._stand_in = self._note

    @property
    def under_way(self) -> bool:
        """Whether a verb is under way, of any engine."""
        return self._depth + self._elsewhere > 0

    def __enter__(self) -> bool:
        """Return whether the verb that begins is inside another one: called by a module's forward."""
        if threading.current_thread() is not threading.main_thread():
            self._elsewhere += 1
            return self._elsewhere > 1
        if not self._depth:
            self._cut = None
            for number in _HANDLED:
                handler = _get(number)
                # A `PreemptionHandler` only notes the signal, for the step at hand.
                own = handler is self._stand_in or isinstance(getattr(handler, "__self__", None), PreemptionHandler)
                if callable(handler) and not own:
                    self._before[number] = handler
                    _set(number, self._stand_in)
        self._depth += 1
        return self._depth > 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._elsewhere -= 1
            return
        if not self._depth:
            return
        self._depth -= 1
        if self._depth:
            return
        self.put_back()
        while self._arrived:
            number = self._arrived.pop()
            self._before[number](number, inspect.currentframe())

    def has_cut(self, error: BaseException | None) -> bool:
        """Whether a verb that ends with `error`, or with none, was cut short at any bytecode of the engine: what a
        handler raises inside a finalizer Python drops.
        """
        if self._cut is None or threading.current_thread() is not threading.main_thread():
            return error is not None and not isinstance(error, Exception)
        return self._cut

    def put_back(self) -> None:
        """Give the process its handlers back, where the program has installed no others meanwhile."""
        self._depth = 0
        for number, handler in self._before.items():
            if _get(number) is self._stand_in:
                _set(number, handler)

    def forget(self) -> None:
        """No verb is under way in this process."""
        self._elsewhere = 0
        self.put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        handler, inside = self._before[number], bool(self._depth) and _in_engine(frame)
        if inside and number in _WAITING and number not in self._arrived:
            self._arrived.append(number)
            logger.warning(
                "%s waits until the engine has finished what it does; sent again, it ends that in the middle, and the "
                "engine can only be closed then", signal.Signals(number).name,
            )  # fmt: skip
            return
        if number in self._arrived:
            self._arrived.remove(number)
        try:
            handler(number, frame)
        except BaseException:
            self._cut = inside
            if inside:
                # The exception may come where no block ends that this one has begun.
                self.put_back()
            raise


def _in_engine(frame: FrameType | None) -> bool:
    """Whether the engine's own code is at work in a frame, or in what that has called."""
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _CALLS_MODULE


HELD = HeldSignals()


def verb(doing: str, *, broken_is_fine: bool = False, gradients: bool = False) -> Callable[[_Method], _Method]:
    """A method of an engine that is refused where the engine cannot do it, and during which signals are held.

    broken_is_fine, gradients: as in `infinity.zero.health.Health.check`.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with HELD as inside:
                self._check(doing, broken_is_fine=broken_is_fine, gradients=gradients, inside=inside)
                return method(self, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


# A child that a verb forks has no verb under way.
os.register_at_fork(after_in_child=HELD.forget)
