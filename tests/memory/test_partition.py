"""The state machine of a partition, every move from every state, against the table that stands in its module."""

from __future__ import annotations

import pytest
import torch

from infinity.errors import StateError, TransferError
from infinity.memory.partition import Partition, State
from infinity.plan.types import Extent, Key, Kind, PartitionSpec, Tier, pack_sections

NBYTES = 4096


class Flight:
    """A transfer that is waited for once and may fail."""

    def __init__(self, error: TransferError | None = None, done: bool = True) -> None:
        self.error = error
        self.is_done = done

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


def failure() -> TransferError:
    return TransferError("read", path="simulated", offset=0, nbytes=NBYTES, errno=5, reason="no")


def spec(home: Tier, *, spare: bool = False) -> PartitionSpec:
    sections = pack_sections([(Kind.REMAINDER, "int16", 100), (Kind.EXP_AVG, "fp32", 100)])
    extent = Extent(0, NBYTES) if home is Tier.NVME else None
    second = Extent(NBYTES, NBYTES) if spare else None
    return PartitionSpec(key=Key(Kind.STATES, 3), sections=sections, home=home, extent=extent, spare=second)


def buffer() -> torch.Tensor:
    return torch.zeros(NBYTES, dtype=torch.uint8)


def partition_in(
    state: State, home: Tier = Tier.NVME, flight: Flight | None = None, *, spare: bool = False
) -> Partition:
    """A partition that has reached `state` by legal moves."""
    made = Partition(spec(home, spare=spare), rank=2)
    path = {
        State.ABSENT: [], State.DIRTY: ["new"], State.WRITING: ["new", "flush"],
        State.RESIDENT: ["new", "flush", "complete"], State.SPILLED: ["new", "flush", "complete", "drop"],
        State.READING: ["new", "flush", "complete", "drop", "fetch"],
        State.FAILED: ["new", "flush", "fail"],
    }[state]  # fmt: skip
    if home is not Tier.NVME:
        path = {State.ABSENT: [], State.RESIDENT: ["new"]}[state]
    for index, step in enumerate(path):
        last = index == len(path) - 1
        current = flight if flight is not None and last else Flight()
        if step == "new":
            made.materialize(buffer())
        elif step == "flush":
            made.begin_flush(lambda current=current: current)
        elif step == "fetch":
            made.begin_fetch(buffer(), lambda current=current: current)
        elif step == "drop":
            made.drop()
        elif step == "complete":
            made.complete()
        else:
            made.transfer = Flight(failure())
            with pytest.raises(TransferError):
                made.complete()
    assert made.state is state
    made.check()
    return made


MOVES = {
    "materialize": lambda partition: partition.materialize(buffer()),
    "fetch": lambda partition: partition.begin_fetch(buffer(), Flight),
    "flush": lambda partition: partition.begin_flush(Flight),
    "complete": lambda partition: partition.complete(),
    "drop": lambda partition: partition.drop(),
    "discard": lambda partition: partition.discard(),
    "read": lambda partition: partition.begin_read(),
    "write": lambda partition: partition.begin_write(),
    "view": lambda partition: partition.view(Kind.EXP_AVG),
}
# (state, move) -> state after it. What is not here is illegal.
NVME_TABLE = {
    (State.ABSENT, "materialize"): State.DIRTY,
    (State.ABSENT, "discard"): State.ABSENT,
    (State.RESIDENT, "drop"): State.SPILLED,
    (State.RESIDENT, "discard"): State.ABSENT,
    (State.RESIDENT, "read"): State.RESIDENT,
    (State.RESIDENT, "write"): State.DIRTY,
    (State.RESIDENT, "view"): State.RESIDENT,
    (State.DIRTY, "flush"): State.WRITING,
    (State.DIRTY, "discard"): State.ABSENT,
    (State.DIRTY, "read"): State.DIRTY,
    (State.DIRTY, "write"): State.DIRTY,
    (State.DIRTY, "view"): State.DIRTY,
    (State.WRITING, "complete"): State.RESIDENT,
    (State.WRITING, "read"): State.WRITING,
    (State.WRITING, "view"): State.WRITING,
    (State.SPILLED, "fetch"): State.READING,
    (State.SPILLED, "discard"): State.ABSENT,
    (State.READING, "complete"): State.RESIDENT,
    (State.READING, "view"): State.READING,
    (State.FAILED, "discard"): State.ABSENT,
    (State.FAILED, "view"): State.FAILED,
}
MEMORY_TABLE = {
    (State.ABSENT, "materialize"): State.RESIDENT,
    (State.ABSENT, "discard"): State.ABSENT,
    (State.RESIDENT, "discard"): State.ABSENT,
    (State.RESIDENT, "read"): State.RESIDENT,
    (State.RESIDENT, "write"): State.RESIDENT,
    (State.RESIDENT, "view"): State.RESIDENT,
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("state", State)
def test_nvme_moves_are_those_of_the_table(state, move):
    follow(partition_in(state), move, NVME_TABLE.get((state, move)))


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("state", [State.ABSENT, State.RESIDENT])
@pytest.mark.parametrize("home", [Tier.CPU, Tier.GPU])
def test_memory_moves_are_those_of_the_table(home, state, move):
    follow(partition_in(state, home), move, MEMORY_TABLE.get((state, move)))


def follow(partition: Partition, move: str, expected: State | None) -> None:
    before = (partition.state, partition.buffer, partition.transfer)
    if expected is None:
        with pytest.raises(StateError) as caught:
            MOVES[move](partition)
        text = str(caught.value)
        assert "states of sub-group 3" in text and "rank 2" in text and before[0].value in text
        assert (partition.state, partition.buffer, partition.transfer) == before
    else:
        MOVES[move](partition)
        assert partition.state is expected
    partition.check()


def test_an_illegal_move_submits_nothing():
    def never() -> Flight:
        raise AssertionError("submitted")

    with pytest.raises(StateError):
        partition_in(State.RESIDENT).begin_flush(never)
    with pytest.raises(StateError):
        partition_in(State.DIRTY).begin_fetch(buffer(), never)
    written = partition_in(State.DIRTY)
    written.begin_write()
    with pytest.raises(StateError, match="a writer"):
        written.begin_flush(never)


def test_a_submission_that_raises_changes_nothing():
    def refuse() -> Flight:
        raise failure()

    for state, begin in (
        (State.DIRTY, lambda partition: partition.begin_flush(refuse)),
        (State.SPILLED, lambda partition: partition.begin_fetch(buffer(), refuse)),
    ):
        partition = partition_in(state)
        with pytest.raises(TransferError):
            begin(partition)
        assert partition.state is state and partition.transfer is None
        partition.check()


@pytest.mark.parametrize("state", [State.READING, State.WRITING])
def test_a_transfer_that_fails_leaves_failed(state):
    partition = partition_in(state, flight=Flight(failure()))
    with pytest.raises(TransferError):
        partition.complete()
    assert partition.state is State.FAILED and partition.transfer is None
    assert partition.surrender() is not None and partition.surrender() is None
    partition.check()
    assert partition.discard() is None
    partition.materialize(buffer())
    assert partition.state is State.DIRTY


@pytest.mark.parametrize("state", [State.READING, State.WRITING])
def test_a_transfer_that_is_late_is_still_in_flight(state):
    flight = Flight(failure(), done=False)
    partition = partition_in(state, flight=flight)
    with pytest.raises(TransferError):
        partition.complete()
    assert partition.state is state and partition.transfer is flight and partition.buffer is not None
    flight.error = None
    partition.complete()
    assert partition.state is State.RESIDENT


@pytest.mark.parametrize("state", [State.RESIDENT, State.DIRTY, State.WRITING])
def test_many_may_read_and_none_may_write_meanwhile(state):
    partition = partition_in(state)
    partition.begin_read()
    partition.begin_read()
    for move in ("write", "drop", "discard"):
        with pytest.raises(StateError, match="2 readers"):
            MOVES[move](partition)
    partition.check()
    partition.end_read()
    partition.end_read()
    assert not partition.leased


@pytest.mark.parametrize("state", [State.RESIDENT, State.DIRTY])
def test_a_writer_is_alone(state):
    partition = partition_in(state)
    partition.begin_write()
    for move in ("read", "write", "drop", "discard", "flush"):
        with pytest.raises(StateError, match="a writer"):
            MOVES[move](partition)
    partition.check()
    partition.end_write()
    partition.begin_read()


def test_a_failed_write_keeps_its_buffer_for_those_who_read():
    partition = partition_in(State.WRITING, flight=Flight(failure()))
    partition.begin_read()
    with pytest.raises(TransferError):
        partition.complete()
    partition.check()
    assert partition.surrender() is None
    with pytest.raises(StateError):
        partition.begin_read()
    partition.end_read()
    assert partition.surrender() is not None


def test_views_are_typed_windows_of_the_buffer():
    partition = partition_in(State.DIRTY)
    partition.view(Kind.EXP_AVG).fill_(1.5)
    remainder = partition.view(Kind.REMAINDER)
    assert remainder.dtype is torch.int16 and remainder.shape == (100,) and not remainder.any()
    assert partition.view(Kind.EXP_AVG).eq(1.5).all()
    with pytest.raises(KeyError, match="master"):
        partition.view(Kind.MASTER)


def test_a_broken_invariant_is_found():
    breaks = [
        ("buffer", None, State.RESIDENT), ("transfer", Flight(), State.RESIDENT), ("readers", -1, State.RESIDENT),
        ("readers", 1, State.SPILLED), ("writer", True, State.WRITING), ("buffer", buffer(), State.SPILLED),
    ]  # fmt: skip
    for attribute, value, state in breaks:
        partition = partition_in(state)
        setattr(partition, attribute, value)
        with pytest.raises(StateError, match="invariant"):
            partition.check()


FIRST, SECOND = Extent(0, NBYTES), Extent(NBYTES, NBYTES)


def pending_in(state: State) -> Partition:
    """A partition with a pending version in `state`."""
    made = partition_in(State.RESIDENT, spare=True)
    made.begin_write(pending=True)
    made.end_write()
    if state is not State.DIRTY:
        made.begin_flush(lambda: Flight(failure() if state is State.FAILED else None))
    if state is State.FAILED:
        with pytest.raises(TransferError):
            made.complete()
    elif state in (State.RESIDENT, State.SPILLED):
        made.complete()
    if state is State.SPILLED:
        made.drop()
    assert made.state is state and made.pending
    made.check()
    return made


def test_a_pending_version_goes_to_the_place_that_the_committed_one_does_not_have():
    partition = partition_in(State.RESIDENT, spare=True)
    assert partition.extent == FIRST
    partition.begin_write(pending=True)
    assert partition.extent == SECOND
    partition.end_write()
    partition.commit()
    assert partition.extent == SECOND and not partition.pending
    partition.begin_flush(Flight)
    partition.complete()
    partition.begin_write(pending=True)
    assert partition.extent == FIRST
    partition.end_write()
    partition.forget()
    assert partition.extent == SECOND and partition.state is State.SPILLED
    partition.check()


@pytest.mark.parametrize("state", [State.DIRTY, State.RESIDENT, State.SPILLED, State.FAILED])
def test_a_pending_version_is_forgotten_from_wherever_it_is(state):
    partition = pending_in(state)
    had = partition.buffer
    assert partition.forget() is had and partition.buffer is None
    assert partition.state is State.SPILLED and partition.extent == FIRST and not partition.pending
    partition.check()
    # Twice is nothing more.
    assert partition.forget() is None


def test_a_version_that_is_written_or_used_is_not_forgotten():
    writing = pending_in(State.DIRTY)
    writing.begin_flush(Flight)
    used = pending_in(State.RESIDENT)
    used.begin_read()
    for partition in (writing, used):
        with pytest.raises(StateError, match="forget a pending version"):
            partition.forget()
        assert partition.pending


def test_a_version_is_pending_only_where_the_one_before_it_is_on_nvme():
    for partition in (partition_in(State.DIRTY, spare=True), partition_in(State.RESIDENT)):
        with pytest.raises(StateError, match="write a pending version"):
            partition.begin_write(pending=True)
        assert not partition.pending
    partition = pending_in(State.RESIDENT)
    with pytest.raises(StateError, match="write over a pending version"):
        partition.begin_write()
    with pytest.raises(StateError, match="discard"):
        partition.discard()


def test_a_version_is_committed_while_it_is_written_to_the_drive():
    partition = pending_in(State.DIRTY)
    partition.begin_flush(Flight)
    partition.commit()
    partition.complete()
    assert partition.state is State.RESIDENT and partition.extent == SECOND and not partition.pending
    partition.check()
