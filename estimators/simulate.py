"""Simulate the steps of a run, along the plan's own schedule, sub-groups and arenas.

Three parties work as they do in the engine. The program uses unit after unit, forward and backward: it waits for reads,
copies and gathers, and computes. Activation checkpoints on another tier leave in forward and come back one ahead of
their use in backward, in equal parts. The optimizer steps the sub-groups behind the program and reads two ahead, within
the arenas; the program waits for a unit that is not stepped yet. Gathers and gradients travel beside both.

Coarsen a plan for the simulator: merge neighbours with the same homes, so that a simulation is short.

Bytes, homes and order stay. Reads, steps and gathers interleave less finely, which hundreds of units do not need.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from estimators.resources import Flag, Job, Process, QueueKey, Resource, ResourceQueues, TimedArena
from estimators.traffic import copied_specs, kept_nbytes, landings, nvme_specs, old_nbytes, states_that_move, uses
from infinity.plan.activations import OffloadedCheckpoints
from infinity.plan.layout import Slice, SubGroup
from infinity.plan.orders import ReadyQueue
from infinity.plan.partitions import SOON_UNITS, STEP_READS, STEP_WINDOW, first_reads
from infinity.plan.plan import Plan
from infinity.plan.prefetch import FetchSchedule, UnitAccess
from infinity.plan.types import DTYPE_NBYTES, ArraySection, Extent, Key, Kind, PartitionSpec, Tier

# Steps until the arenas hold what they hold in a long run; the one after them counts.
_WARM_STEPS = 1
# Micro-batches after which those that follow are taken to be like the latest ones, and how many those are.
_PASSES_MAX, _LATEST = 8, 4
# Two that differ by less are the same.
_SAME = 1e-6


@dataclass(frozen=True)
class Speeds:
    """How fast one rank works."""

    # Bytes a second of drives and links.
    rates: Mapping[QueueKey, float]
    # Bytes a second of reads, and of writes, while both go on.
    mixed_rates: Mapping[QueueKey, float]
    # By unit, for all its uses in one micro-batch.
    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]
    # To copy a byte within CPU memory; to step a parameter, on the CPU and on the accelerator; to take its norm.
    copy_seconds: float
    adam_seconds: float
    device_adam_seconds: float
    norm_seconds: float
    # Products that make matrices orthogonal, an element of all that is stepped.
    matrix_seconds: float = 0.0
    # Host time to step a sub-group, and to use a unit.
    group_seconds: float = 0.0
    use_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One warm step: its seconds, the work of each queue (seconds or bytes), and the drives' bytes."""

    seconds: float
    work: Mapping[QueueKey, float]
    read_nbytes: int
    written_nbytes: int


def simulate_step(
    plan: Plan, speeds: Speeds, *, accumulation: int, offloaded: OffloadedCheckpoints | None = None
) -> SimulatedStep:
    """Simulate a few steps and report the last.

    accumulation: micro-batches a step. offloaded: activation checkpoints on another tier.
    """
    return _Simulation(plan, speeds, accumulation, offloaded).run()


@dataclass(frozen=True)
class _Account:
    """Seconds, the work of each queue, and the drives' bytes, up to some moment or in some span."""

    seconds: float
    work: Mapping[QueueKey, float]
    read_nbytes: float
    written_nbytes: float

    def plus(self, other: _Account, times: float = 1.0) -> _Account:
        """With so many times another."""
        keys = self.work.keys() | other.work.keys()
        return _Account(
            self.seconds + times * other.seconds,
            {key: self.work.get(key, 0.0) + times * other.work.get(key, 0.0) for key in keys},
            self.read_nbytes + times * other.read_nbytes, self.written_nbytes + times * other.written_nbytes,
        )  # fmt: skip

    def is_like(self, other: _Account) -> bool:
        """Whether it took as long and moved as much."""
        pairs = [(self.seconds, other.seconds), (self.read_nbytes, other.read_nbytes)]
        return all(abs(mine - theirs) <= _SAME * max(mine, theirs) for mine, theirs in pairs)


class _Arenas:
    """What of the optimizer states, the parameters and the gradients on NVMe is in memory."""

    def __init__(self, plan: Plan, resources: ResourceQueues) -> None:
        self._plan, self._resources = plan, resources
        self._params, self._states = nvme_specs(plan, Kind.PARAM), states_that_move(plan)
        self._grads = nvme_specs(plan, Kind.GRAD)
        self._kept = plan.kept()
        self._grad_arena = TimedArena(resources, plan.pools.grad_nbytes)
        self._param_arena = TimedArena(resources, plan.pools.param_nbytes)
        self._state_arena = TimedArena(resources, plan.pools.states_nbytes - kept_nbytes(plan))
        # What a record behind a step writes of the values in memory, and of those on the accelerator; and the bytes so
        # far.
        copied = copied_specs(plan)
        self._copied_nbytes = sum(spec.nbytes for spec in copied)
        self._down_nbytes = sum(spec.nbytes for spec in copied if plan.request.accelerator and spec.home.on_device)
        self._recorded_nbytes = 0

    @property
    def read_nbytes(self) -> int:
        """Bytes read from NVMe so far."""
        return sum(arena.read_nbytes for arena in (self._param_arena, self._state_arena, self._grad_arena))

    @property
    def written_nbytes(self) -> int:
        """Bytes written to NVMe so far."""
        arenas = self._param_arena, self._state_arena, self._grad_arena
        return sum(arena.written_nbytes for arena in arenas) + self._recorded_nbytes

    def fetch_param(self, unit: int, *, wait: bool) -> Process:
        """Bring a unit's partition into memory, where its home is NVMe."""
        if unit in self._params:
            yield from self._param_arena.fetch(self._params[unit], wait=wait)

    def release_param(self, unit: int) -> None:
        """The partition has been copied to the whole unit."""
        self._param_arena.release(unit)

    def add_grad(self, unit: int, *, first: bool) -> Process:
        """Put a unit's gradients in place of what was there, or add them to it, where their home is NVMe."""
        if unit in self._grads:
            if not first:
                yield from self._grad_arena.fetch(self._grads[unit], wait=True)
            yield from self._grad_arena.put(self._grads[unit])

    def fetch(self, group: SubGroup) -> Process:
        """Bring what a sub-group's step needs into memory."""
        return self._fetch(group, wait=True, complete=True)

    def fetch_now(self, group: SubGroup, *, complete: bool = True) -> bool:
        """Submit the reads of a sub-group as far as there is room. Returns whether its states are there or coming.
        complete: whether its gradients are.
        """
        for _ in self._fetch(group, wait=False, complete=complete):
            raise AssertionError("what does not wait has waited")
        return group.index not in self._states or group.index in self._state_arena

    def in_memory(self, group: SubGroup) -> bool:
        """Whether a sub-group can be stepped without a read."""
        states = group.index in self._kept or group.index in self._state_arena
        units = {piece.unit for piece in group.slices}
        return states and all(unit in self._param_arena for unit in units & self._params.keys())

    def write(self, group: SubGroup) -> list[Job]:
        """Submit the write-back of what a sub-group's step has changed; of a unit's partition, with its last slice."""
        for piece in group.slices:
            self._grad_arena.release(piece.unit)
        jobs = [self._state_arena.write(self._states[group.index])] if group.index in self._states else []
        ends = (piece.unit for piece in group.slices if self._plan.ends_partition(piece))
        return jobs + [self._param_arena.write(self._params[unit]) for unit in ends if unit in self._params]

    def record(self) -> Process:
        """Copy the values in memory to the drive, behind a step (`checkpoint.every_step`)."""
        if self._down_nbytes:
            yield self._resources.submit(Resource.DOWN, self._down_nbytes)
        if self._copied_nbytes:
            self._recorded_nbytes += self._copied_nbytes
            yield self._resources.submit(Resource.WRITE, self._copied_nbytes, Tier.NVME)

    def _fetch(self, group: SubGroup, *, wait: bool, complete: bool) -> Process:
        if group.index in self._states:
            yield from self._state_arena.fetch(self._states[group.index], wait=wait)
        for piece in group.slices:
            yield from self.fetch_param(piece.unit, wait=wait)
        for piece in group.slices:
            if complete and piece.unit in self._grads:
                yield from self._grad_arena.fetch(self._grads[piece.unit], wait=wait)


class _Checkpoints:
    """Inputs of recomputed blocks on another tier, in as many parts as a pass has uses."""

    def __init__(self, resources: ResourceQueues, plan: Plan, speeds: Speeds, offloaded: OffloadedCheckpoints) -> None:
        self._resources, self._copy_seconds = resources, speeds.copy_seconds
        self._accelerator = plan.request.accelerator
        self._tier = offloaded.tier
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
        yield lambda: not self._tier.on_drive or self._leaving + self._nbytes <= self._room
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
        if self._tier.on_drive:
            self.written_nbytes += self._nbytes
            yield self._resources.submit(Resource.WRITE, self._nbytes, self._tier)
        self._leaving -= self._nbytes

    def _come(self, flag: list[bool]) -> Process:
        # Backward begins with what left last.
        yield lambda: not self._copies
        if self._tier.on_drive:
            self.read_nbytes += self._nbytes
            yield self._resources.submit(Resource.READ, self._nbytes, self._tier)
        yield self._between(Resource.UP)
        flag[0] = True

    def _between(self, link: Resource) -> Job:
        """Between the device and CPU memory."""
        if self._accelerator:
            return self._resources.submit(link, self._nbytes)
        return self._resources.submit(Resource.CORES, self._nbytes * self._copy_seconds)


class _Optimizer:
    """The optimizer's steps and norms, most of them behind the program. See `infinity.step.optimizer_step`."""

    def __init__(self, plan: Plan, speeds: Speeds, resources: ResourceQueues, arenas: _Arenas) -> None:
        self._plan, self._speeds, self._resources, self._arenas = plan, speeds, resources, arenas
        self._parts = plan.step_parts()
        self._old_nbytes = old_nbytes(plan)
        # Sub-groups that still have to step each unit, once they are handed over; and whether there are none.
        self._left: Counter[int] = Counter()
        self._through: defaultdict[int, Flag] = defaultdict(Flag)
        # Numbers of gradient elements whose norm is still to be taken.
        self._norms: deque[int] = deque()
        # Units whose gradients are still to come before the next step.
        self._expected: set[int] = set()
        self._queue = ReadyQueue[None](self._parts.hidden)
        # Whether a step is still to be recorded, once everything is stepped; and whether anything is under way.
        self._unrecorded = self._busy = False

    def stepped(self, unit: int) -> Flag:
        """Whether no step of the unit is under way."""
        return self._through[unit]

    def measured(self) -> bool:
        """Whether all norms are taken, nothing is being stepped, and the step before is recorded."""
        return not (self._norms or self._busy or self._unrecorded)

    def measure(self, unit: int, numel: int) -> None:
        """A unit's last gradient of the step has arrived: take its norm, and read ahead near the end of backward."""
        if self._plan.policy.overlap:
            self._expected = self._expected or {piece.unit for group in self._parts.hidden for piece in group.slices}
            self._expected.discard(unit)
            if len(self._expected) == SOON_UNITS:
                for group in first_reads(self._parts.hidden, self._arenas.in_memory):
                    self._arenas.fetch_now(group, complete=False)
        self._norms.append(numel)

    def hand_over(self, groups: Sequence[SubGroup]) -> None:
        """Let these sub-groups be stepped behind the program."""
        for group in groups:
            self._count(group, 1)
        self._queue.add(groups, None, self._arenas.in_memory)
        self._look_ahead(1)

    def _count(self, group: SubGroup, steps: int) -> None:
        for piece in group.slices:
            self._left[piece.unit] += steps
            self._through[piece.unit].turn(done=not self._left[piece.unit])

    def step_visible(self) -> Process:
        """Step what the program sees."""
        for group in self._parts.visible:
            yield from self._step(group)

    def go_on(self) -> None:
        """Hand over what is left of the step."""
        self.hand_over(self._parts.after_backward)
        self._expected.clear()
        self._unrecorded = self._plan.request.recorded

    @property
    def idle(self) -> bool:
        """Whether nothing is left to step or to measure."""
        return not (self._busy or self._norms or self._queue or self._unrecorded)

    def run(self) -> Process:
        """The thread that steps behind the program."""
        while True:
            yield lambda: not self.idle
            self._busy = True
            if self._norms:
                yield from self._resources.host(self._norms.popleft() * self._speeds.norm_seconds)
            elif self._queue:
                group, _ = self._queue.take()
                yield from self._step(group)
                self._count(group, -1)
            else:
                yield from self._arenas.record()
                self._unrecorded = False
            self._busy = False

    def _look_ahead(self, count: int) -> None:
        if self._plan.policy.overlap:
            self._queue.fetch(count, self._arenas.fetch_now)

    def _step(self, group: SubGroup) -> Process:
        yield from self._arenas.fetch(group)
        self._look_ahead(STEP_READS)
        speeds = self._speeds
        products = group.numel * speeds.matrix_seconds
        if products and self._plan.request.accelerator:
            yield self._resources.submit(Resource.ACCELERATOR, products)
        elif products:
            yield from self._resources.host(products)
        if self._plan.request.accelerator and self._plan.placement.states[group.index].on_device:
            yield self._resources.submit(Resource.ACCELERATOR, group.numel * speeds.device_adam_seconds)
        else:
            # See [Note: stepped elsewhere]: one sub-group's parameters come and go before the next one's come.
            staged = self._staged_nbytes(group)
            if staged:
                yield self._resources.submit(Resource.DOWN, staged)
            kept = self._old_nbytes.get(group.index, 0) * speeds.copy_seconds
            yield from self._resources.host(kept + group.numel * speeds.adam_seconds + speeds.group_seconds)
            if staged:
                yield self._resources.submit(Resource.UP, staged)
        jobs = self._arenas.write(group)
        if not self._plan.policy.overlap:
            yield from jobs

    def _staged_nbytes(self, group: SubGroup) -> int:
        """Bytes of a sub-group's parameters whose home is the accelerator, while its states are not there."""
        request, units = self._plan.request, self._plan.placement.units
        homes = ((piece.numel, units[piece.unit].param) for piece in group.slices if request.accelerator)
        return sum(numel for numel, home in homes if home.on_device) * DTYPE_NBYTES[request.compute_dtype]


class _Simulation:
    """The program: forward and backward of each micro-batch, then the step."""

    def __init__(
        self, plan: Plan, speeds: Speeds, accumulation: int, offloaded: OffloadedCheckpoints | None
    ) -> None:
        self._plan, self._speeds, self._accumulation = plan, speeds, accumulation
        last = {unit: at for at, unit in enumerate(plan.schedule.trace)}
        # And whether it is the unit's last use in a pass.
        self._uses = [(at, unit, gathered, at == last[unit]) for at, unit, gathered in uses(plan)]
        counts = Counter(plan.schedule.trace)
        self._share = {unit: 1 / max(count // 2, 1) for unit, count in counts.items()}
        self._landings = landings(plan, plan.step_parts().in_backward)
        self._resources = ResourceQueues(speeds.rates, speeds.mixed_rates)
        self._arenas = _Arenas(plan, self._resources)
        self._optimizer = _Optimizer(plan, speeds, self._resources, self._arenas)
        self._checkpoints = None if offloaded is None else _Checkpoints(self._resources, plan, speeds, offloaded)
        # Gathered units, and whether each is complete; whether a unit's gradients are under way.
        self._gathered: dict[int, bool] = {}
        self._travelling = False
        # Units that stay whole and are brought up to date at their next use, in the order of their steps.
        self._outdated: dict[int, None] = {}
        # What repeated itself and was counted, not simulated; and the account at the beginning of each step.
        self._repeated = _Account(0.0, {}, 0, 0)
        self._marks: list[_Account] = []

    def run(self) -> SimulatedStep:
        self._resources.begin(self._program())
        self._resources.begin(self._optimizer.run())
        self._resources.run(lambda: len(self._marks) > _WARM_STEPS + 1)
        step = self._marks[-1].plus(self._marks[-2], -1)
        return SimulatedStep(step.seconds, step.work, round(step.read_nbytes), round(step.written_nbytes))

    def _account(self) -> _Account:
        """What was simulated so far."""
        read, written = float(self._arenas.read_nbytes), float(self._arenas.written_nbytes)
        if self._checkpoints is not None:
            read, written = read + self._checkpoints.read_nbytes, written + self._checkpoints.written_nbytes
        return _Account(self._resources.now, dict(self._resources.work), read, written)

    def _program(self) -> Process:
        while True:
            self._marks.append(self._account().plus(self._repeated))
            yield from self._passes()
            yield from self._boundary()

    def _passes(self) -> Process:
        """All micro-batches of a step. Once the optimizer is through with the step before, each is like the one before,
        and only the last one differs: those between are counted.
        """
        accounts = [self._account()]
        left = self._accumulation
        while left:
            yield from self._pass(first=left == self._accumulation, final=left == 1)
            left -= 1
            accounts.append(self._account())
            if left <= 1 or len(accounts) < 3 or not self._optimizer.idle or self._resources.writes:
                continue
            before, latest = (accounts[at].plus(accounts[at - 1], -1) for at in (-2, -1))
            # Those that do not settle count by their mean.
            count = 1 if latest.is_like(before) else min(_LATEST, len(accounts) - 1)
            if count == 1 or len(accounts) > _PASSES_MAX:
                span = accounts[-1].plus(accounts[-1 - count], -1)
                self._repeated = self._repeated.plus(span, (left - 1) / count)
                left = 1

    def _pass(self, *, first: bool, final: bool) -> Process:
        schedule, half = self._plan.schedule, len(self._plan.schedule) // 2
        overlap, speeds = self._plan.policy.overlap, self._speeds
        computes = Resource.ACCELERATOR if self._plan.request.accelerator else Resource.CORES
        for at, unit, gathered, last in self._uses:
            if unit in self._outdated:
                del self._outdated[unit]
                gathered = True
            if gathered:
                self._start(unit)
            self._update_ahead()
            if overlap:
                yield from self._submit_ahead(at)
            if gathered:
                yield lambda unit=unit: self._gathered[unit]  # type: ignore[misc]
            if self._checkpoints is not None and at >= half:
                yield from self._checkpoints.get(more=overlap and at + 1 < len(schedule))
            seconds = (speeds.forward_seconds if at < half else speeds.backward_seconds)[unit]
            yield self._resources.submit(computes, seconds * self._share[unit] + speeds.use_seconds)
            if self._checkpoints is not None and at < half:
                yield from self._checkpoints.put(overlap=overlap)
            if last and self._plan.layouts[unit].trainable:
                yield from self._gradient(unit, at, first=first, final=final)
            if schedule.uses[at].needed and not schedule.keep[at]:
                self._gathered.pop(unit, None)

    def _submit_ahead(self, at: int) -> Process:
        """What the schedule submits ahead at a use."""
        schedule = self._plan.schedule
        for other in schedule.gather_ahead[at] if self._plan.policy.gather_ahead else ():
            self._start(other)
        for other in (*schedule.gather_ahead[at], *schedule.fetch_ahead[at]):
            if self._optimizer.stepped(other).done:
                yield from self._arenas.fetch_param(other, wait=False)

    def _update_ahead(self) -> None:
        """Bring up to date what is stepped by now."""
        for unit in [*self._outdated]:
            if not self._optimizer.stepped(unit).done:
                break
            del self._outdated[unit]
            self._start(unit)

    def _start(self, unit: int) -> None:
        if unit not in self._gathered:
            self._gathered[unit] = False
            self._resources.begin(self._gather(unit))

    def _gather(self, unit: int) -> Process:
        placed, layout = self._plan.placement.units[unit], self._plan.layouts[unit]
        own = layout.nbytes // placed.parts
        yield self._optimizer.stepped(unit)
        yield from self._arenas.fetch_param(unit, wait=True)
        if placed.aliased:
            pass
        elif not self._plan.request.accelerator:
            yield from self._resources.host(own * self._speeds.copy_seconds)
        elif not placed.param.on_device:
            yield self._resources.submit(Resource.UP, own)
        self._arenas.release_param(unit)
        if placed.parts > 1:
            yield self._resources.submit(Resource.NETWORK, own * (placed.parts - 1))
        self._gathered[unit] = True

    def _gradient(self, unit: int, at: int, *, first: bool, final: bool) -> Process:
        """A unit's gradients go into its partition: at once, or over the ranks beside what comes next."""
        yield lambda: not self._travelling
        if self._plan.topology.dp > 1 or self._plan.request.accelerator:
            self._travelling = True
            self._resources.begin(self._travel(unit, at, first=first, final=final))
        else:
            yield from self._travel(unit, at, first=first, final=final)

    def _travel(self, unit: int, at: int, *, first: bool, final: bool) -> Process:
        ranks, request = self._plan.topology.dp, self._plan.request
        placed, layout = self._plan.placement.units[unit], self._plan.layouts[unit]
        kept = layout.numel // placed.parts
        if ranks > 1 and not self._plan.placement.grad_whole:
            nbytes = layout.numel * DTYPE_NBYTES[request.communication_dtype]
            yield self._resources.submit(Resource.NETWORK, nbytes * (ranks - 1) / ranks)
        if not request.accelerator:
            yield from self._resources.host(kept * DTYPE_NBYTES[request.grad_dtype] * self._speeds.copy_seconds)
        elif not placed.grad.on_device:
            yield self._resources.submit(Resource.DOWN, kept * DTYPE_NBYTES[request.grad_dtype])
        yield from self._arenas.add_grad(unit, first=first)
        if final and (self._landings or placed.grad.on_drive):
            yield from self._resources.host(kept * self._speeds.norm_seconds)
        self._travelling = False
        if final and self._landings:
            self._optimizer.hand_over(self._landings.get(at, ()))
        elif final and self._plan.policy.step_behind:
            self._optimizer.measure(unit, 0 if placed.grad.on_drive else kept)

    def _boundary(self) -> Process:
        """`step()`: the norm, what the program sees, and then the rest is left to the optimizer's thread."""
        yield lambda: not self._travelling
        request, placement = self._plan.request, self._plan.placement
        trained = [layout for layout in self._plan.layouts if layout.trainable]
        if placement.grad_whole:
            yield self._resources.submit(
                Resource.NETWORK, sum(layout.numel for layout in trained) * DTYPE_NBYTES[request.communication_dtype]
            )
        if not self._landings:
            yield self._optimizer.measured
        if not self._plan.policy.step_behind:
            homes = placement.units
            kept = sum(each.numel // homes[each.index].parts for each in trained if not homes[each.index].grad.on_drive)
            yield from self._resources.host(kept * self._speeds.norm_seconds)
        yield from self._optimizer.step_visible()
        whole = [unit for unit in self._plan.refresh_order() if placement.units[unit].whole]
        apart = self._plan.policy.step_behind
        seen = [unit for unit in whole if not (apart and placement.units[unit].refreshed_apart)]
        yield from self._resources.host(
            sum(self._plan.layouts[unit].nbytes for unit in seen) * self._speeds.copy_seconds
        )
        self._optimizer.go_on()
        self._gathered.clear()
        for unit in whole:
            if self._plan.refreshed_at_use(unit):
                self._outdated[unit] = None
            elif unit not in seen:
                self._start(unit)
        for unit in [*self._gathered]:
            yield lambda unit=unit: self._gathered[unit]  # type: ignore[misc]
        self._gathered.clear()


_UNITS_MAX, _GROUPS_MAX = 96, 128


@dataclass(frozen=True)
class Coarsened:
    """A plan to simulate, the real units in each of its units, and the number of real sub-groups in one of its own."""

    plan: Plan
    units: tuple[tuple[int, ...], ...]
    groups_in_one: float


def coarsen(plan: Plan) -> Coarsened:
    """The plan itself where it is small."""
    blocks: list[tuple[int, ...]] = [(unit,) for unit in range(len(plan.layouts))]
    if len(plan.layouts) <= _UNITS_MAX and len(plan.sub_groups) <= _GROUPS_MAX:
        return Coarsened(plan, tuple(blocks), 1.0)
    blocks = _blocks(plan)
    block_of = {unit: at for at, units in enumerate(blocks) for unit in units}
    layouts = tuple(
        replace(
            plan.layouts[units[0]], index=at, slots=(), modules=(),
            numel=sum(plan.layouts[unit].numel for unit in units),
        )
        for at, units in enumerate(blocks)
    )  # fmt: skip
    specs = {spec.key: spec for spec in plan.partitions}
    partitions: list[PartitionSpec] = []
    for at, units in enumerate(blocks):
        for kind in (Kind.PARAM, Kind.GRAD):
            own = [specs[key] for unit in units if (key := Key(kind, unit)) in specs]
            if own:
                partitions.append(_together(own, at))
    groups: list[SubGroup] = []
    homes: list[Tier] = []
    for members in _groups(plan):
        index = len(groups)
        groups.append(SubGroup(index, _slices(plan, members, blocks, block_of)))
        homes.append(plan.placement.states[members[0].index])
        states = [specs[key] for group in members if (key := Key(Kind.STATES, group.index)) in specs]
        partitions.append(_together(states, index))
    placement = replace(
        plan.placement, units=tuple(plan.placement.units[units[0]] for units in blocks), states=tuple(homes)
    )
    made = replace(
        plan, layouts=layouts, sub_groups=tuple(groups), placement=placement, partitions=tuple(partitions),
        schedule=_schedule(plan.schedule, block_of), step_order=tuple(range(len(groups))),
    )  # fmt: skip
    return Coarsened(_with_pools(plan, made), tuple(blocks), len(plan.sub_groups) / max(len(groups), 1))


def _blocks(plan: Plan) -> list[tuple[int, ...]]:
    """Runs of neighbouring units with equal homes; a unit that stays whole is by itself."""
    size = -(-len(plan.layouts) // _UNITS_MAX)
    found: list[list[int]] = []
    for layout, placed in zip(plan.layouts, plan.placement.units, strict=True):
        last = found[-1] if found else []
        joins = (
            last and len(last) < size and not placed.whole and placed == plan.placement.units[last[-1]]
            and plan.layouts[last[-1]].trainable == layout.trainable and plan.layouts[last[-1]].dtype == layout.dtype
        )  # fmt: skip
        if joins:
            last.append(layout.index)
        else:
            found.append([layout.index])
    return [tuple(units) for units in found]


def _groups(plan: Plan) -> list[list[SubGroup]]:
    """Runs of sub-groups in their order of stepping, with equal homes. Those of units that stay whole are apart from
    the others, and so are visible ones.
    """
    size = -(-len(plan.sub_groups) // _GROUPS_MAX)
    found: list[list[SubGroup]] = []
    seen: tuple[Tier, bool, bool] | None = None
    for index in plan.step_order:
        group = plan.sub_groups[index]
        whole = any(plan.placement.units[piece.unit].whole for piece in group.slices)
        kind = plan.placement.states[index], whole, plan.visible(group)
        if kind == seen and len(found[-1]) < size:
            found[-1].append(group)
        else:
            found.append([group])
        seen = kind
    return found


def _together(specs: Sequence[PartitionSpec], index: int) -> PartitionSpec:
    """One partition of as many bytes; sections of one kind as one."""
    numel: dict[tuple[Kind, str], int] = {}
    for spec in specs:
        for section in spec.sections:
            numel[section.kind, section.dtype] = numel.get((section.kind, section.dtype), 0) + section.numel
    sections, offset = [], 0
    for (kind, dtype), count in numel.items():
        sections.append(ArraySection(kind, dtype, count, offset))
        offset += sections[-1].nbytes
    # Of what is copied behind each step, for how much that is.
    extent = Extent(0, offset) if all(spec.copied and spec.spare for spec in specs) else None
    key = Key(specs[0].key.kind, index)
    return PartitionSpec(key=key, sections=tuple(sections), home=specs[0].home, extent=extent, spare=extent)


def _slices(
    plan: Plan, groups: Sequence[SubGroup], blocks: Sequence[tuple[int, ...]], block_of: dict[int, int]
) -> tuple[Slice, ...]:
    """The groups' slices by block, neighbours as one."""
    found: dict[int, Slice] = {}
    for group in groups:
        for piece in group.slices:
            block = block_of[piece.unit]
            inside = blocks[block].index(piece.unit)
            parts = plan.placement.units[piece.unit].parts
            sizes = [plan.layouts[unit].partition_numel(parts) for unit in blocks[block]]
            start = [*accumulate(sizes, initial=0)][inside] + piece.start
            before = found.get(block)
            found[block] = Slice(
                block, min(start, before.start) if before else start, piece.numel + (before.numel if before else 0)
            )
    return tuple(found.values())


def _schedule(schedule: FetchSchedule, block_of: dict[int, int]) -> FetchSchedule:
    """The same uses by block: a run of uses of one block is one."""
    uses: list[UnitAccess] = []
    gather: list[tuple[int, ...]] = []
    fetch: list[tuple[int, ...]] = []
    keep: list[bool] = []
    for at, (unit, needed) in enumerate(schedule.uses):
        block = block_of[unit]
        # The turn from forward to backward stays where it is.
        if uses and uses[-1].unit == block and at != len(schedule) // 2:
            uses[-1] = UnitAccess(block, needed or uses[-1].needed)
            gather[-1] = _distinct(gather[-1], schedule.gather_ahead[at], block_of, block)
            fetch[-1] = _distinct(fetch[-1], schedule.fetch_ahead[at], block_of, block)
            keep[-1] = schedule.keep[at]
            continue
        uses.append(UnitAccess(block, needed))
        gather.append(_distinct((), schedule.gather_ahead[at], block_of, block))
        fetch.append(_distinct((), schedule.fetch_ahead[at], block_of, block))
        keep.append(schedule.keep[at])
    return FetchSchedule(tuple(uses), tuple(gather), tuple(fetch), tuple(keep), schedule.peak_nbytes)


def _distinct(known: tuple[int, ...], units: Iterable[int], block_of: dict[int, int], own: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*known, *(block_of[unit] for unit in units if block_of[unit] != own)]))


def _with_pools(plan: Plan, made: Plan) -> Plan:
    """Arenas that hold as many of the larger buffers as they held of the smaller ones."""

    def largest(of: Plan, kind: Kind) -> int:
        sizes = [spec.nbytes for spec in of.partitions if spec.key.kind is kind and spec.home.on_drive]
        return max(sizes, default=0)

    params, were = largest(made, Kind.PARAM), largest(plan, Kind.PARAM)
    pools = replace(
        plan.pools, param_nbytes=plan.pools.param_nbytes * params // max(were, 1),
        states_nbytes=max(plan.pools.states_nbytes, STEP_WINDOW * largest(made, Kind.STATES)),
        grad_nbytes=plan.pools.grad_nbytes * largest(made, Kind.GRAD) // max(largest(plan, Kind.GRAD), 1),
    )  # fmt: skip
    return replace(made, pools=pools)
