"""What the streams of one training pass do, and how long it would take: `python -m tests.stream_books [--json FILE]`.

One forward and backward runs on the simulated accelerator, whose log has every operation that a stream was given and
every stop of the host. Durations are then assigned (a layer of Llama 8B: 8.7 ms for a unit's parameters up or its
gradients down, 7 ms forward, 17.5 ms backward), and the schedule is computed in virtual time. The pass overlaps well if
it takes little longer than the busiest of compute, copies up and copies down.

The host never learns by asking that a copy is over, as if it were far ahead of the device: what it waits for, it stops
for. Drives take no time.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import infinity
from infinity.memory.store import TieredStore
from infinity.memory.tiers import device as device_module
from infinity.ops.transfer import StreamTransfer
from infinity.plan.types import Key
from tests.support import accelerator
from tests.support.accelerator.makespan import Schedule, makespan
from tests.support.simulated_device import Communicating, engines_use
from tests.support.spawn import RankPool

UNITS = 32
MATRICES = 7
WIDTH = 64
# Seconds of a unit: its parameters up or its gradients down, its forward, its backward; what queueing costs the host.
COPY, FORWARD, BACKWARD, SUBMISSION = 8.7e-3, 7e-3, 17.5e-3, 1e-5
# Of any other operation on the device.
SMALL = 5e-5
PARAM_NBYTES = MATRICES * WIDTH * WIDTH * 2
LAYER_NBYTES = 436 * 10**6


class Layers(nn.Module):
    """Units of several matrices, as a layer of Llama has: each makes one product in forward, two in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES))) for _ in range(UNITS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


@dataclass(frozen=True)
class Books:
    """What one pass did. seconds: by compute, "copy up" and "copy down". share: the busiest of them of the pass.

    stops: of the host inside forward and backward. early_waits: waits of the compute stream for an upward copy of
    another unit than the one that it computes with next. down_waits: waits for gradients on their way down that began
    after the unit before last.
    """

    param: str
    optimizer: str
    accumulation: int
    ranks: int
    share: float
    makespan: float
    seconds: dict[str, float]
    stops: int
    stops_a_unit: float
    early_waits: int
    down_waits: int
    races: int


def run(rank: int, ranks: int, param: str, optimizer: str, accumulation: int) -> Books:
    """Train two steps, then keep the books of one pass."""
    accelerator.load()
    accelerator.configure()
    accelerator.reset()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keeping = False
    asked = StreamTransfer.done

    def done(transfer: StreamTransfer) -> bool:
        return not keeping and asked(transfer)

    def readable_now(store: TieredStore, key: Key) -> bool:
        if store.in_memory(key):
            with store.read(key):
                return True
        return False

    with (
        tempfile.TemporaryDirectory() as folder,
        engines_use(Communicating),
        patch.object(StreamTransfer, "done", done),
        patch.object(TieredStore, "readable_now", readable_now),
        # Gradients on their way down are bounded in the proportion of a layer of 436 MB.
        patch.object(device_module, "HELD_NBYTES_MIN", device_module.HELD_NBYTES_MIN * PARAM_NBYTES // LAYER_NBYTES),
    ):
        engine, *_ = infinity.initialize(model=Layers(), config=config(folder, param, optimizer, accumulation, ranks))
        with engine:
            x = torch.randn(4, WIDTH, dtype=torch.bfloat16).to(engine.device)
            for step in range(3):
                for micro in range(accumulation):
                    last = step == 2 and micro == accumulation - 1
                    if last:
                        engine.synchronize()
                        torch.accelerator.synchronize()
                        accelerator.reset()
                        keeping = True
                    engine.backward(engine(x))
                    if last:
                        keeping = False
                        log, races = accelerator.log(), accelerator.races()
                    engine.step()
    return books(log, len(races), param, optimizer, accumulation, ranks)


def config(folder: str, param: str, optimizer: str, accumulation: int, ranks: int) -> dict[str, Any]:
    """Each layer is a unit and a sub-group; two are gathered ahead."""
    numel = MATRICES * WIDTH * WIDTH
    return {
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 4 * numel,
            "stage3_prefetch_bucket_size": 2 * numel, "sub_group_size": numel,
            "offload_param": {"device": param, "nvme_path": folder},
            "offload_optimizer": {"device": optimizer, "nvme_path": folder},
        },
        "bf16": {"enabled": True}, "gradient_clipping": 1.0, "gradient_accumulation_steps": accumulation,
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "log_level": "error",
    }  # fmt: skip


def books(
    log: Sequence[accelerator.Operation], races: int, param: str, optimizer: str, accumulation: int, ranks: int
) -> Books:
    """Assign the durations and compute the schedule."""
    products = [each.id for each in log if each.kind == "operator" and each.name == "aten::mm"]
    forward = set(products[: UNITS * MATRICES])

    def seconds(each: accelerator.Operation) -> float:
        if each.kind in ("copy up", "copy down"):
            return COPY * each.nbytes * ranks / PARAM_NBYTES if each.nbytes > 64 else SMALL
        if each.kind != "operator":
            return 0.0
        if each.id in forward:
            return FORWARD / MATRICES
        return BACKWARD / MATRICES / 2 if each.id in set(products) else SMALL

    schedule: Schedule = makespan(log, seconds, submission=SUBMISSION)
    spent: Counter[str] = Counter()
    for each in log:
        name = "compute" if each.kind == "operator" else each.kind
        spent[name] += seconds(each)
    busiest = max(spent[name] for name in ("compute", "copy up", "copy down"))
    stops = sum(each.kind == "host wait" for each in log)
    early, down = waits(log, set(products))
    return Books(
        param, optimizer, accumulation, ranks, busiest / schedule.seconds, schedule.seconds,
        {name: spent[name] for name in ("compute", "copy up", "copy down")}, stops, stops / (2 * UNITS), early, down,
        races,
    )  # fmt: skip


def waits(log: Sequence[accelerator.Operation], products: set[int]) -> tuple[int, int]:
    """(waits of the compute stream for upward copies before it computes with the unit of an earlier one, waits for
    downward copies of the unit that was computed last); see `Books`.
    """
    # The copy before each record, by the record; of downward copies, how many products had been queued by then.
    latest: dict[int, accelerator.Operation] = {}
    copy_of: dict[int, accelerator.Operation] = {}
    queued_at: dict[int, int] = {}
    early = down = queued = 0
    compute = next(each.stream for each in log if each.id in products)
    unused = False
    for each in log:
        if each.kind in ("copy up", "copy down"):
            latest[each.stream] = each
            queued_at[each.id] = queued
        elif each.kind == "record" and each.stream in latest:
            copy_of[each.id] = latest[each.stream]
        elif each.id in products:
            queued, unused = queued + 1, False
        elif each.kind == "wait" and each.stream == compute:
            for copy in (copy_of[other] for other in each.waits if other in copy_of):
                if copy.kind == "copy up":
                    early += unused
                    unused = True
                elif queued - queued_at[copy.id] < 2 * MATRICES and queued < len(products):
                    down += 1
    return early, down


CASES = (
    ("none", "none", 1), ("cpu", "cpu", 1), ("cpu", "cpu", 2), ("cpu", "nvme", 1), ("nvme", "nvme", 1),
    ("nvme", "nvme", 2),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    chosen = parser.parse_args()
    rows: list[Books] = []
    for ranks in chosen.ranks:
        with RankPool(ranks) as pool:
            for case in CASES:
                rows.append(pool.run(run, *case)[0])
                print(_line(rows[-1]), flush=True)
    if chosen.json:
        head = {
            "command": "python -m tests.stream_books", "torch": torch.__version__, "python": platform.python_version(),
            "durations": {"copy": COPY, "forward": FORWARD, "backward": BACKWARD, "submission": SUBMISSION},
        }  # fmt: skip
        chosen.json.write_text(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def _line(row: Books) -> str:
    times = ", ".join(f"{name} {1e3 * each:.0f} ms" for name, each in row.seconds.items())
    return (
        f"{row.ranks} rank(s), parameters {row.param}, states {row.optimizer}, accumulation {row.accumulation}: "
        f"busiest / pass {row.share:.3f} ({1e3 * row.makespan:.0f} ms; {times}); host stops {row.stops} "
        f"({row.stops_a_unit:.2f} a unit and direction); waits out of turn {row.early_waits} up, {row.down_waits} "
        f"down; {row.races} races"
    )


if __name__ == "__main__":
    main()
