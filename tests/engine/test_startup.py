"""What a model's start moves over the drive: each value once, and no zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.memory.tiers.nvme import NvmeTier
from infinity.plan.types import Extent
from infinity.zero import deferred_init

WIDTH, LAYERS = 64, 6
NUMEL = LAYERS * WIDTH * WIDTH


class Moved:
    """Bytes that the tiers were asked to write and to read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written = self.read = 0
        write, read = NvmeTier.write, NvmeTier.read

        def counted_write(tier: NvmeTier, extent: Extent, buffer: Tensor) -> Any:
            self.written += extent.nbytes
            return write(tier, extent, buffer)

        def counted_read(tier: NvmeTier, extent: Extent, buffer: Tensor, **options: Any) -> Any:
            self.read += extent.nbytes
            return read(tier, extent, buffer, **options)

        monkeypatch.setattr(NvmeTier, "write", counted_write)
        monkeypatch.setattr(NvmeTier, "read", counted_read)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Moved:
    return Moved(monkeypatch)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def config(folder: Path, dtype: str, tier: str = "nvme", optimizer: dict[str, Any] | None = None) -> dict[str, Any]:
    home = {"device": tier, "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 4, "log_level": "error", "bf16": {"enabled": dtype == "bf16"},
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": home, "offload_optimizer": home,
            # Several to a layer.
            "sub_group_size": 1024,
        },
    }  # fmt: skip


def build(stored: torch.dtype) -> Residual:
    torch.manual_seed(0)
    return Residual().to(stored)


def take_steps(engine: Any, dtype: str, steps: int) -> None:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(kind)
        engine.backward(engine(x))
        engine.step()


def train(engine: Any, dtype: str, steps: int = 3) -> list[Tensor]:
    """Steps; then masters and moments."""
    take_steps(engine, dtype, steps)
    states = [infinity.state(param) for param in engine.module.parameters()]
    return [value for state in states for value in (state.master, state.exp_avg, state.exp_avg_sq)]


@pytest.mark.parametrize(
    ("stored", "dtype", "nbytes"),
    [(torch.bfloat16, "bf16", 2), (torch.float32, "bf16", 4), (torch.float32, "fp32", 4), (torch.float16, "bf16", 4)],
)
def test_each_value_is_written_once_and_zeros_are_not(
    stored: torch.dtype, dtype: str, nbytes: int, tmp_path: Path, moved: Moved
) -> None:
    """bf16 weights in bf16 alone; otherwise what completes them to the fp32 master. Moments begin as zero."""
    engine, *_ = infinity.initialize(model=build(stored), config=config(tmp_path, dtype))
    with engine:
        engine.store.settle()
        # Whole pages: a sub-group has several times as many bytes.
        assert nbytes * NUMEL <= moved.written <= 1.6 * nbytes * NUMEL
        assert engine.store.in_memory(engine.units[0].key) or moved.read == 0
        found = train(engine, dtype)
    other, *_ = infinity.initialize(model=build(stored), config=config(tmp_path, dtype, "cpu"))
    with other:
        assert all(map(torch.equal, found, train(other, dtype)))


def test_a_first_step_reads_no_moments(tmp_path: Path, moved: Moved) -> None:
    engine, *_ = infinity.initialize(model=build(torch.bfloat16), config=config(tmp_path, "bf16"))
    with engine:
        engine.store.settle()
        amounts = []
        for _ in range(3):
            moved.read = 0
            take_steps(engine, "bf16", 1)
            engine.synchronize()
            engine.store.settle()
            amounts.append(moved.read)
        # Parameters for forward, backward and the step at most; from then on 10 bytes of states, too.
        assert amounts[0] <= 3.3 * 2 * NUMEL < amounts[1]


def test_moments_that_do_not_begin_as_zero_are_written(tmp_path: Path, moved: Moved) -> None:
    adagrad = {"type": "Adagrad", "params": {"lr": 1e-2, "initial_accumulator_value": 0.5}}
    engine, *_ = infinity.initialize(model=build(torch.float32), config=config(tmp_path, "fp32", optimizer=adagrad))
    with engine:
        engine.store.settle()
        assert moved.written >= 8 * NUMEL
        assert all((infinity.state(param).sum == 0.5).all() for param in engine.module.parameters())


def test_a_checkpoint_of_a_model_that_has_not_trained_has_its_zeros(tmp_path: Path) -> None:
    for tier in ("nvme", "cpu"):
        engine, *_ = infinity.initialize(model=build(torch.bfloat16), config=config(tmp_path / tier, "bf16", tier))
        with engine:
            if tier == "nvme":
                engine.save_checkpoint(tmp_path / "out")
            else:
                train(engine, "bf16", 1)
                engine.load_checkpoint(tmp_path / "out")
            values = train(engine, "bf16", 2)
            if tier == "nvme":
                expected = values
    assert all(map(torch.equal, values, expected))


def test_values_that_a_constructor_replaces_do_not_come_back(
    tmp_path: Path, moved: Moved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_init, "WINDOW_NBYTES", 20_000)
    with infinity.Init(config=config(tmp_path, "fp32")):
        torch.manual_seed(0)
        model = Residual()
        with torch.no_grad():
            for layer in model.layers:
                layer.weight.normal_(0.0, 0.02)
                assert layer.weight.abs().max() > 0
    assert moved.read == 0 and moved.written >= 4 * NUMEL
    torch.manual_seed(0)
    plain = Residual()
    with torch.no_grad():
        for layer in plain.layers:
            layer.weight.normal_(0.0, 0.02)
    engine, *_ = infinity.initialize(model=model, config=config(tmp_path, "fp32"))
    with engine:
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(infinity.state(ours).master, theirs.detach())
