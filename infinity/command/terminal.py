"""What the commands print: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from infinity.config.units import format_bytes


def say(text: str = "") -> None:
    """Print a line of the result."""
    print(text, flush=True)


def complain(command: str, text: str) -> None:
    """Print why a command could not do what it was asked."""
    print(f"infinity {command}: {text}", file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]], *, right: bool = True) -> str:
    """Rows of cells in columns as wide as they need; all columns but the first are aligned to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right and at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class Progress:
    """What is being done and for how long: one line that is written over on a terminal, a line a task elsewhere."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty()
        self._began = time.monotonic()
        self._width = 0

    def task(self, text: str) -> None:
        """A task begins."""
        line = f"[{time.monotonic() - self._began:4.0f} s] {text}"
        if self._rewrites:
            sys.stderr.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Nothing more comes: the line is wiped."""
        if self._rewrites and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


class Meter:
    """How far a long command is: what is done, the rate and the time left, in one line. Use as a context manager."""

    def __init__(self, what: str, unit: str = "bytes") -> None:
        self.done = 0
        self._what = what
        self._unit = unit
        self._progress = Progress()
        self._every = 0.5 if sys.stderr.isatty() else 5.0
        self._began = self._said = time.monotonic()

    def advance(self, done: int, total: int) -> None:
        """So much of so much is done by now."""
        self.done = done
        now = time.monotonic()
        if now - self._said < self._every:
            return
        self._said = now
        left = (total - done) / max(done / (now - self._began), 1e-9)
        far = f"{self._amount(done)} of {self._amount(total)}"
        self._progress.task(f"{self._what}: {far}, {self._rate()}, {left:.0f} s left")

    def summary(self) -> str:
        """All that was done, and how fast."""
        return f"{self._amount(self.done)} in {time.monotonic() - self._began:.1f} s, {self._rate()}"

    def end(self) -> None:
        """Wipe the line: something else is printed."""
        self._progress.end()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _rate(self) -> str:
        return f"{self._amount(self.done / max(time.monotonic() - self._began, 1e-9))}/s"

    def _amount(self, count: float) -> str:
        return format_bytes(count) if self._unit == "bytes" else f"{count:,.0f} {self._unit}"
