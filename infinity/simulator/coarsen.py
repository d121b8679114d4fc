"""Coarsen a plan for the simulator: merge neighbours with the same homes, so that a simulation is short.

Bytes, homes and order stay. Reads, steps and gathers interleave less finely, which hundreds of units do not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from infinity.plan.layout import Slice, SubGroup, UnitLayout
from infinity.plan.plan import Plan
from infinity.plan.prefetch import FetchSchedule, UnitAccess
from infinity.plan.stepping import STEP_WINDOW
from infinity.plan.types import ArraySection, Key, Kind, PartitionSpec, Tier

_UNITS_MAX, _GROUPS_MAX = 96, 128


@dataclass(frozen=True)
class Coarsened:
    """A plan to simulate, the real units in each of its units, and the number of real sub-groups in one of its own."""

    plan: Plan
    units: tuple[tuple[int, ...], ...]
    groups_in_one: float


def coarsen(plan: Plan) -> Coarsened:
    """The plan itself where it is small."""
    blocks: list[tuple[int, ...]] = [(unit,) for unit in range(len(plan.layouts))]
    if len(plan.layouts) <= _UNITS_MAX and len(plan.sub_groups) <= _GROUPS_MAX:
        return Coarsened(plan, tuple(blocks), 1.0)
    blocks = _blocks(plan)
    block_of = {unit: at for at, units in enumerate(blocks) for unit in units}
    layouts = tuple(_layout(plan, at, units) for at, units in enumerate(blocks))
    specs = {spec.key: spec for spec in plan.partitions}
    partitions: list[PartitionSpec] = []
    for at, units in enumerate(blocks):
        for kind in (Kind.PARAM, Kind.GRAD):
            own = [specs[key] for unit in units if (key := Key(kind, unit)) in specs]
            if own:
                partitions.append(_together(own, at))
    groups: list[SubGroup] = []
    homes: list[Tier] = []
    for members in _groups(plan):
        index = len(groups)
        groups.append(SubGroup(index, _slices(plan, members, blocks, block_of)))
        homes.append(plan.placement.states[members[0].index])
        states = [specs[key] for group in members if (key := Key(Kind.STATES, group.index)) in specs]
        partitions.append(_together(states, index))
    placement = replace(
        plan.placement, units=tuple(plan.placement.units[units[0]] for units in blocks), states=tuple(homes)
    )
    made = replace(
        plan, layouts=layouts, sub_groups=tuple(groups), placement=placement, partitions=tuple(partitions),
        schedule=_schedule(plan.schedule, block_of), step_order=tuple(range(len(groups))),
    )  # fmt: skip
    return Coarsened(_with_pools(plan, made), tuple(blocks), len(plan.sub_groups) / max(len(groups), 1))


def _blocks(plan: Plan) -> list[tuple[int, ...]]:
    """Runs of neighbouring units with equal homes; a unit that stays whole is by itself."""
    size = -(-len(plan.layouts) // _UNITS_MAX)
    found: list[list[int]] = []
    for layout, placed in zip(plan.layouts, plan.placement.units, strict=True):
        last = found[-1] if found else []
        joins = (
            last and len(last) < size and not placed.whole and placed == plan.placement.units[last[-1]]
            and plan.layouts[last[-1]].trainable == layout.trainable and plan.layouts[last[-1]].dtype == layout.dtype
        )  # fmt: skip
        if joins:
            last.append(layout.index)
        else:
            found.append([layout.index])
    return [tuple(units) for units in found]


def _groups(plan: Plan) -> list[list[SubGroup]]:
    """Runs of sub-groups in their order of stepping, with equal homes. Those of units that stay whole are apart from
    the others, and so are visible ones.
    """
    size = -(-len(plan.sub_groups) // _GROUPS_MAX)
    found: list[list[SubGroup]] = []
    seen: tuple[Tier, bool, bool] | None = None
    for index in plan.step_order:
        group = plan.sub_groups[index]
        whole = any(plan.placement.units[piece.unit].whole for piece in group.slices)
        kind = plan.placement.states[index], whole, plan.visible(group)
        if kind == seen and len(found[-1]) < size:
            found[-1].append(group)
        else:
            found.append([group])
        seen = kind
    return found


def _layout(plan: Plan, index: int, units: Sequence[int]) -> UnitLayout:
    first = plan.layouts[units[0]]
    numel = sum(plan.layouts[unit].numel for unit in units)
    return replace(first, index=index, slots=(), modules=(), numel=numel)


def _together(specs: Sequence[PartitionSpec], index: int) -> PartitionSpec:
    """One partition of as many bytes; sections of one kind as one."""
    numel: dict[tuple[Kind, str], int] = {}
    for spec in specs:
        for section in spec.sections:
            numel[section.kind, section.dtype] = numel.get((section.kind, section.dtype), 0) + section.numel
    sections, offset = [], 0
    for (kind, dtype), count in numel.items():
        sections.append(ArraySection(kind, dtype, count, offset))
        offset += sections[-1].nbytes
    return PartitionSpec(key=Key(specs[0].key.kind, index), sections=tuple(sections), home=specs[0].home)


def _slices(
    plan: Plan, groups: Sequence[SubGroup], blocks: Sequence[tuple[int, ...]], block_of: dict[int, int]
) -> tuple[Slice, ...]:
    """The groups' slices by block, neighbours as one."""
    found: dict[int, Slice] = {}
    for group in groups:
        for piece in group.slices:
            block = block_of[piece.unit]
            inside = blocks[block].index(piece.unit)
            parts = plan.placement.units[piece.unit].parts
            sizes = [plan.layouts[unit].partition_numel(parts) for unit in blocks[block]]
            start = [*accumulate(sizes, initial=0)][inside] + piece.start
            before = found.get(block)
            found[block] = Slice(
                block, min(start, before.start) if before else start, piece.numel + (before.numel if before else 0)
            )
    return tuple(found.values())


def _schedule(schedule: FetchSchedule, block_of: dict[int, int]) -> FetchSchedule:
    """The same uses by block: a run of uses of one block is one."""
    uses: list[UnitAccess] = []
    gather: list[tuple[int, ...]] = []
    fetch: list[tuple[int, ...]] = []
    keep: list[bool] = []
    for at, (unit, needed) in enumerate(schedule.uses):
        block = block_of[unit]
        # The turn from forward to backward stays where it is.
        if uses and uses[-1].unit == block and at != len(schedule) // 2:
            uses[-1] = UnitAccess(block, needed or uses[-1].needed)
            gather[-1] = _distinct(gather[-1], schedule.gather_ahead[at], block_of, block)
            fetch[-1] = _distinct(fetch[-1], schedule.fetch_ahead[at], block_of, block)
            keep[-1] = schedule.keep[at]
            continue
        uses.append(UnitAccess(block, needed))
        gather.append(_distinct((), schedule.gather_ahead[at], block_of, block))
        fetch.append(_distinct((), schedule.fetch_ahead[at], block_of, block))
        keep.append(schedule.keep[at])
    return FetchSchedule(tuple(uses), tuple(gather), tuple(fetch), tuple(keep), schedule.peak_nbytes)


def _distinct(known: tuple[int, ...], units: Iterable[int], block_of: dict[int, int], own: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*known, *(block_of[unit] for unit in units if block_of[unit] != own)]))


def _with_pools(plan: Plan, made: Plan) -> Plan:
    """Arenas that hold as many of the larger buffers as they held of the smaller ones."""

    def largest(of: Plan, kind: Kind) -> int:
        sizes = [spec.nbytes for spec in of.partitions if spec.key.kind is kind and spec.home.on_drive]
        return max(sizes, default=0)

    params, were = largest(made, Kind.PARAM), largest(plan, Kind.PARAM)
    pools = replace(
        plan.pools, param_nbytes=plan.pools.param_nbytes * params // max(were, 1),
        states_nbytes=max(plan.pools.states_nbytes, STEP_WINDOW * largest(made, Kind.STATES)),
    )  # fmt: skip
    return replace(made, pools=pools)
