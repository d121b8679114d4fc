"""One optimizer step as a value: the hyper-parameters and step counts that every sub-group is stepped with.

They are copied when the step begins, because the program may change its parameter groups while the step goes on behind
it: a scheduler sets the next learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infinity.plan.layout import Slice, UnitLayout


class Segment(NamedTuple):
    """A range of a slice that is stepped at once: one parameter group, one step count.

    name: the parameter's, if the rule does not step several parameters at once; else empty.
    """

    start: int
    numel: int
    group: int
    step: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all sub-groups of one step share.

    hyper: by parameter group. group_of: by name of a parameter, the group that steps it; no step for one without.
    grad_scale: multiplies every gradient.
    arrived, steps: by unit index, which parameters have a gradient, and the step count of each.
    begun: the device's mark of the step's begin; None where it begins in backward.
    """

    hyper: tuple[Any, ...]
    group_of: Mapping[str, int]
    grad_scale: float
    arrived: Mapping[int, Sequence[bool]]
    steps: Mapping[int, Sequence[int]]
    begun: Any = None

    def segments(self, layout: UnitLayout, piece: Slice, first: int, *, joins: bool) -> list[Segment]:
        """Cut a slice into segments; leave out parameters without a gradient or a group.

        first: the slice's first element, counted in the unit. joins: cut only where the parameter group or the step
        count changes, not at every parameter; the padding between two parameters is then stepped with them, and stays
        zero.
        """
        arrived, steps = self.arrived[layout.index], self.steps[layout.index]
        groups = [self.group_of.get(slot.name) for slot in layout.slots]
        first_group = groups[0] if len(set(steps)) == len({*groups}) == 1 else None
        if joins and all(arrived) and first_group is not None:
            # By far the most frequent case; padding at the end is included.
            return [Segment(0, piece.numel, first_group, steps[0])]
        by_name = {
            slot.name: (flag, group, step)
            for slot, flag, group, step in zip(layout.slots, arrived, groups, steps, strict=True)
        }
        segments: list[Segment] = []
        joined = False
        for overlap in layout.overlaps(first, first + piece.numel):
            has_grad, group, step = by_name[overlap.slot.name]
            if not has_grad or group is None:
                joined = False
                continue
            if joins and joined and (segments[-1].group, segments[-1].step) == (group, step):
                stop = overlap.range_start + overlap.numel
                segments[-1] = segments[-1]._replace(numel=stop - segments[-1].start)
            else:
                name = "" if joins else overlap.slot.name
                segments.append(Segment(overlap.range_start, overlap.numel, group, step, name))
            joined = True
        return segments
