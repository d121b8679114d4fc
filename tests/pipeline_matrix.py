"""Does the pipeline axis show in what is computed? Recorded in benchmarks/results/.

    python -m tests.pipeline_matrix [--parts exact] [--json FILE]

exact   schedules x pp x precision x stage x tier x clipping: masters and moments have the bits of one rank that
        accumulates as many micro-batches, for each family

One launch a world size: its ranks live for all cells.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

import infinity
from tests.support.oracle import join, settings
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


def build(family: str, **sizes: Any) -> nn.Module:
    """A small model of a family."""
    given: dict[str, Any] = {
        "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if family == "mixtral":
        given |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "gpt2":
        given = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64,
                 "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                 "attn_pdrop": 0.0}  # fmt: skip
    if family == "gemma2":
        given |= {"head_dim": 8, "sliding_window": 8}
    if family == "gpt_neox":
        given |= {"rotary_pct": 0.5}
        given.pop("num_key_value_heads")
    config = AutoConfig.for_model(family, **{**given, **sizes})
    config._attn_implementation = "eager" if family == "gemma2" else "sdpa"
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
    """A configuration with the axes of `parallel`."""
    config = settings(drive, **given)
    config["optimizer"] = {"type": "AdamW", "params": ADAM}
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
    for name, param in engine.module.named_parameters():
        if "_infinity_owner" not in param.__dict__:
            continue
        state, mine = infinity.state(param), hashlib.sha256()
        for kind in ("master", "exp_avg", "exp_avg_sq"):
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

    @property
    def given(self) -> dict[str, Any]:
        param = self.tier if self.stage == 3 else "gpu"
        return {"stage": self.stage, "param": param, "optimizer": self.tier, "dtype": self.dtype, "clip": self.clip}

    def __str__(self) -> str:
        return f"{self.family} {self.dtype} stage{self.stage} {self.tier} clip{self.clip:g}"


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
    if not torch.distributed.is_initialized():
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


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {"exact": lambda: exact(FAMILIES)}


def main() -> None:
    """Run the parts, print a line a row, and write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began, found = time.monotonic(), {}
    for part in given.parts.split(","):
        found[part] = PARTS[part]()
        right = sum(row["right"] for row in found[part])
        print(f"{part}: {right} of {len(found[part])} right", flush=True)
    if given.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {
            "date": date.today().isoformat(), "commit": commit,
            "command": " ".join(["python -m tests.pipeline_matrix", *sys.argv[1:]]),
            "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
            "transformers": transformers.__version__, "seconds": round(time.monotonic() - began), "parts": found,
        }  # fmt: skip
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(not all(row["right"] for rows in found.values() for row in rows))


if __name__ == "__main__":
    main()
