"""Values of a model that a tensor axis cuts: shards in every partition, and whole tensors out of them, bit for bit."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import infinity
from infinity.checkpoint.weight_files import WeightFolder
from infinity.engine.model_init import open_init
from infinity.engine.runtime import Runtime
from infinity.errors import StateError
from infinity.plan.shards import Replica
from infinity.plan.tensor_axis import TensorAxis
from infinity.zero import deferred_init
from infinity.zero.access import full_state_dict
from tests.support.shards import Cut, axis_of, engine_of, shard_of, sharded_runtime

TENSOR = 2
CUTS: dict[str, Cut] = {
    "words.weight": (0, None), "up.weight": (0, None), "up.bias": (0, None), "down.weight": (1, None),
    "packed.weight": (0, (16, 8, 8)), "experts.gate_up": (1, (8, 8)), "experts.down": (2, None),
    "fixed.weight": (1, None), "query_norm.weight": Replica.PARTIAL,
}  # fmt: skip


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 16, 12))
        self.down = nn.Parameter(torch.randn(3, 12, 8))


class Mixed(nn.Module):
    """A parameter of every way to be cut, two that are tied, one that is frozen, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(26, 12)
        self.up = nn.Linear(12, 22)
        self.down = nn.Linear(22, 12)
        self.packed = nn.Linear(12, 32, bias=False)
        self.experts = Experts()
        self.query_norm = nn.LayerNorm(7, bias=False)
        self.norm = nn.LayerNorm(12)
        self.fixed = nn.Linear(14, 9).requires_grad_(False)
        self.factor = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(12, 26, bias=False)
        self.head.weight = self.words.weight


def build(seed: int) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


@dataclass(frozen=True)
class Cell:
    """One way to run the model. source: what the model comes in as; tiles: elements of a weight's tiles, 0 for none."""

    stage: int
    tier: str
    dtype: str
    source: str = "ordinary"
    tiles: int = 0

    def config(self, folder: str) -> dict[str, Any]:
        home = {"device": self.tier, "nvme_path": folder}
        zero: dict[str, Any] = {"stage": self.stage}
        if self.tier != "none":
            zero["offload_optimizer"] = home
        if self.stage == 3:
            zero |= {"offload_param": home, "tile_parameters": self.tiles, "stage3_param_persistence_threshold": 20}
        precision = {} if self.dtype == "fp32" else {self.dtype: {"enabled": True}}
        return {
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **precision,
            "optimizer": {"type": "AdamW", "params": {}}, "parallel": {"tensor": TENSOR},
        }  # fmt: skip


# By the number of ranks: two have a shard each, four a partition of one.
CELLS = {
    2: [
        Cell(0, "none", "fp32"), Cell(2, "cpu", "bf16", "files"), Cell(2, "nvme", "fp16", "init"),
        Cell(3, "cpu", "fp32", "slices"), Cell(3, "nvme", "bf16", "files", tiles=60),
    ],
    4: [
        Cell(0, "none", "fp32"), Cell(1, "none", "bf16"), Cell(3, "none", "bf16", "slices"),
        Cell(3, "nvme", "bf16", "slices", tiles=60), Cell(3, "nvme", "fp16", "files"),
    ],
}  # fmt: skip


def incoming(cell: Cell, settings: dict[str, Any], rank: int, folder: Path) -> Mixed:
    """The model as a program passes it. Only rank 0's values count, where they are not in files."""
    if cell.source == "ordinary":
        return build(rank)
    if cell.source == "files":
        model, init = build(5), open_init(settings)
        weights = WeightFolder(folder)
        init.resources.callback(weights.close)
        for name, param in model.named_parameters():
            init.attach(param, name, weights.tensors[name])
        return model
    with infinity.Init(config=settings):
        model = build(rank)
    if cell.source == "slices":
        with infinity.modify(model):
            pass
    return model


def visit(rank: int, world: int, cells: list[Cell], folder: str) -> int:
    compared = 0
    for number, cell in enumerate(cells):
        # Small windows: parameters leave memory, and ranks keep slices of them.
        with mock.patch.multiple(deferred_init, WINDOW_NBYTES=2048, _SMALL_NBYTES=64):
            model = incoming(cell, settings := cell.config(f"{folder}/{number}"), rank, Path(folder))
            axis = axis_of(model, CUTS, TENSOR)
            with sharded_runtime(model, axis, settings) as runtime:
                assert any(layout.is_tile for layout in runtime.plan.layouts) == bool(cell.tiles)
                compared += Visit(runtime, axis, cell).run()
                runtime.store.check()
    return compared


class Visit:
    """Every look at the values of one model, on one rank; `compared` counts what was compared."""

    def __init__(self, runtime: Runtime, axis: TensorAxis, cell: Cell) -> None:
        self.runtime, self.axis, self.cell = runtime, axis, cell
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[cell.dtype]
        self.data, self.tensor = runtime.groups.data, runtime.groups.tensor
        self.params = dict(runtime.module.named_parameters())
        self.wholes = {name: param.detach() for name, param in build(0).named_parameters()}
        self.generator = torch.Generator().manual_seed(1)
        self.compared = 0

    def run(self) -> int:
        for name, param in self.params.items():
            # Before anything is gathered.
            assert param.shape == self.own(self.wholes[name], name).shape, name
        self.masters()
        self.moments()
        self.gradients()
        self.state_dicts()
        self.changes()
        return self.compared

    def equal(self, ours: Tensor, theirs: Tensor, what: str) -> None:
        assert ours.shape == theirs.shape, f"{what}: {ours.shape} and {theirs.shape}"
        assert torch.equal(ours, theirs), f"{self.cell}: {what}: {(ours != theirs).sum()} of {theirs.numel()} differ"
        self.compared += 1

    def own(self, whole: Tensor, name: str, index: int | None = None) -> Tensor:
        return shard_of(whole, self.axis.params[name][0], self.tensor.index if index is None else index)

    def random(self, name: str) -> Tensor:
        return torch.randint(-8, 9, self.wholes[name].shape, generator=self.generator).float()

    def masters(self) -> None:
        for name, param in self.params.items():
            state, whole = infinity.state(param), self.wholes[name]
            # What is not trained has no master but its own value.
            self.equal(state.master, whole if state.trainable else whole.to(self.dtype).float(), name)
            with infinity.read(param):
                self.equal(param.detach(), self.own(whole, name).to(self.dtype), name)
        for name, param in self.params.items():
            value = self.wholes[name] * 3
            infinity.state(param).master = value
            # A frozen parameter keeps what its dtype has of it.
            self.wholes[name] = value if infinity.state(param).trainable else value.to(self.dtype).float()
            self.equal(infinity.state(param).master, self.wholes[name], name)
            with infinity.read(param):
                self.equal(param.detach(), self.own(self.wholes[name], name).to(self.dtype), name)

    def moments(self) -> None:
        for name, param in self.params.items():
            if not (state := infinity.state(param)).trainable:
                continue
            self.equal(state.exp_avg_sq, torch.zeros_like(self.wholes[name]), name)
            value = self.random(name)
            state.exp_avg = value
            self.equal(state.exp_avg, value, name)
            # What a rank has are its own elements: once each is doubled, all are.
            state.set_local("exp_avg", state.local("exp_avg") * 2)
            self.equal(state.exp_avg, value * 2, name)

    def gradients(self) -> None:
        """Gradients are averaged over the data axis alone."""
        gradients, sent = self.runtime.gradients, {}
        gradients.begin_micro_step(last=False)
        gradients.begin_backward(scaled=True)
        for unit in self.runtime.access.units:
            for param, slot in zip(unit.params, unit.layout.slots, strict=True):
                if not unit.layout.trainable or unit.layout.replica is Replica.PARTIAL:
                    continue
                whole = sent.setdefault(slot.name, self.random(slot.name))
                mine = self.own(whole, slot.name).reshape(-1)[slot.start : slot.start + slot.numel]
                param.grad = mine.view(slot.own_shape).to(self.dtype) + 2 * self.data.index
        gradients.end_backward()
        for name, whole in sent.items():
            state = infinity.state(self.params[name])
            mean = (whole + (self.data.size - 1)) / self.runtime.step.loss_scale
            self.equal(state.grad, mean, f"gradient of {name}")
            state.grad = mean * 2
            self.equal(state.grad, mean * 2, f"gradient of {name}")
        gradients.reset()

    def state_dicts(self) -> None:
        first = self.runtime.groups.world.index == 0
        found = full_state_dict(self.runtime.access, wanted=first)
        assert set(found) == ({*self.params} if first else set())
        for name in self.params if first else ():
            self.equal(found[name], self.wholes[name].to(self.dtype), name)

    def changes(self) -> None:
        """What each rank writes is kept of the source's tensor group, and of the source alone where all have it."""
        world, before = self.runtime.groups.world, {}
        source = world.size - 1
        with infinity.modify(self.runtime.module, source=source):
            for name, param in self.params.items():
                before[name] = param.detach().clone()
                param.fill_(world.index + 1)
        for name, param in self.params.items():
            shard = self.axis.params[name][0]
            writer = source if shard is None else source - source % TENSOR + self.tensor.index
            with infinity.read(param):
                self.equal(param.detach(), torch.full_like(before[name], writer + 1), name)


@pytest.mark.parametrize("world", CELLS)
def test_shards_of_a_model_are_whole_again_bit_for_bit_wherever_they_live(
    world: int, tmp_path: Path, rank_pools: Any
) -> None:
    tensors = {name: value.detach() for name, value in build(0).named_parameters()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    compared = rank_pools[world].run(visit, CELLS[world], str(tmp_path))
    assert min(compared) > 50 * len(CELLS[world])


def leave(rank: int, world: int, folder: str) -> list[Any]:
    model, logger = build(0), logging.getLogger("infinity")
    said: list[str] = []
    handler = mock.Mock(level=logging.WARNING, handle=lambda record: said.append(record.getMessage()))
    cell = Cell(3, "cpu", "bf16")
    with sharded_runtime(model, axis_of(model, CUTS, TENSOR), cell.config(folder)) as runtime:
        engine = engine_of(runtime)
        whole = {name: tuple(value.shape) for name, value in engine.state_dict().items()}
        with pytest.raises(StateError, match=r"has shards.*engine\.export\(folder\).*engine\.state_dict\(\)"):
            engine.close(keep_weights=True)
        refused = infinity.state(model.up.weight).master
        logger.addHandler(handler)
        engine.destroy()
        logger.removeHandler(handler)
        return [whole, torch.equal(refused, build(0).up.weight), said, runtime.health.closed]


def test_shards_are_not_left_in_the_module_and_the_engine_says_where_whole_weights_are(
    tmp_path: Path, rank_pools: Any
) -> None:
    results = rank_pools[2].run(leave, str(tmp_path))
    shapes = {name: tuple(value.shape) for name, value in build(0).state_dict().items()}
    assert [result[0] for result in results] == [shapes, {}]
    for _, open_after_refusal, _, closed in results:
        assert open_after_refusal
        assert closed
    # Rank 0 says it for all.
    said = results[0][2]
    assert any("not left in the module" in line and "2 ranks of the tensor axis" in line for line in said)
