"""Bytes that one optimizer step of one rank moves over each link, from the plan alone.

NVMe traffic is that of a walk along the schedule and the sub-groups, with the arenas' contents kept as the store keeps
them (the least recently used goes first), so that what is still in memory is not counted as read again. The other links
follow from sizes: what is gathered, reduced, copied and stepped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from estimators.resources import Cache
from infinity.plan.activations import OffloadedCheckpoints
from infinity.plan.layout import SubGroup
from infinity.plan.partitions import first_reads
from infinity.plan.plan import Plan
from infinity.plan.shards import Replica
from infinity.plan.types import DTYPE_NBYTES, Kind, PartitionSpec

# Sub-groups stepped last that may still be in memory: more than any arena holds.
_WARM_GROUPS = 64


class Link(Enum):
    """What bytes travel over."""

    NVME_READ = "NVMe read"
    NVME_WRITE = "NVMe written"
    # From CPU memory to the accelerator, and back.
    UP = "CPU to accelerator"
    DOWN = "accelerator to CPU"
    # Read from and written to CPU memory by the optimizer, norms, copies and casts; transfers' own accesses left out.
    DRAM = "CPU memory"
    # Sent to other ranks.
    NETWORK = "sent to other ranks"

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Traffic:
    """Bytes a step and rank by link and kind."""

    nbytes: Mapping[Link, Mapping[Kind, int]]

    def total(self, link: Link) -> int:
        """All kinds of one link."""
        return sum(self.nbytes[link].values())


def traffic(
    plan: Plan, *, accumulation: int = 1, offloaded: OffloadedCheckpoints | None = None, exchanged_nbytes: int = 0,
    passed_nbytes: int = 0,
) -> Traffic:  # fmt: skip
    """What a step moves once the run is warm.

    accumulation: micro-batches a step. offloaded: checkpoints of activations on another tier, which go there in forward
    and come back in backward. exchanged_nbytes: what a rank sends to the others of its tensor group in a micro-batch;
    passed_nbytes: what it sends to other stages of its pipeline in a step, whose schedule has all micro-batches.
    Where the step goes on behind the program, the next forward is taken to follow it closely and to find in memory what
    was just stepped; a computation that takes much longer reads those parameters again.
    """
    count = _Count(plan)
    passes = accumulation if plan.pipeline is None else 1
    gathers: Counter[int] = Counter()
    for _, unit, gathered in uses(plan):
        gathers[unit] += gathered
    for unit, times in gathers.items():
        count.gather(unit, times * passes)
    count.gradients(accumulation)
    count.steps()
    _Walk(plan, count, accumulation=passes).run()
    count.copies()
    found = {link: dict(kinds) for link, kinds in count.nbytes.items()}
    if sent := exchanged_nbytes * accumulation + passed_nbytes:
        found[Link.NETWORK][Kind.ACTIVATION] = sent
    if offloaded is not None:
        links = [*([Link.DOWN, Link.UP] if plan.request.accelerator else [Link.DRAM])]
        for link in (*links, *([Link.NVME_WRITE, Link.NVME_READ] if offloaded.tier.on_drive else [])):
            # Within CPU memory each copy reads and writes, there and back.
            times = 4 if link is Link.DRAM else 1
            found[link][Kind.ACTIVATION] = offloaded.nbytes * accumulation * times
    return Traffic(found)


def landings(plan: Plan, groups: Iterable[SubGroup]) -> dict[int, list[SubGroup]]:
    """Position in the trace -> those of the sub-groups whose last gradient arrives there."""
    last = {unit: at for at, unit in enumerate(plan.schedule.trace)}
    found: dict[int, list[SubGroup]] = {}
    for group in groups:
        found.setdefault(max(last.get(piece.unit, 0) for piece in group.slices), []).append(group)
    return dict(sorted(found.items()))


def old_nbytes(plan: Plan) -> dict[int, int]:
    """Bytes of old values in CPU memory that are copied before a sub-group is stepped in backward, by its index."""
    if not plan.pools.undo_nbytes:
        return {}
    states = {spec.key.index: spec for spec in plan.partitions if spec.key.kind is Kind.STATES}
    width, found = DTYPE_NBYTES[plan.request.compute_dtype], dict[int, int]()
    for group in plan.step_parts().in_backward:
        params = (piece.numel for piece in group.slices if not plan.placement.units[piece.unit].param.on_drive)
        own = states[group.index]
        found[group.index] = sum(params) * width + (0 if own.home.on_drive else own.nbytes)
    return found


def uses(plan: Plan) -> Iterator[tuple[int, int, bool]]:
    """(position, unit, whether it has to be gathered) of one forward and backward; of a pipeline, of a whole step."""
    live: set[int] = set()
    for at, (unit, needed) in enumerate(plan.schedule.uses):
        whole = plan.placement.units[unit].whole
        yield at, unit, needed and not whole and unit not in live
        if needed:
            (live.add if plan.schedule.keep[at] else live.discard)(unit)


def nvme_specs(plan: Plan, kind: Kind) -> dict[int, PartitionSpec]:
    """Partitions of one kind whose home is NVMe, by index."""
    return {
        spec.key.index: spec for spec in plan.partitions
        if spec.key.kind is kind and spec.home.on_drive and spec.nbytes
    }  # fmt: skip


def states_that_move(plan: Plan) -> dict[int, PartitionSpec]:
    """States on NVMe that no memory keeps, by sub-group."""
    kept = plan.kept()
    return {index: spec for index, spec in nvme_specs(plan, Kind.STATES).items() if index not in kept}


def copied_specs(plan: Plan) -> tuple[PartitionSpec, ...]:
    """What lives in memory and is copied to the drive behind each step (`checkpoint.every_step`): all that is trained.
    What is frozen is copied once.
    """
    return tuple(spec for spec in plan.partitions if spec.copied and spec.spare is not None)


def kept_nbytes(plan: Plan) -> int:
    """Bytes of the others in memory."""
    specs = nvme_specs(plan, Kind.STATES)
    return sum(specs[index].nbytes for index in plan.kept())


class _Count:
    """Adds up bytes by link and kind."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.nbytes: dict[Link, dict[Kind, int]] = {link: {} for link in Link}
        self._accelerator = plan.request.accelerator
        self._width = DTYPE_NBYTES[plan.request.compute_dtype]
        self._grad_width = DTYPE_NBYTES[plan.request.grad_dtype]
        self._wire = DTYPE_NBYTES[plan.request.communication_dtype]
        self._grads = nvme_specs(plan, Kind.GRAD)
        self._states = {
            spec.key.index: sum(section.nbytes for section in spec.sections)
            for spec in plan.partitions if spec.key.kind is Kind.STATES
        }  # fmt: skip

    def add(self, link: Link, kind: Kind, nbytes: int) -> None:
        if nbytes:
            self.nbytes[link][kind] = self.nbytes[link].get(kind, 0) + nbytes

    def gather(self, unit: int, times: int) -> None:
        """This rank's partition into its place in the whole unit, and to the other ranks."""
        placed, layout = self.plan.placement.units[unit], self.plan.layouts[unit]
        own = layout.nbytes // placed.parts * times
        if not placed.aliased:
            if not self._accelerator:
                self.add(Link.DRAM, Kind.FULL, 2 * own)
            elif not placed.param.on_device:
                self.add(Link.UP, Kind.PARAM, own)
        self.add(Link.NETWORK, Kind.PARAM, own * (placed.parts - 1))

    def gradients(self, accumulation: int) -> None:
        """From autograd into partitions, over the ranks where there are several; and the norm."""
        ranks, late = self.plan.topology.dp, self.plan.placement.grad_whole
        tensor = self.plan.topology.tp
        for layout, placed in zip(self.plan.layouts, self.plan.placement.units, strict=True):
            if not layout.trainable:
                continue
            if tensor > 1 and layout.replica is Replica.PARTIAL:
                summed = 2 * layout.numel * self._wire * (tensor - 1) // tensor
                self.add(Link.NETWORK, Kind.GRAD, summed * (1 if late else accumulation))
            if ranks > 1:
                # An all-reduce sends twice the bytes of a reduce-scatter.
                whole = layout.numel * self._wire * (ranks - 1) // ranks * (2 if placed.parts == 1 else 1)
                self.add(Link.NETWORK, Kind.GRAD, whole * (1 if late else accumulation))
            kept = layout.numel // placed.parts
            width = self._width if ranks == 1 else self._wire
            arrivals = 1 if late else accumulation
            if self._accelerator and not placed.grad.on_device:
                self.add(Link.DOWN, Kind.GRAD, kept * (self._grad_width + (arrivals - 1) * width))
            elif not self._accelerator:
                self.add(Link.DRAM, Kind.GRAD, kept * (arrivals * (width + 2 * self._grad_width) - self._grad_width))
            if not self._accelerator or not placed.grad.on_device:
                self.add(Link.DRAM, Kind.GRAD, kept * self._grad_width)
            if placed.grad.on_drive:
                # Each arrival is written; all but the first read what they are added to.
                self.add(Link.NVME_WRITE, Kind.GRAD, arrivals * self._grads[layout.index].nbytes)
                self.add(Link.NVME_READ, Kind.GRAD, (arrivals - 1) * self._grads[layout.index].nbytes)

    def steps(self) -> None:
        """The optimizer's streams, what is staged for it, and what it makes the ranks tell each other."""
        old = old_nbytes(self.plan)
        for group, home in zip(self.plan.sub_groups, self.plan.placement.states, strict=True):
            if self._accelerator and home.on_device:
                continue
            self.add(Link.DRAM, Kind.STATES, 2 * self._states[group.index] + 2 * old.get(group.index, 0))
            self.add(Link.DRAM, Kind.PARAM, 2 * group.numel * self._width)
            self.add(Link.DRAM, Kind.GRAD, group.numel * self._grad_width)
            for piece in group.slices:
                if self._accelerator and self.plan.placement.units[piece.unit].param.on_device:
                    self.add(Link.DOWN, Kind.PARAM, piece.numel * self._width)
                    self.add(Link.UP, Kind.PARAM, piece.numel * self._width)
        for layout, placed in zip(self.plan.layouts, self.plan.placement.units, strict=True):
            if placed.whole and layout.trainable:
                self.gather(layout.index, 1)

    def copies(self) -> None:
        """What a record behind the step writes of the values in memory."""
        for spec in copied_specs(self.plan):
            self.add(Link.NVME_WRITE, spec.key.kind, spec.nbytes)
            if self._accelerator and spec.home.on_device:
                self.add(Link.DOWN, spec.key.kind, spec.nbytes)


class _Walk:
    """One step along the schedule, with the arenas' contents."""

    def __init__(self, plan: Plan, count: _Count, *, accumulation: int) -> None:
        self._plan = plan
        self._count = count
        self._accumulation = accumulation
        self._parts = plan.step_parts()
        self._rest = self._parts.after_backward
        self._landings = landings(plan, self._parts.in_backward)
        # What moves of each kind, and the arena through which it does.
        self._specs = {
            Kind.PARAM: nvme_specs(plan, Kind.PARAM), Kind.STATES: states_that_move(plan),
            Kind.GRAD: nvme_specs(plan, Kind.GRAD),
        }  # fmt: skip
        self._caches = {
            Kind.PARAM: Cache(plan.pools.param_nbytes),
            Kind.STATES: Cache(plan.pools.states_nbytes - kept_nbytes(plan)), Kind.GRAD: Cache(plan.pools.grad_nbytes),
        }  # fmt: skip
        self._last = {unit: at for at, unit in enumerate(plan.schedule.trace)}
        self._counting = False

    def run(self) -> None:
        if not any(self._specs.values()):
            return
        # What an earlier step has left: the arenas' contents do not depend on what came before that.
        last = [*chain.from_iterable(self._landings.values()), *self._parts.visible, *self._rest]
        for group in last[-_WARM_GROUPS:]:
            self._use(Kind.STATES, group.index)
        self._passes(1, [])
        self._counting = True
        if self._landings and not self._rest:
            self._passes(self._accumulation, [])
            self._visible()
            return
        rest = self._visible()
        self._passes(self._accumulation, rest)

    def _visible(self) -> list[SubGroup]:
        """What `step()` does before it returns; the sub-groups that are left to be stepped behind the program."""
        rest = self._rest
        for group in first_reads(rest, self._ready) or rest[:1]:
            self._touch(group, write=False)
        for group in self._resident_first(self._parts.visible):
            self._touch(group)
        for layout, placed in zip(self._plan.layouts, self._plan.placement.units, strict=True):
            if placed.whole and layout.trainable:
                self._use(Kind.PARAM, layout.index)
        return self._resident_first(rest)

    def _passes(self, times: int, rest: Sequence[SubGroup]) -> None:
        """`times` forwards and backwards; the first one drives the step that is left, group by group."""
        queue = iter(rest)
        left: dict[int, int] = {}
        for group in rest:
            for piece in group.slices:
                left[piece.unit] = left.get(piece.unit, 0) + 1
        for index in range(times):
            landing = self._landings if index == times - 1 and self._counting else {}
            for at, unit, gathered in uses(self._plan):
                while left.get(unit):
                    self._follow(next(queue), left)
                if gathered:
                    self._use(Kind.PARAM, unit)
                grad = self._specs[Kind.GRAD].get(unit)
                if grad is not None and index == times - 1 and self._last[unit] == at:
                    # It lands, from where no drive is read.
                    self._caches[Kind.GRAD].use(unit, grad.nbytes)
                for group in landing.get(at, ()):
                    self._touch(group)
        for group in queue:
            self._follow(group, left)

    def _follow(self, group: SubGroup, left: dict[int, int]) -> None:
        self._touch(group)
        for piece in group.slices:
            left[piece.unit] -= 1

    def _touch(self, group: SubGroup, *, write: bool = True) -> None:
        """Step one sub-group, or only fetch it."""
        self._use(Kind.STATES, group.index)
        for piece in group.slices:
            self._use(Kind.PARAM, piece.unit)
            self._use(Kind.GRAD, piece.unit)
        if write:
            self._written(Kind.STATES, [group.index])
            # A unit is written once, with the last of its sub-groups, which ends where its partition ends.
            ends = [piece.unit for piece in group.slices if self._plan.ends_partition(piece)]
            self._written(Kind.PARAM, ends)

    def _written(self, kind: Kind, indices: Iterable[int]) -> None:
        specs = self._specs[kind]
        if self._counting:
            for index in indices:
                if index in specs:
                    self._count.add(Link.NVME_WRITE, kind, specs[index].nbytes)

    def _use(self, kind: Kind, index: int) -> None:
        """Use a partition, which is read unless its arena still has it."""
        spec = self._specs[kind].get(index)
        if spec is not None and not self._caches[kind].use(index, spec.nbytes) and self._counting:
            self._count.add(Link.NVME_READ, kind, spec.nbytes)

    def _resident_first(self, groups: Sequence[SubGroup]) -> list[SubGroup]:
        return sorted(groups, key=lambda group: not self._ready(group))

    def _ready(self, group: SubGroup) -> bool:
        """Whether it can be stepped without a read."""
        units = {piece.unit for piece in group.slices} & self._specs[Kind.PARAM].keys()
        return group.index in self._caches[Kind.STATES] and all(unit in self._caches[Kind.PARAM] for unit in units)
