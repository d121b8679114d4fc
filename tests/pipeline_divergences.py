"""Ten ways in which a rank of a pipeline with data and tensor axes does something else than the others: what each of
eight ranks is told, and when. Recorded in benchmarks/results/.

    python -m tests.pipeline_divergences [--cases "raise in F,late rank"] [--json FILE]

pp 2 x dp 2 x tp 2. In the second step (or as the engine is made) rank 5, at pp 1, dp 0, tp 1, leaves the others; in two
cases a peer does as it does. A case is right if every rank raises in time, and each is told of that rank by its
coordinate, or of the messages that tell them apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import infinity
from infinity.distributed.groups import latest_groups
from tests.pipeline_matrix import TIGHT, batches, build, configuration
from tests.support.oracle import join
from tests.support.spawn import RankPool

ROOT = Path(__file__).parents[1]
WORLD, ODD, ODD_STEP, COUNT = 8, 5, 1, 4
PLACE = "rank 5 (pp 1, dp 0, tp 1)"
# Seconds of the watchdog: of a rank that is late, and where no watchdog has to find anything.
SHORT, LONG = 3.0, 300.0
# What an engine takes to be made, as ranks that differ so find out meanwhile; eight ranks share few cores.
MAKING = 10.0
# How much longer than the limit it may take.
LATER = 5.0


@dataclass(frozen=True)
class Case:
    """own: the error of the ranks that leave, in place of a DesyncError. others: that of all others, or of those that
    find out themselves. odd: the ranks that leave. words: what all others are told.
    """

    words: tuple[str, ...]
    own: str = "DesyncError"
    others: tuple[str, ...] = ("DesyncError",)
    odd: tuple[int, ...] = (ODD,)


# Of ranks that compare what they were given; the others are told.
COMPARED = ("ConfigError", "DesyncError")
CASES = {
    "skipped micro-batch": Case(("input_ids'] of micro-batch 1", "tp 1)"), own="ConfigError", others=COMPARED),
    "other batch on a tensor peer": Case(
        ("ranks of a tensor group", "input_ids'] of micro-batch 1", "dp 0, tp 1)"), "ConfigError", COMPARED, (1, ODD)
    ),
    "other batch on a pipeline peer": Case(
        ("ranks of a pipeline group", "input_ids'] of micro-batch 1", "(pp 1, dp 0,"), "ConfigError", COMPARED, (4, ODD)
    ),
    "raise in F": Case((PLACE, "rank 5 is broken", "in the forward of micro-batch 2 in stage 1"), "ArithmeticError"),
    "raise in B": Case((PLACE, "rank 5 is broken", "in the backward of micro-batch 2 in stage 1"), "ArithmeticError"),
    "killed": Case((PLACE, "gives no sign of life"), own=""),
    "late rank": Case((PLACE, "is in the program's own code")),
    "closed engine": Case((PLACE, "has closed its engine"), own="StopIteration"),
    "other schedule": Case((f"{PLACE}: gpipe", "different stages")),
    "other cut": Case((f"{PLACE}: 1f1b, 4 micro-batches, blocks of each stage [1, 3]", "different stages")),
}


def part(name: str, rank: int, drive: str) -> tuple[str, str, float]:
    """Kind of the error, its text, seconds from the parting until this rank was through."""
    torch.set_num_threads(1)
    case = CASES[name]
    odd = rank in case.odd
    parallel: dict[str, Any] = {"pipeline": 2, "tensor": 2}
    if odd and name == "other schedule":
        parallel["schedule"] = "gpipe"
    if odd and name == "other cut":
        parallel["stages"] = [1, 3]
    config = configuration(
        drive, parallel, count=COUNT, stage=3, param="cpu", optimizer="cpu", zero=TIGHT,
        watchdog_seconds=SHORT if name == "late rank" else LONG,
    )  # fmt: skip
    model = build("llama", num_hidden_layers=4, hidden_size=16, intermediate_size=16)
    parted, kind, text = time.time(), "none", ""
    try:
        engine, *_ = infinity.initialize(model=model, config=config)
        with engine:
            for step in range(3):
                fed = batches(step, engine.data_rank, COUNT + 1)
                micro_batches = iter(fed)
                if step == ODD_STEP:
                    parted = time.time()
                    if odd:
                        micro_batches = iter(_leave(name, engine, fed))
                engine.train_batch(micro_batches)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, time.time() - parted


def _leave(name: str, engine: Any, fed: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Do something else than the others; return the micro-batches of the step."""

    calls = [0]

    def broken(*_: Any) -> None:
        calls[0] += 1
        if calls[0] > 2 and name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if calls[0] > 2:
            raise ArithmeticError("the batch of rank 5 is broken")

    block = engine.module.model.layers[-1]
    if name == "skipped micro-batch":
        return fed[:1] + fed[2:]
    if name.startswith("other batch"):
        other = fed[1]["input_ids"].flip(1)
        return [fed[0], {**fed[1], "input_ids": other}, *fed[2:]]
    if name in ("raise in F", "killed"):
        block.register_forward_pre_hook(broken)
    elif name == "raise in B":
        block.register_forward_hook(lambda module, args, output: _first(output).register_hook(broken) and None)
    elif name == "late rank":
        # Longer than anyone waits; it is told too, when it comes.
        time.sleep(SHORT + LATER)
    elif name == "closed engine":
        engine.close()
        raise StopIteration("no more data on rank 5")
    return fed


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def judge(name: str, told: Sequence[tuple[str, str, float]]) -> dict[str, Any]:
    """A row about what all ranks were told; of one that was killed, an empty kind."""
    case, limit = CASES[name], {"late rank": SHORT, "other schedule": MAKING, "other cut": MAKING}.get(name, 0.0)
    wrong = []
    for rank, (kind, text, _) in enumerate(told):
        odd = rank in case.odd
        if kind not in ((case.own,) if odd else case.others):
            wrong.append(f"rank {rank} has {kind or 'nothing'}: {text[-600:]}")
        elif not odd and not all(word in text for word in case.words):
            wrong.append(f"rank {rank} is not told {[word for word in case.words if word not in text]}: {text[-900:]}")
    seconds = max(each[2] for rank, each in enumerate(told) if rank not in case.odd)
    return {
        "case": name, "seconds": round(seconds, 1), "limit": limit + LATER, "in time": seconds <= limit + LATER,
        "told": _without_paths(next(text for rank, (_, text, _) in enumerate(told) if rank not in case.odd)),
        "wrong": wrong,
    }  # fmt: skip


def _without_paths(text: str) -> str:
    """A message without what only this machine has: folders in front of files."""
    return re.sub(r'(?<=[ ("])/\S*/(?=[^/\s]+\.py)', "", text)


def diverge(rank: int, world: int, drive: str, names: Sequence[str]) -> dict[str, tuple[str, str, float]]:
    """What a rank of a pool is told in each case."""
    join(world)
    found = {}
    for name in names:
        found[name] = part(name, rank, drive)
        groups = latest_groups()
        if groups is not None:
            groups.close()
        # The others may still be on their way out.
        torch.distributed.barrier()
    return found


def killed(drive: str) -> list[tuple[str, str, float]]:
    """The case of a rank that is killed, in programs of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.pipeline_divergences", "--part", "killed", "--drive", drive]
    ranks = []
    for rank in range(WORLD):
        environment = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "OMP_NUM_THREADS": 1,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT,
        }  # fmt: skip
        own = {**os.environ, **{name: str(value) for name, value in environment.items()}}
        ranks.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        answers = [process.communicate(timeout=400) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    told: list[tuple[str, str, float]] = []
    for process, (out, errors) in zip(ranks, answers, strict=True):
        if process.returncode == -signal.SIGKILL:
            told.append(("", "", 0.0))
        else:
            told.append(tuple(json.loads(out)) if out.strip() else ("none", errors[-2000:], 0.0))
    return told


def all_cases(names: Sequence[str] = tuple(CASES), timeout: float = 900.0) -> list[dict[str, Any]]:
    """A row for each case: all in one launch but the one in which a rank is killed."""
    told: dict[str, list[tuple[str, str, float]]] = {}
    together = [name for name in names if name != "killed"]
    with tempfile.TemporaryDirectory() as drive:
        if together:
            with RankPool(WORLD) as pool:
                found = pool.run(diverge, drive, together, timeout=timeout)
            told = {name: [each[name] for each in found] for name in together}
        if "killed" in names:
            told["killed"] = killed(drive)
    return [judge(name, told[name]) for name in names]


def main() -> None:
    """Run the cases, print a line each, and write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(part(given.part, int(os.environ["RANK"]), given.drive)), flush=True)
        return
    rows = all_cases(given.cases.split(","))
    for row in rows:
        print(json.dumps(row), flush=True)
    right = sum(not row["wrong"] and row["in time"] for row in rows)
    print(f"{right} of {len(rows)} right", flush=True)
    if given.json:
        facts = {
            "date": date.today().isoformat(),
            "command": " ".join(["python -m tests.pipeline_divergences", *sys.argv[1:]]),
            "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
            "cases": rows,
        }  # fmt: skip
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(right < len(rows))


if __name__ == "__main__":
    main()
