"""A search over axes: quick, without torch, and what it finds fits and is planned as it was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from estimators.cli import main
from estimators.estimate import Machine, estimate
from estimators.search import Wish, fit_axes
from infinity.errors import ConfigError

GB = 10**9
TIMED = """
import sys, time
from estimators.cli import main
began = time.process_time()
code = main(["llama-3.1-70b", "--ranks", "64", "--fit", "--gpu", "80GB", "--ram", "1TB"])
print(code, "torch" in sys.modules, time.process_time() - began)
"""


@pytest.mark.timeout(400)
def test_70_b_on_64_ranks_are_divided_in_ten_seconds_without_torch() -> None:
    """Seconds of computation, the best of three: other processes of the machine do not count."""
    best = 1e9
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-c", TIMED], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )  # fmt: skip
        code, torch, seconds = run.stdout.splitlines()[-1].split()
        assert (code, torch) == ("0", "False")
        assert "data x tensor x pipeline" in " ".join(run.stdout.split()) and "bubble" in run.stdout
        best = min(best, float(seconds))
        if best < 10:
            break
    assert best < 10


@pytest.fixture(scope="module")
def wish() -> Wish:
    return Wish("llama-3.1-8b", Machine(40 * GB, 512 * GB), {"ranks": 8})


def test_what_is_found_fits_and_is_planned_as_it_was_found(wish: Wish) -> None:
    found = fit_axes(wish)
    assert len({choice.estimate.plan.topology for choice in found}) == len(found) > 1
    speeds = [choice.estimate.outline.tokens_a_second * choice.estimate.plan.topology.dp for choice in found]
    assert speeds == sorted(speeds, reverse=True)
    for choice in found[:2]:
        again = estimate(
            wish.model, choice.config, machine=wish.machine, ranks=8, tiled_loss=choice.estimate.work.tiled_loss
        )
        assert again.fits and again.plans == choice.estimate.plans and again.plan == choice.estimate.plan


def test_what_is_said_is_kept(wish: Wish) -> None:
    fixed = {"pp": 4, "schedule": "1f1b", "micro_batches": 8}
    for choice in fit_axes(Wish(wish.model, wish.machine, {**wish.options, **fixed})):
        assert choice.estimate.plan.topology.pp == 4
        assert choice.config["parallel"]["schedule"] == "1f1b"
        assert choice.config["gradient_accumulation_steps"] == 8
    alone = fit_axes(Wish(wish.model, wish.machine, {**wish.options, "pp": 1, "tp": 1}))
    assert {choice.estimate.plan.topology.dp for choice in alone} == {8}


def test_the_saved_configuration_has_the_axes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    options = ["llama-3.1-8b", "--ranks", "8", "--gpu", "40GB", "--ram", "512GB"]
    assert main([*options, "--fit", "--pp", "2", "--save", str(saved), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert json.loads(saved.read_text())["parallel"]["pipeline"] == 2
    tiled = ["--tiled-loss"] if best["estimate"]["tiled_loss"] else []
    assert main([*options, "--config", str(saved), *tiled, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fingerprint"] == best["estimate"]["fingerprint"]


def test_a_sequence_axis_is_refused_with_what_to_give_instead():
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2}
    with pytest.raises(ConfigError, match="estimates know no sequence axis yet"):
        estimate("llama-3.1-8b", config, ranks=2)
