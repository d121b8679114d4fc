"""What an engine shows of its memory: the report of `engine.memory()`, a table of bytes by tier and kind.

The ledger books tiers and kinds. The owners of the bytes are not booked: each report derives them from the partitions,
the units and the plan. `Observer` makes the reports: the engine calls it from the loop's verbs, and it changes nothing
of what they do.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from torch import nn

from infinity.config.schema import Config
from infinity.distributed.groups import ProcessGroups
from infinity.errors import TierMemoryError
from infinity.log import logger
from infinity.memory.ledger import Ledger, MemoryRefused, PoolUse, is_refusal, mb
from infinity.memory.partition import Partition
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.observability.timeline import Timeline
from infinity.plan.plan import Plan
from infinity.plan.types import Kind, Tier
from infinity.zero.parameter import is_released
from infinity.zero.unit import Unit

# Units that a printed report lists, the largest first; one more line sums the rest.
_UNITS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class PipelineUse:
    """What a rank of a pipeline holds of micro-batches between forwards and backwards, now and at most in a step.

    in_flight: micro-batches, each of one of its stages. boundary: bytes of tensors at the boundaries of its stages, and
    of messages under way. deferred: bytes from which weight gradients are still to be computed. What autograd saves is
    not counted.
    """

    in_flight: int = 0
    in_flight_most: int = 0
    boundary: int = 0
    boundary_most: int = 0
    deferred: int = 0
    deferred_most: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """Measurements of this process that the ledger does not have.

    resident: resident memory now; mapped: the part of it that maps files, which are mostly the code of libraries.
    in_process: the tiers whose bytes are part of it. device: bytes that torch has allocated on the accelerator,
    activations included; reserved: what its allocator keeps of the device, free blocks included. None without one.
    """

    resident: int
    mapped: int
    in_process: tuple[Tier, ...]
    device: int | None = None
    reserved: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """All numbers are bytes of this rank.

    `now` and `peak` go by tier and kind; `most` is a tier's own peak, `limits` what it may hold. `pools` are the arenas
    in CPU memory. Of the `resident` memory, `mapped` are files (code, which the system drops at need), `baseline` was
    there before the engine (the interpreter, torch, the program), and `unaccounted` is neither those nor the engine's:
    activations where the device is the CPU, what allocators keep, and, where it is negative, memory that is reserved
    and was never touched. `predicted` is the most that the process was said to take before it started, without
    `mapped`, with a micro-batch's activations as far as one is known: `activations_predicted`, and where that is from.
    `activations` is what torch holds on an accelerator beyond the engine's, `reserved` what its allocator
    keeps of the device for all of it. `by_unit` goes by tier, kind and unit, when it was asked for. `pipeline` is None
    for a model that is not cut into stages.
    """

    now: dict[str, dict[str, int]]
    peak: dict[str, dict[str, int]]
    most: dict[str, int]
    limits: dict[str, int | None]
    pools: dict[str, PoolUse]
    pinned: int
    resident: int
    mapped: int
    baseline: int
    predicted: int
    unaccounted: int
    activations_predicted: int = 0
    activations_source: str = ""
    activations: int | None = None
    reserved: int | None = None
    by_unit: dict[str, dict[str, dict[str, int]]] | None = None
    pipeline: PipelineUse | None = None

    @classmethod
    def of(
        cls, ledger: Ledger, process: Process, *, pools: Mapping[str, PoolUse] | None = None,
        by_unit: dict[str, dict[str, dict[str, int]]] | None = None,
    ) -> MemoryReport:  # fmt: skip
        """Make a report of the ledger's present numbers."""

        def table(entries: dict[tuple[Tier, Kind], int]) -> dict[str, dict[str, int]]:
            return {
                tier.value: {kind.value: size for (where, kind), size in entries.items() if where is tier and size}
                for tier in Tier
            }

        booked = sum(nbytes for (tier, _), nbytes in ledger.now.items() if tier in process.in_process)
        accounted = process.mapped + ledger.baseline_nbytes + booked
        return cls(
            now=table(ledger.now), peak=table(ledger.peak),
            most={tier.value: ledger.most.get(tier, 0) for tier in Tier},
            limits={tier.value: ledger.limits.of(tier) for tier in Tier}, pools=dict(pools or {}),
            pinned=ledger.pinned_nbytes, resident=process.resident, mapped=process.mapped,
            baseline=ledger.baseline_nbytes, predicted=ledger.predicted_nbytes,
            unaccounted=process.resident - accounted,
            activations_predicted=ledger.activation_nbytes, activations_source=ledger.activations,
            activations=None if process.device is None else process.device - ledger.total(Tier.GPU),
            reserved=process.reserved, by_unit=by_unit,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers in plain dictionaries, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        # Without an accelerator the device's memory is the process's.
        names = {tier: "device (cpu)" if tier == "gpu" and self.activations is None else tier for tier in self.peak}
        width = max(map(len, names.values())) + 2
        lines = [f"{'tier':<{width}}{'kind':<12}{'now':>14}{'peak':>14}{'limit':>14}"]
        for tier, kinds in self.peak.items():
            name = f"{names[tier]:<{width}}"
            for kind, peak in sorted(kinds.items(), key=lambda item: -item[1]):
                lines.append(f"{name}{kind:<12}{mb(self.now[tier].get(kind, 0)):>14}{mb(peak):>14}")
            if kinds:
                limit = self.limits[tier]
                total = f"{mb(sum(self.now[tier].values())):>14}{mb(self.most[tier]):>14}"
                lines.append(f"{name}{'in all':<12}{total}{'none' if limit is None else mb(limit):>14}")
        for name, pool in self.pools.items():
            lines.append(f"pool {name}: {mb(pool.used)} in use, {mb(pool.most)} at most, {mb(pool.reserved)} reserved")
        if (use := self.pipeline) is not None:
            deferred = f", {mb(use.deferred_most)} of deferred weight gradients" if use.deferred_most else ""
            lines.append(
                f"pipeline: {use.in_flight} micro-batches in flight, {use.in_flight_most} at most, with "
                f"{mb(use.boundary_most)} at boundaries{deferred}"
            )
        if self.activations is not None:
            kept = "" if self.reserved is None else f"; torch's allocator keeps {mb(self.reserved)} for all of it"
            lines.append(f"on the device beside that {mb(self.activations)}: activations, workspaces{kept}")
        lines.append(
            f"resident {mb(self.resident)}: {mb(self.mapped)} files and code, {mb(self.baseline)} before the engine, "
            f"{mb(self.unaccounted)} not accounted for; pinned {mb(self.pinned)}"
        )
        known = f"{mb(self.activations_predicted)} of activations ({self.activations_source}) in it"
        lines.append(
            f"predicted for the process {mb(self.predicted)}, "
            + (known if self.activations_source else "without activations, which the first micro-batch tells")
        )
        return "\n".join([*lines, *self._unit_lines(names)])

    def _unit_lines(self, names: Mapping[str, str]) -> list[str]:
        lines = []
        for tier, kinds in (self.by_unit or {}).items():
            totals: dict[str, int] = {}
            for units in kinds.values():
                for unit, nbytes in units.items():
                    totals[unit] = totals.get(unit, 0) + nbytes
            ranked = sorted(totals.items(), key=lambda item: -item[1])
            for unit, nbytes in ranked[:_UNITS_SHOWN]:
                parts = ", ".join(f"{kind} {mb(held[unit])}" for kind, held in kinds.items() if held.get(unit))
                lines.append(f"{names[tier]:<5} {unit}: {mb(nbytes)} ({parts})")
            if rest := ranked[_UNITS_SHOWN:]:
                lines.append(f"{names[tier]:<5} {len(rest)} more units: {mb(sum(nbytes for _, nbytes in rest))}")
        return lines


# Bytes that no unit owns: the free part of arenas, buffers that units use in turn.
SHARED = "(shared)"

Table = dict[str, dict[str, dict[str, int]]]


def resident_nbytes() -> tuple[int, int]:
    """Return this process's resident bytes, and the part that maps files or is shared (0 where the system does not
    report it).
    """
    memory = psutil.Process().memory_info()
    return int(memory.rss), int(getattr(memory, "shared", 0))


def baseline_nbytes(model: nn.Module) -> int:
    """Return this process's resident bytes without mapped files, and without the model's parameters, which the engine
    is about to move.
    """
    # torch loads some 70 MB with its first optimizer: load them now, so that they are not counted as the engine's.
    torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cpu"))])
    storages = {
        param.untyped_storage().data_ptr(): param.untyped_storage().nbytes()
        for param in model.parameters()
        if not is_released(param) and param.device.type == "cpu"
    }
    resident, mapped = resident_nbytes()
    return max(resident - mapped - sum(storages.values()), 0)


# The advice after a phase that ended for lack of memory.
_AFTER = {
    "forward": (
        "Nothing is lost: weights, states and the gradients of earlier micro-batches are as they were. Use a smaller "
        "micro-batch, shorter sequences or activation checkpointing, or offload more."
    ),
    "backward": (
        "Weights and states are as they were, but this step's gradients are incomplete: call engine.zero_grad(), then "
        "go on with a smaller micro-batch, shorter sequences or activation checkpointing."
    ),
    "pipeline": (
        "The ranks of the pipeline are in the middle of a step: this engine cannot go on. Close it, and start from a "
        "checkpoint with a smaller micro-batch, shorter sequences or activation checkpointing."
    ),
    "step": (
        "Weights and states are as they were, but this step's gradients are incomplete: call engine.zero_grad(), then "
        "go on with less."
    ),
}


class Observer:
    """The reports of one engine: of its memory, of one step's times, and of errors that mean that memory ran out."""

    def __init__(
        self, plan: Plan, store: TieredStore, units: Sequence[Unit], device: Device, config: Config,
        groups: ProcessGroups,
    ) -> None:  # fmt: skip
        self._plan, self._ledger, self._store = plan, store.ledger, store
        self._units, self._device = units, device
        self._config = config
        self._groups = groups
        self._timed: Timeline | None = None

    def report(self, *, by_unit: bool) -> MemoryReport:
        """See `Engine.memory`."""
        in_process = (Tier.CPU,) if self._device.own_memory else (Tier.CPU, Tier.GPU)
        resident, mapped = resident_nbytes()
        process = Process(
            resident=resident, mapped=mapped, in_process=in_process, device=self._device.allocated_nbytes(),
            reserved=self._device.reserved_nbytes(),
        )  # fmt: skip
        return MemoryReport.of(
            self._ledger, process, pools=self._store.pools(), by_unit=self._by_unit() if by_unit else None
        )

    def timeline(self, path: str | os.PathLike[str] | None) -> Timeline:
        """See `Engine.timeline`."""
        return Timeline(
            path, rank=self._groups.ranks.rank, plan=self._plan, store=self._store,
            pipeline=self._groups.pipeline,
        )  # fmt: skip

    def explain(self, error: BaseException, phase: str, *, broken: str) -> MemoryRefused | None:
        """Return a MemoryRefused that shows the ledger, for an error that means that memory ran out in `phase`; None
        for any other. broken: why the engine cannot go on; "" where it can.
        """
        if isinstance(error, TierMemoryError) or not is_refusal(error):
            # A TierMemoryError has its numbers already.
            return None
        advice = f"This engine cannot go on: {broken}." if broken else _AFTER[phase]
        if self._groups.ranks.world_size > 1:
            advice += " The other ranks are told, and end."
        tier = Tier.GPU if self._device.own_memory and isinstance(error, torch.OutOfMemoryError) else Tier.CPU
        return MemoryRefused(
            f"no memory in {phase}: {error}\n{advice}\n{self.report(by_unit=False)}", tier=tier.value,
            kind="activations", used=self._ledger.total(tier), limit=self._ledger.limits.of(tier),
            owners=self._ledger.owners(tier),
        )  # fmt: skip

    def begin_step(self, step: int) -> None:
        """Note that a forward of optimizer step `step` (from 1 on) begins; start the recording that the configuration
        asks for.
        """
        wanted = self._config.timeline
        if wanted.path is not None and step == wanted.step and self._timed is None:
            self._timed = self.timeline(wanted.path)
            self._timed.start()

    def end_step(self, step: int) -> None:
        """Note that optimizer step `step` is over: end its recording, and log the breakdown where it is due."""
        timed = self._timed
        if timed is not None and timed.running:
            timed.stop()
            logger.info("%s: %s", timed.path, timed)
        every = self._config.steps_per_print
        if self._config.memory_breakdown and (step == 1 or (every and step % every == 0)):
            rank = self._groups.ranks.rank
            logger.info("memory of rank %d after step %d:\n%s", rank, step, self.report(by_unit=False))

    def close(self) -> None:
        """Abandon a recording whose step did not end."""
        if self._timed is not None:
            self._timed.abandon()

    def _by_unit(self) -> Table:
        """Return tier -> kind -> unit -> bytes of this moment. Sums over units equal the ledger's entries."""
        found: Counter[tuple[Tier, Kind, str]] = Counter()
        for partition, own in self._store.held():
            if own and (partition.on_drive or partition.buffer is not None):
                for unit, kind, nbytes in self._owners(partition):
                    found[partition.spec.home, kind, unit] += nbytes
            if partition.on_drive and partition.buffer is not None:
                for unit, _, nbytes in self._owners(partition):
                    found[Tier.CPU, Kind.POOL, unit] += nbytes
        for each in self._units:
            if each.buffer.has_bytes:
                for kind, nbytes in each.buffer.kinds.items():
                    found[Tier.GPU, kind, each.layout.name] += nbytes
        table: Table = {tier.value: {} for tier in Tier}
        for (tier, kind), booked in self._ledger.now.items():
            units = {unit: n for (where, what, unit), n in found.items() if (where, what) == (tier, kind) and n}
            rest = booked - sum(units.values())
            if units or rest:
                table[tier.value][kind.value] = {**units, **({SHARED: rest} if rest else {})}
        return table

    def _owners(self, partition: Partition) -> Iterator[tuple[str, Kind, int]]:
        """Yield (unit, kind, bytes) of a partition; a sub-group's states belong to the units of its slices."""
        key = partition.key
        for section in partition.spec.sections:
            if key.kind is not Kind.STATES:
                yield self._plan.layouts[key.index].name, section.kind, section.nbytes
                continue
            width = section.nbytes // max(section.numel, 1)
            for piece in self._plan.sub_groups[key.index].slices:
                yield self._plan.layouts[piece.unit].name, section.kind, piece.numel * width
