"""Are our pipeline tables torch's? Every size, action by action: `python -m tests.pipeline_tables [--json FILE]`.

torch's schedules are built on stand-ins of stages, without processes. gpipe and 1f1b are run on a stage that writes
down its forwards and backwards (torch's own list for 1f1b is one micro-batch off on the last rank); interleaved and
zero bubble have their lists. Where torch refuses a number of micro-batches, ours must refuse it too and name the
nearest ones that torch takes, but for 1f1b with fewer micro-batches than ranks, which only torch refuses.

Every table, also those that torch does not have, is then proven: dependencies, the order of messages on both sides of a
link, and how many sends must be allowed to wait so that no circle forms.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from infinity.errors import ConfigError
from infinity.plan.pipeline import (
    SCHEDULES,
    Action,
    ActionKind,
    ActionSeconds,
    MessageLink,
    Tables,
    activations_in_flight,
    check_messages,
    check_schedule,
    check_tables,
    make_tables,
    message_order,
    sends_needed,
    time_tables,
)

# (schedule, ranks, micro-batches, chunks a rank)
Cell = tuple[str, int, int, int]
RANKS, MICRO_BATCHES, CHUNKS = (2, 3, 4, 8), range(1, 25), (1, 2, 3)
_ONE_STAGE = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
_SEVERAL = {
    "interleaved": schedules.ScheduleInterleaved1F1B, "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
}  # fmt: skip


class _Stage:
    """What torch's schedules ask of a stage. It computes nothing and sends nothing, and writes down its calls."""

    submod = None

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank = ranks, index % ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.calls: list[str] = []

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.calls.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.calls.append(f"{self.stage_index}B{micro_batch}")

    def _no_messages(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_messages

    def perform_reduce_grad(self, _: int) -> None:
        pass


@cache
def theirs(cell: Cell) -> tuple[tuple[str, ...], ...] | None:
    """Each rank's actions as torch executes them; None where it refuses the number of micro-batches."""
    schedule, ranks, m, chunks = cell
    try:
        if schedule in _ONE_STAGE:
            return tuple(_executed(_ONE_STAGE[schedule], rank, ranks, m) for rank in range(ranks))
        made = _SEVERAL[schedule]([_Stage(chunk * ranks, chunks * ranks, ranks) for chunk in range(chunks)], m)
    except ValueError:
        return None
    listed = tuple(tuple(map(str, filter(None, made.pipeline_order[rank]))) for rank in range(ranks))
    lowered = (made.pipeline_order_with_comms[rank] for rank in range(ranks))
    assert listed == tuple(tuple(str(each) for each in actions if each.is_compute_op) for actions in lowered)
    return listed


def _executed(kind: Any, rank: int, ranks: int, m: int) -> tuple[str, ...]:
    stage = _Stage(rank, ranks, ranks)
    made = kind(stage, m)
    # Shapes are not asked for.
    made._stage_forward_initialized = True
    made._step_microbatches()
    return tuple(stage.calls)


def cells(ranks: Iterable[int], micro_batches: Iterable[int], chunks: Iterable[int]) -> Iterator[Cell]:
    """All cells of these sizes; gpipe and 1f1b have one chunk a rank."""
    micro_batches, chunks = list(micro_batches), list(chunks)
    for pp in ranks:
        for m in micro_batches:
            for schedule in SCHEDULES:
                for virtual in chunks if schedule in _SEVERAL else (1,):
                    yield schedule, pp, m, virtual


def compare(cell: Cell) -> str:
    """Return "equal", "refused" (by both) or "ours alone"; raise AssertionError for a difference."""
    schedule, pp, m, _ = cell
    expected = theirs(cell)
    if expected is None and not (schedule == "1f1b" and m < pp):
        _compare_refusals(cell)
        return "refused"
    tables = make_tables(*cell)
    if expected is None:
        return "ours alone"
    assert tuple(tuple(map(str, actions)) for actions in tables) == expected, cell
    return "equal"


def _compare_refusals(cell: Cell) -> None:
    schedule, pp, m, virtual = cell
    said = refusal(cell)
    named = re.search(r"that work are (\d+) and (\d+)$", said)
    assert named is not None, (cell, said)
    below, above = int(named[1]), int(named[2])
    taken = [n for n in range(below, above + 1) if theirs((schedule, pp, n, virtual)) is not None]
    assert taken == [below, above], (cell, said)
    assert below < m < above, (cell, said)


def refusal(cell: Cell) -> str:
    """Why there are no tables for a cell; empty where there are."""
    try:
        check_schedule(*cell)
    except ConfigError as error:
        return str(error)
    return ""


def received(tables: Tables) -> dict[MessageLink, tuple[Action, ...]]:
    """For each link the messages in the order in which the receiver's actions use them, from the tables alone."""
    rank_of = {action.stage: rank for rank, actions in enumerate(tables) for action in actions}
    found: dict[MessageLink, list[Action]] = {}
    for receiver, actions in enumerate(tables):
        for action in actions:
            forward = action.kind is ActionKind.FORWARD
            sender = rank_of.get(action.stage + (-1 if forward else 1), receiver)
            if action.kind is not ActionKind.BACKWARD_WEIGHT and sender != receiver:
                message = action._replace(stage=action.stage + (-1 if forward else 1))
                found.setdefault(MessageLink(sender, receiver, forward), []).append(message)
    return {link: tuple(messages) for link, messages in found.items()}


def prove(cell: Cell) -> int:
    """Prove a cell's tables; return how many sends of a link must be allowed to wait."""
    tables = make_tables(*cell)
    check_tables(tables, cell[2])
    assert received(tables) == message_order(tables), f"{cell}: messages are used in another order than sent"
    needed = sends_needed(tables)
    check_messages(tables, sends_waiting=needed)
    return needed


def figures(pp: int = 4, m: int = 8) -> list[dict[str, Any]]:
    """Bubble and activations of a few schedules, where F, I and W take equal time."""
    found = []
    for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)):
        tables = make_tables(schedule, pp, m, virtual)
        equal = (1.0,) * (pp * virtual)
        bubble = time_tables(tables, ActionSeconds(equal, equal, equal)).bubble
        stages = [peak / virtual for peak in activations_in_flight(tables)]
        found.append({"schedule": schedule, "virtual": virtual, "bubble": bubble, "stages_in_flight": stages})
    return found


def sweep() -> list[dict[str, Any]]:
    """A row a schedule and number of chunks, over all sizes."""
    verdicts: dict[tuple[str, int], Counter[str]] = {}
    waiting: dict[tuple[str, int], Counter[int]] = {}
    most: dict[tuple[str, int], tuple[int, int, int]] = {}
    for cell in cells(RANKS, MICRO_BATCHES, CHUNKS):
        schedule, pp, m, virtual = cell
        verdict = compare(cell)
        verdicts.setdefault((schedule, virtual), Counter())[verdict] += 1
        if verdict != "refused":
            needed = prove(cell)
            waiting.setdefault((schedule, virtual), Counter())[needed] += 1
            most[schedule, virtual] = max(most.get((schedule, virtual), (0, 0, 0)), (needed, pp, m))
    return [
        {
            "schedule": schedule, "virtual": virtual, **count, "tables_by_sends_needed": dict(sorted(sends.items())),
            "most_sends_needed": dict(zip(("sends", "ranks", "micro_batches"), most[schedule, virtual], strict=True)),
        }
        for ((schedule, virtual), count), sends in zip(verdicts.items(), waiting.values(), strict=True)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    begin = time.perf_counter()
    rows = sweep()
    seconds = time.perf_counter() - begin
    for row in [*rows, *figures()]:
        print(row)
    print(f"{seconds:.0f} s")
    if given.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        head = {
            "command": "python -m tests.pipeline_tables", "date": str(date.today()), "torch": torch.__version__,
            "python": platform.python_version(), "commit": commit.stdout.strip(), "ranks": RANKS,
            "micro_batches": [MICRO_BATCHES[0], MICRO_BATCHES[-1]], "chunks": CHUNKS, "seconds": round(seconds),
        }  # fmt: skip
        given.json.write_text(json.dumps({**head, "rows": rows, "p4_m8": figures()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
