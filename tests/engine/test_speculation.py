"""Steps that begin in backward before their norm is known: the bits of steps that wait, and what becomes of a guess.

`tests.speculation_matrix` has all settings; here is a cut of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import infinity
from infinity.plan.types import Tier
from infinity.step.optimizer_step import _InBackward
from tests.speculation_matrix import STEPS, Cell, judged, run
from tests.support.models import token_batch
from tests.support.oracle import SmallModel, settings
from tests.support.spawn import RankPool

_CELL = Cell("bf16", 1, 1, accelerator=False, recomputed=False, pattern="random", guess=True)


@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        ("all right", {"precision": "fp32"}), ("in turn", {"accumulation": 4, "recomputed": True}),
        ("random", {"precision": "fp16"}), ("all wrong", {"recomputed": True}),
        ("not finite", {"precision": "fp16", "accumulation": 4}), ("not finite", {"home": "cpu"}),
        ("random", {"ranks": 2, "home": "cpu"}),
    ],
)  # fmt: skip
def test_a_guess_does_not_show(rank_pools: Any, pattern: str, change: dict[str, Any]) -> None:
    cells = [replace(_CELL, **change, pattern=pattern, guess=guess) for guess in (False, True)]
    assert judged(cells, {(cells[0].ranks, False): rank_pools[cells[0].ranks]})[1] == []


def test_beside_an_accelerator_a_guess_is_the_default_and_rests_when_it_was_wrong() -> None:
    cells = [replace(_CELL, accelerator=True, pattern="in turn", guess=guess) for guess in (False, "auto")]
    # In CPU memory, whose old values are copied; with delays, which show races.
    cells.append(replace(_CELL, accelerator=True, pattern="in turn", home="cpu", seed=3))
    with RankPool(1) as pool:
        assert judged(cells, {(1, True): pool})[1] == []
        _, groups, (committed, missed, _) = pool.run(run, cells[1], timeout=60)[0]
    # Right at 0, wrong at 1, then 4 steps of rest; right at 6, wrong at 7, then 8 (16, halved by the right one); right
    # at 16, wrong at 17. The last two units have the large gradients: the first is measured when the last lands.
    assert (committed, missed) == (3 * groups, 3 * (groups - 1))


def test_a_norm_that_only_all_ranks_know_to_be_too_large_is_found_at_the_step() -> None:
    """What a rank has measured may be below the limit."""
    cell = replace(_CELL, pattern="in turn")
    with patch.object(_InBackward, "add", return_value=0.0):
        digest, groups, (committed, missed, forgotten) = run(0, 1, cell)
    # One of the steps measures transfers, and forgets what has begun.
    assert committed == missed + forgotten == STEPS // 2 * groups and forgotten <= groups and groups > 2
    assert digest == run(0, 1, replace(cell, guess=False))[0]


def test_what_is_wrong_ends_before_the_step() -> None:
    """No more is stepped once the gradients that have come are over the limit."""
    _, groups, (committed, missed, _) = run(0, 1, replace(_CELL, pattern="all wrong"))
    assert committed == 0 < missed < (STEPS - 1) * groups


def test_a_plan_says_that_it_guesses_and_what_a_wish_without_effect_lacks(tmp_path: Path, caplog: Any) -> None:
    row = settings(tmp_path, param="nvme", optimizer="nvme", clip=1.0, speculative_step=True, log_level="info")
    with infinity.initialize(model=SmallModel(), config=row)[0] as engine:
        assert "before their norm is known" in engine.plan.explain()
        assert "speculative_step" not in caplog.text
        policy = engine.plan.policy
        assert (policy.step_in_backward, policy.speculates) == (True, True)
        twice = engine.plan.file_nbytes(Tier.NVME)
    plain = {**row, "speculative_step": "auto"}
    with infinity.initialize(model=SmallModel(), config=plain)[0] as engine:
        assert "norm is known" not in engine.plan.explain() and engine.plan.file_nbytes(Tier.NVME) < twice
        engine.backward(engine(**token_batch(0, 0, positions=8)))
        engine.step()
        assert engine.early_groups.committed == 0
    with infinity.initialize(model=SmallModel(), config={**row, "overlap": False})[0]:
        assert "speculative_step: true has no effect here" in caplog.text
