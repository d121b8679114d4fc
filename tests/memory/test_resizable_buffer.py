"""Buffers whose memory comes and goes, and pages that go from one to the next."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

from infinity.memory import resizable_buffer
from infinity.memory.resizable_buffer import ElasticBuffer, SparePages
from infinity.plan.types import HUGE_PAGE

CPU = torch.device("cpu")
PART = HUGE_PAGE // 4
MIB = 1 << 20


def buffer(numel: int, spare: SparePages | None = None) -> ElasticBuffer:
    """Of fp32."""
    return ElasticBuffer(numel, torch.float32, CPU, spare)


def filled(numel: int, value: float, spare: SparePages | None = None) -> ElasticBuffer:
    made = buffer(numel, spare)
    made.take()
    made.tensor.fill_(value)
    return made


def resident_nbytes() -> int:
    """Bytes of anonymous memory of this process."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["RssAnon"].split()[0]) << 10


@pytest.fixture
def spare():
    pages = SparePages()
    if not pages.put(0, 0, None):  # type: ignore[arg-type]
        pytest.skip("this system has no mremap")
    return pages


@pytest.mark.parametrize("numel", [0, 1, 1000, PART - 1, PART, 3 * PART + 17])
def test_memory_comes_and_goes(numel):
    one = buffer(numel)
    for value in (1.0, 2.0):
        assert not one.has_bytes
        one.take()
        assert one.has_bytes and not one.tensor.any()
        one.tensor.fill_(value)
        assert one.tensor.eq(value).all()
        one.free()
        # What was there is gone; reading it gives zeros.
        assert not one.tensor.any()


def test_views_live_on(spare):
    one = filled(3 * PART, 1.0, spare)
    view = one.tensor[PART : 2 * PART].view(-1, 64)
    one.free(to_spare=True)
    two = buffer(3 * PART, spare)
    two.take()
    assert not view.any()
    one.take()
    one.tensor.fill_(5.0)
    assert view.eq(5).all()


def test_pages_of_one_buffer_go_to_the_next(spare):
    one = filled(4 * PART + 5, 7.0, spare)
    one.free(to_spare=True)
    assert spare.nbytes == 4 * HUGE_PAGE
    two = buffer(3 * PART + 9, spare)
    before = resident_nbytes()
    two.take()
    # They have been moved, content and all; the rest is fresh. A comparison's result of 1.5 MiB may stay in the heap.
    assert resident_nbytes() - before < MIB
    assert two.tensor[: 3 * PART].eq(7).all() and not two.tensor[3 * PART :].any()
    assert spare.nbytes == HUGE_PAGE
    two.tensor.fill_(8.0)
    assert not one.tensor[PART:].any()
    # Its own first part is still where it was.
    one.take()
    assert one.tensor[:PART].eq(7).all() and not one.tensor[PART:].any()
    assert two.tensor.eq(8).all() and spare.nbytes == 0


def test_a_buffer_has_its_own_pages_back(spare):
    one = filled(2 * PART, 3.0, spare)
    one.free(to_spare=True)
    one.take()
    assert one.tensor.eq(3).all() and spare.nbytes == 0


def test_trimmed_pages_are_the_systems(spare):
    one, two = filled(8 * PART, 1.0, spare), filled(8 * PART, 2.0, spare)
    one.free(to_spare=True)
    two.free(to_spare=True)
    before = resident_nbytes()
    spare.trim(9 * HUGE_PAGE)
    assert spare.nbytes == 9 * HUGE_PAGE
    assert before - resident_nbytes() == pytest.approx(7 * HUGE_PAGE, abs=MIB)
    # The oldest went first.
    assert two.tensor.eq(2).all() and int(one.tensor.count_nonzero()) == PART
    spare.trim(0)
    assert spare.nbytes == 0 and not one.tensor.any() and not two.tensor.any()


def test_where_the_kernel_refuses_pages_are_fresh(spare, monkeypatch):
    monkeypatch.setattr(SparePages, "_move", lambda self, source, target: False)
    one = filled(2 * PART, 1.0, spare)
    one.free(to_spare=True)
    two = filled(2 * PART, 2.0, spare)
    assert two.tensor.eq(2).all() and spare.nbytes == 0 and not one.tensor.any()
    two.free(to_spare=True)
    assert spare.nbytes == 0 and not two.tensor.any()


def test_the_kernel_is_not_asked_for_more_mappings_than_it_has(spare, monkeypatch):
    monkeypatch.setattr(resizable_buffer, "_PARTS_MAX", 3)
    one, two = filled(4 * PART, 1.0, spare), buffer(4 * PART, spare)
    one.free(to_spare=True)
    two.take()
    assert two.tensor[: 3 * PART].eq(1).all() and not two.tensor[3 * PART :].any()
    assert spare.nbytes == 0
    two.tensor.fill_(2.0)
    one.take()
    one.tensor.fill_(3.0)
    assert two.tensor.eq(2).all() and one.tensor.eq(3).all()


def test_spare_pages_outlive_their_owner(spare):
    """Were they unmapped with it, what lies at their addresses next would be somebody else's."""
    one = filled(4 * PART, 1.0, spare)
    one.free(to_spare=True)
    del one
    gc.collect()
    others = [filled(4 * PART, 9.0) for _ in range(4)]
    spare.trim(2 * HUGE_PAGE)
    two = buffer(2 * PART, spare)
    two.take()
    assert two.tensor.eq(1).all() and all(other.tensor.eq(9).all() for other in others)


def test_at_random_no_buffer_ever_sees_anothers_bytes(spare):
    draw = random.Random(0)
    buffers = [buffer(draw.choice([100, PART, 2 * PART + 5, 5 * PART - 1, 7 * PART]), spare) for _ in range(12)]
    values: dict[int, float] = {}
    for step in range(600):
        at = draw.randrange(len(buffers))
        one = buffers[at]
        if one.has_bytes:
            assert one.tensor.eq(values[at]).all()
            one.free(to_spare=draw.random() < 0.7)
        else:
            one.take()
            values[at] = float(step)
            one.tensor.fill_(values[at])
        if draw.random() < 0.1:
            spare.trim(draw.randrange(0, 20) * HUGE_PAGE)
    for at, one in enumerate(buffers):
        assert not one.has_bytes or one.tensor.eq(values[at]).all()


def test_what_is_not_a_whole_part_goes_back_to_the_system(spare):
    ones = [filled(PART + PART // 2, 1.0, spare) for _ in range(8)]
    before = resident_nbytes()
    for one in ones:
        one.free(to_spare=True)
    assert before - resident_nbytes() == pytest.approx(8 * HUGE_PAGE // 2, abs=MIB)
