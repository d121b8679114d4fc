"""The five learning-rate schedules of the configuration.

A schedule is a curve: a function from a group's own learning rate and the number of the last step to a rate. Its keys
and their defaults are those of its section in `infinity.config.training`. One scheduler walks any curve. Iterations
count from -1, which is the time before the first `step()`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from pydantic import ValidationError

from infinity.config.section import Count, Weight
from infinity.config.training import (
    LRRangeTestParams,
    OneCycleParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)
from infinity.errors import ConfigError


class HasGroups(Protocol):
    """The part of an optimizer that a scheduler uses."""

    param_groups: list[dict[str, Any]]


class Curve(Protocol):
    """A learning rate, and perhaps a momentum, as a function of the step."""

    def lr(self, own_lr: float, iteration: int) -> float:
        """Return the rate of a group whose own rate is `own_lr`, after step number `iteration`."""

    def momentum(self, iteration: int) -> float | None:
        """Return the first beta, or None if the curve does not change it."""


class _KeepsMomentum:
    def momentum(self, iteration: int) -> float | None:
        return None


class LRRangeTest(_KeepsMomentum, LRRangeTestParams):
    """The rate grows by `lr_range_test_step_rate` times its start in every interval: a sweep to find usable rates."""

    def lr(self, own_lr: float, iteration: int) -> float:
        intervals = (iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return self.lr_range_test_min_lr * (1.0 + self.lr_range_test_step_rate * intervals)


class OneCycle(OneCycleParams):
    """The rate rises and falls once while the momentum falls and rises; then the rate decays, the momentum grows."""

    cycle_min_lr: Weight
    cycle_max_lr: Weight

    def lr(self, own_lr: float, iteration: int) -> float:
        height = self._height(iteration + 1)
        rate = self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * height
        return rate / (1.0 + self.decay_lr_rate * self._decay_intervals(iteration + 1))

    def momentum(self, iteration: int) -> float | None:
        if not self.cycle_momentum:
            return None
        height = self._height(iteration + 1)
        momentum = self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height
        return momentum * (1.0 + self.decay_mom_rate * self._decay_intervals(iteration + 1))

    @property
    def _second_step_size(self) -> int:
        return self.cycle_second_step_size or self.cycle_first_step_size

    def _height(self, done: int) -> float:
        """Return the height of the cycle after `done` steps: 0 at its ends and afterwards, 1 at its top."""
        first, second = self.cycle_first_step_size, self._second_step_size
        second_stairs = self.cycle_second_stair_count
        if done <= first:
            return _stairs(done / first, self.cycle_first_stair_count)
        fallen = min((done - first) / second, 1.0)
        return 1.0 - _stairs(fallen, self.cycle_first_stair_count if second_stairs is None else second_stairs)

    def _decay_intervals(self, done: int) -> float:
        beyond = done - self.cycle_first_step_size - self._second_step_size
        return max(beyond, 0) / self.decay_step_size if self.decay_step_size else 0.0


class WarmupLR(_KeepsMomentum, WarmupLRParams):
    """The rate rises from `warmup_min_lr` to `warmup_max_lr` and stays there."""

    def lr(self, own_lr: float, iteration: int) -> float:
        top = own_lr if self.warmup_max_lr is None else self.warmup_max_lr
        return self.warmup_min_lr + (top - self.warmup_min_lr) * self._share(iteration)

    def _share(self, iteration: int) -> float:
        return _warmup(iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupDecayLRParams, WarmupLR):
    """The rate rises as in WarmupLR, then falls in a straight line that reaches `warmup_min_lr` at the last step."""

    total_num_steps: Count

    def _share(self, iteration: int) -> float:
        steps = _warmup_steps(self.warmup_num_steps)
        if iteration < steps:
            return super()._share(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - steps))


class WarmupCosineLR(_KeepsMomentum, WarmupCosineLRParams):
    """The rate rises to the group's own, then falls along half a cosine; every key is a share of the group's rate."""

    total_num_steps: Count

    def lr(self, own_lr: float, iteration: int) -> float:
        steps = _warmup_steps(self.warmup_num_steps)
        if iteration < steps:
            share = _warmup(iteration, self.warmup_num_steps, self.warmup_type)
            return own_lr * (self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * share)
        # Held at its end: a cosine taken further would rise again.
        gone = min((iteration - steps + 1) / max(1, self.total_num_steps - steps), 1.0)
        return own_lr * (self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + math.cos(math.pi * gone)) / 2.0)


class LRScheduler:
    """Sets the groups of an optimizer to a curve. Call `step()` after every optimizer step that was applied."""

    curves: ClassVar[dict[str, type[Any]]] = {
        curve.__name__: curve for curve in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
    }

    def __init__(self, curve: Curve, optimizer: HasGroups) -> None:
        self.curve = curve
        self.optimizer = optimizer
        self.last_batch_iteration = -1
        self._own_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the curve's rate of every group."""
        return [self.curve.lr(own_lr, self.last_batch_iteration) for own_lr in self._own_lrs]

    def get_last_lr(self) -> list[float]:
        """Return the rate that every group has now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step(int(state["last_batch_iteration"]))

    def _apply(self) -> None:
        momentum = self.curve.momentum(self.last_batch_iteration)
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr
            if momentum is not None and "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])


def build_scheduler(type: str, params: Mapping[str, Any], optimizer: HasGroups) -> LRScheduler:
    """Return the schedule of a configuration's `scheduler` section; ConfigError for an unknown type or key."""
    return LRScheduler(curve_of(type, params), optimizer)


def curve_of(type: str, params: Mapping[str, Any]) -> Curve:
    """Return the curve of a schedule's type and keys; ConfigError for an unknown one."""
    curve = LRScheduler.curves.get(type)
    if curve is None:
        raise ConfigError(f"scheduler.type: {type!r} is not one of {', '.join(LRScheduler.curves)}")
    try:
        return curve(**params)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"scheduler.params: {wrong}; the keys are {', '.join(curve.model_fields)}") from error


def check_steps_alone(scheduler: Any) -> None:
    """Raise ConfigError unless `scheduler.step()` works without an argument: the engine calls it so after each step."""
    name, step = type(scheduler).__name__, getattr(scheduler, "step", None)
    if not callable(step):
        raise ConfigError(
            f"lr_scheduler: {name} has no step(); pass a scheduler, or a factory that returns one for the optimizer"
        )
    try:
        signature = inspect.signature(step)
    except ValueError:
        # Compiled code may have none.
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigError(
            f"lr_scheduler: engine.step() calls step() without arguments, and {name}.step{signature} does not allow "
            f"that ({error}). Leave lr_scheduler out, make the scheduler for the optimizer that initialize() returns, "
            "and call its step(...) after engine.step(); a checkpoint keeps its state_dict() in client_state"
        ) from error


def _warmup_steps(steps: int) -> int:
    # The logarithmic warm-up needs two steps to rise from 0 to 1.
    return max(2, steps)


def _warmup(iteration: int, steps: int, shape: str) -> float:
    """Return the share of the warm-up that is done, from 0 to 1. shape: "log" or "linear"."""
    steps = _warmup_steps(steps)
    if iteration < 0:
        return 0.0
    if iteration >= steps:
        return 1.0
    return math.log(iteration + 1) / math.log(steps) if shape == "log" else iteration / steps


def _stairs(share: float, count: int) -> float:
    return math.floor(share * count) / count if count else share
