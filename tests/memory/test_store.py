"""The store on a tier that reorders and delays: leases, running out, failures and the end."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch

from infinity.errors import StateError, TierMemoryError, TransferError
from infinity.log import logger
from infinity.memory.partition import State
from infinity.plan.types import Key, Kind, Tier
from tests.memory.conftest import PAGE, param, states

A, B, C, D = (Key(Kind.PARAM, index) for index in range(4))


def test_a_value_survives_the_way_to_the_drive_and_back(bench):
    made = bench([param(0, 2), states(0, 3)])
    for value, key in enumerate((A, Key(Kind.STATES, 0)), 1):
        made.fill(key, value)
        made.spill(key)
        assert made.store[key].state is State.SPILLED and made.store[key].buffer is None
        assert (made.content(key) == value).all()
        made.store.check()


def test_an_absent_partition_comes_zeroed_even_from_a_used_arena(bench):
    made = bench([param(0, 2), param(1, 2)], param_pages=2)
    made.fill(A, 9)
    assert not made.content(B).any()
    assert (made.content(A) == 9).all()


def test_a_fresh_write_reads_nothing(bench):
    made = bench([param(0, 2)])
    made.fill(A, 1)
    made.spill(A)
    made.fill(A, 2)
    assert not [asked for asked in made.tier.requests if not asked.is_write]
    made.spill(A)
    assert (made.content(A) == 2).all()


def test_a_fresh_write_without_room_keeps_the_old_value(bench):
    made = bench([param(0, 2), param(1, 2)], param_pages=2)
    made.fill(A, 1)
    made.spill(A)
    with made.store.read(B), pytest.raises(TierMemoryError), made.store.write(A, fresh=True):
        pass
    assert (made.content(A) == 1).all()


def test_a_writer_after_a_flush_waits_for_it(bench):
    for seed in range(10):
        made = bench([param(0, 2)], seed=seed, polls_max=20)
        made.fill(A, 1)
        made.store.flush(A)
        with made.store.write(A) as (partition,):
            partition.buffer[:PAGE].fill_(2)
        made.spill(A)
        content = made.content(A)
        assert (content[:PAGE] == 2).all() and (content[PAGE:] == 1).all()


def test_what_is_being_flushed_stays_readable(bench):
    made = bench([param(0, 2)], polls_max=1000)
    made.fill(A, 1)
    made.store.flush(A)
    assert made.store[A].state is State.WRITING
    assert (made.content(A) == 1).all()


def test_leases_end_when_the_block_raises(bench):
    made = bench([param(0, 1), param(1, 1)])
    for verb in (made.store.read, made.store.write):
        with pytest.raises(KeyboardInterrupt), verb(A, B):
            raise KeyboardInterrupt
        assert not made.store[A].leased and not made.store[B].leased


def test_a_lease_that_cannot_be_had_leaves_none_behind(bench):
    made = bench([param(0, 1), param(1, 1)])
    with made.store.read(B):
        for verb in (made.store.write,):
            with pytest.raises(StateError), verb(A, B):
                pass
        assert not made.store[A].leased and made.store[B].readers == 1
    with pytest.raises(StateError), made.store.write(A, A):
        pass
    assert not made.store[A].leased


def test_readers_share_and_may_nest(bench):
    made = bench([param(0, 1)])
    with made.store.read(A), made.store.read(A, A):
        assert made.store[A].readers == 3
    assert not made.store[A].leased


def test_running_out_names_the_numbers(bench):
    made = bench([param(0, 300), param(1, 200)], param_pages=400)
    with made.store.write(A), pytest.raises(TierMemoryError) as caught, made.store.read(B):
        pass
    text = str(caught.value)
    for part in ("param of unit 1", "0.8 MB", "param pool", "1.2 MB", "1.6 MB", "param of unit 0 1.2 MB", "sub_group"):
        assert part in text
    made.store.check()
    assert not made.content(B).any()


def test_running_out_on_what_is_asked_for_at_once_names_it(bench):
    made = bench([param(0, 300), param(1, 200)], param_pages=400)
    with pytest.raises(TierMemoryError, match=r"param of unit 0 1\.2 MB"), made.store.read(A, B):
        pass
    made.store.check()


def test_memory_that_the_system_refuses_is_an_error_with_numbers(bench):
    made = bench([param(0, 1 << 36, Tier.CPU)])
    with (
        pytest.raises(TierMemoryError, match=r"no room on cpu for param of unit 0: asked .* MB, used"),
        made.store.read(A),
    ):
        pass
    made.store.check()


@pytest.mark.parametrize("fails_on_write", [True, False])
def test_a_transfer_that_fails_leaves_failed_and_others_usable(bench, fails_on_write):
    made = bench([param(0, 2), param(1, 2)], param_pages=2)
    bad = made.store[A].spec.extent
    made.fill(A, 1)
    made.spill(A)
    made.tier.faults = lambda asked: asked.extent.offset == bad.offset and asked.is_write == fails_on_write
    made.fill(A, 2)
    if not fails_on_write:
        made.spill(A)
    with pytest.raises(TransferError, match="simulated"):
        made.store.settle() if fails_on_write else made.content(A)
    assert made.store[A].state is State.FAILED
    made.store.check()
    made.tier.faults = lambda asked: False
    # The arena is as large as one of them: a failed one may not hold it.
    made.fill(B, 3)
    made.spill(B)
    assert (made.content(B) == 3).all()
    for verb in (made.store.read, made.store.write):
        with pytest.raises(StateError, match="failed"), verb(A):
            pass
    # Who replaces all of it needs nothing of what is lost.
    made.fill(A, 4)
    made.spill(A)
    assert (made.content(A) == 4).all()
    made.store.check()


def test_a_prefetch_that_fails_is_told_when_it_is_used(bench):
    made = bench([param(0, 1), param(1, 1)])
    made.fill(A, 1)
    made.spill(A)
    made.tier.faults = lambda asked: True
    assert made.store.prefetch(A)
    with pytest.raises(TransferError), made.store.read(A):
        pass
    assert made.store[A].state is State.FAILED and not made.store[A].leased
    made.store.check()


def test_a_submission_that_is_refused_gives_the_buffer_back(bench, monkeypatch):
    made = bench([param(0, 4)])
    made.fill(A, 1)
    made.spill(A)

    def refuse(*_, **__):
        raise TransferError("read", path="simulated", offset=0, nbytes=1, errno=11, reason="full")

    with monkeypatch.context() as patch:
        patch.setattr(made.tier, "read", refuse)
        for act in (lambda: made.content(A), lambda: made.store.prefetch(A)):
            with pytest.raises(TransferError, match="full"):
                act()
            made.store.check()
    assert (made.content(A) == 1).all()


def test_a_write_that_fails_under_readers_leaves_them_their_buffer(bench):
    made = bench([param(0, 1)], faults=lambda asked: True)
    made.fill(A, 5)
    made.store.flush(A)
    with made.store.read(A) as (partition,):
        with pytest.raises(TransferError):
            made.store.settle()
        assert (partition.buffer == 5).all()
        made.store.check()
    assert made.store[A].buffer is None
    made.store.check()


def test_settle_waits_for_everything_before_it_raises(bench):
    made = bench([param(index, 1) for index in range(3)], polls_max=1000, faults=lambda asked: asked.count == 0)
    for key in (A, B, C):
        made.fill(key, 1)
    with pytest.raises(TransferError):
        made.store.settle()
    assert [made.store[key].state for key in (A, B, C)] == [State.FAILED, State.RESIDENT, State.RESIDENT]
    made.store.settle()


def test_settle_waits_for_one_late_transfer_only(bench):
    made = bench([param(index, 1) for index in range(3)], polls_max=1000)
    for key in (A, B, C):
        made.fill(key, 1)
    made.tier.late = 1
    for _ in range(3):
        with pytest.raises(TransferError, match="late"):
            made.store.settle()
    made.store.settle()
    assert all(made.store[key].state is State.RESIDENT for key in (A, B, C))


def test_a_late_transfer_keeps_its_buffer_and_may_still_arrive(bench):
    made = bench([param(0, 2), param(1, 2)], param_pages=2)
    made.fill(A, 1)
    made.spill(A)
    made.tier.late = 2
    with pytest.raises(TransferError, match="late"):
        made.content(A)
    made.tier.late = 0
    # The buffer is in flight: giving it to B would let the late read write into B's value.
    with pytest.raises(TransferError, match="late"):
        made.content(B)
    made.store.check()
    assert (made.content(A) == 1).all()
    assert not made.content(B).any()


def test_no_flush_under_a_writer(bench):
    made = bench([param(0, 1)])
    with made.store.write(A), pytest.raises(StateError, match="cannot flush"):
        made.store.flush(A)
    assert not made.tier.requests
    made.store.check()


def test_without_overlap_nothing_is_in_flight(bench):
    made = bench([param(0, 1), param(1, 1)], overlap=False, polls_max=1000)
    made.fill(A, 1)
    made.store.flush(A)
    assert not made.tier.flying and made.store[A].state is State.RESIDENT
    made.store.drop(A)
    assert not made.store.prefetch(A) and not made.tier.flying


def test_discard_returns_memory_of_every_home(bench):
    made = bench([param(0, 2, Tier.CPU), param(1, 2, Tier.GPU), param(2, 2)])
    for key in (A, B, C):
        made.fill(key, 1)
    held = weakref.ref(made.store[A].buffer)
    made.store.discard(A, B, C)
    gc.collect()
    assert held() is None
    assert made.ledger.total(Tier.GPU) == 0 and made.ledger.total(Tier.CPU) == 8 * PAGE
    made.store.check()
    assert not made.content(A).any()


def test_an_adopted_buffer_is_neither_booked_nor_freed(bench):
    made = bench([param(0, 2, Tier.GPU)])
    own = torch.full((made.specs[0].nbytes,), 7, dtype=torch.uint8)
    made.store.adopt(A, own)
    with made.store.write(A) as (partition,):
        assert partition.buffer.data_ptr() == own.data_ptr()
    made.store.check()
    assert made.ledger.total(Tier.GPU) == 0
    made.store.close()
    assert made.ledger.total(Tier.GPU) == 0 and (own == 7).all()


def test_a_partition_without_bytes_has_leases_and_costs_nothing(bench):
    made = bench([param(0, 0), param(1, 1)], param_pages=1)
    with made.store.write(A, B) as (empty, _):
        assert empty.view(Kind.PARAM).numel() == 0
    made.spill(A, B)
    made.content(A)
    made.store.check()
    made.store.discard(A)


@pytest.mark.parametrize("real", [False, True])
def test_close_returns_everything_whatever_is_in_flight(bench, real):
    made = bench([param(0, 1), param(1, 1), param(2, 1, Tier.CPU), states(0, 1)], real=real)
    for key in (A, B, C, Key(Kind.STATES, 0)):
        made.fill(key, 1)
    made.spill(B)
    made.store.flush(A, Key(Kind.STATES, 0))
    made.store.prefetch(B)
    held = [weakref.ref(made.store[key].buffer) for key in (A, B, C)]
    made.store.close()
    gc.collect()
    assert not any(made.ledger.now.values())
    if real:
        assert not list(made.tier.directory.iterdir())
    else:
        assert not made.tier.flying and made.tier.closed
        # Requests that are remembered for the record do not hold buffers.
        assert not any(reference() for reference in held)
    made.store.close()


@pytest.mark.parametrize("error", [TransferError, RuntimeError])
def test_close_frees_everything_although_the_tier_reports_an_error(bench, monkeypatch, caplog, error):
    monkeypatch.setattr(logger, "propagate", True)
    made = bench([param(0, 1), param(1, 1, Tier.CPU)])
    made.fill(B, 1)

    def fail():
        if error is RuntimeError:
            raise RuntimeError("unseen")
        raise TransferError("write", path="simulated", offset=0, nbytes=1, errno=5, reason="unseen")

    monkeypatch.setattr(made.tier, "close", fail)
    # A late transfer has nobody left to harm, anything else is a defect.
    with pytest.raises(RuntimeError, match="unseen") if error is RuntimeError else nullcontext():
        made.store.close()
    assert ("unseen" in caplog.text) == (error is TransferError)
    assert not any(made.ledger.now.values())
    made.store.close()


def test_check_finds_a_ledger_that_is_wrong(bench):
    made = bench([param(0, 1)])
    made.store.check()
    made.ledger.add(Tier.NVME, Kind.PARAM, 1)
    with pytest.raises(AssertionError, match="ledger"):
        made.store.check()


def test_threads_may_share_a_store(bench):
    made = bench([param(index, 1) for index in range(6)], param_pages=4, polls_max=3)
    for index in range(6):
        made.fill(Key(Kind.PARAM, index), 0)
    errors: list[BaseException] = []

    def work(mine: tuple[int, ...]) -> None:
        try:
            for count in range(60):
                key = Key(Kind.PARAM, mine[count % len(mine)])
                with made.store.write(key) as (partition,):
                    before = partition.buffer.clone()
                    partition.buffer.add_(1)
                    assert torch.equal(partition.buffer, before + 1)
                made.store.flush(key)
                made.store.prefetch(Key(Kind.PARAM, mine[(count + 1) % len(mine)]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in ((0, 1, 2), (3, 4, 5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for index in range(6):
        assert (made.content(Key(Kind.PARAM, index)) == 20).all()
    made.store.check()
