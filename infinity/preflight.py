"""Before anything is allocated or written: the plan, and whether it fits what the ranks may use.

Every rank makes the same plan, also where budgets decide: of what the ranks may use, the least counts, so that all of
them go on, or none does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple

from torch import nn

from infinity.comm import collectives
from infinity.comm.mesh import Mesh
from infinity.config import ResolvedConfig
from infinity.config.units import format_bytes
from infinity.errors import CapacityError, ConfigError
from infinity.memory import slabs
from infinity.memory.capacity import capacity, free_nvme_nbytes, lockable_nbytes
from infinity.memory.device import Device
from infinity.memory.queue_options import check_drives
from infinity.plan.capacity import Capacity
from infinity.plan.checkpoints import repeated_blocks
from infinity.plan.plan import Plan
from infinity.plan.refusal import refuse
from infinity.plan.request import Question
from infinity.plan.spec import describe
from infinity.plan.topology import Topology
from infinity.plan.types import DTYPE_NBYTES, Kind, Tier
from infinity.zero import parameter


def preflight(
    config: ResolvedConfig, model: nn.Module, groups: Mapping[int, int], device: Device, mesh: Mesh,
    *, moments: tuple[Kind, ...],
) -> tuple[Plan, Capacity]:
    """The plan of a run, and what each tier may hold while it lasts. Collective.

    moments: what the optimizer keeps of an element.
    groups: the optimizer parameter group of each trained parameter, by id. ConfigError for a folder that can hold no
    swap files, CapacityError for a plan that does not fit, ConfigError for a model without values; of a model without
    values that would not fit either, it is the first.
    """
    ranks = mesh.ranks
    check_drives(config)
    own, budget = _own(config, model, device, ranks.local_size)
    question = Question(
        node=describe(model, compute_dtype=config.compute_dtype, groups=dict(groups)),
        config=config,
        topology=Topology(dp=ranks.world_size, local_size=ranks.local_size),
        accelerator=device.is_accelerator,
        capacity=_agreed(own, mesh),
        budget=_agreed(budget, mesh),
        blocks=tuple(getattr(model, "_no_split_modules", None) or ()),
        moments=moments,
    )
    plan = question.plan()
    refuse(question, plan, rank=ranks.rank)
    for name, param in model.named_parameters():
        if param.is_meta:
            raise ConfigError(
                f"{name} is on the meta device and has no values: build the model under `with "
                f"infinity.Init(config=...):` instead"
            )
    checkpoint_room(config, model, plan, question.limits, rank=ranks.rank)
    return plan, question.limits


def remarks(config: ResolvedConfig, model: nn.Module, plan: Plan, limits: Capacity, device: Device) -> list[str]:
    """What the program should know of its configuration, and of a plan that fits."""
    return [*config.report(), *pinning(plan, device), *checkpoint_room(config, model, plan, limits)]


def checkpoint_room(
    config: ResolvedConfig, model: nn.Module, plan: Plan, limits: Capacity, *, rank: int = 0
) -> list[str]:
    """A line that says how many tokens' activation checkpoints NVMe takes beside the plan, where they go there.

    How many there will be only the batch says. CapacityError where not even the least has room: the first file, or one
    token of each sequence of a micro-batch.
    """
    held = plan.nbytes_by_tier()
    room = limits.room(Tier.NVME, held)
    if config.checkpoint_tier != Tier.NVME.value or room is None:
        return []
    tree = describe(model, compute_dtype=config.compute_dtype)
    classes = tuple(getattr(model, "_no_split_modules", None) or ())
    every = max(config.config.activation_checkpointing.every, 1)
    blocks = len(repeated_blocks(tree, classes=classes, every=every))
    shape = getattr(model, "config", None)
    hidden, longest = (getattr(shape, name, None) for name in ("hidden_size", "max_position_embeddings"))
    token_nbytes = blocks * (hidden if isinstance(hidden, int) else 0) * DTYPE_NBYTES[config.compute_dtype]
    least = max(slabs.FILE_NBYTES, config.micro_batch * token_nbytes)
    if room < least:
        raise CapacityError(
            f"rank {rank} has {format_bytes(room)} on nvme for activation checkpoints beside the plan's "
            f"{format_bytes(held[Tier.NVME])}, but they take at least {format_bytes(least)}: raise "
            "memory.nvme.max_bytes or free space on the drive, or keep them in CPU memory "
            '(activation_checkpointing.offload.device = "cpu")'
        )
    line = f"activation checkpoints on nvme have {format_bytes(room)} beside the plan"
    if not token_nbytes:
        return [line]
    tokens = room // token_nbytes
    line += f": {tokens:,} tokens of {blocks} blocks a micro-batch"
    sequence = tokens // config.micro_batch
    if isinstance(longest, int) and sequence < longest:
        line += f", which is {sequence:,} for each of {config.micro_batch} sequences; the model takes up to {longest:,}"
    return [line]


def pinning(plan: Plan, device: Device) -> list[str]:
    """A line where the plan has more CPU memory than this process may pin."""
    limit, planned = lockable_nbytes(), plan.nbytes_by_tier()[Tier.CPU]
    if not device.is_accelerator or limit is None or planned <= limit:
        return []
    return [
        f"{planned / 1e9:.1f} GB of CPU memory are planned but the locked-memory limit (ulimit -l) is "
        f"{limit / 1e9:.3f} GB: what cannot be pinned is copied more slowly"
    ]


def _own(config: ResolvedConfig, model: nn.Module, device: Device, local_size: int) -> tuple[Capacity, Capacity]:
    """What this rank may use, and what budgets would fill of it. The model's own memory counts as free: it is given
    back while partitions are made.
    """
    held = {"cpu": 0, device.torch.type: 0}
    storages = [param.untyped_storage() for param in model.parameters() if _has_memory(param)]
    for storage in {storage.data_ptr(): storage for storage in storages}.values():
        held[storage.device.type] = held.get(storage.device.type, 0) + storage.nbytes()
    free = device.free_nbytes()
    drives = None
    if config.nvme_path is not None:
        drives = free_nvme_nbytes(config.nvme_path, config.config.aio.drive_weights)
    elif config.checkpoint_nvme_path is not None:
        drives = free_nvme_nbytes(config.checkpoint_nvme_path)
    limits, fillable = (
        capacity(
            config.config.memory,
            ranks=local_size,
            device_free_nbytes=None if free is None else free + held[device.torch.type],
            own_nbytes=held["cpu"],
            nvme_free_nbytes=drives,
            by_budget=by_budget,
        )
        for by_budget in (False, True)
    )
    return limits, fillable


def _agreed(mine: Capacity, mesh: Mesh) -> Capacity:
    """The least of what the ranks may use."""
    limits = [math.inf if limit is None else float(limit) for limit in astuple(mine)]
    least = map(min, zip(*collectives.exchange(limits, mesh.control, mesh.ranks.world_size), strict=True))
    return Capacity(*(None if limit == math.inf else int(limit) for limit in least))


def _has_memory(param: nn.Parameter) -> bool:
    return not parameter.is_released(param) and not param.is_meta
