"""The watchdog: ranks that do not meet raise instead of waiting for ever, and say which rank waits for what.

Ranks that submit different collectives wait for each other without an end ([Note: tags] in `axis_group`). So each rank
numbers and names what it submits (`collective_log`). A thread publishes that twice a second in the job's store, on a
connection of its own (`position_report`). While the rank waits for longer than a moment, the same thread reads the
other ranks' positions and judges them (`judge`). Four things end the wait, the same way on every rank:

    parted    the collective waited for is another one on another rank, or ranks wait for each other in a circle
    failed    a rank that is waited for has raised, has closed its engine, or has ended: its traceback is told
    dead      a rank that is waited for gives no sign of life
    late      `watchdog_seconds` are over: a rank that only computes, or sleeps, is given that long

The first verdict is written to the store and holds for every rank; `job_end` acts on it. The training thread itself
only counts: it sends nothing and synchronises no device. At world size 1 there is no watchdog.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.hang_detection.channels import Channels
from infinity.distributed.hang_detection.collective_log import CollectiveLog
from infinity.distributed.hang_detection.flight_record import Position
from infinity.distributed.hang_detection.job_end import JobEnd
from infinity.distributed.hang_detection.judge import INTERRUPT_ENDED_SECONDS, Diagnosis, Judge
from infinity.distributed.hang_detection.position_report import BEAT_SECONDS, PositionReport
from infinity.errors import DesyncError
from infinity.log import logger

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
