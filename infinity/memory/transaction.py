"""Which party may change a partition, and which waits: the training loop, optimizer steps in the background, a save.

An optimizer step that goes on beside the training loop holds a `Reservation` of the partitions that it changes; until
it releases one, leases of it by other parties wait.

A `Snapshot` keeps the values of partitions as they were at one moment until a save has written each of them, without
copying them. Readers do not notice it. A writer waits for the partitions that it is about to change, and the save
writes those next. Of one partition of a snapshot:

| it is     | its bytes are               | the step that had reserved it | other writers          | left by          |
|-----------|-----------------------------|-------------------------------|------------------------|------------------|
| unsettled | from before, during or      | writes                        | wait                   | release by that  |
|           | after that step             |                               |                        | step             |
| kept      | the snapshot's              | (has released it)              | wait, and make it next | saved, end       |
| free      | no longer needed            | writes                        | write                  |                  |

So a snapshot holds the state after every step that had begun. Invariants:

1. A kept value does not change. Fetch, flush and drop move it; a party that changes it holds a write lease, calls
   `discard`, or has waited in `await_saved`.
2. The saver waits only for steps that began before the snapshot. It leases one partition at most, and none while it
   waits. A partition that is not in memory it reads into memory of its own, so that it needs no room in an arena and
   a party that waits for a save waits for the drive only.
3. A party that waits for a saver that waits for a step waits for that step. `others_are_stuck` follows that chain to
   tell a deadlock from progress.
4. There is one snapshot at a time.

The store's lock guards every method here. A method whose text says so is called with the lock held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from infinity.base import trace
from infinity.errors import StateError
from infinity.memory.residency import Residency
from infinity.plan.types import Key, Kind


class Reservation:
    """What one optimizer step will change. After a failure `error` is set, and leases of what it still holds raise it.

    [Note: speculation] pending: the step begins before it is known to be wanted. It writes pending versions of
    partitions, which it keeps until `commit`. Another party that wants one of them before that does not wait for the
    step: once the sub-group in work is finished, all pending versions are forgotten and the committed values are back.
    `commit` then returns False, and the step runs again from those values.
    """

    def __init__(self, *, pending: bool = False) -> None:
        self.pending = pending
        # Whether its versions were forgotten, and whether it works on a sub-group now.
        self.forgotten = self.working = False
        # Partitions that it is done with and releases at `commit`.
        self.done: set[Key] = set()
        self.error: BaseException | None = None
        # Whether the error was raised in the training loop.
        self.seen = False

    def begin_work(self) -> bool:
        """Begin with a sub-group; False where the versions were forgotten."""
        self.working = not self.forgotten
        return self.working

    def end_work(self, done: Iterable[Key]) -> None:
        """End the work on a sub-group."""
        self.working = False
        self.done.update(done)

    def forget(self) -> None:
        """Give up the pending versions."""
        self.forgotten = True

    def commit(self) -> None:
        """Keep what was written."""
        self.pending = False

    def fail(self, error: BaseException) -> None:
        """Record why the step ended."""
        self.error = error

    def see(self) -> None:
        """Record that the training loop gets the error."""
        self.seen = True


class Snapshot:
    """The partitions that one save has still to write, in the order in which the next step changes them."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._left = dict.fromkeys(keys)
        # Those that the saver is writing.
        self._saving: set[Key] = set()
        # Whether a writer waits for one of those; whether a party waits for the whole save.
        self.hurried = self.rushed = False
        # Those that writers wait for, in the order of asking.
        self._urgent: dict[Key, None] = {}
        # The steps that may still write, by partition.
        self._unsettled: dict[Key, Reservation] = {}
        # Saved or given up: no party waits any more.
        self.over = False

    def begin(self, reserved: Mapping[Key, Reservation]) -> None:
        """Keep values from now on, after the steps that have begun: `reserved` holds all of those."""
        self._unsettled = {key: owner for key, owner in reserved.items() if key in self._left}

    def guards(self, key: Key, by: Party) -> bool:
        """Whether a writer of the partition must wait."""
        kept = key in self._left or key in self._saving
        return kept and (by is None or self._unsettled.get(key) is not by)

    def want(self, keys: Iterable[Key]) -> None:
        """Record that a writer waits for all of `keys`."""
        for key in keys:
            if key in self._left:
                self._urgent[key] = None
            self.hurried = self.hurried or key in self._saving

    def rush(self) -> None:
        """Record that a party waits for the whole save."""
        self.rushed = True

    @property
    def wanted(self) -> bool:
        """Whether a party waits for a partition that the saver has not begun with."""
        return self.rushed or bool(self._urgent)

    def next(self) -> Key | None:
        """The partition to save next; None when none is left."""
        return next(iter(self._urgent or self._left), None)

    def owner(self, key: Key) -> Reservation | None:
        """The step that had reserved a partition when the snapshot was taken."""
        return self._unsettled.get(key)

    def check(self) -> None:
        """Raise StateError if the save was given up."""
        if self.over:
            raise StateError("this save was given up")

    def at_hand(self, key: Key) -> None:
        """Record that the saver has begun with a partition."""
        self._left.pop(key, None)
        self._urgent.pop(key, None)
        self._saving.add(key)

    def saved(self, key: Key) -> None:
        """Let writers change a partition."""
        for places in (self._left, self._urgent, self._unsettled):
            places.pop(key, None)
        self._saving.discard(key)
        self.hurried = self.hurried and bool(self._saving)

    def end(self) -> None:
        """Keep nothing any more."""
        self.over = True
        for places in (self._left, self._urgent, self._unsettled, self._saving):
            places.clear()


# None is the training loop.
Party = Reservation | Snapshot | None


class AccessControl:
    """The claims, reservations and the snapshot of one store."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._lock = residency.lock
        # Leases, and those about to begin: their buffers are not given up.
        self._claims: Counter[Key] = Counter()
        # How many claims each party has; a party without claims has no entry, for each step is a party of its own.
        self._holds: Counter[Party] = Counter()
        # Which parties wait for another one, and for which save where it is one.
        self._stuck: dict[Party, Snapshot | None] = {}
        self._reserved: dict[Key, Reservation] = {}
        self._snapshot: Snapshot | None = None
        # Whether a record of the latest step is being written: see [Note: records].
        self._recording = False
        # Whether values were changed by the program, and not behind it, since the latest record was begun.
        self.touched = False

    # Optimizer steps.

    def reserve(self, reservation: Reservation, *keys: Key) -> None:
        """Promise partitions to a step in the background; wait while another reservation has them."""
        with self._lock:
            self.wait_unreserved(keys, reservation)
            self._reserved.update(dict.fromkeys(keys, reservation))

    def release(self, reservation: Reservation, *keys: Key) -> None:
        """Return partitions that the step is done with."""
        with self._lock:
            self._release(reservation, keys)

    def begin_work(self, reservation: Reservation) -> bool:
        """Begin with a sub-group, until `end_work`; return False where the step's versions were forgotten."""
        with self._lock:
            return reservation.begin_work()

    def end_work(self, reservation: Reservation, *done: Key) -> None:
        """End the work on a sub-group. done: partitions to release, a pending step's only at its commit."""
        with self._lock:
            reservation.end_work(done)
            # Gradients are only read: other parties may have them before the commit.
            self._release(reservation, [key for key in done if not reservation.pending or key.kind is Kind.GRAD])

    def commit(self, reservation: Reservation) -> bool:
        """Accept a pending step as it was begun; return False where its versions were forgotten."""
        with self._lock:
            if reservation.forgotten:
                return False
            self._residency.commit([key for key, owner in self._reserved.items() if owner is reservation])
            reservation.commit()
            self._release(reservation, reservation.done)
            return True

    def forget(self, reservation: Reservation) -> None:
        """Undo a pending step: its partitions have the values of before."""
        with self._lock:
            self._revoke(reservation, None)

    def fail(self, reservation: Reservation, error: BaseException) -> None:
        """End a step with an error, which later leases of the partitions that it has not released raise."""
        with self._lock:
            reservation.fail(error)
            self._lock.notify_all()

    def reserved(self, key: Key) -> bool:
        """Whether a lease of the partition would wait for a step."""
        with self._lock:
            return key in self._reserved

    def is_others(self, key: Key, by: Reservation | None) -> bool:
        """Whether another step than `by` has reserved the partition. Call it with the lock held."""
        return self._reserved.get(key, by) is not by

    # Saves.

    def capture(self, snapshot: Snapshot) -> None:
        """Keep the values of its partitions, as all steps that have begun leave them, until they are saved."""
        with self._lock:
            if self._snapshot is not None:
                raise StateError("cannot take a snapshot: another one is being saved")
            for owner in [owner for owner in set(self._reserved.values()) if owner.pending]:
                self._revoke(owner, None)
            self._snapshot = snapshot
            snapshot.begin(self._reserved)

    def end(self, snapshot: Snapshot) -> None:
        """End a save that is complete or given up; no party waits for it any more."""
        with self._lock:
            snapshot.end()
            if self._snapshot is snapshot:
                self._snapshot = None
            self._lock.notify_all()

    def next_to_save(self, snapshot: Snapshot, rest_seconds: float = 0.0) -> Key | None:
        """Return what to save next, None when all is saved, after a rest that ends as soon as a party waits."""
        with self._lock:
            self._lock.wait_for(lambda: snapshot.wanted or snapshot.over, timeout=rest_seconds)
            snapshot.check()
            return snapshot.next()

    def hurried(self, snapshot: Snapshot) -> bool:
        """Whether a writer waits for the partition that the saver is writing."""
        with self._lock:
            return snapshot.hurried

    def rush(self, snapshot: Snapshot) -> None:
        """Tell the saver that a party waits until everything is saved."""
        with self._lock:
            snapshot.rush()
            self._lock.notify_all()

    def skip_saving(self, snapshot: Snapshot, keys: Iterable[Key]) -> None:
        """Count partitions as saved that are saved already."""
        with self._lock:
            for key in keys:
                snapshot.saved(key)
            self._lock.notify_all()

    def settled(self, snapshot: Snapshot, key: Key) -> bool:
        """Whether no step from before the snapshot still changes the partition; it then stays settled."""
        with self._lock:
            owner = snapshot.owner(key)
            return owner is None or self._reserved.get(key) is not owner

    def begin_record(self) -> None:
        """Let writers of the program wait until `end_record`: a record is to name the values as they are now, once the
        steps that have begun are over.
        """
        with self._lock:
            self._recording, self.touched = True, False

    def end_record(self) -> None:
        """End what `begin_record` began."""
        with self._lock:
            self._recording = False
            self._lock.notify_all()

    def await_saved(self, *keys: Key) -> None:
        """Wait until partitions may be changed: for callers that change values of units in place, without a lease."""
        with self._lock:
            self.wait_saved(keys, None)

    # Claims. Methods from here on are called with the lock held, but for `claimed`; waiting gives it up.

    @contextmanager
    def claimed(self, keys: Sequence[Key], by: Reservation | None, writes: bool = False) -> Iterator[None]:
        """Claim partitions for the block, once other steps and, for a writer, saves allow it. Takes the lock itself."""
        with self._lock:
            if writes:
                self.wait_saved(keys, by)
            self.wait_unreserved(keys, by)
            self.claim(keys, by)
        try:
            yield
        finally:
            with self._lock:
                self.unclaim(keys, by)

    def claim(self, keys: Sequence[Key], by: Party) -> None:
        """Protect the buffers of partitions until `unclaim`."""
        self._claims.update(keys)
        self._holds[by] += len(keys)

    def unclaim(self, keys: Sequence[Key], by: Party) -> None:
        """End what `claim` began."""
        self._claims.subtract(keys)
        self._holds[by] -= len(keys)
        if not self._holds[by]:
            del self._holds[by]
        self._lock.notify_all()

    def claims(self, key: Key) -> int:
        """How many claims a partition has."""
        return self._claims[key]

    # Waiting.

    def wait_unreserved(self, keys: Iterable[Key], by: Reservation | None) -> None:
        """Wait until no other step has one of the partitions; raise the error of a step that failed."""
        for key in keys:
            while (owner := self._reserved.get(key)) is not None and owner is not by:
                if owner.pending:
                    self._revoke(owner, by, key)
                    continue
                if owner.error is not None:
                    owner.see()
                    raise owner.error
                self.wait_for_others(by, "optimizer step", key)

    def wait_saved(self, keys: Sequence[Key], by: Reservation | None) -> None:
        """Wait until the snapshot lets `by` change the partitions, and the program until a record has their values."""
        saved = next((key for key in keys if key.kind is not Kind.GRAD), None) if by is None else None
        while saved is not None and self._recording:
            self.wait_for_others(by, "record of a step", saved)
        self.touched = self.touched or saved is not None
        for key in keys:
            while (snapshot := self._snapshot) is not None and snapshot.guards(key, by):
                snapshot.want(keys)
                self.wait_for_others(by, "checkpoint", key, snapshot)

    def wait_step(self, snapshot: Snapshot, key: Key) -> None:
        """Make the saver wait for the step that had reserved a partition when the snapshot was taken."""
        while (owner := snapshot.owner(key)) is not None and self._reserved.get(key) is owner:
            if owner.error is not None:
                raise owner.error
            self.wait_for_others(snapshot, "optimizer step", key)
        snapshot.check()

    def wait_for_others(self, by: Party, cause: str, key: Key | None, saver: Snapshot | None = None) -> None:
        """Wait until another party ends something; saver: the save that `by` waits for."""
        self._stuck[by] = saver
        # Another party that waits for room must see that this one makes none.
        self._lock.notify_all()
        try:
            with trace.span(trace.WAIT, cause, key):
                self._lock.wait()
        finally:
            del self._stuck[by]

    def others_are_stuck(self, by: Party) -> bool:
        """Whether every other party with claims waits, and not for one that makes progress."""
        return all(self._is_stuck(party) for party in self._holds if party is not by)

    def clear(self) -> None:
        """Drop all reservations when the store closes."""
        self._reserved.clear()
        self._lock.notify_all()

    def _is_stuck(self, party: Party) -> bool:
        if party not in self._stuck:
            return False
        saver = self._stuck[party]
        return saver is None or self._is_stuck(saver)

    def _revoke(self, reservation: Reservation, by: Reservation | None, wanted: Key | None = None) -> None:
        """See [Note: speculation]."""
        reservation.forget()
        while reservation.working:
            self.wait_for_others(by, "optimizer step", wanted)
        keys = [key for key, owner in self._reserved.items() if owner is reservation]
        self._residency.forget(keys)
        self._release(reservation, keys)

    def _release(self, reservation: Reservation, keys: Iterable[Key]) -> None:
        for key in keys:
            if self._reserved.get(key) is reservation:
                del self._reserved[key]
        self._lock.notify_all()
