"""Ranks of a data and a tensor axis in one process: plans of a small divided model, their partitions, and checkpoints.

`fill` and `check` go by numpy and the plan's slots alone, not by what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import (
    FileInfo,
    Manifest,
    RankIndex,
    TensorInfo,
    check_files,
    read_manifest,
    replace_file,
)
from infinity.checkpoint.model_folder import Description
from infinity.checkpoint.pieces import shares, tensor_kinds
from infinity.checkpoint.restore import CheckpointSource, Filling, ValueSource, fill_partitions
from infinity.checkpoint.save import Capture, LiveSource, write
from infinity.memory.ledger import Ledger
from infinity.memory.shard_copy import load_masters, store_masters
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.nvme import NvmeTier
from infinity.memory.tiers.pinned import HostMemory
from infinity.ops.aio import Queue
from infinity.ops.crc32c import checksum
from infinity.plan.layout import Slot, states_of
from infinity.plan.plan import Plan, make_plan
from infinity.plan.request import PlanRequest
from infinity.plan.shards import Replica, Shard
from infinity.plan.spec import ModuleNode, ParamSpec, UnitRules, find_units
from infinity.plan.tensor_axis import TensorAxis
from infinity.plan.types import Key, Kind, Tier, Topology

MOMENTS = ("exp_avg", "exp_avg_sq")
Params = dict[str, tuple[tuple[int, ...], int | None, tuple[int, ...] | None, Replica, bool]]
# name: shape, dimension that is cut (None: replicated), blocks along it (None: one), replica, trained.
PARAMS: Params = {
    "embed.weight": ((24, 8), 0, None, Replica.NONE, True),
    "embed.scale": ((8,), None, None, Replica.SAME, True),
    **{
        f"blocks.{at}.{name}": case
        for at in range(2)
        for name, case in {
            "q.weight": ((16, 8), 0, None, Replica.NONE, True),
            "q.norm": ((5,), None, None, Replica.PARTIAL, True),
            "o.weight": ((8, 16), 1, None, Replica.NONE, True),
            "o.bias": ((8,), None, None, Replica.SAME, True),
            "packed.weight": ((24, 8), 0, (8, 12, 4), Replica.NONE, True),
            "experts.gate_up": ((3, 24, 8), 1, (12, 12), Replica.NONE, True),
            "experts.down": ((3, 8, 12), 2, None, Replica.NONE, at == 0),
            "frozen.weight": ((7, 8), 1, None, Replica.NONE, False),
            "frozen.bias": ((7,), None, None, Replica.SAME, False),
        }.items()
    },
    "head.weight": ((64, 32), 0, None, Replica.NONE, True),
}


@dataclass(frozen=True, slots=True)
class Axes:
    """How a run is cut, and where it lies."""

    tp: int = 1
    dp: int = 1
    stage: int = 3
    dtype: str = "bf16"
    tier: Tier = Tier.CPU

    @property
    def name(self) -> str:
        return f"tp{self.tp}-dp{self.dp}-stage{self.stage}-{self.dtype}-{self.tier.value}"


def plan_of(axes: Axes, params: Params = PARAMS) -> Plan:
    """The model's plan, with a weight in tiles."""
    root = ModuleNode("", "Model")
    for name, (shape, _, _, _, trained) in params.items():
        *path, attribute = name.split(".")
        node = root
        for depth, part in enumerate(path):
            kinds = {"blocks": "ModuleList", "head": "Linear"}
            kind = kinds.get(part, "Block" if part.isdigit() else "Part")
            node = node.children.setdefault(part, ModuleNode(".".join(path[: depth + 1]), kind))
        node.params[attribute] = ParamSpec(name, shape, axes.dtype, group=0 if trained else -1)
    cut = {
        name: (None if dim is None else Shard(dim, blocks or (shape[dim],), axes.tp), replica)
        for name, (shape, dim, blocks, replica, _) in params.items()
    }
    rules = UnitRules(unit_numel_max=800, merge_numel_max=64, whole_numel_max=500, tile_numel_max=300)
    spec = find_units(TensorAxis(axes.tp, cut).divide(root), rules)
    param = axes.tier if axes.stage == 3 else Tier.CPU
    request = PlanRequest(
        stage=axes.stage, param_tier=param, optimizer_tier=axes.tier, compute_dtype=axes.dtype, sub_group_numel=700,
        persistence_numel=0, prefetch_numel=1000, live_numel=3000, reuse_numel=1000,
    )  # fmt: skip
    return make_plan(spec, Topology(dp=axes.dp, tp=axes.tp), request)


@cache
def values_of(seed: int) -> dict[tuple[str, str], np.ndarray]:
    """fp32 masters ("master") and moments by (tensor, kind); what is not trained has values of bf16."""
    chance = torch.Generator().manual_seed(seed)
    found: dict[tuple[str, str], np.ndarray] = {}
    for name, (shape, *_, trained) in PARAMS.items():
        for kind in ("master", *(MOMENTS if trained else ())):
            values = torch.randn(shape, generator=chance)
            if not trained:
                values = values.bfloat16().float()
            found[name, kind] = values.numpy()
    return found


def held(slot: Slot, whole: np.ndarray, tensor: int) -> Tensor:
    """What a rank has of a slot, by numpy."""
    if slot.shard is not None:
        size = slot.shard.size // slot.shard.parts
        parts = np.split(whole, np.cumsum(slot.shard.blocks)[:-1], axis=slot.shard.dim)
        mine = [np.split(part, slot.shard.parts, axis=slot.shard.dim)[tensor] for part in parts]
        whole = np.concatenate(mine, axis=slot.shard.dim)
        assert whole.shape[slot.shard.dim] == size
    assert whole.shape == slot.shape
    return torch.from_numpy(whole.reshape(-1)[slot.start : slot.start + slot.numel].copy())


@dataclass
class Rank:
    """One rank's partitions."""

    plan: Plan
    index: int
    tensor: int
    store: TieredStore

    @property
    def number(self) -> int:
        return self.index * self.plan.topology.tp + self.tensor

    def flat(self, unit: int, kind: str, values: Mapping[tuple[str, str], np.ndarray]) -> Tensor:
        """The rank's partition of a unit's values of one kind; nan where nothing lies."""
        layout, parts = self.plan.layouts[unit], self.plan.placement.units[unit].parts
        flat = torch.full((layout.numel,), math.nan)
        for slot in layout.slots:
            flat[slot.offset : slot.offset + slot.numel] = held(slot, values[slot.name, kind], self.tensor)
        return flat[layout.partition_start(parts, self.index) :][: layout.partition_numel(parts)]

    def fill(self, values: Mapping[tuple[str, str], np.ndarray]) -> None:
        """Give all partitions these values."""
        for param, states, begin, numel, at, unit in self._places():
            masters = self.flat(unit, "master", values)[begin : begin + numel].nan_to_num()
            with self.store.write(param) as (own,), self.store.write(*states) as others:
                view = own.view(Kind.PARAM)[begin : begin + numel]
                if not others:
                    view.copy_(masters)
                    continue
                store_masters(masters, view, others[0], at)
                for kind in MOMENTS:
                    target = others[0].view(Kind(kind))[at : at + numel]
                    target.copy_(self.flat(unit, kind, values)[begin : begin + numel].nan_to_num())
        self.store.flush(*(spec.key for spec in self.plan.partitions if spec.key.kind is not Kind.GRAD))
        self.store.settle()

    def check(self, values: Mapping[tuple[str, str], np.ndarray], *, moments: bool = True) -> int:
        """Compare all partitions with these values, bit for bit; return the elements that were compared."""
        count = 0
        for param, states, begin, numel, at, unit in self._places():
            with self.store.read(param, *states) as (own, *others):
                found = {"master": load_masters(own.view(Kind.PARAM)[begin : begin + numel], *(others or [None]), at)}
                for kind in MOMENTS if others and moments else ():
                    found[kind] = others[0].view(Kind(kind))[at : at + numel].clone()
            for kind, each in found.items():
                wanted = self.flat(unit, kind, values)[begin : begin + numel]
                lies = ~wanted.isnan()
                assert torch.equal(each[lies], wanted[lies]), (self.plan.layouts[unit].name, kind, self.index, param)
                count += int(lies.sum())
        return count

    def _places(self) -> Iterator[tuple[Key, list[Key], int, int, int, int]]:
        for layout in self.plan.layouts:
            param = Key(Kind.PARAM, layout.index)
            if not layout.trainable:
                numel = layout.partition_numel(self.plan.placement.units[layout.index].parts)
                yield param, [], 0, numel, 0, layout.index
            for key, piece, at in states_of(self.plan.sub_groups, layout.index):
                yield param, [key], piece.start, piece.numel, at, layout.index


@contextmanager
def ranks_of(axes: Axes, folder: Path, params: Params = PARAMS) -> Iterator[list[Rank]]:
    """All ranks of a run, in the order of the world."""
    plan = plan_of(axes, params)
    assert all(layout.replica is Replica.NONE or axes.tp > 1 for layout in plan.layouts)
    with ExitStack() as stack:
        ranks = []
        for number in range(axes.dp * axes.tp):
            at = plan.topology.coordinate(number)
            backends = {}
            if nbytes := plan.file_nbytes(Tier.NVME):
                folder.mkdir(exist_ok=True)
                backends[Tier.NVME] = NvmeTier(folder, nbytes=nbytes, rank=number, queue=Queue(threads=1))
            ledger, device = Ledger(), Device(torch.device("cpu"))
            store = TieredStore(
                plan.partitions, device=device, host=HostMemory(device, pin=False, ledger=ledger), ledger=ledger,
                backends=backends, pools=plan.pools, rank=number, overlap=False,
            )  # fmt: skip
            stack.callback(store.close)
            ranks.append(Rank(plan, at.dp, at.tp, store))
        yield ranks


def save(ranks: list[Rank], folder: Path, *, identity: str = "0123456789ab") -> Manifest:
    """Write a checkpoint of all ranks."""
    folder.mkdir(parents=True)
    plan = ranks[0].plan
    infos: list[FileInfo] = []
    with Queue(threads=1) as queue:
        for rank in ranks:
            pieces = tuple(shares(plan, rank.index, rank.tensor))
            infos.append(write(Capture(rank.number, pieces), LiveSource(rank.store), folder, identity, queue))
    kinds = tensor_kinds(plan)
    tensors = {
        slot.name: TensorInfo(slot.whole_shape, layout.dtype, layout.trainable, kinds[slot.name])
        for layout in plan.layouts
        for slot in layout.slots
    }
    engine: dict[str, Any] = {
        "counters": {"global_steps": 1, "micro_steps": 0, "global_samples": 0, "skipped_steps": 0},
        "precision": None, "scheduler": None, "optimizer": {"kind": "", "groups": [], "steps": {}}, "loader": None,
    }  # fmt: skip
    manifest = Manifest(
        id=identity, tag=folder.name, number=1, time="", tied={},
        versions={"infinity": "", "torch": "", "python": ""},
        plan={
            "fingerprint": plan.fingerprint(), "stage": plan.request.stage, "world_size": plan.topology.world_size,
            "dp": plan.topology.dp, "tp": plan.topology.tp, "compute_dtype": plan.request.compute_dtype,
        },
        # By name: units have another order where another axis cuts them.
        tensors=dict(sorted(tensors.items())), ranks=tuple(infos), engine=engine, client_state={}, client=None,
        module={"class": "Model", "export": Description("Model").to_json()},
    )  # fmt: skip
    replace_file(folder / "manifest.json", manifest.to_bytes())
    return read_manifest(folder)


def load(rank: Rank, folder: Path, *, moments: bool = True, source: ValueSource | None = None) -> None:
    """Fill a rank's partitions from a checkpoint, or from another source."""
    names: dict[str, str | None] = {slot.name: slot.name for layout in rank.plan.layouts for slot in layout.slots}
    filling = Filling(rank.plan, rank.index, names, moments, 0.0, rank.tensor)
    if source is not None:
        fill_partitions(filling, rank.store, source)
        return
    manifest = read_manifest(folder)
    with Queue(threads=1) as queue, ExtentReader(folder, manifest, check_files(folder, manifest), queue) as reader:
        reader.check_covered(manifest.tensors)
        fill_partitions(filling, rank.store, CheckpointSource(reader))


def changed(manifest: Manifest, folder: Path, rank: int, body: RankIndex) -> Manifest:
    """The manifest of a checkpoint of which one rank has another index."""
    data = body.to_bytes()
    replace_file(folder / manifest.ranks[rank].name, data)
    info = FileInfo(manifest.ranks[rank].name, len(data), checksum(data))
    return replace(manifest, ranks=(*manifest.ranks[:rank], info, *manifest.ranks[rank + 1 :]))
