"""What memory holds while partitions are filled from a built model, moment by moment: derived from the plan alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.plan.types import DTYPE_NBYTES, FLOATING_DTYPES, Key, Kind, Tier

# 16-bit parameters are cut from fp32 values so many at a time.
FILL_NUMEL = 1 << 18

Table = dict[Tier, dict[Kind, int]]


def initial_nbytes(plan: Plan, *, model_dtype: str, model_nbytes_max: int | None) -> int:
    """Bytes in CPU memory (in all memory of a machine without accelerator) at the busiest moment of `INITIALISE`."""
    table = initialise(plan, model_dtype, model_nbytes_max, built=True)
    return in_process(table, accelerator=plan.request.accelerator)


def in_process(table: Mapping[Tier, Mapping[Kind, int]], *, accelerator: bool) -> int:
    """Bytes of a table that are the process's resident memory: without an accelerator, the device's are."""
    tiers = (Tier.CPU,) if accelerator else (Tier.CPU, Tier.GPU)
    return sum(sum(table[tier].values()) for tier in tiers)


def initialise(plan: Plan, model_dtype: str, model_nbytes_max: int | None, *, built: bool = False) -> Table:
    """The busiest moment of memory. The model's own memory goes unit by unit, in the order in which partitions are
    filled. With an accelerator each tier has a busiest moment of its own: the others only fill, and are full at the
    end.

    built: the model is there. While it is being built, its largest parameter may be whole in memory, and no engine has
    buffers yet.
    """
    filling = _Filling(plan, model_dtype, model_nbytes_max, built)
    filling.note()
    for layout in plan.layouts:
        if not layout.trainable:
            filling.fill(Key(Kind.PARAM, layout.index))
            filling.note()
            filling.take(layout)
    last_group = {piece.unit: group.index for group in plan.sub_groups for piece in group.slices}
    # The fp32 values and the two parts that they are cut into.
    width = 8 if DTYPE_NBYTES[plan.request.compute_dtype] == 2 else 0
    for group in plan.sub_groups:
        filling.fill(Key(Kind.STATES, group.index), *(Key(Kind.PARAM, piece.unit) for piece in group.slices))
        filling.note(width * min(FILL_NUMEL, max(piece.numel for piece in group.slices)))
        for piece in group.slices:
            if last_group[piece.unit] == group.index:
                filling.take(plan.layouts[piece.unit])
    return filling.busiest()


class _Filling:
    """Partitions that have their values, and what is left of the model."""

    def __init__(self, plan: Plan, model_dtype: str, model_nbytes_max: int | None, built: bool) -> None:
        self._plan = plan
        self._specs = {spec.key: spec for spec in plan.partitions}
        self._filled: set[Key] = set()
        # There are as many moments as sub-groups: sums are carried from one to the next, and one table is kept.
        self._held: Table = {tier: {} for tier in Tier}
        self._in_process = 0
        self._most, self._busiest = -1, self._held
        self._own = {layout.index: _own_nbytes(layout, model_dtype) for layout in plan.layouts}
        self._own_left = sum(self._own.values())
        self._own_max = self._own_left
        if model_nbytes_max is not None:
            largest = max((math.prod(slot.whole_shape) for layout in plan.layouts for slot in layout.slots), default=0)
            nbytes = largest * DTYPE_NBYTES[model_dtype]
            self._own_max = model_nbytes_max + nbytes
            if not built:
                self.note()
            if plan.topology.world_size == 1:
                # One rank alone reads a parameter that is larger in parts; several exchange it whole.
                self._own_max = model_nbytes_max + min(nbytes, model_nbytes_max)
        for layout, placed in zip(plan.layouts, plan.placement.units, strict=True):
            self._add(Tier.GPU, Kind.FULL, layout.nbytes if placed.whole else 0)
        # All of it from the beginning: what the kernel is told of as buffers for I/O, it holds.
        pools = plan.pools
        self._add(Tier.CPU, Kind.POOL, pools.in_cpu_nbytes - pools.staging_nbytes - pools.direction_nbytes)

    def fill(self, *keys: Key) -> None:
        for key in keys:
            if key in self._filled:
                continue
            self._filled.add(key)
            if key.kind is Kind.PARAM and self._plan.placement.units[key.index].aliased:
                continue
            spec = self._specs[key]
            for section in spec.sections:
                self._add(spec.home, section.kind, section.nbytes)

    def take(self, layout: UnitLayout) -> None:
        """The unit's values are in its partitions."""
        self._own_left -= self._own.pop(layout.index, 0)

    def note(self, temporary_nbytes: int = 0) -> None:
        """Keep this moment if it is the busiest so far."""
        model = min(self._own_left, self._own_max)
        if self._in_process + model + temporary_nbytes > self._most:
            self._most = self._in_process + model + temporary_nbytes
            self._busiest = copy_table(self._held)
            add_nbytes(self._busiest, Tier.CPU, Kind.MODEL, model)
            add_nbytes(self._busiest, Tier.CPU, Kind.ACTIVATION, temporary_nbytes)

    def busiest(self) -> Table:
        """The busiest moment that was noted."""
        return {**self._held, Tier.CPU: self._busiest[Tier.CPU]} if self._plan.request.accelerator else self._busiest

    def _add(self, tier: Tier, kind: Kind, nbytes: int) -> None:
        add_nbytes(self._held, tier, kind, nbytes)
        if tier is Tier.CPU or (tier is Tier.GPU and not self._plan.request.accelerator):
            self._in_process += nbytes


def _own_nbytes(layout: UnitLayout, model_dtype: str) -> int:
    floating = layout.dtype in FLOATING_DTYPES
    # A parameter in tiles goes with the last of them. The model that comes in has parameters that no axis has cut.
    numel = sum(math.prod(slot.whole_shape) for slot in layout.slots if slot.ends)
    return numel * DTYPE_NBYTES[model_dtype if floating else layout.dtype]


def copy_table(table: Table) -> Table:
    """Another table of the same bytes."""
    return {tier: dict(kinds) for tier, kinds in table.items()}


def add_nbytes(table: Table, tier: Tier, kind: Kind, nbytes: int) -> None:
    """Count more of a kind on a tier."""
    if nbytes:
        table[tier][kind] = table[tier].get(kind, 0) + nbytes
