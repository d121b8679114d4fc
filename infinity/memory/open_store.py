"""Opening the store of a plan and the tier of activation checkpoints: memory, and back ends for tiers with files."""

from __future__ import annotations

from contextlib import ExitStack

from infinity.config import ResolvedConfig
from infinity.memory.activation_tier import ActivationTier
from infinity.memory.ledger import Ledger
from infinity.memory.queue_options import queue_options
from infinity.memory.store import TieredStore
from infinity.memory.tiers.base import TierBackend
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import HostMemory
from infinity.memory.tiers.registry import backend_of
from infinity.plan.plan import Plan
from infinity.plan.types import Tier


def open_store(config: ResolvedConfig, plan: Plan, *, rank: int, device: Device, ledger: Ledger) -> TieredStore:
    """Allocate the partitions' memory and, where the plan has extents, this rank's bytes on drives."""
    backends: dict[Tier, TierBackend] = {}
    sections = (config.zero.offload_param, config.zero.offload_optimizer)
    pin = all(section is None or section.pin_memory for section in sections)
    with ExitStack() as undo:
        for tier in Tier:
            if nbytes := plan.file_nbytes(tier):
                folders = config.folders(tier.value)
                assert folders is not None
                options = queue_options(config, folders)
                backends[tier] = backend_of(tier).open(folders, nbytes=nbytes, rank=rank, options=options)
                undo.callback(backends[tier].close)
        store = TieredStore(
            plan.partitions,
            device=device,
            host=HostMemory(device, pin=pin, ledger=ledger),
            ledger=ledger,
            pools=plan.pools,
            backends=backends,
            rank=rank,
            overlap=plan.policy.overlap,
        )
        undo.pop_all()
    return store


def open_activation_tier(
    config: ResolvedConfig, *, rank: int, device: Device, ledger: Ledger
) -> ActivationTier | None:
    """Make the tier of the inputs of recomputed blocks; None where they stay on the device."""
    tier = Tier.named(config.checkpoint_tier)
    if tier.on_device:
        return None
    section, path, open_file = config.config.activation_checkpointing.offload, config.checkpoint_nvme_path, None
    if path is not None:
        options = queue_options(config, path)
        open_file = lambda nbytes: backend_of(tier).open(path, nbytes=nbytes, rank=rank, options=options)  # noqa: E731
    return ActivationTier(
        device, ledger=ledger, pin=section.pin_memory, buffer_count=section.buffer_count,
        overlap=config.config.overlap, open_file=open_file, tier=tier,
    )  # fmt: skip
