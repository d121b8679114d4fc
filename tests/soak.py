"""A long run with everything on NVMe: what the process holds must not grow with the number of steps.

    python -m tests.soak --steps 12000

Parameters and optimizer states lie on NVMe and overlap is on. Two variants: clipped, where a step begins once the norm
is known, and unclipped, where it begins in backward. Prints a line a sample and, at the end, the growth of each variant
after the warm-up beside its limit; ends with status 1 where one is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import infinity
from tests.support.models import MLP, vector_batch

OBJECTS_MAX = 100
ANON_NBYTES_MAX = 8 << 20
# 0 is no clipping: then the optimizer step begins in backward.
VARIANTS = {"clipped": 1.0, "unclipped": 0.0}


@dataclass(frozen=True)
class Sample:
    """What the process held after a step."""

    step: int
    objects: int
    anon_nbytes: int


@dataclass(frozen=True)
class Growth:
    """From the end of the warm-up to the highest sample after it."""

    variant: str
    steps: int
    objects: int
    anon_nbytes: int
    seconds: float

    @property
    def is_bounded(self) -> bool:
        """Whether it stays within the limits of this file."""
        return self.objects <= OBJECTS_MAX and self.anon_nbytes <= ANON_NBYTES_MAX


def sample(step: int) -> Sample:
    """Count the collector's objects and the bytes of anonymous memory, once garbage is gone."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    anon_kb = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))
    return Sample(step, len(gc.get_objects()), int(anon_kb) << 10)


def run(folder: str, variant: str, *, steps: int, warm: int, every: int) -> tuple[list[Sample], Growth]:
    """Train for `steps` steps; samples from the end of the warm-up on."""
    began = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    home = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": VARIANTS[variant], "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": home, "offload_param": home, "stage3_param_persistence_threshold": 0,
        },
    }  # fmt: skip
    samples = []
    engine, *_ = infinity.initialize(model=MLP(), config=config)
    with engine:
        for step in range(1, steps + 1):
            batch = {name: value.bfloat16() for name, value in vector_batch(0, step).items()}
            engine.backward(engine(**batch))
            engine.step()
            if (step >= warm and (step - warm) % every == 0) or step == steps:
                # What a step holds while it goes on behind the program comes and goes.
                engine.synchronize()
                samples.append(sample(step))
    first, rest = samples[0], samples[1:]
    growth = Growth(
        variant, steps, objects=max(one.objects for one in rest) - first.objects,
        anon_nbytes=max(one.anon_nbytes for one in rest) - first.anon_nbytes,
        seconds=round(time.monotonic() - began, 1),
    )  # fmt: skip
    return samples, growth


def main() -> int:
    parser = argparse.ArgumentParser(description="Train long on NVMe and report what the process holds.")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--warm", type=int, default=1_000, help="steps before the first sample")
    parser.add_argument("--every", type=int, default=500, help="steps between two samples")
    parser.add_argument("--nvme-path", default=None, help="folder of the swap file (default: a temporary one)")
    options = parser.parse_args()
    bounded = True
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory(dir=options.nvme_path) as folder:
            samples, growth = run(folder, variant, steps=options.steps, warm=options.warm, every=options.every)
        for one in samples:
            print(json.dumps({"variant": variant, **asdict(one)}))
        limits = {"objects_max": OBJECTS_MAX, "anon_nbytes_max": ANON_NBYTES_MAX}
        print(json.dumps({**asdict(growth), **limits}), flush=True)
        bounded = bounded and growth.is_bounded
    return 0 if bounded else 1


if __name__ == "__main__":
    sys.exit(main())
