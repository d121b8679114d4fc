"""The plan: every byte and every move of a training run, decided before the first step.

`make_plan` is a pure function of the model specification, the topology and the request. The engine executes the plan,
the estimator prints it, tests compare it. All sizes are this rank's; ranks differ in the content of their partitions
only.

The choices of a run that are not bytes, homes or order are its `ExecutionPolicy`, which `make_policy` alone derives.
The engine, the simulator and the estimator read it from the plan, so that what is predicted is what runs, and ranks
that compare plans compare it too.

`model_params` and the numbers of units are of the whole model, which every rank knows alike, whatever it has of it:
ranks of different stages tell each other by them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from infinity.base.sizes import format_bytes
from infinity.errors import CapacityError
from infinity.plan.capacity import Capacity, excesses
from infinity.plan.layout import Slice, SubGroup, UnitLayout, cut_sub_groups, make_layouts
from infinity.plan.partitions import (
    STEP_WINDOW,
    changed_by,
    fetch_nbytes_by_unit,
    first_uses,
    kept_of,
    make_partitions,
    states_kinds,
    step_order_of,
    stepped_nbytes,
    undone_of,
)
from infinity.plan.placement import (
    FROZEN_TRAFFIC,
    PARAM_TRAFFIC,
    STATES_TRAFFIC,
    Homes,
    Placement,
    Value,
    always_whole,
    place,
    search_placement,
    whole_units,
)
from infinity.plan.pools import Scratch, around_nbytes, left_nbytes, make_scratch, routed_nbytes, tiles_in_words
from infinity.plan.prefetch import FetchBudget, FetchSchedule, Timing, UnitAccess, make_schedule
from infinity.plan.request import PlanRequest, RuleSpec
from infinity.plan.shards import Shard
from infinity.plan.spec import ModelSpec
from infinity.plan.stages import PipelinePart, step_uses
from infinity.plan.types import (
    BLOCK_NUMEL,
    CACHE_LINE,
    COPY_NBYTES,
    DTYPE_NBYTES,
    EXTENT_ALIGNMENT,
    Key,
    Kind,
    PartitionSpec,
    Tier,
    Topology,
    align_up,
    memory_names,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExecutionPolicy:
    """One decision a field. A False is the plain way: wait for each thing where it begins."""

    # Transfers between tiers run beside the computation.
    overlap: bool
    # Units are gathered ahead of their use, because a collective or a copy engine works meanwhile. Otherwise their
    # partitions are only fetched ahead.
    gather_ahead: bool
    # Prefetches are timed in one warm step, and from then on submitted as late as those times allow.
    time_prefetch: bool
    # Released units keep their memory for the next gathers, within the plan's bound: where the device's memory is the
    # process's, the system is slow to give it again.
    retain_released: bool
    # A forward gathers over the ranks, so that all of them have to take part in it.
    collective_forward: bool
    # Sub-groups that the program cannot see are stepped beside the next forward. See [Note: step behind the program].
    step_behind: bool
    # Some of those begin in backward, when their gradients are complete. See [Note: step in backward].
    step_in_backward: bool
    # They do so before the norm is known that the step waits for. See [Note: guessed norm].
    speculates: bool


def make_policy(
    request: PlanRequest, topology: Topology, layouts: Sequence[UnitLayout], placement: Placement,
    undone: Sequence[int],
) -> ExecutionPolicy:  # fmt: skip
    """The policy of a request whose values have these homes. undone: sub-groups that may be stepped in backward."""
    several, accelerator, overlap = topology.dp > 1, request.accelerator, request.overlap
    gathers = not all(placed.whole for placed in placement.units)
    on_drive = any(home.on_drive for home in placement.states) or any(
        placed.param.on_drive and layout.numel for layout, placed in zip(layouts, placement.units, strict=True)
    )
    return ExecutionPolicy(
        overlap=overlap,
        gather_ahead=overlap and (several or accelerator),
        time_prefetch=overlap and gathers,
        retain_released=not accelerator,
        collective_forward=several and gathers,
        # There is something to gain where bytes move: to a drive, or to a device that computes.
        step_behind=overlap and (accelerator or on_drive or bool(undone)),
        step_in_backward=bool(undone),
        speculates=bool(undone) and not request.steps_early,
    )


# The smallest sub-group that a budget cuts such states into.
SPLIT_NUMEL_MIN = 1 << 16
# Where a share is divided off, it is exact to one in so many.
SHARES_MIN = 256
# So many sub-groups are as good as more: a plan's own size, and the time that it takes, stay bounded.
SUB_GROUPS_MAX = 4096
# Larger ones save nothing, so that a model of any size needs the same window for its states.
_SUB_GROUP_NUMEL_ENOUGH = 1 << 24


def sub_group_numel_min(numel: int) -> int:
    """Elements of the smallest sub-groups into which the `numel` that a rank steps are cut to save memory."""
    return min(-(-numel // SUB_GROUPS_MAX), _SUB_GROUP_NUMEL_ENOUGH)


@dataclass(frozen=True, slots=True)
class Pools:
    """Bytes of the bounded arenas in CPU memory, and of transient space on the device."""

    # Partitions of PARAM on their way between NVMe and the device, or being stepped.
    param_nbytes: int = 0
    # Optimizer states of sub-groups on their way between NVMe and the step.
    states_nbytes: int = 0
    # Gradients on their way between the device, NVMe and the step.
    grad_nbytes: int = 0
    # Pinned copies of device partitions while they are stepped on the CPU.
    staging_nbytes: int = 0
    # Old values of partitions in CPU memory that are stepped in backward.
    undo_nbytes: int = 0
    # What of device partitions is on its way to their copies on NVMe.
    copies_nbytes: int = 0
    # Whole units gathered at once, beyond those that are whole for good.
    gathered_nbytes: int = 0
    # Whole gradients as autograd leaves them on parameters.
    left_nbytes: int = 0
    # What reductions of a unit's gradients work in.
    scratch: Scratch = field(default_factory=Scratch)
    # One matrix at a time that is made orthogonal, and on the device the momenta of a unit that ranks share, in CPU
    # memory what goes to the device and comes back.
    matrix_nbytes: int = 0
    momenta_nbytes: int = 0
    direction_nbytes: int = 0

    @property
    def in_cpu_nbytes(self) -> int:
        """Bytes of the arenas in CPU memory together."""
        arenas = self.param_nbytes + self.states_nbytes + self.grad_nbytes
        return arenas + self.staging_nbytes + self.undo_nbytes + self.copies_nbytes + self.direction_nbytes


@dataclass(frozen=True, slots=True)
class StepParts:
    """A plan's sub-groups by the time at which they are stepped, each part in the order of stepping."""

    # In the program's thread, before the others: they change what the program sees without a gather.
    visible: tuple[SubGroup, ...]
    # Beside the program. See [Note: step behind the program].
    hidden: tuple[SubGroup, ...]
    # The hidden ones that may begin in backward. See [Note: step in backward].
    in_backward: tuple[SubGroup, ...]

    @property
    def after_backward(self) -> tuple[SubGroup, ...]:
        """The hidden ones that wait for `step()`."""
        early = {group.index for group in self.in_backward}
        return tuple(group for group in self.hidden if group.index not in early)


@dataclass(frozen=True)
class Plan:
    """See the module's text. Two plans are equal when every decision is."""

    topology: Topology
    request: PlanRequest
    layouts: tuple[UnitLayout, ...]
    sub_groups: tuple[SubGroup, ...]
    placement: Placement
    partitions: tuple[PartitionSpec, ...]
    nvme_nbytes: int
    pools: Pools
    budget: FetchBudget
    schedule: FetchSchedule
    # Sub-groups in the order in which they are stepped: see `step_order_of`.
    step_order: tuple[int, ...]
    # Indices of those whose step can be undone until it is known to be wanted: see `undone_of`.
    undone: tuple[int, ...]
    policy: ExecutionPolicy
    numel: int = field(default=0)
    # What this rank has of a model that is cut into stages; all of the above is of that part.
    pipeline: PipelinePart | None = None
    # A micro-batch's activations beside it in words, as far as an engine knows them. No decision of the plan.
    activations: str = field(default="", compare=False)

    def __hash__(self) -> int:
        # Of a few decisions only: a plan has thousands.
        return hash((self.topology, self.request, self.pools, self.nvme_nbytes, self.numel))

    def partition(self, key: Key) -> PartitionSpec:
        """The specification of one partition; KeyError when the plan has none of that name."""
        # Those of units come first, then one for each sub-group.
        units = len(self.partitions) - len(self.sub_groups)
        if key.kind is Kind.STATES:
            specs = self.partitions[units + key.index : units + key.index + 1]
        else:
            specs = self.partitions[:units]
        for spec in specs:
            if spec.key == key:
                return spec
        raise KeyError(str(key))

    @property
    def trains(self) -> bool:
        """Whether there is anything to train, in any stage of a pipeline."""
        every = self.pipeline.split.units if self.pipeline is not None else self.layouts
        return any(each.trainable for each in every)

    @property
    def shared(self) -> frozenset[int]:
        """Units that ranks of other stages have, too: their gradients are complete only at the end of a step."""
        return frozenset(self.pipeline.shared if self.pipeline is not None else ())

    @property
    def told_elsewhere(self) -> frozenset[int]:
        """Those of the shared units for which another rank of the pipeline axis speaks: it saves and counts them."""
        part = self.pipeline
        return frozenset(unit for unit in self.shared if part is not None and not part.tells(unit))

    def visible(self, group: SubGroup) -> bool:
        """Whether a sub-group is stepped before `step()` returns: ranks meet in it, or it changes parameters that the
        program sees without a gather, those that stay whole and do not follow their partitions one by one.
        """
        units = [self.placement.units[piece.unit] for piece in group.slices]
        return self.meets(group) or any(placed.whole and not placed.refreshed_apart for placed in units)

    def rule_of(self, group: SubGroup) -> RuleSpec:
        """The update rule of a sub-group."""
        return self.request.rules[self.layouts[group.slices[0].unit].rule]

    def meets(self, group: SubGroup) -> bool:
        """Whether all ranks step a sub-group together: each has parts of matrices that are stepped whole."""
        units = [piece.unit for piece in group.slices]
        shared = any(self.placement.units[unit].parts > 1 or self.layouts[unit].is_cut for unit in units)
        return self.rule_of(group).matrices and shared

    def refreshed_at_use(self, unit: int) -> bool:
        """Whether a unit that stays whole is brought up to date when it is used next. See [Note: refresh]."""
        return self.policy.step_behind and self.placement.units[unit].refreshed_at_use

    def refresh_order(self) -> list[int]:
        """The units that are trained, in the order in which their last sub-groups are stepped."""
        last = {
            piece.unit: at for at, index in enumerate(self.step_order) for piece in self.sub_groups[index].slices
        }
        trained = (layout.index for layout in self.layouts if layout.trainable)
        return sorted(trained, key=lambda unit: last.get(unit, -1))

    @property
    def wire_in_backward(self) -> str | None:
        """The dtype in which gradients travel to be summed during backward; None where none do, or only at its end."""
        late = self.topology.dp == 1 or self.placement.grad_whole
        return None if late else self.request.communication_dtype

    def ends_partition(self, piece: Slice) -> bool:
        """Whether a slice is the last of its unit's partition."""
        parts = self.placement.units[piece.unit].parts
        return piece.stop >= self.layouts[piece.unit].partition_numel(parts)

    def step_parts(self) -> StepParts:
        """The sub-groups by the time at which they are stepped."""
        order = [self.sub_groups[index] for index in self.step_order]
        hidden = tuple(group for group in order if self.policy.step_behind and not self.visible(group))
        early = {*self.undone} - self.kept() if self.undone else set[int]()
        return StepParts(
            visible=tuple(group for group in order if not self.policy.step_behind or self.visible(group)),
            hidden=hidden,
            in_backward=tuple(
                group for group in hidden
                if group.index in early and self.shared.isdisjoint(piece.unit for piece in group.slices)
            ),
        )  # fmt: skip

    def homes(self, kind: Kind) -> str:
        """Where PARAM, GRAD or STATES partitions live, in words: "gpu", or "gpu 31 %, cpu 69 %" of their bytes."""
        names = memory_names(accelerator=self.request.accelerator)
        nbytes = dict.fromkeys(names.values(), 0)
        for spec in self.partitions:
            if spec.key.kind is kind:
                nbytes[names[spec.home]] += spec.nbytes
        held = {name: size for name, size in nbytes.items() if size}
        if len(held) <= 1:
            return next(iter(held), names[Tier.GPU])
        return ", ".join(f"{name} {100 * size / sum(held.values()):.0f} %" for name, size in held.items())

    def bytes_by_memory(self) -> dict[str, Counter[Kind]]:
        """`bytes_by_tier` by the names of the memories, of which a machine without an accelerator has one."""
        names = memory_names(accelerator=self.request.accelerator)
        held: dict[str, Counter[Kind]] = {name: Counter() for name in names.values()}
        for tier, table in self.bytes_by_tier().items():
            held[names[tier]].update(table)
        return held

    def file_nbytes(self, tier: Tier) -> int:
        """Size of this rank's file on a tier of drives."""
        extents = (extent for spec in self.partitions if spec.drive is tier for extent in (spec.extent, spec.spare))
        return max((extent.offset + extent.nbytes for extent in extents if extent is not None), default=0)

    def kept(self) -> frozenset[int]:
        """Sub-groups with states on NVMe that stay in memory from step to step: none that a killed run is to find."""
        if self.request.recorded:
            return frozenset()
        sizes = {
            spec.key.index: spec.nbytes for spec in self.partitions
            if spec.key.kind is Kind.STATES and spec.home.on_drive
        }  # fmt: skip
        return kept_of(self.step_order, sizes, self.pools.states_nbytes)

    def full_nbytes(self) -> tuple[int, ...]:
        """Device bytes that gathering each unit takes: 0 for one that is whole for good."""
        return _full_nbytes(self.layouts, self.placement)

    def reschedule(self, uses: tuple[UnitAccess, ...], timing: Timing | None = None) -> FetchSchedule:
        """The schedule for uses that were recorded (and timed), within the same budgets."""
        return make_schedule(
            uses,
            full_nbytes=self.full_nbytes(),
            fetch_nbytes=fetch_nbytes_by_unit(self.partitions, self.placement),
            budget=self.budget,
            timing=timing,
        )

    @cached_property
    def followed(self) -> FetchSchedule:
        """The schedule that a pass follows: without the experts, of which data says which are used."""
        uses = tuple(use for use in self.schedule.uses if not self.layouts[use.unit].routed)
        return self.schedule if uses == self.schedule.uses else self.reschedule(uses)

    def bytes_at_home(self) -> dict[Tier, dict[Kind, int]]:
        """Bytes of values at their homes, with units and gradients that stay whole; POOL is what rounding adds."""
        return {tier: dict(kinds) for tier, kinds in self._at_home.items()}

    @cached_property
    def _at_home(self) -> dict[Tier, dict[Kind, int]]:
        table: dict[Tier, dict[Kind, int]] = {tier: {} for tier in Tier}
        # There are thousands of sub-groups but few kinds of them, whose sections are one object: these are counted.
        counts = Counter(
            (id(spec.sections), spec.home, spec.nbytes)
            for spec in self.partitions
            if spec.key.kind is not Kind.PARAM or not self.placement.units[spec.key.index].aliased
        )
        sections_of = {id(spec.sections): spec.sections for spec in self.partitions}
        for (identity, home, nbytes), count in counts.items():
            for section in sections_of[identity]:
                _add(table, home, section.kind, count * section.nbytes)
                nbytes -= section.nbytes
            _add(table, home, Kind.POOL, count * nbytes)
        for spec in self.partitions:
            # Second extents, and copies of what lies in memory.
            beside = (spec.extent if spec.copied else None, spec.spare)
            if spec.drive is not None:
                _add(table, spec.drive, Kind.POOL, sum(extent.nbytes for extent in beside if extent is not None))
        for layout, placed in zip(self.layouts, self.placement.units, strict=True):
            _add(table, Tier.GPU, Kind.FULL, layout.nbytes if placed.whole else 0)
            if self.placement.grad_whole and layout.trainable:
                _add(table, Tier.GPU, Kind.FULL_GRAD, layout.numel * DTYPE_NBYTES[self.request.grad_dtype])
        return table

    def bytes_by_tier(self) -> dict[Tier, dict[Kind, int]]:
        """Bytes that this rank holds on each tier, by kind, at most; POOL is space reserved for moves.

        A bound of every phase of training (see `estimators.phases`), to which activations come.
        """
        table = self.bytes_at_home()
        _add(table, Tier.GPU, Kind.FULL, self.pools.gathered_nbytes)
        _add(table, Tier.GPU, Kind.FULL_GRAD, self.pools.left_nbytes + self.pools.scratch.nbytes)
        _add(table, Tier.GPU, Kind.POOL, self.pools.matrix_nbytes + self.pools.momenta_nbytes)
        _add(table, Tier.CPU, Kind.POOL, self.pools.in_cpu_nbytes)
        return table

    def nbytes_by_tier(self) -> dict[Tier, int]:
        """Bytes that this rank holds on each tier at the busiest moment, of all kinds."""
        return {tier: sum(kinds.values()) for tier, kinds in self.bytes_by_tier().items()}

    def check(self, capacity: Capacity, rank: int = 0) -> None:
        """Raise CapacityError when a tier's planned bytes exceed what it has. Touches nothing."""
        for excess in excesses(self.bytes_by_tier(), capacity):
            raise CapacityError(f"rank {rank} {excess}")

    def explain(self) -> str:
        """The plan in words and numbers, for people."""
        request, units = self.request, self.placement.units
        kept = f"optimizer states on {self.homes(Kind.STATES)}, gradients ({request.grad_dtype}) on "
        lines = [
            f"{self.numel / 1e6:,.1f} M parameters in {len(self.layouts)} units, stage {request.stage}, "
            f"{request.compute_dtype}, {self.topology.in_words()}; "
            f"{len(self.sub_groups)} optimizer sub-groups",
            f"parameters on {self.homes(Kind.PARAM)}, "
            + (kept + self.homes(Kind.GRAD) if self.sub_groups else "none of them trained: no states, no gradients")
            + f"; {sum(placed.whole for placed in units)} units stay gathered",
        ]
        held = self.bytes_by_memory()
        width = max(map(len, held))
        for name, kinds in held.items():
            parts = ", ".join(f"{kind.label} {format_bytes(nbytes)}" for kind, nbytes in kinds.items())
            lines.append(f"  {name:<{width}} {format_bytes(kinds.total()):>10}  {parts}")
        if self.policy.speculates:
            lines.append("steps begin in backward, before their norm is known: a wrong guess is stepped again")
        if self.activations:
            lines.append(f"beside it a micro-batch's activations: {self.activations}")
        lines += tiles_in_words(self.layouts, self.placement, request.live_numel)
        lines.append(
            f"fetch schedule: {len(self.schedule)} uses a step, at most {format_bytes(self.schedule.peak_nbytes)} "
            f"gathered at once; NVMe file {format_bytes(self.nvme_nbytes)}"
        )
        return "\n".join(lines)

    def fingerprint(self) -> str:
        """A short hash of every decision, equal for equal plans on any machine."""
        decided = self if self.pipeline is None else replace(self, pipeline=self.pipeline.decided)
        decisions = asdict(decided)
        del decisions["activations"]
        return hashlib.sha256(json.dumps(decisions, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _add(table: dict[Tier, dict[Kind, int]], tier: Tier, kind: Kind, nbytes: int) -> None:
    if nbytes:
        table[tier][kind] = table[tier].get(kind, 0) + nbytes


def make_plan(
    spec: ModelSpec, topology: Topology, request: PlanRequest, capacity: Capacity | None = None,
    pipeline: PipelinePart | None = None,
) -> Plan:  # fmt: skip
    """Decide everything: layouts, sub-groups, homes, extents, pools and the fetch schedule.

    capacity: what the tiers may hold, for a request that leaves tiers to the budgets; without it they are unlimited.
    pipeline: what this rank has of a model in stages; then `spec` is of that part (`stages.part_of`).
    """
    capacity = capacity or Capacity()
    by_budget = None in (request.param_tier, request.optimizer_tier)
    draft = _Draft(spec, topology, _bounded(request, capacity) if by_budget else request, pipeline)
    if not by_budget:
        return draft.plan(draft.homes)

    def settled(homes: Mapping[Key, Tier]) -> Plan:
        params, states = draft.homes.params, draft.homes.states
        return draft.plan(
            replace(
                draft.homes,
                params=tuple(homes.get(Key(Kind.PARAM, index), home) for index, home in enumerate(params)),
                states=tuple(homes.get(Key(Kind.STATES, index), home) for index, home in enumerate(states)),
            )
        )

    def gradients(plan: Plan) -> int:
        follows = request.optimizer_tier is None
        return plan.bytes_by_tier()[Tier.GPU].get(Kind.GRAD, 0) if follows else 0

    tiers = (Tier.GPU, Tier.CPU, Tier.NVME) if request.drive else (Tier.GPU, Tier.CPU)
    return search_placement(draft.values(), tiers, capacity, settled, Plan.nbytes_by_tier, gradients)


def _bounded(request: PlanRequest, capacity: Capacity) -> PlanRequest:
    """A request whose moving parts suit the budgets: what is gathered takes an eighth of the GPU tier's at most, and
    what moves between NVMe and memory about as much of the CPU tier's. The configuration's bounds stay upper bounds.
    """
    gpu, cpu = capacity.of(Tier.GPU), capacity.of(Tier.CPU)
    width = DTYPE_NBYTES[request.compute_dtype]
    live = request.live_numel if gpu is None else min(request.live_numel, max(gpu // 8 // width, 1))
    window = _state_buffers(request) * max(states_nbytes(request, BLOCK_NUMEL) // BLOCK_NUMEL, 1)
    split = request.split_numel if cpu is None else min(request.split_numel, max(cpu // 16 // window, SPLIT_NUMEL_MIN))
    ahead = request.prefetch_numel if cpu is None else min(request.prefetch_numel, cpu // 16 // width)
    return replace(request, live_numel=live, prefetch_numel=min(ahead, live // 2), split_numel=split)


def states_nbytes(request: PlanRequest, numel: int, rule: int | None = None) -> int:
    """Bytes of the optimizer states of `numel` elements, whole blocks, under a rule; None: the one that keeps most."""
    each = [
        sum(
            DTYPE_NBYTES[dtype] * -(-numel // kind.block)
            for kind, dtype in states_kinds(request.compute_dtype, spec.moments)
        )
        for spec in request.rules
    ]
    return max(each) if rule is None else each[rule]


def _state_buffers(request: PlanRequest) -> int:
    """Sub-groups whose states have room in memory at once: a window, or, where nothing is read ahead, one."""
    return max(request.state_buffers, STEP_WINDOW if request.prefetch_numel else 1)


class _Draft:
    """A model's layouts and sub-groups, from which a plan follows once every value has a home.

    homes: of what the request names a tier for; the GPU tier stands for what a budget decides.
    """

    def __init__(
        self, spec: ModelSpec, topology: Topology, request: PlanRequest, pipeline: PipelinePart | None
    ) -> None:
        self._spec, self._topology, self._request, self._pipeline = spec, topology, request, pipeline
        self._layouts = make_layouts(spec, topology.dp, request.rules)
        # Which units stay whole is only known once their parameters have homes.
        self._params_open = request.param_tier is None and request.stage == 3
        params = self._param_homes()
        self._groups = self._sub_groups(params)
        self.homes = Homes(params, self._state_homes(), self._grad_homes())

    @property
    def _parts(self) -> int:
        """Parts into which gradients and states are cut."""
        return 1 if self._request.stage == 0 else self._topology.dp

    def _param_homes(self) -> tuple[Tier, ...]:
        """The home of each unit's PARAM partition. On NVMe, the first few stay in CPU memory."""
        homes = [self._request.param_tier or Tier.GPU] * len(self._layouts)
        room = self._request.param_cpu_numel
        for layout in self._layouts if room and homes and homes[0].on_drive else ():
            numel = layout.partition_numel(self._topology.dp)
            if numel > room:
                break
            room -= numel
            homes[layout.index] = Tier.CPU
        return tuple(homes)

    def _sub_groups(self, params: tuple[Tier, ...]) -> tuple[SubGroup, ...]:
        """The sub-groups: small enough for what moves, or for what is divided between tiers."""
        request, layouts, dp, parts = self._request, self._layouts, self._topology.dp, self._parts
        numel = sum(layout.partition_numel(parts) for layout in layouts if layout.trainable)
        # What fills the plan with tiny sub-groups saves no memory that counts, and each costs a request to its drive.
        numel_max = max(request.sub_group_numel, min(SPLIT_NUMEL_MIN, numel // SUB_GROUPS_MAX))
        if request.optimizer_tier is None or request.optimizer_tier.on_drive or request.optimizer_share < 1:
            numel_max = min(numel_max, max(request.split_numel, sub_group_numel_min(numel)))
        if request.optimizer_share < 1:
            numel_max = min(numel_max, max(numel // SHARES_MIN, 1))
        whole = always_whole(layouts, request) if self._params_open else whole_units(layouts, request, dp, params)
        # A unit that may stay whole or not is joined with no other.
        alone = frozenset(range(len(layouts))) - whole if self._params_open else frozenset[int]()
        return cut_sub_groups(layouts, parts, numel_max, apart=whole, alone=alone, rules=request.rules)

    def _state_homes(self) -> tuple[Tier, ...]:
        """The home of each sub-group's states. Where only a share is to leave the device, those nearest the input stay.
        """
        homes = []
        room = round((1 - self._request.optimizer_share) * sum(group.numel for group in self._groups))
        for group in self._groups:
            here = group.numel <= room
            room -= group.numel if here else room
            homes.append(Tier.GPU if here else self._request.optimizer_tier or Tier.GPU)
        return tuple(homes)

    def _grad_homes(self) -> tuple[Tier, ...]:
        """The home of each unit's GRAD partition unless its states are on the device. Of a share on a drive are the
        units that the step comes to last.
        """
        request, first_use, never = self._request, first_uses(self._spec.uses), len(self._spec.uses)
        homes = [Tier.CPU] * len(self._layouts)
        if request.grad_tier is None or not request.grad_tier.on_drive:
            return tuple(homes)
        numels = {each.index: each.partition_numel(self._parts) for each in self._layouts if each.trainable}
        room = round(request.grad_share * sum(numels.values()))
        for unit in sorted(numels, key=lambda unit: (first_use.get(unit, never), unit), reverse=True):
            if numels[unit] > room:
                break
            room -= numels[unit]
            homes[unit] = request.grad_tier
        return tuple(homes)

    def values(self) -> list[Value]:
        """The values that the budgets find homes for: parameters first, then states, each from the input on."""
        spec, request = self._spec, self._request
        values = []
        if self._params_open:
            whole = always_whole(self._layouts, request)
            in_backward = {unit for position, unit in enumerate(spec.uses) if position not in spec.lookups}
            forward_only = {spec.uses[position] for position in spec.lookups} - in_backward
            for layout in self._layouts:
                if layout.index not in whole:
                    nbytes = layout.nbytes // self._topology.dp
                    times = (PARAM_TRAFFIC if layout.trainable else FROZEN_TRAFFIC) - (layout.index in forward_only)
                    values.append(Value(Key(Kind.PARAM, layout.index), nbytes, nbytes, times * nbytes))
        if request.optimizer_tier is None:
            grad = DTYPE_NBYTES[request.grad_dtype]
            for group in self._groups:
                nbytes = states_nbytes(request, group.numel, self._layouts[group.slices[0].unit].rule)
                values.append(
                    Value(Key(Kind.STATES, group.index), nbytes, nbytes + group.numel * grad, STATES_TRAFFIC * nbytes)
                )
        return values

    def plan(self, homes: Homes) -> Plan:
        """Everything that follows from the homes."""
        spec, topology, request, layouts, groups = (
            self._spec, self._topology, self._request, self._layouts, self._groups
        )  # fmt: skip
        placement = place(layouts, groups, request, topology.dp, homes)
        order = step_order_of(groups, placement, spec.uses)
        early = request.overlap and (request.steps_early or request.speculates) and not placement.grad_whole
        # A step in backward may not write over a record before every rank has written the next one, which is only
        # known of all of them when they exchange the norm.
        early = early and not (request.recorded and topology.world_size > 1)
        undone = undone_of(groups, order, placement, memory_numel=request.undo_numel) if early else ()
        policy = make_policy(request, topology, layouts, placement, undone)
        partitions, nvme_nbytes = make_partitions(
            layouts, groups, placement, compute_dtype=request.compute_dtype, grad_dtype=request.grad_dtype,
            rules=request.rules, undone=undone, recorded=request.recorded,
        )  # fmt: skip
        width = DTYPE_NBYTES[request.compute_dtype]
        fetch_nbytes = fetch_nbytes_by_unit(partitions, placement)
        # What stays gathered around tiles is not theirs.
        live_nbytes = request.live_numel * width
        around, routed = around_nbytes(layouts, placement), routed_nbytes(layouts, placement)
        # Two units of experts at once, where that leaves half of it to others.
        two = around + 2 * routed <= live_nbytes // 2
        around += routed * (1 + two)
        budget = FetchBudget(
            live_nbytes_max=max(live_nbytes - around, live_nbytes // (4 if routed else 2)),
            prefetch_nbytes_max=request.prefetch_numel * width, reuse_nbytes_max=request.reuse_numel * width,
            fetch_nbytes_max=max(request.prefetch_numel * width // topology.dp, max(fetch_nbytes, default=0)),
            gather_routed_ahead=two,
        )  # fmt: skip
        schedule = make_schedule(
            step_uses(spec), full_nbytes=_full_nbytes(layouts, placement), fetch_nbytes=fetch_nbytes, budget=budget,
        )  # fmt: skip
        plan = Plan(
            topology=topology, request=request, layouts=layouts, sub_groups=groups, placement=placement,
            partitions=partitions, nvme_nbytes=nvme_nbytes, budget=budget, schedule=schedule, numel=spec.numel,
            step_order=order, undone=undone, policy=policy, pools=Pools(), pipeline=self._pipeline,
        )  # fmt: skip
        plan = replace(plan, pools=_pools(plan, around, spec.uses[::-1]))
        return replace(plan, pools=replace(plan.pools, undo_nbytes=_undo_nbytes(plan)))


def _full_nbytes(layouts: tuple[UnitLayout, ...], placement: Placement) -> tuple[int, ...]:
    """Bytes that gathering each unit takes on the device."""
    units = zip(layouts, placement.units, strict=True)
    return tuple(0 if placed.whole else layout.nbytes for layout, placed in units)


def _pools(plan: Plan, around: int, backward: tuple[int, ...]) -> Pools:
    """Sizes of a plan's arenas: what the busiest moment needs, never more than everything that could lie there.

    around: bytes that stay gathered around tiles. backward: the units in the order in which a backward uses them.
    """
    request, placement, layouts = plan.request, plan.placement, plan.layouts
    on_drive = {spec.key: spec.nbytes for spec in plan.partitions if spec.home.on_drive}
    params = {key: nbytes for key, nbytes in on_drive.items() if key.kind is Kind.PARAM}
    states = [nbytes for key, nbytes in on_drive.items() if key.kind is Kind.STATES]
    grads = {key: nbytes for key, nbytes in on_drive.items() if key.kind is Kind.GRAD}
    # One is in use. Beside it lies what was fetched ahead, or what is stepped: nothing is fetched ahead of its step.
    busiest = max(params.values(), default=0) + max(plan.budget.fetch_nbytes_max, _stepped_nbytes(plan, params))
    staged = [
        _staged_nbytes(group, placement, request)
        for group, home in zip(plan.sub_groups, placement.states, strict=True)
        if (request.accelerator or request.unified) and not _in_device_tensors(home, request)
    ]
    copied = [
        spec.nbytes for spec in plan.partitions
        if spec.copied and (request.accelerator or request.unified) and _in_device_tensors(spec.home, request)
    ]  # fmt: skip
    return Pools(
        param_nbytes=min(sum(params.values()), align_up(busiest, EXTENT_ALIGNMENT)),
        states_nbytes=min(sum(states), _state_buffers(request) * max(states, default=0)),
        grad_nbytes=_grad_nbytes(plan, grads),
        staging_nbytes=max(staged, default=0),
        copies_nbytes=max((min(COPY_NBYTES, nbytes) for nbytes in copied), default=0),
        gathered_nbytes=plan.followed.peak_nbytes + around,
        left_nbytes=max(
            left_nbytes(backward, layouts, accelerator=request.accelerator, wire=plan.wire_in_backward), default=0
        ),
        scratch=make_scratch(
            layouts, placement, dp=plan.topology.dp, wire=request.communication_dtype, grad_dtype=request.grad_dtype,
            accelerator=request.accelerator, accumulates=request.accumulates,
        ),  # fmt: skip
        **_matrix_pools(plan),
    )


def _matrix_pools(plan: Plan) -> dict[str, int]:
    """Bytes of the pools in which matrices are made orthogonal: the largest one's."""
    request, matrix, momenta, direction = plan.request, 0, 0, 0
    for layout, placed in zip(plan.layouts, plan.placement.units, strict=True):
        width = request.rules[layout.rule].matrix_width
        if not (layout.trainable and width):
            continue
        shapes = {shape for slot in layout.slots for _, shape in slot.matrices()}
        largest = max(map(math.prod, shapes))
        for shape in shapes:
            pieces = (math.prod(shape) * width, min(shape) ** 2 * width)
            matrix = max(matrix, 2 * sum(align_up(nbytes, CACHE_LINE) for nbytes in pieces))
        # Of a unit that ranks share: what this rank has before and after, and the whole unit's, of all shards.
        own, meets = layout.numel // placed.parts * width, placed.parts > 1 or layout.is_cut
        shards = 1 + plan.topology.tp if layout.is_cut else 1
        momenta = max(momenta, shards * layout.numel * width + 2 * own if meets else 0)
        if request.accelerator:
            direction = max(direction, own if meets else largest * width)
    return {"matrix_nbytes": matrix, "momenta_nbytes": momenta, "direction_nbytes": direction}


def _undo_nbytes(plan: Plan) -> int:
    """Bytes of the old values in CPU memory of all that is stepped in backward, as an arena holds them."""
    if not plan.request.undo_numel:
        return 0
    changed = {key for group in plan.step_parts().in_backward for key in changed_by(group)}
    sizes = (spec.nbytes for spec in plan.partitions if spec.key in changed and not spec.home.on_drive)
    return sum(align_up(nbytes, EXTENT_ALIGNMENT) for nbytes in sizes)


def _grad_nbytes(plan: Plan, grads: dict[Key, int]) -> int:
    """Bytes of the pool of gradients on drives. One unit's have a lease while they arrive; beside them the ones before
    are written, or a sub-group is stepped, and what a window of sub-groups needs has room. Where nothing is read ahead,
    each waits for the one before.
    """
    largest, stepped = max(grads.values(), default=0), _stepped_nbytes(plan, grads)
    room = largest + stepped if plan.request.prefetch_numel else max(largest, stepped)
    return min(sum(grads.values()), align_up(room, EXTENT_ALIGNMENT))


def _stepped_nbytes(plan: Plan, sizes: dict[Key, int]) -> int:
    """Bytes of partitions of units in memory while sub-groups are stepped: a window of them, or, where nothing is read
    ahead, one at a time.
    """
    return stepped_nbytes(
        plan.sub_groups, plan.step_order, sizes, window=STEP_WINDOW if plan.request.prefetch_numel else 1
    )


def _staged_nbytes(group: SubGroup, placement: Placement, request: PlanRequest) -> int:
    """Copies in CPU memory of a sub-group's parameters and gradients that lie on the device."""
    nbytes = 0
    for piece in group.slices:
        homes = placement.units[piece.unit]
        for home, dtype in ((homes.param, request.compute_dtype), (homes.grad, request.grad_dtype)):
            if _in_device_tensors(home, request):
                nbytes += align_up(piece.numel * DTYPE_NBYTES[dtype], CACHE_LINE)
    return nbytes


def _in_device_tensors(home: Tier, request: PlanRequest) -> bool:
    return home.on_device or (request.unified and not home.on_drive)


@dataclass(frozen=True, slots=True)
class ModelParam:
    """A parameter: its shape before a tensor axis cuts it by `shard`, its dtype, its optimizer parameter group when the
    plan was made (-1 for one that is frozen), the number of the update rule that steps it.

    holders: the pipeline indices of the ranks that have it, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    shard: Shard | None
    holders: tuple[int, ...]
    rule: int = 0

    @property
    def trainable(self) -> bool:
        """Whether it has gradients and optimizer states."""
        return self.group >= 0


def model_params(plan: Plan) -> dict[str, ModelParam]:
    """Return the parameters of the model by name, in the order of its units; one in tiles once, at its last."""
    part = plan.pipeline
    found: dict[str, ModelParam] = {}
    for param in _own(plan) if part is None else _of_all_stages(part):
        found.pop(param.name, None)
        found[param.name] = param
    return found


def _own(plan: Plan) -> Iterator[ModelParam]:
    for layout in plan.layouts:
        for slot in layout.slots:
            yield ModelParam(slot.name, slot.whole_shape, layout.dtype, slot.group, slot.shard, (0,), layout.rule)


def _of_all_stages(part: PipelinePart) -> Iterator[ModelParam]:
    for number, unit in enumerate(part.split.units):
        holders = part.split.holders(number)
        for spec in unit.params:
            shape = spec.shape if spec.shard is None else spec.shard.whole_shape(spec.shape)
            yield ModelParam(spec.name, shape, unit.dtype, spec.group, spec.shard, holders, unit.rule)


def place_of_buffer(plan: Plan, name: str) -> int:
    """Return the pipeline index of the rank whose copy of a buffer counts: the first of those that run its module."""
    return 0 if plan.pipeline is None else plan.pipeline.split.place_of(name.rpartition(".")[0])


_Value = TypeVar("_Value")


class UnitNumbers:
    """The place of a rank's units among all units of the model. Without a pipeline both are the same."""

    def __init__(self, plan: Plan) -> None:
        part = plan.pipeline
        if part is None:
            numbers, params = tuple(range(len(plan.layouts))), [len(layout.slots) for layout in plan.layouts]
        else:
            numbers, params = part.numbers, [len(unit.params) for unit in part.split.units]
        # Units of the whole model.
        self.count = len(params)
        self._numbers = numbers
        self._offsets = [*accumulate(params, initial=0)]
        self._told_elsewhere = plan.told_elsewhere
        # Units of other stages, each with its number.
        self._others = [] if part is None else [
            (number, unit) for number, unit in enumerate(part.split.units) if number not in set(numbers)
        ]  # fmt: skip

    def number(self, unit: int) -> int:
        """Return the number in the whole model of a unit of this rank's plan."""
        return self._numbers[unit]

    def tells(self, unit: int) -> bool:
        """Return whether this rank, of those along the pipeline axis, speaks for a unit of its plan."""
        return unit not in self._told_elsewhere

    def flags(self, mine: Mapping[int, Sequence[bool]]) -> list[bool]:
        """Return a flag for each parameter of the whole model: this rank's by unit of its plan, False elsewhere."""
        found = [False] * self._offsets[-1]
        for unit, flags in mine.items():
            at = self._offsets[self._numbers[unit]]
            found[at : at + len(flags)] = flags
        return found

    def names_elsewhere(self, flags: Sequence[bool]) -> frozenset[str]:
        """Return the names of the parameters that only other stages have and whose flag, in a list by parameter of the
        whole model, is set.
        """
        return frozenset(
            spec.name
            for number, unit in self._others
            for spec, flag in zip(unit.params, flags[self._offsets[number] :], strict=False)
            if flag
        )

    def of_unit(self, values: Sequence[_Value], unit: int) -> list[_Value]:
        """Return what a list by parameter of the whole model has of a unit of this rank's plan."""
        at = self._numbers[unit]
        return list(values[self._offsets[at] : self._offsets[at + 1]])
