"""When skipped steps in a row are too many."""

from __future__ import annotations

from infinity.step.loss_scaler import LossScaler, Skips


def run(skips: Skips, steps: str) -> str:
    """Whether it is too much after each step ("!" or "-"); x is a skipped one. The scale reacts after each."""
    found = ""
    for step in steps:
        skips.update(step == "x")
        found += "!" if skips.too_many else "-"
        if skips.scaler is not None:
            skips.scaler.update(step == "x")
    return found


def test_a_good_step_begins_the_count_anew() -> None:
    assert run(Skips(limit=3), "xx.xxx.x") == "-----!--"


def test_no_limit_is_never_reached() -> None:
    assert run(Skips(limit=0), "x" * 1000) == "-" * 1000


def test_the_search_for_the_first_scale_does_not_count() -> None:
    """From 2^6 the scale reaches its minimum after 6 halvings; only then a further overflow says something."""
    skips = Skips(limit=3, scaler=LossScaler(initial_scale_power=6, hysteresis=1))
    assert run(skips, "x" * 10) == "--------!!"


def test_once_a_step_was_taken_every_skip_counts() -> None:
    skips = Skips(limit=3, scaler=LossScaler(initial_scale_power=16, hysteresis=1))
    assert run(skips, "xxxxx.xxx") == "--------!"


def test_a_fixed_scale_has_nothing_to_search() -> None:
    assert run(Skips(limit=2, scaler=LossScaler(loss_scale=128.0)), "xx") == "-!"
