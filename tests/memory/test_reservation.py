"""Two parties on one store: what a step has reserved waits, fails and ends as it says."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import pytest

from infinity.errors import TierMemoryError, TransferError
from infinity.memory.partition import State
from infinity.memory.transaction import Reservation
from infinity.plan.types import Key, Kind
from tests.memory.conftest import Bench, param

A, B, C = (Key(Kind.PARAM, index) for index in range(3))


class Party:
    """A thread that does one thing; `result` waits for it."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._value: object = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._value = act()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def is_waiting(self) -> bool:
        """Whether it is still there a little later."""
        self._thread.join(0.05)
        return self._thread.is_alive()

    def result(self) -> object:
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._value


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_lease_of_what_is_reserved_waits_until_it_is_released(bench, verb):
    made = bench([param(0, 1), param(1, 1)])
    made.fill(A, 1)
    step = Reservation()
    made.store.access.reserve(step, A)
    assert made.store.access.reserved(A) and not made.store.access.reserved(B)

    def use() -> int:
        with getattr(made.store, verb)(A) as (partition,):
            return int(partition.buffer[0])

    other = Party(use)
    assert other.is_waiting()
    # Meanwhile everybody may have the rest, and the step itself its own.
    made.fill(B, 9)
    with made.store.write(A, by=step) as (partition,):
        partition.buffer.fill_(2)
    assert other.is_waiting()
    made.store.access.release(step, A)
    assert other.result() == 2
    made.store.check()


def test_a_store_forgets_a_reservation_that_is_released(bench):
    """Each optimizer step is a reservation: what the store kept of one would grow with the run."""
    made = bench([param(0, 1)])
    steps = [weakref.ref(_stepped(made)) for _ in range(3)]
    assert [step() for step in steps] == [None] * 3


def _stepped(made: Bench) -> Reservation:
    step = Reservation()
    made.store.access.reserve(step, A)
    with made.store.write(A, by=step) as (partition,):
        partition.buffer.fill_(1)
    made.store.access.release(step, A)
    return step


def test_a_second_reservation_waits_for_the_first(bench):
    made = bench([param(0, 1)])
    first, second = Reservation(), Reservation()
    made.store.access.reserve(first, A)
    other = Party(lambda: made.store.access.reserve(second, A))
    assert other.is_waiting()
    made.store.access.release(first, A)
    other.result()
    made.store.access.release(first, A)
    assert made.store.access.reserved(A), "who has let go cannot let go of another's"


def test_a_step_that_failed_tells_whoever_wants_what_it_held(bench):
    made = bench([param(0, 1), param(1, 1)])
    made.fill(A, 1)
    step = Reservation()
    made.store.access.reserve(step, A)
    other = Party(lambda: made.content(A))
    assert other.is_waiting() and not step.seen
    made.store.access.fail(step, TransferError("write", path="x", offset=0, nbytes=1, errno=28, reason="full"))
    with pytest.raises(TransferError, match="full"):
        other.result()
    assert step.seen
    with pytest.raises(TransferError, match="full"), made.store.write(A):
        pass
    made.fill(B, 1)
    made.store.check()


def test_what_is_reserved_is_fetched_ahead_by_its_step_only(bench):
    made = bench([param(0, 1), param(1, 1)], polls_max=1000)
    for key in (A, B):
        made.fill(key, 1)
        made.spill(key)
    step = Reservation()
    made.store.access.reserve(step, A)
    assert made.store.prefetch(A, B)
    assert made.store[A].state is State.SPILLED and made.store[B].state is State.READING
    assert made.store.prefetch(A, by=step)
    assert made.store[A].state is State.READING


def test_what_the_program_reads_goes_before_what_its_step_reads(bench, monkeypatch):
    made = bench([param(index, 1) for index in range(3)])
    for key in (A, B, C):
        made.fill(key, 1)
        made.spill(key)
    reservation, priorities, read = Reservation(), [], made.tier.read

    def reading(extent, buffer, *, priority=0):
        priorities.append(priority)
        return read(extent, buffer, priority=priority)

    monkeypatch.setattr(made.tier, "read", reading)
    made.store.access.reserve(reservation, A)
    assert made.store.prefetch(A, by=reservation) and made.store.prefetch(B)
    with made.store.read(C):
        pass
    step, ahead, now = priorities
    assert step < ahead == now
    made.store.access.release(reservation, A)


def test_room_that_the_other_party_holds_is_waited_for(bench):
    made = bench([param(0, 2), param(1, 2)], param_pages=2)
    made.fill(B, 7)
    made.spill(B)
    step = Reservation()
    with made.store.write(A, by=step):
        other = Party(lambda: made.content(B))
        assert other.is_waiting()
    assert (other.result() == 7).all()
    made.store.check()


def test_who_can_give_up_room_itself_is_told_at_once_that_there_is_none(bench):
    made = bench([param(0, 2), param(1, 2)], param_pages=2)
    made.fill(B, 7)
    made.spill(B)
    step = Reservation()
    with made.store.write(A, by=step), pytest.raises(TierMemoryError, match="no room"):  # noqa: SIM117
        with made.store.read(B, wait=False):
            pass
    assert (made.content(B) == 7).all()
    made.store.check()


def test_parties_that_wait_for_each_other_end_with_an_error(bench):
    """The loop holds the room and waits for the step, the step waits for room: one of them is told, none hangs."""
    made = bench([param(0, 2), param(1, 2)], param_pages=2)
    made.fill(B, 7)
    made.spill(B)
    step = Reservation()
    made.store.access.reserve(step, B)

    def stepping() -> None:
        try:
            with made.store.write(B, by=step):
                pass
        except BaseException as error:
            made.store.access.fail(step, error)
            raise

    with made.store.read(A):
        other = Party(stepping)
        assert other.is_waiting()
        began = time.monotonic()
        with pytest.raises(TierMemoryError, match="no room"), made.store.read(B):
            pass
        assert time.monotonic() - began < 5
        with pytest.raises(TierMemoryError, match="no room"):
            other.result()
    made.store.check()


def test_nobody_drops_what_another_party_is_about_to_use(bench):
    made = bench([param(0, 1), param(1, 1)], polls_max=1000)
    made.fill(A, 1)
    made.fill(B, 2)
    made.spill(A, B)
    with made.store.read(A):
        pass
    transfers = made.tier.flying
    wait = threading.Event()

    def use() -> tuple[int, int]:
        # A is there; the lease waits for B.
        with made.store.write(A, B) as (first, second):
            return int(first.buffer[0]), int(second.buffer[0])

    # A request that nobody hears of before the event: waiting for it takes that long.
    submit = made.tier.read

    def slow(extent, buffer, **options):
        transfer = submit(extent, buffer, **options)
        finish = transfer.wait
        transfer.wait = lambda: (wait.wait(10), finish())
        return transfer

    made.tier.read = slow
    other = Party(use)
    assert other.is_waiting() and transfers
    made.store.drop(A)
    assert made.store[A].state is State.RESIDENT
    wait.set()
    assert other.result() == (1, 2)
    made.store.check()
