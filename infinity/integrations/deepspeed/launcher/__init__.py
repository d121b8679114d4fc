"""`deepspeed.launcher`: a name that clients read; the launcher is `infinity run`."""

from infinity.integrations.deepspeed.launcher import runner

__all__ = ["runner"]
