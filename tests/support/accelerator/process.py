"""Run functions in a process whose accelerator is the simulated one.

    with AcceleratedProcess() as process:
        losses = process.run(train, 3)

The device is the whole process's accelerator and must be loaded before the first backward, so it gets one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import accelerator
from tests.support.spawn import RankPool


def require() -> None:
    """Skip the test where the device cannot be built. A build may take longer than a call: so it is done here."""
    try:
        accelerator.library()
    except accelerator.Unavailable as reason:
        pytest.skip(str(reason))


class AcceleratedProcess:
    """One process that runs functions one after another; one that dies (a stray read does that) is replaced."""

    def __init__(self) -> None:
        # A build may take longer than a call: so it is done here. Raises Unavailable where it cannot be done.
        accelerator.library()
        self._pool = RankPool(1)

    def __enter__(self) -> AcceleratedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 110) -> Any:
        """Return `fn(*args)`, called with the device loaded, reset and without delays; RankError if it fails."""
        return self._pool.run(_call, fn, args, timeout=timeout)[0]


def _call(rank: int, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    accelerator.load()
    accelerator.configure()
    accelerator.reset()
    return fn(*args)
