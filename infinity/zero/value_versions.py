"""Which values a unit's parameters have, and whether a program has changed them where the change would be lost.

[Note: changes in place] A value changes in its partition, by a step or by `infinity.modify()`. A change that a module
writes into a whole parameter while it runs is lost with the release, sooner or later as placement has it. So a unit's
version counters are compared when its use ends, on every tier alike. The counters of units that are whole for good are
also compared before a step, which would undo what the program has written between two passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from infinity.errors import StateError
from infinity.zero.parameter import name_of


class ValueVersions:
    """The versions of one unit's values: torch's counters (`param._version`), and how often values have changed."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        # How often the values have changed: backward needs the generation that its forward has seen.
        self.generation = 0
        # The counters when the use under way began (None without values), and when the partitions were last copied in.
        self._used: list[int] | None = None
        self._filled: list[int] = []

    def advance(self) -> None:
        """The partitions are about to get other values."""
        self.generation += 1

    def fill(self) -> None:
        """The parameters have the values of the partitions."""
        self._filled = self._now()

    def begin_use(self, *, visible: bool) -> None:
        """A module begins to use the parameters. visible: they have values (in an embedding's backward they do not)."""
        self._used = self._now() if visible else None

    def accept(self, *, visible: bool) -> None:
        """The partitions have the changed values now, or the changes are given up."""
        self.advance()
        if visible:
            self._used = self._filled = self._now()

    def changed_in_use(self) -> StateError | None:
        """What to raise at the end of a use in which a parameter was changed in place."""
        return self._changed_since(
            self._used,
            "was changed in place while the model ran, and the change would be lost when the parameter is released: "
            "change it after engine.step(), inside infinity.modify()",
        )

    def changed_beside(self) -> StateError | None:
        """What to raise before a step if a parameter was changed in place, and its partition was not."""
        return self._changed_since(
            self._filled,
            "was changed in place, which its partition does not follow, so that a step or a checkpoint would undo the "
            "change: change it inside infinity.modify()",
        )

    def _now(self) -> list[int]:
        return [param._version for param in self._params]

    def _changed_since(self, versions: list[int] | None, why: str) -> StateError | None:
        if versions is None or versions == (now := self._now()):
            return None
        at = next(at for at, pair in enumerate(zip(versions, now, strict=True)) if pair[0] != pair[1])
        # The error is raised once: what the program does about it needs the unit.
        self._used = self._filled = now
        return StateError(f"{name_of(self._params[at])} {why}")
