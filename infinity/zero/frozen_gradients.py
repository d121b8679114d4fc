"""Gradients that autograd leaves on parameters which are not trained."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.errors import StateError
from infinity.zero.unit import Unit


class FrozenGradients:
    """Drops the gradients of parameters that no parameter group has, and refuses those of thawed ones, and all of them
    in an engine without an optimizer: they would be dropped where a program expects to train with them.
    """

    def __init__(self, units: Sequence[Unit], *, trains: bool) -> None:
        slots = [
            (slot.name, param)
            for unit in units
            if not unit.layout.trainable
            for slot, param in zip(unit.layout.slots, unit.params, strict=True)
        ]
        self._trains = trains
        # Frozen by the choice of parameter groups; autograd fills their gradients all the same.
        self._unwanted = [param for _, param in slots if param.requires_grad and trains]
        # These required no gradient when the plan was made, which has no place for one and no optimizer states.
        self._frozen = [
            (name, param) for name, param in slots
            if not (param.requires_grad and trains) and param.is_floating_point()
        ]  # fmt: skip

    def drop(self) -> None:
        """Drop what the latest backward has left. StateError if a frozen parameter has got a gradient."""
        for param in self._unwanted:
            param.grad = None
        refused = [name for name, param in self._frozen if param.grad is not None]
        if not refused:
            return
        for _, param in self._frozen:
            param.grad = None
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        if not self._trains:
            raise StateError(
                f"{refused[0]}{more} has a gradient, and this engine was made without an optimizer: it keeps no "
                "gradients. Run the model under torch.no_grad(), freeze it with model.requires_grad_(False) where "
                "gradients are to flow through it, or name an optimizer in the configuration to train it"
            )
        raise StateError(
            f"{refused[0]}{more} did not require a gradient when the engine was made and has no "
            "optimizer states, but has a gradient now: set requires_grad back to False, or "
            "call infinity.initialize() with it trainable and freeze it until you want it, which is always possible"
        )
