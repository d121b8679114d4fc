"""Lower bounds that the configuration does not set until a plan fits.

Only bounds that change speed and never results are lowered: how much is gathered at once, read ahead, kept for its next
use or stepped at a time. Units and tiles keep the bounds that were asked for, because gradient norms are summed unit by
unit and their bits must not depend on the machine's memory.

The bound of gathered bytes is lowered first and then raised as far as there is room. If the lowest is not enough,
smaller sub-groups and shorter prefetches are tried step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from infinity.config.units import format_bytes
from infinity.plan.plan import SPLIT_NUMEL_MIN, Plan
from infinity.plan.request import PlanRequest
from infinity.plan.types import DTYPE_NBYTES

_ZERO = "zero_optimization"
# Fields of a request that only bound memory -> the key that chooses each.
KEYS = {
    "live_numel": f"{_ZERO}.stage3_max_live_parameters", "prefetch_numel": f"{_ZERO}.stage3_prefetch_bucket_size",
    "reuse_numel": f"{_ZERO}.stage3_max_reuse_distance", "sub_group_numel": f"{_ZERO}.sub_group_size",
}  # fmt: skip
# Each step takes the bounds of what is in flight down to a share of what was asked for.
_SHARES = (1, 4, 16, 64)
# What is gathered at once is found to one part in so many of what was asked for.
_GRAIN = 64


def fitted(
    request: PlanRequest, chosen: frozenset[str], plan_of: Callable[[PlanRequest], Plan], *,
    fits: Callable[[Plan], bool], fits_at_rest: Callable[[Plan], bool], raised: bool,
) -> Plan:  # fmt: skip
    """The plan that was asked for where it fits, else the first with lowered bounds that does. Where none does, the
    smallest of them, or the one that was asked for where not even its values fit: for the caller to refuse.

    chosen: fields of `KEYS` that the configuration sets; they stay. fits_at_rest: whether the bytes that a plan holds
    under any bounds fit. raised: whether to search for the largest bounds that fit. A plan whose homes budgets find is
    bounded by the limits already and costs several plans itself, so that one more is enough.
    """
    plan = plan_of(request)
    if fits(plan) or not fits_at_rest(plan):
        return plan
    steps = list(_steps(request, chosen))
    smallest = plan_of(_live(steps[-1], 1, chosen))
    if not raised or not fits(smallest):
        return smallest
    for lowered in steps[:-1]:
        plan = plan_of(_live(lowered, 1, chosen))
        if fits(plan):
            return plan if "live_numel" in chosen else _raised(lowered, plan, chosen, plan_of, fits)
    return smallest if "live_numel" in chosen else _raised(steps[-1], smallest, chosen, plan_of, fits)


def _steps(request: PlanRequest, chosen: frozenset[str]) -> Iterator[PlanRequest]:
    """The request as it is, then with less and less in flight."""
    for share in _SHARES:
        split = max(request.split_numel // share, min(request.split_numel, SPLIT_NUMEL_MIN))
        yield _lower(
            request, chosen, split_numel=split,
            prefetch_numel=0 if share == _SHARES[-1] else request.prefetch_numel // share,
            # Where states do not move, a sub-group is not cut by the split.
            sub_group_numel=request.sub_group_numel if share == 1 else min(request.sub_group_numel, 4 * split),
        )  # fmt: skip


def _lower(request: PlanRequest, chosen: frozenset[str], **values: Any) -> PlanRequest:
    """The request with these values (numbers of elements), except for the chosen ones."""
    return replace(request, **{name: value for name, value in values.items() if name not in chosen})


def _live(request: PlanRequest, numel: int, chosen: frozenset[str]) -> PlanRequest:
    return _lower(request, chosen, live_numel=numel, reuse_numel=min(request.reuse_numel, numel))


def _raised(
    request: PlanRequest, least: Plan, chosen: frozenset[str], plan_of: Callable[[PlanRequest], Plan],
    fits: Callable[[Plan], bool],
) -> Plan:  # fmt: skip
    """The plan that fits with the most gathered at once, by halving."""
    width = DTYPE_NBYTES[request.compute_dtype]
    low = max(least.pools.gathered_nbytes // width, 1)
    high = min(request.live_numel, sum(least.full_nbytes()) // width)
    grain, best = max(high // _GRAIN, 1), least
    while high - low > grain:
        middle = (low + high) // 2
        plan = plan_of(_live(request, middle, chosen))
        if fits(plan):
            low, best = middle, plan
        else:
            high = middle
    return best


def lowered_in_words(asked: PlanRequest, plan: Plan) -> str:
    """What of the plan is lower than was asked for: "0.4 GB gathered at once instead of 2 GB, ..."; empty: nothing."""
    made, width = plan.request, DTYPE_NBYTES[plan.request.compute_dtype]
    parts = []
    gathered, wanted = plan.pools.gathered_nbytes, min(asked.live_numel * width, sum(plan.full_nbytes()))
    if made.live_numel < asked.live_numel and gathered < wanted:
        parts.append(f"{format_bytes(gathered)} gathered at once instead of {format_bytes(wanted)}")
    if made.prefetch_numel < asked.prefetch_numel:
        ahead, wanted = made.prefetch_numel * width, asked.prefetch_numel * width
        parts.append(f"{format_bytes(ahead)} read ahead instead of {format_bytes(wanted)}")
    sizes = [min(request.sub_group_numel, request.split_numel) for request in (made, asked)]
    if sizes[0] < sizes[1]:
        parts.append(f"sub-groups of {sizes[0]:,} elements instead of {sizes[1]:,}")
    return ", ".join(parts)
