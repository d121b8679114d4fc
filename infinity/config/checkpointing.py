"""The activation_checkpointing section: which blocks backward recomputes, and where their inputs are kept."""

from __future__ import annotations

from typing import Annotated

from infinity.config.section import Differs, NoAuto, NoEffect, Section
from infinity.config.values import Count, Drives, Flag, HomeDevice, Natural, Texts


class OffloadCheckpoints(Section):
    """Ours. Where the inputs of recomputed blocks are kept between forward and backward. Applies to the model's own
    calls of torch.utils.checkpoint too."""

    device: Annotated[HomeDevice, NoAuto('choose "none", "cpu" or "nvme"')] = "none"
    """Ours. The accelerator ("none"), CPU memory or NVMe."""
    nvme_path: Annotated[Drives | None, NoAuto("name a folder on the drive")] = None
    """Ours. Folder on the drive, or a list of folders on several drives; absent: the path of offload_optimizer or
    offload_param."""
    buffer_count: Count = 4
    """Ours. Staging buffers in CPU memory between the accelerator and NVMe, each of the size of the largest input.
    Their number bounds the transfers in flight."""
    pin_memory: Flag = True
    """Ours. Page-lock the CPU memory."""


class ActivationCheckpointing(Section):
    """Recomputation of activations in backward instead of keeping them."""

    every: Natural = 0
    """Ours. Recompute every N-th of the model's repeated blocks in backward, starting with the first: 1 is all blocks,
    2 every second, 0 none."""
    keep_ops: Texts = ()
    """Ours. Operators, by torch's names, whose results are kept in recomputed blocks: with ["aten.mm"] backward does
    not repeat the matrix products."""
    offload: OffloadCheckpoints = OffloadCheckpoints()
    cpu_checkpointing: Annotated[
        Flag, Differs("it also moves the inputs of the model's own calls of torch.utils.checkpoint")
    ] = False
    """Older form of offload with device cpu."""
    partition_activations: Annotated[
        Flag, NoEffect("each rank of a tensor group keeps its checkpoints whole, or offloads them")
    ] = False
    """Partition saved activations."""
    contiguous_memory_optimization: Annotated[
        Flag, NoEffect("offloaded checkpoints use large buffers already, and other checkpoints are not copied")
    ] = False
    """Save them in one buffer."""
    number_checkpoints: Annotated[
        Natural | None, NoEffect("the space for checkpoints grows in the first step, and is then reused")
    ] = None
    """Number of checkpoints."""
    synchronize_checkpoint_boundary: Annotated[
        Flag, NoEffect("events order the copies, so the device is never synchronised for them")
    ] = False
    """Synchronise at every checkpoint."""
    profile: Annotated[Flag, NoEffect("engine.timeline() shows each block's forward, recomputation and backward")] = (
        False
    )
    """Time every checkpoint."""
