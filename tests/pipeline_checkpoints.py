"""Do checkpoints load at any other topology? Recorded in benchmarks/results/.

    python -m tests.pipeline_checkpoints [--parts checkpoints,cut] [--json FILE]

checkpoints  saved at every topology, stage and tier and loaded at every other: masters, moments, steps and groups are
             equal, masters and moments in their bits as whole tensors; so are the bytes of exports; and the next loss
             is the same
cut          the same at one stage and tier of each topology

One launch a topology: its ranks live for all cells.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import infinity
from tests.pipeline_matrix import CELL_SECONDS, TIGHT, batches, build, configuration, exchanged, run_parts
from tests.support.oracle import join
from tests.support.spawn import RankPool


@dataclass(frozen=True)
class Variant:
    """A model and its precision. tied: the head is the embedding, which the first and the last stage have."""

    dtype: str
    tied: bool

    def __str__(self) -> str:
        return f"{self.dtype}{' tied' if self.tied else ''}"


@dataclass(frozen=True)
class Place:
    """Where a run's model lies."""

    pipeline: int
    data: int
    tensor: int
    stage: int
    tier: str

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor

    def __str__(self) -> str:
        return f"pp{self.pipeline} dp{self.data} tp{self.tensor} stage{self.stage} {self.tier}"


# What was saved at a place, and what was told of it.
Saved = tuple[Variant, Place, dict[str, Any]]
VARIANTS = (Variant("fp32", tied=False), Variant("bf16", tied=True))
TOPOLOGIES = ((1, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (4, 1, 1), (2, 2, 2))
# Micro-batches of a step on all data ranks together, and blocks of the model, two for each of two stages.
MICRO_BATCHES, BLOCKS = 4, 4


PLACES = tuple(
    tuple(Place(*each, stage, tier) for stage, tier in itertools.product((1, 3), ("gpu", "nvme")))
    for each in TOPOLOGIES
)  # fmt: skip
# Of one topology in turn the whole partitions of stage 1 on the device, and those of stage 3 on the drive.
CUT = tuple((each[3 * (at % 2)],) for at, each in enumerate(PLACES))


def opened(place: Place, variant: Variant, drive: str) -> Any:
    """An engine at a place, with two parameter groups."""
    torch.set_num_threads(1)
    param = place.tier if place.stage == 3 else "gpu"
    config = configuration(
        drive, {"pipeline": place.pipeline, "tensor": place.tensor}, count=MICRO_BATCHES // place.data, zero=TIGHT,
        stage=place.stage, param=param, optimizer=place.tier, dtype=variant.dtype, clip=0.5,
    )  # fmt: skip
    model = build("llama", num_hidden_layers=BLOCKS, tie_word_embeddings=variant.tied)
    flat = [[param for param in model.parameters() if (param.ndim > 1) is matrix] for matrix in (True, False)]
    groups = [{"params": flat[0]}, {"params": flat[1], "weight_decay": 0.0, "lr": 5e-4}]
    return infinity.initialize(model=model, config=config, model_parameters=groups)[0]


def next_loss(engine: Any, step: int) -> float:
    """The loss of a step, whose micro-batches the data ranks share."""
    size = MICRO_BATCHES // engine.data_size
    loss = engine.train_batch(batches(step, count=MICRO_BATCHES)[engine.data_rank * size :][:size])
    return float(loss)


def whole_digest(engine: Any) -> str:
    """Hash of all masters and moments as whole tensors, of steps and of groups: the same at every topology."""
    total = hashlib.sha256()
    names = {id(param): name for name, param in engine.module.named_parameters()}
    for name, param in sorted(engine.module.named_parameters()):
        state = infinity.state(param)
        for kind in ("master", "exp_avg", "exp_avg_sq") if state.trainable else ("master",):
            value = state.full(kind)
            total.update(f"{name} {kind} {tuple(value.shape)}".encode())
            total.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    groups = [
        {key: [names[id(param)] for param in value] if key == "params" else value for key, value in group.items()}
        for group in engine.optimizer.param_groups
    ]
    total.update(json.dumps([engine.optimizer.step_counts, groups], sort_keys=True).encode())
    return total.hexdigest()


def folder_hash(folder: Path) -> str:
    """Hash of the names and bytes of all files."""
    total = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def saved_in(folder: str, place: Place, variant: Variant) -> Path:
    """The folder of what was saved at a place."""
    return Path(folder) / f"{place} {variant}".replace(" ", "-")


def save_place(folder: str, place: Place, variant: Variant) -> dict[str, Any]:
    """Train at a place; save and export there. Returns hashes of what was saved and exported, and the next loss."""
    target = saved_in(folder, place, variant)
    with tempfile.TemporaryDirectory() as drive, opened(place, variant, drive) as engine:
        for step in range(2):
            next_loss(engine, step)
        engine.optimizer.param_groups[1]["lr"] = 2.5e-4
        engine.save_checkpoint(str(target / "saved"))
        engine.export(str(target / "exported"))
        digest = whole_digest(engine)
        return {"digest": digest, "export": folder_hash(target / "exported"), "loss": next_loss(engine, 2)}


def load_place(
    folder: str, place: Place, variant: Variant, saved: Sequence[tuple[Place, dict[str, Any]]], *, exports: bool = True
) -> dict[str, Any]:  # fmt: skip
    """Load what was saved at other places at one. saved: the places, with what `save_place` told. exports: compare the
    bytes of an export, too.
    """
    wrong, apart = [], 0.0
    with tempfile.TemporaryDirectory() as drive, opened(place, variant, drive) as engine:
        for origin, told in saved:
            source = saved_in(folder, origin, variant)
            found, _ = engine.load_checkpoint(str(source / "saved"))
            if found is None or engine.global_steps != 2 or whole_digest(engine) != told["digest"]:
                wrong.append(f"states of {origin}")
            if exports:
                target = source / f"again {place}".replace(" ", "-")
                engine.export(str(target))
                exchanged(None)
                if folder_hash(target) != told["export"]:
                    wrong.append(f"export of {origin}")
            loss = next_loss(engine, 2)
            apart = max(
                apart, abs(loss - told["loss"]) if variant.dtype == "fp32" or origin.tensor == place.tensor else 0
            )
            exact_here = (origin.data, origin.tensor) == (place.data, place.tensor)
            if apart > 1e-6 or (exact_here and loss != told["loss"]):
                wrong.append(f"next loss of {origin}: {loss!r}, not {told['loss']!r}")
    return {"loaded at": str(place), "variant": str(variant), "checkpoints": len(saved), "loss apart": apart,
            "wrong": wrong, "right": not wrong}  # fmt: skip


def save_topology(rank: int, world: int, folder: str, places: Sequence[Place]) -> list[Saved]:
    """Save at places of a topology."""
    join(world)
    wanted = itertools.product(VARIANTS, places)
    return [(variant, place, save_place(folder, place, variant)) for variant, place in wanted]


def load_topology(
    rank: int, world: int, folder: str, places: Sequence[Place], saved: Sequence[Saved]
) -> list[dict[str, Any]]:
    """Load all checkpoints at places of a topology."""
    join(world)
    rows = []
    for variant, place in itertools.product(VARIANTS, places):
        origins = [(origin, told) for each, origin, told in saved if each == variant]
        began = time.monotonic()
        found = load_place(folder, place, variant, origins)
        wrong = sorted({text for each in exchanged(found["wrong"]) for text in each})
        rows.append({**found, "wrong": wrong, "right": not wrong, "seconds": round(time.monotonic() - began, 1)})
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)
    return rows


def checkpoints(wanted: Sequence[Sequence[Place]] = PLACES) -> list[dict[str, Any]]:
    """Save at every place, then load everything at every one. wanted: the places of each topology."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        saved: list[Saved] = []
        for places in wanted:
            with RankPool(places[0].world) as pool:
                saved += pool.run(save_topology, folder, places, timeout=CELL_SECONDS * len(places))[0]
        for variant in VARIANTS:
            exports = {told["export"] for each, _, told in saved if each == variant}
            print(f"{variant}: {len(exports)} different exports of {len(saved) // len(VARIANTS)}", flush=True)
        for places in wanted:
            with RankPool(places[0].world) as pool:
                limit = CELL_SECONDS * len(places) * 3
                rows += pool.run(load_topology, folder, places, saved, timeout=limit)[0]
    return rows


if __name__ == "__main__":
    run_parts("python -m tests.pipeline_checkpoints", {"checkpoints": checkpoints, "cut": lambda: checkpoints(CUT)})
