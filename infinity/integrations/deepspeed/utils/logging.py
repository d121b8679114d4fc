"""`deepspeed.utils.logging`: the logger, which is the package's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infinity.distributed.process_groups import detect
from infinity.log import logger

__all__ = ["log_dist", "logger"]


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on the named ranks; without names, or with -1 among them, on every rank."""
    if not ranks or -1 in ranks or detect().rank in ranks:
        logger.log(level, "[Rank %d] %s", detect().rank, message)
