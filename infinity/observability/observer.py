"""What an engine shows while it runs: the memory breakdown, a timeline of one step, and errors that carry the ledger.

The engine calls it from the loop's verbs; it never changes what they do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from infinity.config.schema import Config
from infinity.log import logger
from infinity.memory.memory_report import MemoryReport
from infinity.memory.refusal import MemoryRefused
from infinity.observability.memory_breakdown import Breakdown
from infinity.observability.timeline import Timeline

# The advice after a phase that ended for lack of memory.
_AFTER = {
    "forward": (
        "Nothing is lost: weights, states and the gradients of earlier micro-batches are as they were. Use a smaller "
        "micro-batch, shorter sequences or activation checkpointing, or offload more."
    ),
    "backward": (
        "Weights and states are as they were, but this step's gradients are incomplete: call engine.zero_grad(), then "
        "go on with a smaller micro-batch, shorter sequences or activation checkpointing."
    ),
    "pipeline": (
        "The ranks of the pipeline are in the middle of a step: this engine cannot go on. Close it, and start from a "
        "checkpoint with a smaller micro-batch, shorter sequences or activation checkpointing."
    ),
    "step": (
        "Weights and states are as they were, but this step's gradients are incomplete: call engine.zero_grad(), then "
        "go on with less."
    ),
}
_OTHERS = " The other ranks are told, and end."


class Observer:
    """The reports of one engine."""

    def __init__(
        self, breakdown: Breakdown, config: Config, *, rank: int, world_size: int,
        tell: Callable[[list[Any]], list[list[Any]]] | None = None,
    ) -> None:  # fmt: skip
        """tell: as in `Timeline`."""
        self._tell = tell
        self._breakdown = breakdown
        self._config = config
        self._rank = rank
        self._alone = world_size == 1
        self._timed: Timeline | None = None

    def report(self, *, by_unit: bool) -> MemoryReport:
        """See `Engine.memory`."""
        return self._breakdown.report(by_unit=by_unit)

    def timeline(self, path: str | os.PathLike[str] | None) -> Timeline:
        """See `Engine.timeline`."""
        return Timeline(
            path, rank=self._rank, describe=self._breakdown.name, begin=self._breakdown.tell_levels, tell=self._tell
        )

    def explain(self, error: BaseException, phase: str, *, broken: str) -> MemoryRefused | None:
        """Return a MemoryRefused that shows the ledger, for an error that means that memory ran out in `phase`; None
        for any other. broken: why the engine cannot go on; "" where it can.
        """
        after = f"This engine cannot go on: {broken}." if broken else _AFTER[phase]
        return self._breakdown.explain(error, phase, after + ("" if self._alone else _OTHERS))

    def begin_step(self, step: int) -> None:
        """Note that a forward of optimizer step `step` (from 1 on) begins; start the recording that the configuration
        asks for.
        """
        wanted = self._config.timeline
        if wanted.path is not None and step == wanted.step and self._timed is None:
            self._timed = self.timeline(wanted.path)
            self._timed.start()

    def end_step(self, step: int) -> None:
        """Note that optimizer step `step` is over: end its recording, and log the breakdown where it is due."""
        timed = self._timed
        if timed is not None and timed.running:
            timed.stop()
            logger.info("%s: %s", timed.path, timed)
        every = self._config.steps_per_print
        if self._config.memory_breakdown and (step == 1 or (every and step % every == 0)):
            logger.info("memory of rank %d after step %d:\n%s", self._rank, step, self.report(by_unit=False))

    def close(self) -> None:
        """Abandon a recording whose step did not end."""
        if self._timed is not None:
            self._timed.abandon()
