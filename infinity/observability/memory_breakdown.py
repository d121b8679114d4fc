"""Where an engine's bytes are, told from what it holds: the report of `engine.memory()`, and what an error shows of it.

The ledger knows tiers and kinds. Whose the bytes are is not booked a second time: it follows from the partitions, the
units and the plan whenever somebody asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import psutil
import torch
from torch import nn

from infinity.errors import TierMemoryError
from infinity.memory.activation_tier import ActivationExtent
from infinity.memory.buffers import POOLS
from infinity.memory.ledger import Ledger
from infinity.memory.memory_report import MemoryReport, Process
from infinity.memory.partition import Partition
from infinity.memory.refusal import MemoryRefused, is_refusal
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.observability import trace
from infinity.plan.plan import Plan
from infinity.plan.types import Extent, Key, Kind, Tier
from infinity.zero.module_calls import ModuleCall
from infinity.zero.parameter import is_released
from infinity.zero.unit import Unit

# What no unit owns: the free part of arenas, buffers that units use in turns.
SHARED = "(shared)"

Table = dict[str, dict[str, dict[str, int]]]


class Breakdown:
    """Reads what an engine holds; changes nothing."""

    def __init__(
        self, plan: Plan, ledger: Ledger, store: TieredStore, units: Sequence[Unit], device: Device
    ) -> None:
        self._plan = plan
        self._ledger = ledger
        self._store = store
        self._units = units
        self._device = device
        self._by_offset = {
            extent.offset: spec.key for spec in plan.partitions for extent in (spec.extent, spec.spare) if extent
        }  # fmt: skip

    def report(self, *, by_unit: bool = False) -> MemoryReport:
        """Everything as it is now."""
        in_process = (Tier.CPU,) if self._device.is_accelerator else (Tier.CPU, Tier.GPU)
        resident, mapped = resident_nbytes()
        process = Process(
            resident=resident, mapped=mapped, in_process=in_process, device=self._device.allocated_nbytes()
        )
        return MemoryReport.of(
            self._ledger, process, pools=self._store.pools(), by_unit=self.by_unit() if by_unit else None
        )

    def by_unit(self) -> Table:
        """Tier -> kind -> unit -> bytes, now. Sums over units are the ledger's entries."""
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

    def tell_levels(self) -> None:
        """Put what is held now into the recording that has just begun: from here on every change is told."""
        for (tier, kind), nbytes in self._ledger.now.items():
            trace.level(tier.value, kind.value, nbytes)
        for name, pool in self._store.pools().items():
            trace.level(POOLS, name, pool.used)

    def name(self, subject: object) -> str:
        """What a recording speaks of, by the names of the units that it belongs to."""
        if isinstance(subject, ModuleCall):
            return ", ".join(unit.layout.name for unit in subject.units) or "the whole model"
        if isinstance(subject, Extent) and not isinstance(subject, ActivationExtent):
            return self.name(self._by_offset.get(subject.offset, subject.offset))
        return self._key_name(subject) if isinstance(subject, Key) else str(subject)

    def _key_name(self, key: Key) -> str:
        if key.kind is not Kind.STATES:
            return f"{key.kind.value} of {self._plan.layouts[key.index].name}"
        pieces = self._plan.sub_groups[key.index].slices
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return f"{key}: {self._plan.layouts[pieces[0].unit].name}{more}" if pieces else str(key)

    def explain(self, error: BaseException, what: str, advice: str) -> MemoryRefused | None:
        """For an error that means that memory ran out in `what`: the same with the ledger; None for any other."""
        if isinstance(error, TierMemoryError) or not is_refusal(error):
            # The former has its numbers.
            return None
        tier = Tier.GPU if self._device.is_accelerator and isinstance(error, torch.OutOfMemoryError) else Tier.CPU
        report = self.report()
        return MemoryRefused(
            f"no memory in {what}: {error}\n{advice}\n{report}", tier=tier.value, kind="activations",
            used=self._ledger.total(tier), limit=self._ledger.limits.of(tier), owners=self._ledger.owners(tier),
        )  # fmt: skip

    def _owners(self, partition: Partition) -> Iterator[tuple[str, Kind, int]]:
        """(unit, kind, bytes) of what a partition holds: a sub-group's states are its slices' units'."""
        key = partition.key
        for section in partition.spec.sections:
            if key.kind is not Kind.STATES:
                yield self._plan.layouts[key.index].name, section.kind, section.nbytes
                continue
            width = section.nbytes // max(section.numel, 1)
            for piece in self._plan.sub_groups[key.index].slices:
                yield self._plan.layouts[piece.unit].name, section.kind, piece.numel * width


def resident_nbytes() -> tuple[int, int]:
    """Resident memory of this process, and the part of it that maps files or is shared (0 where nobody tells)."""
    memory = psutil.Process().memory_info()
    return int(memory.rss), int(getattr(memory, "shared", 0))


def baseline_nbytes(model: nn.Module) -> int:
    """Resident memory of this process without mapped files, and without the model's own parameters, which the engine is
    about to take over.
    """
    # What torch loads with its first optimizer, some 70 MB, comes now and not as if it were the engine's.
    torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cpu"))])
    storages = {
        param.untyped_storage().data_ptr(): param.untyped_storage().nbytes()
        for param in model.parameters()
        if not is_released(param) and param.device.type == "cpu"
    }
    resident, mapped = resident_nbytes()
    return max(resident - mapped - sum(storages.values()), 0)
