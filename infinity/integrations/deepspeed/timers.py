"""`deepspeed.utils.timer`: stopwatches that wait for the device, for programs that time their own loops.

`engine.step_times()` and `engine.timeline()` say where an engine's time goes, without stopping the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.utils import log_dist
from infinity.log import logger


class _Timer:
    """One stopwatch: `start` and `stop` wait for the device."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._began = 0.0
        # Seconds since the latest reset, and of each interval that was recorded.
        self._total = 0.0
        self._recorded: list[float] = []

    def start(self) -> None:
        """Start it; RuntimeError where it runs."""
        if self.started_:
            raise RuntimeError(f"timer {self.name_!r} has been started already: stop() it first")
        get_accelerator().synchronize()
        self.started_, self._began = True, time.perf_counter()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop it; RuntimeError where it does not run. reset: forget what it had before. record: keep for `mean`."""
        if not self.started_:
            raise RuntimeError(f"timer {self.name_!r} is not started: start() it first")
        get_accelerator().synchronize()
        seconds = time.perf_counter() - self._began
        self._total = seconds if reset else self._total + seconds
        self._recorded += [seconds] if record else []
        self.started_ = False

    def reset(self) -> None:
        """Stop it, and forget everything."""
        self.started_ = False
        self._total = 0.0
        self._recorded.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds that it ran; a running one goes on from here."""
        running = self.started_
        if running:
            self.stop()
        total = self._total
        if reset:
            self.reset()
        if running:
            self.start()
        return 1000 * total

    def mean(self) -> float:
        """Return the mean of the recorded intervals in milliseconds; 0 without any."""
        return 1000 * sum(self._recorded) / len(self._recorded) if self._recorded else 0.0


class SynchronizedWallClockTimer:
    """Stopwatches by name: `timers("forward").start()`."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    def get_timers(self) -> dict[str, _Timer]:
        """Return the stopwatches by name."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Return whether there is one of that name."""
        return name in self.timers

    def log(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Log the milliseconds of those that there are, each divided by `normalizer`, on `ranks` (default: 0)."""
        known = [self.timers[name] for name in names if name in self.timers]
        text = " | ".join(f"{each.name_}: {each.elapsed(reset) / normalizer:.2f}" for each in known)
        log_dist(f"time (ms) | {text}", ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean milliseconds of the recorded intervals, each divided by `normalizer`."""
        return {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}


class ThroughputTimer:
    """Samples a second over the steps of a loop: `start()` and `stop()` around each."""

    def __init__(
        self, config: Any = None, batch_size: int = 1, start_step: int = 2, steps_per_output: int | None = None,
        monitor_memory: bool = False, logging_fn: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """batch_size: samples of a step. start_step: steps that are not counted. steps_per_output: steps between lines.
        """
        self.batch_size = max(batch_size, 1)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.global_step_count = 0
        self._say = logging_fn or logger.info
        self._began: float | None = None
        self._seconds = self._latest = 0.0

    def start(self) -> None:
        """Begin a step, or go on with one."""
        get_accelerator().synchronize()
        self._began = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End what `start` began; with `global_step` a step of the optimizer, too."""
        if self._began is None:
            return
        get_accelerator().synchronize()
        self._latest += time.perf_counter() - self._began
        self._began = None
        if not global_step:
            return
        self.global_step_count += 1
        latest, self._latest = self._latest, 0.0
        if self.global_step_count > self.start_step:
            self._seconds += latest
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._say(
                    f"step {self.global_step_count}: {self.avg_samples_per_sec():.2f} samples/s, the latest step "
                    f"{self.batch_size / max(latest, 1e-9):.2f}"
                )

    def avg_samples_per_sec(self) -> float:
        """Return the samples a second of the counted steps; -1 before there is one."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self._seconds if steps > 0 and self._seconds else -1.0
