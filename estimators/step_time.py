"""How long a step takes, what bounds it, and what it does to the drive: a plan's work at a machine's rates.

The step is simulated along the plan (see `estimators.simulate`). It is bound by the resource that would shorten
it the most if its rate were a quarter higher. Computation is counted in floating-point operations: 2 a parameter and
token forward and 4 backward (2 of a frozen parameter), and attention or recomputation where the caller adds it.
Embedding tables are looked up and do not count, unless they serve as the head too.

How long a step of a pipeline takes: its tables in simulated time, with each rank's own work simulated alone.

A rank that never waits for others takes so many seconds a micro-batch, gathers, reads and reductions included, and so
many for the rest of a step: both are simulated along its plan (`estimators.step_time`). Those of a micro-batch
are divided among its stages' actions by their operations; then the tables say when each action of each rank begins.
Messages between stages take the network's time, and the ranks none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import mul

from estimators.resources import QueueKey, Resource
from estimators.simulate import Coarsened, SimulatedStep, Speeds, coarsen, simulate_step
from infinity.plan.activations import OffloadedCheckpoints
from infinity.plan.hardware import ASSUMED, ASSUMED_WRITES_A_BYTE, Compute, HardwareProfile, assumed
from infinity.plan.layout import Slot
from infinity.plan.pipeline import ActionKind, ActionSeconds, PipelineTimes, Tables, time_tables
from infinity.plan.plan import Plan
from infinity.plan.prefetch import UnitAccess
from infinity.plan.types import DTYPE_NBYTES, Tier

# Steps of the iteration that makes a matrix orthogonal, as torch's Muon has by default: each is three products.
_MATRIX_STEPS = 5
# Host time of hooks and coordinator for a unit's use, and of a sub-group's step: measured, see docs/benchmarks.md.
_USE_SECONDS = 50e-6
_GROUP_SECONDS = 200e-6
# A native pass over moments in 8 bits against one over fp32 ones: it waits for its tables, not for memory.
_CODED = 2.8
# Words in the names of parameters that are looked up instead of multiplied with.
_LOOKED_UP = ("embed", "wte", "wpe", "position")
_HEADS = ("lm_head", "embed_out", "output.weight")
_FASTER = 1.25
# I/O counts as hidden when a step takes so much longer than with drives that cost nothing.
_HIDDEN_WITHIN = 1.05
_TOKENS_MAX = 1 << 30
_DAY_S = 86400.0


class Bound(Enum):
    """The resource that a step waits for most."""

    COMPUTE = "compute"
    NVME_READ = "NVMe reads"
    NVME_WRITE = "NVMe writes"
    UP = "CPU to accelerator"
    DOWN = "accelerator to CPU"
    # Adam, norms and copies in CPU memory.
    MEMORY = "CPU memory (optimizer and copies)"
    NETWORK = "collectives"

    __hash__ = object.__hash__


@dataclass(frozen=True)
class StepTime:
    """A predicted optimizer step of one rank, all its micro-batches included."""

    seconds: float
    bound_by: Bound
    tokens: int
    # What each resource would take alone; by how much a quarter more of its rate shortens the step, for those that
    # could be the bound.
    parts: Mapping[Bound, float]
    gains: Mapping[Bound, float]
    # Tokens of a micro-batch and rank from which I/O hides behind computation; None where it never does.
    tokens_to_hide: int | None
    nvme_read_nbytes: int
    nvme_written_nbytes: int
    # Of all ranks of the node.
    nvme_written_nbytes_a_day: float
    # Of all drives together; and whether that was assumed from their capacity.
    endurance_nbytes: int | None
    endurance_assumed: bool
    # Names of what was assumed and not measured.
    assumptions: tuple[str, ...] = field(default=())

    @property
    def tokens_a_second(self) -> float:
        """Of one rank."""
        return self.tokens / self.seconds

    @property
    def days_to_endurance(self) -> float | None:
        """Days of training until the drives have taken what they are rated for; None where nothing is written."""
        if not self.nvme_written_nbytes_a_day or self.endurance_nbytes is None:
            return None
        return self.endurance_nbytes / self.nvme_written_nbytes_a_day

    def explain(self) -> str:
        """In words and numbers, for people."""
        lines = [
            f"step {self.seconds:.3g} s, {self.tokens_a_second:,.0f} tokens/s a rank; bound by {self.bound_by.value}",
            "alone: " + ", ".join(f"{part.value} {taken:.3g} s" for part, taken in self.parts.items() if taken),
        ]
        if self.nvme_read_nbytes or self.nvme_written_nbytes:
            hides = f"from {self.tokens_to_hide:,} tokens a micro-batch on" if self.tokens_to_hide else "never"
            lines.append(
                f"NVMe: {self.nvme_read_nbytes / 1e9:.2f} GB read and {self.nvme_written_nbytes / 1e9:.2f} GB written "
                f"a step; I/O hides behind computation {hides}"
            )
        days = self.days_to_endurance
        if days is not None and self.endurance_nbytes is not None:
            rated = "assumed" if self.endurance_assumed else "rated"
            lines.append(
                f"wear: {self.nvme_written_nbytes_a_day / 1e12:.2f} TB a day; {days:,.0f} days to the drives' {rated} "
                f"{self.endurance_nbytes / 1e12:,.0f} TB"
            )
        if self.assumptions:
            lines.append(f"assumed: {', '.join(self.assumptions)}")
        return "\n".join(lines)


def predict(
    plan: Plan, profile: HardwareProfile | None = None, *, tokens: int, flops: float | None = None,
    accumulation: int = 1, briefly: bool = False, offloaded: OffloadedCheckpoints | None = None,
    exchanged_nbytes: int = 0,
) -> StepTime:  # fmt: skip
    """The step of a plan on a machine; on an assumed one without a profile.

    tokens: of one micro-batch and rank. flops: operations of one micro-batch's forward and backward on this rank;
    by default 6 a parameter and token, 4 of a frozen one, embeddings left out.
    briefly: for comparing many plans: one simulation instead of two dozen; `gains` and `tokens_to_hide` are left out,
    and what would take longest alone counts as the bound. offloaded: checkpoints of activations on another tier.
    exchanged_nbytes: what a rank sends to the others of its tensor group in a micro-batch; layers wait for it.
    """
    profile = profile or assumed(plan.request.accelerator)
    coarse = coarsen(plan)
    machine = _Machine.of(plan, coarse, profile, tokens, flops, exchanged_nbytes)
    case = _Case(plan, coarse, machine, accumulation, offloaded, exchanged_nbytes / max(tokens, 1))
    base = case.simulate()
    parts = {bound: machine.seconds(bound, base, plan, accumulation) for bound in Bound}
    gains: dict[Bound, float] = {}
    for bound, taken in sorted(parts.items(), key=lambda item: -item[1]):
        # No more than what is cut from its own work can be gained.
        if not briefly and (not gains or max(gains.values()) < taken * (1 - 1 / _FASTER)):
            gains[bound] = base.seconds - replace(case, machine=machine.faster(bound)).simulate().seconds
    drives = profile.drives or ASSUMED.drives
    rated = [drive.endurance_nbytes or int(drive.capacity_nbytes * ASSUMED_WRITES_A_BYTE) for drive in drives]
    written = base.written_nbytes * plan.topology.local_size
    return StepTime(
        seconds=base.seconds, bound_by=max(gains or parts, key=lambda bound: (gains or parts)[bound]),
        tokens=tokens * accumulation, parts=parts, gains=gains,
        tokens_to_hide=case.tokens_to_hide(profile, tokens, flops) if plan.nvme_nbytes and not briefly else None,
        nvme_read_nbytes=base.read_nbytes, nvme_written_nbytes=base.written_nbytes,
        nvme_written_nbytes_a_day=written / base.seconds * _DAY_S, endurance_nbytes=sum(rated) or None,
        endurance_assumed=any(drive.endurance_nbytes is None for drive in drives),
        assumptions=_assumptions(plan, profile),
    )  # fmt: skip


@dataclass(frozen=True)
class _Machine:
    """A profile's rates for one rank of a plan. `speed` is by how much each resource is faster than measured."""

    speeds: Speeds
    compute_seconds: float
    # What layers wait for the tensor axis, which the speeds count as computation.
    exchange_seconds: float = 0.0
    # What a step's products take that make matrices orthogonal.
    matrix_seconds: float = 0.0

    @classmethod
    def of(
        cls, plan: Plan, coarse: Coarsened, profile: HardwareProfile, tokens: int, flops: float | None,
        exchanged_nbytes: int = 0,
    ) -> _Machine:  # fmt: skip
        request, sharers = plan.request, plan.topology.local_size
        compute = _compute(profile, request.compute_dtype)
        slower = 1 if request.accelerator else sharers
        each = _compute_seconds(plan, compute, tokens, flops)
        computed = slower * sum(each[unit] for units in coarse.units for unit in units)
        exchanged = exchanged_nbytes / (profile.network_rate or ASSUMED.network_rate or 1.0) if computed else 0.0
        if exchanged:
            each = [taken * (1 + exchanged / computed) for taken in each]
        seconds = [slower * sum(each[unit] for unit in units) for units in coarse.units]
        # Backward of a frozen weight has the gradient of its input to compute and no other.
        share = [1 / 3 if layout.trainable else 1 / 2 for layout in plan.layouts]
        forward = [slower * sum(each[unit] * share[unit] for unit in units) for units in coarse.units]
        uses = len(plan.schedule) / max(len(coarse.plan.schedule), 1)
        # Of the step's streams, what a copy of the same bytes would take: 28 bytes a parameter, and half is read.
        width = DTYPE_NBYTES[request.compute_dtype]
        streams = 16 + 3 * width + (4 if width == 2 else 0)
        products = slower * _matrix_operations(plan) / _compute(profile, "bf16").rate
        on_device = streams / 2 / (profile.device_copy_rate or ASSUMED.device_copy_rate or 1.0)
        rates: dict[QueueKey, float] = {
            (Resource.UP, None): profile.up_rate or ASSUMED.up_rate or 1.0,
            (Resource.DOWN, None): profile.down_rate or ASSUMED.down_rate or 1.0,
            (Resource.NETWORK, None): profile.network_rate or ASSUMED.network_rate or 1.0,
        }
        mixed: dict[QueueKey, float] = {}
        for tier in filter(lambda tier: tier.on_drive, Tier):
            found = tier.rates or profile.drive_rates
            rates |= {(Resource.READ, tier): found.read / sharers, (Resource.WRITE, tier): found.write / sharers}
            mixed |= dict.fromkeys([(Resource.READ, tier), (Resource.WRITE, tier)], found.mixed / 2 / sharers)
        return cls(
            Speeds(
                rates=rates, mixed_rates=mixed, forward_seconds=forward,
                backward_seconds=[both - there for both, there in zip(seconds, forward, strict=True)],
                copy_seconds=sharers / profile.copy_rate,
                adam_seconds=_by_dtype(profile.adam_seconds, request.compute_dtype) * sharers * _pass_factor(plan),
                norm_seconds=_by_dtype(profile.norm_seconds, request.compute_dtype) * sharers,
                device_adam_seconds=on_device, group_seconds=_GROUP_SECONDS * coarse.groups_in_one,
                use_seconds=_USE_SECONDS * uses,
                matrix_seconds=products / max(sum(group.numel for group in plan.sub_groups), 1),
            ),
            compute_seconds=sum(seconds) if not exchanged else computed, exchange_seconds=exchanged,
            matrix_seconds=products,
        )  # fmt: skip

    def faster(self, bound: Bound, factor: float = _FASTER) -> _Machine:
        """The same machine with one resource faster."""
        speeds = self.speeds
        if bound is Bound.COMPUTE:
            speeds = self._computing(factor, 1)
            return replace(
                self, speeds=replace(speeds, matrix_seconds=speeds.matrix_seconds / factor),
                compute_seconds=self.compute_seconds / factor, matrix_seconds=self.matrix_seconds / factor,
            )  # fmt: skip
        if bound is Bound.MEMORY:
            speeds = replace(
                speeds, copy_seconds=speeds.copy_seconds / factor, adam_seconds=speeds.adam_seconds / factor,
                norm_seconds=speeds.norm_seconds / factor,
            )  # fmt: skip
            return replace(self, speeds=speeds)
        rates, mixed = (
            {key: rate * (factor if key[0] is _RESOURCES[bound] else 1) for key, rate in each.items()}
            for each in (speeds.rates, speeds.mixed_rates)
        )
        speeds = self._computing(1, factor) if bound is Bound.NETWORK else speeds
        return replace(self, speeds=replace(speeds, rates=rates, mixed_rates=mixed))

    def _computing(self, computed: float, exchanged: float) -> Speeds:
        """The speeds with computation, and what layers wait for the tensor axis, faster by a factor each."""
        factor = computed
        if self.exchange_seconds:
            both = self.compute_seconds + self.exchange_seconds
            factor = both / (self.compute_seconds / computed + self.exchange_seconds / exchanged)
        return replace(
            self.speeds, forward_seconds=[each / factor for each in self.speeds.forward_seconds],
            backward_seconds=[each / factor for each in self.speeds.backward_seconds],
        )  # fmt: skip

    def seconds(self, bound: Bound, found: SimulatedStep, plan: Plan, accumulation: int) -> float:
        """What a resource has to do in a step, in seconds without sharing."""
        if bound is Bound.COMPUTE:
            return self.compute_seconds * accumulation + self.matrix_seconds
        if bound is Bound.MEMORY:
            host = found.work.get((Resource.CORES, None), 0.0)
            computed = self.compute_seconds * accumulation + self.matrix_seconds
            return max(0.0, host - (0.0 if plan.request.accelerator else computed))
        # Tiers of drives work side by side.
        rates = self.speeds.rates
        waits = self.exchange_seconds * accumulation if bound is Bound.NETWORK else 0.0
        return waits + max(found.work.get(key, 0.0) / rates[key] for key in rates if key[0] is _RESOURCES[bound])


_RESOURCES = {
    Bound.NVME_READ: Resource.READ, Bound.NVME_WRITE: Resource.WRITE, Bound.UP: Resource.UP, Bound.DOWN: Resource.DOWN,
    Bound.NETWORK: Resource.NETWORK,
}  # fmt: skip


@dataclass(frozen=True)
class _Case:
    plan: Plan
    coarsened: Coarsened
    machine: _Machine
    accumulation: int
    offloaded: OffloadedCheckpoints | None
    # Bytes a token that a rank sends to the others of its tensor group.
    exchanged_each: float = 0.0

    def simulate(self) -> SimulatedStep:
        return simulate_step(
            self.coarsened.plan, self.machine.speeds, accumulation=self.accumulation,
            offloaded=self.offloaded,
        )  # fmt: skip

    def of_tokens(self, share: float) -> _Case:
        """The same with checkpoints of `share` times as many tokens."""
        if self.offloaded is None:
            return self
        return replace(self, offloaded=replace(self.offloaded, each_nbytes=int(self.offloaded.each_nbytes * share)))

    def tokens_to_hide(self, profile: HardwareProfile, tokens: int, flops: float | None) -> int | None:
        """The fewest tokens of a micro-batch, to a fifth, whose step is as short as with drives that cost nothing."""
        # Not hidden from `low` down, hidden from `high` up, as far as that is known.
        low, high, count = 0, _TOKENS_MAX + 1, max(tokens, 1)
        while count <= _TOKENS_MAX:
            share = count / max(tokens, 1)
            case = self.of_tokens(share)
            longer = case._longer_for_its_drives(profile, count, None if flops is None else flops * share)
            if longer <= _HIDDEN_WITHIN:
                high = count
            else:
                low = count
            if high <= 1.2 * low + 1:
                return high
            if high > _TOKENS_MAX:
                # What still shows of the drives shrinks with about this power of the tokens.
                further = ((longer - 1) / (_HIDDEN_WITHIN - 1)) ** (2 / 3)
                count = math.ceil(low * min(max(further, 1.2), 16.0))
            else:
                count = round((low * high) ** 0.5) if low else max(high // 4, 1)
        return None

    def _longer_for_its_drives(self, profile: HardwareProfile, tokens: int, flops: float | None) -> float:
        """The seconds of a step over those with drives that cost nothing."""
        exchanged = round(self.exchanged_each * tokens)
        machine = _Machine.of(self.plan, self.coarsened, profile, tokens, flops, exchanged)
        free = machine.faster(Bound.NVME_READ, float("inf")).faster(Bound.NVME_WRITE, float("inf"))
        return replace(self, machine=machine).simulate().seconds / replace(self, machine=free).simulate().seconds


def _compute_seconds(plan: Plan, compute: Compute, tokens: int, flops: float | None) -> list[float]:
    """Forward and backward of one micro-batch by unit."""
    matrices = [sum(slot.numel for slot in layout.slots if _multiplies(slot)) for layout in plan.layouts]
    # The unit of the head, and the size of the vocabulary. A table that serves as head too has no other one.
    slots = [(layout.index, slot) for layout in plan.layouts for slot in layout.slots if len(slot.shape) == 2]
    heads = [(index, slot) for index, slot in slots if any(word in slot.name.lower() for word in _HEADS)]
    tables = [(index, slot) for index, slot in slots if not _multiplies(slot)]
    unit, words = -1, 0
    if heads:
        unit, words = heads[-1][0], heads[-1][1].shape[0]
    elif tables:
        unit, slot = max(tables, key=lambda item: item[1].numel)
        words = slot.shape[0]
        for index, other in tables:
            # All tiles of the table.
            matrices[index] += other.numel if other.name == slot.name else 0
    passes = [6.0 if layout.trainable else 4.0 for layout in plan.layouts]
    operations = sum(map(mul, passes, matrices)) * tokens if flops is None else flops
    rate = operations / max(sum(matrices), 1) / compute.rate
    seconds = [
        numel * rate + layout.numel * compute.parameter_seconds
        for numel, layout in zip(matrices, plan.layouts, strict=True)
    ]
    if words:
        seconds[unit] += tokens * words * compute.logit_seconds
    return seconds


def _matrix_operations(plan: Plan) -> float:
    """Floating-point operations of one step in which this rank makes matrices orthogonal."""
    found = 0.0
    for layout, placed in zip(plan.layouts, plan.placement.units, strict=True):
        if layout.trainable and plan.request.rules[layout.rule].matrices:
            ranks = placed.parts * (plan.topology.tp if layout.is_cut else 1)
            for short, long in (sorted(shape) for slot in layout.slots for _, shape in slot.matrices()):
                found += _MATRIX_STEPS * (4 * short**2 * long + 2 * short**3) / ranks
    return found


def _multiplies(slot: Slot) -> bool:
    """Whether tokens are multiplied with a parameter: a table's rows are looked up, a vector's elements added."""
    return len(slot.shape) > 1 and not any(word in slot.name.lower() for word in _LOOKED_UP)


def _compute(profile: HardwareProfile, dtype: str) -> Compute:
    """The rate of a dtype, or of the nearest one that was measured."""
    for name in (dtype, "bf16" if dtype == "fp16" else "fp16", "fp32"):
        if name in profile.compute:
            return profile.compute[name]
    return assumed(profile.accelerator is not None).compute[dtype]


def _pass_factor(plan: Plan) -> float:
    """How much longer a native pass takes than over fp32 moments."""
    numel = sum(group.numel for group in plan.sub_groups)
    coded = sum(group.numel for group in plan.sub_groups if plan.rule_of(group).block > 1)
    return 1 + (_CODED - 1) * coded / max(numel, 1)


def _by_dtype(values: Mapping[str, float], dtype: str) -> float:
    return values.get(dtype) or max(values.values())


def _assumptions(plan: Plan, profile: HardwareProfile) -> tuple[str, ...]:
    """The assumptions of a prediction: rates that this plan uses and that were not measured."""
    found = [name for name in profile.assumptions if name != "network_rate"]
    if plan.topology.world_size > 1 and "network_rate" in profile.assumptions:
        found.append(f"network_rate {(profile.network_rate or 0) / 1e9:g} GB/s")
    dtype = plan.request.compute_dtype
    if dtype not in profile.compute:
        found.append(f"the rate of computation in {dtype}")
    if plan.nvme_nbytes and not profile.drives:
        drive = ASSUMED.drives[0]
        rates = f"{drive.read_rate / 1e9:g} GB/s read and {drive.write_rate / 1e9:g} GB/s written"
        found.append(f"the drive: {drive.model}, {rates}")
    if plan.request.accelerator and profile.up_rate is None:
        found.append("the rates between CPU and accelerator")
    if plan.nvme_nbytes and any(drive.endurance_nbytes is None for drive in profile.drives or ASSUMED.drives):
        found.append(f"an endurance of {ASSUMED_WRITES_A_BYTE:g} bytes written a byte of capacity")
    if any(placed.param.on_drive for placed in plan.placement.units) and len(profile.drives) > 1:
        found.append("that all drives of the profile are used")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class StageOperations:
    """Floating-point operations of one stage for one micro-batch, by kind of action."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """Those of all its actions."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class RankWork:
    """What a rank of a pipeline does beside its plan: operations of each of its stages for one micro-batch, bytes that
    it sends to others of its tensor group for one, and its activation checkpoints of one on another tier.
    """

    stages: Sequence[StageOperations]
    exchanged_nbytes: int = 0
    offloaded: OffloadedCheckpoints | None = None


@dataclass(frozen=True)
class PipelineStepTime:
    """A predicted step of a pipeline. step: of the rank that ends last, with the seconds of all. seconds: of each rank
    for a micro-batch and for the rest of a step, if it never waited.
    """

    step: StepTime
    times: PipelineTimes
    seconds: tuple[tuple[float, float], ...]


def predict_pipeline(
    plans: Sequence[Plan], profile: HardwareProfile | None, *, tokens: int, work: Sequence[RankWork],
    boundary_nbytes: int, briefly: bool = False,
) -> PipelineStepTime:  # fmt: skip
    """Predict a step. plans, work: of each place on the pipeline axis. tokens: of one micro-batch. boundary_nbytes: of
    what goes from stage to stage for one. briefly: as `predict`.
    """
    part = plans[0].pipeline
    assert part is not None
    profile = profile or assumed(plans[0].request.accelerator)
    flat = [one_micro_batch(plan) for plan in plans]
    alone: dict[object, tuple[float, float]] = {}
    seconds = []
    for plan, own in zip(flat, work, strict=True):
        # Ranks in the middle of an axis are often alike.
        likeness = plan.numel, plan.schedule, tuple(own.stages), plan.placement
        if likeness not in alone:
            alone[likeness] = _alone(plan, profile, tokens, own)
        seconds.append(alone[likeness])
    actions = _action_seconds(part.split.tables, work, seconds)
    message = boundary_nbytes / (profile.network_rate or ASSUMED.network_rate or 1.0)
    times = time_tables(part.split.tables, actions, message_seconds=message)
    ends = [spans[-1][1] + rest for spans, (_, rest) in zip(times.spans, seconds, strict=True)]
    busy = [each * part.split.micro_batches + rest for each, rest in seconds]
    slowest = max(range(len(plans)), key=busy.__getitem__)
    own = work[slowest]
    step = predict(
        flat[slowest], profile, tokens=tokens, flops=_flops(own), accumulation=part.split.micro_batches,
        briefly=briefly, offloaded=own.offloaded, exchanged_nbytes=own.exchanged_nbytes,
    )  # fmt: skip
    day = step.nvme_written_nbytes_a_day * step.seconds / max(ends)
    return PipelineStepTime(
        replace(step, seconds=max(ends), nvme_written_nbytes_a_day=day), times, tuple(seconds)
    )


def one_micro_batch(plan: Plan) -> Plan:
    """The same plan with the uses of one micro-batch: forward through all stages of the rank, then backward."""
    part = plan.pipeline
    assert part is not None
    uses, position = plan.schedule.uses, 0
    forward: list[UnitAccess] = []
    backward: list[UnitAccess] = []
    for stage, kind, micro_batch in part.split.tables[part.index]:
        count = 0 if kind is ActionKind.BACKWARD_WEIGHT else part.split.uses[stage]
        if micro_batch == 0:
            (forward if kind is ActionKind.FORWARD else backward).extend(uses[position : position + count])
        position += count
    return replace(plan, schedule=plan.reschedule((*forward, *backward)), pipeline=None)


def _alone(plan: Plan, profile: HardwareProfile, tokens: int, own: RankWork) -> tuple[float, float]:
    """Seconds that a rank takes for each micro-batch, and for the rest of a step."""
    one, two = (
        predict(
            plan, profile, tokens=tokens, flops=_flops(own), accumulation=count, briefly=True,
            offloaded=own.offloaded, exchanged_nbytes=own.exchanged_nbytes,
        ).seconds
        for count in (1, 2)
    )  # fmt: skip
    return two - one, max(2 * one - two, 0.0)


def _flops(own: RankWork) -> float:
    return sum(stage.total for stage in own.stages)


def _action_seconds(
    tables: Tables, work: Sequence[RankWork], seconds: Sequence[tuple[float, float]]
) -> ActionSeconds:
    """Seconds of each stage's actions: of its rank's micro-batch, as much as it has of the rank's operations."""
    pp = len(tables)
    found: list[tuple[float, float, float]] = []
    for stage in range(sum(len(own.stages) for own in work)):
        own, (each, _) = work[stage % pp], seconds[stage % pp]
        operations, rate = own.stages[stage // pp], each / max(_flops(own), 1.0)
        parts = operations.forward, operations.backward_input, operations.backward_weight
        found.append((parts[0] * rate, parts[1] * rate, parts[2] * rate))
    forward, backward_input, backward_weight = zip(*found, strict=True)
    return ActionSeconds(forward, backward_input, backward_weight)
