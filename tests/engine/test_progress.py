"""One quiet line now and then, on rank 0, and it says what is the case."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import infinity
from tests.support.cells import kept
from tests.support.models import tiny_llama, token_batch


class Keep(logging.Handler):
    """Keeps what infinity logs."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        logger = logging.getLogger("infinity")
        logger.addHandler(self)
        yield
        logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(rank: int, world: int, folder: str | None, steps: int, every: int) -> tuple[list[str], list[float]]:
    """(log lines of this rank, losses); with a folder, on NVMe."""
    keep, logger, losses = Keep(), logging.getLogger("infinity"), []
    logger.addHandler(keep)
    home = {"device": "nvme", "nvme_path": folder} if folder else {"device": "none"}
    config = {
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": every, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_optimizer": home, "offload_param": home},
    }  # fmt: skip
    engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
    with engine:
        for step in range(steps):
            loss = engine(**token_batch(rank, step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    logger.removeHandler(keep)
    return keep.lines, losses


@pytest.mark.slow
@pytest.mark.parametrize(("world", "steps", "every"), kept([(2, 20, 2), (4, 100, 10)], [(2, 20, 2)]))
def test_ranks_that_tell_ten_times_say_at_most_twenty_lines(rank_pools, world, steps, every):
    everyone = rank_pools[world].run(train, None, steps, every)
    assert sum(len(lines) for lines, _ in everyone) <= 20
    assert all(lines == [] for lines, _ in everyone[1:]), "only rank 0 speaks"


def test_a_line_says_what_is_the_case(tmp_path: Path) -> None:
    lines, losses = train(0, 1, str(tmp_path), 4, 2)
    told = [line for line in lines if line.startswith("step ")]
    assert len(told) == 2
    for line, step in zip(told, (2, 4), strict=True):
        found = re.fullmatch(
            rf"step {step}: loss (\S+), lr 0\.001, gradient norm (\S+), (\S+) tokens/s; "
            r"device \(cpu\) \S+ kB, nvme \S+ kB, activations \S+ kB \(2 x 16, counted\); waiting \d+%( \(.*\))?",
            line,
        )
        assert found is not None, line
        assert float(found[1]) == pytest.approx(losses[step - 1], rel=1e-3)
        assert float(found[2]) > 0 and float(found[3]) > 0
