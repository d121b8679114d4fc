"""Sequences of overflows, with the scales worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from infinity.config import load_config
from infinity.step.loss_scaler import LossScaler


def _scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step; x is an overflow."""
    scales = []
    for step in steps:
        scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(
    ("settings", "steps", "scales"),
    [
        # Doubles after every window of good steps.
        ({"loss_scale_window": 3}, "......", [16, 16, 32, 32, 32, 64]),
        # The first overflow is borne, the second halves; nothing restores the patience but a doubling.
        ({"loss_scale_window": 3}, "xx", [16, 8]),
        ({"loss_scale_window": 3}, "x..x.x", [16, 16, 16, 8, 8, 4]),
        ({"loss_scale_window": 3}, "x...xx", [16, 16, 16, 32, 32, 16]),
        # An overflow starts the window again.
        ({"loss_scale_window": 3, "hysteresis": 1}, "..x....", [16, 16, 8, 8, 8, 16, 16]),
        # With consecutive hysteresis every good step restores the patience.
        ({"loss_scale_window": 9, "consecutive_hysteresis": True}, "x.x.xx", [16, 16, 16, 16, 16, 8]),
        # Once the patience is spent, every further overflow halves.
        ({"loss_scale_window": 9, "hysteresis": 3}, "xxxxx", [16, 16, 8, 4, 2]),
        # At the minimum it stays.
        ({"loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 4.0}, "xxxx..", [8, 4, 4, 4, 4, 8]),
        # A window of one step doubles at once.
        ({"loss_scale_window": 1}, "..", [32, 64]),
    ],
)
def test_scales_are_those_worked_out_by_hand(settings: dict[str, Any], steps: str, scales: list[float]) -> None:
    assert _scales(LossScaler(initial_scale_power=4, **settings), steps) == scales


# One run, worked out by hand from the keys' documented meaning: initial scale 2^5, window 4, hysteresis 2, minimum 8.
# Overflow of the step, then the scale and the overflows still borne (counting the one that halves) after it: without
# consecutive_hysteresis, and with it.
TABLE = [
    # overflow  without    with
    (False, (32.0, 2), (32.0, 2)),
    (True, (32.0, 1), (32.0, 1)),  # borne
    (False, (32.0, 1), (32.0, 2)),  # a good step restores the patience only with consecutive_hysteresis
    (False, (32.0, 1), (32.0, 2)),
    (False, (32.0, 1), (32.0, 2)),
    (False, (64.0, 2), (64.0, 2)),  # four good steps: doubled, patience restored in both
    (True, (64.0, 1), (64.0, 1)),
    (True, (32.0, 1), (32.0, 1)),  # the patience is spent: every further overflow halves
    (True, (16.0, 1), (16.0, 1)),
    (True, (8.0, 1), (8.0, 1)),
    (True, (8.0, 1), (8.0, 1)),  # at the minimum
    (False, (8.0, 1), (8.0, 2)),
    (False, (8.0, 1), (8.0, 2)),
    (False, (8.0, 1), (8.0, 2)),
    (False, (16.0, 2), (16.0, 2)),
    (False, (16.0, 2), (16.0, 2)),
    (False, (16.0, 2), (16.0, 2)),
    (False, (16.0, 2), (16.0, 2)),
    (False, (32.0, 2), (32.0, 2)),  # and every four good steps after that
    (True, (32.0, 1), (32.0, 1)),
    (False, (32.0, 1), (32.0, 2)),
    (True, (16.0, 1), (32.0, 1)),  # where the two part
]


@pytest.mark.parametrize("consecutive", [False, True])
def test_a_long_run_follows_the_table_row_by_row(consecutive: bool) -> None:
    scaler = LossScaler(
        initial_scale_power=5, loss_scale_window=4, hysteresis=2, min_loss_scale=8.0, consecutive_hysteresis=consecutive
    )
    seen = []
    for overflow, *_ in TABLE:
        scaler.update(overflow)
        seen.append((scaler.scale, scaler.state_dict()["patience"]))
    assert seen == [row[1 + consecutive] for row in TABLE]


def test_a_fixed_scale_stays() -> None:
    scaler = LossScaler(loss_scale=128.0)
    assert not scaler.dynamic
    assert scaler.at_minimum
    assert _scales(scaler, "x.xxx" + "." * 2000) == [128.0] * 2005


def test_the_minimum_is_known() -> None:
    scaler = LossScaler(initial_scale_power=1, hysteresis=1)
    assert not scaler.at_minimum
    scaler.update(overflow=True)
    assert scaler.at_minimum


def test_a_resumed_scaler_continues_where_it_was() -> None:
    steps = "..x...x.xx....x..xxx......"
    settings: dict[str, Any] = {"initial_scale_power": 10, "loss_scale_window": 3}
    whole = _scales(LossScaler(**settings), steps)
    for at in range(len(steps)):
        first, second = LossScaler(**settings), LossScaler(**settings)
        head = _scales(first, steps[:at])
        second.load_state_dict(first.state_dict())
        assert head + _scales(second, steps[at:]) == whole


def test_the_fp16_section_holds_its_arguments() -> None:
    fp16 = load_config({"fp16": {"enabled": True}}).fp16
    scaler = LossScaler(
        **fp16.model_dump(exclude={"enabled", "auto_cast", "fp16_master_weights_and_grads"}),
    )
    assert scaler == LossScaler()
    assert scaler.scale == 65536.0
