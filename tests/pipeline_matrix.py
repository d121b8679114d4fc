"""Does the pipeline axis show in what is computed? Recorded in benchmarks/results/.

    python -m tests.pipeline_matrix [--parts exact,ties,axes,device] [--json FILE]

exact   schedules x pp x precision x stage x tier x clipping: masters and moments have the bits of one rank that
        accumulates as many micro-batches, for each family
ties    models with tied weights, pp 2 and 4: losses of the first step are those of plain torch to the bit, weights
        after ten steps of SGD within 1e-6, and all copies of a weight have one hash after each step
axes    pp x dp, pp x tp and pp x dp x tp on 4 and 8 ranks: at each stage one hash for all schedules and tiers, the same
        losses on all ranks, and weights after three steps within 1e-5 of one rank's
device  pp 2 x dp 2 on the simulated accelerator: the hash of the CPU, and no two accesses to memory without an edge

One launch a world size: its ranks live for all cells.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

import infinity
from infinity.zero.parameter import is_elsewhere
from tests.support import accelerator
from tests.support.host_accesses import host_accesses_are_declared
from tests.support.oracle import join, settings
from tests.support.simulated_device import Communicating, SimulatedDevice, engines_use
from tests.support.spawn import RankPool

FAMILIES = ("llama", "gpt_neox", "mixtral")
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
# Micro-batches a step, a number that all schedules on 2 and 4 ranks take.
COUNT = 8
LAYERS, STEPS, VOCABULARY = 8, 2, 96
# Sequences of several lengths in one step.
LENGTHS = (16, 8, 12, 16, 10, 16, 14, 8)
CELL_SECONDS = 600.0
TIGHT = {"stage3_max_live_parameters": 60_000, "stage3_prefetch_bucket_size": 20_000, "sub_group_size": 20_000}


def build(family: str, *, attention: str = "", **sizes: Any) -> nn.Module:
    """A small model of a family."""
    given: dict[str, Any] = {
        "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if family == "mixtral":
        given |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "gpt2":
        given = {
            "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64,
            "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }  # fmt: skip
    if family == "gemma2":
        given |= {"head_dim": 8, "sliding_window": 8}
    if family == "gpt_neox":
        given |= {"rotary_pct": 0.5}
        given.pop("num_key_value_heads")
    config = AutoConfig.for_model(family, **{**given, **sizes})
    config._attn_implementation = attention or ("eager" if family == "gemma2" else "sdpa")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for param in model.parameters():
        if param.ndim == 1:
            param.data.add_(0.1 * torch.randn(param.shape))
    return model.train()


def batches(step: int, row: int = 0, count: int = COUNT) -> list[dict[str, Tensor]]:
    """The micro-batches of a step that data index `row` is fed; every tenth label is ignored."""
    made = []
    for micro in range(count):
        seed = torch.Generator().manual_seed(10_000 * row + 100 * step + micro)
        ids = torch.randint(3, VOCABULARY, (2, LENGTHS[micro % len(LENGTHS)]), generator=seed)
        labels = ids.clone()
        labels[:, ::10] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def configuration(drive: str, parallel: dict[str, Any], *, count: int = COUNT, **given: Any) -> dict[str, Any]:
    """A configuration with the axes of `parallel`. Gradients of states on NVMe are there, too."""
    rule = given.pop("rule", "AdamW")
    config = settings(drive, **given)
    if given.get("optimizer") == "nvme":
        config["zero_optimization"]["offload_gradients"] = {"device": "nvme"}
    config["optimizer"] = {"type": rule, "params": ADAM if rule == "AdamW" else {"lr": 1e-3}}
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": count}
    return config | ({"parallel": parallel} if parallel else {})


def exchanged(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    if not torch.distributed.is_initialized():
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def digests(engine: Any) -> dict[str, str]:
    """By name, a hash of master and moments of each parameter that this rank has; data axis 1."""
    found = {}
    for name, param in own(engine):
        state, mine = infinity.state(param), hashlib.sha256()
        kept = engine.optimizer.state[param] if param.requires_grad else ()
        for kind in ("master", *(kind for kind in kept if kind != "step")):
            mine.update(state.local(kind).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found[name] = mine.hexdigest()
    return found


def train(family: str, parallel: dict[str, Any], given: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """Train some steps; returns the losses, the norms and the digests of what this rank has."""
    # The sums of torch's LayerNorm depend on the number of threads, and several ranks share the cores.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as drive:
        engine, *_ = infinity.initialize(
            model=build(family), config=configuration(drive, parallel, zero=TIGHT, **given)
        )
        with engine:
            losses, norms = [], []
            for step in range(steps):
                losses.append(float(engine.train_batch(batches(step))).hex())
                norms.append(engine.get_global_grad_norm().hex())
            return {"losses": losses, "norms": norms, "digests": digests(engine),
                    "mismatches": engine.coordinator.mismatches}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A setting of the matrix of exactness, without its schedule."""

    family: str
    dtype: str
    stage: int
    tier: str
    clip: float
    rule: str = "AdamW"

    @property
    def given(self) -> dict[str, Any]:
        param = self.tier if self.stage == 3 else "gpu"
        return {
            "stage": self.stage, "param": param, "optimizer": self.tier, "dtype": self.dtype, "clip": self.clip,
            "rule": self.rule,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.family} {self.dtype} stage{self.stage} {self.tier} clip{self.clip:g} {self.rule}"


def cells(families: Sequence[str] = FAMILIES) -> Iterator[Cell]:
    """All settings."""
    for each in itertools.product(families, ("fp32", "bf16"), (0, 3), ("gpu", "nvme"), (0.0, 0.5)):
        yield Cell(*each)


def one_rank(rank: int, world: int, wanted: Sequence[Cell]) -> dict[Cell, dict[str, Any]]:
    """What one rank computes that accumulates the same micro-batches."""
    return {cell: train(cell.family, {}, cell.given) for cell in wanted}


def compare_exact(
    rank: int, world: int, expected: dict[Cell, dict[str, Any]], schedules: Sequence[tuple[str, int]] = SCHEDULES
) -> list[dict[str, Any]]:
    """Each cell under each schedule, with a stage for each rank."""
    join(world)
    rows = []
    for cell, (schedule, virtual) in itertools.product(expected, schedules):
        began = time.monotonic()
        parallel = {"pipeline": world, "schedule": schedule, "virtual_stages": virtual}
        found = train(cell.family, parallel, cell.given)
        everyone = exchanged(found)
        if rank == 0:
            wanted = expected[cell]
            apart = {
                name for each in everyone for name, digest in each["digests"].items()
                if digest != wanted["digests"][name]
            }  # fmt: skip
            missing = wanted["digests"].keys() - {name for each in everyone for name in each["digests"]}
            alike = all(each["losses"] == wanted["losses"] and each["norms"] == wanted["norms"] for each in everyone)
            rows.append(
                {"cell": str(cell), "schedule": schedule, "virtual": virtual, "pipeline": world,
                 "parameters": len(wanted["digests"]), "apart": sorted(apart)[:5], "missing": sorted(missing)[:5],
                 "losses and norms alike": alike, "mismatches": max(each["mismatches"] for each in everyone),
                 "seconds": round(time.monotonic() - began, 1), "right": alike and not apart and not missing}
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


def exact(families: Sequence[str], sizes: Sequence[int] = (2, 4)) -> list[dict[str, Any]]:
    """All cells."""
    with RankPool(1) as pool:
        expected = pool.run(one_rank, list(cells(families)), timeout=CELL_SECONDS)[0]
    rows = []
    for world in sizes:
        with RankPool(world) as pool:
            rows += pool.run(compare_exact, expected, timeout=CELL_SECONDS * len(expected))[0]
    return rows


SGD = {"lr": 0.05, "momentum": 0.9}
TIED = ("gpt2", "gemma2")
LONG = 10
# Two stages of a rank divide these, and so do four ranks.
FEW = {"num_hidden_layers": 4}


def small(family: str) -> nn.Module:
    """A model of few blocks, with tied weights where its family ties them."""
    return build(family, **({"n_layer": FEW["num_hidden_layers"]} if family == "gpt2" else FEW))


def tied_by_torch(rank: int, world: int, family: str) -> tuple[list[str], dict[str, Tensor]]:
    """The losses of each step, and the weights after the last, of plain torch."""
    torch.set_num_threads(1)
    model = small(family)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    losses = []
    for step in range(LONG):
        found = []
        for batch in batches(step):
            loss = model(**batch).loss
            (loss / COUNT).backward()
            found.append(loss.item())
        losses.append(float(torch.tensor(math.fsum(found) / COUNT)).hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def compare_ties(
    rank: int, world: int, expected: dict[str, tuple[list[str], dict[str, Tensor]]],
    schedules: Sequence[tuple[str, int]] = SCHEDULES, tiers: Sequence[str] = ("gpu", "nvme"),
) -> list[dict[str, Any]]:  # fmt: skip
    """Each family with tied weights under each schedule, with a rank for each stage, or two stages a rank."""
    join(world)
    rows = []
    for family, (schedule, virtual), tier in itertools.product(expected, schedules, tiers):
        if world * virtual > FEW["num_hidden_layers"]:
            continue
        parallel = {"pipeline": world, "schedule": schedule, "virtual_stages": virtual}
        losses, copies = [], []
        with tempfile.TemporaryDirectory() as drive:
            model = small(family)
            config = configuration(drive, parallel, stage=3, param=tier, optimizer=tier, zero=TIGHT)
            del config["optimizer"]
            optimizer = torch.optim.SGD(model.parameters(), **SGD)
            engine, *_ = infinity.initialize(model=model, config=config, optimizer=optimizer)
            with engine:
                for step in range(LONG):
                    losses.append(float(engine.train_batch(batches(step))).hex())
                    copies.append(exchanged(held(engine)))
                mine = {name: infinity.state(param).local("master").view(param.shape) for name, param in own(engine)}
        wanted_losses, wanted = expected[family]
        apart = max(float((value - wanted[name]).abs().max()) for name, value in mine.items())
        everyone = exchanged((losses, apart))
        if rank == 0:
            shared = {name for each in copies[0] for name in each if sum(name in other for other in copies[0]) > 1}
            hashes = max(
                len({each[name] for each in step if name in each}) for step in copies for name in sorted(shared)
            )
            row = {
                "family": family, "schedule": schedule, "virtual": virtual, "pipeline": world, "tier": tier,
                "copied": sorted(shared), "hashes of copies": hashes,
                "first loss": losses[0] == wanted_losses[0], "weight": max(each for _, each in everyone),
                "losses alike": all(each == losses for each, _ in everyone),
            }  # fmt: skip
            row["right"] = (
                row["first loss"] and row["losses alike"] and hashes == 1 and row["weight"] <= 1e-6 and bool(shared)
            )
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def own(engine: Any) -> list[tuple[str, nn.Parameter]]:
    """The parameters that this rank has."""
    return [each for each in engine.module.named_parameters() if not is_elsewhere(each[1])]


def held(engine: Any) -> dict[str, str]:
    """By name, a hash of this rank's master of each parameter."""
    return {
        name: hashlib.sha256(infinity.state(param).local("master").numpy().tobytes()).hexdigest()
        for name, param in own(engine)
    }


def ties(families: Sequence[str] = TIED, sizes: Sequence[int] = (2, 4)) -> list[dict[str, Any]]:
    """All models with tied weights."""
    with RankPool(1) as pool:
        expected = {family: pool.run(tied_by_torch, family, timeout=CELL_SECONDS)[0] for family in families}
    rows = []
    for world in sizes:
        with RankPool(world) as pool:
            rows += pool.run(compare_ties, expected, timeout=CELL_SECONDS * len(families))[0]
    return rows


# With 1e-8 a gradient of rounding noise flips a whole step of the rate.
NEAR = {"type": "AdamW", "params": {**ADAM, "eps": 1e-4}}
TIERS = ("gpu", "cpu", "nvme")
FEWER, NEAR_STEPS = 4, 3
OVER_AXES = (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2))


@dataclass(frozen=True)
class Axes:
    """Ranks on each axis."""

    pipeline: int
    data: int
    tensor: int

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor

    def row(self, rank: int) -> int:
        """A rank's place on the data axis."""
        return rank // self.tensor % self.data


AXES = (Axes(2, 2, 1), Axes(2, 1, 2), Axes(2, 2, 2))


def near(family: str, drive: str, parallel: dict[str, Any], count: int, **given: Any) -> Any:
    """An engine of a small model."""
    config = configuration(drive, parallel, count=count, zero=TIGHT, **given) | {"optimizer": NEAR}
    return infinity.initialize(model=small(family), config=config)[0]


def on_one_rank(rank: int, world: int, family: str, data: int) -> dict[str, Tensor]:
    """Masters after a few steps on one rank, which accumulates the micro-batches of all data ranks."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as drive, near(family, drive, {}, FEWER * data, stage=0) as engine:
        for step in range(NEAR_STEPS):
            engine.train_batch([batch for row in range(data) for batch in batches(step, row, FEWER)])
        return {name: infinity.state(param).master for name, param in engine.module.named_parameters()}


def compare_axes(
    rank: int, world: int, axes: Axes, expected: dict[str, dict[str, Tensor]], stages: Sequence[int],
    schedules: Sequence[tuple[str, int]] = OVER_AXES, tiers: Sequence[str] = TIERS, dtype: str = "fp32",
    reduce: str = "micro_batch",
) -> list[dict[str, Any]]:  # fmt: skip
    """Each family at each stage: one hash for all schedules and tiers. reduce: `parallel.reduce`."""
    join(world)
    rows = []
    for family, stage in itertools.product(expected, stages):
        began, found = time.monotonic(), []
        for (schedule, virtual), tier in itertools.product(schedules, tiers):
            parallel = {
                "pipeline": axes.pipeline, "tensor": axes.tensor, "schedule": schedule, "virtual_stages": virtual,
                "reduce": reduce,
            }  # fmt: skip
            outcome = _near(rank, axes, family, parallel, expected[family], stage=stage, tier=tier, dtype=dtype)
            found.append((f"{schedule} {tier}", outcome))
        everyone = exchanged(found)
        if rank == 0:
            # By setting: what each rank has found.
            by_setting = {each[0]: [mine[at][1] for mine in everyone] for at, each in enumerate(found)}
            total = {name: _put_together(ranks, axes) for name, ranks in by_setting.items()}
            outcomes = [each for ranks in by_setting.values() for each in ranks]
            row = {
                **vars(axes), "family": family, "stage": stage, "dtype": dtype, "reduce": reduce,
                "settings": len(found),
                "hashes": len({*total.values()}), "sha256": total[found[0][0]],
                "losses alike": all(len({str(each.losses) for each in ranks}) == 1 for ranks in by_setting.values()),
                "finite": all(math.isfinite(float.fromhex(loss)) for each in outcomes for loss in each.losses),
                "weight": max(each.apart for each in outcomes), "strays": max(each.strays for each in outcomes),
                "seconds": round(time.monotonic() - began, 1),
            }  # fmt: skip
            if row["hashes"] > 1:
                row["by setting"] = {name: each[:8] for name, each in total.items()}
            row["right"] = (
                row["hashes"] == 1 and row["losses alike"] and row["finite"] and not row["strays"]
                and (row["weight"] <= 1e-5 or dtype != "fp32")
            )  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


@dataclass(frozen=True)
class Outcome:
    """What a rank has after a run. apart: the greatest distance of a weight from one rank's; strays: what strayed from
    the schedule after the first step.
    """

    digests: dict[str, str]
    losses: list[str]
    apart: float
    strays: int


def _put_together(ranks: Sequence[Outcome], axes: Axes) -> str:
    """Hash of what all ranks have, by name, wherever a stage lies."""
    parts = sorted({
        f"{name} {rank % (axes.data * axes.tensor)} {digest}"
        for rank, each in enumerate(ranks) for name, digest in each.digests.items()
    })  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _near(
    rank: int, axes: Axes, family: str, parallel: dict[str, Any], wanted: dict[str, Tensor], *, stage: int, tier: str,
    dtype: str,
) -> Outcome:  # fmt: skip
    with tempfile.TemporaryDirectory() as drive:
        given = {"stage": stage, "param": tier if stage == 3 else "gpu", "optimizer": tier, "dtype": dtype}
        with near(family, drive, parallel, FEWER, **given) as engine:
            losses, strays = [], []
            for step in range(NEAR_STEPS):
                losses.append(float(engine.train_batch(batches(step, axes.row(rank), FEWER))).hex())
                strays.append(engine.coordinator.mismatches)
            named = engine.module.named_parameters()
            apart = max(float((infinity.state(param).master - wanted[name]).abs().max()) for name, param in named)
            return Outcome(digests(engine), losses, apart, strays[-1] - strays[0])


def over_axes(wanted: Sequence[Axes] = AXES) -> list[dict[str, Any]]:
    """All axes: an untied family at each stage, and tied ones at the first and the last."""
    rows = []
    with RankPool(1) as one:
        for axes in wanted:
            # transformers has no tensor plan of GPT-2.
            tied = ("gpt2",) if axes.tensor == 1 else ("gemma2",)
            expected = {
                family: one.run(on_one_rank, family, axes.data, timeout=CELL_SECONDS)[0] for family in ("llama", *tied)
            }
            with RankPool(axes.world) as pool:
                for family, stages in (("llama", (0, 1, 2, 3)), (tied[0], (0, 3))):
                    told = {family: expected[family]}
                    rows += pool.run(compare_axes, axes, told, stages, timeout=CELL_SECONDS * len(stages))[0]
                if axes.data > 1:
                    rows += summed_once(pool, axes, {"llama": expected["llama"]})
    return rows


def summed_once(
    pool: RankPool, axes: Axes, expected: dict[str, dict[str, Tensor]], tiers: Sequence[str] = TIERS
) -> list[dict[str, Any]]:
    """Stages 2 and 3 where gradients are summed over data ranks once a step: the hash of stage 1, which always does."""
    how = (("1f1b", 1),)
    (first,) = pool.run(compare_axes, axes, expected, (1,), how, ("gpu",), timeout=CELL_SECONDS)[0]
    rows = pool.run(compare_axes, axes, expected, (2, 3), how, tiers, "fp32", "step", timeout=CELL_SECONDS)[0]
    for row in rows:
        row["right"] = row["right"] and row["sha256"] == first["sha256"]
    return rows


DEVICE = Axes(2, 2, 1)
# The delays of the matrix of the accelerator, shorter: a step of a pipeline has more operators.
DELAYS = accelerator.Delays(copy=0.005, event=0.005, operator=0.00002)


def on_cpu(rank: int, world: int, given: dict[str, Any]) -> Outcome:
    """What a rank has after a few steps on the CPU."""
    join(world)
    return _on_device(rank, given)


def on_accelerator(rank: int, world: int, given: dict[str, Any], own_collectives: bool) -> tuple[Outcome, list[str]]:
    """What a rank has after a few steps on the simulated accelerator, and the accesses without an edge."""
    accelerator.load()
    accelerator.configure(seed=rank + 1, delays=DELAYS)
    accelerator.reset()
    join(world)
    with engines_use(Communicating if own_collectives else SimulatedDevice), host_accesses_are_declared():
        outcome = _on_device(rank, given)
    return outcome, [str(race) for race in accelerator.races()]


def _on_device(rank: int, given: dict[str, Any]) -> Outcome:
    with tempfile.TemporaryDirectory() as drive:
        # SDPA takes another path on each type of device.
        model = build("llama", attention="eager", **FEW)
        given = {**given, "zero": TIGHT}
        parallel = given.pop("parallel")
        config = configuration(drive, parallel, count=FEWER, **given) | {"optimizer": NEAR}
        engine, *_ = infinity.initialize(model=model, config=config)
        with engine:
            losses = [
                float(engine.train_batch(batches(step, DEVICE.row(rank), FEWER))).hex() for step in range(NEAR_STEPS)
            ]
            return Outcome(digests(engine), losses, 0.0, engine.coordinator.mismatches)


def on_devices(
    stages: Sequence[int] = (0, 1, 2, 3), dtypes: Sequence[str] = ("fp32", "bf16"), tiers: Sequence[str] = TIERS,
    schedules: Sequence[tuple[str, int]] = OVER_AXES,
) -> list[dict[str, Any]]:  # fmt: skip
    """Each setting; those on NVMe with collectives of the device, too."""
    rows = []
    with RankPool(DEVICE.world) as plain, RankPool(DEVICE.world) as devices:
        for dtype, stage in itertools.product(dtypes, stages):
            expected: set[str] = set()
            for (schedule, virtual), tier in itertools.product(schedules, tiers):
                parallel = {"pipeline": DEVICE.pipeline, "schedule": schedule, "virtual_stages": virtual}
                given = {"stage": stage, "param": tier if stage == 3 else "gpu", "optimizer": tier, "dtype": dtype,
                         "clip": 0.5, "parallel": parallel}  # fmt: skip
                expected = expected or {_put_together(plain.run(on_cpu, given, timeout=CELL_SECONDS), DEVICE)}
                # Of two ranks with two stages each, other back ends than gloo are refused.
                for own_collectives in (False, True) if tier == "nvme" and virtual == 1 else (False,):
                    found = devices.run(on_accelerator, given, own_collectives, timeout=CELL_SECONDS)
                    races = [race for _, each in found for race in each]
                    same = {_put_together([outcome for outcome, _ in found], DEVICE)} == expected
                    rows.append(
                        {"stage": stage, "dtype": dtype, "schedule": schedule, "tier": tier, "races": len(races),
                         "own collectives": own_collectives, "hash is the CPU's": same, "first race": races[:1],
                         "right": same and not races}
                    )  # fmt: skip
                    print(json.dumps(rows[-1]), flush=True)
    return rows


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "exact": lambda: exact(FAMILIES), "ties": ties, "axes": over_axes, "device": on_devices,
}  # fmt: skip


def run_parts(command: str, parts: Mapping[str, Callable[[], list[dict[str, Any]]]]) -> None:
    """Run the parts that the command line names, print a line a row, and write all."""
    parser = argparse.ArgumentParser(description=command)
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began, found = time.monotonic(), {}
    for part in given.parts.split(","):
        found[part] = parts[part]()
        right = sum(row["right"] for row in found[part])
        print(f"{part}: {right} of {len(found[part])} right", flush=True)
    if given.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {
            "date": date.today().isoformat(), "commit": commit, "command": " ".join([command, *sys.argv[1:]]),
            "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
            "transformers": transformers.__version__, "seconds": round(time.monotonic() - began), "parts": found,
        }  # fmt: skip
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(not all(row["right"] for rows in found.values() for row in rows))


if __name__ == "__main__":
    run_parts("python -m tests.pipeline_matrix", PARTS)
