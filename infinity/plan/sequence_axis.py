"""What a sequence axis is to a model that is known by its values alone: whether it can run in parts, and what is sent.

Imports no torch: the engine asks it of a model of transformers, the estimator of a config.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from infinity.errors import ConfigError

# Scalings of rotary positions that look at the largest one, of which each rank has another.
_BY_LENGTH = ("dynamic", "longrope")
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv")
WAY_OUT = "leave sequence_parallel_size out"


def check_parts(name: str, values: Mapping[str, Any], size: int) -> None:
    """ConfigError for a model that `size` ranks cannot run in parts.

    name: of the model, for messages. values: the keys of its config.json, any of which may be missing.
    """
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]
    types = [each.get("rope_type", each.get("type")) for each in ropes]
    scaled = [kind for kind in types if kind in _BY_LENGTH]
    recurrent = [kind for kind in values.get("layer_types") or () if str(kind).startswith(_RECURRENT)]
    why, heads = "", values.get("num_attention_heads", values.get("n_head"))
    # transformers' GPT-2 drops out where its file says nothing.
    dropout = values.get("attention_dropout") or values.get("attn_pdrop", 0.1 * (values.get("model_type") == "gpt2"))
    if recurrent:
        why = f"has layers that pass a state from token to token ({recurrent[0]})"
    elif scaled:
        why = f"scales its rotary positions by the length of its input ({scaled[0]}), which each rank has of a part"
    elif dropout:
        why = f"drops out attention ({dropout:g}), of which ranks would draw other elements than one rank"
    if why:
        raise ConfigError(f"sequence_parallel_size is {size}, and {name} {why}: {WAY_OUT} for this model")
    if isinstance(heads, int) and heads % size:
        raise ConfigError(
            f"sequence_parallel_size is {size}, which does not divide the {heads} attention heads of {name}: set "
            f"it to {math.gcd(heads, size)}, or to another divisor of {heads}"
        )


def possible_parts(values: Mapping[str, Any], sizes: Iterable[int]) -> list[int]:
    """Those of `sizes` that a model can run in so many parts."""
    found = []
    for size in sizes:
        with suppress(ConfigError):
            if size > 1:
                check_parts("", values, size)
            found.append(size)
    return found


def key_heads(heads: int, size: int) -> int:
    """Key and value heads along an axis of `size` ranks, which repeat them until the ranks divide them."""
    return heads * (size // math.gcd(heads, size))


def sent_numel(columns: int, *, tokens: int, size: int) -> int:
    """Elements that a rank sends to the others of its sequence in one direction of one attention layer.

    columns: of queries, keys, values and the output together, all heads. tokens: of the rank's part.
    """
    return columns * tokens * (size - 1) // size
