"""A plan that does not fit is refused by initialize(), with the numbers and a way out, before anything is written."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity.engine.initialize
from infinity.base.sizes import format_bytes
from infinity.config.zero import ZeroOptimization
from infinity.errors import CapacityError
from infinity.plan.inputs import KEYS
from tests.support.oracle import Case, join, settings, swap_files, train
from tests.support.spawn import run_ranks


def chosen(config: dict[str, Any]) -> dict[str, Any]:
    """The same with every bound that may be lowered chosen: as it is by default."""
    zero = ZeroOptimization()
    names = [path.removeprefix("zero_optimization.") for path in KEYS.values()]
    bounds = {name: getattr(zero, name) for name in names if "." not in name}
    return {**config, "zero_optimization": {**bounds, **config["zero_optimization"]}}


def refused(config: dict[str, Any], model: torch.nn.Module | None = None) -> str:
    """The message of the CapacityError that initialize() raises."""
    model = model if model is not None else Case().model()
    with pytest.raises(CapacityError) as caught:
        infinity.initialize(model=model, config=config)
    return str(caught.value)


def nbytes_in(message: str, pattern: str) -> float:
    """A figure of the message, in bytes."""
    found = re.search(pattern + r" ([\d.]+) (kB|MB|GB)", message)
    assert found is not None, message
    return float(found[1]) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[found[2]]


def planned(config: dict[str, Any], *tiers: str) -> int:
    """What an engine of this configuration plans for some tiers."""
    model = Case().model()
    with infinity.initialize(model=model, config=config)[0] as engine:
        return sum(nbytes for tier, nbytes in engine.plan.nbytes_by_tier().items() if tier.value in tiers)


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_a_budget_is_kept_to_the_byte(tmp_path, tier):
    """One byte less than the plan is refused, the plan's own size is not. Without an accelerator the CPU tier's budget
    is that of all memory.
    """
    folder = tmp_path / "swap"
    config = chosen(settings(folder, param=tier, optimizer=tier, dtype="bf16"))
    tiers = ("gpu", "cpu") if tier == "cpu" else (tier,)
    nbytes = planned(config, *tiers)
    with_budget = {**config, "memory": {tier: {"max_bytes": nbytes}}}
    assert planned(with_budget, *tiers) == nbytes
    message = refused({**config, "memory": {tier: {"max_bytes": nbytes - 1}}})
    assert "rank 0" in message
    where = "device (cpu)" if tier == "cpu" else tier
    assert f"plans {nbytes:,} bytes on {where} but {nbytes - 1:,} bytes are free" in message, "told apart by the byte"


def test_a_budget_of_the_gpu_tier_is_its_own(tmp_path):
    """Given both, each bounds its tier to the byte."""
    config = chosen(settings(tmp_path, param="cpu", optimizer="cpu", dtype="bf16"))
    gpu, cpu = planned(config, "gpu"), planned(config, "cpu")
    assert planned({**config, "memory": {"gpu": {"max_bytes": gpu}, "cpu": {"max_bytes": cpu}}}, "cpu") == cpu
    for memory in ({"gpu": gpu - 1, "cpu": cpu}, {"gpu": gpu, "cpu": cpu - 1}):
        message = refused({**config, "memory": {tier: {"max_bytes": limit} for tier, limit in memory.items()}})
        assert f"rank 0 plans {gpu:,} bytes on gpu" in message or f"rank 0 plans {cpu:,} bytes on cpu" in message


def test_bounds_that_nobody_chose_are_lowered_before_it_is_refused(tmp_path):
    config = settings(tmp_path, param="nvme", optimizer="nvme", dtype="bf16")
    asked = planned(config, "gpu", "cpu")
    fitted = planned({**config, "memory": {"cpu": {"max_bytes": asked - 1}}}, "gpu", "cpu")
    assert fitted < asked
    refused({**chosen(config), "memory": {"cpu": {"max_bytes": asked - 1}}})


@pytest.mark.parametrize(("tier", "limit"), [("nvme", 50_000), ("cpu", 150_000)])
def test_the_message_has_the_numbers_and_what_fits(tmp_path, tier, limit):
    config = chosen(settings(tmp_path / "swap", param=tier, optimizer=tier, memory={tier: {"max_bytes": limit}}))
    message = refused(config)
    assert nbytes_in(message, "plans") > limit
    assert format_bytes(limit) in message, "what is there"
    assert nbytes_in(message, "exp_avg") > 0 and nbytes_in(message, "parameters") > 0
    assert re.search(r"(nvme|device \(cpu\)) +together", message) and "too much" in message, "the table"
    fit = re.search(r"Nearest configuration that fits: with (\{.*\}) \(takes", message)
    assert fit is not None, message
    assert not (tmp_path / "swap").exists(), "nothing was written, not even the folder"
    # It does fit, word for word, with the rest of the configuration as it is.
    changes = json.loads(fit[1])["zero_optimization"]
    for name in ("offload_param", "offload_optimizer"):
        changes[name] = {**config["zero_optimization"][name], **changes.get(name, {})}
    planned({**config, "zero_optimization": {**config["zero_optimization"], **changes}}, tier)


def test_the_model_is_untouched_and_trains_with_what_fits(tmp_path):
    """After the refusal the same model goes to another tier."""
    model = Case().model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    refused(settings(tmp_path, param="nvme", optimizer="nvme", memory={"nvme": {"max_bytes": 1000}}), model)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    with infinity.initialize(model=model, config=settings(tmp_path, param="cpu", optimizer="cpu"))[0]:
        for name, param in model.named_parameters():
            assert torch.equal(infinity.state(param).master, before[name]), name
    assert swap_files(tmp_path) == []


@pytest.fixture
def small_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A drive of 64 KiB: a real one where this user may mount, else one that says so of itself."""
    drive = tmp_path / "drive"
    drive.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(drive)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not mounted:
        real = os.statvfs(tmp_path)
        small = os.statvfs_result((4096, 4096, 16, 16, 16, *tuple(real)[5:]))
        monkeypatch.setattr(os, "statvfs", lambda _: small)
    yield drive
    if mounted:
        subprocess.run(["umount", "-l", str(drive)], check=True)


def test_a_drive_that_is_too_small_stays_empty(small_drive):
    """Also below a folder that does not exist yet."""
    for folder in (small_drive, small_drive / "not" / "there"):
        message = refused(settings(folder, param="nvme", optimizer="nvme"))
        assert "on nvme" in message
        assert nbytes_in(message, "but") <= 64 * 1024 + 5000
    assert list(small_drive.iterdir()) == []


def test_what_others_leave_of_a_drive_counts(small_drive):
    """A model that fits the empty drive is refused when a file lies there, and trains when it has gone."""
    config = settings(small_drive, param="cpu", optimizer="nvme", dtype="bf16")
    config["zero_optimization"]["stage"] = 1
    config["zero_optimization"].pop("offload_param")
    model = torch.nn.Linear(32, 64)
    other = small_drive / "data"
    if os.path.ismount(small_drive):
        other.write_bytes(bytes(52 * 1024))
        refused(config, model)
        assert list(small_drive.iterdir()) == [other]
        other.unlink()
    with infinity.initialize(model=model, config=config)[0]:
        assert len(swap_files(small_drive)) == 1


def refused_together(rank: int, world: int, folder: str, nbytes: int) -> list[str]:
    """Two ranks on one drive: the budget is the node's, each rank has its share. Then both train."""
    join(world)
    config = settings(folder, param="nvme", optimizer="nvme")
    message = refused({**config, "memory": {"nvme": {"max_bytes": nbytes}}})
    assert not Path(folder).exists()
    torch.distributed.barrier()
    return [message, train(Case(), config, rank=rank, steps=1).digest]


@pytest.mark.slow
def test_every_rank_refuses(rank_pools, tmp_path):
    replies = rank_pools[2].run(refused_together, str(tmp_path / "swap"), 100_000)
    assert [f"rank {rank} plans" in message for rank, (message, _) in enumerate(replies)] == [True, True]
    assert all("50.0 kB" in message for message, _ in replies)
    assert replies[0][1] == replies[1][1]


def refused_at_once(rank: int, world: int, folder: str) -> tuple[float, int, str]:
    """Seconds of the processor and kB that a refusal takes, and what it says."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(100)))
    for layer in model:
        layer.weight = torch.nn.Parameter(torch.zeros(1).expand(10_000, 10_000))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    config = settings(folder, param="nvme", optimizer="nvme", memory={"nvme": {"max_bytes": "1GB"}})
    message = refused(config, model)
    return time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, message


def test_the_refusal_comes_in_seconds_and_takes_no_memory(tmp_path):
    """120 GB of parameters and states on a drive of 1 GB: said at once, without touching the model's weights."""
    ((seconds, grown, message),) = run_ranks(refused_at_once, 1, str(tmp_path / "swap"))
    assert seconds < 5 and grown < 50_000 and "120 GB" in message and "1.00 GB" in message
    assert not (tmp_path / "swap").exists()
