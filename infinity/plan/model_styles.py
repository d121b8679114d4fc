"""The tensor axis of a model: its own tensor-parallel plan and its numbers of heads, read from the model.

A model is read by duck typing, as `module_tree` does it, so that this file needs no torch.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from infinity.errors import ConfigError
from infinity.plan.spec import ModuleNode
from infinity.plan.tensor_axis import TensorAxis
from infinity.plan.tensor_styles import plan_tensor_axis

HEADS = ("num_attention_heads", "num_key_value_heads")


def tensor_axis_of(
    model: Any, root: ModuleNode, *, size: int, sequence: bool = False, given: Mapping[str, str] | None = None
) -> TensorAxis:
    """Plan a tensor axis of `size` ranks from a model's own plan and `parallel.plan`.

    root: the whole model's tree (`module_tree`). sequence: `parallel.sequence`. given: `parallel.plan`. Reads names and
    shapes only: the model may be on the meta device. ConfigError for what cannot be cut.
    """
    if size == 1:
        return TensorAxis()
    written = written_styles(root, given, getattr(model, "base_model_prefix", ""))
    axis = plan_tensor_axis(
        root, {**_own_styles(model), **written}, size=size, sequence=sequence, heads=heads_of(model), given=written
    )
    _check_regions(model, axis)
    return axis


def styles_of(model: Any, root: ModuleNode, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return pattern -> style: the model's own plan, overlaid by the configuration's `parallel.plan`.

    The plan of transformers' models has heads, embeddings and experts merged in; where a module wraps such models, the
    patterns of each begin with its path.
    """
    return {**_own_styles(model), **written_styles(root, given, getattr(model, "base_model_prefix", ""))}


def written_styles(root: ModuleNode, given: Mapping[str, str] | None, prefix: object) -> dict[str, str]:
    """Return the patterns of `parallel.plan` as the names of a tree begin: with the base model's path (`prefix`), where
    a pattern leaves it out, as the plan in a model's configuration does.
    """
    if not given or not isinstance(prefix, str) or not prefix:
        return dict(given or {})
    names = [name for node in root.walk() for name in (node.path, *(_join(node.path, param) for param in node.params))]

    def matches(pattern: str) -> bool:
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        return any(regex.fullmatch(name) for name in names)

    longer = {pattern: f"{prefix}.{pattern}" for pattern in given}
    return {
        longer[pattern] if not matches(pattern) and matches(longer[pattern]) else pattern: style
        for pattern, style in given.items()
    }


def heads_of(model: Any) -> dict[str, int]:
    """Return the numbers of attention heads by their names in the model's configuration (its text model's, if it has
    several); of numbers that differ by layer, the largest that divides all.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        for source in (getattr(config, "text_config", None), config):
            layers = getattr(source, "per_layer_config", None) or [source]
            counts = {name: [getattr(layer, name, None) for layer in layers] for name in HEADS}
            known = {name: [n for n in values if isinstance(n, int)] for name, values in counts.items()}
            if any(known.values()):
                return {name: math.gcd(*values) for name, values in known.items() if values}
    return {}


def _own_styles(model: Any) -> dict[str, str]:
    return {_join(path, pattern): style for path, plan in _plans(model, "") for pattern, style in plan.items()}


def _plans(module: Any, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (path, plan) of the outermost modules that have a plan."""
    # A wrapper that hands on every attribute would show the plan without its own path.
    own = isinstance(getattr(type(module), "tp_plan", None), property)
    plan = getattr(module, "tp_plan", None) if own else None
    if plan:
        yield path, dict(plan)
        return
    for name, child in module.named_children():
        yield from _plans(child, _join(path, name))


def _check_regions(model: Any, axis: TensorAxis) -> None:
    """ConfigError for a region that is given a residual: its gradient is whole, and would be summed with the parts."""
    for region in axis.regions:
        module = model.get_submodule(region.path)
        if "residual" in inspect.signature(type(module).forward).parameters:
            raise ConfigError(
                f"{region.path} ({type(module).__name__}) adds a residual in its own forward, so that its input cannot "
                "be copied once for its 'colwise' modules. Give 'replicate' to them and to the 'rowwise' one in "
                "parallel.plan, or set parallel.tensor = 1"
            )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
