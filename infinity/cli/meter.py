"""The progress line of a long command."""

from __future__ import annotations

import sys
import time

from infinity.cli.terminal import TaskProgress
from infinity.config.units import format_bytes


class Meter:
    """A progress line with the amount done, the rate and the time left. Use as a context manager."""

    def __init__(self, what: str, unit: str = "bytes") -> None:
        self.done = 0
        self._what = what
        self._unit = unit
        self._progress = TaskProgress()
        self._every = 0.5 if sys.stderr.isatty() else 5.0
        self._began = self._said = time.monotonic()

    def advance(self, done: int, total: int) -> None:
        """Note that `done` of `total` units are done; print the line if it is due."""
        self.done = done
        now = time.monotonic()
        if now - self._said < self._every:
            return
        self._said = now
        left = (total - done) / max(done / (now - self._began), 1e-9)
        far = f"{self._amount(done)} of {self._amount(total)}"
        self._progress.task(f"{self._what}: {far}, {self._rate()}, {left:.0f} s left")

    def summary(self) -> str:
        """Return the total amount, the time and the rate."""
        return f"{self._amount(self.done)} in {time.monotonic() - self._began:.1f} s, {self._rate()}"

    def end(self) -> None:
        """Clear the line, so that other text can be printed."""
        self._progress.end()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _rate(self) -> str:
        return f"{self._amount(self.done / max(time.monotonic() - self._began, 1e-9))}/s"

    def _amount(self, count: float) -> str:
        return format_bytes(count) if self._unit == "bytes" else f"{count:,.0f} {self._unit}"
