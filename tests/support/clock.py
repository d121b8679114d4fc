"""Processor seconds that are comparable between machines: a limit of "2 s" is 2 s of a typical core.

The time of a test is divided by the machine's current slowness, which fixed work before and after the test measures.
Clock rates, processor generations and neighbours on the same core differ by a factor of three.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Seconds of `_fixed_work` on the idle core that the limits are set for.
_USUAL_SECONDS = 0.05


@dataclass(slots=True)
class Taken:
    """A measurement; `seconds` of a typical core is set once the block has ended."""

    seconds: float = float("nan")


@contextmanager
def usual_seconds(*, children: bool = False) -> Iterator[Taken]:
    """Measure a block in processor seconds of a typical core: this process's, or those of processes that end in it.

    A machine faster than the usual one counts as one: a limit is never harder than it says.
    """
    taken = Taken()
    before = _fixed_work()
    began = _processor_seconds(children)
    yield taken
    spent = _processor_seconds(children) - began
    taken.seconds = spent / max(1.0, (before + _fixed_work()) / 2 / _USUAL_SECONDS)


def fewest_seconds(action: Callable[[], object], *, below: float, tries: int = 3) -> float:
    """Return the fewest seconds of a typical core that `action` takes; it runs again until they are `below` a limit.

    What runs beside it takes memory bandwidth, too, and lets it look slower than it is; so would objects of earlier
    tests, which the garbage collector would look through again and again.
    """
    seconds: list[float] = []
    with garbage_collector_spared():
        while len(seconds) < tries and min(seconds, default=below) >= below:
            with usual_seconds() as taken:
                action()
            seconds.append(taken.seconds)
    return min(seconds)


@contextmanager
def garbage_collector_spared() -> Iterator[None]:
    """A block in which the garbage collector leaves alone what is there, also in processes that are forked in it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _processor_seconds(children: bool) -> float:
    if not children:
        return time.process_time()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _fixed_work() -> float:
    """Return processor seconds of typical interpreter and compiler work: calls, look-ups, small objects."""
    began = time.thread_time()
    found: dict[int, tuple[int, int]] = {}
    for number in range(300_000):
        key = number * 2_654_435_761 & 0x3FFF
        found[key] = key, found.get(key, (0, 0))[0] + number
    assert len(found) <= 0x4000
    return time.thread_time() - began
