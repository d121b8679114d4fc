"""Skipped steps in a row: when patience ends.

A gradient that is not finite skips its step. One odd batch is borne; a model that has diverged would skip for ever. In
fp16 overflows are how a dynamic scale finds its place, so they only count once it has found it (a step was taken), or
can fall no further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infinity.errors import NonFiniteError
from infinity.optim.loss_scaler import LossScaler


@dataclass(kw_only=True)
class Skips:
    """`in_a_row` counts skipped steps that the loss scale does not explain; `limit` of them are too many (0: never)."""

    limit: int
    scaler: LossScaler | None = None
    in_a_row: int = field(init=False, default=0)
    # Whether a step was ever taken: then the first search for a scale is over.
    _settled: bool = field(init=False, default=False)

    def update(self, skipped: bool) -> None:
        """A step was skipped or taken. Called before the scale reacts to it."""
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
        """What to raise when they are too many, the latest being `step`, because of the gradient of `origin`. `saved`:
        a sentence about what became of the weights.
        """
        way_out = ", or use bf16" if self.scaler is not None else ""
        return NonFiniteError(
            f"{self.in_a_row} steps in a row were skipped (max_skipped_steps), up to step {step}: the gradient of "
            f"{origin} is not finite. Weights and moments are those of the last good step. {saved} Look at the data "
            f"and the learning rate{way_out}."
        )
