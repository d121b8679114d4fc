"""One quiet line every `steps_per_print` optimizer steps, on rank 0.

    step 200: loss 2.314, lr 0.0003, gradient norm 0.81, 1.2e+04 tokens/s, 3 skipped; gpu 1.20 GB, nvme 14.20 GB

The loss is rank 0's own, averaged over the micro-steps of the step. Tokens are counted where the model is called with
`input_ids`, or with a table of whole numbers first; otherwise samples are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from infinity.config.units import format_bytes
from infinity.log import logger
from infinity.memory.ledger import Ledger
from infinity.plan.types import Tier


class Progress:
    """Counts between two lines. With `every` 0 (or None) it does nothing."""

    def __init__(self, every: int | None, ledger: Ledger, *, world_size: int) -> None:
        self._every = every or 0
        self._ledger = ledger
        self._world_size = world_size
        self._since, self._samples, self._tokens = time.perf_counter(), 0, 0

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A forward for training begins with these arguments."""
        ids = kwargs.get("input_ids", args[0] if args else None) if self._every else None
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            self._tokens += ids.numel() * self._world_size

    def stepped(
        self, step: int, samples: int, *, losses: Sequence[Tensor], lr: float, norm: float, scale: float | None,
        skipped: int,
    ) -> None:  # fmt: skip
        """An optimizer step is over; `step` counts them and `samples` what all ranks have trained on since the start.

        Only where a line is due anything is computed, and the device waited for.
        """
        if not self._every or step % self._every:
            return
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        amount, unit = (self._tokens, "tokens") if self._tokens else (samples - self._samples, "samples")
        parts = [f"lr {lr:.3g}", f"gradient norm {norm:.4g}", f"{amount / seconds:.3g} {unit}/s"]
        if losses:
            parts.insert(0, f"loss {sum(float(loss) for loss in losses) / len(losses):.4g}")
        if scale is not None:
            parts.append(f"loss scale {scale:g}")
        if skipped:
            parts.append(f"{skipped} skipped")
        held = ", ".join(f"{tier.value} {format_bytes(self._ledger.total(tier))}" for tier in Tier)
        logger.info("step %d: %s; %s", step, ", ".join(parts), held)
        self._since, self._samples, self._tokens = now, samples, 0
