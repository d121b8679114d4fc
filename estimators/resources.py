"""The resources of a simulated step: cores, an accelerator, the two directions of a drive, links.

A job is work on one resource; each tier of drives has a queue of reads and one of writes. A drive or a link serves one
job at a time, urgent ones first; jobs on the cores share them. Reads and writes that meet on a tier's drives go at its
mixed rates. A process is a generator that yields what it waits for: a job or a condition.

Arenas of the simulator: which buffers are filled, by the order in which the store gives them up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from infinity.plan.orders import EvictionOrder
from infinity.plan.types import PartitionSpec, Tier


class Resource(Enum):
    """What does a simulated job."""

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
# What has a queue of jobs: a resource, and which tier's it is, of drives.
QueueKey = tuple[Resource, Tier | None]


@dataclass(eq=False, slots=True)
class Job:
    """`work` in seconds on cores and accelerators, in bytes on drives and links."""

    queue_key: QueueKey
    work: float
    urgent: bool = False
    done: bool = False

    def begin(self, *, free: bool) -> None:
        """Enter a queue; what is free is done at once."""
        self.done = free or self.work <= 0

    def hurry(self) -> None:
        """A process waits for the job: it is served before those that no process waits for."""
        self.urgent = True

    def advance(self, seconds: float, rate: float) -> bool:
        """Do `seconds` of work at `rate`; whether the job is done."""
        self.work -= rate * seconds
        self.done = self.work <= 1e-9 * rate
        return self.done


@dataclass(eq=False, slots=True)
class Flag:
    """Something that is done now or not: cheaper to ask than a function."""

    done: bool = True

    def turn(self, *, done: bool) -> None:
        """It is done by now, or is to be done again."""
        self.done = done


Waiting = Job | Flag | Callable[[], bool]
Process = Generator[Waiting, None, None]


@dataclass(slots=True)
class ResourceQueues:
    """Jobs by queue, and the clock. `rates`: bytes a second of drives and links; `mixed_rates`: of reads, and of
    writes, while both go on.
    """

    rates: Mapping[QueueKey, float]
    mixed_rates: Mapping[QueueKey, float]
    now: float = 0.0
    # All work that each queue was given.
    work: defaultdict[QueueKey, float] = field(default_factory=lambda: defaultdict(float))
    _queues: defaultdict[QueueKey, list[Job]] = field(default_factory=lambda: defaultdict(list))
    _processes: list[tuple[Process, Waiting | None]] = field(default_factory=list)

    def submit(self, resource: Resource, work: float, tier: Tier | None = None) -> Job:
        """Queue work, on a drive for its `tier`; a resource without a rate limit does it at once."""
        key = resource, tier
        job = Job(key, work)
        self.work[key] += work
        job.begin(free=self.rates.get(key, 1.0) == float("inf"))
        if not job.done:
            self._queues[key].append(job)
        return job

    @property
    def writes(self) -> bool:
        """Whether drives still have to write."""
        return any(queue for key, queue in self._queues.items() if key[0] is Resource.WRITE)

    def host(self, seconds: float) -> Process:
        """Work of the cores; none where there are no seconds."""
        if seconds > 0:
            yield self.submit(Resource.CORES, seconds)

    def begin(self, process: Process) -> None:
        """Start a process; it runs at the next step of the clock."""
        self._processes.append((process, None))

    def run(self, until: Callable[[], bool]) -> None:
        """Advance the clock until a condition holds. Raises RuntimeError if all processes wait and no job is queued."""
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
            waits = self._processes.append
            for entry in processes:
                process, waiting = entry
                # Most of a simulation's time is spent here.
                if waiting is not None and not (waiting() if callable(waiting) else waiting.done):
                    waits(entry)
                    continue
                woken = True
                following = next(process, None)
                if following is not None:
                    if isinstance(following, Job):
                        following.hurry()
                    self._processes.append((process, following))

    def _advance(self) -> None:
        """Advance the clock to the end of the next job."""
        active: list[tuple[Job, float]] = []
        for key, queue in self._queues.items():
            if not queue:
                continue
            if key[0] is Resource.CORES:
                active += [(job, 1.0 / len(queue)) for job in queue]
            else:
                first = queue[0]
                job = first if first.urgent else next((job for job in queue if job.urgent), first)
                active.append((job, self._rate(key)))
        seconds = min([job.work / rate for job, rate in active])
        self.now += seconds
        for job, rate in active:
            if job.advance(seconds, rate):
                self._queues[job.queue_key].remove(job)

    def _rate(self, key: QueueKey) -> float:
        resource, tier = key
        if resource is Resource.ACCELERATOR:
            return 1.0
        rate = self.rates[key]
        other = _OTHER_WAY.get(resource)
        if other is None or not self._queues.get((other, tier)):
            return rate
        return min(rate, self.mixed_rates[key])


class Cache:
    """An arena without time: every transfer is over at once."""

    def __init__(self, nbytes: int) -> None:
        self._room = nbytes
        self._nbytes: dict[int, int] = {}
        self._order = EvictionOrder[int]()

    def __contains__(self, index: int) -> bool:
        return index in self._order

    def use(self, index: int, nbytes: int) -> bool:
        """Use a buffer. Returns whether it was filled."""
        found = index in self._order
        self._order.use(index)
        if not found:
            self._room -= nbytes
            self._nbytes[index] = nbytes
            while self._room < 0 and len(self._order) > 1:
                oldest = next(iter(self._order))
                self._order.remove(oldest)
                self._room += self._nbytes.pop(oldest)
        return found


class TimedArena:
    """An arena whose reads and writes take their time on the drive."""

    def __init__(self, resources: ResourceQueues, nbytes: int) -> None:
        self._resources = resources
        self._room = nbytes
        # By index: the partition, and the latest transfer of its buffer.
        self._held: dict[int, tuple[PartitionSpec, Job]] = {}
        self._order = EvictionOrder[int]()
        # Prefetched or in use: never given up.
        self._claimed: set[int] = set()
        self.read_nbytes = self.written_nbytes = 0

    def __contains__(self, index: int) -> bool:
        return index in self._held

    def fetch(self, spec: PartitionSpec, *, wait: bool) -> Process:
        """Bring a partition into memory and claim it. Without `wait`, only submit the read, if there is room now."""
        index, nbytes = spec.key.index, spec.nbytes
        if index not in self._held:
            yield from self._make_room(nbytes, wait=wait)
        if index not in self._held:
            if self._room < nbytes and not wait:
                return
            self._room -= nbytes
            self.read_nbytes += nbytes
            self._held[index] = spec, self._resources.submit(Resource.READ, nbytes, spec.home)
        self._order.use(index)
        self._claimed.add(index)
        job = self._held[index][1]
        if wait and job.queue_key[0] is Resource.READ:
            yield job

    def put(self, spec: PartitionSpec) -> Process:
        """Write a value that comes from elsewhere, in place of the one before."""
        index = spec.key.index
        if index not in self._held:
            yield from self._make_room(spec.nbytes, wait=True)
        if index not in self._held:
            self._room -= spec.nbytes
            self._held[index] = spec, Job((Resource.WRITE, spec.home), 0.0, done=True)
        self._order.use(index)
        self.write(spec)

    def _make_room(self, nbytes: int, *, wait: bool) -> Process:
        """Give up buffers until there is room; without `wait`, only those that are free now."""
        while self._room < nbytes:
            spare = [other for other in self._order if other not in self._claimed]
            clean = next((other for other in spare if self._held[other][1].done), None)
            if clean is not None:
                self._order.remove(clean)
                self._room += self._held.pop(clean)[0].nbytes
            elif not wait or not spare:
                # The store would wait for leases of the other party here; the simulation takes more room.
                return
            else:
                yield self._held[spare[0]][1]

    def release(self, index: int) -> None:
        """Give a claim back."""
        self._claimed.discard(index)

    def write(self, spec: PartitionSpec) -> Job:
        """Submit the write-back of a buffer and give its claim back."""
        index = spec.key.index
        if index not in self._held:
            # A gather beside the step gave the claim of both back; in the store each has a lease of its own.
            self._room -= spec.nbytes
            self._order.use(index)
        self.written_nbytes += spec.nbytes
        job = self._resources.submit(Resource.WRITE, spec.nbytes, spec.home)
        self._held[index] = spec, job
        self.release(index)
        return job
