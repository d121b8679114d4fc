"""The weights leave an engine with their model: whole, unit by unit, as ordinary parameters or into a spool.

The parameters stay the objects that they are, so that an optimizer's groups of before hold; they have the dtype that
the engine has computed in. Until `finish` everything can be undone: the partitions keep their values meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infinity.memory.store import TieredStore
from infinity.plan.layout import Slot
from infinity.zero import parameter
from infinity.zero.deferred_init import DeferredInit
from infinity.zero.gathered_memory import GatheredMemory
from infinity.zero.parameter import whole_of
from infinity.zero.unit import Unit


def is_handed_over(unit: Unit) -> bool:
    """Whether the values of a unit are copied out: those of a unit that stays whole are whole parameters already,
    unless it is a tile.
    """
    return not unit.placed.whole or unit.layout.is_tile


@dataclass(frozen=True, slots=True)
class _Before:
    """A parameter as the engine has it: released."""

    param: nn.Parameter
    kind: type[nn.Parameter]
    attributes: dict[str, Any]
    stand_in: Tensor

    @staticmethod
    def of(param: nn.Parameter) -> _Before:
        with torch._C.DisableTorchFunctionSubclass():
            return _Before(param, type(param), dict(param.__dict__), param.data)

    def restore(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            parameter.set_data(self.param, self.stand_in)
        self.param.__class__ = self.kind
        self.param.__dict__.clear()
        self.param.__dict__.update(self.attributes)


class Handover:
    """Takes the parameters of all units of which `is_handed_over` says so.

    spool: takes them from here; None: they stay in CPU memory. discard: give each partition's memory back once its
    values are out, after which nothing can be undone.
    """

    def __init__(
        self, units: Sequence[Unit], memory: GatheredMemory, store: TieredStore, *, spool: DeferredInit | None,
        discard: bool = False,
    ) -> None:  # fmt: skip
        self._units = units
        self._memory = memory
        self._store = store
        self._spool = spool
        self._discard = discard
        self._before: list[_Before] = []
        # Tensors of parameters in tiles of which some tiles are still to come.
        self._growing: dict[int, Tensor] = {}

    def take(self) -> None:
        """Make every parameter whole in CPU memory, one unit gathered at a time. Collective.

        An error leaves the parameters as they were.
        """
        try:
            for unit in self._units:
                if is_handed_over(unit):
                    self._take(unit)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Give the parameters back to the engine."""
        if self._spool is not None:
            self._spool.close()
        for before in reversed(self._before):
            before.restore()
        self._before.clear()
        self._growing.clear()

    def finish(self) -> None:
        """The engine is closed: from now on the parameters are the program's, or the spool's."""
        self._before.clear()
        if self._spool is not None:
            self._spool.seal()

    def _take(self, unit: Unit) -> None:
        done: list[tuple[nn.Parameter, str, Tensor]] = []
        with self._memory.holding([unit]):
            for param, slot in zip(unit.params, unit.layout.slots, strict=True):
                values = self._values(whole_of(param), param, slot)
                if slot.ends:
                    self._growing.pop(id(whole_of(param)), None)
                    done.append((whole_of(param), slot.name, values))
        for param, name, values in done:
            self._before.append(_Before.of(param))
            parameter.restore(param, values)
            parameter.forget(param)
            if self._spool is not None:
                self._spool.attach(param, name)
        if self._discard:
            self._store.discard(unit.key)

    def _values(self, whole: nn.Parameter, param: nn.Parameter, slot: Slot) -> Tensor:
        """A gathered parameter's values in memory of their own; of a tile, what there is of the whole one so far."""
        values = self._growing.get(id(whole))
        if values is None:
            values = self._growing[id(whole)] = torch.empty(slot.shape, dtype=param.dtype, device="cpu")
        values.view(-1)[slot.start : slot.start + slot.numel].copy_(param.detach().reshape(-1))
        return values
