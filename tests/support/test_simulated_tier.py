"""Claims about the simulated tier: it delays, it reorders, and it detects misuse."""

from __future__ import annotations

import pytest
import torch

from infinity.errors import TransferError
from infinity.memory.tiers.pinned import page_aligned
from infinity.plan.types import Extent
from tests.support.simulated_tier import GARBAGE, Misuse, SimulatedTier

FIRST, SECOND = Extent(0, 4096), Extent(4096, 4096)


def buffer(value: int = 0) -> torch.Tensor:
    return page_aligned(4096).fill_(value)


def stored(tier: SimulatedTier, extent: Extent, value: int) -> None:
    tier.write(extent, buffer(value)).wait()


def test_what_was_written_is_read():
    tier = SimulatedTier(8192)
    stored(tier, FIRST, 7)
    stored(tier, SECOND, 8)
    target = buffer()
    tier.read(FIRST, target).wait()
    assert (target == 7).all()
    assert (tier.content[4096:] == 8).all()


def test_a_buffer_holds_garbage_until_its_read_is_complete():
    tier = SimulatedTier(8192)
    stored(tier, FIRST, 7)
    target = buffer()
    transfer = tier.read(FIRST, target)
    assert (target == GARBAGE).all()
    transfer.wait()
    assert (target == 7).all()


def test_a_request_is_done_after_some_polls_and_not_always_in_order():
    orders = set()
    for seed in range(20):
        tier = SimulatedTier(8192, seed=seed)
        transfers = [tier.write(FIRST, buffer(1)), tier.write(SECOND, buffer(2))]
        order = []
        for _ in range(20):
            order += [index for index, transfer in enumerate(transfers) if transfer.done() and index not in order]
        orders.add(tuple(order))
    assert orders == {(0, 1), (1, 0)}


def test_a_fault_is_raised_by_every_wait_and_leaves_half_of_the_bytes():
    tier = SimulatedTier(8192, faults=lambda asked: asked.is_write)
    transfer = tier.write(FIRST, buffer(9))
    for _ in range(2):
        with pytest.raises(TransferError, match="write of 4096 bytes at offset 0"):
            transfer.wait()
    assert transfer.done()
    assert (tier.content[:2048] == 9).all() and (tier.content[2048:4096] == GARBAGE).all()


def test_a_late_request_is_still_in_flight():
    tier = SimulatedTier(8192)
    tier.late = 1
    transfer = tier.write(FIRST, buffer(9))
    with pytest.raises(TransferError, match="late"):
        transfer.wait()
    assert tier.flying == [transfer]
    transfer.wait()
    assert transfer.done()


def test_changing_a_buffer_that_is_being_written_is_misuse():
    tier = SimulatedTier(8192)
    source = buffer(1)
    transfer = tier.write(FIRST, source)
    source[17] = 2
    with pytest.raises(Misuse, match="changed"):
        transfer.wait()


def test_two_requests_on_one_extent_are_misuse_unless_both_read():
    tier = SimulatedTier(8192)
    tier.read(FIRST, buffer())
    tier.read(FIRST, buffer())
    with pytest.raises(Misuse, match="in flight"):
        tier.write(FIRST, buffer())


def test_reusing_a_buffer_in_flight_is_misuse():
    tier = SimulatedTier(8192)
    target = buffer()
    tier.read(FIRST, target)
    with pytest.raises(Misuse, match="reused"):
        tier.read(SECOND, target)
    with pytest.raises(Misuse, match="reused"):
        tier.write(SECOND, target)


@pytest.mark.parametrize("extent", [Extent(4096, 8192), Extent(100, 4096), Extent(0, 100)])
def test_a_request_that_is_outside_or_unaligned_is_misuse(extent):
    with pytest.raises(Misuse):
        SimulatedTier(8192).read(extent, page_aligned(8192)[: extent.nbytes])


def test_close_completes_what_is_in_flight():
    tier = SimulatedTier(8192)
    transfer = tier.write(FIRST, buffer(5))
    tier.close()
    assert transfer.over and (tier.content[:4096] == 5).all()
    with pytest.raises(Misuse, match="after close"):
        tier.read(FIRST, buffer())
