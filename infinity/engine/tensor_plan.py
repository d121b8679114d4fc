"""The tensor axis of a model: its own tensor-parallel plan and its numbers of heads, read from the model."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from infinity.errors import ConfigError
from infinity.plan.spec import ModuleNode
from infinity.plan.tensor_axis import TensorAxis
from infinity.plan.tensor_styles import plan_tensor_axis

_HEADS = ("num_attention_heads", "num_key_value_heads")


def tensor_axis_of(
    model: nn.Module, root: ModuleNode, *, size: int, sequence: bool = False, given: Mapping[str, str] | None = None
) -> TensorAxis:
    """Plan a tensor axis of `size` ranks from a model's own plan and `parallel.plan`.

    root: the whole model's tree (`module_tree`). sequence: `parallel.sequence`. given: `parallel.plan`. Reads
    names and shapes only: the model may be on the meta device. ConfigError for what cannot be cut.
    """
    if size == 1:
        return TensorAxis()
    written = _resolved(model, given or {})
    axis = plan_tensor_axis(
        root, {**_own_styles(model), **written}, size=size, sequence=sequence, heads=heads_of(model), given=written
    )
    _check_regions(model, axis)
    return axis


def styles_of(model: nn.Module, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return pattern -> style: the model's own plan, overlaid by the configuration's `parallel.plan`.

    The plan of transformers' models has heads, embeddings and experts merged in; where a module wraps such models, the
    patterns of each begin with its path. A given pattern may leave out the path of the base model, as the plan in a
    model's configuration does.
    """
    return {**_own_styles(model), **_resolved(model, given or {})}


def heads_of(model: nn.Module) -> dict[str, int]:
    """Return the numbers of attention heads by their names in the model's configuration (its text model's, if it has
    several); of numbers that differ by layer, the largest that divides all.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        for source in (getattr(config, "text_config", None), config):
            layers = getattr(source, "per_layer_config", None) or [source]
            counts = {name: [getattr(layer, name, None) for layer in layers] for name in _HEADS}
            found = {name: math.gcd(*filter(_is_count, values)) for name, values in counts.items()}
            if any(found.values()):
                return {name: count for name, count in found.items() if count}
    return {}


def _own_styles(model: nn.Module) -> dict[str, str]:
    return {_join(path, pattern): style for path, plan in _plans(model, "") for pattern, style in plan.items()}


def _resolved(model: nn.Module, given: Mapping[str, str]) -> dict[str, str]:
    """The given patterns as the model's names begin: with the base model's path where that was left out."""
    prefix = getattr(model, "base_model_prefix", "")
    if not given or not isinstance(prefix, str) or not prefix:
        return dict(given)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    resolved = {}
    for pattern, style in given.items():
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        longer = re.compile(re.escape(f"{prefix}.{pattern}").replace(r"\*", r"\d+"))
        short = any(regex.fullmatch(name) for name in names) or not any(longer.fullmatch(name) for name in names)
        resolved[pattern if short else f"{prefix}.{pattern}"] = style
    return resolved


def _check_regions(model: nn.Module, axis: TensorAxis) -> None:
    """ConfigError for a region that is given a residual: its gradient is whole, and would be summed with the parts."""
    for region in axis.regions:
        module = model.get_submodule(region.path)
        if "residual" in inspect.signature(type(module).forward).parameters:
            raise ConfigError(
                f"{region.path} ({type(module).__name__}) adds a residual in its own forward, so that its input cannot "
                "be copied once for its 'colwise' modules. Give 'replicate' to them and to the 'rowwise' one in "
                "parallel.plan, or set parallel.tensor = 1"
            )


def _plans(module: nn.Module, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (path, plan) of the outermost modules that have a plan."""
    # A wrapper that hands on every attribute would show the plan without its own path.
    own = isinstance(getattr(type(module), "tp_plan", None), property)
    plan: Any = getattr(module, "tp_plan", None) if own else None
    if plan:
        yield path, dict(plan)
        return
    for name, child in module.named_children():
        yield from _plans(child, _join(path, name))


def _is_count(value: object) -> bool:
    return isinstance(value, int)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
