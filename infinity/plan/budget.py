"""Homes from budgets: fill the tiers with values beside what else the plan needs there.

What else there is (pools, gathered units, gradients, buffers of reductions) depends on where the values are: a unit off
the device is gathered there, states on NVMe pass through a pool in CPU memory. So the tiers are filled as if there were
nothing else, the plan that follows is weighed, and what it holds beside its values is charged to the tiers before they
are filled again. Charges only rise, and with them values only move outward: the first plan that fits is the one with
the least charges. There are as many rounds as pools have steps to grow by, a handful; should there be more, the charges
of a plan with every value on the slowest tier are taken, which are the most there can be.

[Note: what is optimal] The homes are the optimum of `fill` for the charges of their own plan: no other division of the
values over the same room carries more traffic on the GPU tier, nor, of those, on the CPU tier. For more values than
`CORE_COUNT` it is less than one value short of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from infinity.plan.capacity import Capacity
from infinity.plan.homes import Value, fill
from infinity.plan.types import Key, Tier

_ROUNDS_MAX = 16
_Plan = TypeVar("_Plan")


def settle(
    values: Sequence[Value], tiers: Sequence[Tier], capacity: Capacity,
    plan_of: Callable[[Mapping[Key, Tier]], _Plan], nbytes_of: Callable[[_Plan], Mapping[Tier, int]],
) -> _Plan:  # fmt: skip
    """The plan whose values lie as far in as the budgets let them. Where none fits, the one with the most on the
    slowest tier: it is for the caller to refuse.

    tiers: from fast to slow. plan_of: the plan of a choice of homes; nbytes_of: what it holds on each tier.
    """
    charged = dict.fromkeys(Tier, 0)
    for attempt in range(_ROUNDS_MAX):
        plan, charges = _weigh(fill(values, tiers, capacity.left(charged)), values, plan_of, nbytes_of)
        if capacity.fits(nbytes_of(plan)) or all(charges[tier] <= charged[tier] for tier in Tier):
            return plan
        charged = {tier: max(charged[tier], charges[tier]) for tier in Tier}
        if attempt == _ROUNDS_MAX - 2:
            outermost = {value.key: tiers[-1] for value in values}
            charges = _weigh(outermost, values, plan_of, nbytes_of)[1]
            charged = {tier: max(charged[tier], charges[tier]) for tier in Tier}
    return plan


def _weigh(
    homes: Mapping[Key, Tier], values: Sequence[Value], plan_of: Callable[[Mapping[Key, Tier]], _Plan],
    nbytes_of: Callable[[_Plan], Mapping[Tier, int]],
) -> tuple[_Plan, dict[Tier, int]]:  # fmt: skip
    """The plan of these homes, and the bytes that it holds on each tier beside the values."""
    plan = plan_of(homes)
    charges = dict(nbytes_of(plan))
    for value in values:
        charges[homes[value.key]] -= value.nbytes_on(homes[value.key])
    return plan, charges
