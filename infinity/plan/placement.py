"""Where each partition lives, and into how many parts it is cut: a ZeRO stage and an offload device as data.

Stage 3 partitions PARAM and releases whole units after use. Stage 2 keeps units whole and partitions GRAD on arrival;
stage 1 also keeps GRAD whole until the boundary; stage 0 cuts nothing. Below stage 3 (and for small units at stage 3) a
rank's PARAM partition is a view of the whole unit when the optimizer works on the device, and lives beside the
optimizer's states otherwise, so that the split master is at hand where it is stepped.

Homes may differ within one kind: see plan/auto_placement for budgets. A unit whose states lie on several tiers keeps
one GRAD partition, in CPU memory unless all of them are on the device; and its PARAM partition, where that would lie
beside the states, is a view of the whole unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.layout import SubGroup, UnitLayout
from infinity.plan.persistent_units import whole_units
from infinity.plan.request import PlanRequest
from infinity.plan.types import Tier


@dataclass(frozen=True, slots=True)
class Homes:
    """The tier of each unit's PARAM partition, as far as it is not bound to the whole unit or to the states; and the
    tier of each sub-group's states.
    """

    params: tuple[Tier, ...]
    states: tuple[Tier, ...]


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
            layout, request, dp, homes.params[layout.index], layout.index in whole, tiers.get(layout.index, default)
        )
        for layout in layouts
    )
    return Placement(units=units, states=homes.states, grad_whole=sums_at_boundary(request, dp))


def sums_at_boundary(request: PlanRequest, dp: int) -> bool:
    """Whether gradients are summed over `dp` ranks once a step, and are whole on the device until then."""
    return dp > 1 and (request.stage < 2 or request.reduces_once)


def _place_unit(
    layout: UnitLayout, request: PlanRequest, dp: int, param: Tier, whole: bool, states: set[Tier]
) -> UnitPlacement:
    """`param`: its home where it is free to have one; `states`: the tiers of its states."""
    if not layout.trainable:
        # A frozen unit is never stepped. If it stays whole, no rank needs a slice of its own.
        parts = 1 if whole else dp
        param = Tier.GPU if whole else param
    else:
        parts = 1 if request.stage == 0 else dp
        if whole and not (param.on_device and request.stage == 3 and dp == 1):
            # Beside the states; where a budget decides, or they are apart, the view that takes no bytes.
            (param,) = states if request.optimizer_tier is not None and len(states) == 1 else {Tier.GPU}
    grad = Tier.GPU if all(tier.on_device for tier in states) else Tier.CPU
    return UnitPlacement(parts=parts, param=param, grad=grad, whole=whole, aliased=whole and param.on_device)
