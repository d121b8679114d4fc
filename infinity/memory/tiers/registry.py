"""The back ends of the tiers of drives, by tier. `add_tier` is all that a further tier needs.

    class Archive(NvmeTier): ...
    add_tier(Tier("archive", addressable=False, alignment=4096), Archive)

From then on a configuration may say `"offload_optimizer": {"device": "archive", "nvme_path": "/archive"}`. `rates` of
the tier tell the predictions how fast its drives are.
"""

from __future__ import annotations

from infinity.memory.tiers.base import TierBackend
from infinity.memory.tiers.nvme import NvmeTier
from infinity.plan.types import Tier

_backends: dict[Tier, type[TierBackend]] = {Tier.NVME: NvmeTier}


def add_tier(tier: Tier, backend: type[TierBackend]) -> None:
    """Add a tier, slower than those before it, for configurations loaded from now on; ValueError: its name is taken."""
    Tier.register(tier)
    _backends[tier] = backend


def remove_tier(tier: Tier) -> None:
    """Undo `add_tier`, when no engine uses the tier."""
    del _backends[tier]
    Tier.unregister(tier)


def backend_of(tier: Tier) -> type[TierBackend]:
    """The class that moves a tier's bytes; KeyError for a tier in memory."""
    return _backends[tier]
