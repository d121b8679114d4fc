"""What the machine has: free bytes of each tier for one rank, before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from infinity.config.units import Share
from infinity.memory.nvme import clean

_CGROUP = Path("/sys/fs/cgroup")


def free_cpu_nbytes() -> int:
    """Memory that a new process could take on this node: what the system has available, within the control group's limit."""
    available = int(psutil.virtual_memory().available)
    for limit, used in _cgroup_limits():
        available = min(available, max(limit - used, 0))
    return available


def free_nvme_nbytes(directory: str | os.PathLike[str]) -> int:
    """Free bytes on the drive of `directory`, which need not exist yet. Swap files of killed processes are removed first."""
    path = Path(directory).absolute()
    if path.is_dir():
        clean(path)
    while not path.exists():
        path = path.parent
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def capped(free_nbytes: int | None, limit: int | Share | None, ranks: int) -> int | None:
    """A rank's share of what is free on a node, and of the configured limit, whichever is less."""
    if limit is None:
        return None if free_nbytes is None else free_nbytes // ranks
    nbytes = limit if isinstance(limit, int) else limit.of(free_nbytes or 0)
    return min(nbytes, free_nbytes if free_nbytes is not None else nbytes) // ranks


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used without reclaimable cache) of the memory control groups of this process, versions 1 and 2."""
    found = []
    for controllers, path in _cgroup_paths():
        if "memory" in controllers:
            folder = _CGROUP / "memory" / path
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif not controllers:
            folder = _CGROUP / path
            names = ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        limit, used = _number(folder / names[0]), _number(folder / names[1])
        if limit is not None and used is not None:
            found.append((limit, max(used - _statistic(folder / "memory.stat", names[2]), 0)))
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
