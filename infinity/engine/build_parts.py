"""Parts of a runtime that follow from the configuration: recomputation, the stepper and its threads, the observer."""

from __future__ import annotations

import math
from functools import partial

from torch import nn

from infinity.config import ResolvedConfig
from infinity.distributed.collectives import exchange_values
from infinity.distributed.process_groups import ProcessGroups, Ranks
from infinity.errors import ConfigError
from infinity.memory.ledger import Ledger
from infinity.memory.open_store import open_activation_tier
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.observability.memory_breakdown import Breakdown
from infinity.observability.observer import Observer
from infinity.ops.adam import set_threads
from infinity.ops.cores import share_of_cores, thread_count
from infinity.optim.factory import Chosen
from infinity.optim.stepper import Stepper
from infinity.plan.plan import Plan
from infinity.zero.activation_checkpoint import Checkpointing


def make_checkpointing(
    config: ResolvedConfig, model: nn.Module, blocks: tuple[str, ...], ranks: Ranks, device: Device, ledger: Ledger
) -> Checkpointing:
    """Make backward recompute blocks, and make the tier of their inputs where that is not the device."""
    section = config.config.activation_checkpointing
    if section.every and not blocks:
        raise ConfigError(
            f"activation_checkpointing.every is {section.every}, but {type(model).__name__} has no blocks that it "
            "repeats: leave the key out, and call torch.utils.checkpoint in the model"
        )
    tier = open_activation_tier(config, rank=ranks.rank, device=device, ledger=ledger)
    return Checkpointing(model, blocks, keep_ops=section.keep_ops, tier=tier)


def make_stepper(
    config: ResolvedConfig, plan: Plan, store: TieredStore, device: Device, groups: ProcessGroups, optimizer: Chosen
) -> Stepper:
    """Make what steps the partitions, with this rank's share of the cores."""
    # Ranks of one node share its cores. The result does not depend on the number of threads.
    ranks = groups.ranks
    cores = share_of_cores(ranks.local_rank % ranks.local_size, ranks.local_size)
    set_threads(thread_count(len(cores), ranks.local_size), cores)
    return Stepper(
        plan, store, device=device, index=groups.data.index, rule=optimizer.rule,
        grad_bound=config.clip_value or math.inf,
    )  # fmt: skip


def make_observer(breakdown: Breakdown, config: ResolvedConfig, groups: ProcessGroups) -> Observer:
    """Make what shows memory and times; timelines of a pipeline's ranks tell each other their stages."""
    ranks, told = groups.ranks, partial(exchange_values, group=groups.pipeline, name="a timeline's stages")
    return Observer(
        breakdown, config.config, rank=ranks.rank, world_size=ranks.world_size,
        tell=told if groups.pipeline.size > 1 else None,
    )  # fmt: skip
