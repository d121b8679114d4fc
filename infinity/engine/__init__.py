"""The engine: `initialize` makes it of a configuration and a plan; `Engine` has the training loop's verbs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        return importlib.import_module("infinity.engine.engine").Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
