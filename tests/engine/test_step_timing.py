"""The parts of a step's time add up to it, and each delay shows where it was."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.base import trace
from infinity.errors import StateError
from infinity.observability.progress import PARTS
from tests.engine.test_progress import Keep
from tests.engine.test_timeline import NVME, SlowDrive, Wide
from tests.support.models import tiny_llama, token_batch
from tests.support.oracle import settings

DELAY = 0.05
# Of a rank, so that what ranks that share cores wait for each other anyway is far less.
LATE = 8 * DELAY


class Late(nn.Module):
    """Takes its time in forward and in backward."""

    def __init__(self, inner: nn.Module, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.inner, self.times = inner, (forward, backward)

    def forward(self, **batch: Tensor) -> Tensor:
        loss = self.inner(**batch)
        time.sleep(self.times[0])
        if self.times[1] and loss.requires_grad:
            loss.register_hook(lambda _: time.sleep(self.times[1]))
        return loss


def start(folder: Path, model: nn.Module | None = None, **options: Any) -> Any:
    home = {"device": "nvme", "nvme_path": str(folder)}
    config = {
        "train_micro_batch_size_per_gpu": 2, "wall_clock_breakdown": True, "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": home, "offload_param": home, "stage3_param_persistence_threshold": 0,
        }, **options,
    }  # fmt: skip
    return infinity.initialize(model=model if model is not None else tiny_llama(), config=config)[0]


def step(engine: Any, index: int, *, data: float = 0.0, program: float = 0.0) -> None:
    time.sleep(data)
    loss = engine(**token_batch(0, index))
    time.sleep(program)
    engine.backward(loss)
    engine.step()


def test_parts_add_up_to_the_time_that_passed(tmp_path: Path) -> None:
    with start(tmp_path, gradient_accumulation_steps=2, overlap=False) as engine:
        with pytest.raises(StateError, match="no step has been timed"):
            engine.step_times()
        step(engine, 0)
        step(engine, 1)
        ended, apart = time.perf_counter(), []
        for index in range(2, 8, 2):
            step(engine, index, data=DELAY)
            step(engine, index + 1, program=DELAY)
            before, ended = ended, time.perf_counter()
            passed, times = ended - before, engine.step_times()
            assert sum(times.parts.values()) + sum(times.waits.values()) == pytest.approx(times.seconds, rel=1e-9)
            apart.append(abs(times.seconds / passed - 1))
            assert set(times.parts) == set(PARTS)
            assert min(times.parts[name] for name in ("forward", "backward", "optimizer", "gradient norm")) > 0
            assert min(times.parts["data"], times.parts["program"]) >= DELAY
        # The test looks at its clock a moment later, and longer where others compute.
        assert min(apart) < 0.01
        assert max(apart) < 0.1


def test_every_delay_shows_in_its_own_part(tmp_path: Path) -> None:
    with start(tmp_path, Late(tiny_llama(), forward=DELAY, backward=2 * DELAY)) as engine:
        for index in range(3):
            step(engine, index, data=3 * DELAY, program=4 * DELAY)
        parts = engine.step_times().parts
    for name, delays in (("forward", 1), ("backward", 2), ("data", 3), ("program", 4)):
        assert delays * DELAY <= parts[name] <= (delays + 0.9) * DELAY, (name, parts)
    assert parts["engine"] + parts["copy"] + parts["optimizer"] + parts["gradient norm"] < DELAY


def test_the_first_step_of_a_second_engine_begins_with_that_engine(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        step(first, 0)
        time.sleep(8 * DELAY)
        with start(tmp_path) as second:
            begun = time.perf_counter()
            step(second, 0, data=DELAY)
            passed, times = time.perf_counter() - begun, second.step_times()
        assert DELAY <= times.parts["data"] < 5 * DELAY
        assert times.seconds < passed + 5 * DELAY, "from its own beginning, in initialize()"
        step(first, 1)
        assert first.step_times().parts["program"] >= 8 * DELAY


def test_a_slow_drive_shows_as_its_own_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SlowDrive(monkeypatch, 0.02)
    zero = {"sub_group_size": 400_000, "stage3_prefetch_bucket_size": 700_000, "stage3_max_reuse_distance": 0}
    config = settings(tmp_path, **NVME, zero=zero, overlap=False, wall_clock_breakdown=True)
    x = torch.ones(32, 768, dtype=torch.bfloat16)
    with infinity.initialize(model=Wide(), config=config)[0] as engine:
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        assert engine.step_times().waits["NVMe read"] >= 16 * 0.02


def late_rank(rank: int, world: int) -> dict[str, float]:
    """Waits of a rank; rank 1 comes late to every step."""
    torch.set_num_threads(1)
    config = {"train_micro_batch_size_per_gpu": 2, "wall_clock_breakdown": True, "zero_optimization": {"stage": 2}}
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        for index in range(3):
            step(engine, index, program=rank * LATE)
        return dict(engine.step_times().waits)


def test_waiting_for_a_late_rank_shows_on_the_others(rank_pools: Any) -> None:
    early, late = rank_pools[2].run(late_rank)
    waited = [sum(waits.get(cause, 0.0) for cause in ("reduction", "other ranks", "gather")) for waits in (early, late)]
    assert waited[0] >= 0.8 * LATE > waited[1]


def test_the_breakdown_is_printed_and_costs_nothing_when_off(tmp_path: Path) -> None:
    keep = Keep()
    with keep.listening():
        with start(tmp_path, steps_per_print=3) as engine:
            for index in range(7):
                step(engine, index)
        with start(tmp_path, wall_clock_breakdown=False) as engine:
            step(engine, 0)
            assert trace.span(trace.WAIT, "nothing") is trace.span(trace.COPY, "nothing"), "nobody counts"
            with pytest.raises(StateError, match="wall_clock_breakdown"):
                engine.step_times()
    told = [line for line in keep.lines if line.startswith("time of ")]
    assert [line.split(":")[0] for line in told] == ["time of step 1", *["time of a step, mean of 3"] * 2]
    for line in told:
        total, *parts = re.findall(r"(\d+\.\d+)", line)
        assert sum(map(float, parts)) == pytest.approx(float(total), abs=0.006)
