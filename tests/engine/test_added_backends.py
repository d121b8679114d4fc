"""A further tier or type of device is one back-end class and a configuration; it changes no bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import infinity
from estimators.step_time import Bound, StepTime, predict
from infinity.base.transfer import Transfer
from infinity.config.load import load_config
from infinity.errors import ConfigError
from infinity.memory.tiers.base import Folders, QueueOptions, TierBackend
from infinity.memory.tiers.device import Device, add_device, remove_device
from infinity.memory.tiers.nvme import NvmeTier
from infinity.memory.tiers.registry import add_tier, remove_tier
from infinity.plan.hardware import ASSUMED_CPU
from infinity.plan.types import EXTENT_ALIGNMENT, DriveRates, Extent, Kind, Tier
from tests.support.oracle import Case, settings, train
from tests.support.simulated_tier import SimulatedTier

# Requests by the name of the tier's back end and their kind.
requests: Counter[tuple[str, str]] = Counter()


class Archive(NvmeTier):
    """A second class of drives: files as on NVMe, opened with one thread and few blocks in flight."""

    @classmethod
    def open(cls, directory: Folders, *, nbytes: int, rank: int, options: QueueOptions) -> NvmeTier:
        return super().open(directory, nbytes=nbytes, rank=rank, options=QueueOptions(depth=2, threads=1))

    def read(self, extent: Extent, buffer: Tensor, *, priority: int = 0) -> Transfer:
        requests["archive", "read"] += 1
        return super().read(extent, buffer, priority=priority)

    def write(self, extent: Extent, buffer: Tensor, *, priority: int = 0) -> Transfer:
        requests["archive", "write"] += 1
        return super().write(extent, buffer, priority=priority)


class FakeDevice(Device):
    """An accelerator by its own account: a gigabyte of memory, reached by copies through CPU memory."""

    name = "fake"
    is_accelerator = True
    own_memory = True
    pinning = "registration"
    pinned: ClassVar[Counter[int]] = Counter()
    copies = 0

    @classmethod
    def of_rank(cls, local_rank: int) -> Device:
        return cls(torch.device("cpu"))

    def copy(self, target: Tensor, source: Tensor) -> Transfer:
        FakeDevice.copies += 1
        return super().copy(target, source.clone())

    def free_nbytes(self) -> int:
        return 1 << 30

    def allocated_nbytes(self) -> int:
        return 0

    def register(self, pointer: int, nbytes: int) -> str | None:
        self.pinned[pointer] += nbytes
        return None

    def unregister(self, pointer: int) -> None:
        del self.pinned[pointer]


@pytest.fixture
def added() -> Iterator[Callable[..., Tier]]:
    """`added(backend)` is a tier named "archive" behind NVMe, moved by that back end."""
    tiers: list[Tier] = []

    def add(backend: type[TierBackend], rates: DriveRates | None = None) -> Tier:
        tiers.append(Tier("archive", addressable=False, alignment=EXTENT_ALIGNMENT, rates=rates))
        add_tier(tiers[-1], backend)
        return tiers[-1]

    requests.clear()
    yield add
    for tier in tiers:
        remove_tier(tier)


def on(folder: Path, param: str, optimizer: str) -> dict[str, Any]:
    """The configuration of the parity tests, each tier with a folder of its own."""
    config = settings(folder)
    for name, device in (("offload_param", param), ("offload_optimizer", optimizer)):
        config["zero_optimization"][name] = {"device": device, "nvme_path": str(folder / device)}
    return config


@pytest.mark.parametrize("backend", [Archive, SimulatedTier])
def test_a_fourth_tier_trains_with_the_bits_of_nvme(
    tmp_path: Path, added: Callable[..., Tier], backend: type[TierBackend]
) -> None:
    expected = train(Case(), on(tmp_path, "nvme", "nvme")).digest
    tier, seen = added(backend), []

    def look(engine: infinity.Engine) -> None:
        assert list(Tier) == [Tier.GPU, Tier.CPU, Tier.NVME, tier]
        homes = {spec.key.kind: spec.home for spec in engine.plan.partitions}
        assert homes[Kind.STATES] is tier
        held = engine.memory().now
        assert held["archive"]["exp_avg"] == held["archive"]["exp_avg_sq"] > 0
        assert "archive" in engine.plan.explain() and "archive" in str(engine.memory())
        seen.append(homes[Kind.PARAM])

    for param in ("nvme", "archive"):
        assert train(Case(), on(tmp_path, param, "archive"), look=look).digest == expected
    assert seen == [Tier.NVME, tier]
    assert backend is SimulatedTier or min(requests["archive", "read"], requests["archive", "write"]) > 0
    assert not [file for folder in tmp_path.iterdir() for file in folder.iterdir()], "close() leaves no file"


def test_a_fourth_tier_is_priced_by_its_own_bandwidths(tmp_path: Path, added: Callable[..., Tier]) -> None:
    usual = ASSUMED_CPU.drive_rates
    added(Archive, DriveRates(read=usual.read / 1000, write=usual.write / 500, mixed=usual.mixed / 1000))
    told: list[StepTime] = []
    for device in ("nvme", "archive"):
        config = on(tmp_path, device, device)
        train(Case(), config, look=lambda engine: told.append(predict(engine.plan, ASSUMED_CPU, tokens=8)))
    nvme, archive = told
    # So small a model is written, and stays in memory to be used.
    assert nvme.nvme_written_nbytes == archive.nvme_written_nbytes > 0
    assert archive.parts[Bound.NVME_WRITE] == pytest.approx(500 * nvme.parts[Bound.NVME_WRITE])


def test_activation_checkpoints_go_to_a_fourth_tier(tmp_path: Path, added: Callable[..., Tier]) -> None:
    def config(device: str) -> dict[str, Any]:
        offload = {"device": device, "nvme_path": str(tmp_path / device)}
        return {**on(tmp_path, "cpu", "cpu"), "activation_checkpointing": {"every": 1, "offload": offload}}

    expected = train(Case(), config("nvme")).digest
    added(Archive)
    most: list[int] = []

    def look(engine: infinity.Engine) -> None:
        most.append(sum(engine.memory().peak["archive"].values()))

    assert train(Case(), config("archive"), look=look).digest == expected
    assert most[0] > 0 and requests["archive", "write"] > 0


def test_a_timeline_names_what_each_of_two_tiers_of_drives_moves(tmp_path: Path, added: Callable[..., Tier]) -> None:
    added(Archive)

    def look(engine: infinity.Engine) -> None:
        with engine.timeline() as timeline:
            for micro in range(engine.gradient_accumulation_steps()):
                for loss in Case().losses(engine, 0, micro):
                    engine.backward(loss)
                engine.step()
            engine.synchronize()
            engine.store.settle()
        moved = {bar.subject for bar in timeline.lane("NVMe writes").bars}
        specs = engine.plan.partitions
        starts = [spec.key for spec in specs if spec.extent is not None and spec.extent.offset == 0]
        assert [key.kind for key in starts] == [Kind.PARAM, Kind.STATES], "each tier begins at its byte 0"
        names = {timeline._name(key) for key in starts}
        assert len(names) == 2 and names <= moved

    train(Case(), on(tmp_path, "nvme", "archive"), look=look)


def test_what_was_saved_on_a_fourth_tier_loads_on_another(tmp_path: Path, added: Callable[..., Tier]) -> None:
    added(Archive)

    def trained(config: dict[str, Any], act: Callable[[infinity.Engine], None]) -> list[Tensor]:
        torch.manual_seed(0)
        engine, *_ = infinity.initialize(model=Case().model(), config=config)
        with engine:
            act(engine)
            return [infinity.state(param).exp_avg for param in engine.module.parameters() if param.requires_grad]

    def save(engine: infinity.Engine) -> None:
        for micro in range(2):
            for loss in Case().losses(engine, 0, micro):
                engine.backward(loss)
            engine.step()
        engine.save_checkpoint(tmp_path / "saved")

    first = trained(on(tmp_path, "archive", "archive"), save)
    for device in ("nvme", "archive"):
        found = trained(on(tmp_path, device, device), lambda engine: engine.load_checkpoint(tmp_path / "saved"))
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True))


def test_a_device_that_is_no_tier_is_refused_and_so_is_a_name_twice(
    tmp_path: Path, added: Callable[..., Tier]
) -> None:
    with pytest.raises(ConfigError, match='expected one of "none", "cpu", "nvme", "auto"'):
        load_config(on(tmp_path, "nvme", "archive"))
    added(Archive)
    load_config(on(tmp_path, "nvme", "archive"))
    with pytest.raises(ValueError, match="archive"):
        Tier.register(Tier("archive", addressable=False))


@pytest.mark.parametrize(("param", "optimizer"), [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])
def test_a_fake_device_trains_with_the_bits_of_the_cpu(tmp_path: Path, param: str, optimizer: str) -> None:
    expected = train(Case(), on(tmp_path, param, optimizer)).digest

    def look(engine: infinity.Engine) -> None:
        assert engine.plan.request.accelerator and engine.memory().limits["gpu"] is not None
        assert FakeDevice.copies > 0
        assert bool(FakeDevice.pinned) == (param != "none"), "CPU memory is pinned for the device"

    add_device(FakeDevice)
    try:
        assert train(Case(), on(tmp_path, param, optimizer), look=look).digest == expected
    finally:
        remove_device(FakeDevice)
    assert not FakeDevice.pinned
