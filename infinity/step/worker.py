"""The thread that works behind the program: it measures gradients and steps sub-groups while the program goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from infinity.base import trace
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.transaction import Reservation


class StepWorker:
    """One thread, started with its first job. Jobs run in the order of `submit`, each under a reservation.

    A job's error reaches the program twice: through the reservation, if the program asks for what the job holds, and
    through `check`, `finish` or `close`. Called from the training thread or, during backward, from autograd's.
    """

    def __init__(self, store: TieredStore, device: Device) -> None:
        # Set if the jobs are to end after the sub-group in work.
        self.stopping = threading.Event()
        self._store = store
        self._device = device
        self._thread = ThreadPoolExecutor(1, "infinity-step")
        # In the order of their ends: one thread runs them.
        self._under_way: deque[tuple[Future[None], Reservation]] = deque()

    @property
    def latest(self) -> Reservation | None:
        """The reservation of the latest job that may still run."""
        return self._under_way[-1][1] if self._under_way else None

    def submit(self, reservation: Reservation, job: Callable[..., None], *arguments: Any) -> None:
        """Run a job behind the program; returns at once. What it queues on the device follows what the program has
        queued there: a new thread's own stream would not be ordered with the program's.
        """
        stream = self._device.program_stream()

        def run() -> None:
            behind = trace.span(trace.ENGINE, "behind the program")
            with self.failing(reservation), behind, self._device.on_stream(stream):
                job(*arguments)

        while self._under_way and self._under_way[0][0].done() and not self._under_way[0][0].exception():
            self._under_way.popleft()
        self._under_way.append((self._thread.submit(run), reservation))

    @contextmanager
    def failing(self, reservation: Reservation) -> Iterator[None]:
        """If the block raises, fail the reservation: readers of what it holds get the error instead of waiting."""
        try:
            yield
        except BaseException as error:
            self._store.access.fail(reservation, error)
            raise

    def finish(self) -> None:
        """Wait for all jobs; raise the first error of one."""
        for future, reservation in self._under_way:
            _raise(future, reservation)
        self._under_way.clear()

    def check(self) -> None:
        """Raise the error of a job that has ended; does not wait."""
        for future, reservation in self._under_way:
            if future.done():
                _raise(future, reservation)

    def close(self, *, at_once: bool) -> None:
        """Finish all jobs (with `at_once`, only the sub-group in work) and end the thread.

        Raises a job's error unless the program has met it before.
        """
        if at_once:
            self.stopping.set()
        self._thread.shutdown(wait=True)
        unseen = [future for future, reservation in self._under_way if not reservation.seen]
        self._under_way.clear()
        for future in unseen:
            future.result()


def _raise(future: Future[None], reservation: Reservation) -> None:
    """Wait for a job; raise its error."""
    try:
        with trace.span(trace.WAIT, "optimizer step"):
            future.result()
    except BaseException:
        reservation.see()
        raise
