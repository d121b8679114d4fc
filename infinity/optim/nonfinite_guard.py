"""Counting skipped steps in a row, so that a diverged model raises instead of skipping for ever.

A step is skipped if a gradient is not finite. In fp16 a dynamic loss scale finds its value by overflowing, so such
skips count only after the first step that was taken, or once the scale cannot fall any further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infinity.errors import NonFiniteError
from infinity.optim.loss_scaler import LossScaler


@dataclass(kw_only=True)
class Skips:
    """The skipped steps in a row that the loss scale does not explain.

    limit: that many are too many; 0 for no limit.
    """

    limit: int
    scaler: LossScaler | None = None
    in_a_row: int = field(init=False, default=0)
    # Whether a step was ever taken, so that the first search for a scale is over.
    _settled: bool = field(init=False, default=False)

    def update(self, skipped: bool) -> None:
        """Count a step that was skipped or taken. Call it before the loss scaler is updated."""
        if not skipped:
            self.in_a_row, self._settled = 0, True
        elif self.scaler is None or self.scaler.at_minimum or self._settled:
            self.in_a_row += 1

    @property
    def too_many(self) -> bool:
        return 0 < self.limit <= self.in_a_row

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "settled": self._settled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row = int(state["in_a_row"])
        self._settled = bool(state["settled"])

    def error(self, step: int, origin: str, saved: str) -> NonFiniteError:
        """Return the error to raise once too many steps were skipped.

        step: the latest skipped step. origin: the name of the parameter whose gradient was not finite. saved: a
        sentence that says whether a checkpoint was saved.
        """
        way_out = ", or use bf16" if self.scaler is not None else ""
        return NonFiniteError(
            f"{self.in_a_row} steps in a row were skipped (max_skipped_steps), up to step {step}: the gradient of "
            f"{origin} is not finite. Weights and moments are those of the last good step. {saved} Look at the data "
            f"and the learning rate{way_out}."
        )
