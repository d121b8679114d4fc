"""Claim: a checkpoint is written at the drive's own bandwidth, in bounded memory, and read back in bounded memory.

    python benchmarks/checkpoint.py [--folder DIR] [--numel N] [--tiers nvme,cpu] [--only infinity]

Perceptrons of 700 M parameters in bf16 on one rank, after one step: 12 bytes a parameter. The drive's bandwidth is that
of as many bytes, written by the same queue into a new file, before and after each save; of the rounds the median
counts. torch.save and torch.distributed.checkpoint write tensors of the same names and sizes that lie in memory, and
sync them.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from support.machine import MIB, describe, median, reset_peak, resident_nbytes
from support.table import Table, claim
from torch import Tensor, nn

import infinity
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.tiers.pinned import trim
from infinity.ops.aio import File, Queue

MEMORY_MAX = 256 * MIB
TIME_MAX = 1.15
WIDTH = 4096
BYTES_A_PARAMETER = 12


class Layers(nn.Module):
    """Residual linear layers of `width` x `width`."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.float().square().mean()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--numel", type=int, default=700_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiers", default="cpu,nvme", help="where parameters and states live")
    parser.add_argument("--only", default="infinity,torch.save,distributed.checkpoint")
    given = parser.parse_args()
    print(describe())
    nbytes = 0
    table = Table(
        "GB:.2f", "save s:.1f", "bytes / bandwidth:.2f", "save, extra MB:.0f", "load s:.1f", "load, extra MB:.0f",
        name_width=24,
    )  # fmt: skip
    seconds = {}
    good = True
    for tier in given.tiers.split(",") if "infinity" in given.only else ():
        with tempfile.TemporaryDirectory(dir=given.folder) as folder, _process() as pool:
            found = pool.apply(_ours, (tier, given.numel, folder, given.rounds))
        nbytes = found["nbytes"]
        # The others save from memory, so that is what they are compared with.
        if tier == "cpu" or "infinity" not in seconds:
            seconds["infinity"] = found["save"]
        ratio = found["ratio"]
        table.row(
            f"infinity, {tier}", nbytes / 1e9, found["save"], ratio, found["save_extra"] / MIB, found["load"],
            found["load_extra"] / MIB, note=f"drive {found['bandwidth'] / 1e9:.2f} GB/s",
        )  # fmt: skip
        good &= max(found["save_extra"], found["load_extra"]) <= MEMORY_MAX
        if tier == "cpu":
            claim(f"save time {ratio:.2f} <= {TIME_MAX} of bytes over bandwidth", ratio <= TIME_MAX)
    for name, save in (("torch.save", _torch_save), ("distributed.checkpoint", _distributed)):
        if name in given.only:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder, _process() as pool:
                seconds[name] = pool.apply(save, (given.numel, folder))
            ratio = seconds[name] / seconds["infinity"] if "infinity" in seconds else None
            note = f"{ratio:.2f} times as long as infinity" if ratio is not None else ""
            table.row(name, given.numel * BYTES_A_PARAMETER / 1e9, seconds[name], None, None, None, None, note=note)
    if "infinity" in given.only:
        claim("extra memory of save and load <= 256 MB", good)


def _process() -> Any:
    return multiprocessing.get_context("spawn").Pool(1)


def _layers(numel: int) -> tuple[int, int]:
    width = WIDTH
    while width > 64 and numel < 4 * width * width:
        width //= 2
    return max(round(numel / width / width), 1), width


def _ours(tier: str, numel: int, folder: str, rounds: int) -> dict[str, float]:
    count, width = _layers(numel)
    place = {"device": tier, "pin_memory": False, **({"nvme_path": folder} if tier == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "error",
        "zero_optimization": {
            "stage": 3, "offload_param": place, "offload_optimizer": place, "stage3_max_live_parameters": 60_000_000,
            "stage3_prefetch_bucket_size": 20_000_000,
        },
    }  # fmt: skip

    def make() -> Any:
        torch.manual_seed(0)
        with infinity.Init(config=config):
            model = Layers(count, width)
        return infinity.initialize(model=model, config=config)[0]

    engine = make()
    with engine:
        engine.backward(engine(torch.randn(2, width, dtype=torch.bfloat16)))
        engine.step()
        engine.synchronize()
        nbytes = sum(piece.nbytes for piece in engine.plan.partitions if piece.key.kind.value != "grad")
        saves, plain, extras = [], [_seconds_of_writing(Path(folder), nbytes)], []
        for at in range(rounds):
            if at:
                # Replacing a checkpoint would also remove its files, which takes a drive its time.
                shutil.rmtree(Path(folder) / "timed")
            with _Extra() as extra:
                began = time.perf_counter()
                engine.save_checkpoint(folder, tag="timed")
                saves.append(time.perf_counter() - began)
            extras.append(extra.nbytes)
            plain.append(_seconds_of_writing(Path(folder), nbytes))
        # The drive's speed drifts: each save is compared with what came before and after it.
        around = [(one + other) / 2 for one, other in pairwise(plain)]
        found = {
            "save": median(saves), "ratio": median(save / each for save, each in zip(saves, around, strict=True)),
            "bandwidth": nbytes / median(plain), "save_extra": max(extras),
        }  # fmt: skip
        with _Extra() as extra:
            began = time.perf_counter()
            engine.load_checkpoint(folder)
            engine.synchronize()
            found["load"] = time.perf_counter() - began
        found["load_extra"] = extra.nbytes
    return {**found, "nbytes": nbytes}


class _Extra:
    """Resident memory at its peak in a block, above that at its beginning."""

    def __enter__(self) -> _Extra:
        gc.collect()
        trim()
        self._before = resident_nbytes()
        reset_peak()
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = resident_nbytes(peak=True) - self._before


def _seconds_of_writing(folder: Path, nbytes: int) -> float:
    """A new file, written and synced."""
    # Neither zeros nor few enough to stay in a cache: both are faster than what a save has to move.
    block, room = 4 * MIB, 512 * MIB
    buffer = page_aligned(room).random_()
    path = folder / "bandwidth"
    began = time.perf_counter()
    with File.create(path, nbytes) as file, Queue() as queue:
        for at in range(0, nbytes, block):
            queue.write(file, at, buffer[at % room :][: min(block, nbytes - at)])
        queue.close()
        file.sync()
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def _tensors(numel: int) -> dict[str, Tensor]:
    count, width = _layers(numel)
    kinds = {"param": torch.bfloat16, "remainder": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    return {
        f"layers.{layer}.{kind}": torch.ones(width, width, dtype=dtype)
        for layer in range(count)
        for kind, dtype in kinds.items()
    }


def _torch_save(numel: int, folder: str) -> float:
    tensors = _tensors(numel)
    began = time.perf_counter()
    with open(Path(folder) / "state.pt", "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def _distributed(numel: int, folder: str) -> float:
    tensors = _tensors(numel)
    began = time.perf_counter()
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(Path(folder) / "dcp"), no_dist=True)
    seconds = time.perf_counter() - began
    shutil.rmtree(Path(folder) / "dcp")
    return seconds


if __name__ == "__main__":
    main()
