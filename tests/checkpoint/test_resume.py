"""A run goes on in a new process as if it had not been cut, and at any other topology from the same states.

All cells of both matrices: `python -m tests.checkpoint.resume_matrix` and `elastic_matrix`. Here is a slice of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity
from tests.checkpoint import cells, elastic
from tests.checkpoint.reader import master
from tests.support.models import mlp, vector_batch
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
    {"world": world, "stage": stage, "param": param, "optimizer": optimizer, "dtype": "bf16", "tiles": tiles}
    for world, stage, param, optimizer, tiles in (
        (1, 2, "gpu", "cpu", False), (2, 3, "cpu", "nvme", True), (2, 0, "gpu", "gpu", False),
        (4, 3, "nvme", "gpu", False),
    )
]  # fmt: skip


@pytest.mark.matrix
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


BATCH, MICRO = 12, 2


def steps_of_one_batch_size(rank: int, world: int, folder: str, taken_up: bool) -> list[Any]:
    """Two steps of a run, then a save; or a load, and two steps more. Each step has the same samples at any number of
    ranks: [micro-steps, micro-steps made at each step, masters].
    """
    config = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    with infinity.initialize(mlp(), config)[0] as engine:
        if taken_up:
            engine.load_checkpoint(folder)
        needed = []
        for step in range(2 * taken_up, 2 * taken_up + 2):
            for micro in range(engine.gradient_accumulation_steps()):
                batch = vector_batch(0, step * BATCH // MICRO + micro * world + rank, batch=MICRO)
                engine.backward(engine(**batch))
                engine.step()
                needed += [micro + 1] if engine.was_step_applied() else []
        if not taken_up:
            engine.save_checkpoint(folder)
        masters = [infinity.state(param).master for param in engine.module.parameters()]
    return [engine.micro_steps, needed, masters]


def test_a_step_begins_behind_a_load_whatever_accumulates_to_one_batch_size(two_ranks, tmp_path):
    saved = two_ranks.run(steps_of_one_batch_size, str(tmp_path), False)[0]
    one = steps_of_one_batch_size(0, 1, str(tmp_path), True)
    two = two_ranks.run(steps_of_one_batch_size, str(tmp_path), True)[0]
    assert [each[:2] for each in (saved, one, two)] == [[6, [3, 3]], [24, [6, 6]], [12, [3, 3]]]
    for mine, theirs in zip(one[2], two[2], strict=True):
        torch.testing.assert_close(mine, theirs)


def check_reader(directory: Path) -> None:
    """A reader of seventy lines finds the masters that the engine does; what it says is kept for all of them."""
    config = settings(directory / "nvme", dtype="bf16")
    case = Case()
    model = case.model()
    with infinity.initialize(model=model, config=config, model_parameters=case.groups(model))[0] as engine:
        engine.load_checkpoint(directory)
        folder = directory / "global_step3"
        for name, param in model.named_parameters(remove_duplicate=False):
            found = torch.from_numpy(np.array(master(folder, name)))
            assert torch.equal(found, infinity.state(param).master), name
