"""A save that goes on beside the program: one at a time, on a thread of its own.

The program takes a snapshot (see `infinity.memory.transaction`) and goes on; the thread does what a save in the
foreground does, with the same functions. Where a save has all ranks do a part and agree, the thread exchanges notes
instead of collectives, which would need a place among the program's own. Rank 0 publishes the checkpoint only when
every rank has told that its files are on the drive, and the save has succeeded only when rank 0 has told that: a
failure on one rank fails it on all, and no rank's files stay.

An error waits for the program. With one rank the next verb raises it; with several, the end of the next step does, the
same step on every rank (see `pending`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinity.distributed.consistency import Outcome, run_and_agree
from infinity.distributed.groups import ProcessGroups
from infinity.distributed.mailbox import StoreMailbox
from infinity.errors import CheckpointError
from infinity.log import logger
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.transaction import Snapshot

# Runs a named part of a save on every rank, and returns all ranks' values (JSON).
Together = Callable[[str, Callable[[], Any]], list[Any]]
# A save: given how all ranks work together, and the mailbox that says that this one makes progress.
Job = Callable[[Together, StoreMailbox], None]

_UNTOUCHED = "The checkpoints before it are as they were"


class Background:
    """The saves of one engine that go on beside the program. Its methods are called from the training thread."""

    def __init__(self, store: TieredStore, groups: ProcessGroups, device: Device) -> None:
        self._store = store
        self._device = device
        self._groups = groups
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._path = Path()
        self._error: BaseException | None = None
        self._count = 0

    def begin(self, path: Path, snapshot: Snapshot, job: Job) -> None:
        """Take the snapshot now, and run `job`, which saves it at `path`, on the thread. Finish the save before first.

        Every rank must begin the same saves in the same order.
        """
        self.finish()
        self._store.access.capture(snapshot)
        self._snapshot, self._path = snapshot, path
        self._count += 1
        mailbox = self._groups.mailbox(f"save/{self._count}")
        # What the save copies from the device is what the program has queued there so far.
        stream = self._device.program_stream()
        self._thread = threading.Thread(
            target=self._run, args=(mailbox, snapshot, path, job, stream), name="infinity-save"
        )
        # No daemon: a program that ends without close() waits here until its checkpoint is whole.
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether a save has begun and not ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pending(self) -> bool:
        """Whether a save has failed and its error was not raised yet. Another rank may see its own a moment later."""
        return self._error is not None

    def check(self) -> None:
        """Raise the error of a failed save, once. Does not block."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Block until no save goes on; raise its error unless that was raised."""
        if self._thread is not None:
            if self._thread.is_alive():
                logger.info("waiting for the save of %s, which is under way", self._path)
                if (snapshot := self._snapshot) is not None:
                    self._store.access.rush(snapshot)
            # After an interrupt of this join the save is still under way.
            self._thread.join()
            self._thread = None
        self.check()

    def close(self, *, at_once: bool) -> None:
        """As `finish`; at_once: give the save up. Its files go, and the checkpoints before it stay."""
        # Read once: the thread drops it at its end.
        snapshot = self._snapshot
        if at_once and snapshot is not None and self.under_way:
            logger.warning("the save of %s is given up", self._path)
            self._store.access.end(snapshot)
        self.finish()

    def _run(self, mailbox: StoreMailbox, snapshot: Snapshot, path: Path, job: Job, stream: Any) -> None:
        """The thread."""

        def check() -> None:
            self._groups.check()
            if snapshot.over:
                raise CheckpointError(path, "its save was given up", _UNTOUCHED)

        def on_all_ranks(name: str, part: Callable[[], Any]) -> list[Any]:
            def exchange(outcome: Outcome) -> list[Outcome]:
                mailbox.post(name, json.dumps(outcome))
                # After a failure of its own this rank needs no one's value.
                return [] if outcome[0] is not None else [json.loads(text) for text in mailbox.collect(name, check)]

            return run_and_agree(self._groups, part, exchange, path=path, advice=_UNTOUCHED)

        try:
            with self._device.on_stream(stream):
                job(on_all_ranks, mailbox)
        except BaseException as error:
            self._error = error
        finally:
            self._store.access.end(snapshot)
            self._snapshot = None
