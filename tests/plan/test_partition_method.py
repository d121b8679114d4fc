"""The division of layers among stages, against all divisions that there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from infinity.errors import ConfigError
from infinity.plan.stages import counts_by_method


def divisions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every division of layers in their order, without an empty stage."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *cuts, layers)))


def costs_of(counts: Sequence[int], costs: Sequence[int]) -> list[int]:
    remaining = iter(costs)
    return [sum(next(remaining) for _ in range(count)) for count in counts]


def best(costs: Sequence[int], stages: int) -> tuple[int, int]:
    """The least maximum of all divisions, and the least sum of squares with it."""
    found = (costs_of(counts, costs) for counts in divisions(len(costs), stages))
    return min((max(each), sum(cost * cost for cost in each)) for each in found)


def test_the_largest_stage_is_as_small_as_can_be_and_the_others_as_equal():
    numbers = random.Random(5)
    for _ in range(300):
        layers = numbers.randint(1, 9)
        stages = numbers.randint(1, layers)
        numels = [numbers.choice([0, 1, 3, 7, 50, numbers.randint(0, 100)]) for _ in range(layers)]
        names = [numbers.choice(["Embedding", "Block", "Norm"]) for _ in range(layers)]
        names[numbers.randrange(layers)] = "Block"
        weights = {
            "parameters": numels, "uniform": [1] * layers, "type:block": [int(name == "Block") for name in names],
            "type:^(Embedding|block)$": [int(name != "Norm") for name in names],
        }  # fmt: skip
        for method, costs in weights.items():
            counts = counts_by_method(method, numels, names, stages)
            assert len(counts) == stages
            assert sum(counts) == layers
            assert min(counts) >= 1
            reached = costs_of(counts, costs)
            assert (max(reached), sum(cost * cost for cost in reached)) == best(costs, stages), (method, costs)


def test_numbers_of_a_large_model_are_compared_exactly():
    """A billion elements a layer, and one more in some."""
    numels = [10**9 + extra for extra in (0, 1, 0, 1, 1, 0)]
    assert counts_by_method("parameters", numels, ["Block"] * 6, 3) == (2, 2, 2)
    assert counts_by_method("Parameters", [10**9 - 2, 1, 1, 10**9, 1], ["Block"] * 5, 2) == (3, 2)


def test_layers_of_no_cost_and_of_one_are_divided_as_a_reader_expects():
    names = ["Embedding", *["Block"] * 4, "Norm", "Head"]
    numels = [800, 10, 10, 10, 10, 2, 0]
    assert counts_by_method("uniform", numels, names, 7) == (1,) * 7
    assert counts_by_method("uniform", numels, names, 1) == (7,)
    assert counts_by_method("parameters", numels, names, 2) == (1, 6)
    assert counts_by_method("type:block", numels, names, 2) == (3, 4)


@pytest.mark.parametrize(
    ("method", "stages", "said"),
    [
        ("best", 2, "partition_method is 'best'; the methods are parameters, uniform, type:REGEX"),
        ("type:Transformer", 2, "matches no layer; the layers' classes are Block, Norm"),
        ("type:(", 2, "is no regular expression"),
        ("uniform", 4, "3 layers cannot be divided among 4 stages"),
    ],
)
def test_what_cannot_be_divided_is_said(method, stages, said):
    with pytest.raises(ConfigError) as caught:
        counts_by_method(method, [3, 3, 1], ["Block", "Block", "Norm"], stages)
    assert said in str(caught.value)
