"""Before anything is allocated or written: the plan, and whether it fits what the ranks may use.

Every rank makes the same plan, also where budgets decide: of what the ranks may use, the least counts, so that all of
them go on, or none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple

from torch import nn

from infinity.base.sizes import format_bytes
from infinity.config import ResolvedConfig
from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.groups import ProcessGroups
from infinity.engine.activation_forecast import Call, deferred_nbytes, on_shapes, place_of, set_aside, stated_batch
from infinity.engine.step_records import Adopted
from infinity.errors import CapacityError, ConfigError
from infinity.memory import scratch
from infinity.memory.drives import check_drives, free_for_rank, free_nvme_nbytes
from infinity.memory.tiers.device import Device
from infinity.observability.memory_report import baseline_nbytes
from infinity.parallel.layers import PipelineModule
from infinity.parallel.stage_check import cut_into_stages
from infinity.plan.activations import Activations, in_stages, inputs_in_flight
from infinity.plan.capacity import Capacity, within
from infinity.plan.capacity_report import refuse
from infinity.plan.filling import in_process
from infinity.plan.inputs import PlanInputs, lowered_in_words
from infinity.plan.plan import Plan
from infinity.plan.request import OptimizerSpec
from infinity.plan.spec import checkpointed_blocks, module_tree, repeated_blocks
from infinity.plan.tensor_axis import tensor_axis_of
from infinity.plan.types import DTYPE_NBYTES, Tier, Topology
from infinity.zero import parameter

# One part in so many of what is free on the device is left to activations by bounds, while no batch is known.
_LEFT_TO_ACTIVATIONS = 4


def preflight(
    config: ResolvedConfig, model: nn.Module, param_groups: Mapping[int, int], device: Device, groups: ProcessGroups,
    optimizer: OptimizerSpec, draw: Callable[[], Call] | None = None, adopted: Adopted | None = None,
) -> tuple[Plan, PlanInputs]:
    """Make the plan of a run and check that it fits. Returns it with the inputs that it was made from. Collective.

    param_groups: the optimizer parameter group of each trained parameter, by id. optimizer: what steps them. draw:
    returns arguments of the model with a micro-batch of the program's data, if `initialize` has any. adopted: a run
    that was killed, whose plan is made again, whatever is free now.

    Raises ConfigError for a folder that can hold no swap files, CapacityError for a plan that does not fit, ConfigError
    for a model without values. If the last two both apply, CapacityError is raised.
    """
    ranks = groups.ranks
    check_drives(config)
    free = _agreed(_free(config, model, device, ranks.local_size, adopted), groups.world)
    taken = max(baseline_nbytes(model) - deferred_nbytes(model), 0)
    whole = module_tree(model, compute_dtype=config.compute_dtype, groups=dict(param_groups))
    parallel = config.sections.parallel
    axis = tensor_axis_of(model, whole, size=config.tensor, sequence=parallel.sequence, given=parallel.plan)
    node = axis.divide(whole)

    classes = tuple(getattr(model, "_no_split_modules", None) or ())
    cut = cut_into_stages(model, config, node, classes)
    checkpointed = checkpointed_blocks(config, node, classes)
    index = groups.topology.coordinate(ranks.rank).pp
    place = place_of(cut, config, index)

    def asked(found: Activations | None = None, unknown_nbytes: int = 0) -> PlanInputs:
        reserve = set_aside(
            config, model, device, free, taken_nbytes=taken, found=found, unknown_nbytes=unknown_nbytes
        )
        capacity, budget = (
            within(
                config.sections.memory, free, ranks=ranks.local_size, accelerator=device.own_memory,
                by_budget=by_budget, reserved=reserve.by_tier(),
            )
            for by_budget in (False, True)
        )  # fmt: skip
        # Ranks may have limits of their own, and stages need other plans.
        capacity, budget = _agreed(capacity, groups.stage), _agreed(budget, groups.stage)
        return PlanInputs(
            node=node, config=config, topology=Topology.of(config), accelerator=device.own_memory,
            unified=device.unified, capacity=capacity, budget=budget, blocks=classes, optimizer=optimizer,
            reserve=reserve, free=free, axis=axis, cut=cut, index=index,
        )  # fmt: skip

    def measured(call: Call | None) -> Activations | None:
        if call is None or axis.size > 1:
            return None
        blocks = () if cut is None else cut.blocks
        found = on_shapes(config, model, *call, device, recomputed=checkpointed, blocks=blocks, training=True)
        return found if found is None or place is None else in_stages(found, place)

    inputs, plan = _with_activations(asked, measured, config, model, draw, adopted)
    refuse(inputs, plan, rank=ranks.rank)
    _refuse_without_values(model)
    _checkpoint_room(inputs, model, plan, rank=ranks.rank)
    return plan, inputs


def _with_activations(
    asked: Callable[..., PlanInputs], measured: Callable[[Call | None], Activations | None], config: ResolvedConfig,
    model: nn.Module, draw: Callable[[], Call] | None, adopted: Adopted | None,
) -> tuple[PlanInputs, Plan]:  # fmt: skip
    """A plan beside which a micro-batch's activations fit, as far as anything shows one."""
    plan_of = PlanInputs.plan if adopted is None else adopted.plan_again
    tokens = stated_batch(config, model) if config.sections.memory.activations.max_bytes is None else None
    inputs = asked(measured(None if tokens is None else ((), tokens)))
    if inputs.reserve.activations:
        return inputs, plan_of(inputs)
    # Bounds that may be lowered leave room for activations; if not even that fits, nothing is left for them.
    roomy = asked(unknown_nbytes=(inputs.free.device or 0) // _LEFT_TO_ACTIVATIONS)
    plan = plan_of(roomy)
    if roomy.fits(plan):
        return inputs, plan
    if (found := measured(draw() if draw is not None else None)) is not None:
        inputs = asked(found)
    return inputs, plan_of(inputs)


def stages_asked(model: nn.Module) -> int | None:
    """Return how many stages a model in layers asks for; None where it says nothing."""
    return model.num_stages if isinstance(model, PipelineModule) else None


def _refuse_without_values(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.is_meta:
            raise ConfigError(
                f"{name} is on the meta device and has no values: build the model under `with "
                f"infinity.Init(config=...):` instead"
            )


def remarks(inputs: PlanInputs, model: nn.Module, plan: Plan, device: Device) -> list[str]:
    """What the program should know of its configuration, and of a plan that fits."""
    reserve = inputs.reserve
    lines = [*inputs.config.report(), *inputs.axis.remarks, *_checkpoint_room(inputs, model, plan)]
    if lowered := lowered_in_words(inputs.request, plan):
        lines.append(f"fitted to the memory that is free: {lowered}")
    if inputs.config.speculates_always and not plan.policy.step_in_backward:
        lines.append(
            "speculative_step: true has no effect here: no step begins in backward without overlap, with an optimizer "
            "that torch runs, below stage 3, or where no sub-group has all its states and parameters on NVMe, or in "
            "CPU memory with room for their old values"
        )
    in_memory = in_process(plan.bytes_by_tier(), accelerator=device.own_memory)
    parts = (
        f"what it had before ({format_bytes(reserve.taken_nbytes)}), the plan ({format_bytes(in_memory)}), "
        f"{reserve.in_words()}"
    )
    peak = format_bytes(reserve.peak_nbytes(plan))
    if reserve.activations:
        lines.append(f"this process takes {peak} of memory: {parts}")
    else:
        lines.append(
            f"this process takes {peak} of memory without a micro-batch's activations, which the first one tells: "
            f"{parts}. memory.activations.sequence_length has a model of token ids measured at the start, "
            "memory.activations.max_bytes sets them"
        )
    return lines


def _checkpoint_room(inputs: PlanInputs, model: nn.Module, plan: Plan, *, rank: int = 0) -> list[str]:
    """A line that says how many tokens' activation checkpoints their tier of drives takes beside the plan.

    How many there will be only the batch says. CapacityError where not even the least has room: the first file, or one
    token of each sequence of a micro-batch.
    """
    config, held = inputs.config, plan.nbytes_by_tier()
    tier = Tier.named(config.checkpoint_tier)
    room = inputs.limits.room(tier, held)
    if not tier.on_drive or room is None:
        return []
    every = max(config.sections.activation_checkpointing.every, 1)
    recomputed = repeated_blocks(inputs.node, classes=inputs.blocks, every=every)
    blocks, part = len(recomputed), plan.pipeline
    if part is not None:
        flags = [path in recomputed for path in part.split.cut.blocks]
        blocks = inputs_in_flight(flags, part.place)
    shape = getattr(model, "config", None)
    hidden, longest = (getattr(shape, name, None) for name in ("hidden_size", "max_position_embeddings"))
    token_nbytes = blocks * (hidden if isinstance(hidden, int) else 0) * DTYPE_NBYTES[config.compute_dtype]
    least = max(scratch.FILE_NBYTES, config.micro_batch * token_nbytes)
    if room < least:
        raise CapacityError(
            f"rank {rank} has {format_bytes(room)} on {tier.value} for activation checkpoints beside the plan's "
            f"{format_bytes(held[tier])}, but they take at least {format_bytes(least)}: raise "
            "memory.nvme.max_bytes or free space on the drive, or keep them in CPU memory "
            '(activation_checkpointing.offload.device = "cpu")'
        )
    line = f"activation checkpoints on {tier.value} have {format_bytes(room)} beside the plan"
    if not token_nbytes:
        return [line]
    tokens = room // token_nbytes
    line += f": {tokens:,} tokens of {blocks} blocks a micro-batch" + ("" if part is None else " in flight")
    sequence = tokens // config.micro_batch
    if isinstance(longest, int) and sequence < longest:
        line += f", which is {sequence:,} for each of {config.micro_batch} sequences; the model takes up to {longest:,}"
    return [line]


def _free(
    config: ResolvedConfig, model: nn.Module, device: Device, local_size: int, adopted: Adopted | None
) -> Capacity:
    """What is free for this rank. The model's own memory counts: it is given back while partitions are made. So do the
    swap files that were adopted.
    """
    held = {"cpu": 0, device.torch.type: 0}
    present = [param for param in model.parameters() if not parameter.is_released(param) and not param.is_meta]
    storages = [param.untyped_storage() for param in present]
    for storage in {storage.data_ptr(): storage for storage in storages}.values():
        held[storage.device.type] = held.get(storage.device.type, 0) + storage.nbytes()
    held["cpu"] += deferred_nbytes(model)
    free = device.free_nbytes()
    drives = None
    if config.nvme_path is not None:
        drives = free_nvme_nbytes(config.nvme_path, config.sections.aio.drive_weights)
    elif config.checkpoint_nvme_path is not None:
        drives = free_nvme_nbytes(config.checkpoint_nvme_path)
    if drives is not None and adopted is not None:
        drives += local_size * adopted.killed.nbytes
    return free_for_rank(
        ranks=local_size, device_free_nbytes=None if free is None else free + held[device.torch.type],
        own_nbytes=held["cpu"], nvme_free_nbytes=drives,
    )  # fmt: skip


def _agreed(mine: Capacity, group: AxisGroup) -> Capacity:
    """The least of what the ranks have."""
    limits = [math.inf if limit is None else float(limit) for limit in astuple(mine)]
    least = map(min, zip(*collectives.exchange(limits, group), strict=True))
    return Capacity(*(None if limit == math.inf else int(limit) for limit in least))
