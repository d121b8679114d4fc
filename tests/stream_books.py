"""What the streams of one training pass do, and how long it would take: `python -m tests.stream_books [--json FILE]`.

One forward and backward runs on the simulated accelerator, whose log has every operation that a stream was given and
every stop of the host. Durations are then assigned (a layer of Llama 8B: 8.7 ms for a unit's parameters up or its
gradients down, 7 ms forward, 17.5 ms backward), and the schedule is computed in virtual time. The pass overlaps well if
it takes little longer than the busiest of compute, copies up and copies down.

The host never learns by asking that a copy is over, as if it were far ahead of the device: what it waits for, it stops
for. Drives take no time.

Where parameters are whole on the device and states lie on the CPU, a book of a step with the next forward shows how
much of them overlaps: stepping a unit takes the CPU 28 ms (26 bytes an element at 200 GB/s).
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.memory.partition import Partition
from infinity.memory.store import TieredStore
from infinity.memory.tiers import device as device_module
from infinity.memory.tiers.device import StreamTransfer
from infinity.memory.transaction import AccessControl
from infinity.ops.rules import Piece
from infinity.optim import update_rules
from infinity.plan.layout import SubGroup
from infinity.plan.plan import Plan
from infinity.plan.types import Key, Kind
from infinity.step.update import SubGroupUpdater
from tests.support import accelerator
from tests.support.accelerator.makespan import Schedule, makespan
from tests.support.simulated_device import Communicating, engines_use
from tests.support.spawn import RankPool

UNITS = 32
MATRICES = 7
WIDTH = 64
# Seconds of a unit: its parameters up or its gradients down, its forward, its backward; what queueing costs the host.
COPY, FORWARD, BACKWARD, SUBMISSION = 8.7e-3, 7e-3, 17.5e-3, 1e-5
# Of a unit's step on the CPU.
STEP = 28e-3
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


@dataclass(frozen=True)
class StepBooks:
    """What one step and the forward after it did. seconds: by "step" (the CPU's), "compute", "copy up" and "copy down".
    share: the busiest of them of both. returned: when `step()` returned.
    """

    stage: int
    ranks: int
    share: float
    makespan: float
    returned: float
    seconds: dict[str, float]
    races: int


def run(rank: int, ranks: int, param: str, optimizer: str, accumulation: int) -> Books:
    """Train two steps, then keep the books of one pass."""
    keeping = threading.Event()
    with training(keeping, param, optimizer, accumulation, ranks, stage=3) as engine:
        x = torch.randn(4, WIDTH, dtype=torch.bfloat16).to(engine.device)
        for step in range(3):
            for micro in range(accumulation):
                last = step == 2 and micro == accumulation - 1
                if last:
                    engine.synchronize()
                    torch.accelerator.synchronize()
                    accelerator.reset()
                    keeping.set()
                engine.backward(engine(x))
                if last:
                    keeping.clear()
                    log, races = accelerator.log(), accelerator.races()
                engine.step()
    return books(log, len(races), param, optimizer, accumulation, ranks)


def run_step(rank: int, ranks: int, stage: int) -> StepBooks:
    """Train two steps, then keep the books of the third and of the forward after it."""
    keeping = threading.Event()
    with training(keeping, "none", "cpu", 1, ranks, stage=stage) as engine:
        x = torch.randn(4, WIDTH, dtype=torch.bfloat16).to(engine.device)
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        engine.backward(engine(x))
        engine.synchronize()
        torch.accelerator.synchronize()
        turns = Turns(engine.plan)
        with turns.kept():
            accelerator.reset()
            keeping.set()
            engine.step()
            turns.mark("returned")
            engine(x)
            keeping.clear()
            log, races = accelerator.log(), accelerator.races()
    return step_books(log, len(races), engine.plan, stage, ranks)


@contextmanager
def training(
    keeping: threading.Event, param: str, optimizer: str, accumulation: int, ranks: int, *, stage: int
) -> Iterator[Engine]:
    """An engine on the accelerator. While `keeping` is set, no question tells it that a copy is over."""
    accelerator.load()
    accelerator.configure()
    accelerator.reset()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    asked = StreamTransfer.done

    def done(transfer: StreamTransfer) -> bool:
        return not keeping.is_set() and asked(transfer)

    def readable_now(store: TieredStore, key: Key) -> bool:
        if store.in_memory(key) and not store.access.reserved(key):
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
        settings = config(folder, param, optimizer, accumulation, stage)
        engine, *_ = infinity.initialize(model=Layers(), config=settings)
        with engine:
            yield engine


def config(folder: str, param: str, optimizer: str, accumulation: int, stage: int) -> dict[str, Any]:
    """Each layer is a unit and a sub-group; two are gathered ahead."""
    numel = MATRICES * WIDTH * WIDTH
    return {
        "zero_optimization": {
            "stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 4 * numel,
            "stage3_prefetch_bucket_size": 2 * numel, "sub_group_size": numel,
            "offload_param": {"device": param, "nvme_path": folder},
            "offload_optimizer": {"device": optimizer, "nvme_path": folder},
        },
        "bf16": {"enabled": True}, "gradient_clipping": 1.0, "gradient_accumulation_steps": accumulation,
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "log_level": "error",
    }  # fmt: skip


class Turns:
    """Marks in the log where sub-groups are stepped, and where the program has a unit's partition.

    The thread that steps behind the program takes a sub-group only when the program waits for it: so the log has the
    order of a step that takes longer than the program, and no other thread queues meanwhile.
    """

    def __init__(self, plan: Plan) -> None:
        self._turn = {index: at for at, index in enumerate(plan.step_order)}
        self._last = {piece.unit: self._turn[group.index] for group in plan.sub_groups for piece in group.slices}
        self._wanted = -1
        self._changed = threading.Condition()
        self._place = torch.zeros(1, dtype=torch.uint8)

    def mark(self, name: str) -> None:
        """Put a name into the log."""
        accelerator.host_access(self._place, write=False, name=name)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block with the marks."""
        update, wait, read = SubGroupUpdater.update, AccessControl.wait_for_others, TieredStore.read
        step = update_rules.adam_step

        def stepping(pieces: Sequence[Piece], **options: Any) -> Any:
            self.mark(f"steps {sum(piece.param.numel() for piece in pieces)}")
            return step(pieces, **options)

        def updating(updater: SubGroupUpdater, group: SubGroup, context: Any, by: Any) -> None:
            if by is not None:
                with self._changed:
                    self._changed.wait_for(lambda: self._wanted >= self._turn[group.index])
            self.mark("behind begins" if by is not None else "program begins")
            update(updater, group, context, by)
            self.mark(f"ends {group.index}")

        def waiting(access: AccessControl, by: Any, cause: str, key: Key | None, *saver: Any) -> None:
            if by is None and key is not None:
                self._want(self._last[key.index])
            wait(access, by, cause, key, *saver)

        @contextmanager
        def reading(store: TieredStore, *keys: Key, by: Any = None, wait: bool = True) -> Iterator[list[Partition]]:
            with read(store, *keys, by=by, wait=wait) as held:
                if by is None and len(keys) == 1 and keys[0].kind is Kind.PARAM:
                    self.mark(f"has {keys[0].index}")
                yield held

        with ExitStack() as patches:
            patches.callback(self._want, len(self._turn))
            for owner, name, marking in (
                (SubGroupUpdater, "update", updating), (AccessControl, "wait_for_others", waiting),
                (TieredStore, "read", reading), (update_rules, "adam_step", stepping),
            ):  # fmt: skip
                patches.enter_context(patch.object(owner, name, marking))
            yield

    def _want(self, turn: int) -> None:
        with self._changed:
            self._wanted = max(self._wanted, turn)
            self._changed.notify_all()


def step_books(log: Sequence[accelerator.Operation], races: int, plan: Plan, stage: int, ranks: int) -> StepBooks:
    """Assign the durations and compute the schedule of a step and a forward. See `Turns`."""
    groups = {f"ends {group.index}": group for group in plan.sub_groups}
    behind: set[int] = set()
    # By the mark that the program has a unit's partition, the end of the unit's step.
    after: dict[int, int] = {}
    stepped: dict[int, int] = {}
    inside = False
    for each in log:
        inside = inside or each.name == "behind begins"
        if inside:
            behind.add(each.id)
        if each.name in groups:
            inside = False
            stepped.update({f"has {piece.unit}": each.id for piece in groups[each.name].slices})
        elif each.name in stepped:
            after[each.id] = stepped[each.name]

    def seconds(each: accelerator.Operation) -> float:
        if each.kind in ("copy up", "copy down"):
            return COPY * each.nbytes * ranks / PARAM_NBYTES if each.nbytes > 64 else SMALL
        if each.kind == "operator":
            return FORWARD / MATRICES if each.name == "aten::mm" else SMALL
        numel = int(each.name.removeprefix("steps ")) if each.name.startswith("steps ") else 0
        return STEP * numel * ranks * 2 / PARAM_NBYTES

    schedule = makespan(
        log, seconds, host=lambda each: each.id in behind, after=after, submission=SUBMISSION
    )
    spent: Counter[str] = Counter()
    for each in log:
        spent[{"operator": "compute", "host access": "step"}.get(each.kind, each.kind)] += seconds(each)
    names = ("step", "compute", "copy up", "copy down")
    (returned,) = (schedule.spans[each.id][1] for each in log if each.name == "returned")
    return StepBooks(
        stage, ranks, max(spent[name] for name in names) / schedule.seconds, schedule.seconds, returned,
        {name: spent[name] for name in names}, races,
    )  # fmt: skip


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
# Stages of the steps, with one rank and with several.
STEP_STAGES = ((2, 3), (2, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    chosen = parser.parse_args()
    rows: list[Books] = []
    steps: list[StepBooks] = []
    for ranks in chosen.ranks:
        with RankPool(ranks) as pool:
            for case in CASES:
                rows.append(pool.run(run, *case)[0])
                print(_line(rows[-1]), flush=True)
            for stage in STEP_STAGES[ranks > 1]:
                steps.append(pool.run(run_step, stage)[0])
                print(_step_line(steps[-1]), flush=True)
    if chosen.json:
        head = {
            "command": "python -m tests.stream_books", "torch": torch.__version__, "python": platform.python_version(),
            "durations": {
                "copy": COPY, "forward": FORWARD, "backward": BACKWARD, "submission": SUBMISSION, "step": STEP,
            },
        }  # fmt: skip
        figures = {"rows": [asdict(row) for row in rows], "steps": [asdict(row) for row in steps]}
        # Of an earlier commit, to compare with.
        before = json.loads(chosen.json.read_text()).get("before", {}) if chosen.json.exists() else {}
        chosen.json.write_text(json.dumps({**head, **figures, "before": before}, indent=1) + "\n")


def _step_line(row: StepBooks) -> str:
    times = ", ".join(f"{name} {1e3 * each:.0f} ms" for name, each in row.seconds.items())
    return (
        f"{row.ranks} rank(s), stage {row.stage}, parameters none, states cpu: busiest / step and forward "
        f"{row.share:.3f} ({1e3 * row.makespan:.0f} ms; {times}); step() returned after {1e3 * row.returned:.0f} ms; "
        f"{row.races} races"
    )


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
