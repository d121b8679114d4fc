"""The first run on a real accelerator, in order: `make bench-gpu`, or `python -m tests.first_run [--json FILE]`.

    1 tests marked gpu          kernels' bits, copies beside compute, pinned memory
    2 the same, sanitized       TORCH_CUDA_SANITIZER=1: accesses of two streams without an edge
    3 compute-sanitizer         the kernel tests under NVIDIA's checker, where it is installed
    4 placements                nine at stage 3, and `ratio` 0.5, with accumulation and a loader's workers: one hash
    5 two devices               stage 3 over the device's collectives, where there are two
    6 trace                     one step of a small model as a timeline: gathers, gradients and compute side by side
    7 peers                     benchmarks/peers.py

Each step is a process of its own; its status, seconds and last lines go into the JSON. A step that fails does not stop
those after it. Without an accelerator nothing runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import infinity
from infinity.memory.tiers.device import Device
from tests.support.models import token_batch
from tests.support.oracle import CLIP, Case, OnDevice, settings, train

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("gpu", "cpu", "nvme")
STEPS = 3
ACCUMULATION = 2
_TAIL = 30


@dataclass(frozen=True)
class Step:
    """One process of the run. missing: why it cannot run here, or empty."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    missing: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a step ended. status: of its process; None if it was left out, for the reason in `tail`."""

    name: str
    command: str
    status: int | None
    seconds: float
    tail: list[str]


class Batches(Dataset[dict[str, Tensor]]):
    """The micro-batches of the oracle's case, made in a worker."""

    def __len__(self) -> int:
        return STEPS * ACCUMULATION

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return token_batch(0, index, positions=8)


class Loaded(Case):
    """The oracle's case with batches from workers, on the device."""

    def __init__(self, workers: int) -> None:
        self._batches = iter(DataLoader(Batches(), batch_size=None, num_workers=workers))

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        yield call(**{name: ids.to(call.device) for name, ids in next(self._batches).items()})


def placements(*, workers: int = 2) -> dict[str, str]:
    """The hash of a short run in each placement, by its name. workers: of the data loader."""
    found = {}
    cells = [(param, optimizer, 1.0) for param in TIERS for optimizer in TIERS]
    cells += [(param, optimizer, 0.5) for param in TIERS for optimizer in TIERS[1:]]
    for dtype in ("fp32", "bf16"):
        for param, optimizer, ratio in cells:
            with tempfile.TemporaryDirectory() as folder:
                config = settings(
                    Path(folder), param=param, optimizer=optimizer, dtype=dtype, accumulation=ACCUMULATION, clip=CLIP
                )
                config["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
                found[f"{dtype} {param} {optimizer} {ratio}"] = train(Loaded(workers), config, steps=STEPS).digest
    return found


def _placements() -> int:
    found = placements()
    for name, digest in found.items():
        print(name, digest[:16])
    hashes = {dtype: {digest for name, digest in found.items() if name.startswith(dtype)} for dtype in ("fp32", "bf16")}
    return 0 if all(len(each) == 1 for each in hashes.values()) else 1


def _ranks() -> int:
    """One rank of a stage 3 run, started by torchrun."""
    rank = int(os.environ["RANK"])
    with tempfile.TemporaryDirectory() as folder:
        config = settings(Path(folder), param="cpu", optimizer="cpu")
        print(rank, train(OnDevice(), config, rank=rank, steps=STEPS).digest)
    return 0


def _trace() -> int:
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    engine, *_ = infinity.initialize(model=model, config=settings(runs, param="cpu", optimizer="cpu", dtype="bf16"))
    with engine:
        x = torch.randn(64, 1024, dtype=torch.bfloat16, device=engine.device)
        for step in range(4):
            with engine.timeline(runs / "first_run.json") if step == 3 else nullcontext():
                engine.backward(engine(x).float().pow(2).mean())
                engine.step()
                engine.synchronize()
    return 0


PARTS: dict[str, Callable[[], int]] = {"placements": _placements, "ranks": _ranks, "trace": _trace}


def steps(device_count: int) -> list[Step]:
    """What runs, in order."""
    python = sys.executable
    tests = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/test_gpu.py")
    checker = shutil.which("compute-sanitizer")
    part = (python, "-m", "tests.first_run", "--part")
    launch = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.first_run")
    return [
        Step("tests marked gpu", tests, {}),
        Step("the same, sanitized", tests, {"TORCH_CUDA_SANITIZER": "1"}),
        Step(
            "compute-sanitizer", (checker or "compute-sanitizer", *tests, "-k", "kernel or step or norm"), {},
            missing="" if checker else "compute-sanitizer is not installed",
        ),
        Step("placements", (*part, "placements"), {}),
        Step(
            "two devices", (*launch, "--part", "ranks"), {},
            missing="" if device_count > 1 else f"it needs two devices, here is {device_count}",
        ),
        Step("trace", (*part, "trace"), {}),
        Step("peers", (python, "benchmarks/peers.py", "--ranks", "1", "--dtype", "bf16", "--folder", "."), {}),
    ]  # fmt: skip


def run(step: Step) -> Outcome:
    """Run one step to its end."""
    command = " ".join([*(f"{name}={value}" for name, value in step.environment.items()), *step.command])
    if step.missing:
        return Outcome(step.name, command, None, 0.0, [step.missing])
    begin = time.monotonic()
    ended = subprocess.run(
        step.command, cwd=ROOT, env={**os.environ, **step.environment}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    lines = ended.stdout.splitlines()[-_TAIL:]
    return Outcome(step.name, command, ended.returncode, time.monotonic() - begin, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "first_run.json")
    parser.add_argument("--part", choices=PARTS, help="run one part in this process")
    chosen = parser.parse_args(arguments)
    device = Device.detect(int(os.environ.get("LOCAL_RANK", "0")))
    if not device.is_accelerator:
        print("no accelerator on this machine: torch sees none, so nothing was run; `infinity doctor` says more")
        return 2
    if chosen.part:
        return PARTS[chosen.part]()
    outcomes = []
    for step in steps(torch.accelerator.device_count()):
        outcomes.append(run(step))
        last = outcomes[-1]
        told = "left out" if last.status is None else "ok" if last.status == 0 else f"FAILED ({last.status})"
        print(f"{told:12} {last.seconds:7.1f} s  {last.name}: {last.tail[-1] if last.tail else ''}", flush=True)
        head = {
            "command": "make bench-gpu", "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
            "python": platform.python_version(), "device": str(device.torch), "type": device.name,
        }  # fmt: skip
        chosen.json.write_text(json.dumps({**head, "steps": [asdict(each) for each in outcomes]}, indent=1) + "\n")
    return 1 if any(each.status for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
