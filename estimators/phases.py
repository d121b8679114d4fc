"""Bytes that each phase of training holds at its peak, by tier and kind, from the plan alone.

`Plan.bytes_by_tier` is a bound for all phases; this module follows each phase through its moments (a sub-group filled,
a unit used, a unit saved) and returns the busiest. With an accelerator each tier has a busiest moment of its own;
without one there is one memory, and the moment with the most of it counts.

The constant overhead of a process is in no phase: see `OVERHEAD_NBYTES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from infinity.plan.activations import ActionBytes, OffloadedCheckpoints
from infinity.plan.filling import Table, add_nbytes, copy_table, initialise
from infinity.plan.pipeline import ActionKind
from infinity.plan.plan import Plan
from infinity.plan.pools import UnitMemory, left_nbytes
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
    alone = _Alone.of(plan, model_dtype, model_nbytes_max)
    if plan.pipeline is None:
        passes = {
            Phase.FORWARD: _forward(alone, activation_nbytes),
            Phase.BACKWARD: _backward(alone, activation_nbytes, accelerator=plan.request.accelerator),
        }
    else:
        passes = {Phase.PIPELINE: _pipeline(plan, plan.pipeline, alone, moments)}
    found = {
        Phase.INITIALISE: copy_table(alone.initialise), **passes, Phase.STEP: copy_table(alone.rest),
        Phase.SAVE: copy_table(alone.saving),
    }  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class _Alone:
    """What a plan holds without activations."""

    gathered: _Gathered
    rest: Table
    initialise: Table
    saving: Table
    # Gradients at each position of backward; of a pipeline they are counted action by action.
    left: Sequence[int]

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, plan: Plan, model_dtype: str, model_nbytes_max: int | None) -> _Alone:
        """A search asks for the same plan with activations of many sizes."""
        gathered = _Gathered.follow(plan)
        rest = _at_rest(plan, gathered)
        trace = () if plan.pipeline is not None else plan.schedule.trace[len(plan.schedule) // 2 :]
        left = left_nbytes(
            trace, plan.layouts, accelerator=plan.request.accelerator, wire=plan.wire_in_backward
        )
        return cls(gathered, rest, initialise(plan, model_dtype, model_nbytes_max), _saving(plan, rest), left)


def _in_parts(nbytes: int) -> int:
    """The part of a unit's memory that other units can take: whole large pages."""
    return nbytes // HUGE_PAGE * HUGE_PAGE


def _at_rest(plan: Plan, gathered: _Gathered) -> Table:
    pools = plan.pools
    table = plan.bytes_at_home()
    add_nbytes(table, Tier.CPU, Kind.POOL, pools.in_cpu_nbytes)
    add_nbytes(table, Tier.GPU, Kind.FULL_GRAD, pools.scratch.nbytes)
    add_nbytes(table, Tier.GPU, Kind.POOL, pools.matrix_nbytes + pools.momenta_nbytes)
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


def _forward(alone: _Alone, activation_nbytes: int) -> Table:
    """Activations grow with each use and are complete at the last."""
    count = len(alone.gathered.nbytes) // 2
    moments = (
        (alone.gathered.nbytes[at] - alone.gathered.at_rest, activation_nbytes * (at + 1) // count, 0)
        for at in range(count)
    )
    return _busiest(alone.rest, moments)


def _backward(alone: _Alone, activation_nbytes: int, *, accelerator: bool) -> Table:
    """Gradients come, and activations go in equal parts, use by use. In the process's own memory they stay: the C
    library keeps them for the next forward.
    """
    begin, count = len(alone.gathered.nbytes) // 2, len(alone.left)
    moments = (
        (
            alone.gathered.nbytes[begin + at] - alone.gathered.at_rest,
            activation_nbytes * (count - at) // count if accelerator else activation_nbytes, left,
        )
        for at, left in enumerate(alone.left)
    )  # fmt: skip
    return _busiest(alone.rest, moments)


def _pipeline(plan: Plan, part: PipelinePart, alone: _Alone, moments: Sequence[ActionBytes]) -> Table:
    """The busiest of all actions: activations grow with the uses of a forward, and go with those of a backward, which
    leaves gradients. In the process's own memory they stay: the C library keeps them for the next forward.
    """
    trace, accelerator, gathered = plan.schedule.trace, plan.request.accelerator, alone.gathered
    # Where weight gradients come later, those of a stage's units come together.
    left: dict[tuple[int, bool], tuple[int, ...]] = {}
    found: list[tuple[int, int, int]] = []
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
            whole = gathered.nbytes[here] - gathered.at_rest
            found.append((whole, held if accelerator else max(most, held), beside))
    return _busiest(alone.rest, found)


def _busiest(rest: Table, moments: Iterable[tuple[int, int, int]]) -> Table:
    """The busiest of a pass's moments: gathered units, activations and gradients, which all lie on the device beside
    the rest.
    """
    table = copy_table(rest)
    busiest = max(moments, key=sum, default=(0, 0, 0))
    for kind, nbytes in zip((Kind.FULL, Kind.ACTIVATION, Kind.FULL_GRAD), busiest, strict=True):
        add_nbytes(table, Tier.GPU, kind, nbytes)
    return table
