"""Where each partition lives, and into how many parts it is cut: a ZeRO stage and an offload device as data.

Stage 3 partitions PARAM and releases whole units after use. Stage 2 keeps units whole and partitions GRAD on arrival;
stage 1 also keeps GRAD whole until the boundary; stage 0 cuts nothing. Below stage 3 (and for small units at stage 3) a
rank's PARAM partition is a view of the whole unit when the optimizer works on the device, and lives beside the
optimizer's states otherwise, so that the split master is at hand where it is stepped.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.plan.layout import SubGroup, UnitLayout
from infinity.plan.types import Tier


@dataclass(frozen=True, slots=True)
class Policy:
    """What the configuration and the topology ask of placement."""

    stage: int
    dp: int
    param_tier: Tier
    optimizer_tier: Tier
    persistence_numel_max: int = 100_000
    persistent_total_numel_max: int = 2**63 - 1


@dataclass(frozen=True, slots=True)
class UnitPlacement:
    """One unit's homes. `parts`: ranks that share PARAM (and GRAD, states); `whole`: gathered for good; `aliased`: the
    PARAM partition is a view of the whole unit and has no bytes of its own."""

    parts: int
    param: Tier
    grad: Tier
    whole: bool
    aliased: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """Homes of all partitions: by unit for PARAM and GRAD, by sub-group for STATES."""

    units: tuple[UnitPlacement, ...]
    states: tuple[Tier, ...]
    # Whether gradients stay whole on the device until the accumulation boundary (stages 0 and 1 with several ranks).
    grad_whole: bool


def place_units(layouts: tuple[UnitLayout, ...], policy: Policy) -> tuple[UnitPlacement, ...]:
    """Decide each unit's homes; see the module's text for the rules."""
    grad = Tier.GPU if policy.optimizer_tier is Tier.GPU else Tier.CPU
    persistent_numel = 0
    placements = []
    for layout in layouts:
        if policy.stage < 3:
            whole = True
        else:
            small = layout.numel < max(policy.persistence_numel_max, 1)
            small = small and persistent_numel + layout.numel <= policy.persistent_total_numel_max
            persistent_numel += layout.numel if small else 0
            whole = small or (policy.dp == 1 and policy.param_tier is Tier.GPU)
        if not layout.trainable:
            # Nobody steps a frozen unit: when it stays whole, no rank needs a slice of its own.
            parts = 1 if whole else policy.dp
            param = Tier.GPU if whole else policy.param_tier
        else:
            parts = 1 if policy.stage == 0 else policy.dp
            beside_states = whole and not (policy.param_tier is Tier.GPU and policy.stage == 3 and policy.dp == 1)
            param = policy.optimizer_tier if beside_states else policy.param_tier
        placements.append(
            UnitPlacement(parts=parts, param=param, grad=grad, whole=whole, aliased=whole and param is Tier.GPU)
        )
    return tuple(placements)


def place(units: tuple[UnitPlacement, ...], groups: tuple[SubGroup, ...], policy: Policy) -> Placement:
    """Homes of every partition of a rank, from those of the units."""
    return Placement(
        units=units,
        states=(policy.optimizer_tier,) * len(groups),
        grad_whole=policy.stage < 2 and policy.dp > 1,
    )
