"""A search over axes: quick, without torch, and what it finds fits and is planned as it was found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from estimators.cli import main
from estimators.estimate import Machine, estimate
from estimators.model import PRESETS
from estimators.report import advised, format_report
from estimators.search import Wish, advise, fit_axes
from estimators.step_time import Bound
from estimators.traffic import Link
from infinity.errors import ConfigError
from infinity.plan.types import Tier

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


def test_ranks_that_share_sequences_have_a_part_of_the_work() -> None:
    """Attention of 32 heads, and 8 of keys and values, of 128 exchanges (2 x 32 + 2 x 8) x 128 columns a layer."""
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2, "activation_checkpointing": {"every": 1}}
    alone, shared = (estimate("llama-3.1-8b", config, ranks=4, sp=sp, sequence=8192) for sp in (1, 4))
    assert shared.plan.topology.replicas == 1 and shared.config.train_batch == 2
    assert shared.plan.placement == alone.plan.placement
    assert (shared.work.tokens, shared.flops) == (2 * 8192 // 4, alone.flops / 4)
    sent = 32 * (2 * 32 + 2 * 8) * 128 * (2 * 8192 // 4) * 3 // 4 * 2
    assert shared.attention_nbytes == sent
    # Forward, backward, and forward again; layers wait for it.
    assert shared.exchanged_nbytes == 3 * sent
    assert shared.traffic.total(Link.NETWORK) - alone.traffic.total(Link.NETWORK) == 3 * sent
    seconds = 3 * sent / alone.profile.network_rate
    assert shared.outline.parts[Bound.NETWORK] - alone.outline.parts[Bound.NETWORK] == pytest.approx(seconds)
    assert shared.activations.nbytes == pytest.approx(alone.activations.nbytes / 4, rel=0.05)
    said = " ".join(format_report(shared).split())
    assert "4 ranks (sequence 4)" in said
    assert "a rank has 4,096 tokens of a micro-batch; attention sends 6.04 GB a step" in said


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [("llama-3.1-8b", 3, "does not divide the 32 attention heads"),
     ("gpt2", 2, "drops out attention"),
     ({**PRESETS["phi-3-mini"], "rope_scaling": {"type": "longrope"}}, 2, "scales its rotary positions")],
)  # fmt: skip
def test_what_the_engine_refuses_to_share_is_refused(model: object, size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        estimate(model, {"sequence_parallel_size": size}, ranks=size)
    with pytest.raises(ConfigError, match=r"beside parallel\.tensor"):
        estimate("llama-3.1-8b", {"sequence_parallel_size": 2}, ranks=4, tp=2)


def test_a_long_sequence_turns_on_what_it_needs_from_cheap_to_dear() -> None:
    """Of 131,072 tokens a layer's hidden states are 1.07 GB in bf16, and the logits with their gradients 202 GB."""
    machine, long = Machine(24 * GB, 64 * GB, 2000 * GB), {"sequence": 131_072}
    found = advise(Wish("llama-3.1-8b", machine, {**long, "ranks": 1})).best.estimate
    assert found.fits and found.offloaded is not None
    assert found.offloaded.nbytes == 32 * 131_072 * 4096 * 2
    assert [*found.turned_on] == [
        "layers computed again in backward", "the loss in tiles", "the MLPs in tiles",
        "their inputs on cpu until backward",
    ]  # fmt: skip
    spared = {name: nbytes - found.peak(Tier.GPU) for name, nbytes in found.turned_on.items()}
    assert spared["their inputs on cpu until backward"] == 31 * 131_072 * 4096 * 2
    logits = 3 * 4 * 131_072 * 128_256
    assert logits - found.activations.nbytes < spared["the loss in tiles"] < logits
    # Four such accelerators share the sequence, and nothing leaves them.
    shared = advise(Wish("llama-3.1-8b", machine, {**long, "ranks": 4}))
    assert shared.best.config["sequence_parallel_size"] == 4
    assert [*shared.best.estimate.turned_on][-1] == "each sequence shared by 4 ranks"
    assert "1 x 4 x 1 x 1" in advised(shared) and "axes: data x sequence x tensor x pipeline" in advised(shared)
    # Where no rank alone has room, as few share a sequence as need be; short ones are shared by none.
    million = advise(Wish("llama-3.1-8b", Machine(24 * GB, 512 * GB), {"sequence": 1 << 20, "ranks": 8})).best
    assert million.estimate.fits and million.config["sequence_parallel_size"] == 8
    short = advise(Wish("llama-3.1-8b", Machine(80 * GB, 512 * GB), {"sequence": 4096, "ranks": 4}))
    assert all(choice.estimate.work.parts == 1 for choice in short.choices)


def test_too_many_tokens_are_refused_with_how_many_fit(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["llama-3.1-8b", "--fit", "--gpu", "24GB", "--ram", "64GB", "--nvme", "2TB", "--tokens"]
    assert main([*command, "262144"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "most of them one block, computed again (29.2 GB)" in said and "(--ranks 2 --sp 2)" in said
    fits = re.search(r"sequences of about ([\d,]+) tokens \(--sequence\) fit", said)
    assert fits is not None
    assert main([*command, fits.group(1).replace(",", "")]) == 0
