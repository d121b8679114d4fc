"""Which cells of a matrix stay in the suite."""

from __future__ import annotations

import itertools

from tests.support.cells import cover, covered


def test_every_pair_of_values_is_met_by_few_cells_and_the_others_are_marked() -> None:
    axes = {"stage": [0, 1, 2, 3], "tier": ["gpu", "cpu", "nvme"], "dtype": ["fp32", "bf16"], "clip": [0.0, 1.0]}
    names, params = covered(**axes)
    product = list(itertools.product(*axes.values()))
    assert names == "stage,tier,dtype,clip" and [param.values for param in params] == product
    suite = [param.values for param in params if not param.marks]
    assert suite == [cell for cell in product if cell in cover(product, lambda cell: cell)] and len(suite) <= 14
    for one, other in itertools.combinations(range(len(axes)), 2):
        wanted = set(itertools.product(*(list(axes.values())[axis] for axis in (one, other))))
        assert {(cell[one], cell[other]) for cell in suite} == wanted
