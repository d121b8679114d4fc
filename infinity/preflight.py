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
from infinity.errors import ConfigError
from infinity.memory.capacity import capacity, free_nvme_nbytes, lockable_nbytes
from infinity.memory.device import Device
from infinity.plan.capacity import Capacity
from infinity.plan.plan import Plan
from infinity.plan.refusal import refuse
from infinity.plan.request import Question
from infinity.plan.spec import describe
from infinity.plan.topology import Topology
from infinity.plan.types import Tier
from infinity.zero import parameter


def preflight(
    config: ResolvedConfig, model: nn.Module, groups: Mapping[int, int], device: Device, mesh: Mesh
) -> tuple[Plan, Capacity]:
    """The plan of a run, and what each tier may hold while it lasts. Collective.

    groups: the optimizer parameter group of each trained parameter, by id. CapacityError for a plan that does not fit,
    ConfigError for a model without values; of a model without values that would not fit either, it is the first.
    """
    ranks = mesh.ranks
    own, budget = _own(config, model, device, ranks.local_size)
    question = Question(
        node=describe(model, compute_dtype=config.compute_dtype, groups=dict(groups)),
        config=config,
        topology=Topology(dp=ranks.world_size, local_size=ranks.local_size),
        accelerator=device.is_accelerator,
        capacity=_agreed(own, mesh),
        budget=_agreed(budget, mesh),
        blocks=tuple(getattr(model, "_no_split_modules", None) or ()),
    )
    plan = question.plan()
    refuse(question, plan, rank=ranks.rank)
    for name, param in model.named_parameters():
        if param.is_meta:
            raise ConfigError(
                f"{name} is on the meta device and has no values: build the model under `with "
                f"infinity.Init(config=...):` instead"
            )
    return plan, question.limits


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
