"""A step that may still be forgotten: what others see of it, and what is left of it."""

from __future__ import annotations

import random
import threading
from unittest.mock import patch

import pytest
import torch

from infinity.errors import TransferError
from infinity.memory.partition import Partition, State
from infinity.memory.transaction import Reservation, Snapshot
from infinity.plan.types import Key, Kind, Tier
from tests.memory.conftest import Bench, MakeBench, param, states
from tests.memory.test_reservation import Party

CPU, NVME = Tier.CPU, Tier.NVME
A, B, C = (Key(Kind.PARAM, index) for index in range(3))
STATES = Key(Kind.STATES, 0)
ALL = (A, B, C, STATES)


# Homes of the first parameter and of the states, and whether the drive is a real one.
PLACES = {"simulated drive": (NVME, False), "drive": (NVME, True), "memory": (CPU, False)}
everywhere = pytest.mark.parametrize("place", PLACES)


def made_of(bench: MakeBench, place: str = "simulated drive", **options: object) -> Bench:
    """Three parameters and one sub-group's states with value 1, on the drive, two of them in CPU memory if wanted."""
    home, real = PLACES[place]
    made = bench([param(0, 1, home), param(1, 2), param(2, 1), states(0, 2, home)], twice=True, real=real, **options)
    for key in ALL:
        made.fill(key, 1)
    made.spill(*ALL)
    return made


def guess(made: Bench, *keys: Key, value: int = 2) -> Reservation:
    """A step that has begun with these, and is done with them."""
    step = Reservation(pending=True)
    made.store.access.reserve(step, *keys)
    for key in keys:
        assert made.store.access.begin_work(step)
        with made.store.write(key, by=step) as (partition,):
            partition.buffer.fill_(value)
        made.store.flush(key)
        made.store.access.end_work(step, key)
    return step


def holds(made: Bench, key: Key, value: int) -> bool:
    return bool((made.content(key) == value).all())


@everywhere
@pytest.mark.parametrize("written", [False, True])
def test_what_is_committed_is_the_value_from_then_on(bench, place, written):
    made = made_of(bench, place)
    step = guess(made, A, B, STATES)
    if written:
        made.store.settle()
        made.store.drop(A, B, STATES)
    assert made.store.access.commit(step)
    assert not any(made.store.access.reserved(key) for key in ALL)
    assert [holds(made, key, value) for key, value in zip(ALL, (2, 2, 1, 2), strict=True)] == [True] * 4
    made.spill(*ALL)
    assert [holds(made, key, value) for key, value in zip(ALL, (2, 2, 1, 2), strict=True)] == [True] * 4
    made.store.check()


@everywhere
@pytest.mark.parametrize("wants", ["read", "write", "prefetch and read", "save", "forget"])
def test_whoever_wants_one_of_its_partitions_has_all_of_it_forgotten(bench, place, wants):
    made = made_of(bench, place)
    step = guess(made, A, B, STATES)
    if wants == "save":
        snapshot = Snapshot(ALL)
        made.store.access.capture(snapshot)
        made.store.access.end(snapshot)
    elif wants == "forget":
        made.store.access.forget(step)
    elif wants == "write":
        with made.store.write(B) as (partition,):
            assert (partition.buffer == 1).all()
    else:
        if wants != "read":
            assert made.store.prefetch(A)
            assert made.store[A].pending
        assert holds(made, A, 1)
    assert not made.store.access.commit(step) and not made.store.access.begin_work(step)
    assert all(holds(made, key, 1) for key in ALL)
    made.store.check()
    # And once more, now with the step as it is wanted.
    assert made.store.access.commit(guess(made, A, B, STATES, value=3))
    assert holds(made, B, 3)


def test_what_it_does_not_change_is_read_beside_it(bench):
    made = made_of(bench)
    step = guess(made, A)
    assert holds(made, C, 1) and made.store.access.commit(step) and holds(made, A, 2)


def test_who_wants_a_partition_waits_for_the_sub_group_in_work_alone(bench):
    made = made_of(bench)
    step = guess(made, A)
    made.store.access.reserve(step, B)
    assert made.store.access.begin_work(step)
    with made.store.write(B, by=step) as (partition,):
        partition.buffer.fill_(7)
        reader = Party(lambda: holds(made, A, 1))
        assert reader.is_waiting()
    made.store.access.end_work(step, B)
    assert reader.result() is True
    assert holds(made, B, 1) and not made.store.access.begin_work(step)


@everywhere
def test_what_goes_on_after_the_commit_is_an_ordinary_step(bench, place):
    made = made_of(bench, place)
    step = guess(made, A)
    made.store.access.reserve(step, A, B)
    assert made.store.access.begin_work(step)
    with made.store.write(A, B, by=step) as partitions:
        assert made.store.access.commit(step)
        for partition in partitions:
            partition.buffer.fill_(3)
    reader = Party(lambda: holds(made, B, 3))
    assert reader.is_waiting()
    made.store.access.end_work(step, A, B)
    assert reader.result() is True
    assert holds(made, A, 3) and not made.store[A].pending
    made.store.check()


def test_a_dirty_value_is_on_the_drive_before_a_guess_replaces_it(bench):
    made = made_of(bench)
    made.fill(A, 5)
    assert made.store[A].state is State.DIRTY
    made.store.access.forget(guess(made, A))
    assert holds(made, A, 5)


def test_a_version_that_cannot_be_written_is_forgotten_like_any_other(bench):
    failing = threading.Event()
    made = made_of(bench, faults=lambda asked: failing.is_set() and asked.is_write)
    failing.set()
    step = guess(made, A)
    with pytest.raises(TransferError):
        made.store.settle()
    failing.clear()
    assert made.store[A].state is State.FAILED
    made.store.access.forget(step)
    assert holds(made, A, 1)
    made.store.check()


@pytest.mark.parametrize("seed", range(40))
def test_random_guesses_leave_what_was_committed(bench, seed):
    """In arenas with room for little more than one partition, over a drive that completes in any order."""
    rng = random.Random(seed)
    made = made_of(bench, param_pages=rng.choice([2, 3, 4]), states_pages=rng.choice([2, 4]), seed=seed)
    values = dict.fromkeys(ALL, 1)
    for turn in range(2, 40):
        keys = rng.sample(ALL, rng.randint(1, 4))
        step = guess(made, *keys, value=turn)
        rest = [key for key in ALL if key not in keys]
        for key in rng.sample(rest, rng.randint(0, len(rest))):
            assert holds(made, key, values[key])
        end = rng.random()
        if end < 0.5:
            assert made.store.access.commit(step)
            values.update(dict.fromkeys(keys, turn))
        elif end < 0.75:
            made.store.access.forget(step)
        else:
            key = rng.choice(keys)
            assert holds(made, key, values[key])
            assert not made.store.access.commit(step)
        made.store.check()
        if rng.random() < 0.3:
            key = rng.choice(ALL)
            made.fill(key, 100 + turn)
            values[key] = 100 + turn
    for key in ALL:
        assert torch.equal(made.content(key), torch.full_like(made.content(key), values[key]))


def test_a_commit_while_old_values_are_copied_leaves_nothing_pending(bench):
    made = made_of(bench, "memory")
    step, buffers = guess(made, B), made.store._buffers
    made.store.access.reserve(step, A, STATES)
    take = buffers.take_old

    def commit_first(partition: Partition) -> torch.Tensor:
        made.store.access.commit(step)
        return take(partition)

    assert made.store.access.begin_work(step)
    with patch.object(buffers, "take_old", commit_first), made.store.write(A, STATES, by=step) as partitions:
        for partition in partitions:
            partition.buffer.fill_(4)
    made.store.access.end_work(step, A, STATES)
    made.store.access.release(step, A, STATES)
    assert not any(made.store[key].pending for key in ALL)
    assert holds(made, A, 4) and holds(made, STATES, 4) and buffers._undo.taken_nbytes == 0
