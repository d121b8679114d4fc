"""One quiet logger for the engine: stdlib logging, rank 0 only, each warning once.

infinity never configures the root logger. Its own logger gets a handler when an engine starts in a program that has not
configured logging, so that the start-up lines are seen.
"""

from __future__ import annotations

import logging
import sys
import time

logger = logging.getLogger("infinity")
_said: set[str] = set()


def configure_logging(rank: int, level: str | None) -> None:
    """Make INFO lines of rank 0 visible, and only errors of others, unless the program configured logging itself."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[infinity] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    chosen = getattr(logging, (level or "INFO").upper(), logging.INFO)
    logger.setLevel(chosen if rank == 0 else max(chosen, logging.ERROR))


def warn_once(code: str, message: str) -> None:
    """A warning with a stable code, said once a process however often its cause occurs."""
    if code not in _said:
        _said.add(code)
        logger.warning("%s [%s]", message, code)


class PhaseProgress:
    """Bytes done, rate and time left of a long phase, said once in `every_seconds`; a short one says nothing."""

    def __init__(self, what: str, total_nbytes: int, every_seconds: float = 5.0) -> None:
        self._what = what
        self._total = total_nbytes
        self._every = every_seconds
        self._done = 0
        self._began = self._said = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Count bytes that have been worked on."""
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
