"""Task: the host time of a step over many tiny units, ours and plain torch alternating in one process."""

from __future__ import annotations

import cProfile
import os
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import infinity
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import all_gather, reduce_scatter
from support.machine import median

WIDTH = 8


class Chain(nn.Module):
    """`units` linear layers of 8 x 8: next to no arithmetic."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def run(options: dict[str, Any]) -> dict[str, Any]:
    """`units`, `rounds`, `zero` (the zero_optimization section), `overlap`, `profile` (a path or None).

    Returns medians in seconds of forward, backward and step, and of the CPU time of the thread that trains, for `plain`
    and `ours`, and for the collectives alone that a step at several ranks cannot do without (`collectives`: two gathers
    and one reduction a unit).
    """
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    units, rounds = options["units"], options["rounds"]
    x = torch.randn(4, WIDTH)
    with ExitStack() as stack:
        engine = engine_of(options, stack)
        steps = {"plain": _plain(units, x), "ours": _ours(engine, x)}
        world = int(os.environ["WORLD_SIZE"])
        if world > 1:
            steps["collectives"] = _collectives(units, world)
        times: dict[str, list[list[float]]] = {name: [] for name in steps}
        for index in range(rounds + 5):
            for name, step in steps.items():
                if world > 1:
                    dist.barrier()
                began = time.thread_time()
                moments = step()
                busy = time.thread_time() - began
                if index >= 5:
                    times[name].append([*(b - a for a, b in pairwise(moments)), busy])
        rank = os.environ["RANK"]
        with profile_of(options.get("profile"), rank):
            for _ in range(20 if options.get("profile") else 0):
                steps["ours"]()
        gathering = sum(not unit.placed.whole for unit in engine.units)
    medians = {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    return {"medians": medians, "units": len(engine.units), "gathering": gathering}


def _plain(units: int, x: Tensor) -> Callable[[], list[float]]:
    torch.manual_seed(0)
    model = Chain(units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> list[float]:
        moments = [time.perf_counter()]
        loss = model(x)
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return [*moments, time.perf_counter()]

    return step


def engine_of(options: dict[str, Any], stack: ExitStack) -> Any:
    """An engine over a chain of `options["units"]` layers, closed with `stack`."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": options.get("clip", 1.0),
        "overlap": options.get("overlap", True),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "log_level": "error",
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **options["zero"]},
    }  # fmt: skip
    engine, *_ = infinity.initialize(model=Chain(options["units"]), config=config)
    return stack.enter_context(engine)


def _ours(engine: Any, x: Tensor) -> Callable[[], list[float]]:
    def step() -> list[float]:
        moments = [time.perf_counter()]
        loss = engine(x)
        moments.append(time.perf_counter())
        engine.backward(loss)
        moments.append(time.perf_counter())
        engine.step()
        return [*moments, time.perf_counter()]

    return step


def _collectives(units: int, world: int) -> Callable[[], list[float]]:
    """The same collectives as a step of ours, one after the other, on one unit's buffers."""
    numel = WIDTH * (WIDTH + 1)
    numel += -numel % (16 * world)
    full, part, room = torch.zeros(numel), torch.zeros(numel // world), torch.zeros(numel - numel // world)
    everyone = AxisGroup("world", dist.get_rank(), dist.get_world_size(), dist.group.WORLD)

    def step() -> list[float]:
        moments = [time.perf_counter()]
        for _ in range(units):
            all_gather(full, part, everyone).wait()
        moments.append(time.perf_counter())
        for _ in range(units):
            all_gather(full, part, everyone).wait()
            reduction = reduce_scatter(full, workspace=room, group=everyone)
            reduction.wait()
            reduction.leave_in(part)
        moments.append(time.perf_counter())
        return [*moments, time.perf_counter()]

    return step


@contextmanager
def profile_of(path: str | None, name: str) -> Iterator[None]:
    """Write where the block spends its time, as cProfile sees it, into the file `path`.`name`; nothing without path."""
    if path is None:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    with open(f"{path}.{name}", "w") as file:
        for order in ("tottime", "cumtime"):
            pstats.Stats(profile, stream=file).sort_stats(order).print_stats(45)
