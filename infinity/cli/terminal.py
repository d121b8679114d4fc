"""What the commands print: results on standard output, progress and errors on standard error.

Imports the standard library only: the doctor speaks where no package is installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence


def say(text: str = "") -> None:
    """Print a line of the result."""
    print(text, flush=True)


def complain(command: str, text: str) -> None:
    """Print why a command could not do what it was asked."""
    print(f"infinity {command}: {text}", file=sys.stderr, flush=True)


def format_table(rows: Sequence[Sequence[str]], *, right: bool = True) -> str:
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


class TaskProgress:
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
