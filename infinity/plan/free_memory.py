"""How much memory this node has free for a new process: the system's word, within the limits of the control groups.

Imports neither torch nor anything of ours: the engine asks it before a plan, the estimator without a model.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def free_cpu_nbytes() -> int:
    """Memory that a new process could take on this node: what the system has, within the control groups' limits."""
    available = int(psutil.virtual_memory().available)
    for limit, used in _cgroup_limits():
        available = min(available, max(limit - used, 0))
    return available


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
