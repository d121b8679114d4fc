"""The plan: every byte and every move of a training run, decided before the first step.

`make_plan` is a pure function of the model specification, the topology and the request. The engine executes the plan,
the estimator prints it, tests compare it. All sizes are this rank's; ranks differ in the content of their partitions
only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field

from infinity.errors import CapacityError
from infinity.plan.fetch import FetchBudget, FetchSchedule, Timing, make_schedule
from infinity.plan.gradients import Scratch, left_nbytes, make_scratch
from infinity.plan.layout import SubGroup, UnitLayout, cut_sub_groups, make_layouts
from infinity.plan.placement import Placement, Policy, place, place_units
from infinity.plan.spec import ModelSpec
from infinity.plan.topology import Topology
from infinity.plan.types import (
    CACHE_LINE,
    DTYPE_NBYTES,
    EXTENT_ALIGNMENT,
    Extent,
    Key,
    Kind,
    PartitionSpec,
    Tier,
    align_up,
    pack_sections,
)

# Sub-groups in memory at once while stepping from NVMe: one being stepped, those being read, and two being written.
STEP_READS = 2
STEP_WINDOW = 1 + STEP_READS + 2


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is asked for: the configuration's decisions as numbers of elements, tiers and names of dtypes."""

    stage: int = 3
    param_tier: Tier = Tier.GPU
    optimizer_tier: Tier = Tier.GPU
    compute_dtype: str = "fp32"
    grad_dtype: str = "fp32"
    communication_dtype: str = "fp32"
    sub_group_numel: int = 1_000_000_000
    prefetch_numel: int = 50_000_000
    persistence_numel: int = 100_000
    persistent_total_numel: int = 2**63 - 1
    live_numel: int = 1_000_000_000
    reuse_numel: int = 1_000_000_000
    # Whether the device has memory of its own, so that copies between CPU and device need staging buffers.
    accelerator: bool = False


@dataclass(frozen=True, slots=True)
class Pools:
    """Bytes of the bounded arenas in CPU memory, and of transient space on the device."""

    # Partitions of PARAM on their way between NVMe and the device, or being stepped.
    param_nbytes: int = 0
    # Optimizer states of sub-groups on their way between NVMe and the stepper.
    states_nbytes: int = 0
    # Pinned copies of device partitions while they are stepped on the CPU.
    staging_nbytes: int = 0
    # Whole units gathered at once, beyond those that are whole for good.
    gathered_nbytes: int = 0
    # Whole gradients as autograd leaves them on parameters.
    left_nbytes: int = 0
    # What reductions of a unit's gradients work in.
    scratch: Scratch = field(default_factory=Scratch)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes that a rank may use on each tier; None where nobody asked."""

    gpu: int | None = None
    cpu: int | None = None
    nvme: int | None = None

    def of(self, tier: Tier) -> int | None:
        return {Tier.GPU: self.gpu, Tier.CPU: self.cpu, Tier.NVME: self.nvme}[tier]


@dataclass(frozen=True, slots=True)
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
    # Sub-groups in the order in which they are stepped: see `_step_order`.
    step_order: tuple[int, ...]
    numel: int = field(default=0)

    def partition(self, key: Key) -> PartitionSpec:
        """The specification of one partition; KeyError when the plan has none of that name."""
        for spec in self.partitions:
            if spec.key == key:
                return spec
        raise KeyError(str(key))

    def visible(self, group: SubGroup) -> bool:
        """Whether a sub-group changes parameters that the program sees without a gather: those that stay whole."""
        return any(self.placement.units[piece.unit].whole for piece in group.slices)

    def full_nbytes(self) -> tuple[int, ...]:
        """Device bytes that gathering each unit takes: 0 for one that is whole for good."""
        return _full_nbytes(self.layouts, self.placement)

    def reschedule(self, trace: tuple[int, ...], timing: Timing | None = None) -> FetchSchedule:
        """The schedule for a trace that was recorded (and timed), within the same budgets."""
        return make_schedule(
            trace,
            full_nbytes=self.full_nbytes(),
            fetch_nbytes=_fetch_nbytes(self.partitions, self.placement),
            budget=self.budget,
            timing=timing,
        )

    def bytes_at_home(self) -> dict[Tier, dict[Kind, int]]:
        """Bytes of values at their homes, with units and gradients that stay whole; POOL is what rounding adds."""
        table: dict[Tier, dict[Kind, int]] = {tier: {} for tier in Tier}

        def add(tier: Tier, kind: Kind, nbytes: int) -> None:
            if nbytes:
                table[tier][kind] = table[tier].get(kind, 0) + nbytes

        for spec in self.partitions:
            if spec.key.kind is Kind.PARAM and self.placement.units[spec.key.index].aliased:
                continue
            for section in spec.sections:
                add(spec.home, section.kind, section.nbytes)
            add(spec.home, Kind.POOL, spec.nbytes - sum(section.nbytes for section in spec.sections))
        for layout, placed in zip(self.layouts, self.placement.units, strict=True):
            add(Tier.GPU, Kind.FULL, layout.nbytes if placed.whole else 0)
            if self.placement.grad_whole and layout.trainable:
                add(Tier.GPU, Kind.FULL_GRAD, layout.numel * DTYPE_NBYTES[self.request.grad_dtype])
        return table

    def bytes_by_tier(self) -> dict[Tier, dict[Kind, int]]:
        """Bytes that this rank holds on each tier, by kind, at most; POOL is space reserved for moves.

        A bound of every phase of training (see `infinity.plan.phases`), to which activations come.
        """
        table = self.bytes_at_home()

        def add(tier: Tier, kind: Kind, nbytes: int) -> None:
            if nbytes:
                table[tier][kind] = table[tier].get(kind, 0) + nbytes

        add(Tier.GPU, Kind.FULL, self.pools.gathered_nbytes)
        add(Tier.GPU, Kind.FULL_GRAD, self.pools.left_nbytes + self.pools.scratch.nbytes)
        add(Tier.CPU, Kind.POOL, self.pools.param_nbytes + self.pools.states_nbytes + self.pools.staging_nbytes)
        return table

    def check(self, capacity: Capacity, rank: int = 0) -> None:
        """Raise CapacityError when a tier's planned bytes exceed what it has. Touches nothing."""
        for tier, kinds in self.bytes_by_tier().items():
            limit, planned = capacity.of(tier), sum(kinds.values())
            if limit is None or planned <= limit:
                continue
            parts = sorted(kinds.items(), key=lambda item: -item[1])
            detail = ", ".join(f"{_plain(kind)} {_gb(nbytes)}" for kind, nbytes in parts)
            # Amounts that round to the same figure are told apart by the byte.
            shown = (_gb(planned), _gb(limit))
            plans, free = shown if shown[0] != shown[1] else (f"{planned:,} bytes", f"{limit:,} bytes")
            raise CapacityError(
                f"rank {rank} plans {plans} on {tier.value} but {free} are free: {detail}. "
                + self._advice(tier)
            )

    def _advice(self, tier: Tier) -> str:
        """What can be changed that is not so already."""
        request = self.request
        if tier is Tier.NVME:
            remedies = [
                "free space on that drive",
                "choose another nvme_path",
                'put parameters (offload_param.device = "cpu") or optimizer states on the CPU',
            ]
        elif tier is Tier.CPU:
            remedies = [
                'put optimizer states on NVMe (offload_optimizer.device = "nvme")'
                if request.optimizer_tier is Tier.CPU
                else "lower sub_group_size",
                'put parameters on NVMe (offload_param.device = "nvme")'
                if request.param_tier is Tier.CPU
                else "lower stage3_prefetch_bucket_size",
            ]
        else:
            remedies = [
                'put optimizer states on the CPU or NVMe (offload_optimizer.device = "cpu")',
                "use stage 3" if request.stage < 3 else "lower stage3_max_live_parameters",
            ][request.optimizer_tier is not Tier.GPU :]
        text = ", ".join([*remedies, "or use more ranks"])
        return f"{text[0].upper()}{text[1:]}."

    def explain(self) -> str:
        """The plan in words and numbers, for people."""
        request, units = self.request, self.placement.units
        lines = [
            f"{self.numel / 1e6:,.1f} M parameters in {len(self.layouts)} units, stage {request.stage}, "
            f"{request.compute_dtype}, {self.topology.dp} rank{'s' if self.topology.dp > 1 else ''}; "
            f"{len(self.sub_groups)} optimizer sub-groups",
            f"parameters on {request.param_tier.value}, optimizer states on {request.optimizer_tier.value}, "
            f"gradients ({request.grad_dtype}) on {units[0].grad.value if units else 'gpu'}; "
            f"{sum(placed.whole for placed in units)} units stay gathered",
        ]
        for tier, kinds in self.bytes_by_tier().items():
            parts = ", ".join(f"{_plain(kind)} {_gb(nbytes)}" for kind, nbytes in kinds.items())
            lines.append(f"  {tier.value:<5} {_gb(sum(kinds.values())):>10}  {parts}")
        lines.append(
            f"fetch schedule: {len(self.schedule)} uses a step, at most {_gb(self.schedule.peak_nbytes)} gathered at "
            f"once; NVMe file {_gb(self.nvme_nbytes)}"
        )
        return "\n".join(lines)

    def fingerprint(self) -> str:
        """A short hash of every decision, equal for equal plans on any machine."""
        text = json.dumps(asdict(self), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_plan(spec: ModelSpec, topology: Topology, request: PlanRequest) -> Plan:
    """Decide everything: layouts, sub-groups, homes, extents, pools and the fetch schedule."""
    layouts = make_layouts(spec, topology.dp)
    policy = Policy(
        stage=request.stage, dp=topology.dp, param_tier=request.param_tier, optimizer_tier=request.optimizer_tier,
        persistence_numel_max=request.persistence_numel, persistent_total_numel_max=request.persistent_total_numel,
    )  # fmt: skip
    units = place_units(layouts, policy)
    whole = frozenset(index for index, placed in enumerate(units) if placed.whole)
    groups = cut_sub_groups(layouts, 1 if request.stage == 0 else topology.dp, request.sub_group_numel, apart=whole)
    placement = place(units, groups, policy)
    partitions, nvme_nbytes = _partitions(layouts, groups, placement, request)
    width = DTYPE_NBYTES[request.compute_dtype]
    fetch_nbytes = _fetch_nbytes(partitions, placement)
    budget = FetchBudget(
        live_nbytes_max=request.live_numel * width, prefetch_nbytes_max=request.prefetch_numel * width,
        reuse_nbytes_max=request.reuse_numel * width,
        fetch_nbytes_max=max(request.prefetch_numel * width // topology.dp, max(fetch_nbytes, default=0)),
    )  # fmt: skip
    order = _step_order(groups, whole, spec.uses)
    schedule = make_schedule(
        spec.uses + spec.uses[::-1],
        full_nbytes=_full_nbytes(layouts, placement),
        fetch_nbytes=fetch_nbytes,
        budget=budget,
    )
    return Plan(
        topology=topology, request=request, layouts=layouts, sub_groups=groups, placement=placement,
        partitions=partitions, nvme_nbytes=nvme_nbytes, budget=budget, schedule=schedule, numel=spec.numel,
        step_order=order,
        pools=_pools(layouts, groups, placement, partitions, request, topology, budget, schedule, order),
    )  # fmt: skip


def _partitions(
    layouts: tuple[UnitLayout, ...], groups: tuple[SubGroup, ...], placement: Placement, request: PlanRequest
) -> tuple[tuple[PartitionSpec, ...], int]:
    """Every partition with its home and, on NVMe, its extent; and the size of the NVMe file."""
    made: list[tuple[Key, list[tuple[Kind, str, int]], Tier]] = []
    for layout, placed in zip(layouts, placement.units, strict=True):
        numel = layout.partition_numel(placed.parts)
        made.append((Key(Kind.PARAM, layout.index), [(Kind.PARAM, layout.dtype, numel)], placed.param))
        if layout.trainable:
            made.append((Key(Kind.GRAD, layout.index), [(Kind.GRAD, request.grad_dtype, numel)], placed.grad))
    master = {"fp32": [], "bf16": [(Kind.REMAINDER, "int16")], "fp16": [(Kind.MASTER, "fp32")]}[request.compute_dtype]
    kinds = [*master, (Kind.EXP_AVG, "fp32"), (Kind.EXP_AVG_SQ, "fp32")]
    for group, home in zip(groups, placement.states, strict=True):
        made.append((Key(Kind.STATES, group.index), [(kind, dtype, group.numel) for kind, dtype in kinds], home))
    specs = []
    at = 0
    for key, parts, home in made:
        spec = PartitionSpec(key=key, sections=pack_sections(parts), home=home)
        if home is Tier.NVME and spec.nbytes:
            spec = PartitionSpec(key=key, sections=spec.sections, home=home, extent=Extent(at, spec.nbytes))
            at += spec.nbytes
        specs.append(spec)
    return tuple(specs), at


def _step_order(groups: tuple[SubGroup, ...], whole: frozenset[int], uses: tuple[int, ...]) -> tuple[int, ...]:
    """Indices of sub-groups: first those with units that stay whole, which the program may look at once a step is over;
    then in the order in which the next forward needs their parameters, so that the step may go on beside it.
    """
    first_use: dict[int, int] = {}
    for position, unit in enumerate(uses):
        first_use.setdefault(unit, position)

    def rank(group: SubGroup) -> tuple[bool, int, int]:
        units = [piece.unit for piece in group.slices]
        first = min(first_use.get(unit, len(uses)) for unit in units)
        return not any(unit in whole for unit in units), first, group.index

    return tuple(group.index for group in sorted(groups, key=rank))


def _full_nbytes(layouts: tuple[UnitLayout, ...], placement: Placement) -> tuple[int, ...]:
    """Bytes that gathering each unit takes on the device."""
    units = zip(layouts, placement.units, strict=True)
    return tuple(0 if placed.whole else layout.nbytes for layout, placed in units)


def _fetch_nbytes(partitions: tuple[PartitionSpec, ...], placement: Placement) -> tuple[int, ...]:
    """Bytes read from NVMe to gather each unit: 0 for one that is whole for good."""
    sizes = [0] * len(placement.units)
    for spec in partitions:
        if spec.key.kind is Kind.PARAM and spec.extent is not None and not placement.units[spec.key.index].whole:
            sizes[spec.key.index] = spec.nbytes
    return tuple(sizes)


def _pools(
    layouts: tuple[UnitLayout, ...], groups: tuple[SubGroup, ...], placement: Placement,
    partitions: tuple[PartitionSpec, ...], request: PlanRequest, topology: Topology, budget: FetchBudget,
    schedule: FetchSchedule, order: tuple[int, ...],
) -> Pools:  # fmt: skip
    """Sizes of the arenas: what the busiest moment needs, never more than everything that could lie there."""
    on_nvme = {spec.key: spec.nbytes for spec in partitions if spec.home is Tier.NVME}
    params = {key: nbytes for key, nbytes in on_nvme.items() if key.kind is Kind.PARAM}
    states = [nbytes for key, nbytes in on_nvme.items() if key.kind is Kind.STATES]
    # One is in use. Beside it lies what was fetched ahead, or what is stepped: nothing is fetched ahead of its step.
    ahead = max(budget.fetch_nbytes_max, _stepped_nbytes(groups, order, params))
    busiest = max(params.values(), default=0) + ahead
    backward = schedule.trace[len(schedule.trace) // 2 :]
    staged = [
        group.numel * DTYPE_NBYTES[request.compute_dtype]
        for group in groups
        if request.accelerator
        and request.optimizer_tier is not Tier.GPU
        and any(placement.units[piece.unit].param is Tier.GPU for piece in group.slices)
    ]
    return Pools(
        param_nbytes=min(sum(params.values()), align_up(busiest, EXTENT_ALIGNMENT)),
        states_nbytes=min(sum(states), STEP_WINDOW * max(states, default=0)),
        staging_nbytes=align_up(max(staged, default=0), CACHE_LINE),
        gathered_nbytes=schedule.peak_nbytes,
        left_nbytes=max(left_nbytes(backward, layouts, accelerator=request.accelerator), default=0),
        scratch=make_scratch(
            layouts, placement, dp=topology.dp, wire=request.communication_dtype, grad_dtype=request.grad_dtype,
            accelerator=request.accelerator,
        ),  # fmt: skip
    )


def _stepped_nbytes(groups: tuple[SubGroup, ...], order: tuple[int, ...], params: dict[Key, int]) -> int:
    """Bytes of PARAM partitions in memory while a window of consecutive sub-groups is stepped, at most."""
    units = [{piece.unit for piece in groups[index].slices} for index in order]
    windows = [set[int]().union(*units[at : at + STEP_WINDOW]) for at in range(len(units))]
    return max((sum(params.get(Key(Kind.PARAM, unit), 0) for unit in window) for window in windows), default=0)


def _plain(kind: Kind) -> str:
    names = {
        Kind.PARAM: "parameters", Kind.GRAD: "gradients", Kind.REMAINDER: "master remainders",
        Kind.MASTER: "master weights", Kind.EXP_AVG: "exp_avg", Kind.EXP_AVG_SQ: "exp_avg_sq",
        Kind.FULL: "gathered parameters", Kind.FULL_GRAD: "whole gradients", Kind.POOL: "pools",
        Kind.MODEL: "the model as it was built", Kind.ACTIVATION: "activations",
    }  # fmt: skip
    return names.get(kind, kind.value)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
