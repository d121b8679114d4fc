"""Copies of shards against numpy: any cut, any range, through blocks of any size."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinity.memory import shard_copy
from infinity.memory.shard_copy import gather_shard, read_shard, scatter_shard, spread_shard
from infinity.plan.shards import Shard, shard_range, whole_range


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Shard, int, int, int]:
    """(whole shape, shard, index of a rank, start, numel)."""
    parts = draw(st.integers(1, 4))
    blocks = tuple(parts * size for size in draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dim = draw(st.integers(0, len(shape)))
    whole = (*shape[:dim], sum(blocks), *shape[dim:])
    shard = Shard(dim, blocks, parts)
    numel = math.prod(shard.local_shape(whole))
    start = draw(st.integers(0, numel))
    return whole, shard, draw(st.integers(0, parts - 1)), start, draw(st.integers(0, numel - start))


def expected(whole: tuple[int, ...], shard: Shard, index: int) -> Tensor:
    """The shard's elements, of a whole tensor that counts from 0."""
    values = np.arange(math.prod(whole), dtype=np.int32).reshape(whole)
    mine = [values[(slice(None),) * shard.dim + (slice(*each),)] for each in shard.ranges(index)]
    return torch.from_numpy(np.concatenate(mine, axis=shard.dim).reshape(-1))


sizes = st.sampled_from([(4, 32), (64, 48), (16, 1 << 20), (1 << 20, 1 << 20)])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=cuts(), limits=sizes)
def test_a_range_of_a_shard_is_read_from_the_flat_whole_and_back(cut, limits, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, shard, index, start, numel = cut
    # (bytes of a run that is read by itself, bytes of a block)
    monkeypatch.setattr(shard_copy, "_RUN_NBYTES", limits[0])
    monkeypatch.setattr(shard_copy, "_BLOCK_NBYTES", limits[1])
    flat = torch.arange(math.prod(whole), dtype=torch.int32)
    mine = expected(whole, shard, index)
    ranges = shard.ranges(index)
    read_at: list[tuple[int, int]] = []

    def read(first: int, out: Tensor) -> None:
        assert out.numel() > 0
        read_at.append((first, out.numel()))
        out.copy_(flat[first : first + out.numel()])

    # The target lies within a larger buffer: what is beside it keeps its values.
    room = torch.full((numel + 4,), -1, dtype=torch.int32)
    read_shard(read, whole, shard.dim, ranges, start, room[2 : numel + 2])
    assert torch.equal(room[2 : numel + 2], mine[start : start + numel])
    assert room[[0, 1, -2, -1]].eq(-1).all()
    inner = math.prod(whole[shard.dim + 1 :])
    straight = max(end - begin for begin, end in ranges) * inner
    if (first := whole_range(whole, shard.dim, ranges, start, numel))[1] - first[0] != numel:
        assert all(size <= max(limits[1] // 4, straight) for _, size in read_at), "more memory than a block"

    # Back: into a range of the whole that has some of it.
    some = slice(flat.numel() // 5, flat.numel() - flat.numel() // 7)
    part = torch.full((flat.numel() + 4,), -1, dtype=torch.int32)

    def read_own(first: int, out: Tensor) -> None:
        assert start <= first
        assert first + out.numel() <= start + numel
        out.copy_(mine[first : first + out.numel()])

    lies = torch.full_like(flat, -1)
    lies[mine[start : start + numel].long()] = mine[start : start + numel]
    spread_shard(read_own, whole, shard.dim, ranges, start, numel, part[2:-2][some], some.start)
    assert torch.equal(part[2:-2][some], lies[some])
    part[2:-2][some] = -1
    assert part.eq(-1).all(), "an element outside"

    back = torch.full_like(flat, -1)
    scatter_shard(mine[start : start + numel], start, whole, shard.dim, ranges, back, 0)
    assert torch.equal(back, lies)
    again = torch.empty(numel, dtype=torch.int32)
    gather_shard(back, 0, whole, shard.dim, ranges, start, again)
    assert torch.equal(again, mine[start : start + numel])


@settings(max_examples=200, deadline=None)
@given(cut=cuts(), data=st.data())
def test_the_shards_range_within_a_range_of_the_whole(cut, data) -> None:
    whole, shard, index, *_ = cut
    mine = expected(whole, shard, index)
    first = data.draw(st.integers(0, math.prod(whole)))
    numel = data.draw(st.integers(0, math.prod(whole) - first))
    begin, end = shard_range(whole, shard.dim, shard.ranges(index), first, numel)
    found = [place for place, element in enumerate(mine.tolist()) if first <= element < first + numel]
    assert list(range(begin, end)) == found


def test_long_runs_are_read_where_they_belong_without_what_lies_between() -> None:
    whole, ranges = (3, 4, 40_000), ((1, 2), (3, 4))
    flat = torch.arange(math.prod(whole), dtype=torch.float32)
    read_nbytes = 0

    def read(first: int, out: Tensor) -> None:
        nonlocal read_nbytes
        read_nbytes += out.nbytes
        assert out.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
        out.copy_(flat[first : first + out.numel()])

    target = torch.empty(6 * 40_000)
    read_shard(read, whole, 1, ranges, 0, target)
    assert torch.equal(target, flat.view(whole)[:, [1, 3]].reshape(-1))
    assert read_nbytes == target.nbytes
