"""What a configuration has stand at the modules of a model: blocks that are computed again, attention over blocks."""

from __future__ import annotations

import torch
from torch import nn

from infinity.config import ResolvedConfig
from infinity.distributed.collectives import exchange
from infinity.distributed.groups import ProcessGroups, Ranks
from infinity.errors import ConfigError
from infinity.memory.ledger import Ledger
from infinity.memory.store import open_activation_tier
from infinity.memory.tiers.device import Device
from infinity.tiling.sparse_models import SparseModel
from infinity.zero.activation_checkpoint import Checkpointing


def make_checkpointing(
    config: ResolvedConfig, model: nn.Module, blocks: tuple[str, ...], ranks: Ranks, device: Device, ledger: Ledger
) -> Checkpointing:
    """Make backward recompute blocks, and make the tier of their inputs where that is not the device."""
    section = config.sections.activation_checkpointing
    if section.every and not blocks:
        raise ConfigError(
            f"activation_checkpointing.every is {section.every}, but {type(model).__name__} has no blocks that it "
            "repeats: leave the key out, and call torch.utils.checkpoint in the model"
        )
    tier = open_activation_tier(config, rank=ranks.rank, device=device, ledger=ledger)
    return Checkpointing(model, blocks, keep_ops=section.keep_ops, tier=tier)


def make_sparse_model(config: ResolvedConfig, model: nn.Module, groups: ProcessGroups, device: Device) -> SparseModel:
    """Have attention go over blocks, where the configuration says so; random ones by rank 0's seed. Collective."""
    section, seed = config.sections.sparse_attention, 0
    if section is not None and section.num_random_blocks:
        seed = int(exchange([float(torch.initial_seed() % 2**32)], groups.world, "seed of the layouts")[0][0])
    return SparseModel(model, section, seed, groups.tensor, groups.sequence, device.torch)
