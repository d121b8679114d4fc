"""An idle engine's states go to a slower tier and come back: with the same bits, and whatever fails on the way."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import CapacityError, ConfigError, StateError, TransferError
from infinity.memory.tiers.nvme import NvmeTier
from infinity.plan.types import Kind, Tier
from tests.engine.test_accelerator import digest, made, raceless
from tests.engine.test_accelerator import step as step_there
from tests.engine.test_handover import engine_of, step
from tests.support.accelerator.process import AcceleratedProcess
from tests.support.cells import kept, turns
from tests.support.checkpoints import assert_same, contents
from tests.support.models import TinyLlama, token_batch
from tests.support.oracle import Case, join, settings
from tests.support.private_memory import own_nbytes
from tests.support.simulated_device import SimulatedDevice
from tests.support.spawn import RankPool, run_ranks

HOMES = [
    (0, "gpu", "gpu"), (1, "gpu", "cpu"), (2, "gpu", "nvme"), (2, "gpu", "gpu"), (3, "gpu", "gpu"), (3, "cpu", "cpu"),
    (3, "cpu", "nvme"), (3, "nvme", "nvme"),
]  # fmt: skip
STATES = {Kind.REMAINDER, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ}


def in_memory(engine: Any, *, kinds: set[Kind] | None = None) -> int:
    """Bytes of the ledger that lie in memory: of values, without the pools."""
    return sum(
        nbytes for (tier, kind), nbytes in engine._runtime.store.ledger.now.items()
        if tier.addressable and kind is not Kind.POOL and (kinds is None or kind in kinds)
    )  # fmt: skip


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in engine.state_dict().items()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad and param.numel():
            state = infinity.state(param)
            found |= {f"{name} master": state.master, f"{name} first": state.exp_avg}
    return found


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def trained(folder: Path, home: tuple[int, str, str], dtype: str, between: Any) -> dict[str, torch.Tensor]:
    engine = engine_of(Case().model(), folder, home, dtype=dtype)
    with engine:
        for micro in range(4):
            step(engine, micro=micro)
            between(engine, micro)
            engine.store.check()
        return values_of(engine)


@pytest.mark.parametrize(*turns(home=HOMES, dtype=["fp32", "bf16", "fp16"]))
def test_training_goes_on_with_the_same_bits(home: tuple[int, str, str], dtype: str, tmp_path: Path) -> None:
    def away_and_back(engine: Any, micro: int) -> None:
        engine.synchronize()
        held, files = in_memory(engine), len(os.listdir(tmp_path))
        engine.offload_states(device="nvme")
        engine.offload_states(device="nvme")
        assert in_memory(engine) <= 0.05 * held
        assert not engine.store.offloaded() or len(os.listdir(tmp_path)) == files + 1
        if micro % 2:
            # The next forward brings back what it needs, else.
            engine.reload_states()
            engine.reload_states()
            assert len(os.listdir(tmp_path)) == files and not engine.store.offloaded()

    def only_states(engine: Any, micro: int) -> None:
        engine.offload_states(["optim_states"], "nvme")
        assert not in_memory(engine, kinds=STATES)
        with torch.no_grad():
            engine(**token_batch(0, 9, positions=8))
        assert not in_memory(engine, kinds=STATES)

    plain = trained(tmp_path, home, dtype, lambda *_: None)
    assert_equal(trained(tmp_path, home, dtype, away_and_back), plain)
    assert_equal(trained(tmp_path, home, dtype, only_states), plain)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("home", [(1, "gpu", "gpu"), (3, "gpu", "cpu"), (3, "cpu", "nvme")])
def test_what_reads_states_finds_them(home: tuple[int, str, str], tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    with engine_of(Case().model(), swap, home, dtype="bf16") as engine:
        step(engine)
        wanted = values_of(engine)
        engine.save_checkpoint(tmp_path / "saved", tag="before")
        engine.offload_states(device="nvme")
        engine.save_checkpoint(tmp_path / "saved", tag="after")
        assert_same(contents(tmp_path / "saved", "before"), contents(tmp_path / "saved", "after"))
        engine.offload_states(device="nvme")
        assert_equal(values_of(engine), wanted)
        engine.offload_states(device="nvme")
        with infinity.modify(engine.module):
            engine.module.norm.weight.fill_(2.0)
        assert (infinity.state(engine.module.norm.weight).master == 2.0).all()
        engine.offload_states(device="nvme")
        engine.load_checkpoint(tmp_path / "saved", tag="before")
        assert_equal(values_of(engine), wanted)
        engine.offload_states(device="nvme")
        engine.destroy()
        # Without a reload, everything goes with the engine.
        engine = engine_of(engine.module, swap, home, dtype="bf16")
        engine.offload_states(device="nvme")
        engine.close()
        assert not any(engine._runtime.store.ledger.now.values()) and os.listdir(swap) == []


def test_a_weight_that_is_away_says_so(tmp_path: Path) -> None:
    with engine_of(Case().model(), tmp_path, (2, "gpu", "gpu")) as engine:
        total = engine.module.norm.weight.sum().item()
        engine.offload_states(device="nvme")
        with pytest.raises(StateError, match=r"norm.weight is partitioned.*infinity.read"):
            engine.module.norm.weight.sum()
        with infinity.read(engine.module):
            assert engine.module.norm.weight.sum().item() == total


class DeepSpeeds(str, Enum):
    """As DeepSpeed's enumerations."""

    optim_states = "optim_states"
    cpu = "cpu"


def test_arguments_are_deepspeeds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = settings(tmp_path, param="cpu", optimizer="cpu", log_level="warning")
    for section in ("offload_param", "offload_optimizer"):
        del config["zero_optimization"][section]["nvme_path"]
    engine, *_ = infinity.initialize(model=Case().model(), config=config)
    with engine:
        step(engine)
        held = in_memory(engine, kinds=STATES)
        # CPU memory is where they are.
        engine.offload_states(include=[DeepSpeeds.optim_states], device=DeepSpeeds.cpu, pin_memory=False)
        assert held and in_memory(engine, kinds=STATES) == held
        with caplog.at_level("WARNING", "infinity"):
            engine.offload_states(device="none", non_blocking=True)
        assert "nothing moves" in caplog.text
        for arguments, text in (
            ({"include": ["moments"]}, "moments is none of optim_states"),
            ({"device": "tape"}, "one of cpu, nvme, none"),
            ({"device": "nvme"}, "names no drive; set zero_optimization.offload_optimizer.nvme_path"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=text):
                engine.offload_states(**arguments)
        engine.backward(engine(**token_batch(0, 1, positions=8)))
        with pytest.raises(StateError, match=r"gradients have accumulated. Call engine.step\(\)"):
            engine.offload_states()
        engine.step()


@pytest.mark.parametrize("home", [(2, "gpu", "gpu"), (3, "cpu", "cpu")])
@pytest.mark.parametrize("calls", [0, 3])
def test_a_full_drive_loses_nothing(
    home: tuple[int, str, str], calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(Case().model(), tmp_path, home, dtype="bf16") as engine:
        step(engine)
        engine.synchronize()
        wanted, count = values_of(engine), 0
        write, opened = NvmeTier.write, NvmeTier.open

        def refuse(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > calls:
                if not calls:
                    raise CapacityError("no room")
                raise TransferError("write", path="swap", offset=0, nbytes=0, errno=28, reason="no space")
            return write(*arguments, **options)

        with monkeypatch.context() as patch:
            # The file cannot be reserved, or a write fails in the middle.
            patch.setattr(NvmeTier, "write" if calls else "open", refuse)
            with pytest.raises(TransferError if calls else CapacityError):
                engine.offload_states(device="nvme")
        assert NvmeTier.open == opened
        engine.store.check()
        assert_equal(values_of(engine), wanted)
        step(engine, micro=1)
    assert os.listdir(tmp_path) == []


def test_memory_that_is_gone_can_be_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(Case().model(), tmp_path, (3, "cpu", "cpu"), dtype="bf16") as engine:
        step(engine)
        engine.synchronize()
        wanted = values_of(engine)
        engine.offload_states(device="nvme")
        away = len(engine.store.offloaded())
        memory = engine._runtime.store._buffers._memory[Tier.CPU]

        def refuse(nbytes: int) -> Any:
            raise MemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(memory, "allocate", refuse)
            with pytest.raises(MemoryError):
                engine.reload_states()
        assert len(engine.store.offloaded()) == away
        engine.store.check()
        assert_equal(values_of(engine), wanted)


def ranks_rest(rank: int, world: int, folder: str, stage: int, home: str) -> bool:
    join(world)

    def weights(away: bool) -> dict[str, torch.Tensor]:
        param = home if stage == 3 else "gpu"
        with engine_of(Case().model(), folder, (stage, param, home), dtype="bf16") as engine:
            for micro in range(3):
                step(engine, rank, micro)
                if away:
                    engine.synchronize()
                    held = in_memory(engine)
                    engine.offload_states(device="nvme")
                    assert in_memory(engine) <= 0.05 * held, engine._runtime.store.ledger.now
                    if micro:
                        engine.reload_states()
                    engine.store.check()
            with infinity.read(engine.module):
                return {name: param.detach().clone() for name, param in engine.module.named_parameters()}

    plain, rested = weights(False), weights(True)
    return all(torch.equal(rested[name], value) for name, value in plain.items())


@pytest.mark.parametrize(("stage", "home"), [(0, "gpu"), (1, "gpu"), (2, "gpu"), (2, "cpu"), (3, "gpu"), (3, "cpu")])
def test_ranks_rest_together(stage: int, home: str, tmp_path: Path, rank_pools: dict[int, RankPool]) -> None:
    assert rank_pools[2].run(ranks_rest, str(tmp_path), stage, home) == [True, True]


def rests_on_a_device(folder: str) -> None:
    """From the device to CPU memory and to NVMe: the device is empty then, and the bits are the same."""

    def run(stage: int, target: str | None) -> str:
        with made(settings(folder, stage=stage, dtype="bf16")) as engine:
            for micro in range(3):
                step_there(engine, micro)
                if target is not None:
                    engine.synchronize()
                    ledger = engine._runtime.store.ledger
                    held, in_cpu = ledger.total(Tier.GPU), ledger.total(Tier.CPU)
                    engine.offload_states(device=target)
                    assert held and ledger.total(Tier.GPU) <= 0.05 * held, ledger.now
                    assert (ledger.total(Tier.CPU) > in_cpu) is (target == "cpu")
                    if micro:
                        engine.reload_states()
            return digest(engine)

    for stage in (2, 3):
        assert len({run(stage, target) for target in (None, "cpu", "nvme")}) == 1


def test_a_device_is_given_back(process: AcceleratedProcess, tmp_path: Path) -> None:
    process.run(raceless, rests_on_a_device, SimulatedDevice, str(tmp_path))


def released(rank: int, world: int, folder: str, stage: int, home: str) -> tuple[int, int, int]:
    """Bytes that an engine holds in memory, those that it holds while it rests, and those that the process gives."""
    torch.set_num_threads(1)
    config = settings(folder, stage=stage, param=home, optimizer=home, dtype="bf16")
    for dim in (64, 384):
        # The first engine loads what a process loads once.
        model = TinyLlama(dim=dim, layers=8, hidden=dim * 11 // 4)
        with infinity.initialize(model=model, config=config)[0] as engine:
            step(engine)
            engine.synchronize()
            held, before = in_memory(engine), own_nbytes()
            engine.offload_states(device="nvme")
            found = held, in_memory(engine), before - own_nbytes()
            step(engine)
    return found


@pytest.mark.parametrize(("stage", "home"), kept([(2, "gpu"), (3, "gpu"), (3, "cpu")], [(3, "cpu")]))
def test_the_process_gives_the_memory_back(stage: int, home: str, tmp_path: Path) -> None:
    ((held, left, freed),) = run_ranks(released, 1, str(tmp_path), stage, home)
    assert held > 100e6 and left <= 0.05 * held
    assert freed >= 0.95 * held
