"""Task: train one contender on a pipeline of two stages, in turns with another one, and report seconds and losses.

A contender is "family:variant". Its family is the module `stages_FAMILY` of this package with
`build(options) -> StagesTrainer`. Ranks lie stage by stage: with two data ranks 0 and 1 have the first stage. A step is
a whole one: all micro-batches forward and backward, the sum over data ranks, clipping, AdamW.

Both contenders live until the last turn, and the one that waits sleeps. `options["turns"]` names whose turn is when; a
turn begins once each rank of the turn before has left a file in `options["folder"]`.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from support.machine import reset_peak, resident_nbytes
from support.models import batch

STAGES = 2
# A file that ends all waiting, since a rank of the other contender has failed.
STOPPED = "stopped"
_POLL_SECONDS = 0.05


class StagesTrainer(Protocol):
    """One contender, ready to train. row: this rank's place on the data axis."""

    row: int

    def step(self, ids: Tensor) -> float:
        """Train on this data rank's tokens ([sequences of all micro-batches, positions]), which are their own labels,
        and return the mean loss of all data ranks; nan on a rank without the last stage, if the contender has it so.
        """

    def facts(self) -> dict[str, Any]:
        """What the report needs beside the measurements."""


def run(options: dict[str, Any]) -> dict[str, Any]:
    """`options`: contender, dtype, model, layers, micro_batches, sequences (of a micro-batch), positions, warmup, steps
    (of a turn), turns, folder. The first turn of a contender is its warm-up.

    Returns wall clock and CPU seconds (of all threads) by measured turn, losses of all steps, peak of resident memory.
    """
    torch.set_num_threads(1)
    family = importlib.import_module(f"support.stages_{options['contender'].partition(':')[0]}")
    options = {**options, "batch": options["micro_batches"] * options["sequences"]}
    trainer: StagesTrainer = family.build(options)
    gc.collect()
    reset_peak()
    losses: list[float] = []
    turns = []
    for number, whose in enumerate(options["turns"]):
        if whose != options["contender"]:
            continue
        _wait_for_turn(Path(options["folder"]), number)
        began = time.perf_counter(), time.process_time()
        for _ in range(options["steps"] if turns else options["warmup"]):
            losses.append(trainer.step(batch(options, trainer.row, len(losses))["input_ids"]))
        turns.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        _done(Path(options["folder"]), number, int(os.environ["RANK"])).touch()
    seconds, cpu = zip(*turns[1:], strict=True)
    peak = resident_nbytes(peak=True)
    return {"seconds": seconds, "cpu": cpu, "losses": losses, "peak": peak, **trainer.facts()}


def _wait_for_turn(folder: Path, number: int) -> None:
    before = [_done(folder, number - 1, rank) for rank in range(int(os.environ["WORLD_SIZE"]))] if number else []
    while not all(file.exists() for file in before):
        if (folder / STOPPED).exists():
            raise SystemExit("the other contender has failed")
        time.sleep(_POLL_SECONDS)


def _done(folder: Path, turn: int, rank: int) -> Path:
    return folder / f"turn {turn} of rank {rank}"
