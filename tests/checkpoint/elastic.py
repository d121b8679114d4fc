"""Runs that are saved by some ranks with some placement, and taken up by others with another.

Every rank trains on the same data, so that losses do not depend on how many ranks there are.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.engine import Engine
from tests.checkpoint.cells import join, name_of
from tests.support.models import token_batch
from tests.support.oracle import Case, settings

BEFORE, AFTER = 3, 2


def engine_of(nvme: Path | str, cell: dict[str, Any], *, seed: int) -> Engine:
    """An engine on the small model with the weights of `seed`."""
    case = Case()
    model = case.model()
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.01)
    options = {key: value for key, value in cell.items() if key not in ("world", "tiles")}
    zero = {"sub_group_size": 3000 + 1000 * cell["world"]}
    if cell.get("tiles"):
        # Smaller than every matrix.
        zero["tile_parameters"] = 200
    config = settings(nvme, zero=zero, **options)
    return infinity.initialize(model=model, config=config, model_parameters=case.groups(model))[0]


def steps(engine: Engine, first: int, count: int) -> list[float]:
    """The same data on every rank."""
    losses = []
    for step in range(first, first + count):
        loss = engine(**token_batch(0, step, positions=8))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def digest(engine: Engine, *, dtype: bool = True) -> str:
    """Of all masters and moments as full tensors; with `dtype`, also of the parameters as they compute."""
    found = hashlib.sha256()
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        values = [state.master, *((state.exp_avg, state.exp_avg_sq) if param.requires_grad else ())]
        if dtype:
            with infinity.read(param):
                values.append(param.detach().clone())
        for value in values:
            found.update(f"{name} {tuple(value.shape)}".encode())
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save_cells(rank: int, world: int, folder: str, cells: list[dict[str, Any]]) -> list[Any]:
    """(digest at the save, losses from there) of each cell."""
    join(world)
    found = []
    for cell in cells:
        with engine_of(Path(folder) / "nvme", cell, seed=0) as engine:
            steps(engine, 0, BEFORE)
            engine.save_checkpoint(Path(folder) / name_of(cell))
            found.append((digest(engine), steps(engine, BEFORE, AFTER)))
    return found


def load_cells(rank: int, world: int, folder: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """(digest after the load, losses from there) of each pair: what was saved, and how it is taken up."""
    join(world)
    found = []
    for saved, cell in pairs:
        with engine_of(Path(folder) / "nvme", cell, seed=9) as engine:
            path, _ = engine.load_checkpoint(Path(folder) / name_of(saved))
            assert path is not None and engine.global_steps == BEFORE
            found.append((digest(engine), steps(engine, BEFORE, AFTER)))
    return found


def check_pairs(
    pairs: list[tuple[dict[str, Any], dict[str, Any]]], saved: dict[str, Any], loaded: list[Any]
) -> list[str]:
    """A line for each pair whose states are not the same bits, or whose next losses are further than 1e-6 apart."""
    wrong = []
    for (source, target), (found, losses) in zip(pairs, loaded, strict=True):
        expected, continued = saved[name_of(source)]
        apart = max(abs(one - other) for one, other in zip(losses, continued, strict=True))
        if found != expected:
            wrong.append(f"{source} -> {target}: states differ")
        if apart > 1e-6:
            wrong.append(f"{source} -> {target}: losses {continued} became {losses}")
    return wrong
