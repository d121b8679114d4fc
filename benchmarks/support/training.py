"""Task: train one contender for some steps and report times, losses, bytes moved and memory.

A contender is "family:variant". Its family is a module of this package with `build(options) -> Trainer`; it is imported
before the memory's baseline is taken, so that what a library itself weighs is nobody's burden.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from itertools import pairwise
from typing import Any, Protocol

import torch

from support.machine import accelerator, io_nbytes, reset_peak, resident_nbytes
from support.models import batch, build

ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0


class Trainer(Protocol):
    """One contender, ready to train."""

    def forward_backward(self, inputs: dict[str, torch.Tensor]) -> float:
        """Forward and backward of this rank's batch; its loss."""

    def step(self) -> None:
        """Clip, step, forget the gradients."""

    def settle(self) -> None:
        """Wait until nothing is in flight."""

    def facts(self) -> dict[str, Any]:
        """What the report needs beside the measurements."""


def run(options: dict[str, Any]) -> dict[str, Any]:
    """See `measure` for what comes back; `options`: contender, dtype, model, batch, positions, warmup, steps, folder.

    With `settle` the steps are measured with a wait after each phase, and then again, as "free", without.
    """
    rank = int(os.environ["RANK"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    family = importlib.import_module(f"support.with_{options['contender'].partition(':')[0]}")
    # Libraries load parts of themselves at the first model; a tiny one comes and goes before the baseline.
    if options["model"] != "blocks":
        build({"model": "tiny", "positions": 16})
    gc.collect()
    baseline = resident_nbytes()
    reset_peak()
    trainer: Trainer = family.build(options)
    gc.collect()
    built = {"built": resident_nbytes(), "built_peak": resident_nbytes(peak=True)}
    value = measure(trainer, options, rank)
    if options.get("settle"):
        value["free"] = measure(trainer, {**options, "settle": False}, rank)
    return {"contender": options["contender"], "baseline": baseline, **built, **value, **trainer.facts()}


def measure(trainer: Trainer, options: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds of each phase of the measured steps, all losses, bytes read and written a step, peak resident memory.

    With `settle`, transfers in flight are waited for after each phase and booked to it. On an accelerator a step ends
    when the device has done what it was given, and "device_peak" is the most that torch's allocator has kept of it.
    """
    reset_peak()
    device = accelerator()
    if device is not None:
        torch.accelerator.reset_peak_memory_stats(device)
    losses, seconds, moved = [], [], []
    for index in range(options["warmup"] + options["steps"]):
        inputs = batch(options, rank, index)
        marks = [(time.perf_counter(), *io_nbytes())]
        losses.append(trainer.forward_backward(inputs))
        if options.get("settle"):
            trainer.settle()
        marks.append((time.perf_counter(), *io_nbytes()))
        trainer.step()
        if options.get("settle"):
            trainer.settle()
        if device is not None:
            torch.accelerator.synchronize(device)
        marks.append((time.perf_counter(), *io_nbytes()))
        if index >= options["warmup"]:
            pairs = list(pairwise(marks))
            seconds.append([after[0] - before[0] for before, after in pairs])
            moved.append([[after[kind] - before[kind] for kind in (1, 2)] for before, after in pairs])
    value = {"losses": losses, "seconds": seconds, "moved": moved, "peak": resident_nbytes(peak=True)}
    if device is not None:
        value["device_peak"] = torch.accelerator.max_memory_reserved(device)
    return value
