"""Claim: a pipeline trains at 0.97 times the speed of DeepSpeed's, and of torch's pipelining with FSDP2, or more.

    python benchmarks/pipeline_peers.py [--dtypes fp32,bf16] [--rounds 5] [--deepspeed-python PATH] [--json FILE]

A Llama of 33 M parameters in two stages of four blocks, two data ranks: four processes of one thread each, 1F1B, AdamW,
clipping at 1.0, everything in memory; the same weights, micro-batches and tokens for all; gradients are summed over
data ranks once a step (ours by `parallel.reduce`). Pairs are infinity at stage 1 with DeepSpeed at stage 1 (2 and 3 it
refuses under a pipeline), and infinity at stage 3 with FSDP2: as it comes, which gathers a block for each forward and
backward, and gathered, where a block stays gathered for the whole step. The two sides of a pair have processes of their
own, which live at once and train by turns.

DeepSpeed runs in an environment of its own: `--deepspeed-python` names its interpreter. A peer that does not run is
named in the result, with its error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from support.launch import run_ranks
from support.machine import MIB, describe, median
from support.models import MODELS
from support.stages import STAGES, STOPPED
from support.table import Table, claim

LIMIT, DATA = 0.97, 2
# Ours, and the peer.
PAIRS = [
    ("infinity:stage1", "deepspeed:stage1"), ("infinity:stage3", "torch:gathered"), ("infinity:stage3", "torch:fsdp2"),
]  # fmt: skip
PEERS = {
    "deepspeed:stage1": "DeepSpeed, stage 1", "torch:fsdp2": "torch, FSDP2", "torch:gathered": "torch, FSDP2 gathered",
}  # fmt: skip
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}

Ranks = list[dict[str, Any]]


@dataclass(frozen=True)
class Side:
    """One contender of a pair. By round: tokens a second, and CPU seconds of all ranks in a step."""

    speeds: list[float]
    cpu: list[float]
    losses: list[float]
    peak: float
    version: str


@dataclass(frozen=True)
class Pair:
    """A pair of contenders in one dtype; without sides where the peer does not run, with its error."""

    dtype: str
    peer: str
    sides: tuple[Side, Side] | None
    error: str = ""
    # The machine's load average behind the measurement, in which its own four processes are.
    load: float = 0.0

    @property
    def apart(self) -> float:
        """The largest difference of a step's losses."""
        assert self.sides is not None
        ours, peer = self.sides
        return max(abs(a - b) for a, b in zip(ours.losses, peer.losses, strict=True))

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's speed, by round."""
        assert self.sides is not None
        return [ours / peer for ours, peer in zip(*(side.speeds for side in self.sides), strict=True)]


def main() -> None:
    """Measure, print, and write the result."""
    given = _arguments().parse_args()
    print(describe())
    found = []
    for (ours, peer), dtype in itertools.product(PAIRS, given.dtypes.split(",")):
        if not given.only or peer in given.only.split(","):
            found.append(measure(dtype, ours, peer, given))
            show(found[-1])
            result = topic(found, given)
            if given.json:
                given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in result["rows"]:
        sign, _, bound = row["limit"].partition(" ")
        (figure,) = row["figures"]
        holds = figure >= float(bound) if sign == ">=" else figure <= float(bound)
        claim(f"{row['what']}: {figure}, claim {row['limit']}", holds)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="fp32,bf16", help="comma-separated")
    parser.add_argument("--only", help="peers, comma-separated, instead of all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps of the first turn")
    parser.add_argument("--model", choices=("staged", "tiny"), default="staged")
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=1, help="in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="in a step of a data rank")
    parser.add_argument("--deepspeed-python", default=sys.executable, help="Python of an environment with deepspeed")
    parser.add_argument("--seconds", type=float, default=1200, help="limit of a pair")
    parser.add_argument("--json", type=Path, help="write the result into this file")
    return parser


def measure(dtype: str, ours: str, peer: str, given: argparse.Namespace) -> Pair:
    """Start both contenders, and let them train by turns."""
    # A warm-up each, then rounds; the peer is first in odd ones.
    turns = [ours, peer] + [name for at in range(given.rounds) for name in ((peer, ours) if at % 2 else (ours, peer))]
    names = ("model", "positions", "sequences", "micro_batches", "steps", "warmup")
    options = {name: getattr(given, name) for name in names}
    options |= {"dtype": dtype, "turns": turns, "layers": MODELS[given.model]["layers"]}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        runs = {
            name: pool.submit(_run, {**options, "contender": name, "folder": folder}, given) for name in (ours, peer)
        }
        wait(runs.values(), return_when=FIRST_EXCEPTION)
        failed = {name: run.exception() for name, run in runs.items() if run.done() and run.exception()}
        if failed:
            (Path(folder) / STOPPED).touch()
    if ours in failed:
        raise failed[ours] or AssertionError
    if peer in failed:
        print(f"{peer} failed: {failed[peer]}", file=sys.stderr)
        return Pair(dtype, peer, None, _last_lines(str(failed[peer])), os.getloadavg()[0])
    sides = (_side(runs[ours].result(), given), _side(runs[peer].result(), given))
    return Pair(dtype, peer, sides, load=os.getloadavg()[0])


def _run(options: dict[str, Any], given: argparse.Namespace) -> Ranks:
    """What the ranks of one contender return. TaskError where it does not run."""
    python, environment = sys.executable, {"OMP_NUM_THREADS": "1"}
    if options["contender"].startswith("deepspeed"):
        python = given.deepspeed_python
        # It builds or loads its operators with the tools of its own environment.
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
        environment |= {"DS_ACCELERATOR": "cpu", "PATH": path}
    return run_ranks(
        "stages", options, world_size=STAGES * DATA, python=python, environment=environment, timeout=given.seconds
    )


def _side(ranks: Ranks, given: argparse.Namespace) -> Side:
    tokens = DATA * given.micro_batches * given.sequences * given.positions * given.steps
    # Ranks wait for each other in every step, but end it at different times.
    seconds = [max(turn) for turn in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    cpu = [sum(turn) / given.steps for turn in zip(*(rank["cpu"] for rank in ranks), strict=True)]
    # Ranks of the last stage know the loss.
    last, peak = ranks[-1], max(rank["peak"] for rank in ranks)
    return Side([tokens / each for each in seconds], cpu, last["losses"], peak, last["version"])


def _last_lines(text: str, most: int = 300) -> str:
    """The line that names the error, of what a rank has printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines)[-1][:most]


def show(pair: Pair) -> None:
    """Print both sides of a pair."""
    if pair.sides is None:
        print(f"{pair.dtype}, {PEERS[pair.peer]} does not run: {pair.error}")
        return
    table = Table("tokens/s:.0f", "CPU s a step:.2f", "MiB:.0f", name_width=36)
    for name, side in zip(("ours", PEERS[pair.peer]), pair.sides, strict=True):
        table.row(f"{pair.dtype}, {name}", median(side.speeds), median(side.cpu), side.peak / MIB)
        print("    losses " + " ".join(f"{loss:.4f}" for loss in side.losses[:4]))
    ratios = " ".join(f"{ratio:.3f}" for ratio in pair.ratios)
    print(f"    ratios {ratios}; losses differ by {pair.apart:.2g}; load {pair.load:.0f}", flush=True)


def topic(found: list[Pair], given: argparse.Namespace) -> dict[str, Any]:
    """The result as a topic of docs/make_benchmarks.py."""
    rows, table = [], []
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for pair in found:
        name = f"{pair.dtype}, {PEERS[pair.peer]}"
        if pair.sides is None:
            table.append([name, "", "does not run", pair.error, "", ""])
            continue
        ours, peer = pair.sides
        ratio = median(ours.speeds) / median(peer.speeds)
        rows += [
            {"what": f"{name}: tokens/s, ours / theirs", "figures": [round(ratio, 3)], "limit": f">= {LIMIT}"},
            {"what": f"{name}: losses apart", "figures": [float(f"{pair.apart:.1g}")],
             "limit": f"<= {TOLERANCE[pair.dtype]:g}"},
        ]  # fmt: skip
        table.append([
            name, *(f"{median(side.speeds):.0f}" for side in pair.sides),
            f"{min(pair.ratios):.3f} to {max(pair.ratios):.3f}",
            *(" / ".join(cells) for cells in zip(*((f"{median(side.cpu):.2f}", f"{side.peak / MIB:.0f}")
                                                   for side in pair.sides), strict=True)),
        ])  # fmt: skip
        versions[pair.peer.partition(":")[0]] = peer.version
    load = max(pair.load for pair in found)
    machine = [describe().partition(", ")[2], f"load average up to {load:.0f}"]
    machine += [f"{name} {version}" for name, version in versions.items()]
    return {
        "topic": "Pipelines of others",
        "claim": f"A pipeline of two stages and two data ranks trains at {LIMIT} times the tokens a second of "
                 "DeepSpeed's (both at stage 1), and of torch's pipelining with FSDP2 (ours at stage 3), or more.",
        "command": "python benchmarks/pipeline_peers.py --deepspeed-python PYTHON --json FILE",
        "machine": ", ".join(machine), "date": time.strftime("%Y-%m-%d"), "commit": _commit(), "how": _how(given),
        "rows": rows, "table": table,
        "columns": ["", "ours, tokens/s", "theirs, tokens/s", "ratios of rounds", "CPU s a step, ours / theirs",
                    "MiB of a rank, ours / theirs"],
    }  # fmt: skip


def _how(given: argparse.Namespace) -> str:
    return (
        f"A Llama of 33 M parameters, 1F1B, {given.micro_batches} micro-batches of {given.sequences} x "
        f"{given.positions} tokens a data rank and step, AdamW, clipping at 1, everything in memory; four processes of "
        f"one thread on 2 cores. Both sides of a pair live at once and train {given.steps} steps by turns, the first "
        f"one changing: medians of {given.rounds} turns after {given.warmup} steps. CPU seconds are of all four ranks. "
        "FSDP2 gathers a block for each forward and backward; gathered, a block stays gathered for the whole step. "
        "All sum gradients over data ranks once a step, in bf16 where the model is."
    )


def _commit() -> str:
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return told.stdout.strip()


if __name__ == "__main__":
    main()
