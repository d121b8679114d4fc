"""Numbers of units and of their parameters in the whole model, for what ranks of different stages tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from infinity.plan.plan import Plan

_Value = TypeVar("_Value")


class UnitNumbers:
    """The place of a rank's units among all units of the model. Without a pipeline both are the same."""

    def __init__(self, plan: Plan) -> None:
        part = plan.pipeline
        if part is None:
            numbers, params = tuple(range(len(plan.layouts))), [len(layout.slots) for layout in plan.layouts]
        else:
            numbers, params = part.numbers, [len(unit.params) for unit in part.split.units]
        # Units of the whole model.
        self.count = len(params)
        self._numbers = numbers
        self._offsets = [*accumulate(params, initial=0)]
        self._told_elsewhere = plan.told_elsewhere
        # Units of other stages, each with its number.
        self._others = [] if part is None else [
            (number, unit) for number, unit in enumerate(part.split.units) if number not in set(numbers)
        ]  # fmt: skip

    def number(self, unit: int) -> int:
        """Return the number in the whole model of a unit of this rank's plan."""
        return self._numbers[unit]

    def tells(self, unit: int) -> bool:
        """Return whether this rank, of those along the pipeline axis, speaks for a unit of its plan."""
        return unit not in self._told_elsewhere

    def flags(self, mine: Mapping[int, Sequence[bool]]) -> list[bool]:
        """Return a flag for each parameter of the whole model: this rank's by unit of its plan, False elsewhere."""
        found = [False] * self._offsets[-1]
        for unit, flags in mine.items():
            at = self._offsets[self._numbers[unit]]
            found[at : at + len(flags)] = flags
        return found

    def names_elsewhere(self, flags: Sequence[bool]) -> frozenset[str]:
        """Return the names of the parameters that only other stages have and whose flag, in a list by parameter of the
        whole model, is set.
        """
        return frozenset(
            spec.name
            for number, unit in self._others
            for spec, flag in zip(unit.params, flags[self._offsets[number] :], strict=False)
            if flag
        )

    def of_unit(self, values: Sequence[_Value], unit: int) -> list[_Value]:
        """Return what a list by parameter of the whole model has of a unit of this rank's plan."""
        at = self._numbers[unit]
        return list(values[self._offsets[at] : self._offsets[at + 1]])
