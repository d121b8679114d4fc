"""Ranks of an engine with three axes that part: the cases of `tests.pipeline_divergences` that each catch a mistake of
their own, on eight ranks in one launch.
"""

from __future__ import annotations

import pytest

from tests.pipeline_divergences import CASES, all_cases

# Of what no watchdog has to find; generous, for eight ranks share the cores with other tests.
SECONDS_MAX = 60.0


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_every_rank_is_told_which_rank_of_three_axes_has_left_and_where() -> None:
    names = [name for name in CASES if name not in ("killed", "skipped micro-batch")]
    rows = all_cases(names, timeout=580)
    assert [row["case"] for row in rows] == names
    assert [row for row in rows if row["wrong"]] == []
    assert all(row["seconds"] < SECONDS_MAX for row in rows), rows


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_killed_in_the_middle_of_a_step_is_named_by_all_others() -> None:
    (row,) = all_cases(["killed"])
    assert not row["wrong"] and row["seconds"] < SECONDS_MAX, row
