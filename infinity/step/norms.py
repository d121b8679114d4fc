"""The norms of gradients (as sums of squares), and how many elements are not finite: by unit and by parameter.

Each unit is summed in a fixed tree, so that the bits of a sum depend on neither placement nor threads nor on when a
unit was measured.

Clipping by the global norm is folded into the factor that the optimizer multiplies gradients with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from infinity.base import trace
from infinity.distributed.consistency import agree_on_numbers
from infinity.distributed.groups import ProcessGroups
from infinity.memory.store import TieredStore
from infinity.memory.transaction import Reservation
from infinity.ops.adam import GradStats, grad_stats
from infinity.plan.layout import Slot
from infinity.plan.plan import Plan, UnitNumbers
from infinity.plan.shards import Replica
from infinity.plan.types import Key, Kind

# A batch is measured behind the program once it has as many bytes, or as many units.
_BATCH_NBYTES_MIN = 1 << 20
_BATCH_UNITS_MAX = 64


class StepFlags(NamedTuple):
    """What one rank tells the others at each step beside its gradients, and what at least one of them has told."""

    # A signal asks this process to end.
    preempted: bool = False
    # A save behind the program has failed.
    save_failed: bool = False
    # The program has changed values since the latest record: see [Note: fence] in `engine.step_records`.
    changed: bool = False


class Norms:
    """The norms of one rank's gradient partitions, and of all ranks'."""

    def __init__(self, plan: Plan, store: TieredStore, groups: ProcessGroups) -> None:
        self.groups = groups
        self._plan = plan
        self._store = store
        self.numbers = UnitNumbers(plan)
        self._trained = [layout for layout in plan.layouts if layout.trainable]
        self._found: dict[int, GradStats] = {}
        # Units that wait to be measured in a batch, and the bytes of their gradients.
        self._waiting: dict[int, int] = {}

    def forget(self, unit: int) -> None:
        """Drop what was measured of a unit: its gradients have changed."""
        self._found.pop(unit, None)

    def of_unit(self, unit: int, by: Reservation | None) -> GradStats:
        """Return the sum of squares and the number of non-finite elements of one unit. by: as in `measure`."""
        if unit not in self._found:
            self.measure([unit], by)
        return self._found[unit]

    def unqueue(self, unit: int) -> None:
        """Let a unit no longer wait for the next batch."""
        self._waiting.pop(unit, None)

    def batch(self, unit: int) -> list[int]:
        """Let a unit wait to be measured; return all that wait once they are worth a job of their own, else none.

        What still waits when backward is over is measured by `by_unit`.
        """
        self._waiting[unit] = self._store[Key(Kind.GRAD, unit)].spec.nbytes
        if sum(self._waiting.values()) < _BATCH_NBYTES_MIN and len(self._waiting) < _BATCH_UNITS_MAX:
            return []
        units = [*self._waiting]
        self._waiting.clear()
        return units

    def measure(self, units: Sequence[int], by: Reservation | None) -> None:
        """Measure these units now. by: what may hold their gradients."""
        keys = [Key(Kind.GRAD, unit) for unit in units]
        with self._store.read(*keys, by=by) as partitions, trace.span(trace.COMPUTE, "gradient norm"):
            found = _stats([partition.view(Kind.GRAD) for partition in partitions])
        self._found.update(zip(units, found, strict=True))

    def measure_reserved(self, units: Sequence[int], reservation: Reservation) -> None:
        """Measure these units, whose gradients a reservation holds until then."""
        self.measure(units, reservation)
        self._store.access.release(reservation, *(Key(Kind.GRAD, unit) for unit in units))

    def by_unit(self, by: Reservation | None = None) -> dict[int, GradStats]:
        """Return the sum of squares (fp64) and the number of non-finite elements of each trained unit, in the plan's
        order, and forget them. Measures what is not measured yet. by: what may hold gradients that are in memory.
        """
        self._waiting.clear()
        homes = self._plan.placement.units
        for units in self._together([each.index for each in self._trained if each.index not in self._found]):
            self.measure(units, None if any(homes[unit].grad.on_drive for unit in units) else by)
        found = {layout.index: self._found[layout.index] for layout in self._trained}
        self._found.clear()
        return found

    def of_all_ranks(
        self, flags: StepFlags, alike: Sequence[tuple[str, object]], by: Reservation | None = None
    ) -> tuple[float, int, StepFlags]:
        """Return (sum of squares, number of non-finite elements) of all ranks' gradients, and the flags that some rank
        has raised; the same bits on every rank. Collective; DesyncError where ranks
        have other numbers in `alike`. by: as in `by_unit`.

        Ranks exchange a sum for each unit, and all of these are added exactly and rounded once: the order of units and
        ranks does not matter.
        """
        mine = [0.0] * (2 * self.numbers.count)
        for unit, stats in self.by_unit(by).items():
            if self.tells(unit):
                at = 2 * self.numbers.number(unit)
                mine[at : at + 2] = stats
        rows, world = [mine], self.groups.world
        if world.size > 1:
            rows = agree_on_numbers([*mine, *flags], world, "exchange of gradient norms", alike=alike)
        squares = math.fsum(square for row in rows for square in row[: len(mine) : 2])
        count = sum(int(number) for row in rows for number in row[1 : len(mine) : 2])
        if world.size > 1:
            flags = StepFlags(*(any(column) for column in zip(*(row[len(mine) :] for row in rows), strict=True)))
        return squares, count, flags

    def tells(self, unit: int) -> bool:
        """Whether this rank tells the others of a unit's gradients: what several ranks have is told by one of them."""
        groups, layout = self.groups, self._plan.layouts[unit]
        parted = self._plan.placement.units[unit].parts > 1 or groups.data.index == 0
        alone = layout.replica is Replica.NONE or groups.tensor.index == 0
        return parted and alone and self.numbers.tells(unit)

    def by_parameter(self, behind: Reservation | None) -> dict[tuple[int, Slot], GradStats]:
        """Measure each parameter, by (unit, slot).

        behind: the reservation of a step that may still run; it reads the gradients too, so it is not waited for.
        """
        found: dict[tuple[int, Slot], GradStats] = {}
        for units in self._together([layout.index for layout in self._trained]):
            with self._store.read(*(Key(Kind.GRAD, unit) for unit in units), by=behind) as partitions:
                pieces: list[tuple[int, Slot, Tensor]] = []
                for unit, partition in zip(units, partitions, strict=True):
                    held, layout = partition.view(Kind.GRAD), self._plan.layouts[unit]
                    first = layout.partition_start(self._plan.placement.units[unit].parts, self.groups.data.index)
                    pieces += [
                        (unit, overlap.slot, held[overlap.range_start : overlap.range_start + overlap.numel])
                        for overlap in layout.overlaps(first, first + held.numel())
                    ]
                stats = _stats([tensor for *_, tensor in pieces])
                found.update(((unit, slot), each) for (unit, slot, _), each in zip(pieces, stats, strict=True))
        return found

    def _together(self, units: Sequence[int]) -> Iterator[list[int]]:
        """The units whose gradients are leased at once: all that stay in memory, each alone that passes through it."""
        homes = self._plan.placement.units
        yield [unit for unit in units if not homes[unit].grad.on_drive]
        passing = [unit for unit in units if homes[unit].grad.on_drive]
        for unit, following in zip_longest(passing, passing[1:]):
            if following is not None:
                self._store.prefetch(Key(Kind.GRAD, following))
            yield [unit]


def _stats(tensors: Sequence[Tensor]) -> list[GradStats]:
    """Measure gradients with one call a device: they may have different homes (a `ratio` below 1, "auto")."""
    homes: dict[bool, list[int]] = {}
    for index, tensor in enumerate(tensors):
        homes.setdefault(tensor.is_cpu, []).append(index)
    found = {
        index: stats
        for indices in homes.values()
        for index, stats in zip(indices, grad_stats([tensors[index] for index in indices]), strict=True)
    }
    return [found[index] for index in range(len(tensors))]


def clip_factor(norm: float, clip_norm: float) -> float:
    """Return the factor that brings gradients of global norm `norm` to at most `clip_norm` (0: no clipping).

    The formula is that of torch.nn.utils.clip_grad_norm_: clip_norm / (norm + 1e-6), at most 1. A norm that is not
    finite clips nothing.
    """
    if clip_norm <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))
