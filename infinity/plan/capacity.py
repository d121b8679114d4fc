"""Limits: how many bytes a rank may use on each tier, and by how much a plan exceeds them.

How much memory this node has free for a new process: the system's word, within the limits of the control groups.

Imports neither torch nor anything of ours: the engine asks it before a plan, the estimator without a model.

What an allocator takes beyond the tensors that live in its memory: the bounds that a plan counts on.

Who allocates keeps to them: `infinity.memory.tiers.pinned` for the process's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from infinity.base.sizes import Share, format_bytes
from infinity.config.schema import Memory
from infinity.plan.types import Kind, Tier

# Placement by budget fills this share of memory without a configured limit. The rest is for activations and for other
# processes.
BUDGET_SHARE = Share(0.75)
# A tier that was added brings its limit with it.
_BUILT_IN = (Tier.GPU, Tier.CPU, Tier.NVME)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes that a rank may use on each tier; None where there is no limit, or it is not known."""

    gpu: int | None = None
    cpu: int | None = None
    nvme: int | None = None
    # Of the GPU and the CPU tier together, where both are the process's own memory.
    process: int | None = None

    @property
    def host(self) -> int | None:
        """CPU memory, of which a process without an accelerator has only its one memory."""
        return self.process if self.cpu is None else self.cpu

    @property
    def device(self) -> int | None:
        """What computes: the accelerator's memory, or the process's one memory."""
        return self.process if self.gpu is None else self.gpu

    def own(self, tier: Tier) -> int | None:
        """The limit of one tier itself."""
        return getattr(self, tier.value) if tier in _BUILT_IN else tier.capacity

    def of(self, tier: Tier) -> int | None:
        """The limit of one tier if the others are empty."""
        own = self.own(tier)
        shared = None if tier.on_drive else self.process
        return min((limit for limit in (own, shared) if limit is not None), default=None)

    def room(self, tier: Tier, held: Mapping[Tier, int]) -> int | None:
        """Bytes that one tier may still take while all tiers hold `held`; at least 0, None without a limit."""
        own = self.own(tier)
        room = None if own is None else own - held[tier]
        if self.process is not None and tier.addressable:
            shared = self.process - addressable_nbytes(held)
            room = shared if room is None or shared < room else room
        return room if room is None or room > 0 else 0

    def left(self, charged: Mapping[Tier, int]) -> Capacity:
        """The limits minus the bytes charged to each tier; at least 0."""

        def rest(limit: int | None, nbytes: int) -> int | None:
            return None if limit is None else max(limit - nbytes, 0)

        return Capacity(
            gpu=rest(self.gpu, charged.get(Tier.GPU, 0)), cpu=rest(self.cpu, charged.get(Tier.CPU, 0)),
            nvme=rest(self.nvme, charged.get(Tier.NVME, 0)), process=rest(self.process, addressable_nbytes(charged)),
        )  # fmt: skip

    def least(self, other: Capacity) -> Capacity:
        """The lesser of both, limit by limit."""

        def lesser(mine: int | None, theirs: int | None) -> int | None:
            return min((limit for limit in (mine, theirs) if limit is not None), default=None)

        return Capacity(
            gpu=lesser(self.gpu, other.gpu), cpu=lesser(self.cpu, other.cpu), nvme=lesser(self.nvme, other.nvme),
            process=lesser(self.process, other.process),
        )  # fmt: skip

    def fits(self, held: Mapping[Tier, int]) -> bool:
        """Whether so many bytes on each tier are within it."""
        limits = [(nbytes, self.own(tier)) for tier, nbytes in held.items()]
        together = (addressable_nbytes(held), self.process)
        return all(limit is None or nbytes <= limit for nbytes, limit in [*limits, together])


def addressable_nbytes(held: Mapping[Tier, int]) -> int:
    """What is held in memory: one memory where the device has none of its own."""
    return sum(nbytes for tier, nbytes in held.items() if tier.addressable)


def within(
    limits: Memory, free: Capacity, *, ranks: int, accelerator: bool, by_budget: bool,
    reserved: Mapping[Tier, int] = {},
) -> Capacity:  # fmt: skip
    """Return the limits of one of a node's `ranks` ranks: what is free, within the configured limits.

    free: bytes that are free for this rank; without an accelerator both memory tiers are its `process`. by_budget:
    whether the plan fills what it is given; where no limit is configured, it then leaves `BUDGET_SHARE` free. reserved:
    free bytes that activations and the process itself will take; they do not reduce a configured limit.
    """
    usual = BUDGET_SHARE if by_budget else None
    gpu, cpu = limits.gpu.max_bytes or usual, limits.cpu.max_bytes or usual
    nvme = _capped(free.nvme, limits.nvme.max_bytes, ranks)
    if accelerator:
        found = Capacity(gpu=_capped(free.gpu, gpu, 1), cpu=_capped(free.cpu, cpu, ranks), nvme=nvme)
    else:
        process = _capped(free.process, cpu, ranks)
        found = Capacity(process=process, nvme=nvme)
        if limits.gpu.max_bytes is not None:
            found = Capacity(gpu=_capped(free.process, gpu, 1), cpu=process, process=free.process, nvme=nvme)
    return found.least(free.left(reserved))


def _capped(free: int | None, limit: int | Share | None, sharers: int) -> int | None:
    """The lesser of what is free for a rank and its part of a limit; None where neither is known."""
    if free is None:
        # A share of an unknown amount is unknown.
        return limit // sharers if isinstance(limit, int) else None
    if limit is None:
        return free
    return min(limit // sharers, free) if isinstance(limit, int) else limit.of(free)


def excesses(table: Mapping[Tier, Mapping[Kind, int]], capacity: Capacity) -> Iterator[str]:
    """For each limit that is exceeded: "plans 118.2 GB on cpu but 96.0 GB are free: exp_avg 51.7 GB, ..."."""
    for tier, kinds in table.items():
        yield from _excess(tier.value, kinds, capacity.own(tier))
    together: dict[Kind, int] = {}
    for tier in (tier for tier in table if tier.addressable):
        for kind, nbytes in table[tier].items():
            together[kind] = together.get(kind, 0) + nbytes
    yield from _excess("device (cpu)", together, capacity.process)


def _excess(where: str, kinds: Mapping[Kind, int], limit: int | None) -> Iterator[str]:
    planned = sum(kinds.values())
    if limit is None or planned <= limit:
        return
    parts = sorted(kinds.items(), key=lambda item: -item[1])
    detail = ", ".join(f"{kind.label} {format_bytes(nbytes)}" for kind, nbytes in parts)
    # Amounts that round to the same figure are told apart by the byte.
    shown = (format_bytes(planned), format_bytes(limit))
    plans, free = shown if shown[0] != shown[1] else (f"{planned:,} bytes", f"{limit:,} bytes")
    yield f"plans {plans} on {where} but {free} are free: {detail}."


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


@dataclass(frozen=True, slots=True)
class Allocator:
    """The bounds of one allocator.

    pooled_nbytes_max: pieces below it stay with the allocator when they are freed, for pieces of the same shapes;
    others go back to the system. pooled_gaps: what pieces below so many bytes take beyond their own, as a share of
    them. free_gaps: what is lost between blocks, as a share of the memory that is free at the start.
    """

    pooled_nbytes_max: int = 0
    pooled_gaps: tuple[tuple[int, float], ...] = ()
    free_gaps: float = 0.0

    def pooled_nbytes(self, pieces: Iterable[int]) -> int:
        """Bytes of those of the pieces that stay with the allocator when they are freed."""
        return sum(nbytes for nbytes in pieces if nbytes < self.pooled_nbytes_max)

    def parts(self, piece: int) -> tuple[int, int]:
        """Bytes that a piece takes, its gap included: of what goes back to the system, and of what stays."""
        share = next((share for below, share in self.pooled_gaps if piece < below), 0.0)
        taken = int((1.0 + share) * piece)
        return (taken, 0) if piece >= self.pooled_nbytes_max else (0, taken)


# The process's memory. Tensors are aligned, and a gap that one left is too small for the next of its size with its
# alignment: gaps of up to 1.3 were seen among small pieces alone. In whole models less is left: 0.3 is a fit to the 46
# cells of benchmarks/results/first_batch_xeon.json, nine models in two precisions; first_batch.json checks it. What is
# freed stays, so that small pieces count at their own busiest moment, and large ones at theirs.
PROCESS = Allocator(pooled_nbytes_max=8 << 20, pooled_gaps=((5 << 18, 0.5), (8 << 20, 0.3)))
ACCELERATOR = Allocator(free_gaps=0.04)
