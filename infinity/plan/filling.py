"""What memory holds while partitions are filled from a built model, moment by moment: derived from the plan alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.plan.types import DTYPE_NBYTES, FLOATING_DTYPES, Key, Kind, PartitionSpec, Tier

# 16-bit parameters are cut from fp32 values so many at a time.
FILL_NUMEL = 1 << 18

Table = dict[Tier, dict[Kind, int]]


def initial_nbytes(plan: Plan, *, model_dtype: str, model_nbytes_max: int | None) -> int:
    """Bytes in CPU memory (in all memory of a machine without accelerator) at the busiest moment of `INITIALISE`."""
    tables = initialise(plan, model_dtype, model_nbytes_max)
    return max(in_process(table, accelerator=plan.request.accelerator) for table in tables)


def in_process(table: Mapping[Tier, Mapping[Kind, int]], *, accelerator: bool) -> int:
    """Bytes of a table that are the process's resident memory: without an accelerator, the device's are."""
    tiers = (Tier.CPU,) if accelerator else (Tier.CPU, Tier.GPU)
    return sum(sum(table[tier].values()) for tier in tiers)


def initialise(plan: Plan, model_dtype: str, model_nbytes_max: int | None) -> Iterator[Table]:
    """The model's own memory goes unit by unit, in the order in which partitions are filled."""
    filling = _Filling(plan, model_dtype, model_nbytes_max)
    yield filling.table()
    for layout in plan.layouts:
        if not layout.trainable:
            filling.fill(Key(Kind.PARAM, layout.index))
            yield filling.table()
            filling.take(layout)
    last_group = {piece.unit: group.index for group in plan.sub_groups for piece in group.slices}
    for group in plan.sub_groups:
        filling.fill(Key(Kind.STATES, group.index), *(Key(Kind.PARAM, piece.unit) for piece in group.slices))
        # The fp32 values and the two parts that they are cut into.
        width = 8 if DTYPE_NBYTES[plan.request.compute_dtype] == 2 else 0
        yield filling.table(width * min(FILL_NUMEL, max(piece.numel for piece in group.slices)))
        for piece in group.slices:
            if last_group[piece.unit] == group.index:
                filling.take(plan.layouts[piece.unit])


class _Filling:
    """Partitions that have their values, and what is left of the model."""

    def __init__(self, plan: Plan, model_dtype: str, model_nbytes_max: int | None) -> None:
        self._plan = plan
        self._specs = {spec.key: spec for spec in plan.partitions}
        self._filled: set[Key] = set()
        # There are as many moments as sub-groups: sums are carried from one to the next.
        self._held: Table = {tier: {} for tier in Tier}
        for layout, placed in zip(plan.layouts, plan.placement.units, strict=True):
            add_nbytes(self._held, Tier.GPU, Kind.FULL, layout.nbytes if placed.whole else 0)
        self._own = {layout.index: _own_nbytes(layout, model_dtype) for layout in plan.layouts}
        self._own_left = sum(self._own.values())
        self._own_max = self._own_left
        if model_nbytes_max is not None:
            largest = max((math.prod(slot.whole_shape) for layout in plan.layouts for slot in layout.slots), default=0)
            self._own_max = model_nbytes_max + largest * DTYPE_NBYTES[model_dtype]

    def fill(self, *keys: Key) -> None:
        for key in keys:
            if key in self._filled:
                continue
            self._filled.add(key)
            if key.kind is Kind.PARAM and self._plan.placement.units[key.index].aliased:
                continue
            _add_partition(self._held, self._specs[key])

    def take(self, layout: UnitLayout) -> None:
        """The unit's values are in its partitions."""
        self._own_left -= self._own.pop(layout.index, 0)

    def table(self, temporary_nbytes: int = 0) -> Table:
        table = copy_table(self._held)
        # All of it from the beginning: what the kernel is told of as buffers for I/O, it holds.
        add_nbytes(table, Tier.CPU, Kind.POOL, self._plan.pools.param_nbytes + self._plan.pools.states_nbytes)
        add_nbytes(table, Tier.CPU, Kind.MODEL, min(self._own_left, self._own_max))
        add_nbytes(table, Tier.CPU, Kind.ACTIVATION, temporary_nbytes)
        return table


def _own_nbytes(layout: UnitLayout, model_dtype: str) -> int:
    floating = layout.dtype in FLOATING_DTYPES
    # A parameter in tiles goes with the last of them. The model that comes in has parameters that no axis has cut.
    numel = sum(math.prod(slot.whole_shape) for slot in layout.slots if slot.ends)
    return numel * DTYPE_NBYTES[model_dtype if floating else layout.dtype]


def _add_partition(table: Table, spec: PartitionSpec) -> None:
    for section in spec.sections:
        add_nbytes(table, spec.home, section.kind, section.nbytes)


def copy_table(table: Table) -> Table:
    """Another table of the same bytes."""
    return {tier: dict(kinds) for tier, kinds in table.items()}


def add_nbytes(table: Table, tier: Tier, kind: Kind, nbytes: int) -> None:
    """Count more of a kind on a tier."""
    if nbytes:
        table[tier][kind] = table[tier].get(kind, 0) + nbytes
