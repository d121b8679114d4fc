"""Contenders of one comparison: which environment runs them, rounds that alternate, and what is said about them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.launch import TaskError, run_ranks
from support.machine import accelerator, fio_traffic, median


def arguments(text: str | None) -> argparse.ArgumentParser:
    """A parser with what every training comparison takes."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="contenders, comma-separated, instead of all")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a process, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--model", choices=("llama", "deep", "tiny"), default="llama")
    parser.add_argument("--batch", type=int, help="sequences in a step, over all ranks (4, with bf16 8)")
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--unclipped", action="store_true", help="no clipping, no check of all gradients")
    parser.add_argument("--zero", type=json.loads, help="keys of zero_optimization for all engines, as JSON")
    parser.add_argument("--checkpointing", action="store_true", help="all contenders compute activations again")
    parser.add_argument("--buffers", type=int, help="offload_optimizer.buffer_count of infinity; DeepSpeed's is 12")
    parser.add_argument("--profile", help="hardware_profile of infinity, as `infinity bench` writes it for this drive")
    parser.add_argument("--deepspeed-python", help="Python of an environment with deepspeed and its built operators")
    return parser


@contextmanager
def task_options(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The options of a training task, with a folder on the drive that is removed in the end."""
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        batch = given.batch or {"fp32": 4, "bf16": 8}[given.dtype]
        names = ("dtype", "model", "positions", "warmup", "steps", "zero", "checkpointing", "buffers", "profile")
        unclipped: dict[str, Any] = {"clip": 0.0, "checked": False} if given.unclipped else {}
        yield {
            **unclipped,
            **{name: getattr(given, name) for name in names},
            "batch": max(1, batch // given.ranks), "folder": folder,
        }  # fmt: skip


def headline(options: dict[str, Any], given: argparse.Namespace) -> str:
    """What is trained, in one line."""
    clipping = "no clipping" if given.unclipped else "clipping at 1"
    clipping += ", activations computed again" if given.checkpointing else ""
    return (
        f"{options['model']}, {options['dtype']}, {given.ranks} rank(s), {options['batch']} x {options['positions']} "
        f"tokens a rank and step, {clipping}, {given.rounds} rounds of {given.warmup} + {given.steps} steps"
    )


def fio_gib(options: dict[str, Any]) -> float:
    """GiB of the file on which fio measures, by the model that is trained."""
    return 1 / 16 if options["model"] == "tiny" else 2


# Appended to a contender: fio moves bytes both ways on the same drive meanwhile.
BESIDE_FIO = "+fio"


def measure(contender: str, options: dict[str, Any], given: argparse.Namespace) -> list[dict[str, Any]]:
    """One process a rank for one contender; the values of its ranks. With fio beside it "fio_rate" is one of them."""
    if contender.endswith(BESIDE_FIO):
        with fio_traffic(options["folder"], gib=fio_gib(options)) as rates:
            values = measure(contender.removesuffix(BESIDE_FIO), options, given)
        return [{**value, "fio_rate": rates[0]} for value in values]
    python, environment = sys.executable, {}
    if contender.startswith("deepspeed"):
        python = given.deepspeed_python
        # It builds or loads its operators with the tools of its own environment.
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
        environment = {"PATH": path, **({} if accelerator() else {"DS_ACCELERATOR": "cpu"})}
    return run_ranks(
        "training", {**options, "contender": contender}, world_size=given.ranks, python=python, environment=environment
    )


def alternate(
    contenders: Sequence[str], options: dict[str, Any], given: argparse.Namespace
) -> dict[str, list[list[dict[str, Any]]]]:
    """`rounds` measurements of each contender, one after the other, so that a drift of the machine hits all of them.

    One that fails is said and left out.
    """
    values: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in contenders}
    for _ in range(given.rounds):
        for name in [*values]:
            try:
                values[name].append(measure(name, options, given))
            except TaskError as error:
                print(f"{name} failed: {error}", file=sys.stderr)
                del values[name]
    return values


def step_seconds(rounds: list[list[dict[str, Any]]], phase: int | None = None) -> float:
    """Median over all rounds of a step's seconds (of the slowest rank), or of one phase of it."""
    steps = []
    for ranks in rounds:
        each = zip(*(value["seconds"] for value in ranks), strict=True)
        steps += [max(sum(parts) if phase is None else parts[phase] for parts in step) for step in each]
    return median(steps)


def backward_seconds(rounds: list[list[dict[str, Any]]]) -> float:
    """Median over all rounds of the measured steps' backward (of the slowest rank)."""
    steps: list[float] = []
    for ranks in rounds:
        measured = [value["backward"][-len(value["seconds"]) :] for value in ranks]
        steps += map(max, zip(*measured, strict=True))
    return median(steps)


def tokens_a_second(rounds: list[list[dict[str, Any]]], options: dict[str, Any], ranks: int) -> float:
    """Tokens of all ranks a second, at the median step."""
    return options["batch"] * options["positions"] * ranks / step_seconds(rounds)


def peak_nbytes(rounds: list[list[dict[str, Any]]]) -> float:
    """Peak resident memory of a rank while training, libraries included: the median over rounds of the largest rank."""
    return median(max(value["peak"] for value in ranks) for ranks in rounds)


def device_peak_nbytes(rounds: list[list[dict[str, Any]]]) -> float:
    """The most that torch's allocator kept of a rank's accelerator; nan without one."""
    return median(max(value["device_peak"] for value in ranks) for ranks in rounds if "device_peak" in ranks[0])


def above_baseline(rounds: list[list[dict[str, Any]]]) -> float:
    """The same, beyond what the process weighed before the model was built."""
    return median(max(value["peak"] - value["baseline"] for value in ranks) for ranks in rounds)


def moved_a_parameter(rounds: list[list[dict[str, Any]]], numel: int) -> tuple[float, float]:
    """Bytes read and written a parameter and step by all ranks, by the kernel's count."""
    sums = []
    for ranks in rounds:
        steps = zip(*(value["moved"] for value in ranks), strict=True)
        sums += [[sum(phase[kind] for rank in step for phase in rank) for kind in (0, 1)] for step in steps]
    return median(read for read, _ in sums) / numel, median(written for _, written in sums) / numel


def check_losses(values: dict[str, list[list[dict[str, Any]]]], tolerance: float) -> None:
    """Print rank 0's first losses and say who does other work: all have the same weights and data."""
    first = {name: rounds[0][0]["losses"][:4] for name, rounds in values.items() if rounds}
    reference = next(iter(first.values()))
    print("losses of the first steps (rank 0):")
    for name, losses in first.items():
        worst = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        note = "" if worst <= tolerance else f"  DIFFERS by {worst:.3g}: not the same work"
        print(f"  {name:24s} " + " ".join(f"{loss:.4f}" for loss in losses) + note)

