"""Trains models that do not fit the accelerator on the memory that the machine has: GPU, CPU and NVMe.

`import infinity` is inert: no torch, no native library, no files, threads or log lines. The names below are loaded when
they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from estimators.estimate import estimate
    from infinity.api import GatheredParameters, Init, initialize, measure_activations, modify, read, state

__version__ = "0.1.0"

__all__ = [
    "GatheredParameters", "Init", "__version__", "errors", "estimate", "initialize", "measure_activations",
    "modify", "read", "state",
]  # fmt: skip

_FROM_API = ("GatheredParameters", "Init", "initialize", "measure_activations", "modify", "read", "state")
_SUBMODULES = ("api", "errors", "zero")


def __getattr__(name: str) -> Any:
    if name in _FROM_API:
        value = getattr(importlib.import_module("infinity.api"), name)
    elif name == "estimate":
        value = importlib.import_module("estimators.estimate").estimate
    elif name in _SUBMODULES:
        value = importlib.import_module(f"infinity.{name}")
    else:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    # Kept, so that the next use does not come here again.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
