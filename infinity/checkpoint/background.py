"""A save that goes on behind the program: one at a time, on a thread of its own.

The program takes a snapshot (see `infinity.memory.access_control`) and goes on; the thread does what a save in the
foreground does, with the same functions. Where that asks all ranks something, the thread asks by notes instead of
collectives, so that nothing of it has a place among the program's own collectives. Only when every rank has said that
its files are on the drive does rank 0 publish the checkpoint, and only when it says so has the save succeeded anywhere:
one rank's failure is everybody's, and nobody's files stay.

An error waits for the program: alone it is raised by the next verb, with other ranks at the end of the next step, which
is the same one everywhere (see `pending`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinity.distributed.hang_detection.mailbox import StoreMailbox
from infinity.distributed.process_groups import ProcessGroups
from infinity.errors import CheckpointError
from infinity.log import logger
from infinity.memory.access_control import Snapshot
from infinity.memory.store import TieredStore

# What a save asks of all ranks: a name, and this rank's part of the work; returns all ranks' values, which are JSON.
Together = Callable[[str, Callable[[], Any]], list[Any]]
# A save: given how all ranks are asked, and what it calls while it works alone.
Job = Callable[[Together, Callable[[], None]], None]


class Background:
    """One engine's."""

    def __init__(self, store: TieredStore, groups: ProcessGroups) -> None:
        self._store = store
        self._groups = groups
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._path = Path()
        self._error: BaseException | None = None
        self._count = 0

    def begin(self, path: Path, snapshot: Snapshot, job: Job) -> None:
        """Take the snapshot now, and run `job` behind the program, which saves it at `path`. Waits for a save before.

        Every rank must begin the same saves in the same order.
        """
        self.finish()
        self._store.access.capture(snapshot)
        self._snapshot, self._path = snapshot, path
        self._count += 1
        board = self._groups.mailbox(f"save/{self._count}")
        self._thread = threading.Thread(target=self._run, args=(board, snapshot, path, job), name="infinity-save")
        # No daemon: a program that ends without close() waits here until its checkpoint is whole.
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether a save has begun and not ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pending(self) -> bool:
        """Whether a save has failed and nobody has been told. Another rank may come to know a moment later."""
        return self._error is not None

    def check(self) -> None:
        """Raise what has gone wrong, once. Does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Return when nothing goes on; raise what went wrong, if it has not been raised."""
        if self._thread is not None:
            if self._thread.is_alive():
                logger.info("waiting for the save of %s, which is under way", self._path)
                if (snapshot := self._snapshot) is not None:
                    self._store.access.rush(snapshot)
            # Who interrupts this finds it under way.
            self._thread.join()
            self._thread = None
        self.check()

    def close(self, *, at_once: bool) -> None:
        """As `finish`; with `at_once` the save is given up: its files go, the checkpoints before it stay."""
        # Read once: the thread forgets it at its end.
        snapshot = self._snapshot
        if at_once and snapshot is not None and self.under_way:
            logger.warning("the save of %s is given up", self._path)
            self._store.access.end(snapshot)
        self.finish()

    def _run(self, board: StoreMailbox, snapshot: Snapshot, path: Path, job: Job) -> None:
        def check() -> None:
            self._groups.check()
            if snapshot.over:
                raise CheckpointError(path, "its save was given up", "The checkpoints before it are as they were")

        def on_all_ranks(name: str, part: Callable[[], Any]) -> list[Any]:
            return _agree(board, name, part, path, check)

        try:
            job(on_all_ranks, board.alive)
        except BaseException as error:
            self._error = error
        finally:
            self._store.access.end(snapshot)
            self._snapshot = None


def _agree(board: StoreMailbox, name: str, part: Callable[[], Any], path: Path, check: Callable[[], None]) -> list[Any]:
    """Do this rank's part and hear of the others'. Where one has failed every rank raises."""
    error: BaseException | None = None
    value: Any = None
    try:
        value = part()
    except BaseException as caught:
        error = caught
    board.post(name, json.dumps([None if error is None else f"{type(error).__name__}: {error}", value]))
    if error is not None:
        raise error
    rows = [json.loads(text) for text in board.collect(name, check)]
    failed = [f"rank {rank} failed with {reason}" for rank, (reason, _) in enumerate(rows) if reason is not None]
    if failed:
        raise CheckpointError(path, "; ".join(failed), "The checkpoints before it are as they were")
    return [value for _, value in rows]
