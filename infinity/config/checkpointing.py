"""The activation_checkpointing section: what is computed again in backward, and where its inputs lie meanwhile."""

from __future__ import annotations

from typing import Annotated

from infinity.config.section import HONOURED, NoAuto, NoEffect, Section
from infinity.config.values import Count, Drives, Flag, HomeDevice, Natural, Texts


class OffloadCheckpoints(Section):
    """Ours. Where the inputs of what is computed again lie between forward and backward, also where the model itself
    calls torch.utils.checkpoint."""

    device: Annotated[HomeDevice, HONOURED, NoAuto('choose "none", "cpu" or "nvme"')] = "none"
    """Ours. The accelerator ("none"), CPU memory or NVMe."""
    nvme_path: Annotated[Drives | None, HONOURED, NoAuto("name a folder on the drive")] = None
    """Ours. Folder on the drive, or a list of folders on several; without one, that of offload_optimizer or
    offload_param."""
    buffer_count: Annotated[Count, HONOURED] = 4
    """Ours. Buffers in CPU memory through which they pass on their way to NVMe and back, each of the size of the
    largest: the bound of what is in flight."""
    pin_memory: Annotated[Flag, HONOURED] = True
    """Ours. Page-lock the CPU memory."""


class ActivationCheckpointing(Section):
    """Computing activations again in backward instead of keeping them."""

    every: Annotated[Natural, HONOURED] = 0
    """Ours. Every how many of the blocks that the model repeats is computed again in backward, from the first on: 1 all
    of them, 2 every second, 0 none."""
    keep_ops: Annotated[Texts, HONOURED] = ()
    """Ours. Operators of those blocks whose results are kept all the same, by torch's names: ["aten.mm"] saves the
    matrix products from being done twice."""
    offload: OffloadCheckpoints = OffloadCheckpoints()
    cpu_checkpointing: Annotated[Flag, HONOURED] = False
    """Older form of offload with device cpu."""
    partition_activations: Annotated[
        Flag, NoEffect("checkpoints are divided among tensor-parallel ranks, and there are none")
    ] = False
    """Partition saved activations."""
    contiguous_memory_optimization: Annotated[
        Flag, NoEffect("checkpoints that are offloaded lie in large buffers, and no others are copied")
    ] = False
    """Save them in one buffer."""
    number_checkpoints: Annotated[
        Natural | None, NoEffect("the space for checkpoints grows in the first step, and is then reused")
    ] = None
    """Number of checkpoints."""
    synchronize_checkpoint_boundary: Annotated[
        Flag, NoEffect("the device need not be stopped: copies are ordered by events")
    ] = False
    """Synchronise at every checkpoint."""
    profile: Annotated[
        Flag, NoEffect("engine.timeline() shows each block's forward, recomputation and backward")
    ] = False
    """Time every checkpoint."""
