"""A snapshot of partitions: what is saved behind the program is what it was, and nobody waits for ever."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from infinity.errors import StateError, TierMemoryError, TransferError
from infinity.memory.partition import State
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.transaction import Reservation, Snapshot
from infinity.plan.types import Key, Kind, Tier
from tests.memory.conftest import Bench, param, states
from tests.memory.test_reservation import Party

A, B, C = (Key(Kind.PARAM, index) for index in range(3))


def saved(made: Bench, snapshot: Snapshot, key: Key) -> torch.Tensor:
    """What the saver of a snapshot reads of one partition, in halves where it lies in its extent."""
    with made.store.saving(snapshot, key) as partition:
        if partition is not None:
            return partition.buffer.clone()
        nbytes = made.store[key].spec.nbytes
        buffer = page_aligned(nbytes)
        half = nbytes // 2 // 4096 * 4096
        for begin, end in ((0, half), (half, nbytes)):
            if begin < end:
                made.store.read_extent(key, begin, buffer[begin:end]).wait()
        return buffer[:nbytes]


def test_readers_are_free_and_a_writer_waits_until_its_partition_is_saved(bench):
    made = bench([param(0, 1), param(1, 1, Tier.CPU)])
    for key in (A, B):
        made.fill(key, 1)
    snapshot = Snapshot([A, B])
    made.store.access.capture(snapshot)
    assert (made.content(A) == 1).all()
    writer = Party(lambda: made.fill(B, 2))
    assert writer.is_waiting()
    # It is asked for before what comes first in order.
    assert snapshot.wanted and made.store.access.next_to_save(snapshot) == B
    assert (saved(made, snapshot, B) == 1).all()
    writer.result()
    assert (made.content(B) == 2).all()
    assert made.store.access.next_to_save(snapshot) == A and (saved(made, snapshot, A) == 1).all()
    assert made.store.access.next_to_save(snapshot) is None
    made.store.access.end(snapshot)
    made.fill(A, 3)
    made.store.check()


def test_a_spilled_value_is_saved_from_its_extent_without_room_in_the_arena(bench):
    made = bench([param(0, 2), param(1, 2)], param_pages=2)
    made.fill(A, 1)
    made.spill(A)
    made.fill(B, 2)
    snapshot = Snapshot([A, B])
    made.store.access.capture(snapshot)
    with made.store.read(B):
        # B has all the room there is.
        assert (saved(made, snapshot, A) == 1).all()
        assert made.store[A].state is State.SPILLED
        assert (saved(made, snapshot, B) == 2).all()
    made.store.access.end(snapshot)
    made.store.check()


def test_what_is_being_fetched_or_flushed_is_saved_as_it_is(bench):
    made = bench([param(0, 1), param(1, 1)], polls_max=1000)
    made.fill(A, 1)
    made.spill(A)
    made.fill(B, 2)
    snapshot = Snapshot([A, B])
    made.store.access.capture(snapshot)
    assert made.store.prefetch(A) and made.store[A].state is State.READING
    assert (saved(made, snapshot, A) == 1).all()
    made.store.flush(B)
    assert made.store[B].state is State.WRITING
    assert (saved(made, snapshot, B) == 2).all()
    made.store.access.end(snapshot)


def test_a_step_that_had_begun_ends_before_its_partitions_are_saved(bench):
    """The snapshot is of the state after the step; the step after that waits for the saver."""
    made = bench([param(0, 1)])
    made.fill(A, 1)
    step, following = Reservation(), Reservation()
    made.store.access.reserve(step, A)
    snapshot = Snapshot([A])
    made.store.access.capture(snapshot)
    saver = Party(lambda: saved(made, snapshot, A))
    assert saver.is_waiting()
    with made.store.write(A, by=step) as (partition,):
        partition.buffer.fill_(2)

    def next_step() -> None:
        made.store.access.reserve(following, A)
        with made.store.write(A, by=following) as (partition,):
            partition.buffer.fill_(3)
        made.store.access.release(following, A)

    other = Party(next_step)
    assert other.is_waiting() and saver.is_waiting()
    made.store.access.release(step, A)
    assert (saver.result() == 2).all()
    other.result()
    made.store.access.end(snapshot)
    assert (made.content(A) == 3).all()


def test_a_save_fails_with_the_step_that_it_waits_for(bench):
    made = bench([param(0, 1)])
    made.fill(A, 1)
    step, snapshot = Reservation(), Snapshot([A])
    made.store.access.reserve(step, A)
    made.store.access.capture(snapshot)
    saver = Party(lambda: saved(made, snapshot, A))
    assert saver.is_waiting()
    made.store.access.fail(step, TransferError("write", path="x", offset=0, nbytes=1, errno=28, reason="full"))
    with pytest.raises(TransferError, match="full"):
        saver.result()
    made.store.access.end(snapshot)


def test_a_save_that_fails_keeps_the_partition_until_it_is_given_up(bench):
    made = bench([param(0, 1)])
    made.fill(A, 1)
    snapshot = Snapshot([A])
    made.store.access.capture(snapshot)
    writer = Party(lambda: made.fill(A, 2))
    with pytest.raises(OSError, match="full"), made.store.saving(snapshot, A):
        raise OSError("full")
    assert writer.is_waiting()
    made.store.access.end(snapshot)
    writer.result()
    with pytest.raises(StateError, match="given up"), made.store.saving(snapshot, A):
        pass
    made.store.check()


def test_there_is_one_snapshot_at_a_time_and_discarding_waits_for_it(bench):
    made = bench([param(0, 1, Tier.CPU)])
    made.fill(A, 1)
    snapshot = Snapshot([A])
    made.store.access.capture(snapshot)
    with pytest.raises(StateError, match="another one"):
        made.store.access.capture(Snapshot([A]))
    other = Party(lambda: made.store.discard(A))
    assert other.is_waiting()
    made.store.access.end(snapshot)
    other.result()
    assert made.store[A].state is State.ABSENT


def test_a_rest_ends_when_somebody_waits(bench):
    made = bench([param(0, 1, Tier.CPU)])
    made.fill(A, 1)
    snapshot = Snapshot([A])
    made.store.access.capture(snapshot)
    saver = Party(lambda: made.store.access.next_to_save(snapshot, 60.0))
    assert saver.is_waiting()
    other = Party(lambda: made.store.access.await_saved(A))
    assert saver.result() == A
    saved(made, snapshot, A)
    other.result()
    made.store.access.end(snapshot)


def test_who_waits_for_the_saver_does_not_count_as_stuck(bench):
    """The loop holds the room and waits for the saver; a step that wants room waits for the loop, and gets it."""
    made = bench([param(0, 2), param(1, 2), param(2, 1, Tier.CPU)], param_pages=2)
    made.fill(B, 7)
    made.spill(B)
    made.fill(A, 1)
    made.fill(C, 3)
    snapshot = Snapshot([C])
    made.store.access.capture(snapshot)

    def loop() -> None:
        with made.store.read(A):
            made.fill(C, 4)

    def step() -> int:
        with made.store.read(B, by=Reservation()) as (partition,):
            return int(partition.buffer[0])

    waits_for_saver = Party(loop)
    assert waits_for_saver.is_waiting()
    waits_for_room = Party(step)
    assert waits_for_room.is_waiting()
    assert (saved(made, snapshot, C) == 3).all()
    waits_for_saver.result()
    assert waits_for_room.result() == 7
    made.store.access.end(snapshot)


def test_who_waits_for_a_saver_that_waits_for_a_step_counts_as_waiting_for_the_step(bench):
    """The loop holds the room and waits for the saver, the saver for the step, the step for room: it is told."""
    made = bench([param(0, 2), param(1, 2)], param_pages=2)
    made.fill(B, 7)
    made.spill(B)
    made.fill(A, 1)
    step, snapshot = Reservation(), Snapshot([B])
    made.store.access.reserve(step, B)
    made.store.access.capture(snapshot)

    def loop() -> None:
        with made.store.read(A):
            made.store.access.await_saved(B)

    waiting = [Party(loop), Party(lambda: saved(made, snapshot, B))]
    assert all(party.is_waiting() for party in waiting)
    with pytest.raises(TierMemoryError, match="no room") as caught, made.store.write(B, by=step):
        pass
    made.store.access.fail(step, caught.value)
    with pytest.raises(TierMemoryError, match="no room"):
        waiting[1].result()
    made.store.access.end(snapshot)
    waiting[0].result()
    made.store.check()


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_equals_a_copy_whatever_steps_do_meanwhile(bench, seed):
    """A saver, a step behind the program and the program itself, on arenas with room for two sub-groups."""
    chance = random.Random(seed)
    specs = [states(index, 2) for index in range(4)] + [param(index, 1) for index in range(2)] + [param(2, 1, Tier.CPU)]
    made = bench(specs, param_pages=2, states_pages=4, seed=seed, polls_max=6)
    keys = [spec.key for spec in made.specs]
    for value, key in enumerate(keys):
        made.fill(key, value)
    for turn in range(3):
        expected = {key: made.content(key) for key in keys}
        snapshot = Snapshot(chance.sample(keys, len(keys)))
        made.store.access.capture(snapshot)
        found: dict[Key, torch.Tensor] = {}

        def save(snapshot: Snapshot = snapshot, found: dict[Key, torch.Tensor] = found) -> None:
            while (key := made.store.access.next_to_save(snapshot, 0.001)) is not None:
                found[key] = saved(made, snapshot, key)
            made.store.access.end(snapshot)

        saver, step = threading.Thread(target=save), Reservation()
        saver.start()
        behind = chance.sample(keys[:4], 3)
        made.store.access.reserve(step, *behind)

        def sweep(step: Reservation = step, behind: list[Key] = behind, turn: int = turn) -> None:
            for key in behind:
                with made.store.write(key, by=step) as (partition,):
                    partition.buffer.add_(turn + 1)
                made.store.flush(key)
                made.store.access.release(step, key)

        other = Party(sweep)
        for key in chance.choices(keys, k=6):
            made.content(key)
            with made.store.write(key) as (partition,):
                partition.buffer.add_(1)
            made.store.flush(key)
        other.result()
        saver.join(10)
        assert not saver.is_alive()
        assert found.keys() == expected.keys()
        for key in keys:
            assert torch.equal(found[key], expected[key]), f"turn {turn}: {key}"
        made.store.check()
