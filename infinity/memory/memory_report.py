"""The result of `engine.memory()`: this rank's bytes by tier and kind, as data that prints as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infinity.memory.ledger import Ledger, PoolUse, mb
from infinity.plan.types import Kind, Tier

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
