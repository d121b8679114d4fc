"""The watchdog: ranks that do not meet raise instead of waiting for ever, and say who waits for what.

Ranks that submit different collectives wait for each other without an end ([Note: tags] in `axis_group`). So each rank
numbers and names what it submits ([Note: positions] in `flight_record`), and a thread reports that number twice a
second to the job's store, on a connection of its own. While the rank waits longer than a moment, the same thread looks
where the others are. Four things end the wait, the same way on every rank:

    parted    the collective waited for is another one on another rank, or ranks wait for each other in a circle
    failed    a rank that is waited for has raised, has closed its engine, or has ended: its traceback is told
    dead      a rank that is waited for gives no sign of life
    late      `watchdog_seconds` are over: a rank that only computes, or sleeps, is given that long

The first verdict goes into the store and holds for all. A rank that waits in a collective is freed by breaking the
groups; one that is in the program's own code raises at its next verb, and one that does not come to it is interrupted
by a signal. The training thread itself only counts: nothing is sent, nothing synchronises a device, and at world size
1 there is no watchdog at all.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

from infinity.distributed.hang_detection.abort import abort
from infinity.distributed.hang_detection.flight_record import (
    ADVICE,
    NAMES_MAX,
    Position,
    Wait,
    circle,
    missing,
    parted,
    positions_table,
)
from infinity.distributed.hang_detection.thread_stack import where
from infinity.errors import DesyncError
from infinity.log import logger

# Between two reports of a rank; a job of many ranks reports less often.
_BEAT_SECONDS = 0.5
_BEAT_RANKS = 64
# Without a sign of life for so long, a rank is dead: when a connection broke as well, and when nothing else says so. A
# rank that holds Python's lock for long (it unpickles something large) gives none either.
_DEAD_BROKEN_SECONDS, _DEAD_SECONDS = 3.0, 60.0
# After a wait of so long, rank 0 says once what it waits for.
_REMIND_SECONDS = 60.0
# How long the training thread waits for a verdict when a collective fails, and a process that ends for the others to
# have heard of it.
_VERDICT_SECONDS, _HEARD_SECONDS = 5.0, 2.0
# From a verdict until the program's own code is interrupted, and until a process that even then does not come to Python
# is ended.
_INTERRUPT_SECONDS, _EXIT_SECONDS = 1.0, 20.0
# Of a rank that has only ended: others may be about to raise the same error themselves.
_INTERRUPT_ENDED_SECONDS = 10.0
# How long before it tells where a late rank is, a rank that waits for it begins to ask.
_ASK_SECONDS = 2.0
# A transfer of the late rank has the same limit, and its error says more than that the rank is late.
_GRACE_SECONDS = 1.5
# gloo's own limit comes after ours: where it speaks, the watchdog itself could not. It also bounds the time in which
# ranks find each other at the start.
BACKSTOP_SECONDS, BACKSTOP_SECONDS_MIN = 3.0, 30.0
_HISTORY_MAX = 4096
# Real-time signals are nobody else's; where there are none, the program's own code is not interrupted.
_SIGNAL: int | None = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why this job cannot go on."""

    text: str
    # The rank that is gone, and what it had submitted by then: what others can still finish. None: nobody goes on.
    rank: int | None = None
    counts: tuple[int, ...] | None = None
    # Seconds until the program's own code is interrupted; None: it is not.
    interrupt_seconds: float | None = _INTERRUPT_SECONDS

    def stops(self, group: int, number: int) -> bool:
        """Whether a collective can no longer happen."""
        return self.counts is None or number > self.counts[group]


class Watchdog:
    """One rank's watchdog over the process groups of one engine. See the module's text."""

    def __init__(self, store: Any, groups: Sequence[Any], *, rank: int, world_size: int, seconds: float) -> None:
        # Reports must not wait behind the program's own use of the store.
        self._store = store.clone() if hasattr(store, "clone") else store
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.set_timeout(timedelta(seconds=5))
        self._groups = list(groups)
        self._rank, self._world_size, self._seconds = rank, world_size, seconds
        self._counts = [0] * len(groups)
        # What this rank had submitted and waited for when it was last looked where it is, and where that was; how often
        # others have asked.
        self._place: tuple[tuple[tuple[int, ...], Wait | None], str] = ((), None), ""
        self._asked = 0
        self._digests = [0] * len(groups)
        self._names: list[deque[tuple[int, str]]] = [deque(maxlen=_HISTORY_MAX) for _ in groups]
        self._latest = ""
        self.wait: Wait | None = None
        self._failure = ""
        self._beat = 0
        self._thread_id = threading.get_ident()
        self._verdict: Diagnosis | None = None
        self._verdict_at = 0.0
        self._raised = self._broken = self._interrupted = self._reminded = False
        # A collective has failed: the connection to some rank may be gone. And whether the store is.
        self._connection_lost = self._store_lost = False
        # Beat of each rank, and when it was first seen; failures and waits of ranks, and the beat at which they began.
        self._seen: dict[int, tuple[int, float]] = {}
        self._since: dict[int, tuple[Any, int]] = {}
        self._ending: Diagnosis | None = None
        self._decided, self._told, self._woken = threading.Event(), threading.Event(), threading.Event()
        self._stop = False
        _guard(self)
        self._thread = threading.Thread(target=self._run, name="infinity-watchdog", daemon=True)
        self._thread.start()

    # What the training thread calls.

    def submit(self, group: int, name: str, nbytes: int) -> int:
        """A collective is about to be submitted; returns its number in its group. Raises where it cannot happen."""
        number = self._counts[group] + 1
        verdict = self._verdict
        if verdict is not None and verdict.stops(group, number):
            raise self._error(verdict)
        self._counts[group] = number
        said = f"{name}, {nbytes} bytes"
        self._digests[group] = zlib.crc32(said.encode(), self._digests[group])
        self._names[group].append((number, said))
        self._latest = name
        self._failure = ""
        return number

    def explain(self, error: BaseException) -> BaseException:
        """A collective has failed: the verdict that is the reason, or what is known here."""
        self._connection_lost = True
        self._woken.set()
        if not self._decided.wait(_VERDICT_SECONDS) or self._verdict is None:
            at = self._position()
            gone = "; the store that rank 0 keeps is gone too: rank 0 has ended" if self._store_lost else ""
            return DesyncError(f"lost another rank while waiting ({error}){gone}:\n  {at.describe()}")
        return self._error(self._verdict)

    def check(self) -> None:
        """Raise the verdict that ends the job for everybody, if there is one."""
        verdict = self._verdict
        if verdict is not None and verdict.counts is None:
            raise self._error(verdict)

    def failed(self, error: BaseException) -> None:
        """A verb of the engine is about to raise. The rank may catch it and go on: others are told if it does not."""
        if not isinstance(error, DesyncError):
            self._failure = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._woken.set()

    def digests(self) -> list[float]:
        """What has been submitted so far, in a number for each group: the same on every rank that did the same."""
        return [float(digest) for digest in self._digests]

    def histories(self) -> list[dict[int, str]]:
        """Of each group the latest collectives: number and name."""
        return [dict(names) for names in self._names]

    def close(self) -> None:
        """This rank goes. What others have in common with it they can finish; who waits for more is told."""
        if self._stop:
            return
        if self._failure:
            text = f"rank {self._rank} has closed its engine after an error:\n{self._failure}"
        else:
            text = f"rank {self._rank} has closed its engine; its latest collective was {self._latest or 'none'}"
        self._tell_end(text, interrupt_seconds=None)
        self._stop = True
        self._woken.set()
        self._thread.join(_HEARD_SECONDS)
        if self._failure or self._connection_lost or self._verdict is not None:
            self._break_groups()
        _live.discard(self)
        if self._rank == 0:
            _farewells[:] = [self]

    # At the end of the process.

    def ends(self, text: str, *, interrupt_seconds: float | None) -> None:
        """The process ends with this engine open."""
        if self._failure and not interrupt_seconds:
            text, interrupt_seconds = f"{text} after an error:\n{self._failure}", _INTERRUPT_ENDED_SECONDS
        self._tell_end(text, interrupt_seconds)

    def linger(self) -> None:
        """The store lives as long as rank 0's process, so that one waits until all have heard that it ends."""
        if self._rank == 0 and not self._store_lost:
            deadline = time.monotonic() + _HEARD_SECONDS
            with contextlib.suppress(RuntimeError):
                while self._store.add("heard", 0) < self._world_size and time.monotonic() < deadline:
                    time.sleep(0.05)

    def stop(self) -> None:
        """No more reports; nobody waits in these groups any more."""
        self._stop = True
        self._break_groups()

    def raise_verdict(self) -> None:
        """Called by the signal's handler, in the main thread."""
        if self._interrupted and not self._raised and self._verdict is not None:
            raise self._error(self._verdict)

    # The thread.

    def _run(self) -> None:
        pause = _BEAT_SECONDS * max(1.0, self._world_size / _BEAT_RANKS)
        while not self._stop:
            try:
                if not self._store_lost:
                    self._look()
            except Exception as error:
                # Its keeper is gone, which only matters to somebody who waits.
                self._store_lost = True
                self._told.set()
                logger.debug("the store does not answer: %s", error)
            self._act()
            self._woken.wait(pause)
            self._woken.clear()

    def _look(self) -> None:
        """Report, listen, and when this rank waits look at the others. After a verdict there is nothing more to say."""
        if self._verdict is not None:
            self._told.set()
            return
        self._beat += 1
        mine = self._position(self._is_asked())
        self._store.set(f"at/{self._rank}", mine.encode())
        if self._ending is not None:
            self._declare(self._ending)
            self._told.set()
        elif self._store.check(["verdict"]):
            self._learn(self._store.get("verdict"))
        waits = mine.wait is not None and mine.waited_seconds > _BEAT_SECONDS
        if self._verdict is not None or not (waits or self._connection_lost):
            self._since.clear()
            return
        keys = [f"at/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            return
        positions = {rank: Position.decode(text) for rank, text in enumerate(self._store.multi_get(keys))}
        verdict = self._judge(positions, mine.wait)
        if verdict is not None:
            self._declare(verdict)

    def _judge(self, positions: dict[int, Position], wait: Wait | None) -> Diagnosis | None:
        now = time.monotonic()
        for rank, position in positions.items():
            if rank not in self._seen or self._seen[rank][0] != position.beat:
                self._seen[rank] = (position.beat, now)
            state = (position.failure, position.wait)
            if rank not in self._since or self._since[rank][0] != state:
                self._since[rank] = (state, position.beat)
        # True of a rank that has been in one state over two reports, and so at the moment of the first look at it.
        steady = {rank for rank, position in positions.items() if position.beat >= self._since[rank][1] + 2}
        stuck, apart = circle(positions), parted(positions)
        if apart or (stuck and stuck <= steady):
            first = f"What they did first that is not the same:\n{apart}\n" if apart else ""
            return Diagnosis(f"ranks wait for different things:\n{positions_table(positions)}\n{first}{ADVICE}")
        awaited = list(positions) if wait is None else missing(positions, wait)
        for rank in awaited:
            if positions[rank].failure and rank in steady:
                return Diagnosis(f"rank {rank} has raised:\n{positions[rank].failure}", rank=rank)
        limit = min(_DEAD_BROKEN_SECONDS if self._connection_lost else _DEAD_SECONDS, max(self._seconds, 1.0))
        for rank in awaited:
            silent = now - self._seen[rank][1]
            if silent > limit and rank != self._rank and (self._connection_lost or limit < self._seconds):
                return Diagnosis(
                    f"rank {rank} gives no sign of life for {silent:.0f} s: it was killed or stopped, or its machine "
                    f"is gone; look at its own log. Last seen:\n{positions_table(positions)}"
                )
        return self._late(positions, wait, now)

    def _late(self, positions: dict[int, Position], wait: Wait | None, now: float) -> Diagnosis | None:
        if wait is None:
            return None
        late = missing(positions, wait)
        names = ", ".join(map(str, late)) or "nobody: the bytes do not arrive"
        waited = now - wait.began
        if any(limit - _ASK_SECONDS < waited < limit + _GRACE_SECONDS for limit in (self._seconds, _REMIND_SECONDS)):
            for rank in late:
                self._store.add(f"asked/{rank}", 1)
        if waited > _REMIND_SECONDS and not self._reminded:
            self._reminded = True
            logger.warning("waiting for rank %s since %.0f s:\n%s", names, waited, positions_table(positions))
        if waited < self._seconds + _GRACE_SECONDS:
            return None
        silent = [rank for rank in positions if now - self._seen[rank][1] > _DEAD_BROKEN_SECONDS]
        stopped = f"\nNo sign of life from rank {', '.join(map(str, silent))}." if silent else ""
        return Diagnosis(
            f"waited {waited:.1f} s for rank {names} (watchdog_seconds is {self._seconds:g}):\n"
            f"{positions_table(positions)}"
            f"{stopped}\nRaise watchdog_seconds if a rank may take this long."
        )

    def _declare(self, verdict: Diagnosis) -> None:
        """The first verdict holds."""
        self._learn(self._store.compare_set("verdict", "", json.dumps(asdict(verdict))))

    def _learn(self, text: bytes) -> None:
        if self._verdict is not None:
            return
        raw = json.loads(text)
        counts = None if raw["counts"] is None else tuple(raw["counts"])
        self._verdict_at = time.monotonic()
        self._verdict = Diagnosis(**{**raw, "counts": counts})
        self._store.add("heard", 1)
        self._decided.set()

    def _act(self) -> None:
        """What a verdict asks for: free the training thread where it waits in vain, interrupt it where it does not."""
        wait, verdict = self.wait, self._verdict
        if verdict is None:
            if self._store_lost and wait is not None and time.monotonic() - wait.began > _VERDICT_SECONDS:
                self._break_groups()
            return
        if wait is not None and verdict.stops(wait.group, wait.number):
            self._break_groups()
        if verdict.interrupt_seconds is None or self._raised or self._ending is not None:
            return
        waited = time.monotonic() - self._verdict_at
        # The rank whose own error it is may be about to end with it.
        patience = _INTERRUPT_ENDED_SECONDS if verdict.rank == self._rank else verdict.interrupt_seconds
        if waited < patience or self._thread_id != threading.main_thread().ident or _SIGNAL is None:
            return
        if not self._interrupted:
            self._interrupted = True
            self._break_groups()
            signal.pthread_kill(self._thread_id, _SIGNAL)
        elif waited > patience + _EXIT_SECONDS:
            at = where(self._thread_id)
            sys.stderr.write(f"infinity: rank {self._rank} does not come back from {at}: {verdict.text}\n")
            sys.stderr.flush()
            os._exit(1)

    def _position(self, asked: bool = False) -> Position:
        wait = self.wait
        waited = time.monotonic() - wait.began if wait is not None else 0.0
        shown = waited > _BEAT_SECONDS or self._connection_lost
        names = tuple(tuple(names.copy())[-NAMES_MAX:] for names in self._names) if shown else ()
        return Position(
            rank=self._rank, beat=self._beat, counts=tuple(self._counts), wait=wait, waited_seconds=waited,
            names=names, latest=self._latest, where=self._whereabouts(wait, shown, asked), failure=self._failure,
        )  # fmt: skip

    def _is_asked(self) -> bool:
        """Whether others have asked where this rank is since the last report."""
        before, self._asked = self._asked, int(self._store.add(f"asked/{self._rank}", 0))
        return self._asked > before

    def _whereabouts(self, wait: Wait | None, wanted: bool, asked: bool) -> str:
        """Where the training thread is in the program's own code, once there is reason to look."""
        state = tuple(self._counts), wait
        known = self._place[1] if self._place[0] == state else ""
        if asked or (wanted and not known):
            known = where(self._thread_id)
        self._place = state, known
        return known

    def _error(self, verdict: Diagnosis) -> DesyncError:
        self._raised = True
        return DesyncError(verdict.text)

    def _tell_end(self, text: str, interrupt_seconds: float | None) -> None:
        """Have the thread tell, once, because the store may not answer."""
        if self._ending is not None:
            return
        self._ending = Diagnosis(text, self._rank, tuple(self._counts), interrupt_seconds)
        self._woken.set()
        if self._thread.is_alive() and not self._store_lost:
            self._told.wait(_HEARD_SECONDS)

    def _break_groups(self) -> None:
        """Make whatever waits in a group raise, here and on the ranks that are connected."""
        if self._broken:
            return
        self._broken = True
        for group in self._groups:
            abort(group)


# Watchdogs of engines that are open in this process.
_live: weakref.WeakSet[Watchdog] = weakref.WeakSet()
# The latest one that was closed, where this process keeps the store.
_farewells: list[Watchdog] = []
_guarded = threading.Event()


def _guard(watchdog: Watchdog) -> None:
    """See to it that others hear of this process's end."""
    _live.add(watchdog)
    main = threading.current_thread() is threading.main_thread()
    if main and _SIGNAL is not None and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
        signal.signal(_SIGNAL, _on_signal)
    if _guarded.is_set():
        return
    _guarded.set()
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        for open_watchdog in list(_live):
            open_watchdog.ends(
                f"rank {open_watchdog._rank} has ended with an exception:\n{text}",
                interrupt_seconds=_INTERRUPT_ENDED_SECONDS,
            )
        before(kind, error, trace)

    sys.excepthook = tell
    atexit.register(leave)


def leave() -> None:
    """The process ends: tell the other ranks of engines that are still open, and wait until they have heard."""
    for watchdog in list(_live):
        latest = f"its latest collective was {watchdog._latest or 'none'}"
        watchdog.ends(
            f"rank {watchdog._rank}'s process has ended with its engine open; {latest}", interrupt_seconds=None
        )
    for watchdog in [*_live, *_farewells]:
        watchdog.linger()
    for watchdog in list(_live):
        watchdog.stop()
    _live.clear()
    _farewells.clear()


def _on_signal(_: int, __: FrameType | None) -> None:
    for watchdog in list(_live):
        watchdog.raise_verdict()


def _after_fork() -> None:
    # A forked child is no rank: how it ends is no other rank's business. It keeps the latest watchdog to its end, whose
    # connections' destructors wait for threads of the parent, or fail without them.
    for watchdog in _farewells:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(watchdog))
    _live.clear()
    _farewells.clear()


os.register_at_fork(after_in_child=_after_fork)
