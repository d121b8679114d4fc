"""The fastest configurations that fit a machine without wearing out its drive.

`search` finds placements for one batch. This module grows the micro-batch as far as it fits and accumulates up to a
usual batch size; several ranks are divided among the axes first (`estimators.axes`). It keeps the three fastest
distinct configurations whose drive lasts long enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from estimators.axes import fit_axes
from estimators.model import described
from estimators.search import Choice, Wish, fitting, search
from infinity.plan.types import Kind

# A drive must last `DAYS_MIN` days of training for `HOURS_A_DAY` hours each.
HOURS_A_DAY = 8
DAYS_MIN = 365
# Most tokens of a step over all ranks that accumulation aims at: fine-tuning rarely uses larger batches.
TOKENS_MAX = 1 << 17
_MICRO_MAX = 16
# How many of the fastest placements of one micro-batch are tried with the next.
_KEPT = 4
SHOWN = 3
PARAMETERS = (Kind.PARAM, Kind.FULL)
_OTHERS = (*PARAMETERS, Kind.GRAD, Kind.FULL_GRAD, Kind.ACTIVATION, Kind.MODEL, Kind.POOL)
STATES = tuple(kind for kind in Kind if kind not in _OTHERS)


@dataclass(frozen=True)
class Advice:
    """At least one choice, the best first. lasting: whether their drives last as long as required."""

    choices: Sequence[Choice]
    lasting: bool

    @property
    def best(self) -> Choice:
        return self.choices[0]


def advise(wish: Wish) -> Advice:
    """Return the fastest configurations that fit and last; if none fits, the one that exceeds its limits least."""
    found = fit_axes(wish) if _divisible(wish) else []
    found = found or [*_grown(wish)]
    if not found:
        return Advice([search(wish)], lasting=True)
    lasting = [choice for choice in found if lasts(choice)]
    found = sorted(lasting or found, key=lambda choice: tokens_a_second(choice) / choice.handicap, reverse=True)
    if not lasting:
        found.sort(key=lambda choice: days_of_training(choice) or 0.0, reverse=True)
    return Advice([*_different(found)][:SHOWN], lasting=bool(lasting))


def _divisible(wish: Wish) -> bool:
    """Return whether there are axes to choose for the ranks."""
    model = described(wish.model)
    return wish.options.get("ranks", 1) > 1 and model.module is None and model.lora is None


def tokens_a_second(choice: Choice) -> float:
    """Return the tokens a second of all ranks."""
    return choice.estimate.outline.tokens_a_second * choice.estimate.plan.topology.dp


def days_of_training(choice: Choice) -> float | None:
    """Return the days at `HOURS_A_DAY` until the drives reach their rated endurance; None if nothing is written."""
    days = choice.estimate.outline.days_to_endurance
    return None if days is None else days * 24 / HOURS_A_DAY


def lasts(choice: Choice) -> bool:
    """Return whether the drives last for `DAYS_MIN`."""
    days = days_of_training(choice)
    return days is None or days >= DAYS_MIN


def _grown(wish: Wish) -> Iterator[Choice]:
    """Yield what fits, from micro-batches of one sequence up, each with and without accumulation."""
    micro, ranks = wish.options.get("batch") or 1, wish.data
    known: Sequence[Mapping[str, Any]] | None = None
    while True:
        sized = replace(wish, options={**wish.options, "batch": micro})
        alone = fitting(sized, known)
        yield from alone
        if not alone:
            return
        tokens = alone[0].estimate.work.tokens * ranks
        configs = [choice.config for choice in sorted(alone, key=lambda choice: choice.seconds)[:_KEPT]]
        if (steps := TOKENS_MAX // tokens) > 1:
            yield from fitting(sized, [{**config, "gradient_accumulation_steps": steps} for config in configs])
        micro, known = 2 * micro, configs
        if wish.options.get("batch") is not None or micro > _MICRO_MAX:
            return


def _different(choices: Sequence[Choice]) -> Iterator[Choice]:
    """Yield the first of the choices that differ only in batch and gathered bytes."""
    seen = set()
    for choice in choices:
        work, steps = choice.estimate.work, choice.estimate.accumulation
        computed = work.checkpointing, work.tiled_loss, work.tiled_mlps, steps > 1
        topology = choice.estimate.plan.topology
        axes = topology.dp, topology.tp, topology.pp
        kind = *(tuple(choice.estimate.homes(*kinds)) for kinds in (PARAMETERS, STATES)), computed, axes
        if kind not in seen:
            seen.add(kind)
            yield choice
