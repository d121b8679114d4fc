"""Runs of Lightning's Trainer with its DeepSpeedStrategy, unchanged, in one process a rank; prints lines of JSON.

    infinity run --as-deepspeed --no_local_rank --nproc 2 -m tests.support.clients_without_cuda \\
        -m tests.clients.lightning_cells CELLS

CELLS is a JSON list of objects with the fields of `Cell`; a cell without a stage is Lightning's DDP. Each cell
fits, saves a checkpoint, resumes from it with a new module and validates that.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from tests.support.clients_without_cuda import install_lightning

WIDTH = 32
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
install_lightning()


@dataclass
class Cell:
    """One run. stage: None for Lightning's DDP. in_hook: whether the module makes its layers in
    `configure_model`, which Lightning calls under `zero.Init`. strategy: arguments of the DeepSpeedStrategy.
    """

    stage: int | None = None
    in_hook: bool = False
    precision: str = "32-true"
    accumulate: int = 1
    strategy: dict[str, Any] = field(default_factory=dict)


class Module(lightning.LightningModule):
    """A small network that learns a fixed function, as a user writes it."""

    def __init__(self, in_hook: bool) -> None:
        super().__init__()
        self.net: nn.Module | None = None
        self.losses: list[float] = []
        if not in_hook:
            self.configure_model()

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(7)
            wide = 4 * WIDTH
            blocks = [nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh(), nn.Linear(wide, WIDTH)) for _ in range(3)]
            self.net = nn.Sequential(*blocks)

    def _loss(self, batch: Any) -> Tensor:
        (rows,) = batch
        return nn.functional.mse_loss(self.net(rows), rows.flip(-1))

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
        }


def loader(seed: int) -> torch.utils.data.DataLoader:
    """Return batches that are the same in every process; Lightning gives each rank its own of them."""
    rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)


def trainer(cell: Cell, folder: Path, steps: int) -> lightning.Trainer:
    """Return a Trainer as a user makes it."""
    if cell.stage is not None:
        strategy: Any = DeepSpeedStrategy(
            stage=cell.stage, nvme_path=str(folder / "drive"), process_group_backend="gloo", **cell.strategy
        )
    else:
        # For one process, too: its sampler shuffles as DeepSpeedStrategy's does.
        strategy = "ddp"
    return lightning.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy=strategy, max_steps=steps,
        precision=cell.precision, accumulate_grad_batches=cell.accumulate, gradient_clip_val=1.0,
        default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=True,
    )  # fmt: skip


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    """Run one cell and return what it saw."""
    first = Module(cell.in_hook)
    fitting = trainer(cell, folder, 3)
    fitting.fit(first, loader(1))
    fitting.save_checkpoint(folder / "saved.ckpt")
    after_fit = fitting.validate(first, loader(2), verbose=False)[0]["val_loss"]
    second = Module(cell.in_hook)
    resumed = trainer(cell, folder, 6)
    resumed.fit(second, loader(1), ckpt_path=folder / "saved.ckpt")
    found = {
        "losses": first.losses + second.losses,
        "steps": resumed.global_step,
        "strategy": type(resumed.strategy).__name__,
        "engine": type(resumed.strategy.model).__module__,
        "rate": resumed.lr_scheduler_configs[0].scheduler.get_last_lr()[0],
        "val_loss": [after_fit, resumed.validate(second, loader(2), verbose=False)[0]["val_loss"]],
    }
    # The first run's weights again, in a module that has never been fitted.
    fresh = trainer(cell, folder, 3).validate(
        Module(cell.in_hook), loader(2), ckpt_path=folder / "saved.ckpt", verbose=False
    )
    found["val_loss"].append(fresh[0]["val_loss"])
    return found


def main() -> None:
    """Run all cells."""
    shared = os.environ.get("CELLS_FOLDER")
    base = Path(shared or tempfile.gettempdir()) / f"cells-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    for number, given in enumerate(json.loads(sys.argv[1])):
        folder = base / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = run(Cell(**given), folder)
        except Exception:
            if int(os.environ.get("WORLD_SIZE", 1)) > 1:
                raise
            found = {"error": traceback.format_exc()}
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(found), flush=True)
        if dist.is_initialized():
            dist.barrier()
    if int(os.environ.get("RANK", 0)) == 0:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
