"""Runs that are saved in one process and taken up in another: everything that a run has beside its weights is in them.

The model has dropout, a buffer that each forward changes, tied and frozen weights; the rate follows a schedule, and the
data comes from the loader of `initialize`, in the middle of whose epoch the run is cut.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import infinity
from infinity.errors import ConfigError
from tests.support.models import VOCABULARY
from tests.support.oracle import SmallModel, settings

BEFORE, AFTER = 3, 5
SAMPLES = 14
TIERS = ("gpu", "cpu", "nvme")


class Run(SmallModel):
    """The small model with dropout, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = F.dropout(self.embedding(input_ids), 0.1, self.training) + self.positions[: input_ids.shape[-1]]
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training)
        x = self.norm(x + self.fixed(x)) + torch.rand(()) * 1e-3
        x = torch.cat((x.flatten(0, 1), self.nothing)).unflatten(0, x.shape[:2])
        logits = self.head(x)[:, :-1] * self.temperature
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


class Texts(torch.utils.data.Dataset[Any]):
    """Short rows of token ids."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}

    def __len__(self) -> int:
        return SAMPLES


def engine_of(nvme: Path | str, cell: dict[str, Any], *, seed: int = 0) -> Any:
    """An engine on a model with the weights of `seed`; `cell` as the arguments of `settings`."""
    torch.manual_seed(seed)
    model = Run()
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4}}
    top = {"scheduler": schedule, **{key: value for key, value in cell.items() if key == "checkpoint"}}
    config = settings(nvme, **{key: value for key, value in cell.items() if key != "checkpoint"}, **top)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim > 1]},
        {"params": [param for param in trained if param.ndim <= 1], "weight_decay": 0.0, "lr": 1e-3},
    ]
    return infinity.initialize(
        model=model, config=config, model_parameters=groups, training_data=Texts(), lr_scheduler=None
    )[0]


def train(engine: Any, steps: int) -> Iterator[float]:
    """Losses of `steps` optimizer steps on whatever the loader gives next; between two of them a caller may save."""
    done = 0
    while True:
        for batch in engine.training_dataloader:
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            yield float(loss.detach())
            done += 1
            if done == steps:
                return


def digest(engine: Any) -> str:
    """Of everything that is in the tiers, the buffers, and the program's random numbers."""
    found = hashlib.sha256()
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        values = [state.master, *((state.exp_avg, state.exp_avg_sq) if param.requires_grad else ())]
        with infinity.read(param):
            values.append(param.detach().clone())
        for value in values:
            found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found.update(engine.module.seen.numpy().tobytes())
    return found.hexdigest()


def draws() -> list[float]:
    """What the random-number generators would give next, without taking it."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    return drawn


def name_of(cell: dict[str, Any]) -> str:
    """A folder's name."""
    return "-".join(str(value) for value in cell.values())


def save_cells(rank: int, world: int, folder: str, cells: list[dict[str, Any]]) -> list[Any]:
    """Save each cell's run below `folder` after some steps, and go on: (losses from there, digest, draws), or the
    sentence with which the configuration refuses the cell.
    """
    join(world)
    found: list[Any] = []
    for cell in cells:
        try:
            engine = engine_of(Path(folder) / "nvme", cell)
        except ConfigError as error:
            found.append(str(error))
            continue
        with engine:
            random.seed(rank)
            np.random.seed(rank)
            losses = train(engine, BEFORE + AFTER)
            for _ in range(BEFORE):
                next(losses)
            engine.optimizer.param_groups[1]["lr"] = 5e-4
            engine.save_checkpoint(Path(folder) / name_of(cell), client_state={"cell": cell})
            saved = draws()
            found.append(([*losses], digest(engine), saved))
    return found


def load_cells(rank: int, world: int, folder: str, cells: list[dict[str, Any]]) -> list[Any]:
    """Take each cell's run up, from other initial weights: as `save_cells`, and the client state."""
    join(world)
    found = []
    for cell in cells:
        with engine_of(Path(folder) / "nvme", cell, seed=99) as engine:
            path, client = engine.load_checkpoint(Path(folder) / name_of(cell))
            assert path is not None and engine.global_steps == BEFORE
            loaded = draws()
            found.append(([*train(engine, AFTER)], digest(engine), loaded, client))
    return found


def check_resumed(cells: list[dict[str, Any]], saved: list[list[Any]], loaded: list[list[Any]]) -> list[str]:
    """A line for each cell that did not go on as if nothing had happened; arguments by rank."""
    wrong = []
    for ours, theirs in zip(saved, loaded, strict=True):
        for cell, (losses, ended, drawn), (again, end, draws_again, client) in zip(cells, ours, theirs, strict=True):
            if losses != again:
                wrong.append(f"{cell}: losses {losses} became {again}")
            if ended != end:
                wrong.append(f"{cell}: the final states differ")
            if drawn != draws_again:
                wrong.append(f"{cell}: random numbers differ")
            if client != {"cell": cell}:
                wrong.append(f"{cell}: client state {client}")
    return wrong


def join(world: int) -> None:
    """Open the program's own process group for one call on a pool of ranks."""
    torch.set_num_threads(1)
    if world > 1:
        torch.distributed.init_process_group("gloo")
