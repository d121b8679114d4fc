"""Output of the commands: results on standard output, progress and errors on standard error.

Imports only the standard library, because the doctor runs without any package installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence


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
