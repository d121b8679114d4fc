"""How the store makes room in an arena, on a tier that reorders and delays: what goes first, last, and not at all."""

from __future__ import annotations

import threading

from infinity.memory.partition import State
from infinity.memory.transaction import Reservation
from infinity.plan.types import Key, Kind
from tests.memory.conftest import param

A, B, C, D = (Key(Kind.PARAM, index) for index in range(4))


def test_the_partition_used_longest_ago_goes_first(bench):
    made = bench([param(index, 1) for index in range(4)], param_pages=3)
    for key in (A, B, C):
        made.fill(key, 1)
    made.store.settle()
    made.content(A)
    made.content(D)
    assert made.store[B].state is State.SPILLED
    assert made.store[A].state is made.store[C].state is State.RESIDENT


def test_what_was_fetched_ahead_goes_last(bench):
    made = bench([param(index, 1) for index in range(4)], param_pages=2)
    for key in (A, B, C, D):
        made.fill(key, 1)
        made.spill(key)
    assert made.store.prefetch(A)
    # In use later than A was, but not awaited.
    made.fill(B, 2)
    made.store.flush(B)
    made.content(C)
    assert made.store[B].state is State.SPILLED and made.store[A].buffer is not None
    assert made.store.prefetch(D) and not made.store.prefetch(B)
    assert made.store[A].buffer is not None


def test_what_is_there_already_is_kept_for_its_use(bench):
    made = bench([param(index, 1) for index in range(3)], param_pages=2)
    for key in (A, B, C):
        made.fill(key, 1)
        made.spill(key)
    made.content(A)
    made.content(B)
    assert not made.store.prefetch(A, B, C)
    assert made.store[A].buffer is not None and made.store[B].buffer is not None


def test_prefetch_never_waits_and_says_what_did_not_fit(bench):
    made = bench([param(index, 2) for index in range(3)], param_pages=4, polls_max=10_000)
    for key in (A, B, C):
        made.fill(key, 1)
        made.spill(key)
    assert not made.store.prefetch(A, B, C)
    assert [made.store[key].state for key in (A, B, C)] == [State.READING, State.READING, State.SPILLED]
    assert len(made.tier.flying) == 2
    made.store.check()
    assert (made.content(C) == 1).all()


def test_the_largest_is_brought_first_into_the_room_beside_a_lease(bench):
    made = bench([param(index, pages) for index, pages in enumerate((3, 1, 2, 2, 3))], param_pages=6)
    for key in (A, B, C):
        made.fill(key, 1)
    with made.store.read(B), made.store.read(D, Key(Kind.PARAM, 4)):
        made.store.check()


def test_room_is_made_by_writing_back_what_nobody_flushed(bench):
    made = bench([param(index, 2) for index in range(3)], param_pages=2)
    for value, key in enumerate((A, B, C)):
        made.fill(key, value)
    for value, key in enumerate((A, B, C)):
        assert (made.content(key) == value).all()
    made.store.check()


def test_what_is_kept_is_not_flushed_and_goes_last(bench):
    made = bench([param(index, 1) for index in range(4)], param_pages=2)
    made.store.keep(A)
    for key in (B, C):
        made.fill(key, 1)
        made.spill(key)
    made.fill(A, 1)
    made.store.flush(A)
    assert made.store.prefetch(B)
    made.content(C)
    assert made.store[A].state is State.DIRTY and made.store[B].state is State.SPILLED
    # Where there is room for nothing else, it goes.
    with made.store.read(B, C):
        assert made.store[A].state is State.SPILLED
    assert (made.content(A) == 1).all()
    made.store.settle()
    assert made.store[A].state is State.RESIDENT
    made.store.check()


def test_what_is_claimed_while_room_is_made_is_left_alone(bench, monkeypatch):
    made = bench([param(index, 1) for index in range(3)], param_pages=2)
    for value, key in enumerate((A, B, C)):
        made.fill(key, value)
        made.spill(key)
    for value, key in enumerate((A, B)):
        made.fill(key, 10 + value)
    claimed, tried, step = threading.Event(), threading.Event(), Reservation()

    def work() -> None:
        with made.store.read(A, by=step), made.store.write(B, by=step):
            claimed.set()
            tried.wait(10)

    worker = threading.Thread(target=work)
    settle, wait = made.store._residency.settle, made.store.access.wait_for_others

    def settling(partition):
        # As a transfer does, this gives up the lock: the worker takes both while A is written back.
        if partition.key == A and not claimed.is_set():
            worker.start()
            while not claimed.is_set():
                made.store._lock.wait_for(lambda: False, 0.01)
        settle(partition)

    def waiting(*arguments):
        tried.set()
        wait(*arguments)

    monkeypatch.setattr(made.store._residency, "settle", settling)
    monkeypatch.setattr(made.store.access, "wait_for_others", waiting)
    assert (made.content(C) == 2).all()
    worker.join()
    assert claimed.is_set() and tried.is_set()
    assert (made.content(A) == 10).all() and (made.content(B) == 11).all()
    made.store.check()


def test_a_prefetch_whose_oldest_buffer_is_claimed_meanwhile_takes_the_next(bench, monkeypatch):
    made = bench([param(index, 1) for index in range(3)], param_pages=2)
    for key in (A, B, C):
        made.fill(key, 1)
        made.spill(key)
    made.fill(A, 2)
    made.store.flush(A)
    made.content(B)
    while not made.store[A].transfer.done():
        pass
    settle, other = made.store._residency.settle, Reservation()

    def settling(partition):
        # A transfer gives up the lock when it is waited for: another party claims A then.
        settle(partition)
        if partition.key == A:
            made.store.access.claim([A], other)

    monkeypatch.setattr(made.store._residency, "settle", settling)
    assert made.store.prefetch(C)
    assert made.store[A].state is State.RESIDENT and made.store[B].state is State.SPILLED
    with made.store._lock:
        made.store.access.unclaim([A], other)
    made.store.check()


def test_several_partitions_at_once_start_from_an_empty_arena_when_it_is_fragmented(bench):
    small = [param(index, 1) for index in range(4)]
    made = bench([*small, param(4, 2), param(5, 2)], param_pages=4)
    for index in range(6):
        made.fill(Key(Kind.PARAM, index), index)
        made.spill(Key(Kind.PARAM, index))
    for index in range(4):
        made.content(Key(Kind.PARAM, index))
    for index in (0, 2, 3):
        made.store.drop(Key(Kind.PARAM, index))
    # Page 1 is taken: a pair of two pages each only fits when everything, the pair included, is placed anew.
    with made.store.read(Key(Kind.PARAM, 4), Key(Kind.PARAM, 5)) as (first, second):
        assert (first.buffer == 4).all() and (second.buffer == 5).all()
    made.store.check()


def test_a_pair_that_blocks_itself_is_placed_anew(bench):
    # 4 + 3 + 1 pages in 8: with the 1 at page 1, the 4 lands at 2..6 and the 3 has no place until all is moved.
    made = bench([param(0, 4), param(1, 3), param(2, 1), param(3, 1)], param_pages=8)
    for key in (A, B, C, D):
        made.fill(key, 10 + key.index)
        made.spill(key)
    made.content(D)
    made.content(C)
    made.store.drop(D)
    with made.store.write(C) as (partition,):
        partition.buffer.fill_(99)
    with made.store.write(A, B) as (first, second):
        assert (first.buffer == 10).all() and (second.buffer == 11).all()
    assert (made.content(C) == 99).all()
    made.store.check()


def test_what_comes_while_room_is_made_is_not_brought_twice(bench, monkeypatch):
    """The step's thread waits for room for parameters; the program's thread, handing over another sub-group of them,
    fetches them for it meanwhile. Brought a second time they would be zeros, or what only an error stops.
    """
    made = bench([param(index, 1) for index in range(3)], param_pages=2, polls_max=10_000)
    for value, key in enumerate((A, B, C)):
        made.fill(key, value)
        made.spill(key)
    made.fill(A, 10)
    made.content(B)
    step, held = Reservation(), made.store.read(B)
    made.store.access.reserve(step, C)
    held.__enter__()
    settle, fetched = made.store._residency.settle, []

    def program() -> None:
        held.__exit__(None, None, None)
        fetched.append(made.store.prefetch(C, by=step))

    def settling(partition):
        # As a transfer does, this gives up the lock.
        if partition.key == A and not fetched:
            other = threading.Thread(target=program)
            other.start()
            while not fetched:
                made.store._lock.wait_for(lambda: False, 0.01)
            other.join()
        settle(partition)

    monkeypatch.setattr(made.store._residency, "settle", settling)
    with made.store.write(C, by=step) as (partition,):
        assert (partition.buffer == 2).all()
    made.store.access.release(step, C)
    assert fetched == [True]
    made.store.check()
    assert (made.content(A) == 10).all() and (made.content(C) == 2).all()
