"""What happens when, while somebody records it: spans of work and of waiting, transfers, and bytes held over time.

    recording = record.start()
    with record.span(record.WAIT, "NVMe read", key, nbytes):
        ...
    recording.stop()

The calls stand where the work is done, and are next to free while nobody records. There is one recording at a time, of
the whole process, as of any profiler. Times are `time.perf_counter_ns()`, which is the clock of the I/O queue, too.

Beside it there is a tally, which keeps no spans: only the nanoseconds that the program has spent in each kind of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Protocol

# What a thread does. The innermost span of a moment says it.
PHASE = "phase"
COMPUTE = "compute"
COPY = "copy"
ENGINE = "engine"
WAIT = "wait"
# What the program does while no span of ours is open: its own loop, the data.
OUTSIDE = "outside"
# Threads whose names begin so run beside the program.
BESIDE = "infinity-"
# Outside, and it is not known yet what comes next.
_OPEN_ENDED = (OUTSIDE, "")


class Span(NamedTuple):
    """A thread did something from `begin` to `end` (ns); `cause` says what, or what it waited for, `subject` with
    what."""

    thread: int
    what: str
    cause: str
    subject: object
    begin: int
    end: int
    nbytes: int


class AsyncSpan(NamedTuple):
    """Something under way in a lane of its own, beside what threads do: a transfer, a module's forward or backward."""

    lane: str
    subject: object
    begin: int
    end: int
    nbytes: int
    # When it was asked for; `begin` where it began at once.
    asked: int
    # Whether it was over when the recording stopped.
    over: bool


class CounterEvent(NamedTuple):
    """Bytes of one kind on one tier from a moment on."""

    at: int
    tier: str
    kind: str
    nbytes: int


class Timed(Protocol):
    """A transfer that knows, once it is done, when its bytes began and ended to move (ns; began 0: never)."""

    def done(self) -> bool: ...

    @property
    def moments(self) -> tuple[int, int]: ...


class Recording:
    """What was recorded from `begin` to `end`. Threads append at any time; lists are read after `stop`."""

    def __init__(self, describe: Callable[[Any], str] = str) -> None:
        self.describe = describe
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
        """End the recording. What is still under way ends with it."""
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
            # One that failed before its first byte never began.
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
    """Nanoseconds of the program, by (what, cause) of its spans. At each moment the innermost counts, so that they add
    up to the time that has passed; what lies outside them is (OUTSIDE, the phase that came next).

    Backward of an accelerator runs on a thread of autograd's while the program waits for it: they count as one.
    """

    def __init__(self) -> None:
        self._spent: dict[tuple[str, str], int] = {}
        self._open: list[_Open] = []
        self._at = time.perf_counter_ns()

    def read(self) -> dict[tuple[str, str], int]:
        """What has been spent so far, up to now. It keeps its names: what lies outside and leads to no phase yet is the
        program's.
        """
        self._until(time.perf_counter_ns())
        self._end_outside("program")
        return dict(self._spent)

    def enter(self, span: _Open, now: int) -> None:
        """A span of the program begins."""
        self._until(now)
        what, cause = span.label
        if what == PHASE and not self._open:
            self._end_outside(cause)
        self._open.append(span)

    def leave(self, span: _Open, now: int) -> None:
        """It ends."""
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
    """The tally of this process, which runs until everybody who has called this has called `stop_tally`."""
    global _tally, _tally_users
    _tally = _tally or TimeAccumulator()
    _tally_users += 1
    return _tally


def stop_tally() -> None:
    """One who has called `start_accumulator` needs it no more."""
    global _tally, _tally_users
    _tally_users -= 1
    if not _tally_users:
        _tally = None


def start_recording(describe: Callable[[Any], str] = str) -> Recording:
    """Begin to record. `describe` names the subjects. RuntimeError while another recording is under way."""
    global _recording
    if _recording is not None:
        raise RuntimeError("a timeline is being recorded already: there is one at a time in a process")
    _recording = Recording(describe)
    return _recording


def active() -> bool:
    """Whether somebody records: for what would cost something to say."""
    return _recording is not None


def span(what: str, cause: str, subject: object = "", nbytes: int = 0) -> _Open | _Nothing:
    """A context manager around what this thread does, or waits for."""
    if _recording is None and _tally is None:
        return _NOTHING
    return _Open(_recording, _tally, what, cause, subject, nbytes)


def begin_async(lane: str, subject: object, nbytes: int = 0) -> None:
    """Something begins that ends elsewhere, with `end_async`."""
    if _recording is not None:
        _recording.begin_async(lane, subject, nbytes)


def end_async(lane: str, subject: object) -> None:
    """What `begin_async` began is over; nothing happens when it was not recorded."""
    if _recording is not None:
        _recording.end_async(lane, subject)


def follow(lane: str, subject: object, nbytes: int, transfer: Timed) -> None:
    """A transfer was submitted that keeps its own times."""
    if _recording is not None:
        _recording.follow(lane, subject, nbytes, transfer)


def level(tier: str, kind: str, nbytes: int) -> None:
    """From now on there are so many bytes of a kind on a tier."""
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
    """What stands in for a span while nobody records."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


_NOTHING = _Nothing()
