"""The options of the drives' queues: from the configuration, else from a measured profile, else the defaults."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infinity.config.resolve import ResolvedConfig
from infinity.log import warn_once
from infinity.memory.tiers.base import QueueOptions
from infinity.memory.tiers.nvme import check_usable
from infinity.memory.tiers.striping import even
from infinity.plan.hardware import Drive, HardwareProfile, load_profile


def queue_options(config: ResolvedConfig, directories: Sequence[str]) -> QueueOptions:
    """Return the options for `directories`; raise ConfigError where the named profile cannot be read."""
    aio, defaults = config.config.aio, QueueOptions()
    threads = aio.intra_op_parallelism or defaults.threads
    options = QueueOptions(
        depth=aio.queue_depth * threads, threads=threads, timeout_seconds=config.config.watchdog_seconds,
        block_nbytes=aio.block_size or defaults.block_nbytes, checksum=aio.checksum, weights=aio.drive_weights,
    )  # fmt: skip
    if config.config.hardware_profile is None:
        return options
    drives = _drives(load_profile(config.config.hardware_profile), directories)
    if not drives:
        return options
    if aio.block_size is None:
        options = replace(options, block_nbytes=max(drive.block_nbytes for drive in drives))
    if config.sources["aio.queue_depth"] == "default":
        options = replace(options, depth=max(drive.queue_depth for drive in drives))
    if len(drives) > 1 and not options.weights:
        options = replace(options, weights=even([drive.mixed_rate for drive in drives]))
    return options


def check_drives(config: ResolvedConfig) -> None:
    """Raise ConfigError, with the key, where a folder that the configuration names can hold no swap file."""
    zero = "zero_optimization"
    for key, directories in (
        (f"{zero}.offload_optimizer.nvme_path", config.optimizer_nvme_path),
        (f"{zero}.offload_param.nvme_path", config.param_nvme_path),
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
