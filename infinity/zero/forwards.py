"""What stands in the place of a module's `forward`. Only this file puts it there, and takes it out again.

Several may stand at one module, each around the one before: what the tensor axis has cut, then what defers weight
gradients, recomputes, offloads or is compiled. Hooks lie around them all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any, ClassVar, cast

from torch import nn


def set_forward(module: nn.Module, forward: Any) -> None:
    """Let a callable stand in for a module's `forward`; None: its class's own."""
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


class Replaced:
    """A replacement of a module's `forward`, for `restore` to take out. A deep copy of the module has its class's own.

    Subclasses are called in its place, and call `_forward`, which it had before.
    """

    # Whether what it calls may be compiled in its place.
    compiles: ClassVar[bool] = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # A library may have set one on the instance already.
        self._own = module.__dict__.get("forward")
        # The function that is called, and the same before it was compiled.
        self._forward: Callable[..., Any] = module.forward
        self._eager = self._forward
        # Who asks for the signature (transformers' generate, its Trainer) is told the former's.
        update_wrapper(cast(Callable[..., Any], self), self._forward, updated=())
        set_forward(module, self)

    @property
    def eager(self) -> Callable[..., Any]:
        """The replaced `forward`, before it was compiled."""
        return self._eager

    def compile(
        self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]], function: Callable[..., Any]
    ) -> None:
        """Call the compiled `function`, which must compute the same as the replaced `forward`."""
        self._forward = compiler(function)

    def restore(self) -> None:
        """Restore the module's own `forward`, unless it was replaced again."""
        if self._module.__dict__.get("forward") is self:
            set_forward(self._module, self._own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo[id(self._module)]
        return MethodType(type(module).forward, module)
