"""All that needs no extra, in a folder of its own: three steps on NVMe, a checkpoint and its export, every command.

A script, so that it runs from a checkout and beside an installed wheel: `python -m tests.support.bare` starts it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import estimators
import infinity
from infinity.cli.main import COMMANDS, main

HELP = [[], *([name] for name in COMMANDS)]
HELP += [["ckpt", inputs] for inputs in ("inspect", "verify", "diff")]


class Regression(nn.Module):
    """Three linear layers and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def config(folder: Path) -> dict[str, object]:
    """Return a configuration with parameters and optimizer states on NVMe; all files are written to a folder."""
    drive = {"device": "nvme", "nvme_path": str(folder / "drive")}
    return {
        "train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "csv_monitor": {"enabled": True, "output_path": str(folder / "csv")},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
    }  # fmt: skip


def train(folder: Path) -> list[float]:
    """Train three steps, save, load into another engine and train one more step; return the losses."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 16).bfloat16(), torch.randn(8, 4).bfloat16()
    losses: list[float] = []
    for steps in (3, 1):
        engine, *_ = infinity.initialize(model=Regression(), config=config(folder))
        with engine:
            if losses:
                engine.load_checkpoint(str(folder / "checkpoints"))
            for _ in range(steps):
                loss = engine(x, y)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            engine.save_checkpoint(str(folder / "checkpoints"))
            engine.export(str(folder / f"exported{steps}"))
    return losses


def answer(*words: str) -> int:
    """Run a command with its output on standard error; return its exit code."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            code = main(words)
        except SystemExit as left:
            code = int(left.code or 0)
    print("$ infinity", *words, f"({code})\n{shown.getvalue()}", file=sys.stderr)
    return code


def commands(folder: Path) -> dict[str, int]:
    """Return the exit code of every command's help and of every fast command."""
    os.chdir(folder)
    Path("ds.json").write_text(json.dumps(config(folder)))
    asked = [[*words, "--help"] for words in HELP]
    asked += [
        ["config", "explain", "ds.json"], ["estimate", "gpt2"], ["ckpt", "inspect", "checkpoints"],
        ["ckpt", "verify", "checkpoints"], ["export", "checkpoints", "exported"], ["doctor", "--config", "ds.json"],
    ]  # fmt: skip
    return {" ".join(words): answer(*words) for words in asked}


def refusals() -> dict[str, str]:
    """Return the modules of infinity that cannot be imported, with their errors."""
    found = {}
    for package in (infinity, estimators):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                found[module.name] = str(error)
    return found


if __name__ == "__main__":
    here = Path(sys.argv[1])
    told = {"from": infinity.__file__, "losses": train(here), "codes": commands(here), "refusals": refusals()}
    print(json.dumps(told))
