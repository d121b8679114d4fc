"""Shards against numpy: ranges of a shard's own order are runs of the whole tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.plan.shards import Shard, local_numel, runs, whole_range


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Shard, int, int, int]:
    """(whole shape, shard, index of a rank, start, numel)."""
    parts = draw(st.integers(1, 4))
    blocks = tuple(parts * size for size in draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    dim = draw(st.integers(0, len(shape)))
    whole = (*shape[:dim], sum(blocks), *shape[dim:])
    shard = Shard(dim, blocks, parts)
    numel = math.prod(shard.local_shape(whole))
    start = draw(st.integers(0, numel))
    return whole, shard, draw(st.integers(0, parts - 1)), start, draw(st.integers(0, numel - start))


@settings(max_examples=400, deadline=None)
@given(cuts())
def test_runs_of_a_range_are_its_elements_in_the_whole_tensor(cut) -> None:
    whole, shard, index, start, numel = cut
    addresses = np.arange(math.prod(whole)).reshape(whole)
    ranges = shard.ranges(index)
    mine = np.concatenate([addresses[(slice(None),) * shard.dim + (slice(*each),)] for each in ranges], axis=shard.dim)
    assert mine.shape == shard.local_shape(whole)
    assert shard.whole_shape(mine.shape) == whole
    assert mine.size == local_numel(whole, shard.dim, ranges)
    found = np.full(mine.size, -1)
    covered = list(runs(whole, shard.dim, ranges, start, numel))
    assert len(covered) <= 3 * len(ranges)
    for run in covered:
        assert run.rows > 0
        assert run.length > 0
        for row in range(run.rows):
            at = run.local + row * run.local_step
            assert (found[at : at + run.length] == -1).all(), "an element twice"
            found[at : at + run.length] = np.arange(run.length) + run.whole + row * run.whole_step
    expected = np.full(mine.size, -1)
    expected[start : start + numel] = mine.reshape(-1)[start : start + numel]
    assert (found == expected).all()
    begin, end = whole_range(whole, shard.dim, ranges, start, numel)
    wanted = mine.reshape(-1)[start : start + numel]
    assert (begin, end) == ((wanted.min(), wanted.max() + 1) if numel else (0, 0))


@settings(max_examples=200, deadline=None)
@given(cuts())
def test_shards_of_all_ranks_cover_a_tensor_once_in_its_order(cut) -> None:
    whole, shard, *_ = cut
    taken = np.zeros(math.prod(whole), dtype=int)
    for index in range(shard.parts):
        last = -1
        for element in range(math.prod(shard.local_shape(whole))):
            (run,) = runs(whole, shard.dim, shard.ranges(index), element, 1)
            assert run.whole > last
            last = run.whole
            taken[run.whole] += 1
    assert (taken == 1).all()


def test_a_block_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be divided by 3"):
        Shard(0, (6, 4), 3)
