"""Free bytes of each tier for one rank, before the engine allocates anything.

`infinity.plan.capacity.within` combines them with the configured limits; docs/memory.md states the rules.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from infinity.memory.tiers.base import Folders
from infinity.memory.tiers.nvme import clean, swap_folders
from infinity.plan.capacity import Capacity
from infinity.plan.free_memory import free_cpu_nbytes


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
