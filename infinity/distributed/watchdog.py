"""The watchdog: ranks that do not meet raise instead of waiting for ever, and say which rank waits for what.

Ranks that submit different collectives wait for each other without an end ([Note: tags] in `axis_group`). So each rank
numbers and names what it submits (`flight_record`). A thread publishes that twice a second in the job's store, on a
connection of its own. While the rank waits for longer than a moment, the same thread reads the
other ranks' positions and judges them (`judge`). Four things end the wait, the same way on every rank:

    parted    the collective waited for is another one on another rank, or ranks wait for each other in a circle
    failed    a rank that is waited for has raised, has closed its engine, or has ended: its traceback is told
    dead      a rank that is waited for gives no sign of life
    late      `watchdog_seconds` are over: a rank that only computes, or sleeps, is given that long

The first verdict is written to the store and holds for every rank; `JobEnd` acts on it. The training thread itself
only counts: it sends nothing and synchronises no device. At world size 1 there is no watchdog.

Judging asks no store, no clock and no process group. Once the job cannot go on, a rank frees its training thread,
interrupts it, and in the end leaves; where a process ends that has engines open, the other ranks are told before it
goes. Breaking a process group makes every wait in it raise, here and on the ranks that are connected.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.flight_record import (
    BEAT_SECONDS,
    Channels,
    CollectiveLog,
    Position,
    PositionReport,
    Positions,
    Wait,
    advice_for,
    circle,
    held_by,
    missing,
    parted,
    positions_table,
)
from infinity.distributed.thread_stack import where
from infinity.errors import DesyncError
from infinity.log import logger

# A rank without a sign of life for so long is dead: when a connection broke as well, and when nothing else says so. A
# rank that holds Python's lock for long (it unpickles something large) gives none either.
_DEAD_BROKEN_SECONDS, _DEAD_SECONDS = 3.0, 60.0
# After a wait of so long a rank says once what it waits for.
_REMIND_SECONDS = 60.0
# How long before it says where a late rank is, a rank that waits for it begins to ask.
_ASK_SECONDS = 2.0
# A transfer of the late rank has the same limit, and its error says more than that the rank is late.
_GRACE_SECONDS = 1.5
# From a verdict until the program's own code is interrupted.
_INTERRUPT_SECONDS = 1.0
# The same if a rank has only ended: others may be about to raise the same error themselves.
INTERRUPT_ENDED_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why this job cannot go on."""

    text: str
    # The rank that is gone, and what it had submitted by then: what others can still finish. None: no rank goes on.
    rank: int | None = None
    counts: tuple[int, ...] | None = None
    # Seconds until the program's own code is interrupted; None: it is not.
    interrupt_seconds: float | None = _INTERRUPT_SECONDS

    def stops(self, channel: int, number: int) -> bool:
        """Whether a collective can no longer happen."""
        return self.counts is None or number > self.counts[channel]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Diagnosis:
        raw = json.loads(text)
        return cls(**{**raw, "counts": None if raw["counts"] is None else tuple(raw["counts"])})


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from the positions of one moment.

    ask: ranks that should say where they are. reminder: a line for the log, or empty.
    """

    verdict: Diagnosis | None = None
    ask: tuple[int, ...] = ()
    reminder: str = ""


class Judge:
    """Compares positions with those of before. `seconds`: how long a rank may let others wait (watchdog_seconds)."""

    def __init__(self, world: AxisPlace, channels: Channels, seconds: float) -> None:
        self._world = world
        self._channels = channels
        self._seconds = seconds
        # By rank: its latest beat, and when that was first seen here.
        self._seen: dict[int, tuple[int, float]] = {}
        # By rank: its failure and wait, and the beat at which they began.
        self._since: dict[int, tuple[Any, int]] = {}
        self._reminded = False

    def forget(self) -> None:
        """Drop how long ranks have been in one state: positions were not looked at for a while."""
        self._since.clear()

    def judge(self, positions: Positions, wait: Wait | None, *, now: float, connection_lost: bool) -> Judgement:
        """Judge all ranks' positions at `now` (this rank's clock, seconds). `wait`: what this rank waits for."""
        steady = self._steady(positions, now)
        stuck, apart = circle(positions, self._channels), parted(positions, self._channels)
        if apart or (stuck and stuck <= steady):
            first = f"What they did first that is not the same:\n{apart}\n" if apart else ""
            text = f"ranks wait for different things:\n{self._table(positions)}\n{first}{advice_for(self._channels)}"
            return Judgement(Diagnosis(text))
        awaited = list(positions) if wait is None else missing(positions, self._world.index, wait, self._channels)
        for rank in awaited:
            if positions[rank].failure and rank in steady:
                place = self._channels.place(rank)
                return Judgement(Diagnosis(f"rank {place} has raised:\n{positions[rank].failure}", rank=rank))
        limit = min(_DEAD_BROKEN_SECONDS if connection_lost else _DEAD_SECONDS, max(self._seconds, 1.0))
        for rank in awaited:
            silent = now - self._seen[rank][1]
            if silent > limit and rank != self._world.index and (connection_lost or limit < self._seconds):
                return Judgement(
                    Diagnosis(
                        f"rank {self._channels.place(rank)} gives no sign of life for {silent:.0f} s: it was killed "
                        f"or stopped, or its machine is gone; look at its own log. Last seen:\n"
                        f"{self._table(positions)}"
                    )
                )
        return Judgement() if wait is None else self._late(positions, wait, now)

    def _table(self, positions: Positions) -> str:
        return positions_table(positions, self._channels)

    def _steady(self, positions: Positions, now: float) -> set[int]:
        """Ranks that have been in one state over two reports, and so at the moment of the first look at it."""
        for rank, position in positions.items():
            if rank not in self._seen or self._seen[rank][0] != position.beat:
                self._seen[rank] = (position.beat, now)
            state = (position.failure, position.wait)
            if rank not in self._since or self._since[rank][0] != state:
                self._since[rank] = (state, position.beat)
        return {rank for rank, position in positions.items() if position.beat >= self._since[rank][1] + 2}

    def _late(self, positions: Positions, wait: Wait, now: float) -> Judgement:
        late = held_by(positions, self._world.index, wait, self._channels)
        names = ", ".join(map(self._channels.place, late)) or "nobody: the bytes do not arrive"
        waited, reminder = now - wait.began, ""
        near = any(limit - _ASK_SECONDS < waited < limit + _GRACE_SECONDS for limit in (self._seconds, _REMIND_SECONDS))
        if waited > _REMIND_SECONDS and not self._reminded:
            self._reminded = True
            reminder = f"waiting for rank {names} since {waited:.0f} s:\n{self._table(positions)}"
        verdict = None
        if waited >= self._seconds + _GRACE_SECONDS:
            silent = [rank for rank in positions if now - self._seen[rank][1] > _DEAD_BROKEN_SECONDS]
            gone = ", ".join(map(self._channels.place, silent))
            stopped = f"\nNo sign of life from rank {gone}." if silent else ""
            verdict = Diagnosis(
                f"waited {waited:.1f} s for rank {names} (watchdog_seconds is {self._seconds:g}):\n"
                f"{self._table(positions)}"
                f"{stopped}\nRaise watchdog_seconds if a rank may take this long."
            )
        return Judgement(verdict, tuple(late) if near else (), reminder)


# A tag that no collective uses.
_TAG = 0x1F1F


def abort(group: Any) -> None:
    """Break a group for good. Callable from any thread; errors are ignored, because the group is given up anyway."""
    with contextlib.suppress(Exception):
        if dist.get_backend(group) == "gloo":
            _sever_gloo(group)
        else:
            group._get_backend(torch.accelerator.current_accelerator()).abort()


def _sever_gloo(group: Any) -> None:
    """Wait a moment for a message that no rank sends: when that times out, gloo closes all the group's connections."""
    for peer in dist.get_process_group_ranks(group):
        if peer != dist.get_rank():
            try:
                receiving = dist.irecv(torch.empty(1, device="cpu"), src=peer, group=group, tag=_TAG)
                assert receiving is not None
                receiving.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                # Any other error means that the connection to this peer is closed already.
                if "Timed out" in str(error):
                    return


# From the interrupt until a process that even then does not come to Python is ended.
_EXIT_SECONDS = 20.0
# From a verdict until a wait for other ranks than the one that is gone ends.
_FOLLOWING_SECONDS = 10.0
# Real-time signals are free for a program to use; if there are none, the program's own code is not interrupted.
SIGNAL: int | None = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None


class JobEnd:
    """The verdict that ends the job, and what follows on this rank.

    A training thread that waits in a collective is freed by breaking the groups. One that is in the program's own code
    raises at its next verb; if it does not come to one, it is interrupted by a signal, whose handler raises.
    """

    def __init__(self, groups: Sequence[Any], world: AxisPlace, channels: Channels, *, thread_id: int) -> None:
        self.verdict: Diagnosis | None = None
        self._decided_at = 0.0
        self._groups = [group for group in groups if group is not None]
        self._world = world
        self._channels = channels
        self._thread_id = thread_id
        self._raised = self._interrupted = False

    def learn(self, verdict: Diagnosis) -> None:
        """Take the job's verdict."""
        self._decided_at = time.monotonic()
        self.verdict = verdict

    def check(self) -> None:
        """Raise the verdict if it ends the job for every rank."""
        if self.verdict is not None and self.verdict.counts is None:
            raise self._error(self.verdict)

    def check_submit(self, channel: int, number: int) -> None:
        """Raise the verdict if this collective can no longer happen."""
        if self.verdict is None or not self._stops(self.verdict, channel, number):
            return
        if len(set(self._channels.axes)) > 1:
            # Others wait for this rank in groups that the rank of the verdict is not in.
            self.break_groups()
        raise self._error(self.verdict)

    def on_interrupt(self) -> None:
        """Raise the verdict in the main thread: the signal's handler calls this."""
        if self._interrupted and not self._raised and self.verdict is not None:
            raise self._error(self.verdict)

    def error(self) -> DesyncError | None:
        """Return the verdict's error, which the training thread raises now; None without a verdict."""
        return None if self.verdict is None else self._error(self.verdict)

    def act(self, wait: Wait | None, *, leaving: bool) -> None:
        """Do what the verdict asks for now, nothing without one: called again and again by the watchdog's thread.

        wait: what the training thread waits for. leaving: this rank ends anyway, so it is not interrupted.
        """
        verdict = self.verdict
        if verdict is None:
            return
        if wait is not None and self._stops(verdict, wait.group, wait.number, began=wait.began):
            self.break_groups()
        if verdict.interrupt_seconds is None or self._raised or leaving:
            return
        waited = time.monotonic() - self._decided_at
        # The rank whose own error it is may be about to end with it.
        patience = INTERRUPT_ENDED_SECONDS if verdict.rank == self._world.index else verdict.interrupt_seconds
        if waited < patience or self._thread_id != threading.main_thread().ident or SIGNAL is None:
            return
        if not self._interrupted:
            self._interrupted = True
            self.break_groups()
            signal.pthread_kill(self._thread_id, SIGNAL)
        elif waited > patience + _EXIT_SECONDS:
            at = where(self._thread_id)
            place = self._channels.place(self._world.index)
            sys.stderr.write(f"infinity: rank {place} does not come back from {at}: {verdict.text}\n")
            sys.stderr.flush()
            os._exit(1)

    def _stops(self, verdict: Diagnosis, channel: int, number: int, began: float = math.inf) -> bool:
        """Whether a collective of this rank can no longer happen. began: when this rank began to wait for it.

        The rank that is gone is missing from its own groups. The members of another group raise in time, too, if they
        wait for that rank elsewhere: so a wait for them has an end of its own.
        """
        if verdict.rank is None or verdict.rank in self._channels.members(self._world.index, channel):
            return verdict.stops(channel, number)
        return time.monotonic() - max(self._decided_at, began) > _FOLLOWING_SECONDS

    def _error(self, verdict: Diagnosis) -> DesyncError:
        self._raised = True
        return DesyncError(verdict.text)

    def break_groups(self) -> None:
        """Make whatever waits in a group raise, here and on the ranks that are connected; idempotent."""
        groups = self._groups
        self.release()
        for group in groups:
            abort(group)

    def release(self) -> None:
        """Forget the groups, whose threads and connections would stay with this object."""
        self._groups = []


# Ranks above this number report less often.
_BEAT_RANKS = 64
# How long the training thread waits for a verdict when a collective fails, and a process that ends for the others to
# have heard of it.
_VERDICT_SECONDS, _HEARD_SECONDS = 5.0, 2.0
# After which an operation of the store ends with an error.
_STORE_SECONDS = 5.0
# gloo's own limit comes after ours: where it speaks, the watchdog itself could not. It also bounds the time in which
# ranks find each other at the start.
BACKSTOP_SECONDS, BACKSTOP_SECONDS_MIN = 3.0, 30.0


class Watchdog:
    """One rank's watchdog over the process groups of one engine; created by the training thread.

    store: the job's key-value store. world: every rank. groups: torch's process groups, None where this rank is alone.
    channels: those of all ranks. seconds: how long a rank may let others wait.
    """

    def __init__(
        self, store: Any, world: AxisPlace, groups: Sequence[Any], channels: Channels, *, seconds: float
    ) -> None:
        # Reports must not wait behind the program's own use of the store.
        self._store = store.clone() if hasattr(store, "clone") else store
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self.world = world
        self.channels = channels
        thread_id = threading.get_ident()
        self.log = CollectiveLog(len(channels.axes))
        self.end = JobEnd(groups, world, channels, thread_id=thread_id)
        self._report = PositionReport(self._store, self.log, world, thread_id=thread_id)
        self._judge = Judge(world, channels, seconds)
        # A collective has failed, so the connection to some rank may be gone; and whether the store is.
        self._connection_lost = self._store_lost = False
        # What this rank tells the others when it goes.
        self._farewell: Diagnosis | None = None
        # There is a verdict; the others were told; the thread has something to do.
        self._decided, self._told, self._woken = threading.Event(), threading.Event(), threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="infinity-watchdog", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        """This rank's number, and its place on each axis, for messages."""
        return self.channels.place(self.world.index)

    # What the training thread calls.

    def submit(self, channel: int, name: str, nbytes: int) -> int:
        """Note a collective that is about to be submitted; return its number. Raises if it can no longer happen."""
        if self.end.verdict is not None:
            self.end.check_submit(channel, self.log.counts[channel] + 1)
        return self.log.submit(channel, name, nbytes)

    def explain(self, error: BaseException) -> DesyncError:
        """Return why a collective has failed: the verdict, or what is known here if there is none in time."""
        self._connection_lost = True
        self._woken.set()
        ended = self.end.error() if self._decided.wait(_VERDICT_SECONDS) else None
        if ended is None:
            at = self._report.position(connection_lost=True)
            gone = "; the store that rank 0 keeps is gone too: rank 0 has ended" if self._store_lost else ""
            return DesyncError(f"lost another rank while waiting ({error}){gone}:\n  {at.describe(self.place)}")
        return ended

    def failed(self, error: BaseException) -> None:
        """Note that a verb of the engine is about to raise. The other ranks are told unless this rank goes on."""
        if not isinstance(error, DesyncError):
            self.log.fail(error)
            self._woken.set()

    def close(self) -> None:
        """Tell the other ranks that this one goes; idempotent.

        They can finish what it has submitted; a rank that waits for more gets the verdict.
        """
        if self._stop:
            return
        text = f"rank {self.place} has closed its engine"
        if self.log.failure:
            text += f" after an error:\n{self.log.failure}"
        else:
            text += f"; its latest collective was {self.log.latest or 'none'}"
        self._tell(text, interrupt_seconds=None)
        self._stop = True
        self._woken.set()
        self._thread.join(_HEARD_SECONDS)
        if self.log.failure or self._connection_lost or self.end.verdict is not None:
            self.end.break_groups()
        self.end.release()

    # At the end of the process.

    def leave(self, text: str, *, interrupt_seconds: float | None) -> None:
        """Tell the other ranks that the process ends with this engine open."""
        if self.log.failure and not interrupt_seconds:
            text, interrupt_seconds = f"{text} after an error:\n{self.log.failure}", INTERRUPT_ENDED_SECONDS
        self._tell(text, interrupt_seconds)

    def linger(self) -> None:
        """Wait on rank 0 until all ranks have heard the verdict: the store ends with its process."""
        if self.world.index == 0 and not self._store_lost:
            deadline = time.monotonic() + _HEARD_SECONDS
            with contextlib.suppress(RuntimeError):
                while self._store.add("heard", 0) < self.world.size and time.monotonic() < deadline:
                    time.sleep(0.05)

    def stop(self) -> None:
        """End the reports, and whatever still waits in the groups."""
        self._stop = True
        self._woken.set()
        self.end.break_groups()

    def join(self) -> None:
        """Wait for the thread at the end of the process, after `close` or `stop`.

        Python ends a thread that outlives the interpreter where it stands; inside the store's C++ that aborts the
        process.
        """
        self._thread.join(_STORE_SECONDS + _HEARD_SECONDS)

    def _tell(self, text: str, interrupt_seconds: float | None) -> None:
        """Have the thread tell the other ranks, once; wait a moment for it, since the store may not answer."""
        if self._farewell is not None:
            return
        self._farewell = Diagnosis(text, self.world.index, tuple(self.log.counts), interrupt_seconds)
        self._woken.set()
        if self._thread.is_alive() and not self._store_lost:
            self._told.wait(_HEARD_SECONDS)

    # The thread.

    def _run(self) -> None:
        pause = BEAT_SECONDS * max(1.0, self.world.size / _BEAT_RANKS)
        while not self._stop:
            try:
                if not self._store_lost:
                    self._look()
            except Exception as error:
                # The process that keeps it is gone, which only matters to a rank that waits.
                self._store_lost = True
                self._told.set()
                logger.debug("the store does not answer: %s", error)
            self._act()
            self._woken.wait(pause)
            self._woken.clear()

    def _look(self) -> None:
        """Report, listen, and judge the other ranks if this one waits. After a verdict there is nothing more to say."""
        if self.end.verdict is not None:
            self._told.set()
            return
        mine = self._report.publish(connection_lost=self._connection_lost)
        if self._farewell is not None:
            self._declare(self._farewell)
            self._told.set()
        elif self._store.check(["verdict"]):
            self._learn(self._store.get("verdict"))
        waits = mine.wait is not None and mine.waited_seconds > BEAT_SECONDS
        if self.end.verdict is not None or not (waits or self._connection_lost):
            self._judge.forget()
            return
        keys = [f"at/{rank}" for rank in range(self.world.size)]
        if not self._store.check(keys):
            return
        positions = {rank: Position.decode(text) for rank, text in enumerate(self._store.multi_get(keys))}
        found = self._judge.judge(positions, mine.wait, now=time.monotonic(), connection_lost=self._connection_lost)
        for rank in found.ask:
            self._store.add(f"asked/{rank}", 1)
        if found.reminder:
            logger.warning("%s", found.reminder)
        if found.verdict is not None:
            self._declare(found.verdict)

    def _declare(self, verdict: Diagnosis) -> None:
        """Write a verdict to the store, and take the one that is there: the first holds."""
        self._learn(self._store.compare_set("verdict", "", verdict.encode()))

    def _learn(self, text: bytes) -> None:
        if self.end.verdict is None:
            self.end.learn(Diagnosis.decode(text))
            self._store.add("heard", 1)
            self._decided.set()

    def _act(self) -> None:
        """Act on the verdict, or on a lost store, without which there will be none."""
        wait = self.log.wait
        if self.end.verdict is not None:
            self.end.act(wait, leaving=self._farewell is not None)
        elif self._store_lost and wait is not None and time.monotonic() - wait.began > _VERDICT_SECONDS:
            self.end.break_groups()


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
