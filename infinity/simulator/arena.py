"""Arenas of the simulator: which buffers are filled, by the order in which the store gives them up."""

from __future__ import annotations

from infinity.plan.eviction_order import EvictionOrder
from infinity.plan.types import PartitionSpec
from infinity.simulator.resources import Job, Process, Resource, ResourceQueues


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
        while index not in self._held and self._room < nbytes:
            spare = [other for other in self._order if other not in self._claimed]
            clean = next((other for other in spare if self._held[other][1].done), None)
            if clean is not None:
                self._order.remove(clean)
                self._room += self._held.pop(clean)[0].nbytes
            elif not wait:
                return
            elif not spare:
                # The store would wait for leases of the other party here; the simulation takes more room.
                break
            else:
                yield self._held[spare[0]][1]
        if index not in self._held:
            self._room -= nbytes
            self.read_nbytes += nbytes
            self._held[index] = spec, self._resources.submit(Resource.READ, nbytes, spec.home)
        self._order.use(index)
        self._claimed.add(index)
        job = self._held[index][1]
        if wait and job.queue_key[0] is Resource.READ:
            yield job

    def release(self, index: int) -> None:
        """Give a claim back."""
        self._claimed.discard(index)

    def write(self, index: int) -> Job:
        """Submit the write-back of a buffer and give its claim back."""
        spec, _ = self._held[index]
        self.written_nbytes += spec.nbytes
        job = self._resources.submit(Resource.WRITE, spec.nbytes, spec.home)
        self._held[index] = spec, job
        self.release(index)
        return job
