"""What the machine has: free bytes of each tier for one rank, before anything is allocated.

`capacity` puts it together with the configured limits; docs/memory.md says the rules.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import psutil

from infinity.config.machine import Memory
from infinity.config.units import Share
from infinity.memory.nvme import Folders, clean, folders
from infinity.plan.capacity import BUDGET_SHARE, Capacity

_CGROUP = Path("/sys/fs/cgroup")


def capacity(
    limits: Memory, *, ranks: int, device_free_nbytes: int | None, own_nbytes: int, nvme_free_nbytes: int | None,
    by_budget: bool = False,
) -> Capacity:  # fmt: skip
    """What one of `ranks` ranks of this node may use of each tier.

    device_free_nbytes: of this rank's accelerator; None without one, when both memory tiers are the process's own.
    own_nbytes: of the model's own memory, which is given back while its partitions are made. nvme_free_nbytes: of the
    node's drives, None without any. by_budget: whether the plan fills what it is given.
    """
    unlimited = BUDGET_SHARE if by_budget else None
    gpu, cpu = limits.gpu.max_bytes or unlimited, limits.cpu.max_bytes or unlimited
    nvme = capped(nvme_free_nbytes, limits.nvme.max_bytes, ranks)
    free = free_cpu_nbytes() + own_nbytes * ranks
    if device_free_nbytes is not None:
        return Capacity(gpu=capped(device_free_nbytes, gpu, 1), cpu=capped(free, cpu, ranks), nvme=nvme)
    if limits.gpu.max_bytes is None:
        return Capacity(process=capped(free, cpu, ranks), nvme=nvme)
    return Capacity(
        gpu=capped(free // ranks, gpu, 1), cpu=capped(free, cpu, ranks), process=free // ranks, nvme=nvme
    )  # fmt: skip


def lockable_nbytes() -> int | None:
    """How much memory this process may pin by its limit; None where there is none. It never makes a plan fail: what
    cannot be pinned stays pageable, and is copied more slowly.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def free_cpu_nbytes() -> int:
    """Memory that a new process could take on this node: what the system has, within the control groups' limits."""
    available = int(psutil.virtual_memory().available)
    for limit, used in _cgroup_limits():
        available = min(available, max(limit - used, 0))
    return available


def free_nvme_nbytes(directory: Folders, weights: Sequence[float] = ()) -> int:
    """Bytes that the drives of `directory`, which need not exist yet, can take between them; what killed processes
    left there is removed first.

    weights: the shares of several directories. Without them any division is taken for possible: the sum.
    """
    free: dict[int, int] = {}
    shares: dict[int, float] = {}
    directories = folders(directory)
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


def capped(free_nbytes: int | None, limit: int | Share | None, ranks: int) -> int | None:
    """A rank's share of what is free on a node, and of the configured limit, whichever is less; None where unknown."""
    if free_nbytes is None:
        # A share of an unknown amount is unknown.
        return limit // ranks if isinstance(limit, int) else None
    if limit is None:
        return free_nbytes // ranks
    nbytes = limit if isinstance(limit, int) else limit.of(free_nbytes)
    return min(nbytes, free_nbytes) // ranks


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used without reclaimable cache) of the control groups of this process, versions 1 and 2.

    A limit holds for everything below, so those of the groups above count. In a container the path may be the host's
    and only the top of the mounted tree be there, which is then the container's own group.
    """
    found = []
    for controllers, path in _cgroup_paths():
        if "memory" in controllers:
            top, prefix = _CGROUP / "memory", "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            top, prefix = _CGROUP, ""
            names = ("memory.max", "memory.current")
        else:
            continue
        own = PurePosixPath(path if ".." not in path else "")
        for group in (own, *own.parents):
            limit, used = (_number(top / group / name) for name in names)
            if limit is not None and used is not None:
                statistics = top / group / "memory.stat"
                cache = sum(_statistic(statistics, prefix + part) for part in ("inactive_file", "active_file"))
                found.append((limit, max(used - cache, 0)))
    return found


def _cgroup_paths() -> list[tuple[list[str], str]]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [([name for name in field[1].split(",") if name], field[2].lstrip("/")) for field in fields]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        # The file is not there, or says "max".
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name)
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
