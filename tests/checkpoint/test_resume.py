"""A run goes on in a new process as if it had not been cut, and at any other topology from the same states.

All cells of both matrices: `python -m tests.checkpoint.resume_matrix` and `elastic_matrix`. Here is a slice of each.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import infinity
from tests.checkpoint import cells, elastic
from tests.checkpoint.reader import master
from tests.support.oracle import Case, settings
from tests.support.spawn import run_ranks

RESUMED = [
    {"stage": stage, "param": param, "optimizer": optimizer, "dtype": dtype}
    for stage, param, optimizer, dtype in (
        (0, "gpu", "gpu", "fp16"), (1, "gpu", "nvme", "bf16"), (2, "gpu", "cpu", "fp32"), (3, "gpu", "gpu", "bf16"),
        (3, "cpu", "nvme", "fp16"), (3, "nvme", "cpu", "fp32"), (3, "nvme", "nvme", "bf16"), (3, "cpu", "cpu", "bf16"),
    )
]  # fmt: skip


@pytest.mark.slow
def test_a_new_process_goes_on_with_the_same_bits(rank_pools, tmp_path):
    saved = rank_pools[1].run(cells.save_cells, str(tmp_path), RESUMED)
    loaded = run_ranks(cells.load_cells, 1, str(tmp_path), RESUMED)
    assert cells.check_resumed(RESUMED, saved, loaded) == []


@pytest.mark.slow
def test_two_ranks_go_on_with_the_same_bits(rank_pools, tmp_path):
    chosen = [cell for cell in RESUMED if cell["stage"] in (0, 3)]
    saved = rank_pools[2].run(cells.save_cells, str(tmp_path), chosen)
    loaded = rank_pools[2].run(cells.load_cells, str(tmp_path), chosen)
    assert cells.check_resumed(chosen, saved, loaded) == []


ELASTIC = [
    {"world": world, "stage": stage, "param": param, "optimizer": optimizer, "dtype": "bf16"}
    for world, stage, param, optimizer in (
        (1, 2, "gpu", "cpu"), (2, 3, "cpu", "nvme"), (2, 0, "gpu", "gpu"), (4, 3, "nvme", "gpu"),
    )
]  # fmt: skip


@pytest.mark.slow
def test_any_topology_loads_what_any_other_has_saved(rank_pools, tmp_path):
    saved = {}
    for world in (1, 2, 4):
        own = [cell for cell in ELASTIC if cell["world"] == world]
        rows = rank_pools[world].run(elastic.save_cells, str(tmp_path), own)
        saved |= {cells.name_of(cell): row for cell, row in zip(own, rows[0], strict=True)}
    check_reader(tmp_path / cells.name_of(ELASTIC[-1]))
    for world in (1, 2, 4):
        others = [cell for cell in ELASTIC if cell["world"] != world]
        pairs = [(source, target) for source in others for target in ELASTIC if target["world"] == world]
        for row in rank_pools[world].run(elastic.load_cells, str(tmp_path), pairs):
            assert elastic.check_pairs(pairs, saved, row) == []


def check_reader(directory: Path) -> None:
    """A reader of sixty lines finds the masters that the engine does; what it says is kept for all of them."""
    config = settings(directory / "nvme", dtype="bf16")
    case = Case()
    model = case.model()
    with infinity.initialize(model=model, config=config, model_parameters=case.groups(model))[0] as engine:
        engine.load_checkpoint(directory)
        folder = directory / "global_step3"
        for name, param in model.named_parameters(remove_duplicate=False):
            found = torch.from_numpy(np.array(master(folder, name)))
            assert torch.equal(found, infinity.state(param).master), name
