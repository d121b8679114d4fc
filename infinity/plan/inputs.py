"""The inputs of a plan: a model, a resolved configuration, a topology and the limits of the machine.

The engine and the estimator make the same `PlanInputs`, so that an estimate is the plan of the run. A setting is
renamed once on its way, in `PlanInputs.request`.

Where a plan does not fit, bounds that the configuration does not set are lowered until one does: only those that change
speed and never results, such as how much is gathered at once, read ahead, kept for its next
use or stepped at a time. Units and tiles keep the bounds that were asked for, because gradient norms are summed unit by
unit and their bits must not depend on the machine's memory.

The bound of gathered bytes is lowered first and then raised as far as there is room. If the lowest is not enough,
smaller sub-groups and shorter prefetches are tried step by step.

A plan counts the bytes that the engine places. `Reserve` counts what a process takes beside them before the first step.
A process also has the memory from before the engine, what torch and our libraries add in their first steps, and
activations. A plan that left them out would be killed in the first backward.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

from infinity.base.sizes import format_bytes
from infinity.config.resolve import ResolvedConfig
from infinity.errors import ConfigError
from infinity.plan.capacity import Capacity
from infinity.plan.filling import in_process, initial_nbytes
from infinity.plan.plan import SPLIT_NUMEL_MIN, Plan, make_plan, sub_group_numel_min
from infinity.plan.request import OptimizerSpec, PlanRequest, optimizer_spec
from infinity.plan.spec import (
    ModelSpec,
    ModuleNode,
    ParamSpec,
    UnitRules,
    checkpointed_blocks,
    find_units,
    hidden_matrices,
)
from infinity.plan.stages import PipelinePart, SplitPlan, StageCut, part_of, split_model
from infinity.plan.tensor_axis import TensorAxis
from infinity.plan.types import DTYPE_NBYTES, Kind, Tier, Topology

_ZERO = "zero_optimization"
# Fields of a request that only bound memory -> the key that chooses each.
KEYS = {
    "live_numel": f"{_ZERO}.stage3_max_live_parameters", "prefetch_numel": f"{_ZERO}.stage3_prefetch_bucket_size",
    "reuse_numel": f"{_ZERO}.stage3_max_reuse_distance", "sub_group_numel": f"{_ZERO}.sub_group_size",
    "state_buffers": f"{_ZERO}.offload_optimizer.buffer_count",
}  # fmt: skip
# Each step takes the bounds of what is in flight down to a share of what was asked for.
_SHARES = (1, 4, 16, 64)
# What is gathered at once is found to one part in so many of what was asked for.
_GRAIN = 64
# And of the gradients, what leaves memory.
_GRAIN_OF_GRADS = 16


def fitted(
    request: PlanRequest, chosen: frozenset[str], plan_of: Callable[[PlanRequest], Plan], *,
    fits: Callable[[Plan], bool], fits_at_rest: Callable[[Plan], bool], raised: bool,
) -> Plan:  # fmt: skip
    """The plan that was asked for where it fits, else the first with lowered bounds that does. Where none does, and the
    request leaves it open, the fewest gradients on the drive with which one fits.

    Without any that fits, the smallest of the first, or the one that was asked for where not even its values fit: for
    the caller to refuse.

    chosen: fields of `KEYS` that the configuration sets; they stay. fits_at_rest: whether the bytes that a plan holds
    under any bounds fit. raised: whether to search for the largest bounds that fit. A plan whose homes budgets find is
    bounded by the limits already and costs several plans itself, so that one more is enough.
    """

    def bounded(request: PlanRequest, *, raised: bool) -> Plan:
        return _bounded(request, chosen, plan_of, fits=fits, fits_at_rest=fits_at_rest, raised=raised)

    def with_grads(parts: int) -> PlanRequest:
        return replace(request, grad_tier=Tier.NVME, grad_share=parts / _GRAIN_OF_GRADS)

    plan = bounded(request, raised=raised)

    def fits_at_least(parts: int) -> bool:
        *_, lowest = _steps(with_grads(parts), chosen, plan)
        lowest = _live(lowest, 1, chosen)
        # Budgets put everything on the drive where nothing else fits: to ask for that first spares their search.
        outermost = replace(
            lowest, optimizer_tier=request.optimizer_tier or Tier.NVME,
            param_tier=request.param_tier or (Tier.NVME if request.stage == 3 else None),
        )  # fmt: skip
        return any(fits(plan_of(each)) for each in dict.fromkeys((outermost, lowest)))

    if fits(plan) or request.grad_tier is not None or not request.drive or not fits_at_least(_GRAIN_OF_GRADS):
        return plan
    parts = bisect_left(range(_GRAIN_OF_GRADS), True, lo=1, key=fits_at_least)
    return bounded(with_grads(parts), raised=raised)


def _bounded(
    request: PlanRequest, chosen: frozenset[str], plan_of: Callable[[PlanRequest], Plan], *,
    fits: Callable[[Plan], bool], fits_at_rest: Callable[[Plan], bool], raised: bool,
) -> Plan:  # fmt: skip
    """The same with gradients where the request has them."""
    plan = plan_of(request)
    if fits(plan) or not fits_at_rest(plan):
        return plan
    steps = list(_steps(request, chosen, plan))
    smallest = plan_of(_live(steps[-1], 1, chosen))
    if not raised or not fits(smallest):
        return smallest
    for lowered in steps[:-1]:
        plan = plan_of(_live(lowered, 1, chosen))
        if fits(plan):
            return plan if "live_numel" in chosen else _raised(lowered, plan, chosen, plan_of, fits)
    return smallest if "live_numel" in chosen else _raised(steps[-1], smallest, chosen, plan_of, fits)


def _steps(request: PlanRequest, chosen: frozenset[str], plan: Plan) -> Iterator[PlanRequest]:
    """The request as it is, then with less and less in flight. plan: one of the same model."""
    whole, least = request.sub_group_numel, sub_group_numel_min(sum(group.numel for group in plan.sub_groups))
    for share in _SHARES:
        split = max(request.split_numel // share, min(request.split_numel, SPLIT_NUMEL_MIN))
        last = share == _SHARES[-1]
        yield _lower(
            request, chosen, split_numel=split, prefetch_numel=0 if last else request.prefetch_numel // share,
            state_buffers=0 if last else request.state_buffers,
            # Where states do not move, a sub-group is not cut by the split.
            sub_group_numel=request.sub_group_numel if share == 1 else min(whole, max(4 * split, least)),
        )  # fmt: skip


def _lower(request: PlanRequest, chosen: frozenset[str], **values: Any) -> PlanRequest:
    """The request with these values (numbers of elements), except for the chosen ones."""
    return replace(request, **{name: value for name, value in values.items() if name not in chosen})


def _live(request: PlanRequest, numel: int, chosen: frozenset[str]) -> PlanRequest:
    return _lower(request, chosen, live_numel=numel, reuse_numel=min(request.reuse_numel, numel))


def _raised(
    request: PlanRequest, least: Plan, chosen: frozenset[str], plan_of: Callable[[PlanRequest], Plan],
    fits: Callable[[Plan], bool],
) -> Plan:  # fmt: skip
    """The plan that fits with the most gathered at once, by halving."""
    width = DTYPE_NBYTES[request.compute_dtype]
    low = max(least.pools.gathered_nbytes // width, 1)
    high = min(request.live_numel, sum(least.full_nbytes()) // width)
    grain, best = max(high // _GRAIN, 1), least
    while high - low > grain:
        middle = (low + high) // 2
        plan = plan_of(_live(request, middle, chosen))
        if fits(plan):
            low, best = middle, plan
        else:
            high = middle
    return best


def lowered_in_words(asked: PlanRequest, plan: Plan) -> str:
    """What of the plan is lower than was asked for: "0.4 GB gathered at once instead of 2 GB, ..."; empty: nothing."""
    made, width = plan.request, DTYPE_NBYTES[plan.request.compute_dtype]
    parts = []
    gathered, wanted = plan.pools.gathered_nbytes, min(asked.live_numel * width, sum(plan.full_nbytes()))
    if made.live_numel < asked.live_numel and gathered < wanted:
        parts.append(f"{format_bytes(gathered)} gathered at once instead of {format_bytes(wanted)}")
    if made.grad_tier is not asked.grad_tier:
        parts.append(f"{made.grad_share:.0%} of the gradients on NVMe instead of none")
    if made.prefetch_numel < asked.prefetch_numel:
        ahead, wanted = made.prefetch_numel * width, asked.prefetch_numel * width
        parts.append(f"{format_bytes(ahead)} read ahead instead of {format_bytes(wanted)}")
    sizes = [min(request.sub_group_numel, request.split_numel) for request in (made, asked)]
    if sizes[0] < sizes[1]:
        parts.append(f"sub-groups of {sizes[0]:,} elements instead of {sizes[1]:,}")
    return ", ".join(parts)


# Memory of no file that the first steps of any model add to a process: 10 to 40 MB were measured. `OVERHEAD_NBYTES`
# counts pages of libraries, too, which the system drops at need.
ANONYMOUS_OVERHEAD_NBYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes of one rank beside its plan.

    taken_nbytes: in memory before the engine; what is free is without it. overhead_nbytes: what first steps add in CPU
    memory. activation_nbytes: on the device, at the busiest moment of a micro-batch; activations: where that figure is
    from, in words ("" while it is not known). product_nbytes: on the device, of a product of matrices that it computes
    in a wider type. checkpoint_nbytes: activation checkpoints in CPU memory, off an
    accelerator. gaps_nbytes: what the device's allocator takes beyond living tensors. model_dtype, model_nbytes_max:
    what the model was built in, and how much of it lies in CPU memory at a time (None: all of it) until its partitions
    are made.
    """

    taken_nbytes: int = 0
    overhead_nbytes: int = 0
    activation_nbytes: int = 0
    activations: str = ""
    product_nbytes: int = 0
    checkpoint_nbytes: int = 0
    gaps_nbytes: int = 0
    model_dtype: str = "fp32"
    model_nbytes_max: int | None = 0

    def by_tier(self) -> dict[Tier, int]:
        """Bytes that are still to come, by the tier that takes them."""
        on_device = self.activation_nbytes + self.product_nbytes + self.gaps_nbytes
        return {Tier.GPU: on_device, Tier.CPU: self.overhead_nbytes + self.checkpoint_nbytes}

    def initial_nbytes(self, plan: Plan) -> int:
        """CPU memory at the peak of filling the partitions, with what is left of the model."""
        most = initial_nbytes(plan, model_dtype=self.model_dtype, model_nbytes_max=self.model_nbytes_max)
        return most + self.overhead_nbytes

    def peak_nbytes(self, plan: Plan) -> int:
        """The peak of this process's anonymous memory by the plan. An accelerator's memory is not counted."""
        accelerator, beside = plan.request.accelerator, self.by_tier()
        training = in_process(plan.bytes_by_tier(), accelerator=accelerator)
        training += beside[Tier.CPU] + (0 if accelerator else beside[Tier.GPU])
        return self.taken_nbytes + max(training, self.initial_nbytes(plan))

    def in_words(self) -> str:
        """What is set aside: "50.3 MB for what a process's first steps add, ..."."""
        parts = {
            "for what a process's first steps add": self.overhead_nbytes,
            f"for activations ({self.activations})": self.activation_nbytes,
            "for products of 16-bit matrices, which this processor computes in fp32": self.product_nbytes,
            "for activation checkpoints in CPU memory": self.checkpoint_nbytes,
            "for gaps in the device's allocator": self.gaps_nbytes,
        }
        return ", ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in parts.items() if nbytes)


# A bound that nothing meets.
UNBOUNDED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything that a plan is made of. `replace` asks for the plan of another configuration or of more ranks."""

    # The tree of what a tensor axis leaves of the model, and the classes of modules that it wants whole.
    node: ModuleNode
    config: ResolvedConfig
    topology: Topology
    # Whether the device has memory of its own.
    accelerator: bool
    # The limits of the tiers, and those for placement by budget: lower where no limit is configured (None: the same).
    capacity: Capacity
    budget: Capacity | None = None
    blocks: tuple[str, ...] = ()
    # The optimizer that steps the model; None: the configuration's.
    optimizer: OptimizerSpec | None = None
    # What the process takes beside the plan, and what was free before anything was set aside for it.
    reserve: Reserve = field(default_factory=Reserve)
    free: Capacity = field(default_factory=Capacity)
    # Whether the device's tensors are of a type of their own in the CPU's memory.
    unified: bool = False
    # The tensor axis that `node` was divided by.
    axis: TensorAxis = field(default_factory=TensorAxis)
    # The cut into stages, and the place on the pipeline axis whose plan this is; None without a pipeline.
    cut: StageCut | None = None
    index: int = 0
    # Elements of the model, and of its trained parameters.
    numels: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        chosen = self._chosen
        if not chosen.trains:
            object.__setattr__(self, "node", self.node.frozen())
        if len(chosen.rules) > 1:
            object.__setattr__(self, "node", _ruled(self.node, chosen, self.topology.tp))
        specs = self.node.all_params().values()
        trained = sum(spec.numel for spec in specs if spec.trainable)
        object.__setattr__(self, "numels", (sum(spec.numel for spec in specs), trained))

    @property
    def limits(self) -> Capacity:
        """The limits of this configuration."""
        return self.budget if self._by_budget and self.budget is not None else self.capacity

    @property
    def _chosen(self) -> OptimizerSpec:
        return self.optimizer or optimizer_spec(self.config.sections.optimizer)

    @property
    def _by_budget(self) -> bool:
        return "auto" in (self.config.param_tier, self.config.optimizer_tier)

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """Paths of the blocks that backward computes again."""
        return checkpointed_blocks(self.config, self.node, self.blocks)

    def plan(
        self, *, raised: bool = True, units: ModelSpec | None = None, split: SplitPlan | None = None,
        make: Callable[..., Plan] = make_plan,
    ) -> Plan:  # fmt: skip
        """Make the plan; lower its bounds if it does not fit. It may still not fit: see `fits`.

        raised: lower bounds no further than needed, which makes a dozen plans. units, split: `self.units` and what
        `self.part_of` makes of them for any place on the pipeline axis, if at hand. make: `make_plan`, or what
        remembers its answers.
        """
        spec, part = self._own_part(units or self.units, split)

        @lru_cache(maxsize=1)
        def plan_of(request: PlanRequest) -> Plan:
            # Where every home is named, a plan is the same under any limits.
            return make(spec, self.topology, request, self.limits if self._by_budget else None, part)

        chosen = frozenset(name for name, path in KEYS.items() if self.config.sources.get(path) == "file")
        request = self.request
        if request.speculates and self.config.sections.speculative_step is None:
            # What may be undone lies on the drive twice.
            drives = {tier: nbytes for tier, nbytes in plan_of(request).nbytes_by_tier().items() if tier.on_drive}
            request = replace(request, speculates=self.limits.fits(drives))
        plan = fitted(
            request, chosen, plan_of, fits=self.fits, fits_at_rest=self._fits_at_rest,
            raised=raised and not self._by_budget,
        )  # fmt: skip
        return self._with_undo(plan, plan_of)

    def _with_undo(self, plan: Plan, plan_of: Callable[[PlanRequest], Plan]) -> Plan:
        """The plan with room for old values of what it steps in CPU memory, so that this may begin in backward, too:
        for all of them, or as much as half of what it leaves. Budgets fill memory with better things.
        """
        request = plan.request
        may = (request.steps_early or request.speculates) and not request.unified and not self._by_budget
        # It takes as much memory again as what it is for: for who asks for it.
        if not (may and self.config.speculates_always and self.fits(plan)):
            return plan
        numel = sum(group.numel for group in plan.sub_groups)
        whole = plan_of(replace(request, undo_numel=numel))
        if not whole.pools.undo_nbytes:
            return plan
        room = self.limits.room(Tier.CPU, plan.nbytes_by_tier())
        share = 1.0 if room is None else min(1.0, room / 2 / whole.pools.undo_nbytes)
        undone = whole if share == 1.0 else plan_of(replace(request, undo_numel=int(share * numel)))
        return undone if undone.pools.undo_nbytes and self.fits(undone) else plan

    def made(self, plan: Plan) -> dict[str, Any]:
        """What a plan of these inputs was made of, as JSON: what was asked for, what became of it, and the limits where
        they chose homes.
        """
        limits = asdict(self.limits) if self._by_budget else None
        return {"asked": _plain(self.request), "made": _plain(plan.request), "limits": limits}

    def plan_again(self, made: Mapping[str, Any]) -> Plan:
        """Make a plan again, whatever is free now, as `made` tells of it. ConfigError where something else is asked for
        than then; ValueError where `made` is no such thing.
        """
        asked, now = made.get("asked"), _plain(self.request)
        before, limits = made.get("made"), made.get("limits")
        if not (isinstance(asked, dict) and isinstance(before, dict) and isinstance(limits, dict | None)):
            raise ValueError("it does not say what the plan was made of")
        others = [name for name in now if asked.get(name, now[name]) != now[name]]
        if others:
            raise ConfigError(
                f"the configuration asks for another {', '.join(others)} than the run that was killed "
                f"({', '.join(f'{asked[name]} then, {now[name]} now' for name in others)})"
            )
        changed = {name: before[name] for name in _FITTED if before.get(name, now[name]) != now[name]}
        for name, value in changed.items():
            changed[name] = _fitted_value(name, value)
        spec, part = self._own_part(self.units)
        capacity = None if limits is None else Capacity(**{
            name: limit for name, limit in limits.items()
            if name in Capacity.__dataclass_fields__ and isinstance(limit, int)
        })  # fmt: skip
        return make_plan(spec, self.topology, replace(self.request, **changed), capacity, part)

    @property
    def units(self) -> ModelSpec:
        """The units of the whole model, which do not depend on the pipeline axis."""
        return find_units(self.node, self.rules)

    def part_of(self, units: ModelSpec) -> PipelinePart:
        """What this place on the pipeline axis has of the model's units. ConfigError for an impossible schedule."""
        assert self.cut is not None
        split = split_model(
            units, self.cut, pp=self.topology.pp, schedule=self.config.sections.parallel.schedule,
            micro_batches=self.config.accumulation,
        )  # fmt: skip
        return PipelinePart(split, self.index)

    def _own_part(
        self, units: ModelSpec, split: SplitPlan | None = None
    ) -> tuple[ModelSpec, PipelinePart | None]:
        """The units of this rank's plan, and what place on the pipeline axis they are of."""
        if self.cut is None:
            return units, None
        part = self.part_of(units) if split is None else PipelinePart(split, self.index)
        return part_of(units, part), part

    @property
    def request(self) -> PlanRequest:
        """What the configuration asks for, before anything is lowered."""
        config, zero, compute = self.config, self.config.zero, self.config.compute_dtype
        optimizer = self._chosen
        # Several micro-batches add up in fp32 unless the configuration says otherwise; a single one is kept as it
        # arrives.
        several = config.accumulation > 1 or not config.sections.managed_gradient_accumulation
        # A processor that computes and steps gains little.
        wish = config.sections.speculative_step
        speculates = self.accelerator if wish is None else wish
        return PlanRequest(
            stage=config.stage, param_tier=_tier(config.param_tier), optimizer_tier=_tier(config.optimizer_tier),
            optimizer_share=config.optimizer_share, grad_tier=_tier(config.grad_tier), grad_share=config.grad_share,
            param_cpu_numel=config.param_cpu_numel,
            state_buffers=config.state_buffers, drive=config.nvme_path is not None, compute_dtype=compute,
            grad_dtype=config.grad_accum_dtype or ("fp32" if several else compute),
            communication_dtype=config.communication_dtype or compute, rules=optimizer.rules,
            sub_group_numel=zero.sub_group_size, prefetch_numel=zero.stage3_prefetch_bucket_size,
            persistence_numel=zero.stage3_param_persistence_threshold,
            persistent_total_numel=zero.stage3_model_persistence_threshold,
            live_numel=zero.stage3_max_live_parameters, reuse_numel=zero.stage3_max_reuse_distance,
            accelerator=self.accelerator, unified=self.unified, accumulates=several,
            reduces_once=config.sections.parallel.reduce == "step", overlap=config.sections.overlap,
            steps_early=config.steps_early and optimizer.guarded,
            recorded=config.sections.checkpoint.every_step != "off" and optimizer.trains,
            speculates=(
                config.sections.overlap and optimizer.undoable and speculates
                and not (config.steps_early and optimizer.guarded)
            ),
        )  # fmt: skip

    @property
    def rules(self) -> UnitRules:
        """What bounds the units of the model."""
        zero = self.config.zero
        leaf = zero.leaf_module
        whole, tile = _tile_bounds(self.config)
        return UnitRules(
            # Four units' worth of budget: one in use, one arriving, and two for what the schedule keeps.
            unit_numel_max=max(zero.stage3_max_live_parameters // 4, 1),
            merge_numel_max=zero.stage3_param_persistence_threshold, block_classes=self.blocks,
            leaf_classes=tuple(name.rpartition(".")[2] for name in leaf.classes),
            leaf_names=tuple(leaf.names), leaf_suffixes=tuple(leaf.name_suffixes), whole_numel_max=whole,
            tile_numel_max=tile, updates=self._chosen.rules,
        )  # fmt: skip

    def fits(self, plan: Plan) -> bool:
        """Whether a plan fits the limits, and the memory in which its partitions are made from the model."""
        if not self.limits.fits(plan.nbytes_by_tier()):
            return False
        return self.free.host is None or self.reserve.initial_nbytes(plan) <= self.free.host

    def _fits_at_rest(self, plan: Plan) -> bool:
        home = plan.bytes_at_home()
        return self.limits.fits({tier: sum(kinds.values()) - kinds.get(Kind.POOL, 0) for tier, kinds in home.items()})


def _ruled(node: ModuleNode, optimizer: OptimizerSpec, tp: int) -> ModuleNode:
    """The tree with the number of each parameter's update rule, and what this steps of it at once."""
    if optimizer.rule_of:
        numbers = optimizer.rule_of
        numbered = node.with_params(lambda spec: replace(spec, rule=numbers[spec.group] if spec.trainable else 0))
    elif optimizer.numel_min:
        return node.with_params(partial(_by_size, optimizer))
    else:
        hidden = hidden_matrices(node, stacks=tp == 1)
        # An engine makes a parameter group of each.
        ones = {name: int(name not in hidden) for name in node.all_params()}
        numbered = node.with_params(
            lambda spec: replace(spec, rule=ones[spec.name], group=ones[spec.name]) if spec.trainable else spec
        )
    return _split(numbered, optimizer) if optimizer.split else numbered


def _split(node: ModuleNode, optimizer: OptimizerSpec) -> ModuleNode:
    """The tree with the matrices that packed weights are stepped as. ConfigError for a split that does not fit."""
    used: set[str] = set()

    def split(spec: ParamSpec) -> ParamSpec:
        names = [name for name in optimizer.split if f".{name}." in f".{spec.name}."]
        if not names or not spec.trainable or not optimizer.rules[spec.rule].matrices:
            return spec
        used.update(names)
        given, rows = optimizer.split[names[0]], spec.shape[-2]
        parts = (rows // given,) * given if isinstance(given, int) else given
        if sum(parts) != rows or spec.shard is not None:
            why = "a tensor axis cuts it" if spec.shard is not None else f"its matrices have {rows:,} rows"
            raise ConfigError(f"optimizer.params.split.{names[0]}: {spec.name} is not split into {given}: {why}")
        return replace(spec, split=parts)

    found = node.with_params(split)
    if unused := sorted(set(optimizer.split) - used):
        raise ConfigError(
            f"optimizer.params.split.{unused[0]}: no weight of this name is stepped by Muon: give the name of a module "
            "or parameter, such as qkv_proj"
        )
    return found


def _by_size(optimizer: OptimizerSpec, spec: ParamSpec) -> ParamSpec:
    """A parameter with the number of its update rule: the first where it is large. ConfigError where a tensor axis cuts
    it inside the blocks of elements that the rule looks at.
    """
    small = spec.name in optimizer.small or math.prod(spec.whole_shape) < optimizer.numel_min
    block = 1 if small else optimizer.rules[0].block
    if spec.trainable and spec.shard is not None and (run := spec.shard.aligned(spec.whole_shape)) % block:
        raise ConfigError(
            f"parallel.tensor cuts {spec.name} ({list(spec.whole_shape)}) every {run:,} elements, inside blocks of "
            f"{block} whose 8-bit states share a scale: give it 32-bit states (optim_bits 32 of its parameter group, or"
            f" a min_8bit_size above {math.prod(spec.whole_shape):,}), or use AdamW"
        )
    return replace(spec, rule=int(small)) if spec.trainable else spec


# What limits and wishes may have made of a request.
_FITTED = (
    "live_numel", "prefetch_numel", "reuse_numel", "sub_group_numel", "split_numel", "state_buffers", "grad_tier",
    "grad_share", "speculates", "undo_numel",
)  # fmt: skip


def _plain(request: PlanRequest) -> dict[str, Any]:
    """A request as JSON."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(request), default=attrgetter("value")))
    return found


def _fitted_value(name: str, value: Any) -> Any:
    if name == "grad_tier":
        return Tier.named(value) if value in [tier.value for tier in Tier] else None
    wanted = bool if name == "speculates" else float if name == "grad_share" else int
    if not isinstance(value, wanted) or value < 0:
        raise ValueError(f"{name} cannot be {value!r}")
    return value


def _tile_bounds(config: ResolvedConfig) -> tuple[int, int]:
    """Elements of the largest weight that is gathered whole, and of a tile of a larger one. Both are independent of
    the parameters' tier, because placement must not change how a layer is computed.
    """
    zero = config.zero
    if config.stage < 3 or zero.tile_parameters == 0:
        return UNBOUNDED, UNBOUNDED
    if zero.tile_parameters is not None:
        return zero.tile_parameters, zero.tile_parameters
    live = max(zero.stage3_max_live_parameters, 1)
    return live, max(live // 4, 1)


def _tier(name: str) -> Tier | None:
    """A tier by its name; None for "auto", which the budgets decide."""
    return None if name == "auto" else Tier.named(name)
