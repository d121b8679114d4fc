"""How many layers each stage of a model in layers gets: the division that a `partition_method` names.

Layers stay in their order, no stage is empty, and the most expensive stage costs as little as can be. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from infinity.errors import ConfigError, listed
from infinity.plan.stages import balance

METHODS = ("parameters", "uniform", "type:REGEX")
_TYPE = "type:"


def counts_by_method(
    method: str, numels: Sequence[int], class_names: Sequence[str], stages: int
) -> tuple[int, ...]:  # fmt: skip
    """Return how many layers each of `stages` stages gets.

    method: what a layer costs. "parameters": its elements; "uniform": one; "type:REGEX": one if the expression is found
    in the name of its class in any case of letters, else nothing. numels, class_names: of each layer, in order.

    Among the divisions with the least maximum, costs are as equal as can be. ConfigError for another method, for an
    expression that no layer matches, and for fewer layers than stages.
    """
    if len(class_names) < stages:
        raise ConfigError(
            f"{len(class_names)} layers cannot be divided among {stages} stages, of which none may be empty: set "
            f"parallel.pipeline x parallel.virtual_stages to at most {len(class_names)}, or make more layers"
        )
    return balance(_costs(method, numels, class_names), stages)


def _costs(method: str, numels: Sequence[int], class_names: Sequence[str]) -> list[float]:
    named = method.lower()
    if named == "uniform":
        return [1.0] * len(class_names)
    if named == "parameters":
        return [float(numel) for numel in numels]
    if not named.startswith(_TYPE):
        raise ConfigError(f"partition_method is {method!r}; the methods are {', '.join(METHODS)}")
    # The expression itself keeps its case: in classes such as \D and \d it means different things.
    expression = method[len(_TYPE) :]
    try:
        pattern = re.compile(expression, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"partition_method {method!r} is no regular expression: {error}") from None
    costs = [float(pattern.search(name) is not None) for name in class_names]
    if not any(costs):
        raise ConfigError(
            f"partition_method {method!r} matches no layer; the layers' classes are "
            f"{listed(list(dict.fromkeys(class_names)), 8)}"
        )
    return costs
