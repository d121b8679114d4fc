"""Values that are zero from some byte on: what is behind is neither written nor read, and is zero for everybody."""

from __future__ import annotations

import pytest
import torch

from infinity.memory.partition import State
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.transaction import Reservation, Snapshot
from infinity.plan.types import Key, Kind, Tier
from tests.memory.conftest import PAGE, Bench, param, states

STATES, OTHER = Key(Kind.STATES, 0), Key(Kind.STATES, 1)
PAGES = 4


def made_of(bench, prefix: int, *, home: Tier = Tier.NVME, **options: object) -> Bench:
    """States whose first `prefix` bytes are 7, as a model that is taken in leaves them."""
    made = bench([states(0, PAGES, home), states(1, PAGES), param(0, 1)], states_pages=2 * PAGES, **options)
    # What lay there before.
    made.fill(OTHER, 9)
    made.store.discard(OTHER)
    with made.store.write(STATES, fresh=True, prefix_nbytes=prefix) as (partition,):
        partition.buffer[:prefix].fill_(7)
    return made


def expected(prefix: int) -> torch.Tensor:
    value = torch.zeros(PAGES * PAGE, dtype=torch.uint8)
    value[:prefix] = 7
    return value


def moved(made: Bench, *, writes: bool) -> int:
    return sum(asked.extent.nbytes for asked in made.tier.requests if asked.is_write is writes)


@pytest.mark.parametrize("prefix", [0, 100, PAGE, 2 * PAGE + 1, PAGES * PAGE])
@pytest.mark.parametrize("real", [False, True])
def test_only_the_prefix_moves(bench, prefix, real):
    made = made_of(bench, prefix, real=real)
    made.spill(STATES)
    assert made.store[STATES].state is State.SPILLED
    # The arena's bytes are another's now.
    made.fill(OTHER, 9)
    assert torch.equal(made.content(STATES), expected(prefix))
    if not real:
        pages = -(-prefix // PAGE) * PAGE
        assert (moved(made, writes=True), moved(made, writes=False)) == (pages, pages)
    made.store.check()
    # What is written then counts as a whole.
    with made.store.write(STATES) as (partition,):
        assert torch.equal(partition.buffer, expected(prefix))
        partition.buffer.fill_(3)
    made.spill(STATES)
    made.fill(OTHER, 9)
    assert (made.content(STATES) == 3).all()


def test_a_home_in_memory_has_its_zeros_at_once(bench):
    made = made_of(bench, 100, home=Tier.CPU)
    assert torch.equal(made.content(STATES)[: PAGES * PAGE], expected(100)[: made.content(STATES).numel()])


def test_it_is_whole_for_a_reader_before_it_was_written(bench):
    made = made_of(bench, PAGE)
    assert torch.equal(made.content(STATES), expected(PAGE))


@pytest.mark.parametrize("begin", [0, PAGE, 3 * PAGE])
def test_a_save_reads_what_the_drive_has_from_there_on_and_zeros_behind_it(bench, begin):
    made = made_of(bench, 2 * PAGE)
    with made.store.write(STATES) as (partition,):
        partition.buffer[PAGE : 2 * PAGE] = 6
    made.spill(STATES)
    snapshot = Snapshot([STATES])
    made.store.access.capture(snapshot)
    with made.store.saving(snapshot, STATES) as lent:
        assert lent is None
        room = page_aligned(PAGE).fill_(5)
        made.store.read_extent(STATES, begin, room).wait()
    made.store.access.end(snapshot)
    whole = expected(2 * PAGE)
    whole[PAGE : 2 * PAGE] = 6
    assert torch.equal(room, whole[begin : begin + PAGE])


def test_a_save_of_what_is_in_memory_has_the_zeros(bench):
    made = made_of(bench, PAGE)
    snapshot = Snapshot([STATES])
    made.store.access.capture(snapshot)
    with made.store.saving(snapshot, STATES) as lent:
        assert torch.equal(lent.buffer, expected(PAGE))
    made.store.access.end(snapshot)


def test_a_step_that_is_forgotten_leaves_the_zeros(bench):
    made = made_of(bench, PAGE, twice=True)
    made.spill(STATES)
    step = Reservation(pending=True)
    made.store.access.reserve(step, STATES)
    assert made.store.access.begin_work(step)
    with made.store.write(STATES, by=step) as (partition,):
        assert torch.equal(partition.buffer, expected(PAGE))
        partition.buffer.fill_(8)
    made.store.flush(STATES)
    made.store.access.end_work(step, STATES)
    assert torch.equal(made.content(STATES), expected(PAGE))
    made.store.check()


@pytest.mark.parametrize("real", [False, True])
def test_a_step_that_is_committed_has_written_where_the_value_before_was_zero(bench, real):
    made = made_of(bench, PAGE, twice=True, real=real)
    made.spill(STATES)
    step = Reservation(pending=True)
    made.store.access.reserve(step, STATES)
    assert made.store.access.begin_work(step)
    with made.store.write(STATES, by=step) as (partition,):
        partition.buffer.fill_(8)
    made.store.flush(STATES)
    made.store.access.end_work(step, STATES)
    assert made.store.access.commit(step)
    made.spill(STATES)
    made.fill(OTHER, 9)
    assert (made.content(STATES) == 8).all()
