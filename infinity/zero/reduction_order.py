"""The order in which the ranks reduce the units' gradients of one backward.

With several ranks the reductions of one backward run in one fixed order, so that every rank starts the same collective
whatever its own graph looked like. It is the plan's order reversed at first; after the first backward it is the order
in which rank 0's units really finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import exchange
from infinity.zero.unit import Unit


class ReductionOrders:
    """The orders of the stages that this rank runs, whose backwards are apart; one without a pipeline."""

    def __init__(self, units: Sequence[Unit], chunks: Sequence[Sequence[Unit]]) -> None:
        """units: all of them. chunks: those of each stage."""
        self._orders = [ReductionOrder(chunk) for chunk in chunks] or [ReductionOrder(units)]
        # That of the backward at hand.
        self.current = self._orders[0]
        # Whether it leaves gradients on the parameters, because those of weights come later.
        self.leaves = False

    @property
    def units(self) -> list[Unit]:
        """All units, each once."""
        return [*dict.fromkeys(unit for order in self._orders for unit in order.units)]

    def begin_backward(self, chunk: int, *, leaves: bool) -> None:
        """A backward begins through a stage of this rank."""
        self.current, self.leaves = self._orders[chunk], leaves

    def agree(self, group: AxisGroup) -> None:
        """As `ReductionOrder.agree`, for each."""
        for order in self._orders:
            order.agree(group)


class ReductionOrder:
    """Hands out units in turn, and records the order in which a backward finishes with them."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(reversed(units))
        # How many units of this backward have had their turn.
        self._turn = 0
        # Units that this backward is done with, in the order in which it was.
        self._finished: dict[Unit, None] = {}
        # Whether the ranks have agreed on the order.
        self._agreed = False
        # Unit indices in the order of the latest backward.
        self._seen = [unit.layout.index for unit in self.units]

    def ready(self, unit: Unit) -> Iterator[Unit]:
        """Backward is done with a unit. Yields the units whose turn has come."""
        self._finished[unit] = None
        while self._turn < len(self.units) and self.units[self._turn] in self._finished:
            self._turn += 1
            yield self.units[self._turn - 1]

    def rest(self) -> list[Unit]:
        """The units that have not had their turn in this backward."""
        return self.units[self._turn :]

    def end_backward(self) -> None:
        """All units have had their turn."""
        rest = [unit for unit in self.units if unit not in self._finished]
        self._seen = [unit.layout.index for unit in [*self._finished, *rest]]
        self.abandon_backward()

    def abandon_backward(self) -> None:
        """Begin anew with the next backward."""
        self._turn = 0
        self._finished.clear()

    def agree(self, group: AxisGroup) -> None:
        """Take over the order of rank 0's latest backward. Collective, once."""
        if self._agreed:
            return
        self._agreed = True
        everyone = exchange([float(index) for index in self._seen], group, "agreement on the order of reductions")
        by_index = {unit.layout.index: unit for unit in self.units}
        self.units = [by_index[int(index)] for index in everyone[0]]
