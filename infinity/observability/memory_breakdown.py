"""Where an engine's bytes are: the report of `engine.memory()`, and the part of it that an error shows.

The ledger books tiers and kinds. The owners of the bytes are not booked: each report derives them from the partitions,
the units and the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import psutil
import torch
from torch import nn

from infinity.errors import TierMemoryError
from infinity.memory.buffers import POOLS
from infinity.memory.ledger import Ledger
from infinity.memory.memory_report import MemoryReport, Process
from infinity.memory.partition import Partition
from infinity.memory.refusal import MemoryRefused, is_refusal
from infinity.memory.residency import PartitionExtent
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.observability import trace
from infinity.plan.plan import Plan
from infinity.plan.types import Key, Kind, Tier
from infinity.zero.module_calls import ModuleCall
from infinity.zero.parameter import is_released
from infinity.zero.unit import Unit

# Bytes that no unit owns: the free part of arenas, buffers that units use in turn.
SHARED = "(shared)"

Table = dict[str, dict[str, dict[str, int]]]


class Breakdown:
    """Reads what an engine holds, and changes nothing."""

    def __init__(
        self, plan: Plan, ledger: Ledger, store: TieredStore, units: Sequence[Unit], device: Device
    ) -> None:
        self._plan = plan
        self._ledger = ledger
        self._store = store
        self._units = units
        self._device = device

    def report(self, *, by_unit: bool = False) -> MemoryReport:
        """Return the report of this moment."""
        in_process = (Tier.CPU,) if self._device.own_memory else (Tier.CPU, Tier.GPU)
        resident, mapped = resident_nbytes()
        process = Process(
            resident=resident, mapped=mapped, in_process=in_process, device=self._device.allocated_nbytes(),
            reserved=self._device.reserved_nbytes(),
        )  # fmt: skip
        return MemoryReport.of(
            self._ledger, process, pools=self._store.pools(), by_unit=self.by_unit() if by_unit else None
        )

    def by_unit(self) -> Table:
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

    def tell_levels(self) -> None:
        """Put the present levels into the recording that has just begun; changes are recorded where they happen."""
        for (tier, kind), nbytes in self._ledger.now.items():
            trace.level(tier.value, kind.value, nbytes)
        for name, pool in self._store.pools().items():
            trace.level(POOLS, name, pool.used)

    def name(self, subject: object) -> str:
        """Return the name of a recording's subject: the units that it belongs to."""
        if isinstance(subject, ModuleCall):
            return ", ".join(unit.layout.name for unit in subject.units) or "the whole model"
        if isinstance(subject, PartitionExtent):
            subject = subject.key
        return self._key_name(subject) if isinstance(subject, Key) else str(subject)

    def _key_name(self, key: Key) -> str:
        if key.kind is not Kind.STATES:
            return f"{key.kind.value} of {self._plan.layouts[key.index].name}"
        pieces = self._plan.sub_groups[key.index].slices
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return f"{key}: {self._plan.layouts[pieces[0].unit].name}{more}" if pieces else str(key)

    def explain(self, error: BaseException, what: str, advice: str) -> MemoryRefused | None:
        """Return a MemoryRefused with the ledger, if `error` means that memory ran out in `what`; None for others."""
        if isinstance(error, TierMemoryError) or not is_refusal(error):
            # A TierMemoryError has its numbers already.
            return None
        tier = Tier.GPU if self._device.own_memory and isinstance(error, torch.OutOfMemoryError) else Tier.CPU
        report = self.report()
        return MemoryRefused(
            f"no memory in {what}: {error}\n{advice}\n{report}", tier=tier.value, kind="activations",
            used=self._ledger.total(tier), limit=self._ledger.limits.of(tier), owners=self._ledger.owners(tier),
        )  # fmt: skip

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
