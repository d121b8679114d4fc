"""The progress of a run: a log line now and then, the breakdown of a step's time, rows for monitors.

    step 200: loss 2.314, lr 0.0003, gradient norm 0.81, 1.2e+04 tokens/s, 3 skipped; gpu 1.20 GB, nvme 14.20 GB;
    waiting 12% (NVMe read 8%, optimizer step 4%)

Rank 0 logs a line every `steps_per_print` optimizer steps; monitors get a row for every step. The loss is rank 0's own,
averaged over the micro-steps of the step. Tokens are counted where the model is called with `input_ids`, or with a
two-dimensional integer tensor as its first argument; otherwise samples are.

The time of a step is shown in parts that add up to the time that passed:

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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from infinity.base import trace
from infinity.base.sizes import format_bytes
from infinity.config.schema import Config
from infinity.errors import StateError
from infinity.log import logger
from infinity.memory.ledger import Ledger
from infinity.observability.monitors import Monitors, mean_loss
from infinity.plan.types import Tier, memory_names

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


@dataclass
class _Amount:
    """Samples and tokens that all ranks have trained on in a number of steps."""

    samples: int = 0
    tokens: int = 0
    steps: int = 0

    def add(self, samples: int, tokens: int) -> None:
        self.samples += samples
        self.tokens += tokens
        self.steps += 1

    def rate(self, seconds: float) -> tuple[float, str]:
        """Return the amount per second, and its unit: tokens where they are known, otherwise samples."""
        amount, unit = (self.tokens, "tokens") if self.tokens else (self.samples, "samples")
        return amount / max(seconds, 1e-9), unit


class StepProgress:
    """The progress of one engine. Does nothing where the configuration asks for nothing."""

    def __init__(self, config: Config, ledger: Ledger, *, accelerator: bool, rank: int, data_size: int) -> None:
        """Open the monitors; ConfigError where one cannot be opened. data_size: ranks with batches of their own."""
        self._every = (config.steps_per_print or 0) if rank == 0 else 0
        self._breakdown = config.wall_clock_breakdown and rank == 0
        self._ledger = ledger
        self._accelerator = accelerator
        self._data_size = data_size
        self._monitors = Monitors(config) if rank == 0 else None
        timed = self._every or self._monitors or config.wall_clock_breakdown
        self._clock = WallClock() if timed else None
        self._latest: StepTimes | None = None
        self._batch, self._tokens = config.train_batch_size or 0, 0
        self._amount = _Amount()

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a forward that begins with these arguments."""
        ids = kwargs.get("input_ids", args[0] if args else None) if self._clock is not None else None
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            self._tokens += ids.numel() * self._data_size

    def stepped(
        self, step: int, samples: int, *, losses: Sequence[Tensor], lr: float, norm: float, scale: float | None,
        skipped: int,
    ) -> None:  # fmt: skip
        """Note the end of an optimizer step. step: its number. samples: number that all ranks have trained on since the
        start.

        Waits for the device only where a line is due, or monitors write.
        """
        if self._clock is None:
            return
        with trace.span(trace.ENGINE, "progress"):
            times = self._latest = self._clock.lap()
            amount = _Amount()
            amount.add(self._batch, self._tokens)
            self._amount.add(self._batch, self._tokens)
            self._tokens = 0
            if self._monitors:
                loss = {"train_loss": mean_loss(losses)} if losses else {}
                scales = {} if scale is None else {"loss_scale": scale}
                self._monitors.add(samples, self._row(
                    {**loss, "lr": lr, **scales, "grad_norm": norm, "skipped_steps": skipped}, amount, times
                ))  # fmt: skip
            if self._every and step % self._every == 0:
                self._say(step, losses, f"lr {lr:.3g}, gradient norm {norm:.4g}", scale, skipped)
            elif self._breakdown and step == 1:
                logger.info("time of step 1: %s", times)

    def step_times(self) -> StepTimes:
        """See `Engine.step_times`."""
        if self._latest is None:
            raise StateError(
                "no step has been timed: set wall_clock_breakdown, or on rank 0 steps_per_print, and take a step"
            )
        return self._latest

    def close(self) -> None:
        """Have the monitors write the rest, and stop the clock."""
        if self._clock is not None:
            self._clock.close()
        if self._monitors is not None:
            self._monitors.close()

    def _row(self, own: dict[str, float | Tensor], amount: _Amount, times: StepTimes) -> dict[str, float | Tensor]:
        """Return the figures of a step by their tags."""
        rate, unit = amount.rate(times.seconds)
        row = {**own, f"{unit}_per_second": rate, "step_seconds": times.seconds}
        return {
            **{f"Train/Samples/{name}": value for name, value in row.items()},
            **{f"Memory/{tier.value}_bytes": self._ledger.total(tier) for tier in Tier},
            **{f"Wait/{cause}": seconds for cause, seconds in times.waits.items()},
        }

    def _say(self, step: int, losses: Sequence[Tensor], told: str, scale: float | None, skipped: int) -> None:
        """Log the line, and the breakdown of the time where the configuration asks for it."""
        assert self._clock is not None
        mean, amount = self._clock.mean(), self._amount
        rate, unit = amount.rate(mean.seconds * amount.steps)
        parts = [told, f"{rate:.3g} {unit}/s"]
        if losses:
            parts.insert(0, f"loss {float(mean_loss(losses)):.4g}")
        if scale is not None:
            parts.append(f"loss scale {scale:g}")
        if skipped:
            parts.append(f"{skipped} skipped")
        nbytes: Counter[str] = Counter()
        for tier, name in memory_names(accelerator=self._accelerator).items():
            nbytes[name] += self._ledger.total(tier)
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in nbytes.items())
        if known := self._ledger.activations_in_words():
            held += f", activations {known}"
        logger.info("step %d: %s; %s; %s", step, ", ".join(parts), held, _waiting(mean))
        if self._breakdown:
            logger.info("time of a step, mean of %d: %s", amount.steps, mean)
        self._amount = _Amount()


def _waiting(times: StepTimes) -> str:
    """Return in words the share of the time that was spent waiting, by cause."""
    total = max(times.seconds, 1e-9)
    causes = ", ".join(f"{cause} {spent / total:.0%}" for cause, spent in times.waits.items() if spent / total >= 0.005)
    return f"waiting {sum(times.waits.values()) / total:.0%}" + (f" ({causes})" if causes else "")
