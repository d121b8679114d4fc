"""ZeRO: units that are gathered before use and released after it, gradients reduced into partitions.

`infinity.zero.Init` and `infinity.zero.GatheredParameters` are the names that DeepSpeed users know.
"""

from __future__ import annotations

from typing import Any

_PUBLIC = {"Init", "GatheredParameters"}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from infinity import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
