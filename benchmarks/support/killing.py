"""Programs that train and save until they are killed, forked from a process that has imported everything already."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from infinity.ops.crc32c import checksum
from infinity.plan.types import Kind

# What a program that lost its other rank gets to notice.
_ALONE_SECONDS = 100.0


class Stack(nn.Module):
    """Square layers, the second frozen, and a buffer: each file of a checkpoint has something to hold."""

    def __init__(self, width: int, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.layers[1].requires_grad_(False)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


@dataclass(frozen=True)
class Life:
    """How one program trains and saves. `tags`: how many names it uses in turn; 0 gives every checkpoint a new one."""

    folder: Path
    width: int
    asynchronous: bool
    tags: int
    ranks: int = 1
    nvme: bool = False

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": 3, "sub_group_size": max(self.width * self.width, 1000)}
        if self.nvme:
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(self.folder / "swap")}
        return {
            "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "log_level": "error",
            "checkpoint": {"async": self.asynchronous, "keep_last": 2, "path": str(self.folder / "saved")},
        }  # fmt: skip


def engine_of(life: Life) -> infinity.Engine:
    """The engine of a program."""
    torch.manual_seed(0)
    return infinity.initialize(Stack(life.width), life.config())[0]


def digest(engine: infinity.Engine) -> str:
    """Of all that this rank's partitions hold."""
    crc = 0
    for key in [partition.key for partition, _ in engine.store.held()]:
        if key.kind is not Kind.GRAD:
            with engine.store.read(key) as (partition,):
                assert partition.buffer is not None
                crc = checksum(partition.buffer.cpu().numpy(), crc)
    return f"{crc:08x}"


def train(engine: infinity.Engine, width: int, step: int) -> None:
    """One step on this step's data."""
    generator = torch.Generator().manual_seed(step)
    dtype = torch.bfloat16
    engine.backward(engine(torch.randn(2, width, generator=generator).to(dtype)))
    engine.step()


def live(life: Life, say: Callable[..., None]) -> None:
    """Resume, say what was found, then train and save for ever."""
    torch.set_num_threads(1)
    engine = engine_of(life)
    path, client = engine.resume()
    rank = engine.global_rank
    held = digest(engine)
    kept = client.get("digests", [held])[rank] if path else held
    say("resumed", Path(path).name if path else None, kept == held)
    while True:
        for _ in range(3 if life.asynchronous else 1):
            train(engine, life.width, engine.global_steps)
        held = digest(engine)
        digests: list[Any] = [held]
        if life.ranks > 1:
            digests = [None] * life.ranks
            torch.distributed.all_gather_object(digests, held)
        number = engine.global_steps
        tag = f"tag{number % life.tags}" if life.tags else None
        say("saving", number)
        engine.save_checkpoint(life.folder / "saved", tag, client_state={"digests": digests, "more": torch.ones(3)})
        say("saved", number)


class Program:
    """A forked program of one or two ranks, and what rank 0 of it says."""

    def __init__(self, life: Life) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._lines = b""
        reading, writing = os.pipe()
        self._pipe = reading
        self.ranks = []
        for rank in range(life.ranks):
            pid = os.fork()
            if not pid:
                _be(life, rank, port, writing if rank == 0 else -1)
            self.ranks.append(pid)
        os.close(writing)

    def hear(self, what: str, seconds: float = 60.0) -> list[Any]:
        """The next thing said of a kind; ends with an error where the program ends first."""
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" in self._lines:
                line, self._lines = self._lines.split(b"\n", 1)
                said = json.loads(line)
                if said[0] == what:
                    return list(said[1:])
            if not select.select([self._pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError(f"no '{what}' within {seconds:.0f} s")
            data = os.read(self._pipe, 1 << 16)
            if not data:
                raise RuntimeError(f"the program ended before '{what}'")
            self._lines += data

    def heard(self) -> list[list[Any]]:
        """All that it has said and nobody has asked for, to its end."""
        while data := os.read(self._pipe, 1 << 16):
            self._lines += data
        lines, self._lines = self._lines, b""
        return [json.loads(line) for line in lines.split(b"\n") if line]

    def kill(self, chance: random.Random) -> bool:
        """Kill one rank or all, and wait until none is left; whether one that was left alone ended by itself."""
        killed = self.ranks if chance.random() < 0.5 else [chance.choice(self.ranks)]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        deadline, left = time.monotonic() + _ALONE_SECONDS, set(self.ranks)
        while left and time.monotonic() < deadline:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.005)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return not left

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._pipe)


def _be(life: Life, rank: int, port: int, pipe: int) -> None:
    """A rank's life; does not return."""

    def say(*words: Any) -> None:
        if pipe >= 0:
            os.write(pipe, json.dumps(words).encode() + b"\n")

    if life.ranks > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(life.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(life.ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        # A rank that is left alone says so at length.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        live(life, say)
    except BaseException as error:
        say("error", repr(error))
        os._exit(1)
