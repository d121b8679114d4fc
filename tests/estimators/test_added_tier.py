"""The estimators know a tier that was added as they know the others, under its own name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from estimators.estimate import Estimate, Machine, estimate
from estimators.picture import picture
from estimators.report import compare_estimates, format_report
from estimators.search import Wish, nearest, search
from infinity.base.sizes import format_bytes
from infinity.memory.tiers.nvme import NvmeTier
from infinity.memory.tiers.registry import add_tier, remove_tier
from infinity.plan.capacity import Capacity
from infinity.plan.types import EXTENT_ALIGNMENT, Kind, Tier

MODEL = "gpt2"
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3, "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "archive", "nvme_path": "archive"},
    },
}  # fmt: skip


@pytest.fixture
def archive(request: pytest.FixtureRequest) -> Iterator[Tier]:
    """A tier behind NVMe that takes so many bytes a rank."""
    tier = Tier("archive", addressable=False, alignment=EXTENT_ALIGNMENT, capacity=getattr(request, "param", None))
    add_tier(tier, NvmeTier)
    yield tier
    remove_tier(tier)


def sized(machine: Machine) -> Estimate:
    return estimate(MODEL, CONFIG, machine=machine, sequence=128)


@pytest.mark.parametrize("accelerator", [True, False])
def test_it_stands_in_every_table_and_picture(archive: Tier, accelerator: bool) -> None:
    found = sized(Machine(8 * 10**9 if accelerator else None, 64 * 10**9, accelerator=accelerator))
    assert found.tiers[-1] is archive and found.fits
    assert found.peak(archive) >= found.shown(found.at_rest)[archive][Kind.EXP_AVG] > 0
    text = format_report(found)
    assert "optimizer states on archive" in text and "archive, GB a rank" in text
    assert "archive" in compare_estimates([("one", found), ("other", found)]).splitlines()[0].split()
    assert ">archive<" in picture(found)


@pytest.mark.parametrize("archive", [10**9], indirect=True)
def test_what_it_lacks_is_said(archive: Tier) -> None:
    found = sized(Machine(8 * 10**9, 64 * 10**9))
    assert not found.fits and [*found.excess] == [archive]
    text = format_report(found)
    assert "too much on archive" in text
    assert f"It takes {format_bytes(found.peak(archive))} on archive for each rank, more ranks" in text


def test_a_search_nearby_leaves_states_there(archive: Tier) -> None:
    machine = Machine(1_600 * 10**6, 64 * 10**9, 100 * 10**9)
    found, wish = sized(machine), Wish(MODEL, machine, {"sequence": 128})
    assert not found.fits
    near = nearest(found, wish)
    assert near is not None and near.estimate.fits
    assert set(near.estimate.plan.placement.states) == {archive}


def test_a_search_places_nothing_there(archive: Tier) -> None:
    found = search(Wish(MODEL, Machine(8 * 10**9, 64 * 10**9, 100 * 10**9), {"sequence": 128, "ranks": 2}))
    assert found.estimate.fits and archive not in found.estimate.plan.placement.states


def test_a_limit_is_a_tiers_own_whatever_its_name() -> None:
    tier = Tier("process", addressable=False, alignment=EXTENT_ALIGNMENT, capacity=5)
    assert Capacity(process=3).own(tier) == 5
    assert Capacity(nvme=3).own(Tier.NVME) == 3
