"""`engine.memory()`: where every byte is, whose it is, what moves it; and errors for lack of memory that show it."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity.engine.initialize
from infinity.engine import Engine
from infinity.errors import StateError, TierMemoryError
from infinity.memory.ledger import MemoryRefused
from infinity.memory.tiers.pinned import trim
from infinity.zero.unit import GatherState
from tests.support.models import MLP, TinyLlama, token_batch, vector_batch
from tests.support.oracle import Case, settings
from tests.support.spawn import run_ranks

# Units of this model have more elements than these sub-groups and buckets.
SMALL = {"sub_group_size": 2000, "stage3_prefetch_bucket_size": 4000, "stage3_max_reuse_distance": 0}


@contextmanager
def engine_of(config: dict[str, Any], model: nn.Module | None = None) -> Iterator[Engine]:
    torch.manual_seed(0)
    with infinity.initialize(model=model or TinyLlama(), config=config)[0] as engine:
        yield engine


def train(engine: Engine, steps: int = 3) -> None:
    for micro in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(**token_batch(0, micro)))
        engine.step()
    engine.synchronize()


def peaks(config: dict[str, Any]) -> dict[tuple[str, str], int]:
    """The most of each line of the report after a few steps, pools by name and limits included."""
    with engine_of(config) as engine:
        train(engine)
        report = engine.memory()
    table = {(tier, kind): nbytes for tier, kinds in report.peak.items() for kind, nbytes in kinds.items()}
    table |= {("pool", name): pool.reserved for name, pool in report.pools.items()}
    return table | {("limit", tier): limit for tier, limit in report.limits.items() if limit is not None}


OFFLOAD = {"param": "nvme", "optimizer": "nvme", "dtype": "bf16"}
# Key -> (settings with it, settings without, the line of the report, whether the key makes it grow).
KEYS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str], bool]] = {
    "offload_param.device": ({**OFFLOAD, "param": "cpu"}, OFFLOAD, ("cpu", "param"), True),
    "offload_param.device, off the CPU": (OFFLOAD, {**OFFLOAD, "param": "cpu"}, ("nvme", "param"), True),
    "offload_optimizer.device": ({**OFFLOAD, "optimizer": "cpu"}, OFFLOAD, ("cpu", "exp_avg"), True),
    "offload_optimizer.device, off the CPU": (OFFLOAD, {**OFFLOAD, "optimizer": "cpu"}, ("nvme", "exp_avg"), True),
    "sub_group_size": (
        {**OFFLOAD, "zero": {**SMALL, "sub_group_size": 1000}}, {**OFFLOAD, "zero": SMALL}, ("pool", "states"), False,
    ),
    "stage3_prefetch_bucket_size": (
        {**OFFLOAD, "zero": {**SMALL, "stage3_prefetch_bucket_size": 40_000}}, {**OFFLOAD, "zero": SMALL},
        ("pool", "param"), True,
    ),
    "stage3_max_live_parameters": (
        {**OFFLOAD, "zero": {"stage3_max_live_parameters": 12_000}}, OFFLOAD, ("gpu", "full"), False,
    ),
    "stage3_max_reuse_distance": (
        {**OFFLOAD, "zero": {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}}, OFFLOAD,
        ("gpu", "full"), False,
    ),
    "stage3_param_persistence_threshold": (
        {**OFFLOAD, "zero": {**SMALL, "stage3_param_persistence_threshold": 100_000}}, {**OFFLOAD, "zero": SMALL},
        ("gpu", "full"), True,
    ),
    "stage": (
        {"optimizer": "cpu", "stage": 2}, {"optimizer": "cpu", "param": "cpu", "zero": SMALL}, ("gpu", "full"), True,
    ),
    "bf16": ({**OFFLOAD, "dtype": "bf16"}, {**OFFLOAD, "dtype": "fp32"}, ("nvme", "param"), False),
    "data_types.grad_accum_dtype": (
        {**OFFLOAD, "data_types": {"grad_accum_dtype": "fp32"}}, OFFLOAD, ("cpu", "grad"), True,
    ),
    "gradient_accumulation_steps": ({**OFFLOAD, "accumulation": 2}, OFFLOAD, ("cpu", "grad"), True),
    "memory.gpu.max_bytes": ({**OFFLOAD, "memory": {"gpu": {"max_bytes": "8MB"}}}, OFFLOAD, ("limit", "gpu"), False),
    "memory.cpu.max_bytes": ({**OFFLOAD, "memory": {"cpu": {"max_bytes": "8MB"}}}, OFFLOAD, ("limit", "cpu"), False),
    "memory.nvme.max_bytes": ({**OFFLOAD, "memory": {"nvme": {"max_bytes": "8MB"}}}, OFFLOAD, ("limit", "nvme"), False),
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_each_memory_key_moves_its_line(tmp_path, key):
    given, otherwise, line, grows = KEYS[key]
    with_key, without = (peaks(settings(tmp_path, **options)) for options in (given, otherwise))
    before, after = without.get(line, 0), with_key.get(line, 0)
    assert (after > before) if grows else (after < before), f"{line}: {before} -> {after}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tiers", [("gpu", "gpu"), ("cpu", "nvme"), ("nvme", "nvme")])
def test_units_add_up_to_the_kinds(tmp_path, tiers, dtype):
    """Tied and frozen weights included; what no unit owns is named as shared."""
    case = Case()
    model = case.model()
    config = settings(tmp_path, param=tiers[0], optimizer=tiers[1], dtype=dtype, zero=SMALL)
    with infinity.initialize(model=model, config=config, model_parameters=case.groups(model))[0] as engine:
        for micro in range(2):
            for loss in case.losses(engine, 0, micro):
                engine.backward(loss)
            engine.step()
        engine.synchronize()
        report = engine.memory(by_unit=True)
        assert report.by_unit is not None
        names = {unit.layout.name for unit in engine.units}
        for tier, kinds in report.by_unit.items():
            assert {kind: sum(units.values()) for kind, units in kinds.items()} == report.now[tier]
            for kind, units in kinds.items():
                assert set(units) - {"(shared)"} <= names
                assert units.get("(shared)", 0) == 0 or kind in ("pool", "full_grad")
        frozen = {unit.layout.name for unit in engine.units if not unit.layout.trainable}
        kinds = [kinds.get(kind, {}) for kinds in report.by_unit.values() for kind in ("grad", "exp_avg")]
        holders = {unit for units in kinds for unit in units}
        assert frozen and not frozen & holders, "what is frozen has neither gradients nor states"
        assert engine.memory().by_unit is None
        assert "exp_avg" in str(report)


def test_the_ledgers_lines_are_the_plans(tmp_path):
    """Homes, byte for byte; pools as reserved."""
    with engine_of(settings(tmp_path, **OFFLOAD, zero=SMALL)) as engine:
        train(engine)
        planned = {tier.value: {kind.value: n for kind, n in kinds.items()} for tier, kinds in
                   engine.plan.bytes_by_tier().items()}  # fmt: skip
        report = engine.memory()
    for kind in ("param", "exp_avg", "exp_avg_sq", "remainder"):
        assert report.peak["nvme"][kind] == planned["nvme"][kind]
    assert report.peak["cpu"] == planned["cpu"]
    assert report.peak["gpu"]["full"] <= planned["gpu"]["full"]


def unaccounted(rank: int, world: int, folder: str, tier: str) -> tuple[int, int]:
    """Bytes that the report of some steps names nobody's, and those that the process has taken since before."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    zero = {
        "sub_group_size": 2_000_000, "stage3_prefetch_bucket_size": 4_000_000, "stage3_max_live_parameters": 6_000_000,
    }  # fmt: skip
    config = settings(folder, param=tier, optimizer=tier, dtype="bf16", clip=1.0, zero=zero)
    with infinity.initialize(model=model, config=config)[0] as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 1024, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
        engine.synchronize()
        trim()
        report = engine.memory()
        return report.unaccounted, report.resident - report.mapped - report.baseline


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_what_is_not_accounted_for_is_small(tmp_path, tier):
    """At most 3 % of what the process has taken since before the engine, and a few MB of small objects."""
    ((found, taken),) = run_ranks(unaccounted, 1, str(tmp_path), tier)
    assert taken > 100e6
    assert abs(found) <= 0.03 * taken + 4e6, f"{found / 1e6:.1f} of {taken / 1e6:.1f} MB"


def test_memory_breakdown_prints_at_the_first_step_and_with_the_progress(tmp_path, caplog):
    config = settings(tmp_path, **OFFLOAD, memory_breakdown=True, steps_per_print=3, log_level="info")
    with caplog.at_level(logging.INFO, "infinity"), engine_of({**config, "log_level": "info"}) as engine:
        train(engine, steps=4)
    told = [record.getMessage() for record in caplog.records if "memory of rank 0" in record.getMessage()]
    assert [text.splitlines()[0] for text in told] == [f"memory of rank 0 after step {step}:" for step in (1, 3)]
    assert all("exp_avg" in text and "not accounted for" in text for text in told)


class Hungry(nn.Module):
    """A model whose forward or backward meets `refusal` when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()
        self.refusal: BaseException | None = None
        self.where = "forward"

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.refusal is not None and self.where == "forward":
            raise self.refusal
        loss = self.inner(x, y)
        if self.refusal is not None and loss.requires_grad:
            refusal = self.refusal

            def refuse(grad: torch.Tensor) -> None:
                raise refusal

            loss.register_hook(refuse)
        return loss


REFUSALS = {
    "the accelerator's": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "Python's": MemoryError("none left"),
    "torch's on the CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
}


def hungry_run(folder: Path, where: str | None, refusal: BaseException | None) -> tuple[torch.Tensor, str]:
    """The weights after 4 steps, and the message of what was caught in the middle of the third."""
    torch.manual_seed(0)
    message = ""
    config = settings(folder, param="nvme", optimizer="nvme", dtype="bf16", clip=1.0)
    with infinity.initialize(model=Hungry(), config=config)[0] as engine:
        for step in range(4):
            batch = {name: value.bfloat16() for name, value in vector_batch(0, step).items()}
            if step == 2 and where is not None:
                engine.module.where, engine.module.refusal = where, refusal
                with pytest.raises(torch.OutOfMemoryError) as caught:
                    engine.backward(engine(**batch))
                message = str(caught.value)
                assert isinstance(caught.value, TierMemoryError) and caught.value.__cause__ is refusal
                assert all(unit.state is GatherState.PARTITIONED for unit in engine.units if not unit.placed.whole)
                engine.module.refusal = None
                if where == "backward":
                    engine.zero_grad()
            engine.backward(engine(**batch))
            engine.step()
            engine.store.check()
        weights = torch.cat([infinity.state(param).master.flatten() for param in engine.module.parameters()])
    return weights, message


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_out_of_memory_shows_the_ledger_and_loses_nothing(tmp_path, where, refusal):
    """Caught as torch's own error; the batch is run again, and the weights are those of a run without it."""
    expected, _ = hungry_run(tmp_path, None, None)
    weights, message = hungry_run(tmp_path, where, REFUSALS[refusal])
    assert torch.equal(weights, expected)
    assert message.startswith(f"no memory in {where}: {REFUSALS[refusal]}")
    advice = "zero_grad" if where == "backward" else "Nothing is lost"
    assert all(part in message for part in ("exp_avg", "nvme", "pool", "before the engine", advice))


def test_other_errors_are_left_alone(tmp_path):
    error = RuntimeError("a shape does not fit")
    with infinity.initialize(model=Hungry(), config=settings(tmp_path))[0] as engine:
        engine.module.refusal = error
        with pytest.raises(RuntimeError) as caught:
            engine(**vector_batch(0, 0))
        assert caught.value is error


def test_a_step_that_ends_for_lack_of_memory_ends_the_engine(tmp_path, monkeypatch):
    """It says so at each further call, and gives everything back."""
    with infinity.initialize(model=Hungry(), config=settings(tmp_path))[0] as engine:
        engine.backward(engine(**vector_batch(0, 0)))

        def refuse(*_: Any, **__: Any) -> None:
            raise MemoryError("none left")

        monkeypatch.setattr(engine.optimizer, "step", refuse)
        with pytest.raises(MemoryRefused, match="cannot go on: step 1 was cut short"):
            engine.step()
        with pytest.raises(StateError, match="with some of the weights stepped"):
            engine(**vector_batch(0, 1))
    assert list(tmp_path.iterdir()) == []


def test_a_gather_beyond_the_limit_is_refused_and_the_engine_goes_on(tmp_path):
    with engine_of(settings(tmp_path, **OFFLOAD, zero=SMALL)) as engine:
        train(engine, steps=1)
        ledger = engine._runtime.store.ledger
        limit, limits = max(unit.layout.nbytes for unit in engine.units) - 1, ledger.limits
        ledger.limits = replace(limits, gpu=limit)
        with pytest.raises(TierMemoryError, match="the whole of") as caught:
            train(engine, steps=1)
        error = caught.value
        assert (error.tier, error.kind, error.limit) == ("gpu", "full", limit)
        assert error.used + error.asked > limit
        engine.zero_grad()
        ledger.limits = limits
        train(engine, steps=1)
        engine.store.check()


class Working(nn.Module):
    """Takes a workspace of as many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.workspace = nn.Linear(64, 64), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * torch.ones(self.workspace + 1, dtype=torch.uint8)[0]).square().mean()


def limited(rank: int, world: int, folder: str) -> int:
    """The steps that an engine takes around a forward that the system refuses."""
    torch.set_num_threads(1)
    x = torch.ones(2, 64)
    with infinity.initialize(model=Working(), config=settings(folder, param="nvme", optimizer="nvme"))[0] as engine:

        def step() -> None:
            engine.backward(engine(x))
            engine.step()
            engine.synchronize()

        step()
        status = Path("/proc/self/status").read_text().splitlines()
        data = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + (256 << 20),) * 2)
        engine.module.workspace = 1 << 30
        with pytest.raises(TierMemoryError, match="exp_avg") as caught:
            engine(x)
        assert isinstance(caught.value, MemoryError)
        engine.module.workspace = 0
        step()
        return engine.global_steps


def test_what_the_system_refuses_is_a_memory_error_with_the_ledger(tmp_path):
    """Under RLIMIT_DATA: a forward that takes too much raises, and the next one trains."""
    assert run_ranks(limited, 1, str(tmp_path)) == [2]
