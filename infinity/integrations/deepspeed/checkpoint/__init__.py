"""`deepspeed.checkpoint`: helpers of clients that save themselves."""

from infinity.integrations.deepspeed.checkpoint import utils

__all__ = ["utils"]
