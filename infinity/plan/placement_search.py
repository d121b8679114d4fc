"""Homes from budgets: fill the tiers with values beside what else the plan needs there.

What else there is (pools, gathered units, gradients, buffers of reductions) depends on where the values are: a unit off
the device is gathered there, states on NVMe pass through a pool in CPU memory. So the tiers are filled as if there were
nothing else, the plan that follows is weighed, and what it holds beside its values is charged to the tiers before they
are filled again. Charges only rise, and with them values only move outward, so that the first plan that fits is one
with few charges. There are as many rounds as pools have steps to grow by, a handful; should there be more, the charges
of a plan with every value on the slowest tier are taken, the most there can be. Then what the plan was charged for and
does not need is given back, as long as a better one comes of it.

[Note: what is optimal] The traffic that the GPU tier carries, and with as much there, that of the CPU tier. For the
room that is left beside charges `fill_tiers` finds the best division, and of more values than `CORE_COUNT` one that is
less than one value short of it. On the GPU tier states count with their share of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from infinity.plan.auto_placement import Value, fill_tiers
from infinity.plan.capacity import Capacity
from infinity.plan.types import Key, Kind, Tier

_ROUNDS_MAX = 16
_RETURNS_MAX = 4
_MOVES_MAX = 2
_Plan = TypeVar("_Plan")


def search_placement(
    values: Sequence[Value], tiers: Sequence[Tier], capacity: Capacity,
    plan_of: Callable[[Mapping[Key, Tier]], _Plan], nbytes_of: Callable[[_Plan], Mapping[Tier, int]],
    following_nbytes_of: Callable[[_Plan], int] = lambda plan: 0,
) -> _Plan:  # fmt: skip
    """The plan whose values lie as far in as the budgets let them. Where none fits, the one with the most on the
    slowest tier: it is for the caller to refuse.

    tiers: from fast to slow. plan_of: the plan of a choice of homes; nbytes_of: what it holds on each tier;
    following_nbytes_of: of that on the GPU tier, what values brought with them (gradients: `Value.gpu_nbytes`).
    """

    def weigh(homes: Mapping[Key, Tier]) -> tuple[_Plan, dict[Tier, int]]:
        """The plan of these homes, and the bytes that it holds on each tier beside the values."""
        plan = plan_of(homes)
        charges = dict(nbytes_of(plan))
        charges[Tier.GPU] -= following_nbytes_of(plan)
        for value in values:
            charges[homes[value.key]] -= value.nbytes
        return plan, charges

    charged = dict.fromkeys(Tier, 0)
    for attempt in range(_ROUNDS_MAX):
        homes = fill_tiers(values, tiers, capacity.left(charged))
        plan, charges = weigh(homes)
        if capacity.fits(nbytes_of(plan)):
            break
        if all(charges[tier] <= charged[tier] for tier in Tier):
            return plan
        charged = {tier: max(charged[tier], charges[tier]) for tier in Tier}
        if attempt == _ROUNDS_MAX - 2:
            most = weigh({value.key: tiers[-1] for value in values})[1]
            charged = {tier: max(charged[tier], most[tier]) for tier in Tier}
    for _ in range(_RETURNS_MAX):
        # An earlier round may have been charged for what this plan does not need, and the gradients of a unit that is
        # only partly on the GPU tier are not there after all: try what that leaves.
        promised = sum(value.gpu_nbytes - value.nbytes for value in values if homes[value.key].on_device)
        generous = {**charges, Tier.GPU: charges[Tier.GPU] - promised + following_nbytes_of(plan)}
        for room in (capacity.left(generous), capacity.left(charges)):
            closer = fill_tiers(values, tiers, room)
            if _worth(closer, values) > _worth(homes, values):
                better, needed = weigh(closer)
                if capacity.fits(nbytes_of(better)):
                    plan, homes, charges = better, closer, needed
                    break
        else:
            break
    # A unit whose parameters come to the GPU tier is not gathered there any more: what it brings may pay for itself,
    # which no charge of a plan without it tells.
    outside = (value for value in values if value.key.kind is Kind.PARAM and not homes[value.key].on_device)
    for value in islice(sorted(outside, key=lambda value: -value.traffic), _MOVES_MAX):
        closer = {**homes, value.key: tiers[0]}
        better, _ = weigh(closer)
        if capacity.fits(nbytes_of(better)):
            plan, homes = better, closer
    return plan


def _worth(homes: Mapping[Key, Tier], values: Sequence[Value]) -> tuple[int, int]:
    """Traffic of what is on the GPU tier, and, second to it, on the CPU tier."""
    gpu, cpu = (sum(value.traffic for value in values if homes[value.key] is tier) for tier in (Tier.GPU, Tier.CPU))
    return gpu, cpu
