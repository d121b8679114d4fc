"""Peak device memory against the plan: `python -m tests.accelerator_memory [--json FILE]`.

Each case trains in a process of its own on the simulated accelerator, whose allocator counts what it has reserved, as
CUDA's does. The plan's bytes on the device are compared with the peak; activations, which no plan has, are a few
kilobytes here. The step runs on the fallback in torch operations, whose temporaries (27 MB, whatever the model) no plan
has either: the CUDA kernels need none.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import infinity
from infinity.plan.types import Tier
from tests.support import accelerator
from tests.support.oracle import settings
from tests.support.simulated_device import engines_use
from tests.support.spawn import run_ranks

WIDTH = 1024
# Homes, accumulation, layers.
CASES = (("gpu", 1, 60), ("gpu", 2, 60), ("cpu", 1, 30), ("cpu", 2, 30), ("nvme", 1, 30), ("nvme", 2, 30))


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


@dataclass(frozen=True)
class Peak:
    """Bytes on the device; `share`: what was reserved at most, of the plan."""

    homes: str
    accumulation: int
    planned: int
    allocated: int
    reserved: int
    share: float


def run(rank: int, world: int, homes: str, accumulation: int, layers: int) -> Peak:
    """Two steps of bf16 at stage 3."""
    accelerator.load()
    accelerator.configure(lines=False)
    accelerator.reset()
    bounds = {
        "sub_group_size": 4_000_000, "stage3_max_live_parameters": 8_000_000, "stage3_prefetch_bucket_size": 3_000_000
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, engines_use():
        torch.manual_seed(0)
        config = settings(
            folder, param=homes, optimizer=homes, dtype="bf16", accumulation=accumulation, zero=bounds
        )  # fmt: skip
        engine, *_ = infinity.initialize(model=Layers(layers), config=config)
        with engine:
            for _ in range(2 * accumulation):
                engine.backward(engine(torch.randn(4, WIDTH, dtype=torch.bfloat16).to(engine.device)))
                engine.step()
            engine.synchronize()
            planned = engine.plan.nbytes_by_tier()[Tier.GPU]
        stats = accelerator.memory_stats()
    reserved = stats["reserved_peak"]
    return Peak(homes, accumulation, planned, stats["allocated_peak"], reserved, reserved / planned)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    rows: list[Peak] = []
    for case in CASES:
        rows += run_ranks(run, 1, *case)
        last = rows[-1]
        print(
            f"{last.homes}, accumulation {last.accumulation}: planned {last.planned / 1e6:.1f} MB, allocated at most "
            f"{last.allocated / 1e6:.1f}, reserved {last.reserved / 1e6:.1f} ({last.share:.3f})",
            flush=True,
        )
    if chosen.json:
        head = {"command": "python -m tests.accelerator_memory", "torch": torch.__version__, "limit": 1.05}
        chosen.json.write_text(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
