"""What each phase of training holds at its peak, by tier and kind: derived from the plan alone, moment by moment.

`Plan.bytes_by_tier` bounds them all; here is what really lies in memory. A phase is followed through its moments (a
sub-group filled, a unit used, a unit saved) and its busiest is returned. Where the device has no memory of its own the
busiest is that of all memory together, for there is one memory; with an accelerator each tier has its own.

What a process pays once, whatever it trains, is in no phase: see `OVERHEAD_NBYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from infinity.plan.activation import Offloaded
from infinity.plan.gradients import left_nbytes, wire_in_backward
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.plan.types import (
    DTYPE_NBYTES,
    EXTENT_ALIGNMENT,
    HUGE_PAGE,
    SAVE_BLOCK_NBYTES,
    SAVE_BLOCKS,
    Key,
    Kind,
    PartitionSpec,
    Tier,
    align_up,
)

# Resident memory that the first steps of any model add to a process: pages of torch's and our own libraries as they are
# first used, Python modules loaded late, threads' stacks, connections, I/O queues, tables of the C library's heap.
# Measured, and held to these bounds, by benchmarks/memory_truth.py. A torch that is built with CUDA loads more, even
# where there is no device: 202 MiB in 2.11, 237 in 2.15.
OVERHEAD_NBYTES = 192 << 20
OVERHEAD_WITH_CUDA_NBYTES = 256 << 20
# 16-bit parameters are cut from fp32 values so many at a time.
FILL_NUMEL = 1 << 18

Table = dict[Tier, dict[Kind, int]]


class Phase(Enum):
    """What a training run is doing."""

    # From the built model to filled partitions.
    INITIALISE = "initialise"
    FORWARD = "forward"
    BACKWARD = "backward"
    # The optimizer's step, reductions at the accumulation boundary included.
    STEP = "step"
    # A checkpoint: partitions go to the drive from where they are, through pools that are there, or by blocks.
    SAVE = "save"

    __hash__ = object.__hash__


def bytes_by_phase(
    plan: Plan, activation_nbytes: int = 0, *, model_dtype: str = "fp32", model_nbytes_max: int | None = None,
    offloaded: Offloaded | None = None,
) -> dict[Phase, Table]:  # fmt: skip
    """Bytes by tier and kind at each phase's busiest moment, of any rank, in the steady state.

    activation_nbytes: what autograd keeps and computes with at its peak (see `estimators.activations`).
    model_dtype, model_nbytes_max: what the model is built in, and how much of it lies in memory at a time (None: all),
    beside the parameter being worked on. offloaded: checkpoints among the activations that lie on another tier; their
    space is kept from the first step on.
    """
    if offloaded is not None:
        activation_nbytes -= offloaded.freed_nbytes
    gathered = _Gathered.follow(plan)
    rest = _at_rest(plan, gathered)
    moments = {
        Phase.INITIALISE: _initialise(plan, model_dtype, model_nbytes_max),
        Phase.FORWARD: _forward(plan, rest, gathered, activation_nbytes),
        Phase.BACKWARD: _backward(plan, rest, gathered, activation_nbytes),
        Phase.STEP: iter([rest]),
        Phase.SAVE: iter([_saving(plan, rest)]),
    }
    found = {phase: _busiest([*tables], plan.request.accelerator) for phase, tables in moments.items()}
    if offloaded is not None:
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.SAVE):
            passing = phase in (Phase.FORWARD, Phase.BACKWARD)
            _add(found[phase], offloaded.tier, Kind.ACTIVATION if passing else Kind.POOL, offloaded.nbytes)
            _add(found[phase], Tier.CPU, Kind.POOL, offloaded.buffers * offloaded.each_nbytes)
    return found


def initial_nbytes(plan: Plan, *, model_dtype: str, model_nbytes_max: int | None) -> int:
    """Bytes in CPU memory (in all memory of a machine without accelerator) at the busiest moment of `INITIALISE`."""
    tables = _initialise(plan, model_dtype, model_nbytes_max)
    return max(in_process(table, accelerator=plan.request.accelerator) for table in tables)


def at_rest(plan: Plan) -> Table:
    """Bytes by tier and kind between two steps."""
    return _at_rest(plan, _Gathered.follow(plan))


def state_dict_nbytes(plan: Plan) -> int:
    """CPU memory that `state_dict()` takes on rank 0, beside what is there at rest: the whole model."""
    return sum(slot.numel * DTYPE_NBYTES[layout.dtype] for layout in plan.layouts for slot in layout.slots)


def in_process(table: Mapping[Tier, Mapping[Kind, int]], *, accelerator: bool) -> int:
    """Bytes of a table that are the process's resident memory: without an accelerator, the device's are."""
    tiers = (Tier.CPU,) if accelerator else (Tier.CPU, Tier.GPU)
    return sum(sum(table[tier].values()) for tier in tiers)


@dataclass(slots=True)
class _Gathered:
    """Whole units by the schedule: bytes at each position of a pass that was preceded by another.

    Where the device's memory is the process's, released units leave theirs to the next ones, as the coordinator does:
    the oldest is freed when the plan's bound would be passed, and its pages are spare for the next, within that bound.
    """

    live: dict[int, int] = field(default_factory=dict)
    # Released units whose memory is still there.
    retained: dict[int, int] = field(default_factory=dict)
    spare: int = 0
    nbytes: list[int] = field(default_factory=list)

    @classmethod
    def follow(cls, plan: Plan) -> _Gathered:
        sizes, schedule = plan.full_nbytes(), plan.schedule
        ahead = plan.topology.dp > 1 or plan.request.accelerator
        found = cls()
        for _ in range(2):
            found.nbytes = []
            for position, (unit, needed) in enumerate(schedule.uses):
                for other in (*([unit] if needed else []), *(schedule.gather_ahead[position] if ahead else ())):
                    found._gather(other, sizes[other], plan.pools.gathered_nbytes)
                found.nbytes.append(found.now)
                if needed and not schedule.keep[position]:
                    found._release(unit, plan)
            for unit in [*found.live]:
                found._release(unit, plan)
        return found

    @property
    def now(self) -> int:
        return self._held() + self.spare

    def _held(self) -> int:
        return sum(self.live.values()) + sum(self.retained.values())

    def _gather(self, unit: int, nbytes: int, bound: int) -> None:
        if unit in self.live:
            return
        if self.retained.pop(unit, None) is None:
            while self.retained and self._held() + nbytes > bound:
                self.spare += _in_parts(self.retained.pop(next(iter(self.retained))))
            self.spare = _in_parts(min(self.spare, max(bound - self._held(), nbytes)))
            self.spare -= min(self.spare, _in_parts(nbytes))
        self.live[unit] = nbytes

    def _release(self, unit: int, plan: Plan) -> None:
        nbytes = self.live.pop(unit)
        if not plan.request.accelerator:
            self.retained[unit] = nbytes


def _in_parts(nbytes: int) -> int:
    """What of a unit's memory can go to another one."""
    return nbytes // HUGE_PAGE * HUGE_PAGE


def _at_rest(plan: Plan, gathered: _Gathered) -> Table:
    pools = plan.pools
    table = plan.bytes_at_home()
    _add(table, Tier.CPU, Kind.POOL, pools.param_nbytes + pools.states_nbytes + pools.staging_nbytes)
    _add(table, Tier.GPU, Kind.FULL_GRAD, pools.scratch.nbytes)
    _add(table, Tier.GPU, Kind.FULL, gathered.now)
    return table


def _saving(plan: Plan, rest: Table) -> Table:
    """At rest, and the blocks in use by turns where direct I/O does not take the memory as it is: all of what the
    device has, and the last block of a partition in CPU memory that ends inside a page.
    """
    blocks = [0] * SAVE_BLOCKS
    turn = 0
    for spec in plan.partitions:
        if spec.home is Tier.NVME or spec.key.kind is Kind.GRAD:
            continue
        whole = align_up(spec.nbytes, EXTENT_ALIGNMENT)
        last = whole % SAVE_BLOCK_NBYTES or min(whole, SAVE_BLOCK_NBYTES)
        full = 0 if spec.home is Tier.CPU else min((whole - last) // SAVE_BLOCK_NBYTES, SAVE_BLOCKS)
        tail = [last] if spec.home is Tier.GPU or spec.nbytes != whole else []
        for nbytes in [SAVE_BLOCK_NBYTES] * full + tail:
            blocks[turn % SAVE_BLOCKS] = max(blocks[turn % SAVE_BLOCKS], nbytes)
            turn += 1
        if min(blocks) == SAVE_BLOCK_NBYTES:
            break
    table = _copy(rest)
    _add(table, Tier.CPU, Kind.POOL, sum(blocks))
    return table


def _forward(plan: Plan, rest: Table, gathered: _Gathered, activation_nbytes: int) -> Iterator[Table]:
    """Activations grow with each use, and are all there at the last."""
    count = len(plan.schedule) // 2
    for position in range(count):
        yield _in_pass(rest, gathered, position, activation_nbytes * (position + 1) // count)


def _backward(plan: Plan, rest: Table, gathered: _Gathered, activation_nbytes: int) -> Iterator[Table]:
    """Gradients come, and what forward kept goes use by use, taken as equal parts. In the process's own memory it does
    not go: the C library keeps it for the next forward, as an accelerator's allocator does with its own.
    """
    begin = len(plan.schedule) // 2
    trace = plan.schedule.trace[begin:]
    accelerator = plan.request.accelerator
    wire = wire_in_backward(plan.placement, dp=plan.topology.dp, wire=plan.request.communication_dtype)
    for index, left in enumerate(left_nbytes(trace, plan.layouts, accelerator=accelerator, wire=wire)):
        kept = activation_nbytes
        if accelerator:
            kept = kept * (len(trace) - index) // len(trace)
        table = _in_pass(rest, gathered, begin + index, kept)
        _add(table, Tier.GPU, Kind.FULL_GRAD, left)
        yield table


def _in_pass(rest: Table, gathered: _Gathered, position: int, activation_nbytes: int) -> Table:
    table = _copy(rest)
    _add(table, Tier.GPU, Kind.FULL, gathered.nbytes[position] - gathered.now)
    _add(table, Tier.GPU, Kind.ACTIVATION, activation_nbytes)
    return table


def _initialise(plan: Plan, model_dtype: str, model_nbytes_max: int | None) -> Iterator[Table]:
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
            _add(self._held, Tier.GPU, Kind.FULL, layout.nbytes if placed.whole else 0)
        self._own = {layout.index: _own_nbytes(layout, model_dtype) for layout in plan.layouts}
        self._own_left = sum(self._own.values())
        self._own_max = self._own_left
        if model_nbytes_max is not None:
            largest = max((math.prod(slot.shape) for layout in plan.layouts for slot in layout.slots), default=0)
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
        table = _copy(self._held)
        # All of it from the beginning: what the kernel is told of as buffers for I/O, it holds.
        _add(table, Tier.CPU, Kind.POOL, self._plan.pools.param_nbytes + self._plan.pools.states_nbytes)
        _add(table, Tier.CPU, Kind.MODEL, min(self._own_left, self._own_max))
        _add(table, Tier.CPU, Kind.ACTIVATION, temporary_nbytes)
        return table


def _own_nbytes(layout: UnitLayout, model_dtype: str) -> int:
    floating = layout.dtype in ("fp64", "fp32", "bf16", "fp16")
    # A parameter in tiles goes with the last of them.
    numel = sum(math.prod(slot.shape) for slot in layout.slots if slot.ends)
    return numel * DTYPE_NBYTES[model_dtype if floating else layout.dtype]


def _add_partition(table: Table, spec: PartitionSpec) -> None:
    for section in spec.sections:
        _add(table, spec.home, section.kind, section.nbytes)


def _copy(table: Table) -> Table:
    return {tier: dict(kinds) for tier, kinds in table.items()}


def _add(table: Table, tier: Tier, kind: Kind, nbytes: int) -> None:
    if nbytes:
        table[tier][kind] = table[tier].get(kind, 0) + nbytes


def _busiest(tables: Sequence[Table], accelerator: bool) -> Table:
    if not accelerator:
        return max(tables, key=lambda table: in_process(table, accelerator=False))
    return {tier: max((table[tier] for table in tables), key=lambda kinds: sum(kinds.values())) for tier in Tier}
