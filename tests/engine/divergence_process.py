"""Scripted divergences: from the third step on rank 1 does something else than the others.

`train(case, ...)` runs one on this rank; `python -m tests.engine.divergence_process CASE WATCHDOG SMALLEST`, under
torchrun's environment, runs one as a program of its own that prints when the ranks part. SMALLEST: bytes of the
smallest row that ranks read from each other's memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.distributed import cma_transport
from tests.support.oracle import settings

WIDTH = 16
ODD_STEP = 2
DROPPED_WIDTHS = (8, 16, 24, 32, 40, 48)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, width)
        self.down = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Two layers and some experts; `case` says what rank 1 does with them."""

    def __init__(self, case: str, rank: int) -> None:
        super().__init__()
        self.case, self.rank, self.step = case, rank, 0
        self.enter = nn.Linear(WIDTH, WIDTH)
        widths = (16, 16) if case == "same size" else (16, 32)
        if case == "order" and rank == 1:
            self.second, self.first = Layer(widths[1]), Layer(widths[0])
        else:
            self.first, self.second = Layer(widths[0]), Layer(widths[1])
        self.experts = nn.ModuleList(Layer(24) for _ in range(2)) if case == "expert" else nn.ModuleList()
        self.dropped = nn.ModuleList(map(Layer, DROPPED_WIDTHS if case == "drops" else ()))
        self.coins = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        odd = self.step == ODD_STEP and self.rank == 1
        if self.step == ODD_STEP and self.case == "drops":
            self.coins.manual_seed(self.rank)
        self.step += 1
        x = self.enter(x)
        if odd and self.case == "raises":
            raise ArithmeticError("the batch of rank 1 is broken")
        if odd and self.case in ("branch", "same size"):
            x = self.second(self.second(x))
        else:
            x = self.second(self.first(x))
        if odd and self.case == "expert":
            x = self.experts[1](x)
        for layer in self.dropped:
            # LayerDrop, for which every rank has a seed of its own.
            if torch.rand(1, generator=self.coins) < 0.5:
                x = layer(x)
        return x.square().mean()


def train(case: str, watchdog: float, parted: list[float], *, stage: int = 3, drive: str = "") -> int:
    """Six steps of a case; returns how many were taken. `parted` gets the time at which rank 1 leaves the others.
    drive: the folder where everything lies; empty for the device's memory.
    """
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    home = "nvme" if drive else "gpu"
    config = settings(drive or os.curdir, stage=stage, param=home, optimizer=home, watchdog_seconds=watchdog)
    if case == "order":
        parted.append(time.time())
    engine, *_ = infinity.initialize(model=Model(case, rank), config=config)
    with contextlib.nullcontext() if case in ("user raises", "exits") else engine:
        for step in range(6):
            if step == ODD_STEP:
                parted.append(time.time())
                if rank == 1:
                    _leave(case, engine)
            engine.backward(engine(torch.randn(2, WIDTH)))
            engine.step()
        return engine.global_steps


def _leave(case: str, engine: Any) -> None:
    if case == "sleeps":
        time.sleep(10_000)
    elif case == "slow":
        time.sleep(3.5)
    elif case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "user raises":
        raise ValueError("the data of rank 1 are gone")
    elif case == "closes":
        engine.close()
        raise StopIteration("no more data on rank 1")


if __name__ == "__main__":
    torch.set_num_threads(1)
    moments: list[float] = []
    cma_transport.SMALLEST_NBYTES = int(sys.argv[3])
    try:
        train(sys.argv[1], float(sys.argv[2]), moments)
    finally:
        print(*moments, flush=True)
