"""The inputs of a plan: a model, a resolved configuration, a topology and the limits of the machine.

The engine and the estimator make the same `PlanInputs`, so that an estimate is the plan of the run. A setting is
renamed once on its way, in `PlanInputs.request`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from infinity.config.resolve import ResolvedConfig
from infinity.plan.capacity import Capacity
from infinity.plan.fitting import KEYS, fitted
from infinity.plan.optimizer_states import OptimizerSpec, optimizer_spec
from infinity.plan.plan import Plan, make_plan
from infinity.plan.recomputation import checkpointed_blocks
from infinity.plan.request import PlanRequest
from infinity.plan.reserve import Reserve
from infinity.plan.spec import ModelSpec, ModuleNode, UnitRules, find_units
from infinity.plan.stages import PipelinePart, SplitPlan, StageCut, part_of, split_model
from infinity.plan.tensor_axis import TensorAxis
from infinity.plan.topology import Topology
from infinity.plan.types import Kind, Tier

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
        if not self._chosen.trains:
            object.__setattr__(self, "node", self.node.frozen())
        specs = self.node.all_params().values()
        trained = sum(spec.numel for spec in specs if spec.trainable)
        object.__setattr__(self, "numels", (sum(spec.numel for spec in specs), trained))

    @property
    def limits(self) -> Capacity:
        """The limits of this configuration."""
        return self.budget if self._by_budget and self.budget is not None else self.capacity

    @property
    def _chosen(self) -> OptimizerSpec:
        return self.optimizer or optimizer_spec(self.config.config.optimizer)

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
        spec, part = units or self.units, None
        if self.cut is not None:
            part = self.part_of(spec) if split is None else PipelinePart(split, self.index)
            spec = part_of(spec, part)

        def plan_of(request: PlanRequest) -> Plan:
            return make(spec, self.topology, request, self.limits, part)

        chosen = frozenset(name for name, path in KEYS.items() if self.config.sources.get(path) == "file")
        return fitted(
            self.request, chosen, plan_of, fits=self.fits, fits_at_rest=self._fits_at_rest,
            raised=raised and not self._by_budget,
        )  # fmt: skip

    @property
    def units(self) -> ModelSpec:
        """The units of the whole model, which do not depend on the pipeline axis."""
        return find_units(self.node, self.rules)

    def part_of(self, units: ModelSpec) -> PipelinePart:
        """What this place on the pipeline axis has of the model's units. ConfigError for an impossible schedule."""
        assert self.cut is not None
        split = split_model(
            units, self.cut, pp=self.topology.pp, schedule=self.config.config.parallel.schedule,
            micro_batches=self.config.accumulation,
        )  # fmt: skip
        return PipelinePart(split, self.index)

    @property
    def request(self) -> PlanRequest:
        """What the configuration asks for, before anything is lowered."""
        config, zero, compute = self.config, self.config.zero, self.config.compute_dtype
        optimizer = self._chosen
        # Several micro-batches add up in fp32 unless the configuration says otherwise; a single one is kept as it
        # arrives.
        several = config.accumulation > 1 or not config.config.managed_gradient_accumulation
        return PlanRequest(
            stage=config.stage, param_tier=_tier(config.param_tier), optimizer_tier=_tier(config.optimizer_tier),
            optimizer_share=config.optimizer_share, param_cpu_numel=config.param_cpu_numel,
            state_buffers=config.state_buffers, drive=config.nvme_path is not None, compute_dtype=compute,
            grad_dtype=config.grad_accum_dtype or ("fp32" if several else compute),
            communication_dtype=config.communication_dtype or compute, moments=optimizer.moments,
            sub_group_numel=zero.sub_group_size, prefetch_numel=zero.stage3_prefetch_bucket_size,
            persistence_numel=zero.stage3_param_persistence_threshold,
            persistent_total_numel=zero.stage3_model_persistence_threshold,
            live_numel=zero.stage3_max_live_parameters, reuse_numel=zero.stage3_max_reuse_distance,
            accelerator=self.accelerator, unified=self.unified, accumulates=several,
            reduces_once=config.config.parallel.reduce == "step", overlap=config.config.overlap,
            steps_early=config.steps_early and optimizer.guarded,
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
            tile_numel_max=tile,
        )  # fmt: skip

    def fits(self, plan: Plan) -> bool:
        """Whether a plan fits the limits, and the memory in which its partitions are made from the model."""
        if not self.limits.fits(plan.nbytes_by_tier()):
            return False
        return self.free.host is None or self.reserve.initial_nbytes(plan) <= self.free.host

    def _fits_at_rest(self, plan: Plan) -> bool:
        home = plan.bytes_at_home()
        return self.limits.fits({tier: sum(kinds.values()) - kinds.get(Kind.POOL, 0) for tier, kinds in home.items()})


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
