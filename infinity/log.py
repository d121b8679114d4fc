"""The logger "infinity": INFO lines of rank 0 only, each warning once a process; and the standard descriptors.

infinity never configures the root logger. When an engine starts in a program that has not configured logging, the
logger "infinity" gets its own handler.
"""

from __future__ import annotations

import logging
import os
import sys
import time

logger = logging.getLogger("infinity")
_said: set[str] = set()


def configure_logging(rank: int, level: str | None) -> None:
    """Set the level on rank 0 (default: INFO), at least ERROR on other ranks; add a handler if the program has none."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[infinity] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    chosen = getattr(logging, (level or "INFO").upper(), logging.INFO)
    logger.setLevel(chosen if rank == 0 else max(chosen, logging.ERROR))


def keep_standard_descriptors() -> None:
    """Open /dev/null in the place of each standard descriptor (0 to 2) that the process was started without.

    Otherwise the next file or socket gets its number, and whatever is printed goes there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            # The lowest free number is the answer, and those below are taken. Children inherit it.
            os.set_inheritable(opened, True)


def warn_once(code: str, message: str) -> None:
    """Log a warning with a stable code, once a process for each code."""
    if code not in _said:
        _said.add(code)
        logger.warning("%s [%s]", message, code)


class PhaseProgress:
    """Log lines with bytes done, rate and time left, one in `every_seconds`; a shorter phase logs nothing."""

    def __init__(self, what: str, total_nbytes: int, every_seconds: float = 5.0) -> None:
        self._what = what
        self._total = total_nbytes
        self._every = every_seconds
        self._done = 0
        self._began = self._said = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes done; log a line if it is due."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._said < self._every:
            return
        self._said = now
        rate = self._done / (now - self._began)
        left = max(self._total - self._done, 0) / rate
        logger.info(
            "%s: %.1f of %.1f GB, %.2f GB/s, %.0f s left",
            self._what, self._done / 1e9, self._total / 1e9, rate / 1e9, left,
        )  # fmt: skip
