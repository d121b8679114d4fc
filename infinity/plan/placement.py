"""Where each partition lives, and into how many parts it is cut: a ZeRO stage and an offload device as data.

Stage 3 partitions PARAM and releases whole units after use. Stage 2 keeps units whole and partitions GRAD on arrival;
stage 1 also keeps GRAD whole until the boundary; stage 0 cuts nothing. Below stage 3 (and for small units at stage 3) a
rank's PARAM partition is a view of the whole unit when the optimizer works on the device, and lives beside the
optimizer's states otherwise, so that the split master is at hand where it is stepped.

Homes may differ within one kind, where budgets decide. A unit whose states lie on several tiers keeps
one GRAD partition, on the device only if all of them are there; and its PARAM partition, where that would lie
beside the states, is a view of the whole unit.

Gradients that are not on the device lie in CPU memory, or on a drive: those that the step needs last go there first.
A byte of them moves twice in each micro-batch, one of states twice in a step: so they leave memory last, and only where
no division of the rest fits (`infinity.plan.inputs.fitted`).

Never released are all units below stage 3, and at stage 3 those that are too small to be worth a gather, by DeepSpeed's
bounds `stage3_param_persistence_threshold` and `stage3_model_persistence_threshold`.

Where the budgets decide which tier each value gets, the fastest tier is filled first, then the next. A value is a PARAM
partition or a sub-group's states. What it is worth on a fast tier is its traffic: the bytes of it that move in one
step, were it on a slower one. 16-bit parameters are read by forward and by backward, and read and written by the step:
4 bytes for each byte stored; optimizer states are read and written once: 2. So parameters go before states, and of
equals those nearest the input, whose step is needed first.

`fill_tiers` takes the tiers one after the other. What it puts on a tier carries the greatest traffic that fits there
(`choose`); the tier after that gets the most of the rest, and the last one takes what remains.

What else a plan needs on a tier (pools, gathered units, gradients, buffers of reductions) depends on where the values
are: a unit off the device is gathered there, states on NVMe pass through a pool in CPU memory. So the tiers are filled
as if there were nothing else, the plan that follows is weighed, and what it holds beside its values is charged to the
tiers before they are filled again. Charges only rise, and with them values only move outward, so that the first plan
that fits is one with few charges. There are as many rounds as pools have steps to grow by, a handful; should there be
more, the charges of a plan with every value on the slowest tier are taken, the most there can be. Then what the plan
was charged for and does not need is given back, as long as a better one comes of it.

[Note: what is optimal] The traffic that the GPU tier carries, and with as much there, that of the CPU tier. For the
room that is left beside charges `fill_tiers` finds the best division, and of more values than `CORE_COUNT` one that is
less than one value short of it. On the GPU tier states count with their share of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from infinity.plan.capacity import Capacity
from infinity.plan.layout import SubGroup, UnitLayout
from infinity.plan.request import PlanRequest
from infinity.plan.types import Key, Kind, Tier


def always_whole(layouts: Sequence[UnitLayout], request: PlanRequest) -> frozenset[int]:
    """Return the indices of the units that stay gathered wherever their partitions live."""
    if request.stage < 3:
        return frozenset(layout.index for layout in layouts)
    persistent_numel = 0
    small = []
    for layout in layouts:
        fits = persistent_numel + layout.numel <= request.persistent_total_numel
        # Tiles are small because the whole is not.
        if fits and not layout.is_tile and layout.numel < max(request.persistence_numel, 1):
            persistent_numel += layout.numel
            small.append(layout.index)
    return frozenset(small)


def whole_units(
    layouts: Sequence[UnitLayout], request: PlanRequest, dp: int, params: Sequence[Tier]
) -> frozenset[int]:
    """Return the indices of `always_whole` and of the units whose only partition lies on the device."""
    lucky = (layout.index for layout in layouts if dp == 1 and params[layout.index].on_device)
    return always_whole(layouts, request).union(lucky)


@dataclass(frozen=True, slots=True)
class Homes:
    """The tier of each unit's PARAM partition, as far as it is not bound to the whole unit or to the states; the tier
    of each sub-group's states; and that of each unit's GRAD partition, unless all of its states are on the device.
    """

    params: tuple[Tier, ...]
    states: tuple[Tier, ...]
    grads: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class UnitPlacement:
    """One unit's homes. `parts`: ranks that share PARAM (and GRAD, states); `whole`: gathered for good; `aliased`: the
    PARAM partition is a view of the whole unit and has no bytes of its own."""

    parts: int
    param: Tier
    grad: Tier
    whole: bool
    aliased: bool

    @property
    def refreshed_apart(self) -> bool:
        """Whether the whole unit follows its partition as soon as that is stepped, while others still are: states that
        are not on the device take their time. See [Note: refresh].
        """
        return self.whole and not self.param.on_drive and not self.grad.on_device

    @property
    def refreshed_at_use(self) -> bool:
        """Whether it does so only when it is used next, which needs no other rank."""
        return self.refreshed_apart and self.parts == 1


@dataclass(frozen=True, slots=True)
class Placement:
    """Homes of all partitions: by unit for PARAM and GRAD, by sub-group for STATES."""

    units: tuple[UnitPlacement, ...]
    states: tuple[Tier, ...]
    # Whether gradients stay whole on the device until the accumulation boundary, with several ranks.
    grad_whole: bool


def place(
    layouts: Sequence[UnitLayout], groups: Sequence[SubGroup], request: PlanRequest, dp: int, homes: Homes
) -> Placement:
    """Homes of every partition of a rank; see the module's text for the rules."""
    whole = whole_units(layouts, request, dp, homes.params)
    tiers: dict[int, set[Tier]] = {}
    for group, home in zip(groups, homes.states, strict=True):
        for piece in group.slices:
            tiers.setdefault(piece.unit, set()).add(home)
    # Units without elements, and frozen ones, have no states.
    default = {request.optimizer_tier or Tier.GPU}
    units = tuple(
        _place_unit(
            layout, request, dp, homes.params[layout.index], layout.index in whole, tiers.get(layout.index, default),
            homes.grads[layout.index],
        )
        for layout in layouts
    )
    return Placement(units=units, states=homes.states, grad_whole=sums_at_boundary(request, dp))


def sums_at_boundary(request: PlanRequest, dp: int) -> bool:
    """Whether gradients are summed over `dp` ranks once a step, and are whole on the device until then."""
    return dp > 1 and (request.stage < 2 or request.reduces_once)


def _place_unit(
    layout: UnitLayout, request: PlanRequest, dp: int, param: Tier, whole: bool, states: set[Tier], grad: Tier
) -> UnitPlacement:
    """`param`: its home where it is free to have one; `states`: the tiers of its states; `grad`: the home of its
    gradients unless these are on the device.
    """
    if not layout.trainable:
        # A frozen unit is never stepped. If it stays whole, no rank needs a slice of its own.
        parts = 1 if whole else dp
        param = Tier.GPU if whole else param
    else:
        parts = 1 if request.stage == 0 else dp
        if whole and not (param.on_device and request.stage == 3 and dp == 1):
            # Beside the states; where a budget decides, or they are apart, the view that takes no bytes.
            (param,) = states if request.optimizer_tier is not None and len(states) == 1 else {Tier.GPU}
    grad = Tier.GPU if all(tier.on_device for tier in states) else grad
    return UnitPlacement(parts=parts, param=param, grad=grad, whole=whole, aliased=whole and param.on_device)


# Values beside the border between what a tier takes and what it leaves, for which every choice is looked at.
CORE_COUNT = 14

# Bytes that move in one step for each byte stored: forward, backward (not of a lookup), the step's read and write.
PARAM_TRAFFIC = 4
FROZEN_TRAFFIC = 2
STATES_TRAFFIC = 2


@dataclass(frozen=True, slots=True)
class Value:
    """One partition whose home is open. `traffic`: bytes a step that a fast home saves."""

    key: Key
    # Bytes in memory; on the GPU tier the gradients that then lie beside it are counted, too.
    nbytes: int
    gpu_nbytes: int
    traffic: int

    def nbytes_on(self, tier: Tier) -> int:
        return self.gpu_nbytes if tier.on_device else self.nbytes


def fill_tiers(values: Sequence[Value], tiers: Sequence[Tier], room: Capacity) -> dict[Key, Tier]:
    """A home for every value. `values` come in the order of preference of equals; `tiers` from fast to slow, the last
    one taking whatever remains.
    """
    homes: dict[Key, Tier] = {}
    rest = list(values)
    taken = dict.fromkeys(Tier, 0)
    for tier in tiers[:-1]:
        # Sorting keeps the order of equals; a density is rounded so that equals are equal.
        densest = sorted(rest, key=lambda value: -round(value.traffic / max(value.nbytes_on(tier), 1), 9))
        sizes = [value.nbytes_on(tier) for value in densest]
        limit = room.left(taken).of(tier)
        chosen = choose(sizes, [value.traffic for value in densest], sum(sizes) if limit is None else limit)
        homes.update((densest[at].key, tier) for at in chosen)
        taken[tier] = sum(sizes[at] for at in chosen)
        rest = [value for value in rest if value.key not in homes]
    homes.update((value.key, tiers[-1]) for value in rest)
    return homes


def choose(nbytes: Sequence[int], traffic: Sequence[int], room: int) -> set[int]:
    """Indices of the values that fit into `room` bytes and carry the most traffic together.

    The values come densest first, and are taken in that order as they fit. That loses less than the traffic of the
    first one left out: were that one cut so as to fill the room, nothing could be better. Then every choice among the
    `CORE_COUNT` values around that border is looked at, so that the answer is the optimum for so many values, and never
    worse than the first for more. The one that takes what comes first wins among equals.
    """
    taken: set[int] = set()
    left = room
    border = len(nbytes)
    for at, size in enumerate(nbytes):
        if size <= left:
            taken.add(at)
            left -= size
        elif border == len(nbytes):
            border = at
    if border == len(nbytes):
        return taken
    first = max(0, min(border - CORE_COUNT // 2, len(nbytes) - CORE_COUNT))
    core = list(range(first, min(first + CORE_COUNT, len(nbytes))))
    free = left + sum(nbytes[at] for at in core if at in taken)
    best = _best([nbytes[at] for at in core], [traffic[at] for at in core], free)
    return (taken - set(core)) | {core[at] for at in best}


def _best(nbytes: Sequence[int], traffic: Sequence[int], room: int) -> set[int]:
    """The best of all choices, by depth first: take before leave, cut off where what is left cannot win any more. What
    is like one that was left is left as well: with that one in its place the choice has been seen.
    """
    kinds = [*zip(nbytes, traffic, strict=True)]
    rest = [sum(traffic[at:]) for at in range(len(traffic) + 1)]
    best: tuple[int, tuple[int, ...]] = (-1, ())

    def visit(at: int, left: int, worth: int, chosen: tuple[int, ...], passed: frozenset[tuple[int, int]]) -> None:
        nonlocal best
        if worth + rest[at] <= best[0]:
            return
        if at == len(nbytes):
            best = worth, chosen
            return
        if nbytes[at] <= left and kinds[at] not in passed:
            visit(at + 1, left - nbytes[at], worth + traffic[at], (*chosen, at), passed)
        visit(at + 1, left, worth, chosen, passed | {kinds[at]})

    visit(0, room, 0, (), frozenset())
    return set(best[1])


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
