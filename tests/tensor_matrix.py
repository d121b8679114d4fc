"""Does the tensor axis show in what is computed, and does placement show beside it? Recorded in benchmarks/results/.

    python -m tests.tensor_matrix [--parts models,replicas,tiers,checkpoints,dropout] [--json FILE]

models       unmodified models of transformers, tp 2 and 4, against plain torch in one process: loss, every gradient,
             the norm, the weights after ten steps; in bf16 the error against float64, beside the unsplit model's
replicas     replicated parameters and moments have one hash over the axis after 50 steps, also with sequence
tiers        tp 2 x dp 2: one hash for every placement at each stage, precision and clipping
checkpoints  saved at every topology, loaded at every other: masters and moments have equal bits as full tensors
loops        stages 0 to 3, tiles, recomputation, a compiler, evaluation and generation in between, plain backwards: the
             weights of plain torch after three clipped steps of two micro-batches
dropout      masks are equal outside regions and different inside; a resumed run has the numbers of the whole one

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

import infinity
from infinity.plan.shards import Replica
from tests.support.oracle import join, settings
from tests.support.spawn import RankPool

FAMILIES = ("llama", "qwen3", "phi3", "gemma2", "mixtral")
# With 1e-8 a gradient of rounding noise flips a whole step of the rate.
ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-4, "weight_decay": 0.01}
STEPS, LONG = 10, 50
TOKENS, ROWS, VOCABULARY = 16, 2, 96
CELL_SECONDS = 900.0
TIGHT = {"stage3_max_live_parameters": 60_000, "stage3_prefetch_bucket_size": 20_000, "sub_group_size": 20_000}


def build(family: str, *, dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    """A small model of a family; sizes that four ranks divide."""
    given: dict[str, Any] = {
        "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if family in ("qwen3", "gemma2"):
        given["head_dim"] = 8
    if family == "gemma2":
        given["sliding_window"] = 8
    if family == "mixtral":
        given |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    given |= sizes
    config = AutoConfig.for_model(family, **given)
    config._attn_implementation = "eager" if family == "gemma2" else "sdpa"
    if dtype is torch.float64:
        # torch multiplies groups of matrices in shorter types only.
        config._experts_implementation = "eager"
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Biases and norms that are not their first values: a part that is left out or counted twice shows.
    for param in model.parameters():
        if param.ndim == 1:
            param.data.add_(0.1 * torch.randn(param.shape))
    return model.to(dtype).train()


def batch(step: int, row: int = 0) -> dict[str, Tensor]:
    """What data index `row` is fed in a step; every tenth label is ignored."""
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(100 * step + row))
    labels = ids.clone()
    labels[:, ::10] = -100
    return {"input_ids": ids, "labels": labels}


def configuration(drive: str, tensor: int, *, sequence: bool = False, **given: Any) -> dict[str, Any]:
    """A configuration with a tensor axis. Gradients of states on NVMe are there, too."""
    config = settings(drive, **given)
    if given.get("optimizer") == "nvme":
        config["zero_optimization"]["offload_gradients"] = {"device": "nvme"}
    config["optimizer"] = {"type": "AdamW", "params": ADAM}
    config["train_micro_batch_size_per_gpu"] = ROWS
    return config | {"parallel": {"tensor": tensor, "sequence": sequence}}


def plain(family: str, steps: int, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Plain torch in one process: the first step's loss, gradients and norm, and the weights after `steps`."""
    model = build(family, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAM, "betas": tuple(ADAM["betas"])})
    first: dict[str, Any] = {}
    for step in range(max(steps, 1)):
        loss = model(**batch(step)).loss
        loss.backward()
        if not first:
            grads = {name: param.grad.clone() for name, param in model.named_parameters()}
            norm = math.sqrt(math.fsum(float(grad.double().square().sum()) for grad in grads.values()))
            first = {"loss": loss.item(), "grads": grads, "norm": norm}
        if steps:
            optimizer.step()
        optimizer.zero_grad()
    return first | {"weights": {name: param.detach().clone() for name, param in model.named_parameters()}}


def split(family: str, steps: int, tensor: int, **given: Any) -> dict[str, Any]:
    """The same by an engine on this rank."""
    with tempfile.TemporaryDirectory() as drive:
        engine, *_ = infinity.initialize(model=build(family), config=configuration(drive, tensor, **given))
        first: dict[str, Any] = {}
        with engine:
            for step in range(max(steps, 1)):
                loss = engine(**batch(step)).loss
                engine.backward(loss)
                if not first:
                    named = list(engine.module.named_parameters())
                    first = {"loss": loss.item(), "grads": {name: infinity.state(param).grad for name, param in named}}
                engine.step()
                first.setdefault("norm", engine.get_global_grad_norm())
            weights = {name: infinity.state(param).master for name, param in engine.module.named_parameters()}
            return first | {"weights": weights}


def relative(found: Tensor, expected: Tensor) -> float:
    """Greatest difference of an element, relative to the greatest element of the tensor."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def compare_models(
    rank: int, world: int, families: Sequence[str], halves: Sequence[str] = FAMILIES
) -> list[dict[str, Any]]:
    """The rows of one world size. halves: the families that are compared in bf16."""
    join(world)
    rows = []
    for family, sequence in itertools.product(families, (False, True)):
        if sequence and family == "mixtral":
            # Refused by name: a router sees the tokens of all ranks.
            continue
        began = time.monotonic()
        found = split(family, STEPS, world, stage=3, param="cpu", optimizer="nvme", zero=TIGHT, sequence=sequence)
        norms = exchanged(found["norm"].hex())
        if rank == 0:
            expected = plain(family, STEPS)
            grads = {name: relative(found["grads"][name], value) for name, value in expected["grads"].items()}
            weights = [(found["weights"][name] - value).abs().max() for name, value in expected["weights"].items()]
            row = {
                "family": family, "tensor": world, "sequence": sequence,
                "loss": abs(found["loss"] / expected["loss"] - 1), "gradient": max(grads.values()),
                "worst": max(grads, key=grads.__getitem__), "norm": abs(found["norm"] / expected["norm"] - 1),
                "norm has one value": len(set(norms)) == 1, "weight": float(max(weights)),
                "seconds": round(time.monotonic() - began, 1),
            }  # fmt: skip
            row["right"] = (
                row["loss"] <= 1e-6 and row["gradient"] <= 1e-5 and row["norm"] <= 1e-6
                and row["norm has one value"] and row["weight"] <= 1e-4
            )  # fmt: skip
            rows.append(row)
    for family in halves:
        found = split(family, 0, world, stage=3, param="cpu", optimizer="cpu", dtype="bf16")
        if rank == 0:
            exact, unsplit = (plain(family, 0, dtype=dtype)["grads"] for dtype in (torch.float64, torch.bfloat16))
            ours, theirs = (_distance(each, exact) for each in (found["grads"], unsplit))
            rows.append({"family": family, "tensor": world, "bf16 error": ours, "unsplit": theirs,
                         "right": ours <= 1.5 * theirs})  # fmt: skip
    return rows


def _distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Norm of the difference of all gradients, relative to theirs."""
    apart = math.fsum(float((found[name].double() - value).square().sum()) for name, value in exact.items())
    return math.sqrt(apart / math.fsum(float(value.square().sum()) for value in exact.values()))


def exchanged(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    if not torch.distributed.is_initialized():
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def own_digests(engine: Any) -> tuple[str, dict[str, str]]:
    """Hash of what this rank has of all parameters and moments, and the hashes of the replicated ones by name."""
    replicated = {
        slot.name for layout in engine.plan.layouts if layout.replica is not Replica.NONE for slot in layout.slots
    }
    total, single = hashlib.sha256(), {}
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        mine = hashlib.sha256()
        with infinity.read(param):
            values = [param.detach().clone()]
        values += [state.local(kind) for kind in ("master", "exp_avg", "exp_avg_sq")]
        for value in values:
            mine.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        total.update(mine.digest())
        if name in replicated:
            single[name] = mine.hexdigest()
    return total.hexdigest(), single


def compare_replicas(
    rank: int, world: int, cells: Sequence[tuple[str, bool, str]], steps: int = LONG
) -> list[dict[str, Any]]:
    """Replicated parameters of every rank after many steps, dp 1. cells: (family, sequence, dtype)."""
    join(world)
    rows = []
    for family, sequence, dtype in cells:
        with tempfile.TemporaryDirectory() as drive:
            given = {"stage": 3, "param": "cpu", "optimizer": "nvme", "dtype": dtype, "clip": 0.5, "zero": TIGHT}
            sizes = {} if world != 3 else {"num_key_value_heads": 6}
            config = configuration(drive, world, sequence=sequence, **given)
            # A sequence that three ranks divide.
            tokens = TOKENS if TOKENS % world == 0 else TOKENS // world * world
            engine, *_ = infinity.initialize(model=build(family, **sizes), config=config)
            with engine:
                for step in range(steps):
                    given_batch = {name: ids[:, :tokens] for name, ids in batch(step).items()}
                    engine.backward(engine(**given_batch).loss)
                    engine.step()
                _, replicated = own_digests(engine)
        everyone = exchanged(replicated)
        if rank == 0:
            apart = [name for name in replicated if len({each[name] for each in everyone}) > 1]
            rows.append(
                {"family": family, "tensor": world, "sequence": sequence, "dtype": dtype, "steps": steps,
                 "replicated": len(replicated), "apart": apart, "right": bool(replicated) and not apart}
            )  # fmt: skip
    return rows


TIERS = ("gpu", "cpu", "nvme")
SETTINGS = tuple(itertools.product(range(4), ("fp32", "bf16"), (0.0, 0.5)))


def compare_tiers(
    rank: int, world: int, tensor: int, cells: Sequence[tuple[int, str, float]] = SETTINGS,
    tiers: Sequence[tuple[str, str]] = tuple(itertools.product(TIERS, TIERS)),
) -> list[dict[str, Any]]:  # fmt: skip
    """One hash for every placement at each stage, precision and clipping (cells). Below stage 3 parameters stay on the
    device.
    """
    join(world)
    rows = []
    for stage, dtype, clip in cells:
        placements = tiers if stage == 3 else sorted({("gpu", states) for _, states in tiers})
        hashes: dict[str, list[str]] = {}
        for param, optimizer in placements:
            with tempfile.TemporaryDirectory() as drive:
                given = {"stage": stage, "param": param, "optimizer": optimizer, "dtype": dtype, "clip": clip}
                config = configuration(drive, tensor, zero=TIGHT, **given)
                engine, *_ = infinity.initialize(model=build("qwen3"), config=config)
                with engine:
                    for step in range(4):
                        engine.backward(engine(**batch(step, rank // tensor)).loss)
                        engine.step()
                    digest = hashlib.sha256("".join(exchanged(own_digests(engine)[0])).encode()).hexdigest()
            hashes.setdefault(digest, []).append(f"{param} {optimizer}")
        if rank == 0:
            rows.append(
                {"stage": stage, "dtype": dtype, "clip": clip, "tensor": tensor, "data": world // tensor,
                 "placements": len(placements), "hashes": len(hashes), "sha256": next(iter(hashes)),
                 "right": len(hashes) == 1}
            )  # fmt: skip
    return rows


@dataclass(frozen=True)
class Place:
    """Where a run's model lies."""

    tensor: int
    data: int
    stage: int
    tier: str

    def __str__(self) -> str:
        return f"tp{self.tensor} dp{self.data} stage{self.stage} {self.tier}"


TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]


def places(tensor: int, data: int) -> Iterator[Place]:
    """The placements of a topology."""
    for stage, tier in itertools.product((1, 3), ("gpu", "nvme")):
        yield Place(tensor, data, stage, tier)


def _opened(place: Place, drive: str) -> Any:
    param = place.tier if place.stage == 3 else "gpu"
    given = {"stage": place.stage, "param": param, "optimizer": place.tier, "dtype": "bf16", "clip": 0.5}
    engine, *_ = infinity.initialize(
        model=build("qwen3"), config=configuration(drive, place.tensor, zero=TIGHT, **given)
    )
    return engine


def whole_digests(engine: Any) -> str:
    """Hash of all masters and moments as whole tensors, the same at every topology."""
    total = hashlib.sha256()
    for name, param in sorted(engine.module.named_parameters()):
        state = infinity.state(param)
        for value in (state.master, state.exp_avg, state.exp_avg_sq):
            total.update(f"{name} {tuple(value.shape)}".encode())
            total.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def save_place(rank: int, world: int, folder: str, place: Place) -> dict[str, Any]:
    """Train at a place; save and export there. Returns the hash of what was saved, and that of the export."""
    if not torch.distributed.is_initialized():
        join(world)
    with tempfile.TemporaryDirectory() as drive, _opened(place, drive) as engine:
        for step in range(2):
            engine.backward(engine(**batch(step, rank // place.tensor)).loss)
            engine.step()
        target = _folder(folder, place)
        engine.save_checkpoint(str(target / "saved"))
        engine.export(str(target / "exported"), dtype="bf16")
        digest = whole_digests(engine)
    return {"place": str(place), "sha256": digest, "export": _folder_hash(target / "exported")}


def load_place(
    rank: int, world: int, folder: str, saved: Sequence[tuple[Place, dict[str, Any]]], place: Place
) -> dict[str, Any]:
    """Load what was saved at other places at one; right if masters and moments have its hash as whole tensors, and the
    export its bytes. saved: places, with what `save_place` told.
    """
    if not torch.distributed.is_initialized():
        join(world)
    wrong = []
    with tempfile.TemporaryDirectory() as drive, _opened(place, drive) as engine:
        for origin, told in saved:
            found, _ = engine.load_checkpoint(str(_folder(folder, origin) / "saved"))
            if found is None or engine.global_steps != 2 or whole_digests(engine) != told["sha256"]:
                wrong.append(str(origin))
            target = _folder(folder, origin) / f"again {place}".replace(" ", "-")
            engine.export(str(target), dtype="bf16")
            exchanged(None)
            if _folder_hash(target) != told["export"]:
                wrong.append(f"the export of {origin}")
    return {"loaded at": str(place), "checkpoints": len(saved), "wrong": wrong, "right": not wrong}


def _folder(folder: str, place: Place) -> Path:
    return Path(folder) / str(place).replace(" ", "-")


def _folder_hash(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def save_all(rank: int, world: int, folder: str, tensor: int) -> list[dict[str, Any]]:
    """Save at a topology, at every stage and tier."""
    return [save_place(rank, world, folder, place) for place in places(tensor, world // tensor)]


def load_all(
    rank: int, world: int, folder: str, tensor: int, saved: Sequence[tuple[Place, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Load all checkpoints at a topology, at every stage and tier."""
    return [load_place(rank, world, folder, saved, place) for place in places(tensor, world // tensor)]


def run_checkpoints() -> list[dict[str, Any]]:
    """Save at every topology, then load everything at every one."""
    with tempfile.TemporaryDirectory() as folder:
        saved: list[tuple[Place, dict[str, Any]]] = []
        for tensor, data in TOPOLOGIES:
            rows = _launch(save_all, tensor * data, folder, tensor)
            saved += zip(places(tensor, data), rows, strict=True)
        # The same training, but for the order of sums: the data axis decides what was learned, the rest only where.
        return [row for tensor, data in TOPOLOGIES
                for row in _launch(load_all, tensor * data, folder, tensor, saved)]  # fmt: skip


class Noisy(nn.Module):
    """A model of a user's own, with dropout outside and inside of its regions, that notes what both leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.outside = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.outside(self.embed(input_ids))
        self.seen_outside = x.detach() == 0
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class NoisyBlock(nn.Module):
    """Two layers with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.inside = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inside(self.up(x))
        self.seen_inside = hidden.detach() == 0
        return self.down(hidden)


def compare_dropout(rank: int, world: int) -> list[dict[str, Any]]:
    """Masks of every rank, and a run that is resumed in the middle."""
    join(world)
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def opened(drive: str) -> Any:
        torch.manual_seed(5)
        config = configuration(drive, world, stage=3, param="cpu", optimizer="cpu")
        config["parallel"]["plan"] = plan
        return infinity.initialize(model=Noisy().train(), config=config)[0]

    def step(engine: Any, number: int) -> tuple[float, Any, Any]:
        ids = batch(number)["input_ids"]
        loss = engine(input_ids=ids, labels=ids)
        engine.backward(loss)
        engine.step()
        module = engine.module
        return loss.item(), module.seen_outside.tolist(), [each.seen_inside.tolist() for each in module.blocks]

    with tempfile.TemporaryDirectory() as drive:
        folder = exchanged(drive)[0]
        with opened(drive) as engine:
            seen = []
            for number in range(4):
                seen.append(step(engine, number))
                if number == 1:
                    engine.save_checkpoint(f"{folder}/saved")
            digest = own_digests(engine)[0]
        with opened(drive) as engine:
            engine.load_checkpoint(f"{folder}/saved")
            again = [step(engine, number) for number in (2, 3)]
            same = again == seen[2:] and own_digests(engine)[0] == digest
        rows = exchanged((seen, same))
    if rank:
        return []
    outside = all(len({json.dumps(each[at][1]) for each, _ in rows}) == 1 for at in range(4))
    inside = all(
        len({json.dumps(each[at][2][block]) for each, _ in rows}) == world for at in range(4) for block in range(2)
    )
    resumed = all(each for _, each in rows)
    losses = all(len({each[at][0] for each, _ in rows}) == 1 for at in range(4))
    return [{"tensor": world, "equal outside": outside, "different inside": inside, "losses equal": losses,
             "resumed run is the same": resumed, "right": outside and inside and resumed and losses}]  # fmt: skip


LOOPS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "tiles": {"zero": {"tile_parameters": 1000}},
    "recomputed": {"top": {"activation_checkpointing": {"every": 1}}},
    "recomputed, sequence": {"top": {"activation_checkpointing": {"every": 1}}, "sequence": True},
    **{act: {} for act in ("compiled", "evaluated between", "plain backward", "generated", "state dict")},
}


def compare_loops(rank: int, world: int, tensor: int, names: Sequence[str] = tuple(LOOPS)) -> list[dict[str, Any]]:
    """Engines whose program or configuration does something else; `world / tensor` data ranks."""
    join(world)
    rows = []
    for name in names:
        found, norm = _loop(rank, tensor, name, **LOOPS[name])
        if rank == 0:
            expected, expected_norm = _plain_loop(world // tensor)
            apart = max(float((found[key] - value).abs().max()) for key, value in expected.items())
            rows.append({"loop": name, "tensor": tensor, "data": world // tensor, "weight": apart,
                         "norm": abs(norm / expected_norm - 1),
                         "right": apart <= 1e-5 and abs(norm / expected_norm - 1) <= 1e-6})  # fmt: skip
    return rows


def _loop(
    rank: int, tensor: int, name: str, *, stage: int = 3, sequence: bool = False, zero: dict[str, Any] | None = None,
    top: dict[str, Any] | None = None,
) -> tuple[dict[str, Tensor], float]:  # fmt: skip
    with tempfile.TemporaryDirectory() as drive:
        given = {"stage": stage, "param": "cpu" if stage == 3 else "gpu", "optimizer": "nvme", "clip": 0.5}
        config = configuration(
            drive, tensor, sequence=sequence, accumulation=2, zero={**TIGHT, **(zero or {})}, **given
        )
        engine, *_ = infinity.initialize(model=build("qwen3"), config=config | (top or {}))
        with engine:
            if name == "compiled":
                engine.compile(backend="aot_eager")
            for step, micro in itertools.product(range(3), range(2)):
                loss = engine(**batch(10 * step + micro, engine.data_rank)).loss
                if name == "plain backward":
                    (loss / 2).backward()
                else:
                    engine.backward(loss)
                if name == "evaluated between":
                    engine.eval()
                    with torch.no_grad():
                        assert engine(**batch(99)).logits.shape[-1] == VOCABULARY
                    engine.train()
                engine.step()
            if name == "generated":
                engine.eval()
                torch.manual_seed(rank // tensor)
                tokens = engine.module.generate(batch(5)["input_ids"][:1], max_new_tokens=4, do_sample=True).tolist()
                everyone = exchanged(tokens)
                assert all(each == everyone[at // tensor * tensor] for at, each in enumerate(everyone))
            if name == "state dict":
                whole = {key: param.shape for key, param in build("qwen3").named_parameters()}
                held = engine.state_dict()
                assert {key: held[key].shape for key in whole} == whole if rank == 0 else not held
            weights = {key: infinity.state(param).master for key, param in engine.module.named_parameters()}
            return weights, engine.get_global_grad_norm()


@cache
def _plain_loop(data: int) -> tuple[dict[str, Tensor], float]:
    model, norm = build("qwen3"), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAM, "betas": tuple(ADAM["betas"])})
    for step in range(3):
        for micro, row in itertools.product(range(2), range(data)):
            (model(**batch(10 * step + micro, row)).loss / 2 / data).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return {key: param.detach() for key, param in model.named_parameters()}, norm


def _launch(fn: Callable[..., list[dict[str, Any]]], world: int, *args: Any) -> list[dict[str, Any]]:
    with RankPool(world) as pool:
        return pool.run(fn, *args, timeout=CELL_SECONDS)[0]


def run_models() -> list[dict[str, Any]]:
    """tp 2 and 4."""
    return [row for world in (2, 4) for row in _launch(compare_models, world, FAMILIES)]


def run_replicas() -> list[dict[str, Any]]:
    """tp 2 in fp32 and bf16, tp 3 and 4 in bf16, with and without sequence."""
    at = {2: [("qwen3", False, "fp32"), ("qwen3", True, "fp32"), ("llama", True, "bf16"), ("gemma2", False, "bf16")],
          3: [("qwen3", False, "bf16"), ("llama", True, "bf16")],
          4: [("qwen3", False, "bf16"), ("llama", True, "bf16")]}  # fmt: skip
    return [row for world, cells in at.items() for row in _launch(compare_replicas, world, cells)]


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "models": run_models,
    "replicas": run_replicas,
    "tiers": lambda: _launch(compare_tiers, 4, 2),
    "checkpoints": run_checkpoints,
    "loops": lambda: [*_launch(compare_loops, 2, 2), *_launch(compare_loops, 4, 2)],
    "dropout": lambda: _launch(compare_dropout, 2),
}


def main() -> int:
    """The command line; the exit status is 1 if a row is not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", type=Path, help="file to record in, beside the parts that it has")
    given = parser.parse_args()
    wrong = 0
    for name in given.parts.split(","):
        began = time.monotonic()
        rows = PARTS[name]()
        for row in rows:
            print(f"{name}: {row}", flush=True)
        failed = sum(not row["right"] for row in rows)
        wrong += failed
        seconds = round(time.monotonic() - began)
        print(f"{name}: {len(rows) - failed} of {len(rows)} right, {seconds} s", flush=True)
        if given.json is not None:
            _record(given.json, name, rows, seconds)
    return int(wrong > 0)


def _record(path: Path, name: str, rows: list[dict[str, Any]], seconds: int) -> None:
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    runs[name] = {
        "command": f"python -m tests.tensor_matrix {' '.join(sys.argv[1:])}", "commit": commit.stdout.strip(),
        "date": date.today().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, no accelerator",
        "torch": torch.__version__, "transformers": transformers.__version__, "seconds": seconds,
        "right": sum(row["right"] for row in rows), "of": len(rows), "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
