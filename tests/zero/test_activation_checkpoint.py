"""Blocks computed again by configuration, and checkpoints in CPU memory and on NVMe: the same bits, nothing left."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.memory.activation_tier import ActivationTier
from tests.engine.cases import CASES
from tests.support.cells import kept
from tests.support.hub import hf_model, lora
from tests.support.models import token_batch
from tests.support.oracle import Case, join, settings, swap_files, train

WIDTH, LAYERS, ROWS = 32, 5, 64
# Bytes of one block's input in fp32.
INPUT_NBYTES = ROWS * WIDTH * 4


class Block(nn.Module):
    """A residual feed-forward layer with dropout; `fails` raises in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.fails = False
        self.calls = 0

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        if self.fails:
            raise ArithmeticError("a block that fails")
        inner = self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x + (inner if scale is None else inner * scale)


class Model(nn.Module):
    """Blocks between two matrices; the loss is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, scale=x.mean(-1, keepdim=True))
        return self.leave(x).float().square().mean()


class WithDropout(Case):
    """Every rank and micro-step has dropout of its own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Model()

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        torch.manual_seed(1000 * rank + micro)
        yield call(torch.randn(ROWS, WIDTH).to(self._dtype))


def wish(home: str, folder: Path | str, **more: Any) -> dict[str, Any]:
    """The section for checkpoints of every block at a home; "gpu" is plain checkpointing."""
    if home == "gpu":
        return {"activation_checkpointing": {"every": 1, **more}}
    offload = {"device": home, "nvme_path": str(folder), "buffer_count": 2}
    return {"activation_checkpointing": {"every": 1, "offload": offload, **more}}


def parity(rank: int, world: int, folder: str, stage: int) -> list[tuple[str, str, list[float]]]:
    """(label, digest of weights and moments, norms) of each cell."""
    join(world)
    found = []
    for dtype, home in itertools.product(("fp32", "bf16"), ("none", "gpu", "cpu", "nvme")):
        section = {} if home == "none" else wish(home, folder)
        config = settings(folder, stage=stage, dtype=dtype, accumulation=2, clip=0.05, **section)
        case = WithDropout(torch.bfloat16 if dtype == "bf16" else torch.float32)
        result = train(case, config, rank=rank, steps=2)
        found.append((f"{dtype} {home}", result.digest, result.norms))
    return found


@pytest.mark.parametrize(("stage", "world"), kept([(0, 1), (0, 2), (3, 1), (3, 2)], [(3, 2)]))
def test_checkpoints_on_any_tier_give_the_same_bits_with_dropout(rank_pools, tmp_path, stage, world):
    for cells in rank_pools[world].run(parity, str(tmp_path), stage):
        for same in (cells[:4], cells[4:]):
            # The norms are those of all gradients, in full precision.
            assert len({(digest, *norms) for _, digest, norms in same}) == 1, [cell[0] for cell in same]
        assert cells[0][1] != cells[4][1]
    assert not swap_files(tmp_path)


def twice(engine: Engine, loss: Tensor) -> None:
    engine.backward(loss / 2, retain_graph=True)
    engine.backward(loss / 2)


# Name of the case, whether its blocks are computed again by configuration, and whether backward runs twice.
HABITS = [
    ("a layer used three times", 1, False), ("two forwards, one backward", 1, False),
    ("two forwards, two backwards", 1, False), ("no_grad in part", 1, False), ("dataclass in and out", 1, False),
    ("a layer used three times", 1, True), ("evaluation between steps", 1, False),
    ("checkpointed, reentrant", 0, False), ("checkpointed, not reentrant", 0, False),
    ("checkpointed together, reentrant", 0, False), ("checkpointed together, not reentrant", 0, False),
    ("checkpointed, not reentrant", 0, True), ("checkpointed, not reentrant", 1, False),
]  # fmt: skip


def habits(rank: int, world: int, folder: str, stage: int) -> list[tuple[str, int, int, bool, bool]]:
    """(name, every, tensors that went to the tier, whether the bits are those without it, whether it is empty)."""
    join(world)
    puts = []
    put = ActivationTier.put
    ActivationTier.put = lambda self, tensor: puts.append(tensor.shape) or put(self, tensor)  # type: ignore
    found = []
    try:
        for name, every, again in HABITS:
            digests, left = [], list[int]()
            for section in ({}, wish("nvme", folder, every=every)):
                puts.clear()
                config = settings(folder, stage=stage, accumulation=2, **section)
                options = {"rank": rank, "steps": 3, **({"backward": twice} if again else {})}
                digests.append(train(CASES[name](), config, look=partial(_look, left), **options).digest)
            found.append((name, every, len(puts), digests[0] == digests[1], not any(left)))
    finally:
        ActivationTier.put = put
    return found


def _look(left: list[int], engine: Engine) -> None:
    left.extend(_held(engine).values())


def _held(engine: Engine) -> dict[str, int]:
    """Bytes of checkpoints by tier, once the drive has let go of what is no longer wanted."""
    until = time.monotonic() + 5
    while True:
        held = {tier: kinds.get("activation", 0) for tier, kinds in engine.memory().now.items()}
        if not any(held.values()) or time.monotonic() > until:
            return held
        time.sleep(0.01)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 2), (3, 2)])
def test_models_of_every_habit_are_served(rank_pools, tmp_path, stage, world):
    for rows in rank_pools[world].run(habits, str(tmp_path), stage):
        for row in rows:
            assert row[2] >= 3, row
            assert row[3:] == (True, True), row


def adapters(rank: int, world: int, folder: str, stage: int) -> list[str]:
    """A digest with plain checkpointing and one with checkpoints on NVMe, reentrant and not, and by configuration."""
    join(world)
    found = []
    for own, home in itertools.product((True, False, None), ("gpu", "nvme")):
        model = hf_model("llama")
        model.config.use_cache = True
        torch.manual_seed(3)
        adapted = lora(model, lora_alpha=8, target_modules=["q_proj", "up_proj"], lora_dropout=0.1).train()
        if own is not None:
            adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": own})
            adapted.enable_input_require_grads()
        section = wish(home, folder, every=int(own is None))
        engine, *_ = infinity.initialize(model=adapted, config=settings(folder, stage=stage, **section))
        with engine:
            for step in range(2):
                torch.manual_seed(10 * step + rank)
                engine.backward(engine(**token_batch(rank, step)).loss)
                engine.step()
            assert not any(_held(engine).values())
            kept = engine.memory().peak["nvme"].get("activation", 0)
            assert bool(kept) == (home == "nvme"), kept
            masters = [infinity.state(p).master for p in adapted.parameters() if p.requires_grad]
        found.append(str([float(master.double().abs().sum()) for master in masters]))
    return found


@pytest.mark.parametrize("stage", kept([1, 3], [3]))
def test_adapters_on_frozen_norms_pass_torchs_determinism_check(rank_pools, tmp_path, stage):
    for digests in rank_pools[2].run(adapters, str(tmp_path), stage):
        assert len(set(digests)) == 1
