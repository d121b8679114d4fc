"""What a rank may take of what is free: the configured limits, and its part of those that a node's ranks share."""

from __future__ import annotations

import pytest

from infinity.config.schema import Memory
from infinity.plan.capacity import Capacity, within


def limits(**tiers: int | str) -> Memory:
    return Memory.model_validate({name: {"max_bytes": nbytes} for name, nbytes in tiers.items()})


@pytest.mark.parametrize(
    ("free", "limit", "ranks", "expected"),
    [
        (400, None, 2, 400), (400, 600, 2, 300), (400, 1000, 2, 400), (200, "50%", 4, 100), (None, None, 2, None),
        (None, 600, 2, 300), (None, "50%", 2, None),
    ],
)  # fmt: skip
def test_a_rank_has_its_share_of_the_lesser(free, limit, ranks, expected):
    given = limits() if limit is None else limits(cpu=limit, nvme=limit)
    found = within(given, Capacity(cpu=free, nvme=free), ranks=ranks, accelerator=True, by_budget=False)
    assert (found.cpu, found.nvme) == (expected, expected)


def test_an_accelerator_is_nobody_elses():
    found = within(limits(gpu=600), Capacity(gpu=800), ranks=4, accelerator=True, by_budget=False)
    assert found == Capacity(gpu=600)


def test_budgets_leave_room_where_no_limit_is_configured():
    found = within(limits(cpu=300), Capacity(gpu=800, cpu=800), ranks=1, accelerator=True, by_budget=True)
    assert found == Capacity(gpu=600, cpu=300)


def test_without_an_accelerator_one_memory_holds_both_tiers_and_a_limit_of_the_gpu_still_counts():
    free = Capacity(process=800, nvme=90)
    alone = within(limits(cpu=1000), free, ranks=2, accelerator=False, by_budget=False)
    assert alone == Capacity(process=500, nvme=90)
    both = within(limits(gpu=100, cpu=1000), free, ranks=2, accelerator=False, by_budget=False)
    assert both == Capacity(gpu=100, cpu=500, process=800, nvme=90)
