"""Which values a unit's parameters have, and whether a program has changed them where the change would be lost.

[Note: changes in place] A value changes in its partition, by a step or by `infinity.modify()`. A change that a module
writes into a whole parameter while it runs is lost with the release, sooner or later as placement has it. So a unit's
version counters are compared when its use ends, on every tier alike. The counters of units that are whole for good are
also compared before a step, which would undo what the program has written between two passes.

A counter that has moved says that the parameter was written, not that its values are others: torch's parametrizations
set a parameter to itself, and a program may put back what it has replaced for one call. So the values decide:
- A parameter that is written in its first use, where it is its own partition, or that was written in an earlier use, is
  watched: its fingerprint is taken when a use begins, and again if its counter has moved.
- Any other one is compared with its partition, of which this rank has a part.
- Where it is its own partition, a change is kept by it, unless a master has more digits than the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from infinity.errors import StateError
from infinity.zero.parameter import name_of

# Words (8 bytes) in a row of what `fingerprint` adds up.
_ROW = 1024


class ValueVersions:
    """The versions of one unit's values: torch's counters (`param._version`), and how often values have changed.

    alone: the parameters are their own partition, so nothing else tells what they were before a use. as_before: asked
    about a parameter that is not watched and was written: whether its values are those of the partitions. None: that
    cannot be told.
    """

    def __init__(self, params: Sequence[nn.Parameter], *, alone: bool, as_before: Callable[[], bool | None]) -> None:
        self._params = params
        self._as_before = as_before
        # How often the values have changed: backward needs the generation that its forward has seen.
        self.generation = 0
        # The counters when the use under way began (None without values), and when the partitions were last copied in.
        self._used: list[int] | None = None
        self._filled: list[int] = []
        # Positions of parameters that were written in some use, and of those that are watched in the next one.
        self._written: set[int] = set()
        self._watched: Collection[int] = range(len(params)) if alone else self._written
        # Fingerprints of watched parameters when the use under way began.
        self._prints: dict[int, Tensor] = {}

    def advance(self) -> None:
        """The partitions are about to get other values."""
        self.generation += 1

    def fill(self) -> None:
        """The parameters have the values of the partitions."""
        self._filled = self._now()

    def begin_use(self, *, visible: bool) -> None:
        """A module begins to use the parameters. visible: they have values (in an embedding's backward they do not)."""
        self._used = self._now() if visible else None
        self._prints = {at: fingerprint(self._params[at]) for at in self._watched} if visible else {}

    def accept(self, *, visible: bool) -> None:
        """The partitions have the changed values now, or the changes are given up."""
        self.advance()
        if visible:
            self._used = self._filled = self._now()

    def changed_in_use(self) -> StateError | None:
        """What to raise at the end of a use in which a parameter was changed in place."""
        found = self._changed_since(
            self._used,
            "was changed in place while the model ran, and the change would be lost when the parameter is released: "
            "change it after engine.step(), inside infinity.modify()",
        )
        self._watched, self._prints = self._written, {}
        return found

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
        # An error is raised once: what the program does about it needs the unit.
        self._used = self._filled = now
        for at, pair in enumerate(zip(versions, now, strict=True)):
            if pair[0] == pair[1]:
                continue
            self._written.add(at)
            before = self._prints.get(at)
            same = self._as_before() if before is None else torch.equal(before, fingerprint(self._params[at]))
            if not same:
                again = "; if it has its old values again, call once more" if same is None else ""
                return StateError(f"{name_of(self._params[at])} {why}{again}")
        return None


def fingerprint(values: Tensor) -> Tensor:
    """Return sums of the bytes of `values` (contiguous), by row and by column of a table of them: they tell almost
    every change, moved and exchanged values too, and take one or two passes over the memory.
    """
    raw = values.detach().reshape(-1).view(torch.uint8)
    whole = raw.numel() // (8 * _ROW) * 8 * _ROW
    table = raw[:whole].view(torch.int64).view(-1, _ROW)
    return torch.cat([table.sum(0), table.sum(1), raw[whole:].long()])
