"""One quiet logger for the engine: stdlib logging, rank 0 only, each warning once.

infinity never configures the root logger. Its own logger gets a handler when an engine starts in a program that has not
configured logging, so that the start-up lines are seen.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("infinity")
_said: set[str] = set()


def start(rank: int, level: str | None) -> None:
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
