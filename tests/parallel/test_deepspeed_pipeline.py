"""A program for DeepSpeed's pipelines, on one rank and on several: equal losses at every stage, tier and schedule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from infinity.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

import infinity.deepspeed as deepspeed
from infinity.errors import ConfigError
from tests.conftest import RankPools
from tests.parallel.deepspeed_pipeline import train
from tests.support.cells import kept
from tests.support.spawn import RankError, run_ranks

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("deepspeed_pipeline.py")
TIERS = (
    "--stage 0", "--stage 1 --offload cpu", "--stage 2 --offload nvme", "--stage 3", "--stage 3 --offload cpu",
    "--stage 3 --offload nvme",
)  # fmt: skip
SCHEDULES = ("gpipe", "interleaved --virtual-stages 2", "zero_bubble", "zero_bubble --virtual-stages 2")


def run_program(rank: int, world: int, drive: str, lines: list[str]) -> list[dict[str, Any]]:
    """What the program prints with each command line."""
    torch.set_num_threads(1)
    return [train(line.split(), drive) for line in lines]


def told(found: dict[str, Any]) -> list[float]:
    """All its losses."""
    return [float.fromhex(loss) for loss in (*found["losses"], found["held out"])]


EVERY = pytest.mark.parametrize(
    ("tiers", "schedules"),
    kept([(TIERS, SCHEDULES), (TIERS[::2], SCHEDULES[1::2])], [(TIERS[::2], SCHEDULES[1::2])]), ids=["all", "some"],
)  # fmt: skip


@EVERY
@pytest.mark.slow
def test_two_stages_have_the_bits_of_one_on_every_tier_and_schedule(rank_pools, tmp_path, tiers, schedules):
    bases = ("", "--bf16", "--interval 2")
    whole = rank_pools[1].run(run_program, str(tmp_path), list(bases))[0]
    cells = [(0, tier) for tier in tiers]
    cells += [(0, f"--stage 3 --offload nvme --schedule {schedule}") for schedule in schedules]
    cells += [(0, "--partition-method type:BlockPipe"), (1, "--stage 3 --offload nvme"), (2, "--stage 3 --offload cpu")]
    lines = [f"-p 2 {bases[base]} {cell}" for base, cell in cells]
    for rank in rank_pools[2].run(run_program, str(tmp_path), lines, timeout=200):
        for (base, _), line, found in zip(cells, lines, rank, strict=True):
            assert told(found) == told(whole[base]), line
    assert told(whole[0])[-1] < told(whole[0])[0]


@EVERY
@pytest.mark.slow
def test_a_weight_tied_across_stages_is_trained_as_on_one_rank(rank_pools, tmp_path, tiers, schedules):
    """Its two gradients are added once a step; between tiers and schedules no bit differs."""
    (whole,) = rank_pools[1].run(run_program, str(tmp_path), ["--tied"])[0]
    lines = [f"-p 2 --tied {tier}" for tier in tiers]
    lines += [f"-p 2 --tied --stage 3 --offload nvme --schedule {schedule}" for schedule in schedules]
    found = rank_pools[2].run(run_program, str(tmp_path), lines, timeout=200)
    assert found[0] == [{**each, "rank": 0} for each in found[1]]
    assert len({tuple(told(each)) for each in found[0]}) == 1
    assert told(found[0][0]) == pytest.approx(told(whole), abs=1e-5)


@pytest.mark.matrix
@pytest.mark.slow
def test_stages_and_data_ranks_together_have_the_bits_of_data_ranks_alone(rank_pools: RankPools, tmp_path: Path):
    (whole,) = rank_pools[2].run(run_program, str(tmp_path), ["--layers 6 --stage 2"])[0]
    lines = [f"-p 2 --layers 6 {tier}" for tier in TIERS]
    for found in rank_pools[4].run(run_program, str(tmp_path), lines, timeout=200)[3]:
        assert told(found) == told(whole)


@pytest.mark.matrix
@pytest.mark.slow
def test_the_program_runs_with_deepspeeds_own_imports(rank_pools: RankPools, tmp_path: Path):
    """Unchanged but for these, started as a user starts it."""
    text = PROGRAM.read_text().replace("infinity.deepspeed as deepspeed", "deepspeed")
    (tmp_path / "program.py").write_text(text.replace("infinity.deepspeed", "deepspeed"))
    line = "-p 2 --tied --stage 3 --offload cpu"
    reply = subprocess.run(
        [sys.executable, "-m", "infinity", "run", "--as-deepspeed", "--nproc", "2", "program.py", *line.split()],
        capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert reply.returncode == 0, reply.stderr[-3000:]
    (expected,) = rank_pools[2].run(run_program, str(tmp_path), [line])[0]
    assert json.loads(reply.stdout.splitlines()[-1]) == {name: expected[name] for name in ("losses", "held out")}


class GPTModelPipe(PipelineModule):
    """A class of the program's own, as Megatron has."""


class Enter(nn.Module):
    """Takes a tuple of two."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        first, second = inputs
        return first * second


class Weighted(nn.Module):
    """A loss with a weight, of the mean over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return ((outputs.mean(1) - labels) * self.weight).square().mean()


def train_lengths(rank: int, world: int) -> list[float]:
    """Losses of a model of its own class, with dropout, over inputs whose lengths change and labels' do not."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mix = TiedLayerSpec("mix", nn.Linear, 8, 8)
    layers = [LayerSpec(Enter), mix, nn.Dropout(0.5), LayerSpec(nn.Linear, 8, 8), nn.Dropout(0.5), nn.GELU(), mix]
    net = GPTModelPipe(layers, loss_fn=Weighted(), seed_layers=True, partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=net, config={
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "pipeline": {"stages": world},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 3},
        },
    )  # fmt: skip
    losses = []
    with engine:
        for step in range(4):
            numbers = torch.Generator().manual_seed(step)
            shape = (2, 3 + step, 8)
            texts = torch.randn(2, 2, *shape, generator=numbers)
            batches = [(tuple(pair), pair[0].mean(1)) for pair in texts]
            losses.append(engine.train_batch(batches).item())
    return losses


def test_lengths_change_dropout_is_the_same_and_the_loss_has_a_weight(rank_pools: RankPools):
    (whole,) = rank_pools[1].run(train_lengths)
    first, second = rank_pools[2].run(train_lengths)
    assert first == second == pytest.approx(whole, abs=1e-6)
    assert len(set(whole)) == 4


def build_without_stages(rank: int, world: int) -> str:
    """What a model is told that was built without the pipeline axis which it asks for."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        net = PipelineModule([LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4)], num_stages=2)
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(model=net, config=config)
    return str(caught.value)


def test_a_model_that_was_built_without_its_stages_is_told(rank_pools: RankPools):
    for said in rank_pools[2].run(build_without_stages):
        assert "was built with parallel.pipeline 1, and initialize() is given 2" in said


def train_wrongly(rank: int, world: int) -> None:
    """A model whose first stage returns no tensor."""
    layers = [nn.Linear(4, 4), lambda hidden: {"hidden": hidden}, lambda named: named["hidden"], nn.Linear(4, 4)]
    net = PipelineModule(layers, loss_fn=nn.MSELoss(), partition_method="uniform", num_stages=2)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "pipeline": {"stages": 2}}
    engine, *_ = deepspeed.initialize(model=net, config=config)
    with engine:
        engine.train_batch([(torch.ones(1, 4), torch.ones(1, 4))])


def test_a_boundary_that_is_no_tensor_ends_all_ranks_with_the_layers_name():
    with pytest.raises(RankError, match=r"layers.1 \(<lambda>\) is the last layer of stage 0 and returns dict"):
        run_ranks(train_wrongly, 2)
