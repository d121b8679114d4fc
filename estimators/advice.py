"""The fastest configurations that fit a machine and do not wear its drive out.

`search` finds placements for one batch; here micro-batches grow as far as they fit, and are accumulated up to a batch
that is still usual. Of what lasts long enough, the three fastest that differ are shown, with what each costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from estimators.search import Choice, Wish, fitting, search
from infinity.plan.types import Kind

# Training at so many hours a day, a drive has to last so many days.
HOURS_A_DAY = 8
DAYS_MIN = 365
# Tokens of a step over all ranks, beyond which nothing is accumulated: tuning runs rarely take larger batches.
TOKENS_MAX = 1 << 17
_MICRO_MAX = 16
# Of each micro-batch's placements, so many of the fastest are tried with the next.
_KEPT = 4
SHOWN = 3
PARAMETERS = (Kind.PARAM, Kind.FULL)
_OTHERS = (*PARAMETERS, Kind.GRAD, Kind.FULL_GRAD, Kind.ACTIVATION, Kind.MODEL, Kind.POOL)
STATES = tuple(kind for kind in Kind if kind not in _OTHERS)


@dataclass(frozen=True)
class Advice:
    """Choices from the best on, at least one; and whether those last as long as they should."""

    choices: Sequence[Choice]
    lasting: bool

    @property
    def best(self) -> Choice:
        return self.choices[0]


def advise(wish: Wish) -> Advice:
    """The fastest configurations that fit and last; where none fits, what lacks the least."""
    found = [*_grown(wish)]
    if not found:
        return Advice([search(wish)], lasting=True)
    lasting = [choice for choice in found if lasts(choice)]
    found = sorted(lasting or found, key=lambda choice: tokens_a_second(choice) / choice.handicap, reverse=True)
    if not lasting:
        found.sort(key=lambda choice: days_of_training(choice) or 0.0, reverse=True)
    return Advice([*_different(found)][:SHOWN], lasting=bool(lasting))


def tokens_a_second(choice: Choice) -> float:
    """Of all ranks."""
    return choice.estimate.outline.tokens_a_second * choice.estimate.plan.topology.world_size


def days_of_training(choice: Choice) -> float | None:
    """Days at `HOURS_A_DAY` until the drives have taken what they are rated for; None where nothing is written."""
    days = choice.estimate.outline.days_to_endurance
    return None if days is None else days * 24 / HOURS_A_DAY


def lasts(choice: Choice) -> bool:
    """Whether the drives bear it for `DAYS_MIN`."""
    days = days_of_training(choice)
    return days is None or days >= DAYS_MIN


def _grown(wish: Wish) -> Iterator[Choice]:
    """What fits, from one sequence at a time on, each alone and accumulated."""
    micro, ranks = wish.options.get("batch") or 1, wish.options.get("ranks", 1)
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
    """Of choices that say the same in the table but for batches and what they gather, the first."""
    seen = set()
    for choice in choices:
        work, steps = choice.estimate.work, choice.estimate.accumulation
        computed = work.checkpointing, work.tiled_loss, steps > 1
        kind = *(tuple(choice.estimate.homes(*kinds)) for kinds in (PARAMETERS, STATES)), computed
        if kind not in seen:
            seen.add(kind)
            yield choice
