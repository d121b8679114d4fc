"""Task: what a step and `initialize` cost over a given number of tiny units that live on NVMe."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any

import torch

from support.hooks import WIDTH, engine_of, profile_of
from support.machine import median

_WARM_UP_STEPS = 5


def run(options: dict[str, Any]) -> dict[str, Any]:
    """`units`, `rounds`, `zero` (the zero_optimization section), `clip`, `profile` (a path or None).

    Returns seconds: of `initialize`, and medians of a step by wall clock (`step`) and by the CPU time of all threads
    of the process (`cpu`).
    """
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with ExitStack() as stack:
        # The first engine of a process loads libraries and starts threads.
        engine_of({**options, "units": 2}, stack).close()
        with profile_of(options.get("profile"), "initialize"):
            began = time.perf_counter()
            engine = engine_of(options, stack)
            initialize = time.perf_counter() - began
        x = torch.randn(4, WIDTH)

        def step() -> None:
            engine.backward(engine(x))
            engine.step()
            engine.synchronize()

        for _ in range(_WARM_UP_STEPS):
            step()
        walls, cpus = [], []
        for _ in range(options["rounds"]):
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        with profile_of(options.get("profile"), "step"):
            step()
        return {"units": len(engine.units), "initialize": initialize, "step": median(walls), "cpu": median(cpus)}
