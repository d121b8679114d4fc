"""Bytes that each phase of training holds at its peak, by tier and kind, from the plan alone.

`Plan.bytes_by_tier` is a bound for all phases; this module follows each phase through its moments (a sub-group filled,
a unit used, a unit saved) and returns the busiest. With an accelerator each tier has a busiest moment of its own;
without one there is one memory, and the moment with the most of it counts.

The constant overhead of a process is in no phase: see `OVERHEAD_NBYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from infinity.plan.activation_bytes import OffloadedCheckpoints
from infinity.plan.filling import Table, add_nbytes, copy_table, in_process, initialise
from infinity.plan.gradient_bytes import left_nbytes
from infinity.plan.pipeline import ActionKind
from infinity.plan.plan import Plan
from infinity.plan.stage_activations import ActionBytes
from infinity.plan.stages import PipelinePart
from infinity.plan.types import (
    DTYPE_NBYTES,
    EXTENT_ALIGNMENT,
    HUGE_PAGE,
    SAVE_BLOCK_NBYTES,
    SAVE_BLOCKS,
    Kind,
    Tier,
    align_up,
)
from infinity.plan.unit_memory import UnitMemory

# Resident memory that the first steps of any model add to a process: pages of torch's and our own libraries as they are
# first used, Python modules loaded late, threads' stacks, connections, I/O queues, tables of the C library's heap.
# Measured, and held to these bounds, by benchmarks/memory_truth.py. A torch that is built with CUDA loads more, even
# where there is no device: 202 MiB in 2.11, 237 in 2.15.
OVERHEAD_NBYTES = 192 << 20
OVERHEAD_WITH_CUDA_NBYTES = 256 << 20


class Phase(Enum):
    """Parts of a training run."""

    # From the built model to filled partitions.
    INITIALISE = "initialise"
    FORWARD = "forward"
    BACKWARD = "backward"
    # Forwards and backwards of all micro-batches, in the order of a pipeline's table, instead of the two above.
    PIPELINE = "pipeline"
    # The optimizer's step, reductions at the accumulation boundary included.
    STEP = "step"
    # A checkpoint: partitions go to the drive from where they are, through pools that are there, or by blocks.
    SAVE = "save"

    __hash__ = object.__hash__


def bytes_by_phase(
    plan: Plan, activation_nbytes: int = 0, *, model_dtype: str = "fp32", model_nbytes_max: int | None = None,
    offloaded: OffloadedCheckpoints | None = None, moments: Sequence[ActionBytes] = (),
) -> dict[Phase, Table]:  # fmt: skip
    """Bytes by tier and kind at each phase's busiest moment, of any rank, in the steady state.

    activation_nbytes: what autograd keeps and computes with at its peak (see `estimators.activations`).
    model_dtype, model_nbytes_max: the dtype that the model is built in, and the bytes of it in memory at a time (None:
    all), beside the parameter in work. offloaded: activation checkpoints on another tier; their space stays allocated
    from the first step on. moments: of a rank of a pipeline, its activations by action, without those on another tier;
    none: there are no activations.
    """
    if offloaded is not None:
        activation_nbytes -= offloaded.freed_nbytes
    gathered = _Gathered.follow(plan)
    rest = _at_rest(plan, gathered)
    if plan.pipeline is None:
        passes = {
            Phase.FORWARD: _forward(plan, rest, gathered, activation_nbytes),
            Phase.BACKWARD: _backward(plan, rest, gathered, activation_nbytes),
        }
    else:
        passes = {Phase.PIPELINE: _pipeline(plan, plan.pipeline, rest, gathered, moments)}
    tables = {
        Phase.INITIALISE: initialise(plan, model_dtype, model_nbytes_max), **passes,
        Phase.STEP: iter([rest]), Phase.SAVE: iter([_saving(plan, rest)]),
    }  # fmt: skip
    found = {phase: _busiest([*each], plan.request.accelerator) for phase, each in tables.items()}
    if offloaded is not None:
        for phase in (*passes, Phase.STEP, Phase.SAVE):
            passing = phase in passes
            add_nbytes(found[phase], offloaded.tier, Kind.ACTIVATION if passing else Kind.POOL, offloaded.nbytes)
            add_nbytes(found[phase], Tier.CPU, Kind.POOL, offloaded.buffers * offloaded.each_nbytes)
    return found


def at_rest(plan: Plan) -> Table:
    """Bytes by tier and kind between two steps."""
    return _at_rest(plan, _Gathered.follow(plan))


def state_dict_nbytes(plan: Plan) -> int:
    """CPU memory that `state_dict()` adds on rank 0: the whole model."""
    return sum(slot.numel * DTYPE_NBYTES[layout.dtype] for layout in plan.layouts for slot in layout.slots)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Whole units by the schedule: bytes at each position of a pass that was preceded by another, and behind it.

    Pages of a unit that gives its memory up are spare for the next one.
    """

    nbytes: Sequence[int]
    at_rest: int

    @classmethod
    def follow(cls, plan: Plan) -> _Gathered:
        sizes, schedule = plan.full_nbytes(), plan.schedule
        memory = UnitMemory(plan.pools.gathered_nbytes, retain=plan.policy.retain_released)
        spare = 0
        found: list[int] = []
        for _ in range(2):
            found.clear()
            for position, (unit, needed) in enumerate(schedule.uses):
                ahead = schedule.gather_ahead[position] if plan.policy.gather_ahead else ()
                for other in (*([unit] if needed else []), *ahead):
                    room = memory.gather(other, sizes[other])
                    spare += sum(_in_parts(sizes[freed]) for freed in room.freed)
                    if room.spare_nbytes_max is not None:
                        spare = _in_parts(min(spare, room.spare_nbytes_max))
                        spare -= min(spare, _in_parts(sizes[other]))
                found.append(memory.nbytes + spare)
                if needed and not schedule.keep[position]:
                    memory.release(unit)
            for unit in memory.live:
                memory.release(unit)
        return cls(found, memory.nbytes + spare)


def _in_parts(nbytes: int) -> int:
    """The part of a unit's memory that other units can take: whole large pages."""
    return nbytes // HUGE_PAGE * HUGE_PAGE


def _at_rest(plan: Plan, gathered: _Gathered) -> Table:
    pools = plan.pools
    table = plan.bytes_at_home()
    add_nbytes(table, Tier.CPU, Kind.POOL, pools.param_nbytes + pools.states_nbytes + pools.staging_nbytes)
    add_nbytes(table, Tier.GPU, Kind.FULL_GRAD, pools.scratch.nbytes)
    add_nbytes(table, Tier.GPU, Kind.FULL, gathered.at_rest)
    return table


def _saving(plan: Plan, rest: Table) -> Table:
    """At rest, and the blocks in use by turns where direct I/O does not take the memory as it is: all of what the
    device has, and the last block of a partition in CPU memory that ends inside a page.
    """
    blocks = [0] * SAVE_BLOCKS
    turn = 0
    for spec in plan.partitions:
        if spec.home.on_drive or spec.key.kind is Kind.GRAD:
            continue
        whole = align_up(spec.nbytes, EXTENT_ALIGNMENT)
        last = whole % SAVE_BLOCK_NBYTES or min(whole, SAVE_BLOCK_NBYTES)
        full = 0 if not spec.home.on_device else min((whole - last) // SAVE_BLOCK_NBYTES, SAVE_BLOCKS)
        tail = [last] if spec.home.on_device or spec.nbytes != whole else []
        for nbytes in [SAVE_BLOCK_NBYTES] * full + tail:
            blocks[turn % SAVE_BLOCKS] = max(blocks[turn % SAVE_BLOCKS], nbytes)
            turn += 1
        if min(blocks) == SAVE_BLOCK_NBYTES:
            break
    table = copy_table(rest)
    add_nbytes(table, Tier.CPU, Kind.POOL, sum(blocks))
    return table


def _forward(plan: Plan, rest: Table, gathered: _Gathered, activation_nbytes: int) -> Iterator[Table]:
    """Activations grow with each use and are complete at the last."""
    count = len(plan.schedule) // 2
    for position in range(count):
        yield _in_pass(rest, gathered, position, activation_nbytes * (position + 1) // count)


def _backward(plan: Plan, rest: Table, gathered: _Gathered, activation_nbytes: int) -> Iterator[Table]:
    """Gradients come, and activations go in equal parts, use by use. In the process's own memory they stay: the C
    library keeps them for the next forward.
    """
    begin = len(plan.schedule) // 2
    trace = plan.schedule.trace[begin:]
    accelerator = plan.request.accelerator
    whole = left_nbytes(trace, plan.layouts, accelerator=accelerator, wire=plan.wire_in_backward)
    for index, left in enumerate(whole):
        kept = activation_nbytes
        if accelerator:
            kept = kept * (len(trace) - index) // len(trace)
        table = _in_pass(rest, gathered, begin + index, kept)
        add_nbytes(table, Tier.GPU, Kind.FULL_GRAD, left)
        yield table


def _pipeline(
    plan: Plan, part: PipelinePart, rest: Table, gathered: _Gathered, moments: Sequence[ActionBytes]
) -> Iterator[Table]:
    """The busiest of all actions: activations grow with the uses of a forward, and go with those of a backward, which
    leaves gradients. In the process's own memory they stay: the C library keeps them for the next forward.
    """
    trace, accelerator = plan.schedule.trace, plan.request.accelerator
    # Where weight gradients come later, those of a stage's units come together.
    left: dict[tuple[int, bool], tuple[int, ...]] = {}
    # All of them lie on the device beside the rest: units that are gathered, activations, gradients.
    busiest = (0, 0, 0)
    position = most = 0
    for index, (stage, kind, _) in enumerate(part.split.tables[part.index]):
        before, peak, behind = moments[index].levels if moments else (0, 0, 0)
        most = max(most, peak)
        later, forward = kind is ActionKind.BACKWARD_WEIGHT, kind is ActionKind.FORWARD
        count = 0 if later else part.split.uses[stage]
        begin, position = position, position + count
        if not forward and (stage, later) not in left:
            units = part.units_of(stage) if later else trace[begin:position]
            left[stage, later] = left_nbytes(
                units, plan.layouts, accelerator=accelerator, wire=plan.wire_in_backward
            )
        steps = count if forward else len(left[stage, later])
        for at in range(steps):
            held = before + (behind - before) * (at + 1) // steps if forward else peak - (peak - behind) * at // steps
            beside = 0 if forward else left[stage, later][at]
            here = min(begin + at, position - 1) if count else max(begin - 1, 0)
            moment = gathered.nbytes[here] - gathered.at_rest, held if accelerator else max(most, held), beside
            busiest = max(busiest, moment, key=sum)
    table = copy_table(rest)
    for what, nbytes in zip((Kind.FULL, Kind.ACTIVATION, Kind.FULL_GRAD), busiest, strict=True):
        add_nbytes(table, Tier.GPU, what, nbytes)
    yield table


def _in_pass(rest: Table, gathered: _Gathered, position: int, activation_nbytes: int) -> Table:
    table = copy_table(rest)
    add_nbytes(table, Tier.GPU, Kind.FULL, gathered.nbytes[position] - gathered.at_rest)
    add_nbytes(table, Tier.GPU, Kind.ACTIVATION, activation_nbytes)
    return table


def _busiest(tables: Sequence[Table], accelerator: bool) -> Table:
    if not accelerator:
        return max(tables, key=lambda table: in_process(table, accelerator=False))
    return {tier: max((table[tier] for table in tables), key=lambda kinds: sum(kinds.values())) for tier in Tier}
