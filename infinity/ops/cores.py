"""The cores that a process may use: its affinity mask, the cgroup's CPU quota, and each rank's share of both.

A container often sees every core of its host but has the quota of a few. The kernel then stops a pool of one thread a
core for most of each period, in the middle of a step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def allowed_cores() -> list[int]:
    """Return the cores that the calling thread may run on, ascending."""
    return sorted(os.sched_getaffinity(0))


def thread_count(cores: int, ranks: int = 1, root: Path = Path("/")) -> int:
    """Return how many threads are useful on `cores` cores if `ranks` processes share the cgroup's quota; at least 1."""
    quota = quota_cores(root)
    return max(1, min(cores, cores if quota is None else math.ceil(quota / ranks)))


def share_of_cores(index: int, ranks: int) -> list[int]:
    """Return the cores of rank `index` among the `ranks` of this node: neighbours, disjoint if there are enough cores.

    A process whose mask has at most one rank's share of the machine was bound by its launcher and keeps its mask.
    """
    if not 0 <= index < ranks:
        raise ValueError(f"rank {index} is not among {ranks} ranks")
    allowed = allowed_cores()
    if ranks == 1 or len(allowed) * ranks <= (os.cpu_count() or 1):
        return allowed
    if len(allowed) < ranks:
        return [allowed[index % len(allowed)]]
    return allowed[len(allowed) * index // ranks : len(allowed) * (index + 1) // ranks]


def quota_cores(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU quota of this process's cgroups in cores, such as 1.5; None if there is none.

    cgroup version 2 gives it as `cpu.max`, version 1 as `cpu.cfs_quota_us` over `cpu.cfs_period_us`. Every level up to
    the mount limits the process. `root` holds proc and sys, for tests.
    """
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield the cgroup folders of both versions that may limit this process, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # hierarchy:controllers:path, no controllers in version 2
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = ("", "unified")
        elif "cpu" in controllers.split(","):
            mounts = (controllers, "cpu")
        else:
            continue
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            folder = top / path.strip("/")
            # Inside a container the path may be that of the host; then only the mount itself exists.
            yield from (level for level in (folder, *folder.parents) if level == top or top in level.parents)


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        # "max" (version 2) and -1 (version 1) mean no quota.
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
