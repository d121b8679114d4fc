"""What autograd saves of parameters that a program uses itself, inside `with infinity.read(...)`.

[Note: saved weights] Hooks on a module call's outputs gather its units again before its backward. A program's own
computation has no hooks, so the weights that autograd saves of it are wrapped. When backward unpacks the first wrapper
of a unit, the unit is gathered until that backward ends.

The wrapper holds the saved tensor, a view of the unit's full buffer, whose address stays the same while its bytes come
and go. Weights that a module call uses of its own units are not wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infinity.zero.coordinator import Coordinator
from infinity.zero.hooks import backward_comes, refuse_double
from infinity.zero.module_calls import ModuleCall
from infinity.zero.unit import Unit


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that autograd has saved, and the call whose backward begins when it is unpacked."""

    tensor: Tensor
    scope: ModuleCall
    coordinator: Coordinator


class _Uses:
    """The uses of units in one block: a call for each unit of which autograd has saved a tensor."""

    def __init__(self, coordinator: Coordinator, units: Sequence[Unit]) -> None:
        self.coordinator = coordinator
        self._units = {unit.full.untyped_storage().data_ptr(): unit for unit in units if not unit.placed.whole}
        self._scopes: dict[Unit, ModuleCall] = {}

    def scope_of(self, address: int) -> ModuleCall | None:
        """Return the call for the unit at a storage's address; None if there is no unit, or a module call has it."""
        unit = self._units.get(address)
        if unit is None or self.coordinator.calls.is_open(unit):
            return None
        return self._scopes.setdefault(unit, ModuleCall([unit]))

    def end(self) -> None:
        """End the block: the gradients of its units are incomplete until its backward has run."""
        for scope in self._scopes.values():
            self.coordinator.calls.await_backward(scope)


# Open blocks, the outermost first. Autograd calls the hooks of the innermost block only, so it sees the others here.
_BLOCKS: ContextVar[tuple[_Uses, ...]] = ContextVar("_BLOCKS", default=())


@contextmanager
def gathered_for_backward(uses: Mapping[Coordinator, Sequence[Unit]]) -> Iterator[None]:
    """Open a block whose results can be differentiated after it, when its units are released again.

    uses: all units of each engine, by coordinator; without one there is nothing to gather again.
    """
    if not uses or not torch.is_grad_enabled() or not all(map(backward_comes, uses)):
        yield
        return
    mine = tuple(_Uses(coordinator, units) for coordinator, units in uses.items())
    token = _BLOCKS.set((*_BLOCKS.get(), *mine))
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _BLOCKS.reset(token)
        for each in mine:
            each.end()


def _pack(tensor: Tensor) -> Any:
    if type(tensor) not in (Tensor, nn.Parameter):
        return tensor
    address = tensor.untyped_storage().data_ptr()
    for uses in _BLOCKS.get():
        scope = uses.scope_of(address)
        if scope is not None:
            return _Saved(tensor.detach(), scope, uses.coordinator)
    return tensor


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    refuse_double(saved.scope)
    saved.coordinator.join_backward()
    saved.coordinator.enter_backward(saved.scope)
    return saved.tensor
