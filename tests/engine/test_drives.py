"""Which drives hold the states, through which back end and with which checks, changes no bit of the result."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import CapacityError, ConfigError, TransferError
from infinity.memory.tiers import nvme, striping
from infinity.ops.aio import Queue
from tests.support.backends import every_backend

ROOT = Path(__file__).resolve().parents[2]


def start(path: Any, aio: dict[str, Any] | None = None, **optimizer: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    home = {"device": "none"} if path is None else {"device": "nvme", "nvme_path": path}
    zero = {
        "stage": 3, "offload_param": home, "offload_optimizer": home | optimizer,
        "stage3_param_persistence_threshold": 0, "sub_group_size": 50_000,
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "aio": aio or {},
    }
    engine, *_ = infinity.initialize(model=model, config=config)
    return engine


def train(engine: Any, steps: int = 3) -> str:
    """sha256 of weights and moments after a few steps."""
    with engine:
        for seed in range(steps):
            inputs = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
            engine.backward(engine(inputs).float().square().mean())
            engine.step()
        digest = hashlib.sha256()
        for state in (infinity.state(param) for param in engine.module.parameters()):
            for value in (state.master, state.exp_avg, state.exp_avg_sq):
                digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()


@pytest.fixture(scope="module")
def expected() -> str:
    return train(start(None))


@every_backend
@pytest.mark.parametrize("checksum", [False, "sampled", True])
def test_every_back_end_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str, backend: str, checksum: bool | str
) -> None:
    class Chosen(Queue):
        def __init__(self, **options: Any) -> None:
            super().__init__(backend, **options)

    monkeypatch.setattr(nvme, "Queue", Chosen)
    assert train(start(str(tmp_path), {"checksum": checksum})) == expected


@pytest.mark.parametrize("weights", [[], [3, 1]])
def test_several_drives_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str, weights: list[float]
) -> None:
    monkeypatch.setattr(striping, "PROBE_NBYTES", 1 << 20)
    striping.measured_weights.cache_clear()
    drives = [tmp_path / "a", tmp_path / "b"]
    engine = start([str(drive) for drive in drives], {"drive_weights": weights, "checksum": True})
    sizes = [sum(file.stat().st_size for file in drive.iterdir()) for drive in drives]
    # Whole pages on each drive, and no byte more than without a second one.
    assert all(sizes) and not any(size % 4096 for size in sizes)
    assert sum(sizes) == engine.plan.nvme_nbytes
    assert train(engine) == expected
    assert not any(list(drive.iterdir()) for drive in drives)
    striping.measured_weights.cache_clear()


def test_a_bit_that_flips_on_the_drive_ends_the_step(tmp_path: Path) -> None:
    engine = start(str(tmp_path), {"checksum": True})
    (path,) = tmp_path.iterdir()
    with open(path, "r+b") as file:
        content = bytearray(file.read())
        for at in range(100, len(content), 4096):
            content[at] ^= 1
        file.seek(0)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    with pytest.raises(TransferError, match="CRC-32C"):
        train(engine)


def test_lists_that_differ_and_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(ConfigError, match=r"differ .*give both the same folder"):
        start(paths, nvme_path=paths[:1])
    with pytest.raises(ConfigError, match="drive_weights has 3 numbers but nvme_path names 2 folders"):
        start(paths, {"drive_weights": [1, 2, 3]})
    assert not list(tmp_path.iterdir())


def test_a_drive_too_small_for_the_plan_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    class Space:
        f_blocks, f_bavail, f_frsize = 100, 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Space() if str(tmp_path) in str(path) else real(path))
    with pytest.raises(CapacityError, match=r"are free"):
        start([str(tmp_path / "a"), str(tmp_path / "b")], {"drive_weights": [1, 1]})
    assert not list(tmp_path.iterdir())


KEYS = {
    "zero_optimization.offload_optimizer.nvme_path": {"offload_optimizer": True},
    "zero_optimization.offload_param.nvme_path": {"offload_param": True},
    "activation_checkpointing.offload.nvme_path": {},
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("file", r"file is not a folder"), ("file/below", r"file is not a folder"), ("/proc", r"/proc keeps no files"),
        ("/proc/below", r"/proc keeps no files"), ("locked", r"may not write to .*locked"),
        ("locked/below", r"may not write to .*locked"),
        ("new/" + "n" * 256, r"a name in it has 256 bytes, and .* takes 255"),
        ("circle/below", r"circle is not a folder"),
    ],
)  # fmt: skip
def test_a_folder_that_holds_no_files_is_refused_by_its_key(
    key: str, folder: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the parent is root, who may write anywhere, the answer of the system is played."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path) and access(path, mode))
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    home = {"device": "nvme", "nvme_path": os.path.join(tmp_path, folder)}
    zero = {"stage": 3, **{name: home for name in KEYS[key]}}
    config = {"zero_optimization": zero, "activation_checkpointing": {} if KEYS[key] else {"offload": home, "every": 1}}
    told = rf"^{key}: .* cannot hold swap files: .*{why}\. Name a folder on a drive that this process may write to$"
    with pytest.raises(ConfigError, match=told):
        infinity.initialize(model=nn.Linear(4, 4), config=config)
    with pytest.raises(ConfigError, match=told), infinity.Init(config=config):
        pass
    assert sorted(tmp_path.rglob("*")) == [tmp_path / name for name in ("circle", "file", "locked")]


def test_a_folder_that_cannot_be_made_after_all_is_no_raw_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may refuse what its modes allow."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(ConfigError, match=r"nvme_path: .*drive cannot be made: Read-only file system\. Name a folder"):
        start(str(tmp_path / "drive"))


WITHOUT_STANDARD_DESCRIPTORS = """
import json, os, sys
import torch
import infinity
drive = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_optimizer": drive}}
with infinity.initialize(model=torch.nn.Linear(4, 4), config=config)[0]:
    found = {number: os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
with open(sys.argv[2], "w") as file:
    json.dump(found, file)
"""


def test_no_file_of_ours_gets_the_number_of_a_standard_descriptor(tmp_path: Path) -> None:
    """What is printed would go into a swap file or a socket."""
    script, told = tmp_path / "script.py", tmp_path / "told.json"
    script.write_text(WITHOUT_STANDARD_DESCRIPTORS)
    words = [sys.executable, script, tmp_path / "drive", told]
    subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found = json.loads(told.read_text())
    assert any("infinity-swap-" in path for path in found.values())
    assert {found[number] for number in ("0", "1", "2")} == {os.devnull}
