"""The five schedules, against values worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.optim.lr import LRScheduler, build_scheduler


def _optimizer(*lrs: float) -> Any:
    return SimpleNamespace(param_groups=[{"lr": lr, "betas": (0.9, 0.999)} for lr in lrs or (2.0,)])


def _walk(scheduler: LRScheduler, steps: int) -> list[float]:
    """The first group's rate before the first step and after each."""
    rates = [scheduler.get_last_lr()[0]]
    for _ in range(steps):
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


WARMUP = {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 1.0}


@pytest.mark.parametrize(
    ("kind", "params", "rates"),
    [
        ("LRRangeTest", {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2}, [1.0, 1.5, 2.0, 2.5, 3.0]),
        (
            "LRRangeTest",
            {
                "lr_range_test_min_lr": 1.0,
                "lr_range_test_step_size": 2,
                "lr_range_test_step_rate": 3.0,
                "lr_range_test_staircase": True,
            },
            [1.0, 1.0, 4.0, 4.0, 7.0],
        ),
        ("WarmupLR", WARMUP, [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]),
        ("WarmupLR", {**WARMUP, "warmup_min_lr": 0.5}, [0.5, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0]),
        ("WarmupLR", {**WARMUP, "warmup_max_lr": None}, [0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 2.0]),
        ("WarmupLR", {**WARMUP, "warmup_type": "log"}, [0.0, 0.0, 0.5, 0.792481250, 1.0, 1.0]),
        ("WarmupLR", {**WARMUP, "warmup_num_steps": 0}, [0.0, 0.0, 0.5, 1.0, 1.0]),
        (
            "WarmupDecayLR",
            {**WARMUP, "total_num_steps": 8},
            [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0],
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": 6, "warmup_num_steps": 2, "cos_min_ratio": 0.1, "warmup_type": "linear"},
            [0.0, 0.0, 1.0, 1.736396103, 1.1, 0.463603897, 0.2, 0.2, 0.2],
        ),
        (
            "OneCycle",
            {
                "cycle_min_lr": 1.0,
                "cycle_max_lr": 3.0,
                "cycle_first_step_size": 2,
                "cycle_second_step_size": 4,
                "decay_lr_rate": 0.5,
                "decay_step_size": 2,
            },
            [1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0, 0.8, 2 / 3],
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
            [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0],
        ),
    ],
)
def test_rates_are_those_worked_out_by_hand(kind: str, params: dict[str, Any], rates: list[float]) -> None:
    assert _walk(build_scheduler(kind, params, _optimizer()), len(rates) - 1) == pytest.approx(rates)


def test_one_cycle_moves_the_first_beta_against_the_rate() -> None:
    optimizer = _optimizer()
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
    scheduler = build_scheduler("OneCycle", {**params, "decay_step_size": 2, "decay_mom_rate": 0.1}, optimizer)
    momenta = [optimizer.param_groups[0]["betas"][0]]
    for _ in range(8):
        scheduler.step()
        momenta.append(optimizer.param_groups[0]["betas"][0])
    assert momenta == pytest.approx([0.9, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.945, 0.99])
    assert optimizer.param_groups[0]["betas"][1] == 0.999


def test_one_cycle_leaves_momentum_alone_when_told_or_when_there_is_none() -> None:
    optimizer = _optimizer()
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0}
    build_scheduler("OneCycle", {**params, "cycle_momentum": False}, optimizer).step()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    plain = SimpleNamespace(param_groups=[{"lr": 1.0}])
    build_scheduler("OneCycle", params, plain).step()
    assert set(plain.param_groups[0]) == {"lr"}


def test_every_group_is_scaled_from_its_own_rate() -> None:
    optimizer = _optimizer(1.0, 10.0)
    scheduler = build_scheduler(
        "WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 4, "warmup_type": "linear"}, optimizer
    )
    scheduler.step(2)
    assert scheduler.get_lr() == scheduler.get_last_lr() == [0.5, 5.0]


def test_a_resumed_schedule_continues_where_it_was() -> None:
    params = {**WARMUP, "total_num_steps": 20}
    whole = _walk(build_scheduler("WarmupDecayLR", params, _optimizer()), 12)
    first = build_scheduler("WarmupDecayLR", params, _optimizer())
    _walk(first, 7)
    second = build_scheduler("WarmupDecayLR", params, _optimizer())
    second.load_state_dict(first.state_dict())
    assert _walk(second, 5) == whole[7:]


def test_a_torch_optimizer_is_driven_as_it_is() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, optimizer)
    assert _walk(scheduler, 3) == [0.0, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("kind", ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_what_the_configuration_holds_builds_its_schedule(kind: str) -> None:
    required: dict[str, dict[str, Any]] = {
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0},
        "WarmupDecayLR": {"total_num_steps": 5000},
        "WarmupCosineLR": {"total_num_steps": 5000},
    }
    params = required.get(kind, {})
    section = load_config({"scheduler": {"type": kind, "params": params}}).scheduler
    assert section is not None
    scheduler = build_scheduler(section.type, section.params.model_dump(), _optimizer())
    # The defaults of the schema are the defaults here.
    assert scheduler.curve == build_scheduler(kind, params, _optimizer()).curve


def test_unknown_types_and_keys_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"scheduler.type: 'Cosine' is not one of LRRangeTest"):
        build_scheduler("Cosine", {}, _optimizer())
    with pytest.raises(ConfigError, match=r"(?s)warmup_step.*the keys are .*warmup_num_steps"):
        build_scheduler("WarmupLR", {"warmup_step": 3}, _optimizer())
