"""Placement never changes the result: the same bits wherever parameters and optimizer states live."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from infinity.distributed import cma_transport
from tests.support.cells import covered, kept
from tests.support.oracle import (
    CLIP,
    STEPS,
    Case,
    Result,
    difference,
    join,
    reference,
    settings,
    states_on,
    swap_files,
    train,
)

TIERS = ("gpu", "cpu", "nvme")
PLACEMENTS = list(itertools.product(TIERS, TIERS))
# Places for the worlds and variants that cannot afford all nine.
CORNERS = [("gpu", "gpu"), ("cpu", "cpu"), ("nvme", "nvme"), ("gpu", "nvme"), ("nvme", "gpu")]
ROOT = Path(__file__).parents[2]


def run_on(rank: int, folder: str, options: dict[str, Any]) -> tuple[Result, int]:
    """One cell: its result (without tensors), and how many extents lay in the swap file, byte for byte."""
    extents: list[int] = []
    config = settings(folder, **options)
    result = train(Case(), config, rank=rank, look=lambda engine: extents.append(states_on(engine, folder)))
    assert len(result.norms) == STEPS, "every step was applied"
    assert all(torch.isfinite(value).all() for value in result.master.values())
    result.master, result.exp_avg = {}, {}
    return result, extents[0]


def cells(rank: int, world: int, folder: str, rows: list[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
    """(digest, extents on NVMe, releases, units that can be released) of each row."""
    join(world)
    found = []
    for options in rows:
        result, extents = run_on(rank, folder, options)
        found.append((result.digest, extents, result.releases, result.cut_units))
    return found


def reading(rank: int, world: int, folder: str, rows: list[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
    """As `cells`, with everything that the ranks gather and reduce read from each other's memory."""
    with mock.patch.object(cma_transport, "SMALLEST_NBYTES", 1):
        return cells(rank, world, folder, rows)


def check_rows(rank_pools: Any, folder: Path, world: int, rows: list[dict[str, Any]], run: Any = cells) -> str:
    """Run the rows; all must give one digest, use the tiers that they name, and really gather and release."""
    everyone = rank_pools[world].run(run, str(folder), rows, timeout=100)
    for row in everyone:
        for options, (_, extents, releases, cut) in zip(rows, row, strict=True):
            nvme_kinds = [options.get("param") == "nvme", options.get("optimizer") == "nvme"]
            assert (extents > 0) == any(nvme_kinds), options
            if nvme_kinds[0]:
                assert extents >= 4, f"{options}: each unit has an extent of its own"
            if options.get("stage", 3) == 3 and (world > 1 or options["param"] != "gpu"):
                assert cut >= 5, options
                # Each of them at least once in each of the forward passes.
                assert releases >= STEPS * options.get("accumulation", 1) * cut, options
            else:
                assert cut == releases == 0, options
    digests = {digest for row in everyone for digest, *_ in row}
    table = [(row, digest[:12]) for row, (digest, *_) in zip(rows, everyone[0], strict=True)]
    assert len(digests) == 1, table
    assert swap_files(folder) == [], "close() removes the files"
    return digests.pop()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "accumulation", "clip"), kept(
    [
        (dtype, accumulation, clip) for clip in (0.0, CLIP)
        for dtype, accumulation in (("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2), ("fp16", 1))
    ],
    [("fp32", 2, 0.0), ("bf16", 1, CLIP), ("fp16", 1, CLIP)],
))  # fmt: skip
def test_nine_placements_give_one_result(rank_pools, tmp_path, dtype, accumulation, clip):
    row = {"dtype": dtype, "accumulation": accumulation, "clip": clip}
    rows = [{**row, "param": param, "optimizer": optimizer} for param, optimizer in PLACEMENTS]
    check_rows(rank_pools, tmp_path / "nvme", 1, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "accumulation"), kept([("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2)], [("bf16", 2)])
)
def test_two_ranks_give_one_result(rank_pools, tmp_path, dtype, accumulation):
    row = {"dtype": dtype, "accumulation": accumulation, "clip": CLIP}
    rows = [{**row, "param": param, "optimizer": optimizer} for param, optimizer in CORNERS]
    rows += [{**rows[2], **VARIANTS["gradients in the smallest pool"]}]
    sent = check_rows(rank_pools, tmp_path / "nvme", 2, rows)
    assert check_rows(rank_pools, tmp_path / "nvme", 2, rows[::2], reading) == sent


@pytest.mark.slow
@pytest.mark.parametrize(*covered(stage=[0, 1, 2], dtype=["fp32", "bf16"], world=[1, 2]))
def test_below_stage_3_the_tier_of_the_optimizer_does_not_matter(rank_pools, tmp_path, stage, dtype, world):
    row = {"stage": stage, "dtype": dtype, "accumulation": 2 if stage == 1 else 1, "clip": CLIP}
    rows = [{**row, "optimizer": tier} for tier in TIERS]
    check_rows(rank_pools, tmp_path / "nvme", world, [*rows, {**rows[2], **VARIANTS["gradients on NVMe"]}])


VARIANTS: dict[str, dict[str, Any]] = {
    "one I/O thread": {"aio": {"intra_op_parallelism": 1}},
    "four I/O threads": {"aio": {"intra_op_parallelism": 4}},
    "small blocks": {"aio": {"block_size": 4096, "queue_depth": 2, "intra_op_parallelism": 4}},
    "no overlap": {"overlap": False},
    "many sub-groups": {"zero": {"sub_group_size": 640}},
    "many sub-groups without overlap": {"zero": {"sub_group_size": 640}, "overlap": False},
    "nothing fetched ahead": {"zero": {"stage3_prefetch_bucket_size": 0}},
    "gradients on NVMe": {"zero": {"sub_group_size": 640, "offload_gradients": {"device": "nvme"}}},
    "half of the gradients on NVMe": {"zero": {"offload_gradients": {"device": "nvme", "ratio": 0.5}}},
    "gradients in the smallest pool": {"zero": {
        "sub_group_size": 640, "stage3_prefetch_bucket_size": 0, "offload_gradients": {"device": "nvme"}
    }},
    # Not below four times the largest block: that would cut other units, and the norm is summed by unit.
    "little kept": {"zero": {"stage3_max_live_parameters": 9000, "stage3_max_reuse_distance": 0}},
}
# Those that change when ranks exchange what.
OF_RANKS = ("no overlap", "many sub-groups", "little kept", "gradients on NVMe")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "world", "variants"),
    kept(
        [*itertools.product(("fp32", "bf16"), (1, 2), (tuple(VARIANTS),)), ("bf16", 2, OF_RANKS)],
        [("fp32", 1, tuple(VARIANTS)), ("bf16", 2, OF_RANKS)],
    ),
    ids=lambda given: len(given) if isinstance(given, tuple) else given,
)
def test_the_way_of_moving_does_not_matter(rank_pools, tmp_path, dtype, world, variants):
    row = {"dtype": dtype, "accumulation": 1, "clip": CLIP}
    rows = [{**row, "param": "gpu", "optimizer": "gpu"}]
    rows += [{**row, "param": "nvme", "optimizer": "nvme", **VARIANTS[name]} for name in variants]
    rows += [{**row, "param": "cpu", "optimizer": "cpu", **VARIANTS["many sub-groups"]}]
    check_rows(rank_pools, tmp_path / "nvme", world, rows)


def test_a_small_sub_group_size_cuts_units_into_slices(tmp_path):
    def look(engine: Any) -> None:
        slices = [piece.unit for group in engine.plan.sub_groups for piece in group.slices]
        assert len(engine.plan.sub_groups) > 10
        assert max(slices.count(unit) for unit in set(slices)) >= 3, "a unit lies in several sub-groups"
        assert states_on(engine, tmp_path) > len(engine.plan.sub_groups)

    options = {"param": "nvme", "optimizer": "nvme", **VARIANTS["many sub-groups"]}
    train(Case(), settings(tmp_path, **options), steps=1, look=look)


def digest_of(folder: str) -> str:
    """What the process of `test_optimised_python_gives_the_same_result` prints, in any mode of the interpreter."""
    options = {"param": "nvme", "optimizer": "nvme", "dtype": "bf16", "clip": CLIP, "accumulation": 2}
    return train(Case(), settings(folder, **options)).digest


@pytest.mark.matrix
@pytest.mark.slow
def test_optimised_python_gives_the_same_result(tmp_path):
    """No assert does work: with -O everything is as without."""
    code = f"import sys; from {__name__} import digest_of; print(digest_of(sys.argv[1]), __debug__)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-O", "-c", code, str(tmp_path)]
    reply = subprocess.run(command, env=environment, cwd=ROOT, timeout=100, check=True, capture_output=True, text=True)
    assert reply.stdout.split() == [digest_of(str(tmp_path)), "False"]


def test_the_digest_sees_a_single_bit(tmp_path):
    """The comparison above would notice one bit of a moment, or of a master weight below bf16's precision."""
    seen = []
    for what in ("", "master", "exp_avg", "exp_avg_sq"):
        case = Nudged(what)
        seen.append(train(case, settings(tmp_path, param="cpu", optimizer="cpu", dtype="bf16"), steps=2).digest)
    assert len(set(seen)) == 4


class Nudged(Case):
    """After the last step one value of one parameter's state is the next float."""

    def __init__(self, what: str) -> None:
        self._what = what

    def after_step(self, call, step, access):
        if step == 2 and self._what:
            param = access.params(call)["norm.weight"]
            value = access.get(param, self._what)
            value[3] = torch.nextafter(value[3], torch.tensor(1e3))
            access.set(param, self._what, value)
        return []


def test_the_reference_is_near(tmp_path):
    """One result may still be a wrong one: fp32 and bf16 stay near plain torch in fp32."""
    expected = reference(Case(), clip=CLIP)
    for dtype, bound in (("fp32", 1e-6), ("bf16", 5e-3), ("fp16", 5e-4)):
        options = {"param": "nvme", "optimizer": "nvme", "dtype": dtype, "clip": CLIP}
        result = train(Case(), settings(tmp_path, **options))
        assert difference(result, expected)[0] < bound, dtype
