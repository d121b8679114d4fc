"""`deepspeed.checkpointing`: activation checkpointing, which is torch's; the configuration decides the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as recompute

from infinity.integrations.deepspeed.utils.logging import logger

_configured = False


def configure(
    mpu_: Any, deepspeed_config: Any = None, partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None, profile: bool | None = None,
) -> None:  # fmt: skip
    """Say which of the arguments the configuration has to ask for; `checkpoint` works without this call."""
    global _configured
    _configured = True
    wanted = {"cpu_checkpointing": checkpoint_in_cpu, "partition_activations": partition_activations}
    asked = [f"activation_checkpointing.{key}" for key, value in wanted.items() if value]
    if asked:
        logger.warning(
            "deepspeed.checkpointing.configure: an engine takes this from its configuration: set %s there",
            " and ".join(asked),
        )


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _configured


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function whose activations are computed again in backward."""
    return recompute(function, *args, use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Do the same."""
    return checkpoint(function, *args)


def reset() -> None:
    """Do nothing: nothing is kept between steps."""
