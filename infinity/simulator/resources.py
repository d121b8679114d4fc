"""Lanes: what a step's work takes turns on, in simulated time. Cores, an accelerator, a drive's two ways, links.

A job is work on one lane. Jobs of a drive or a link are served one after the other, what somebody waits for first; jobs
of the cores share them. Reads and writes that meet on the drive go at its mixed rates. Processes are
generators: each yields what it waits for, a job or a condition.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Resource(Enum):
    """Where work is done."""

    # The rank's share of the node's cores.
    CORES = "cores"
    ACCELERATOR = "accelerator"
    READ = "NVMe read"
    WRITE = "NVMe written"
    UP = "CPU to accelerator"
    DOWN = "accelerator to CPU"
    NETWORK = "network"

    __hash__ = object.__hash__


_OTHER_WAY = {Resource.READ: Resource.WRITE, Resource.WRITE: Resource.READ}


@dataclass(eq=False, slots=True)
class Job:
    """`work` in seconds on cores and accelerators, in bytes on drives and links."""

    resource: Resource
    work: float
    urgent: bool = False
    done: bool = False


Waiting = Job | Callable[[], bool]
Process = Generator[Waiting, None, None]


@dataclass(slots=True)
class ResourceQueues:
    """Simulated time. `rates`: bytes a second of drives and links; `mixed_rates`: of reads, and writes, that meet."""

    rates: Mapping[Resource, float]
    mixed_rates: tuple[float, float]
    now: float = 0.0
    # What each lane was given so far.
    work: dict[Resource, float] = field(default_factory=lambda: dict.fromkeys(Resource, 0.0))
    _queues: dict[Resource, list[Job]] = field(default_factory=lambda: {lane: [] for lane in Resource})
    _processes: list[tuple[Process, Waiting | None]] = field(default_factory=list)

    def submit(self, lane: Resource, work: float) -> Job:
        """Queue work; a lane without a rate limit does it at once."""
        job = Job(lane, work)
        self.work[lane] += work
        if work <= 0 or self.rates.get(lane, 1.0) == float("inf"):
            job.done = True
        else:
            self._queues[lane].append(job)
        return job

    def begin(self, process: Process) -> None:
        """Start a process; it runs at the next step of the clock."""
        self._processes.append((process, None))

    def run(self, until: Callable[[], bool]) -> None:
        """Let time go on until a condition holds; RuntimeError where everybody waits for nothing."""
        while True:
            self._wake()
            if until():
                return
            if not any(self._queues.values()):
                raise RuntimeError("every process of the simulated step waits, and nothing is under way")
            self._advance()

    def _wake(self) -> None:
        woken = True
        while woken:
            woken = False
            processes, self._processes = self._processes, []
            for entry in processes:
                process, waiting = entry
                # Most of a rehearsal's time is spent here.
                if waiting is not None and not (waiting.done if isinstance(waiting, Job) else waiting()):
                    self._processes.append(entry)
                    continue
                woken = True
                following = next(process, None)
                if following is not None:
                    if isinstance(following, Job):
                        following.urgent = True
                    self._processes.append((process, following))

    def _advance(self) -> None:
        """Go on to the end of the next job."""
        active: list[tuple[Job, float]] = []
        for lane, queue in self._queues.items():
            if not queue:
                continue
            if lane is Resource.CORES:
                active += [(job, 1.0 / len(queue)) for job in queue]
            else:
                first = queue[0]
                job = first if first.urgent else next((job for job in queue if job.urgent), first)
                active.append((job, self._rate(lane)))
        seconds = min([job.work / rate for job, rate in active])
        self.now += seconds
        for job, rate in active:
            job.work -= rate * seconds
            if job.work <= 1e-9 * rate:
                job.done = True
                self._queues[job.resource].remove(job)

    def _rate(self, lane: Resource) -> float:
        if lane is Resource.ACCELERATOR:
            return 1.0
        rate = self.rates[lane]
        other = _OTHER_WAY.get(lane)
        if other is None or not self._queues[other]:
            return rate
        return min(rate, self.mixed_rates[lane is Resource.WRITE])
