"""A trace of the process: spans of work and of waiting, transfers, and bytes held over time.

    recording = trace.start_recording()
    with trace.span(trace.WAIT, "NVMe read", key, nbytes):
        ...
    recording.stop()

The calls stand where the work is done, and cost next to nothing without a recording. There is at most one recording in
a process. Times are `time.perf_counter_ns()`, the clock of the I/O queue, too.

A time accumulator runs independently of recordings. It keeps no spans, only the nanoseconds that the program has spent
in each kind of them.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import NamedTuple, Protocol

# The activities of a thread. The innermost span of a moment counts.
PHASE = "phase"
COMPUTE = "compute"
COPY = "copy"
ENGINE = "engine"
WAIT = "wait"
# The program's activity outside all spans: its own loop, the data.
OUTSIDE = "outside"
# Threads with these name prefixes run beside the program.
BESIDE = "infinity-"
# Outside, before it is known which phase comes next.
_OPEN_ENDED = (OUTSIDE, "")


class Span(NamedTuple):
    """An activity of a thread from `begin` to `end` (ns). cause: what it did or waited for. subject: its object."""

    thread: int
    what: str
    cause: str
    subject: object
    begin: int
    end: int
    nbytes: int


class AsyncSpan(NamedTuple):
    """An operation in a lane of its own, beside the threads' spans: a transfer, a module's forward or backward."""

    lane: str
    subject: object
    begin: int
    end: int
    nbytes: int
    # When it was submitted; `begin` where it began at once.
    asked: int
    # Whether it had ended when the recording stopped.
    over: bool


class CounterEvent(NamedTuple):
    """The bytes of one kind on one tier from a moment on."""

    at: int
    tier: str
    kind: str
    nbytes: int


class Timed(Protocol):
    """A transfer that reports, once it is done, when its bytes began and ended to move (ns; began 0: never)."""

    def done(self) -> bool: ...

    @property
    def moments(self) -> tuple[int, int]: ...


class Recording:
    """The record from `begin` to `end`. Threads append at any time; lists are read after `stop`."""

    def __init__(self) -> None:
        self.program = threading.get_ident()
        self.threads: dict[int, str] = {}
        self.spans: list[Span] = []
        self.flights: list[AsyncSpan] = []
        self.levels: list[CounterEvent] = []
        self.end = 0
        self._open: dict[int, _Open] = {}
        self._under_way: dict[tuple[str, object], tuple[int, int]] = {}
        self._transfers: list[tuple[str, object, int, int, Timed]] = []
        self.begin = time.perf_counter_ns()

    def stop(self) -> None:
        """End the recording, and everything in it that is still under way."""
        global _recording
        if _recording is self:
            _recording = None
        if self.end:
            return
        self.end = time.perf_counter_ns()
        for still in [*self._open.values()]:
            self.spans.append(still.until(self.end))
        for (lane, subject), (begin, nbytes) in [*self._under_way.items()]:
            self.flights.append(AsyncSpan(lane, subject, begin, self.end, nbytes, begin, over=False))
        for lane, subject, nbytes, asked, transfer in self._transfers:
            over = transfer.done()
            begin, end = transfer.moments if over else (asked, self.end)
            # A transfer that failed before its first byte never began.
            begin = begin or asked
            self.flights.append(AsyncSpan(lane, subject, begin, max(min(end, self.end), begin), nbytes, asked, over))
        self._open.clear()
        self._under_way.clear()
        self._transfers.clear()

    def add_open(self, span: _Open) -> None:
        self._open[id(span)] = span
        self.threads.setdefault(span.thread, threading.current_thread().name)

    def close(self, span: _Open, end: int) -> None:
        if self._open.pop(id(span), None) is not None:
            self.spans.append(span.until(end))

    def begin_async(self, lane: str, subject: object, nbytes: int) -> None:
        self._under_way.setdefault((lane, subject), (time.perf_counter_ns(), nbytes))

    def end_async(self, lane: str, subject: object) -> None:
        started = self._under_way.pop((lane, subject), None)
        if started is not None:
            begin, nbytes = started
            self.flights.append(AsyncSpan(lane, subject, begin, time.perf_counter_ns(), nbytes, begin, over=True))

    def follow(self, lane: str, subject: object, nbytes: int, transfer: Timed) -> None:
        self._transfers.append((lane, subject, nbytes, time.perf_counter_ns(), transfer))


class TimeAccumulator:
    """The program's nanoseconds by (what, cause) of its spans. At each moment the innermost counts, so that they add up
    to the time that has passed; time outside all spans is (OUTSIDE, the phase that came next).

    On an accelerator backward runs on one of autograd's threads while the program waits: they count as one.
    """

    def __init__(self) -> None:
        self._spent: dict[tuple[str, str], int] = {}
        self._open: list[_Open] = []
        self._at = time.perf_counter_ns()

    def read(self) -> dict[tuple[str, str], int]:
        """Return the nanoseconds so far. Time outside all spans that no phase has followed yet is the program's.
        """
        self._until(time.perf_counter_ns())
        self._end_outside("program")
        return dict(self._spent)

    def enter(self, span: _Open, now: int) -> None:
        """Begin a span of the program."""
        self._until(now)
        what, cause = span.label
        if what == PHASE and not self._open:
            self._end_outside(cause)
        self._open.append(span)

    def leave(self, span: _Open, now: int) -> None:
        """End the innermost span."""
        self._until(now)
        self._open.remove(span)

    def _end_outside(self, cause: str) -> None:
        self._spent[OUTSIDE, cause] = self._spent.get((OUTSIDE, cause), 0) + self._spent.pop(_OPEN_ENDED, 0)

    def _until(self, now: int) -> None:
        label = self._open[-1].label if self._open else _OPEN_ENDED
        self._spent[label] = self._spent.get(label, 0) + now - self._at
        self._at = now


_recording: Recording | None = None
_tally: TimeAccumulator | None = None
_tally_users = 0


def start_accumulator() -> TimeAccumulator:
    """Return the accumulator of this process; it runs until each call of this is matched by one of `stop_tally`."""
    global _tally, _tally_users
    _tally = _tally or TimeAccumulator()
    _tally_users += 1
    return _tally


def stop_tally() -> None:
    """Release one call of `start_accumulator`; the last one stops the accumulator."""
    global _tally, _tally_users
    _tally_users -= 1
    if not _tally_users:
        _tally = None


def start_recording() -> Recording:
    """Begin to record. RuntimeError while another recording is under way."""
    global _recording
    if _recording is not None:
        raise RuntimeError("a timeline is being recorded already: there is one at a time in a process")
    _recording = Recording()
    return _recording


def active() -> bool:
    """Return whether a recording runs, for callers whose arguments are costly to make."""
    return _recording is not None


def span(what: str, cause: str, subject: object = "", nbytes: int = 0) -> _Open | _Nothing:
    """Return a context manager around an activity or a wait of this thread."""
    if _recording is None and _tally is None:
        return _NOTHING
    return _Open(_recording, _tally, what, cause, subject, nbytes)


def begin_async(lane: str, subject: object, nbytes: int = 0) -> None:
    """Begin an operation that `end_async` ends, possibly elsewhere."""
    if _recording is not None:
        _recording.begin_async(lane, subject, nbytes)


def end_async(lane: str, subject: object) -> None:
    """End an operation of `begin_async`; do nothing when it was not recorded."""
    if _recording is not None:
        _recording.end_async(lane, subject)


def follow(lane: str, subject: object, nbytes: int, transfer: Timed) -> None:
    """Record a submitted transfer that keeps its own times."""
    if _recording is not None:
        _recording.follow(lane, subject, nbytes, transfer)


def level(tier: str, kind: str, nbytes: int) -> None:
    """Record the bytes of a kind on a tier from now on."""
    if _recording is not None:
        _recording.levels.append(CounterEvent(time.perf_counter_ns(), tier, kind, nbytes))


class _Open:
    """A span under way."""

    __slots__ = ("_begin", "_nbytes", "_recording", "_subject", "_tally", "label", "thread")

    def __init__(
        self, recording: Recording | None, tally: TimeAccumulator | None, what: str, cause: str, subject: object,
        nbytes: int,
    ) -> None:
        self._recording = recording
        self._tally = tally
        self.label = (what, cause)
        self._subject = subject
        self._nbytes = nbytes
        self.thread = threading.get_ident()
        self._begin = 0

    def until(self, end: int) -> Span:
        return Span(self.thread, *self.label, self._subject, self._begin, end, self._nbytes)

    def __enter__(self) -> None:
        if self._recording is not None:
            self._recording.add_open(self)
        if self._tally is not None and threading.current_thread().name.startswith(BESIDE):
            self._tally = None
        self._begin = time.perf_counter_ns()
        if self._tally is not None:
            self._tally.enter(self, self._begin)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        now = time.perf_counter_ns()
        if self._tally is not None:
            self._tally.leave(self, now)
        if self._recording is not None:
            self._recording.close(self, now)


class _Nothing:
    """Stands in for a span without a recording."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


_NOTHING = _Nothing()
