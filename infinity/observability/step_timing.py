"""The time of a step in parts that add up to the time that passed.

    forward       the model, and what autograd records of it
    backward      the model's
    gradient norm, optimizer
    copy          between tiers and into gathered units, where the host does it
    engine        hooks, bookkeeping, the agreements of a step
    data          the program, between the end of a step (or of a backward) and the next forward
    program       the program elsewhere: the loss, its own lines
    waits         by cause: NVMe read, NVMe write, room in a pool, optimizer step, other ranks, ...

A step lasts from the end of the one before to its own. It is the program's lane of `infinity.observability.timeline`,
summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from infinity.observability import trace

PARTS = ("forward", "backward", "gradient norm", "optimizer", "copy", "engine", "data", "program")
# Smaller shares are printed together.
_SHARE_SHOWN = 0.005
_Label = tuple[str, str]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, or of the mean of several: `parts` by the names of `PARTS` and `waits` by cause add up to
    `seconds`.
    """

    seconds: float
    parts: Mapping[str, float]
    waits: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        named = {**self.parts, **{f"wait for {cause}": spent for cause, spent in self.waits.items()}}
        total = max(self.seconds, 1e-9)
        shown = {name: spent for name, spent in named.items() if spent / total >= _SHARE_SHOWN}
        shown["others"] = self.seconds - sum(shown.values())
        return f"{self.seconds:.3f} s: " + ", ".join(f"{name} {s:.3f} ({s / total:.0%})" for name, s in shown.items())


class WallClock:
    """Runs from its construction to `close`. `lap` ends a step, `mean` a stretch of several."""

    def __init__(self) -> None:
        self._tally = trace.start_accumulator()
        self._lap = self._stretch = self._tally.read()
        self._laps = 0
        self._closed = False

    def lap(self) -> StepTimes:
        """Return the times of the step that ends now."""
        now = self._tally.read()
        before, self._lap = self._lap, now
        self._laps += 1
        return _between(before, now, 1)

    def mean(self) -> StepTimes:
        """Return the mean times of the steps since the last call of this method, up to the latest lap."""
        before, self._stretch = self._stretch, self._lap
        laps, self._laps = max(self._laps, 1), 0
        return _between(before, self._lap, laps)

    def close(self) -> None:
        """Stop counting."""
        if not self._closed:
            self._closed = True
            trace.stop_tally()


def _between(before: Mapping[_Label, int], now: Mapping[_Label, int], count: int) -> StepTimes:
    spent = {label: ns - before.get(label, 0) for label, ns in now.items()}
    parts, waits = dict.fromkeys(PARTS, 0.0), dict[str, float]()
    for (what, cause), ns in spent.items():
        if what == trace.WAIT:
            waits[cause] = ns / 1e9 / count
        else:
            parts[_part(what, cause)] += ns / 1e9 / count
    ranked = dict(sorted(waits.items(), key=lambda item: -item[1]))
    return StepTimes(sum(spent.values()) / 1e9 / count, parts, {cause: s for cause, s in ranked.items() if s})


def _part(what: str, cause: str) -> str:
    if what == trace.OUTSIDE:
        return "data" if cause == "forward" else "program"
    if what in (trace.PHASE, trace.COMPUTE):
        return "engine" if cause == "step" else cause
    return what
