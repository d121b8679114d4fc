"""Bytes on several drives: every byte at one place, files as large as the plan, drives loaded by their weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from infinity.memory.tiers import striping
from infinity.memory.tiers.striping import Stripes, measured_weights
from infinity.plan.types import EXTENT_ALIGNMENT, Extent

PAGE = EXTENT_ALIGNMENT


def test_one_drive_has_the_bytes_of_the_plan_at_their_offsets():
    striped = Stripes(3 * PAGE + 5, [7.0])
    assert striped.nbytes_by_drive == (3 * PAGE + 5,)
    (piece,) = striped.pieces(Extent(PAGE, 2 * PAGE))
    assert (piece.drive, piece.offset, piece.begin, piece.nbytes) == (0, PAGE, 0, 2 * PAGE)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 2.5, 0.7), (1e9, 2e9, 3e9, 4e9)])
@pytest.mark.parametrize("pages", [1, 7, 1000, 4096, 54321])
def test_every_byte_has_one_place_and_shares_follow_the_weights(weights, pages):
    nbytes, rng = pages * PAGE, random.Random(pages)
    striped = Stripes(nbytes, weights)
    sizes = striped.nbytes_by_drive
    assert sum(sizes) == nbytes
    if pages >= 1000:
        for size, weight in zip(sizes, weights, strict=True):
            assert size == pytest.approx(nbytes * weight / sum(weights), rel=0.05)
    taken = [[] for _ in weights]
    at = 0
    while at < nbytes:
        extent = Extent(at, min(rng.choice([1, 3, 100, 5000]) * PAGE, nbytes - at))
        begin = 0
        for piece in striped.pieces(extent):
            assert piece.begin == begin and piece.nbytes > 0
            assert piece.offset % PAGE == 0 and piece.nbytes % PAGE == 0
            taken[piece.drive].append((piece.offset, piece.offset + piece.nbytes))
            begin += piece.nbytes
        assert begin == extent.nbytes
        at += extent.nbytes
    for spans, size in zip(taken, sizes, strict=True):
        reached = 0
        for begin, end in sorted(spans):
            assert begin == reached
            reached = end
        assert reached == size


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (5, 2, 1)])
def test_a_large_extent_lies_on_every_drive_by_its_weight(weights):
    extent = Extent(10 * PAGE, 256 << 20)
    loads = [0] * len(weights)
    for piece in Stripes(1 << 30, weights).pieces(extent):
        loads[piece.drive] += piece.nbytes
    for load, weight in zip(loads, weights, strict=True):
        assert load == pytest.approx(extent.nbytes * weight / sum(weights), rel=0.05)


@pytest.mark.parametrize("weights", [(), (1.0, 0.0), (1.0, -2.0)])
def test_weights_that_mean_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="one above 0"):
        Stripes(PAGE, weights)


def test_an_extent_beyond_the_tier_is_refused():
    with pytest.raises(ValueError, match="beyond the 8192 bytes"):
        list(Stripes(2 * PAGE, (1, 1)).pieces(Extent(PAGE, 2 * PAGE)))


@pytest.mark.parametrize(("rates", "weights"), [([2.0, 1.9], (1.0, 1.0)), ([4.0, 1.0], (4.0, 1.0))])
def test_drives_that_are_nearly_as_fast_share_equally(tmp_path, monkeypatch, rates, weights):
    given = iter(rates)
    monkeypatch.setattr(striping, "_rate", lambda directory, queue: next(given))
    measured_weights.cache_clear()
    found = measured_weights((tmp_path / "a", tmp_path / "b"), 4, 10.0)
    assert found == measured_weights((tmp_path / "a", tmp_path / "b"), 4, 10.0) == weights
    measured_weights.cache_clear()


def test_a_measurement_leaves_nothing_on_the_drive(tmp_path, monkeypatch):
    monkeypatch.setattr(striping, "PROBE_NBYTES", 1 << 20)
    measured_weights.cache_clear()
    folders: tuple[Path, ...] = (tmp_path / "a", tmp_path / "b")
    for folder in folders:
        folder.mkdir()
    assert min(measured_weights(folders, 4, 10.0)) > 0
    assert not [*folders[0].iterdir(), *folders[1].iterdir()]
    measured_weights.cache_clear()
