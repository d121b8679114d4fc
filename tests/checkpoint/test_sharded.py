"""Checkpoints of any tensor and data axis, stage and tier load at any other, bit for bit."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from infinity.checkpoint.deepspeed.checkpoint import DeepSpeedSource, read_deepspeed
from infinity.checkpoint.extract import extract
from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import (
    Array,
    FileExtent,
    RankIndex,
    ShardRanges,
    TensorInfo,
    check_files,
    read_manifest,
    seal,
)
from infinity.checkpoint.inspect import compare_checkpoints, verify
from infinity.checkpoint.model_folder import Description, TensorSource
from infinity.checkpoint.pieces import holdings
from infinity.checkpoint.restore import Filling, fill_partitions
from infinity.checkpoint.weight_writer import WeightWriter
from infinity.engine import export
from infinity.errors import CheckpointError
from infinity.plan.shards import Replica, Shard
from infinity.plan.types import Key, Kind, Tier
from tests.checkpoint import reader, sharded
from tests.checkpoint.hostile import body_of
from tests.checkpoint.sharded import PARAMS, Axes, changed, plan_of, ranks_of, values_of
from tests.support.cells import cover, kept

DEEPSPEED = Path(__file__).parents[1] / "data" / "deepspeed_checkpoints"
CELLS = [
    Axes(tp, dp, stage, tier=Tier.NVME if (tp + dp + stage) % 2 else Tier.CPU)
    for tp, dp, stage in itertools.product((1, 2, 4), (1, 2), (1, 3))
]
ONE = CELLS[1]
ALIKE = pytest.mark.parametrize("axes", [CELLS[5], CELLS[11]], ids=lambda axes: axes.name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same values by the ranks of each cell."""
    folder = tmp_path_factory.mktemp("sharded")
    for axes in CELLS:
        with ranks_of(axes, folder / "swap") as ranks:
            for rank in ranks:
                rank.fill(values_of(0))
            sharded.save(ranks, folder / axes.name)
    return folder


def test_the_plans_have_what_makes_it_hard() -> None:
    """Units of shards and of replicas stepped together, tiles of a shard, several blocks along a dimension."""
    plan = plan_of(CELLS[-1])
    replicas = [{plan.layouts[piece.unit].replica for piece in group.slices} for group in plan.sub_groups]
    assert any(len(each) > 1 for each in replicas)
    slots = [slot for layout in plan.layouts for slot in layout.slots]
    assert any(slot.is_tile and slot.shard is not None for slot in slots)
    assert any(len(slot.shard.blocks) > 1 for slot in slots if slot.shard is not None)


@pytest.mark.parametrize("axes", kept(CELLS, cover(CELLS, lambda axes: (axes.tp, axes.dp, axes.stage))))
def test_what_any_axes_saved_is_loaded_to_the_bit(axes: Axes, saved: Path, tmp_path: Path) -> None:
    with ranks_of(axes, tmp_path / "swap") as ranks:
        at = CELLS.index(axes)
        # Another tensor axis and stage, another stage (and for one half another data axis), another tensor axis.
        for other in (CELLS[at - 5], CELLS[at - 1], CELLS[at - 8]):
            for rank in ranks:
                rank.fill(values_of(1))
                with pytest.raises(AssertionError):
                    rank.check(values_of(0))
                sharded.load(rank, saved / other.name)
                assert rank.check(values_of(0)) > 1000


@pytest.mark.parametrize("dtypes", [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16")], ids="-".join)
def test_another_precision_and_weights_alone_are_loaded_at_other_axes(dtypes: tuple[str, str], tmp_path: Path) -> None:
    values = values_of(0)
    if "fp16" in dtypes:
        # What is not trained has values that all of these dtypes have.
        values = {key: each if PARAMS[key[0]][-1] else np.round(each * 4) / 4 for key, each in values.items()}
    with ranks_of(Axes(2, 2, dtype=dtypes[0]), tmp_path / "swap") as ranks:
        for rank in ranks:
            rank.fill(values)
        sharded.save(ranks, tmp_path / "saved")
    other = values_of(1)
    kept = {key: (values if key[1] == "master" else other)[key] for key in values}
    with ranks_of(Axes(4, 1, dtype=dtypes[1]), tmp_path / "swap") as ranks:
        for rank in ranks:
            rank.fill(other)
            sharded.load(rank, tmp_path / "saved", moments=False)
            assert rank.check(kept)
            sharded.load(rank, tmp_path / "saved")
            assert rank.check(values)


class Whole:
    """A source of whole tensors, as a folder of weights is one, or DeepSpeed's checkpoint."""

    def __init__(self) -> None:
        self.tensors = {name: TensorInfo(shape, "fp32", False, ("param",)) for name, (shape, *_) in PARAMS.items()}
        self.largest = 0

    def masters(self, name: str, start: int, numel: int) -> Tensor:
        self.largest = max(self.largest, numel)
        return torch.from_numpy(values_of(0)[name, "master"].reshape(-1)[start : start + numel])

    def read(self, name: str, kind: str, start: int, numel: int, out: Tensor) -> None:
        out.view(torch.float32).copy_(self.masters(name, start, numel))

    def read_shard(self, *_: Any) -> bool:
        return False

    def extent_of(self, piece: Any) -> None:
        return None

    def read_bytes(self, *_: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_source_of_whole_tensors_fills_shards(dtype: str, tmp_path: Path) -> None:
    values = values_of(0)
    with ranks_of(Axes(2, 2, dtype=dtype), tmp_path / "swap") as ranks:
        for rank in ranks:
            rank.fill(values_of(1))
            sharded.load(rank, tmp_path, source=Whole(), moments=False)
            assert rank.check(values, moments=False)


@pytest.mark.parametrize("cell", ["zero2-fp16", "zero3-bf16", "zero3-bf16-universal"])
def test_deepspeeds_checkpoints_fill_shards(cell: str, tmp_path: Path) -> None:
    folder = DEEPSPEED / cell / "global_step4"
    source = DeepSpeedSource(read_deepspeed(folder).layout)
    params: sharded.Params = {}
    values: dict[tuple[str, str], np.ndarray] = {}
    for name, info in source.tensors.items():
        if "buffer" in info.kinds:
            continue
        dim = next((at for at, size in enumerate(info.shape) if size % 2 == 0 and at == len(params) % 2), None)
        params[f"model.{name}"] = (
            info.shape, dim, None, Replica.SAME if dim is None else Replica.NONE, info.trainable
        )
        for kind in ("master", *(sharded.MOMENTS if info.trainable else ())):
            flat = torch.empty(info.numel)
            if kind == "master":
                flat.copy_(source.masters(name, 0, info.numel))
            else:
                source.read(name, kind, 0, info.numel, flat)
            values[f"model.{name}", kind] = flat.view(info.shape).numpy()
    assert any(case[1] == 1 for case in params.values())
    with ranks_of(Axes(2, 2, dtype="fp32"), tmp_path / "swap", params) as ranks:
        for rank in ranks:
            filling = Filling(
                rank.plan, rank.index, {name: name.removeprefix("model.") for name in params}, True, 0.0, rank.tensor
            )
            fill_partitions(filling, rank.store, source)
        compared = sum(rank.check(values) for rank in ranks)
    copies = {name: 2 if dim is None else 1 for name, (_, dim, *_) in params.items()}
    assert compared == sum(copies[name] * each.size for (name, _), each in values.items())


def test_equal_axes_copy_whole_extents_and_equal_shards_are_read_in_their_own_order(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = {name for name, (_, dim, *_) in PARAMS.items() if dim is not None}
    read = ExtentReader.read

    def watched(self: ExtentReader, tensor: str, *args: Any) -> None:
        assert tensor not in cut
        read(self, tensor, *args)

    monkeypatch.setattr(ExtentReader, "read", watched)
    count = 0
    read_bytes = ExtentReader.read_bytes

    def counted(self: ExtentReader, extent: FileExtent, begin: int, target: Tensor) -> None:
        nonlocal count
        count += 1
        read_bytes(self, extent, begin, target)

    monkeypatch.setattr(ExtentReader, "read_bytes", counted)
    same = Axes(4, 2, 3, tier=CELLS[11].tier)
    assert same == CELLS[11]
    with ranks_of(same, tmp_path / "swap") as ranks:
        sharded.load(ranks[4], saved / CELLS[11].name)
        assert ranks[4].check(values_of(0))
        wanted = sum(bool(piece.arrays) for piece in holdings(ranks[4].plan, ranks[4].index, ranks[4].tensor))
        assert count == wanted > 5, "one read for a partition"
        # The same tensor axis, and another data axis.
        for rank in ranks[:2]:
            sharded.load(rank, saved / CELLS[9].name)
            assert rank.check(values_of(0))


@ALIKE
def test_a_checkpoint_of_shards_is_whole_and_equal_to_one_ranks(axes: Axes, saved: Path, tmp_path: Path) -> None:
    one, folder = read_manifest(saved / ONE.name), saved / axes.name
    manifest = read_manifest(folder)
    assert manifest.axes == (1, axes.dp, axes.tp) and len(manifest.ranks) == axes.dp * axes.tp
    assert not list(verify(folder, manifest))
    found = compare_checkpoints((saved / ONE.name, one), (folder, manifest))
    assert found.same and found.compared["weight"] == len(PARAMS)
    extracted = []
    for at, each in ((saved / ONE.name, one), (folder, manifest)):
        for dtype in ("fp32", "bf16"):
            target = extract(at, each, tmp_path / f"{at.name}-{dtype}", dtype=dtype, nbytes_max=9000)
            extracted.append({path.name: path.read_bytes() for path in sorted(target.iterdir())})
    assert extracted[:2] == extracted[2:] and len(extracted[0]) > 2


@ALIKE
def test_an_independent_reader_reads_shards(axes: Axes, saved: Path) -> None:
    manifest = reader.metadata(saved / axes.name / "manifest.json")
    values = values_of(0)
    for name in ("embed.weight", "embed.scale", "blocks.1.packed.weight", "blocks.0.experts.gate_up", "head.weight"):
        assert np.array_equal(reader.master(saved / axes.name, name), values[name, "master"])
        moment = reader.read(saved / axes.name, manifest, name, "exp_avg_sq")
        assert np.array_equal(moment, values[name, "exp_avg_sq"].reshape(-1))


def runtime_of(rank: sharded.Rank) -> Any:
    """What an export asks of a runtime."""
    plan, axes = rank.plan, rank.plan.topology
    units = [
        SimpleNamespace(
            layout=layout, placed=placed, key=Key(Kind.PARAM, layout.index),
            rank_in_parts=rank.index if placed.parts > 1 else 0,
        )
        for layout, placed in zip(plan.layouts, plan.placement.units, strict=True)
    ]  # fmt: skip
    groups = SimpleNamespace(
        data=SimpleNamespace(index=rank.index, size=axes.dp), ranks=SimpleNamespace(rank=rank.number),
        world=SimpleNamespace(size=axes.world_size), tensor=SimpleNamespace(index=rank.tensor),
    )  # fmt: skip
    access = SimpleNamespace(units=units)
    return SimpleNamespace(plan=plan, access=access, groups=groups, store=rank.store, module=nn.Module())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_ranks_of_any_axes_export_the_same_bytes(dtype: str, tmp_path: Path) -> None:
    sources = [TensorSource(name, "bf16", shape) for name, (shape, *_) in PARAMS.items()]
    shards = Description("Model").shards(sources, dtype, nbytes_max=9000)
    found = []
    for axes in (ONE, CELLS[4], CELLS[7], CELLS[11]):
        made = tmp_path / axes.name
        with ranks_of(axes, tmp_path / "swap") as ranks:
            WeightWriter(made, shards, create=True).close()
            for rank in ranks:
                rank.fill(values_of(0))
            written = [export._write(runtime_of(rank), shards, made) for rank in ranks]
        assert sum(written) == sum(entry.nbytes for shard in shards for entry, _ in shard.entries)
        found.append({path.name: path.read_bytes() for path in sorted(made.iterdir())})
    assert found[0] == found[1] == found[2] == found[3]


def lose(arrays: list[Array]) -> None:
    arrays.remove(next(array for array in arrays if array.shard is not None))


def take_whole(arrays: list[Array]) -> None:
    at = next(at for at, array in enumerate(arrays) if array.tensor == "embed.weight")
    arrays[at] = replace(arrays[at], shard=None)


def take_the_others(arrays: list[Array]) -> None:
    for at, array in enumerate(arrays):
        if array.tensor == "embed.weight":
            arrays[at] = replace(array, shard=ShardRanges(0, ((0, 12),)))


def take_another_dimension(arrays: list[Array]) -> None:
    for at, array in enumerate(arrays):
        if array.tensor == "embed.weight":
            arrays[at] = replace(array, shard=ShardRanges(1, ((0, 4),)))


@pytest.mark.parametrize("damage", [lose, take_whole, take_the_others, take_another_dimension])
def test_shards_that_do_not_make_up_the_tensor_are_refused(
    damage: Callable[[list[Array]], None], tmp_path: Path
) -> None:
    with ranks_of(Axes(2, 1), tmp_path / "swap") as ranks:
        for rank in ranks:
            rank.fill(values_of(0))
        manifest = sharded.save(ranks, tmp_path / "saved")
        assert not list(verify(tmp_path / "saved", manifest))
        index = manifest.index(tmp_path / "saved", 1)
        arrays = list(index.arrays)
        damage(arrays)
        manifest = changed(manifest, tmp_path / "saved", 1, replace(index, arrays=tuple(arrays)))
        assert any("not every element" in damage.what for damage in verify(tmp_path / "saved", manifest))
        found = check_files(tmp_path / "saved", manifest)
        with ExtentReader(tmp_path / "saved", manifest, found) as opened:
            with pytest.raises(CheckpointError, match="not all elements"):
                opened.check_covered(manifest.tensors)
            wrong = next(name for name, info in manifest.tensors.items() if not opened.covered(name, "param"))
            numel = manifest.tensors[wrong].numel
            with pytest.raises(CheckpointError, match="not all elements"):
                opened.read(wrong, "param", 0, numel, torch.empty(numel, dtype=torch.bfloat16))


def index_body() -> dict[str, Any]:
    extent = FileExtent("0123456789ab.rank-00000.weights.bin", 0, 4096, (0,))
    shards = ShardRanges(0, ((0, 2), (4, 6))), ShardRanges(1, ((0, 4),))
    arrays = (
        Array("w", "param", "fp32", 0, 8, 0, 0, shards[0]), Array("b", "param", "fp32", 0, 8, 0, 64),
        Array("v", "param", "fp32", 4, 8, 0, 128, shards[1]), Array("u", "param", "fp32", 0, 1, 0, 256, shards[0]),
    )
    return RankIndex(0, {extent.file: 4096}, (extent,), arrays).body()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body["shards"][0].__setitem__(0, -1), "shards.0.0"),
        (lambda body: body["shards"][0].__setitem__(0, 64), "shards.0.0"),
        (lambda body: body["shards"][0].__setitem__(0, True), "shards.0.0"),
        (lambda body: body["shards"][0].__setitem__(1, []), "shards.0.1"),
        (lambda body: body["shards"][0].__setitem__(1, [[2 * at, 2 * at + 1] for at in range(65)]), "shards.0.1"),
        (lambda body: body["shards"][0].__setitem__(1, [[0, 2], [1, 3]]), "shard 0 has 1 to 3 of dimension 0"),
        (lambda body: body["shards"][0].__setitem__(1, [[4, 6], [0, 2]]), "shard 0 has 0 to 2"),
        (lambda body: body["shards"][0].__setitem__(1, [[2, 2]]), "shard 0 has 2 to 2"),
        (lambda body: body["shards"][0].__setitem__(1, [[0, 2**63]]), "shards.0.1"),
        (lambda body: body["shards"].pop(), "'?v'? is of shard 1 of 1"),
        (lambda body: body["arrays"][0].__setitem__(7, -1), "arrays.0.7"),
        (lambda body: body["arrays"][0].__setitem__(7, "0"), "arrays.0.7"),
        (lambda body: body["arrays"][0].append(0), "arrays.0"),
    ],
)
def test_an_index_with_a_wrong_shard_is_refused(change: Callable[[Any], None], message: str) -> None:
    body = json.loads(json.dumps(index_body()))
    read = partial(RankIndex.from_bytes, path="here")
    assert read(seal(body)).body() == body
    change(body)
    with pytest.raises(CheckpointError, match=message):
        read(seal(body))


@pytest.mark.parametrize(
    ("shape", "shard", "start", "message"),
    [
        ((6, 4), ShardRanges(2, ((0, 2),)), 0, "up to 2 of dimension 2, which has the shape"),
        ((6, 4), ShardRanges(0, ((0, 2), (5, 7))), 0, "up to 7 of dimension 0"),
        ((6, 4), ShardRanges(1, ((0, 2),)), 5, "up to 13 of a shard of head.weight, which has 12"),
        ((), ShardRanges(0, ((0, 1),)), 0, "up to 1 of dimension 0"),
    ],
)
def test_an_array_outside_of_its_shard_or_tensor_is_refused(
    shape: tuple[int, ...], shard: ShardRanges, start: int, message: str, tmp_path: Path
) -> None:
    with ranks_of(Axes(1, 1, dtype="fp32"), tmp_path / "swap") as ranks:
        manifest = sharded.save(ranks, tmp_path / "saved")
    extent = FileExtent("0123456789ab.rank-00000.weights.bin", 0, 4096, (0,))
    index = RankIndex(
        0, {extent.file: 4096}, (extent,), (Array("head.weight", "param", "fp32", start, 8, 0, 0, shard),)
    )
    manifest = changed(manifest, tmp_path / "saved", 0, index)
    manifest = replace(manifest, tensors={"head.weight": TensorInfo(shape, "fp32", True, ("param",))})
    with pytest.raises(CheckpointError, match=message):
        manifest.index(tmp_path / "saved", 0)


def test_a_version_without_shards_is_read_and_the_axes_must_agree_with_the_ranks(saved: Path) -> None:
    body = body_of(saved / ONE.name / "manifest.json")
    assert body["version"] == 2
    for key in ("dp", "tp"):
        del body["plan"][key]
    assert type(read_manifest(saved / ONE.name)).of({**body, "version": 1}).axes == (1, 1, 1)
    for wrong in ({"dp": 3}, {"tp": 2, "dp": 1}, {"tp": 0}, {"pp": 2, "dp": 1}, {"pp": 0}):
        with pytest.raises(ValueError, match=r"ranks are not|plan.[tp]p"):
            type(read_manifest(saved / ONE.name)).of({**body, "plan": {**body["plan"], **wrong}})
    index = next((saved / ONE.name).glob("*.rank-00000.json"))
    rows = body_of(index)
    del rows["shards"]
    rows["arrays"] = [row[:7] for row in rows["arrays"]]
    assert RankIndex.of(rows) == RankIndex.read(index)


@st.composite
def covers(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int, ShardRanges | None]]]:
    """A shape, and (start, numel, shard) of arrays: a right division, of which some are changed."""
    parts = draw(st.sampled_from([1, 2, 4]))
    shape = (draw(st.integers(1, 2)) * 4, draw(st.integers(1, 2)) * 4)
    dim = draw(st.integers(0, 1))
    shard = Shard(dim, draw(st.sampled_from([(shape[dim],), (4, shape[dim] - 4)])), parts)
    arrays: list[tuple[int, int, ShardRanges | None]] = []
    for index in range(parts):
        cut = ShardRanges(dim, tuple(each for each in shard.ranges(index) if each[0] < each[1])) if parts > 1 else None
        numel = math.prod(shape) if cut is None else cut.numel(shape)
        at = draw(st.integers(1, numel))
        arrays += [(start, end - start, cut) for start, end in ((0, at), (at, numel)) if start < end]
    for _ in range(draw(st.integers(0, 2))):
        start, numel, cut = arrays.pop(draw(st.integers(0, len(arrays) - 1)))
        others = [each for *_, each in arrays] + [None, ShardRanges(0, ((0, 2),)), ShardRanges(1, ((0, 1), (3, 4)))]
        cut = draw(st.sampled_from([*others, cut]))
        room = math.prod(shape) if cut is None else cut.numel(shape)
        start = min(start, room - 1)
        arrays.append((start, min(numel, room - start), cut))
    return shape, arrays


@settings(max_examples=500, deadline=None)
@given(covers())
@example(((10,), [(0, 5, None), (0, 5, None)]))
@example(((10,), [(0, 4, None), (5, 6, None)]))
def test_elements_are_covered_only_if_each_is_there_once(case) -> None:
    shape, arrays = case
    counts = np.zeros(math.prod(shape), dtype=int)
    for start, numel, cut in arrays:
        places = np.arange(counts.size) if cut is None else reader.shard_places(shape, cut.dim, cut.ranges)
        counts[places[start : start + numel]] += 1
    extent = FileExtent("0123456789ab.rank-00000.weights.bin", 0, 4096, (0,))
    rows = tuple(Array("w", "param", "fp32", start, numel, 0, 0, cut) for start, numel, cut in arrays)
    manifest: Any = SimpleNamespace(tensors={"w": TensorInfo(shape, "fp32", True, ("param",))})
    with ExtentReader(Path(), manifest, [RankIndex(0, {extent.file: 4096}, (extent,), rows)]) as opened:
        covered = opened.covered("w", "param")
    assert not covered or (counts == 1).all()
    # Of what a save writes, both hold: shards of one dimension that are equal or apart.
    cuts = {cut for *_, cut in arrays}
    apart = len(cuts) == 1 or (None not in cuts and len({cut.dim for cut in cuts}) == 1)
    ranges = sorted(each for cut in cuts if cut is not None for each in cut.ranges)
    apart = apart and all(one[1] <= two[0] for one, two in itertools.pairwise(ranges))
    assert covered or not apart or (counts != 1).any()
