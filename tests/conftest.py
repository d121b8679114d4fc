"""What every test can ask for."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from infinity import log
from tests.support.spawn import RankPool

if TYPE_CHECKING:
    from tests.support.accelerator.process import AcceleratedProcess


def pytest_configure() -> None:
    """Compute in one thread, as ranks do: workers beside each other would wait for processors in every small sum.

    Let interrupts arrive where a shell has started the tests in its background, with SIGINT ignored.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--shuffle SEED`: files in random order, and the tests in them."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle where that is asked for. Skip what is marked gpu where torch finds none."""
    if (seed := config.getoption("--shuffle")) is not None:
        order = random.Random(seed)
        files = {item.path: order.random() for item in items}
        items.sort(key=lambda item: (files[item.path], order.random()))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def pytest_collection_finish() -> None:
    """Keep what has been imported and collected out of every later search for garbage, which takes a second in it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked drive where the drive of the tests' folders is too full for it."""
    marker = item.get_closest_marker("drive")
    if marker is None:
        return
    (gigabytes,) = marker.args
    free = shutil.disk_usage(item.config._tmp_path_factory.getbasetemp()).free / 1e9  # type: ignore[attr-defined]
    if free < gigabytes:
        pytest.skip(f"writes up to {gigabytes} GB, and {free:.1f} GB are free")


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """How loud an engine is, and what it has said once, is no other test's business."""
    logger = logging.getLogger("infinity")
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers[:]
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers
    log._said.clear()


class RankPools:
    """One `RankPool` a world size, started on first use and shared by the tests of a session."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, world_size: int) -> RankPool:
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size)
        return self._pools[world_size]

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def process() -> Iterator[AcceleratedProcess]:
    """A process whose accelerator is the simulated one; its tests are skipped where that cannot be built."""
    from tests.support.accelerator.process import AcceleratedProcess, require

    require()
    with AcceleratedProcess() as process:
        yield process


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """`rank_pools[2].run(fn, *args)`: see `tests.support.spawn.RankPool`."""
    pools = RankPools()
    yield pools
    pools.close()
