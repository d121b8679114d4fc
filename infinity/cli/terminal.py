"""Output of the commands: results on standard output, progress and errors on standard error.

Imports only the standard library, because the doctor runs without any package installed.

The progress line of a long command.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from infinity.base.sizes import format_bytes


def say(text: str = "") -> None:
    """Print a line of the result."""
    print(text, flush=True)


def complain(command: str, text: str) -> None:
    """Print why `command` failed."""
    print(f"infinity {command}: {text}", file=sys.stderr, flush=True)


def format_table(rows: Sequence[Sequence[str]], *, right: bool = True) -> str:
    """Return rows of cells as aligned columns; `right` aligns all columns but the first to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right and at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class TaskProgress:
    """The current task with the time elapsed: one rewritten line on a terminal, one line a task elsewhere."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty()
        self._began = time.monotonic()
        self._width = 0

    def task(self, text: str) -> None:
        """Print that a task begins."""
        line = f"[{time.monotonic() - self._began:4.0f} s] {text}"
        if self._rewrites:
            sys.stderr.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._rewrites and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


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
