"""What the machine's drives and memory give a run: the options of the drives' queues, and what is free on each tier.

Options come from the configuration, else from a measured profile, else they are the defaults. What is free is asked for
one rank before the engine allocates anything; `infinity.plan.capacity.within` combines it with the configured limits,
by the rules of docs/memory.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infinity.config.resolve import ResolvedConfig
from infinity.log import warn_once
from infinity.memory.tiers.base import Folders, QueueOptions
from infinity.memory.tiers.nvme import check_usable, clean, swap_folders
from infinity.memory.tiers.striping import even
from infinity.ops.aio import Queue
from infinity.plan.capacity import Capacity, free_cpu_nbytes
from infinity.plan.hardware import Drive, HardwareProfile, load_profile


def queue_options(config: ResolvedConfig, directories: Sequence[str]) -> QueueOptions:
    """Return the options for `directories`; raise ConfigError where the named profile cannot be read."""
    aio, defaults = config.sections.aio, QueueOptions()
    threads = aio.intra_op_parallelism or defaults.threads
    options = QueueOptions(
        depth=aio.queue_depth * threads, threads=threads, timeout_seconds=config.sections.watchdog_seconds,
        block_nbytes=aio.block_size or defaults.block_nbytes, checksum=aio.checksum, weights=aio.drive_weights,
    )  # fmt: skip
    if config.sections.hardware_profile is None:
        return options
    drives = _drives(load_profile(config.sections.hardware_profile), directories)
    if not drives:
        return options
    if aio.block_size is None:
        options = replace(options, block_nbytes=max(drive.block_nbytes for drive in drives))
    if config.sources["aio.queue_depth"] == "default":
        options = replace(options, depth=max(drive.queue_depth for drive in drives))
    if len(drives) > 1 and not options.weights:
        options = replace(options, weights=even([drive.mixed_rate for drive in drives]))
    return options


def transfer_queue(config: ResolvedConfig) -> Queue:
    """Return a queue of its own for a save or a load; the configuration says how drives are used."""
    options = queue_options(config, ())
    return Queue(
        depth=options.depth, threads=options.threads, timeout_s=options.timeout_seconds,
        block_nbytes=options.block_nbytes,
    )  # fmt: skip


def check_drives(config: ResolvedConfig) -> None:
    """Raise ConfigError, with the key, where a folder that the configuration names can hold no swap file."""
    zero = "zero_optimization"
    for key, directories in (
        (f"{zero}.offload_optimizer.nvme_path", config.optimizer_nvme_path),
        (f"{zero}.offload_param.nvme_path", config.param_nvme_path),
        (f"{zero}.offload_gradients.nvme_path", config.zero.drives(config.zero.offload_gradients)),
        ("activation_checkpointing.offload.nvme_path", config.checkpoint_nvme_path),
    ):
        if directories is not None:
            check_usable(directories, key)


def _drives(profile: HardwareProfile, directories: Sequence[str]) -> list[Drive]:
    """Return the profile's drive behind each directory; an empty list if one of them was not measured."""
    found = []
    for directory in directories:
        device = _device(directory)
        drive = next((each for each in profile.drives if _device(each.folder) == device), None)
        if drive is None:
            warn_once(
                "profile-drive",
                f"the hardware profile knows no drive of {directory}: the defaults serve. Measure it with "
                f"`infinity bench --drive {directory}`",
            )
            return []
        found.append(drive)
    return found


def _device(folder: str) -> int:
    """The device of a folder, or of the nearest one above it that exists."""
    path = Path(os.path.abspath(folder))
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


def free_for_rank(
    *, ranks: int, device_free_nbytes: int | None, own_nbytes: int, nvme_free_nbytes: int | None
) -> Capacity:
    """Return the free bytes of each tier for one of `ranks` ranks of this node.

    device_free_nbytes: of this rank's accelerator; None without one, when both memory tiers are the process's own.
    own_nbytes: of the model's own memory, which is given back while its partitions are made. nvme_free_nbytes: of the
    node's drives, None without any.
    """
    own = free_cpu_nbytes() // ranks + own_nbytes
    nvme = None if nvme_free_nbytes is None else nvme_free_nbytes // ranks
    if device_free_nbytes is None:
        return Capacity(process=own, nvme=nvme)
    return Capacity(gpu=device_free_nbytes, cpu=own, nvme=nvme)


def free_nvme_nbytes(directory: Folders, weights: Sequence[float] = ()) -> int:
    """Return the bytes that the drives of `directory` can take together, after removing files of killed processes.

    The folders need not exist yet. weights: the shares of several directories; without them any division is possible,
    and the result is the sum.
    """
    free: dict[int, int] = {}
    shares: dict[int, float] = {}
    directories = swap_folders(directory)
    for path, weight in zip(directories, weights or [1.0] * len(directories), strict=True):
        path = path.absolute()
        if path.is_dir():
            clean(path)
        while not path.exists():
            path = path.parent
        space, device = os.statvfs(path), path.stat().st_dev
        free[device] = space.f_bavail * space.f_frsize
        shares[device] = shares.get(device, 0.0) + weight
    if not weights or len(free) == 1:
        return sum(free.values())
    return min(int(nbytes * sum(weights) / shares[device]) for device, nbytes in free.items())
