"""One optimizer step as a value: what every sub-group of it is stepped with, taken when the step begins.

The parameters of the program's groups may change while the step goes on behind it (a scheduler sets the next learning
rate); what was taken does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infinity.plan.layout import Slice, UnitLayout


class Segment(NamedTuple):
    """A stretch of a slice that is stepped at once: same parameter group, same step count. `name` is the parameter's
    where stretches of several are not joined.
    """

    start: int
    numel: int
    group: int
    step: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step. By parameter group: `hyper`. By unit index: which parameters have a gradient, and their step counts."""

    hyper: tuple[Any, ...]
    grad_scale: float
    arrived: Mapping[int, Sequence[bool]]
    steps: Mapping[int, Sequence[int]]

    def runs(self, layout: UnitLayout, piece: Slice, first: int, *, joins: bool) -> list[Segment]:
        """Cut a slice, whose first element is `first` of the unit, where the parameter group or the step count
        changes (without `joins`: at every parameter), and leave out what had no gradient.

        The padding between two parameters of a run is stepped with them: it is zero and stays zero.
        """
        arrived, steps = self.arrived[layout.index], self.steps[layout.index]
        if joins and all(arrived) and len(set(steps)) == 1 and len({slot.group for slot in layout.slots}) == 1:
            # By far the most frequent case, padding at the end included.
            return [Segment(0, piece.numel, layout.slots[0].group, steps[0])]
        by_name = {slot.name: (flag, step) for slot, flag, step in zip(layout.slots, arrived, steps, strict=True)}
        runs: list[Segment] = []
        joined = False
        for overlap in layout.overlaps(first, first + piece.numel):
            has_grad, step = by_name[overlap.slot.name]
            if not has_grad:
                joined = False
                continue
            if joins and joined and (runs[-1].group, runs[-1].step) == (overlap.slot.group, step):
                runs[-1] = runs[-1]._replace(numel=overlap.range_start + overlap.numel - runs[-1].start)
            else:
                name = "" if joins else overlap.slot.name
                runs.append(Segment(overlap.range_start, overlap.numel, overlap.slot.group, step, name))
            joined = True
        return runs
