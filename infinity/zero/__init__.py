"""ZeRO: units that are gathered before use and released after it, gradients reduced into partitions.

`infinity.zero.Init`, `infinity.zero.GatheredParameters` and the functions `safe_get_...` and `safe_set_...` are the
names that DeepSpeed users know, and so are those about leaf modules.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Init": "infinity.engine.model_init", "GatheredParameters": "infinity.engine.initialize",
    **dict.fromkeys(
        ("get_z3_leaf_modules", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module"),
        "infinity.zero.parameter",
    ),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name.startswith(("safe_get_", "safe_set_")):
        return getattr(importlib.import_module("infinity.integrations.deepspeed.tensor_fragment"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
