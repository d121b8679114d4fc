"""What a rank does once the job cannot go on: free its training thread, interrupt it, and in the end leave."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.hang_detection.abort import abort
from infinity.distributed.hang_detection.channels import Channels
from infinity.distributed.hang_detection.flight_record import Wait
from infinity.distributed.hang_detection.judge import INTERRUPT_ENDED_SECONDS, Diagnosis
from infinity.distributed.hang_detection.thread_stack import where
from infinity.errors import DesyncError

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
