"""A rehearsal: the steps of a run in simulated time, along the plan's own schedule, sub-groups and arenas.

Three parties work as they do in the engine. The program uses unit after unit, forward and backward: it waits for what
is read, copied and gathered, and computes. Checkpoints that lie on another tier leave behind it in forward and come one
ahead of it in backward, in equal parts. The stepper goes over the sub-groups behind it, reading two ahead, within
the arena's buffers; what it has not stepped yet the program waits for. Gathers and gradients travel beside both.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.plan.activation_bytes import OffloadedCheckpoints
from infinity.plan.layout import SubGroup
from infinity.plan.plan import Plan
from infinity.plan.ready_queue import ReadyQueue
from infinity.plan.stepping import SOON_UNITS, STEP_READS, first_reads
from infinity.plan.types import DTYPE_NBYTES, Kind, Tier
from infinity.simulator.resources import Job, Process, Resource, ResourceQueues
from infinity.simulator.traffic import kept_nbytes, landings, nvme_specs, states_that_move, uses

# Steps until the arenas hold what they hold in a long run; the one after them counts.
_WARM_STEPS = 1


@dataclass(frozen=True)
class Speeds:
    """What a rank's work takes, in seconds and bytes a second."""

    rates: Mapping[Resource, float]
    # Of reads, and of writes, while both go on.
    mixed_rates: tuple[float, float]
    # Of one micro-batch, by unit: forward, and backward, over all its uses.
    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]
    # A byte copied within CPU memory; a parameter stepped, on the CPU and on the accelerator; a parameter's norm.
    copy_seconds: float
    adam_seconds: float
    device_adam_seconds: float
    norm_seconds: float
    # Of the host, for each sub-group that is stepped and each unit that is used.
    group_seconds: float = 0.0
    use_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One warm step: its seconds, the work that each lane was given (seconds or bytes), and the drive's bytes."""

    seconds: float
    work: Mapping[Resource, float]
    read_nbytes: int
    written_nbytes: int


def rehearse(
    plan: Plan, speeds: Speeds, *, accumulation: int, offloaded: OffloadedCheckpoints | None = None
) -> Rehearsed:
    """Run a few steps in simulated time and report the last."""
    return _Simulation(plan, speeds, accumulation, offloaded).run()


class _Arena:
    """An arena's buffers: being read, in use, being written or clean; the least recently used clean one goes first."""

    def __init__(self, lanes: ResourceQueues, nbytes: int) -> None:
        self._resources = lanes
        self._room = nbytes
        # Index -> bytes, and the transfer of the buffer in flight, if any.
        self._held: OrderedDict[int, tuple[int, Job | None]] = OrderedDict()
        # Fetched ahead or in use: nobody else's to give up.
        self.pinned: set[int] = set()
        self.read_nbytes = self.written_nbytes = 0

    def __contains__(self, index: int) -> bool:
        return index in self._held

    def fetch(self, index: int, nbytes: int, *, wait: bool) -> Process:
        """Bring one into memory. Without `wait` it is only submitted, if there is room now."""
        while index not in self._held and self._room < nbytes:
            spare = [other for other in self._held if other not in self.pinned]
            clean = next((other for other in spare if _idle(self._held[other][1])), None)
            if clean is not None:
                self._room += self._held.pop(clean)[0]
            elif not wait:
                return
            elif not spare:
                # The store waits for the other party's leases; the rehearsal lets this one through.
                break
            else:
                job = self._held[spare[0]][1]
                assert job is not None
                yield job
        if index not in self._held:
            self._room -= nbytes
            self.read_nbytes += nbytes
            self._held[index] = nbytes, self._resources.submit(Resource.READ, nbytes)
        self._held.move_to_end(index)
        self.pinned.add(index)
        job = self._held[index][1]
        if wait and job is not None and job.resource is Resource.READ:
            yield job

    def write(self, index: int) -> Job:
        """Submit the write-back."""
        nbytes = self._held[index][0]
        self.written_nbytes += nbytes
        job = self._resources.submit(Resource.WRITE, nbytes)
        self._held[index] = nbytes, job
        self.pinned.discard(index)
        return job


class _Checkpoints:
    """Inputs of recomputed blocks on another tier, in as many parts as a pass has uses."""

    def __init__(self, lanes: ResourceQueues, plan: Plan, speeds: Speeds, offloaded: OffloadedCheckpoints) -> None:
        self._resources, self._accelerator, self._copy_seconds = lanes, plan.request.accelerator, speeds.copy_seconds
        self._on_drive = offloaded.tier is Tier.NVME
        self._nbytes = offloaded.nbytes / max(len(plan.schedule) // 2, 1)
        self._room = max(offloaded.buffers * offloaded.each_nbytes, self._nbytes)
        # On their way from the device, as parts; and in staging until they are on the drive, in bytes.
        self._copies = 0
        self._leaving = 0.0
        # Parts that were asked for in backward, the next one to be used first, and whether they are there.
        self._coming: deque[list[bool]] = deque()
        self.read_nbytes = self.written_nbytes = 0.0

    def put(self, *, overlap: bool) -> Process:
        """A part leaves; the program waits for staging at most, or for all of it without overlap."""
        yield lambda: not self._on_drive or self._leaving + self._nbytes <= self._room
        self._leaving += self._nbytes
        if overlap:
            self._resources.begin(self._leave())
        else:
            yield from self._leave()

    def get(self, *, more: bool) -> Process:
        """The next part is waited for, and the one after it asked for, if there is one."""
        if not self._coming:
            self._ask()
        flag = self._coming.popleft()
        yield lambda: flag[0]
        if more:
            self._ask()

    def _ask(self) -> None:
        flag = [False]
        self._coming.append(flag)
        self._resources.begin(self._come(flag))

    def _leave(self) -> Process:
        self._copies += 1
        yield self._between(Resource.DOWN)
        self._copies -= 1
        if self._on_drive:
            self.written_nbytes += self._nbytes
            yield self._resources.submit(Resource.WRITE, self._nbytes)
        self._leaving -= self._nbytes

    def _come(self, flag: list[bool]) -> Process:
        # Backward begins with what left last.
        yield lambda: not self._copies
        if self._on_drive:
            self.read_nbytes += self._nbytes
            yield self._resources.submit(Resource.READ, self._nbytes)
        yield self._between(Resource.UP)
        flag[0] = True

    def _between(self, link: Resource) -> Job:
        """Between the device and CPU memory."""
        if self._accelerator:
            return self._resources.submit(link, self._nbytes)
        return self._resources.submit(Resource.CORES, self._nbytes * self._copy_seconds)


class _Simulation:
    def __init__(
        self, plan: Plan, speeds: Speeds, accumulation: int, offloaded: OffloadedCheckpoints | None
    ) -> None:
        self._plan, self._speeds = plan, speeds
        self._accumulation, self._overlap = accumulation, plan.policy.overlap
        self._steps = plan.step_parts()
        self._early = bool(self._steps.in_backward)
        self._uses = [*uses(plan)]
        counts: dict[int, int] = {}
        for unit in plan.schedule.trace:
            counts[unit] = counts.get(unit, 0) + 1
        self._share = {unit: 1 / max(count // 2, 1) for unit, count in counts.items()}
        self._last = {unit: at for at, unit in enumerate(plan.schedule.trace)}
        self._resources = ResourceQueues(speeds.rates, speeds.mixed_rates)
        self._compute_resource = Resource.ACCELERATOR if plan.request.accelerator else Resource.CORES
        self._params, self._states = nvme_specs(plan, Kind.PARAM), states_that_move(plan)
        self._param_arena = _Arena(self._resources, plan.pools.param_nbytes)
        self._hidden = self._steps.hidden
        self._kept = plan.kept()
        self._state_arena = _Arena(self._resources, plan.pools.states_nbytes - kept_nbytes(plan))
        self._checkpoints = None if offloaded is None else _Checkpoints(self._resources, plan, speeds, offloaded)
        # Sub-groups that still have to step each unit, once they are handed over.
        self._left: dict[int, int] = {}
        # What the stepper has to do: gradients (numbers of elements) to take the norm of, and sub-groups to step.
        self._norms: deque[int] = deque()
        # Units whose gradients are still to come before the next step.
        self._expected: set[int] = set()
        self._ready_queue = ReadyQueue[None](self._hidden, fetch=self._fetch_now, in_memory=self._in_memory)
        self._stepping = False
        self._gathered: dict[int, bool] = {}
        self._flying: list[bool] = []
        self._marks: list[tuple[float, dict[Resource, float], int, int]] = []
        self._landing = landings(plan, self._steps.in_backward)

    def run(self) -> Rehearsed:
        self._resources.begin(self._program())
        self._resources.begin(self._stepper())
        self._resources.run(lambda: len(self._marks) > _WARM_STEPS + 1)
        (began, work_before, read_before, written_before), (ended, work, read, written) = self._marks[-2:]
        return Rehearsed(
            seconds=ended - began, work={lane: work[lane] - work_before[lane] for lane in Resource},
            read_nbytes=read - read_before, written_nbytes=written - written_before,
        )  # fmt: skip

    def _mark(self) -> None:
        arenas = [self._param_arena, self._state_arena, *([self._checkpoints] if self._checkpoints else [])]
        read, written = (
            int(sum(getattr(arena, name) for arena in arenas)) for name in ("read_nbytes", "written_nbytes")
        )
        self._marks.append((self._resources.now, dict(self._resources.work), read, written))

    # The program.

    def _program(self) -> Process:
        while True:
            self._mark()
            for batch in range(self._accumulation):
                yield from self._pass(final=batch == self._accumulation - 1)
            yield from self._boundary()

    def _pass(self, *, final: bool) -> Process:
        schedule, half = self._plan.schedule, len(self._plan.schedule) // 2
        ahead = self._plan.policy.gather_ahead
        for at, unit, gathered in self._uses:
            if gathered and unit not in self._gathered:
                self._start(unit)
            if self._overlap:
                for other in schedule.gather_ahead[at]:
                    if ahead and other not in self._gathered:
                        self._start(other)
                for other in (*schedule.gather_ahead[at], *schedule.fetch_ahead[at]):
                    if other in self._params and not self._left.get(other):
                        yield from self._param_arena.fetch(other, self._params[other].nbytes, wait=False)
            if gathered:
                yield lambda unit=unit: self._gathered[unit]  # type: ignore[misc]
            if self._checkpoints is not None and at >= half:
                yield from self._checkpoints.get(more=self._overlap and at + 1 < len(schedule))
            seconds = (self._speeds.forward_seconds if at < half else self._speeds.backward_seconds)[unit]
            yield self._resources.submit(self._compute_resource, seconds * self._share[unit] + self._speeds.use_seconds)
            if self._checkpoints is not None and at < half:
                yield from self._checkpoints.put(overlap=self._overlap)
            if at == self._last[unit] and self._plan.layouts[unit].trainable:
                yield from self._gradient(unit, at, final=final)
            if schedule.uses[at].needed and not schedule.keep[at]:
                self._gathered.pop(unit, None)

    def _start(self, unit: int) -> None:
        self._gathered[unit] = False
        self._resources.begin(self._gather(unit))

    def _gather(self, unit: int) -> Process:
        placed, layout = self._plan.placement.units[unit], self._plan.layouts[unit]
        own = layout.nbytes // placed.parts
        yield lambda: not self._left.get(unit)
        if unit in self._params:
            yield from self._param_arena.fetch(unit, self._params[unit].nbytes, wait=True)
        if not self._plan.request.accelerator:
            yield from self._host(own * self._speeds.copy_seconds)
        elif placed.param is not Tier.GPU:
            yield self._resources.submit(Resource.UP, own)
        self._param_arena.pinned.discard(unit)
        if placed.parts > 1:
            yield self._resources.submit(Resource.NETWORK, own * (placed.parts - 1))
        self._gathered[unit] = True

    def _gradient(self, unit: int, at: int, *, final: bool) -> Process:
        """A unit's gradients go into its partition: at once, or over the ranks beside what comes next."""
        yield lambda: not self._flying
        ranks, request = self._plan.topology.dp, self._plan.request
        placed, layout = self._plan.placement.units[unit], self._plan.layouts[unit]
        kept = layout.numel // placed.parts
        whole = layout.numel * DTYPE_NBYTES[request.communication_dtype] * (ranks - 1) / ranks

        def travel() -> Process:
            if ranks > 1 and not self._plan.placement.grad_whole:
                yield self._resources.submit(Resource.NETWORK, whole)
            if not request.accelerator:
                yield from self._host(kept * DTYPE_NBYTES[request.grad_dtype] * self._speeds.copy_seconds)
            elif placed.grad is not Tier.GPU:
                yield self._resources.submit(Resource.DOWN, kept * DTYPE_NBYTES[request.grad_dtype])
            self._flying.clear()
            if not final:
                return
            if self._early:
                yield from self._host(kept * self._speeds.norm_seconds)
                self._hand_over(self._landing.get(at, ()))
            elif self._plan.policy.step_behind:
                self._read_ahead(unit)
                self._norms.append(kept)

        if ranks > 1 or request.accelerator:
            self._flying.append(True)
            self._resources.begin(travel())
        else:
            yield from travel()

    def _read_ahead(self, unit: int) -> None:
        if not self._overlap:
            return
        self._expected = self._expected or {piece.unit for group in self._hidden for piece in group.slices}
        self._expected.discard(unit)
        if len(self._expected) == SOON_UNITS:
            for group in first_reads(self._hidden, self._in_memory):
                self._fetch_now(group)

    def _boundary(self) -> Process:
        """`step()`: the norm, what the program sees, and then the rest is left to the stepper."""
        yield lambda: not self._flying
        request, placement = self._plan.request, self._plan.placement
        trained = [layout for layout in self._plan.layouts if layout.trainable]
        kept = sum(layout.numel // placement.units[layout.index].parts for layout in trained)
        if placement.grad_whole:
            yield self._resources.submit(
                Resource.NETWORK, sum(layout.numel for layout in trained) * DTYPE_NBYTES[request.communication_dtype]
            )
        if not self._early:
            yield lambda: not self._norms and not self._stepping
        if not self._plan.policy.step_behind:
            yield from self._host(kept * self._speeds.norm_seconds)
        for group in self._steps.visible:
            yield from self._step(group)
        whole = [layout for layout in trained if placement.units[layout.index].whole]
        yield from self._host(sum(layout.nbytes for layout in whole) * self._speeds.copy_seconds)
        self._hand_over(self._steps.after_backward)
        self._expected.clear()
        self._gathered.clear()

    # The stepper.

    def _hand_over(self, groups: Sequence[SubGroup]) -> None:
        for group in groups:
            for piece in group.slices:
                self._left[piece.unit] = self._left.get(piece.unit, 0) + 1
        self._ready_queue.add(groups, None)
        self._look_ahead(1)

    def _stepper(self) -> Process:
        while True:
            yield lambda: bool(self._norms or self._ready_queue)
            self._stepping = True
            if self._norms:
                yield from self._host(self._norms.popleft() * self._speeds.norm_seconds)
            else:
                group, _ = self._ready_queue.take()
                yield from self._step(group)
                for piece in group.slices:
                    self._left[piece.unit] -= 1
            self._stepping = False

    def _look_ahead(self, count: int) -> None:
        if self._overlap:
            self._ready_queue.fetch(count)

    def _step(self, group: SubGroup) -> Process:
        yield from self._fetch(group, wait=True)
        self._look_ahead(STEP_READS)
        accelerator = self._plan.request.accelerator
        if accelerator and self._plan.placement.states[group.index] is Tier.GPU:
            yield self._resources.submit(Resource.ACCELERATOR, group.numel * self._speeds.device_adam_seconds)
        else:
            yield from self._host(group.numel * self._speeds.adam_seconds + self._speeds.group_seconds)
        jobs = [self._state_arena.write(group.index)] if group.index in self._states else []
        for piece in group.slices:
            placed = self._plan.placement.units[piece.unit]
            ends = piece.start + piece.numel >= self._plan.layouts[piece.unit].partition_numel(placed.parts)
            if piece.unit in self._params and ends:
                jobs.append(self._param_arena.write(piece.unit))
        if not self._overlap:
            yield from jobs

    def _fetch(self, group: SubGroup, *, wait: bool) -> Process:
        if group.index in self._states:
            yield from self._state_arena.fetch(group.index, self._states[group.index].nbytes, wait=wait)
        for piece in group.slices:
            if piece.unit in self._params:
                yield from self._param_arena.fetch(piece.unit, self._params[piece.unit].nbytes, wait=wait)

    def _fetch_now(self, group: SubGroup) -> bool:
        for _ in self._fetch(group, wait=False):
            raise AssertionError("what does not wait has waited")
        return group.index not in self._states or group.index in self._state_arena

    def _in_memory(self, group: SubGroup) -> bool:
        states = group.index in self._kept or group.index in self._state_arena
        units = {piece.unit for piece in group.slices}
        return states and all(unit in self._param_arena for unit in units & self._params.keys())

    def _host(self, seconds: float) -> Process:
        if seconds > 0:
            yield self._resources.submit(Resource.CORES, seconds)


def _idle(job: Job | None) -> bool:
    return job is None or job.done
