"""Training of models that exceed the accelerator's memory, with parameters and states in GPU, CPU and NVMe memory.

`import infinity` is inert: it loads neither torch nor a native library, opens no files, starts no threads and logs
nothing. The public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from infinity.base import VERSION as __version__

if TYPE_CHECKING:
    from estimators.estimate import estimate
    from infinity.engine.initialize import GatheredParameters, initialize, measure_activations, modify, read, state
    from infinity.engine.launch import add_config_arguments, init_distributed
    from infinity.engine.model_init import Init
    from infinity.integrations.huggingface import load_hf
    from infinity.parallel.sequence import sequence_attention
    from infinity.tiling.losses import tile_sequence
    from infinity.tiling.sequences import tiled_cross_entropy, tiled_mlp
    from infinity.tiling.sparse_attention import sparse_attention
    from infinity.zero.parameter import set_z3_leaf_modules

__all__ = [
    "GatheredParameters", "Init", "__version__", "add_config_arguments", "errors", "estimate", "init_distributed",
    "initialize", "load_hf", "measure_activations", "modify", "read", "sequence_attention", "set_z3_leaf_modules",
    "sparse_attention", "state", "tile_sequence", "tiled_cross_entropy", "tiled_mlp",
]  # fmt: skip

_FROM = {
    "infinity.engine.initialize": (
        "GatheredParameters", "initialize", "measure_activations", "modify", "read", "state",
    ),
    "infinity.engine.model_init": ("Init",),
    "infinity.integrations.huggingface": ("load_hf",),
    "infinity.parallel.sequence": ("sequence_attention",),
    "infinity.engine.launch": ("add_config_arguments", "init_distributed"),
    "infinity.tiling.losses": ("tile_sequence",),
    "infinity.tiling.sequences": ("tiled_cross_entropy", "tiled_mlp"),
    "infinity.tiling.sparse_attention": ("sparse_attention",),
    "infinity.zero.parameter": ("set_z3_leaf_modules",),
    "estimators.estimate": ("estimate",),
}  # fmt: skip
_HOMES = {name: module for module, names in _FROM.items() for name in names}
_SUBMODULES = {
    "api": "infinity.engine.initialize", "errors": "infinity.errors", "palette": "infinity.base.palette",
    "zero": "infinity.zero",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(_SUBMODULES[name])
    else:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    # Cached, so that the next use does not call this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
