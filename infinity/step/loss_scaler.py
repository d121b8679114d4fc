"""The loss scale of fp16 training.

Small gradients vanish in fp16, so the loss is multiplied by a scale and the gradients are divided by it again. A
dynamic scale doubles after `loss_scale_window` good steps in a row. It halves at the `hysteresis`-th overflow; earlier
ones only skip their step, so that one odd batch does not cost precision for a thousand steps.

Counting skipped steps in a row, so that a diverged model raises instead of skipping for ever.

A step is skipped if a gradient is not finite. In fp16 a dynamic loss scale finds its value by overflowing, so such
skips count only after the first step that was taken, or once the scale cannot fall any further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from infinity.errors import NonFiniteError

_FACTOR = 2.0


@dataclass(kw_only=True)
class LossScaler:
    """The scale that the loss is multiplied by; call `update` after each step.

    The arguments are the keys of the `fp16` section. A `loss_scale` other than 0 is a fixed scale.
    """

    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0

    scale: float = field(init=False)
    # Overflows until the scale halves, that one included; back to `hysteresis` when the scale doubles.
    _patience: int = field(init=False)
    # Steps since the last overflow.
    _good_steps: int = field(init=False, default=0)

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> LossScaler:
        """Make a scaler from a whole `fp16` section, whose other keys are ignored."""
        own = {each.name for each in fields(cls) if each.init}
        return cls(**{key: value for key, value in section.items() if key in own})

    def __post_init__(self) -> None:
        self.scale = self.loss_scale or _FACTOR**self.initial_scale_power
        self._patience = self.hysteresis

    @property
    def dynamic(self) -> bool:
        return self.loss_scale == 0.0

    @property
    def at_minimum(self) -> bool:
        """Whether the scale cannot fall any further."""
        return self.scale <= self.min_loss_scale or not self.dynamic

    def update(self, overflow: bool) -> None:
        """Adapt the scale for the next step. overflow: whether this step's gradients were not finite."""
        if not self.dynamic:
            return
        if overflow:
            self._good_steps = 0
            if self._patience > 1:
                self._patience -= 1
            else:
                self.scale = max(self.scale / _FACTOR, self.min_loss_scale)
            return
        self._good_steps += 1
        grows = self._good_steps % self.loss_scale_window == 0
        if grows or self.consecutive_hysteresis:
            self._patience = self.hysteresis
        if grows:
            self.scale *= _FACTOR

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "patience": self._patience, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = float(state["scale"])
        self._patience = int(state["patience"])
        self._good_steps = int(state["good_steps"])


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
