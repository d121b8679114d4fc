"""Who works on a store beside the training loop: an optimizer step that goes on behind it, and a save behind both.

A `Snapshot` keeps the values of partitions as they were at one moment until each of them has been saved, without a
copy of them: readers do not notice it; a writer waits for the partitions that it is about to change, and has them saved
next. Of one partition of a snapshot:

| it is     | its bytes are              | the step that had reserved it | other writers            | left by         |
|-----------|----------------------------|-------------------------------|--------------------------|-----------------|
| unsettled | from before or after that  | writes                        | wait                     | release by that |
|           | step, or from in between   |                               |                          | step            |
| kept      | the snapshot's             | (has let go)                  | wait, and make it urgent | saved, end      |
| free      | anybody's                  | writes                        | write                    |                 |

A snapshot so holds the state after every step that had begun. Invariants: (1) what is kept does not change: fetch,
flush and drop move a value and leave it as it is; who changes one holds a writing lease, `discard`s, or has asked with
`await_saved`; (2) the saver waits only for steps that had begun before the snapshot, and holds a lease of one partition
at most, never while it waits; what is not in memory it reads into memory of its own, so that it needs no room in an
arena: whoever waits for a save waits for the drive; (3) who waits for a saver that waits for a step waits for that
step: the store tells that from progress when it looks for parties that wait for each other; (4) there is one snapshot
at a time. The store's lock guards every method here.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from infinity.errors import StateError, of_another_process
from infinity.observability import trace
from infinity.plan.types import Key, Kind


class Reservation:
    """What one optimizer step will change. `error` is set when it failed: whoever waits for the rest raises it.

    [Note: speculation] pending: the step begins before it is known to be wanted. What it writes are pending versions of
    partitions, which it keeps until `commit`. Whoever wants one of them before that does not wait for the step: all of
    them are forgotten, once the sub-group in work is over, and the committed values are there again. The step is told
    so by `commit`, and is taken again from those.
    """

    def __init__(self, *, pending: bool = False) -> None:
        self.pending = pending
        # Whether its versions were forgotten; whether it is at work on one; and those that it is done with.
        self.forgotten = self.working = False
        self.done: set[Key] = set()
        self.error: BaseException | None = None
        # Whether the program has met the error.
        self.seen = False


class Snapshot:
    """The partitions that one save has still to read, in the order in which they will be changed."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._left = dict.fromkeys(keys)
        # Those that the saver has at hand.
        self._saving: set[Key] = set()
        # Whether somebody waits for one of these, and whether somebody waits for all.
        self.hurried = self.rushed = False
        # Those that somebody waits for, the first to ask first.
        self._urgent: dict[Key, None] = {}
        # The steps that may still write: by partition.
        self._unsettled: dict[Key, Reservation] = {}
        # Saved or given up: nobody waits for it any more.
        self.over = False

    def begin(self, reserved: Mapping[Key, Reservation]) -> None:
        """From now on values are kept, after the steps that have begun. `reserved`: all of those."""
        self._unsettled = {key: owner for key, owner in reserved.items() if key in self._left}

    def guards(self, key: Key, by: Party) -> bool:
        """Whether a writer of the partition must wait."""
        kept = key in self._left or key in self._saving
        return kept and (by is None or self._unsettled.get(key) is not by)

    def want(self, keys: Iterable[Key]) -> None:
        """A writer waits for all of `keys`."""
        for key in keys:
            if key in self._left:
                self._urgent[key] = None
            self.hurried = self.hurried or key in self._saving

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for what the saver has not at hand."""
        return self.rushed or bool(self._urgent)

    def next(self) -> Key | None:
        """What to save next; None when nothing is left."""
        return next(iter(self._urgent or self._left), None)

    def owner(self, key: Key) -> Reservation | None:
        """The step that had begun with a partition when the snapshot was taken."""
        return self._unsettled.get(key)

    def check(self) -> None:
        """StateError when nothing is kept any more."""
        if self.over:
            raise StateError("this save was given up")

    def at_hand(self, key: Key) -> None:
        """The saver has begun with it."""
        self._left.pop(key, None)
        self._urgent.pop(key, None)
        self._saving.add(key)

    def saved(self, key: Key) -> None:
        """It may be changed."""
        for places in (self._left, self._urgent, self._unsettled):
            places.pop(key, None)
        self._saving.discard(key)
        self.hurried = self.hurried and bool(self._saving)

    def end(self) -> None:
        """Nothing is kept any more."""
        self.over = True
        for places in (self._left, self._urgent, self._unsettled, self._saving):
            places.clear()


# None is the training loop.
Party = Reservation | Snapshot | None


class _Elsewhere(threading.Condition):
    """Stands in a forked child for the condition of a store, which a thread that is not there may hold for ever."""

    def __init__(self, owner: int) -> None:
        super().__init__()
        self._owner = owner

    def __enter__(self) -> bool:
        raise of_another_process("use partitions", self._owner)


class AccessControl:
    """Which party may lease what, and who waits for whom; the store's part that knows no bytes."""

    def __init__(self) -> None:
        self._process = os.getpid()
        _all.add(self)
        # Guards everything of the store; notified whenever a lease, a transfer, a reservation or a snapshot ends.
        self._changed = threading.Condition(threading.Lock())
        # Leases, and those about to begin: their buffers are nobody else's to give up.
        self._claims: Counter[Key] = Counter()
        # How many claims each party has; a party without claims has no entry, for each step is a party of its own.
        self._holds: Counter[Party] = Counter()
        # Which parties wait for another one, and for which save, when it is that.
        self._stuck: dict[Party, Snapshot | None] = {}
        self._reserved: dict[Key, Reservation] = {}
        self._snapshot: Snapshot | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a forked child, and the store another process's."""
        return isinstance(self._changed, _Elsewhere)

    def check_process(self, verb: str) -> None:
        """StateError in a forked child, which cannot do what `verb` says."""
        if self.is_elsewhere:
            raise of_another_process(verb, self._process)

    def reserve(self, reservation: Reservation, *keys: Key) -> None:
        """Promise partitions to a step that goes on behind the caller. Waits for another reservation that has them."""
        with self._changed:
            self._await_unreserved(keys, reservation)
            self._reserved.update(dict.fromkeys(keys, reservation))

    def release(self, reservation: Reservation, *keys: Key) -> None:
        """The step is done with these partitions."""
        with self._changed:
            self._release(reservation, keys)

    def begin_work(self, reservation: Reservation) -> bool:
        """The step goes on with a sub-group, until `end_work`; False where its versions were forgotten."""
        with self._changed:
            reservation.working = not reservation.forgotten
            return reservation.working

    def end_work(self, reservation: Reservation, *done: Key) -> None:
        """It is over. `done`: partitions that the step needs no more, and lets go of once it is wanted."""
        with self._changed:
            reservation.working = False
            reservation.done.update(done)
            # What is only read is nobody's secret.
            self._release(reservation, [key for key in done if not reservation.pending or key.kind is Kind.GRAD])

    def commit(self, reservation: Reservation) -> bool:
        """The step is wanted as it was begun; False where its versions were forgotten, and nothing is left of it."""
        with self._changed:
            if reservation.forgotten:
                return False
            self._commit([key for key, owner in self._reserved.items() if owner is reservation])
            reservation.pending = False
            self._release(reservation, reservation.done)
            return True

    def forget(self, reservation: Reservation) -> None:
        """The step is not wanted: its partitions have the values of before."""
        with self._changed:
            self._revoke(reservation, None)

    def fail(self, reservation: Reservation, error: BaseException) -> None:
        """The step ended with an error: what it has not released stays closed, and whoever wants it raises `error`."""
        with self._changed:
            reservation.error = error
            self._changed.notify_all()

    def reserved(self, key: Key) -> bool:
        """Whether a lease of the partition would wait for a step."""
        with self._changed:
            return key in self._reserved

    def capture(self, snapshot: Snapshot) -> None:
        """Keep the values of its partitions, as all steps that have begun leave them, until they are saved."""
        with self._changed:
            if self._snapshot is not None:
                raise StateError("cannot take a snapshot: another one is being saved")
            for owner in [owner for owner in set(self._reserved.values()) if owner.pending]:
                self._revoke(owner, None)
            self._snapshot = snapshot
            snapshot.begin(self._reserved)

    def end(self, snapshot: Snapshot) -> None:
        """Everything is saved, or given up: nobody waits any more."""
        with self._changed:
            snapshot.end()
            if self._snapshot is snapshot:
                self._snapshot = None
            self._changed.notify_all()

    def next_to_save(self, snapshot: Snapshot, rest_seconds: float = 0.0) -> Key | None:
        """What to save next, after a rest that ends as soon as somebody waits; None when everything is saved."""
        with self._changed:
            self._changed.wait_for(lambda: snapshot.wanted or snapshot.over, timeout=rest_seconds)
            snapshot.check()
            return snapshot.next()

    def hurried(self, snapshot: Snapshot) -> bool:
        """Whether somebody waits for what the saver has at hand."""
        with self._changed:
            return snapshot.hurried

    def rush(self, snapshot: Snapshot) -> None:
        """Somebody waits until everything is saved."""
        with self._changed:
            snapshot.rushed = True
            self._changed.notify_all()

    def skip_saving(self, snapshot: Snapshot, keys: Iterable[Key]) -> None:
        """These are safe already."""
        with self._changed:
            for key in keys:
                snapshot.saved(key)
            self._changed.notify_all()

    def settled(self, snapshot: Snapshot, key: Key) -> bool:
        """Whether no step that had begun before the snapshot is still to change the partition: then none ever is."""
        with self._changed:
            owner = snapshot.owner(key)
            return owner is None or self._reserved.get(key) is not owner

    def await_saved(self, *keys: Key) -> None:
        """Return when these partitions may be changed: for who changes values of units that are whole in place."""
        with self._changed:
            self._await_saved(keys, None)

    # Everything below runs under the lock; what waits gives it up meanwhile.

    @contextmanager
    def _claimed(self, keys: Sequence[Key], by: Reservation | None, writes: bool = False) -> Iterator[None]:
        with self._changed:
            if writes:
                self._await_saved(keys, by)
            self._await_unreserved(keys, by)
            self._claim(keys, by)
        try:
            yield
        finally:
            with self._changed:
                self._unclaim(keys, by)
                self._changed.notify_all()

    def _claim(self, keys: Sequence[Key], by: Party) -> None:
        self._claims.update(keys)
        self._holds[by] += len(keys)

    def _unclaim(self, keys: Sequence[Key], by: Party) -> None:
        self._claims.subtract(keys)
        self._holds[by] -= len(keys)
        if not self._holds[by]:
            del self._holds[by]

    def _await_unreserved(self, keys: Iterable[Key], by: Reservation | None) -> None:
        for key in keys:
            while (owner := self._reserved.get(key)) is not None and owner is not by:
                if owner.pending:
                    self._revoke(owner, by, key)
                    continue
                if owner.error is not None:
                    owner.seen = True
                    raise owner.error
                self._wait_for_others(by, "optimizer step", key)

    def _revoke(self, reservation: Reservation, by: Reservation | None, wanted: Key | None = None) -> None:
        """See [Note: speculation]."""
        reservation.forgotten = True
        while reservation.working:
            self._wait_for_others(by, "optimizer step", wanted)
        keys = [key for key, owner in self._reserved.items() if owner is reservation]
        self._forget(keys)
        self._release(reservation, keys)

    def _release(self, reservation: Reservation, keys: Iterable[Key]) -> None:
        for key in keys:
            if self._reserved.get(key) is reservation:
                del self._reserved[key]
        self._changed.notify_all()

    def _commit(self, keys: Iterable[Key]) -> None:
        """Pending versions of these partitions are their values."""
        raise NotImplementedError

    def _forget(self, keys: Iterable[Key]) -> None:
        """Pending versions of these partitions are gone."""
        raise NotImplementedError

    def _await_saved(self, keys: Sequence[Key], by: Reservation | None) -> None:
        for key in keys:
            while (snapshot := self._snapshot) is not None and snapshot.guards(key, by):
                snapshot.want(keys)
                self._wait_for_others(by, "checkpoint", key, snapshot)

    def _await_step(self, snapshot: Snapshot, key: Key) -> None:
        while (owner := snapshot.owner(key)) is not None and self._reserved.get(key) is owner:
            if owner.error is not None:
                raise owner.error
            self._wait_for_others(snapshot, "optimizer step", key)
        snapshot.check()

    def _wait_for_others(self, by: Party, cause: str, key: Key | None, saver: Snapshot | None = None) -> None:
        self._stuck[by] = saver
        # Another party that waits for room must see that nobody will make some.
        self._changed.notify_all()
        try:
            with trace.span(trace.WAIT, cause, key):
                self._changed.wait()
        finally:
            del self._stuck[by]

    def _others_are_stuck(self, by: Party) -> bool:
        """Whether every other party with claims waits, and not for one that goes on."""
        return all(self._is_stuck(party) for party in self._holds if party is not by)

    def _is_stuck(self, party: Party) -> bool:
        if party not in self._stuck:
            return False
        saver = self._stuck[party]
        return saver is None or self._is_stuck(saver)

    def _forked(self) -> None:
        """In a child: whatever is asked of this raises StateError."""
        self._changed = _Elsewhere(self._process)

    def _forget_parties(self) -> None:
        self._reserved.clear()
        self._changed.notify_all()


_all: weakref.WeakSet[AccessControl] = weakref.WeakSet()


def _after_fork() -> None:
    for parties in list(_all):
        parties._forked()


os.register_at_fork(after_in_child=_after_fork)
