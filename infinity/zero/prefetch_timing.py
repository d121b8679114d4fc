"""Measurements for the fetch schedule: seconds of computation between the uses of units, and transfer rates.

One training pass is measured after the first ones have warmed everything up, by the device's own clock.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import exchange
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.plan.prefetch import Timing, UnitAccess
from infinity.zero.gathered_memory import GatheredMemory
from infinity.zero.unit import GatherState, Unit

# Bytes read to measure a drive: enough for its rate, too few to delay the step.
_PROBE_NBYTES = 64 << 20


class PrefetchTimer:
    """Marks the uses of one pass: `begin_use` before a use's gather, and `arrived` after it, when computing begins."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begun: list[Any] = []
        self._arrived: list[Any] = []
        self._end: Any = None

    def begin_use(self) -> None:
        self._begun.append(self._device.mark())

    def arrived(self) -> None:
        self._arrived.append(self._device.mark())

    def stop(self) -> None:
        """Mark the end of the pass."""
        self._end = self._device.mark()

    def use_seconds(self) -> tuple[float, ...]:
        """Wait for the device; return the seconds from each use's arrival to the beginning of the next use."""
        self._device.synchronize()
        ends = [*self._begun[1:], self._end]
        return tuple(
            max(self._device.seconds_between(begin, end), 0.0) for begin, end in zip(self._arrived, ends, strict=True)
        )


def agree(
    measured: tuple[tuple[UnitAccess, ...], tuple[float, ...]] | None, units: Sequence[Unit], store: TieredStore,
    device: Device, group: AxisGroup, memory: GatheredMemory,
) -> tuple[tuple[UnitAccess, ...], Timing] | None:  # fmt: skip
    """(uses, timing) for all ranks: the slowest rates and the shortest computations; None where their passes differ.
    Collective. `measured` is a pass of this rank and its seconds of computation, if it was timed.
    """
    uses, seconds = measured if measured is not None else ((), ())
    rates = [fetch_rate(units, store), gather_rate(units, store, device, memory)]
    # Six bytes, so that a float holds them.
    digest = int.from_bytes(hashlib.sha256(str(uses).encode()).digest()[:6], "big")
    mine = [float(digest), *rates, -store.ahead_nbytes / rates[0]]
    rows = exchange(mine, group, "exchange of rates")
    if not uses or len({row[0] for row in rows}) > 1:
        return None
    _, fetch, gather, latency = (min(column) for column in zip(*rows, strict=True))
    everyone = exchange([*seconds], group, "exchange of times")
    shortest = [min(column) for column in zip(*everyone, strict=True)]
    return uses, Timing(use_seconds=tuple(shortest), fetch_rate=fetch, gather_rate=gather, fetch_latency=-latency)


def fetch_rate(units: Sequence[Unit], store: TieredStore) -> float:
    """Read some partitions again; return bytes a second from NVMe to CPU memory, infinite if none is on NVMe."""
    chosen, nbytes = [], 0
    for unit in units:
        spec = store[unit.key].spec
        if spec.extent is not None and nbytes + spec.nbytes <= max(_PROBE_NBYTES, spec.nbytes):
            chosen.append(unit.key)
            nbytes += spec.nbytes
    store.drop(*chosen)
    fresh = [key for key in chosen if not store.in_memory(key)]
    began = time.perf_counter()
    store.prefetch(*fresh)
    for key in fresh:
        with store.read(key):
            pass
    seconds = time.perf_counter() - began
    moved = sum(store[key].spec.nbytes for key in fresh)
    return moved / seconds if moved else float("inf")


def gather_rate(units: Sequence[Unit], store: TieredStore, device: Device, memory: GatheredMemory) -> float:
    """Gather the largest unit; return bytes a second from CPU memory and the other ranks to it. Collective."""
    apart = [unit for unit in units if not unit.placed.whole and unit.state is GatherState.PARTITIONED]
    if not apart:
        return float("inf")
    largest = max(apart, key=lambda unit: unit.layout.nbytes)
    with store.read(largest.key):
        began = time.perf_counter()
        with memory.holding([largest], retain=True):
            device.synchronize()
            seconds = time.perf_counter() - began
    return largest.layout.nbytes / seconds
