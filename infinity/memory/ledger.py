"""Where every byte is: tier x kind -> bytes now and at most.

The store and the units book every buffer that they take or return.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infinity.plan.capacity import Capacity
from infinity.plan.types import Kind, Tier


@dataclass(slots=True)
class Ledger:
    """Counts what the engine holds. `now` and `peak` are keyed by (tier, kind), in bytes. `limits`: what this rank may
    hold on each tier.
    """

    limits: Capacity = field(default_factory=Capacity)
    now: dict[tuple[Tier, Kind], int] = field(default_factory=dict)
    peak: dict[tuple[Tier, Kind], int] = field(default_factory=dict)
    pinned_nbytes: int = 0

    def add(self, tier: Tier, kind: Kind, nbytes: int) -> None:
        """Book `nbytes` more (or fewer, when negative) of one kind on one tier."""
        entry = (tier, kind)
        self.now[entry] = self.now.get(entry, 0) + nbytes
        self.peak[entry] = max(self.peak.get(entry, 0), self.now[entry])

    def total(self, tier: Tier) -> int:
        """Bytes held on one tier now."""
        return sum(nbytes for (where, _), nbytes in self.now.items() if where is tier)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What `engine.memory()` returns: data that prints as a table. All numbers are bytes of this rank."""

    now: dict[str, dict[str, int]]
    peak: dict[str, dict[str, int]]
    pinned: int
    resident: int
    unaccounted: int

    @classmethod
    def of(cls, ledger: Ledger, *, resident: int, in_process: tuple[Tier, ...]) -> MemoryReport:
        """Build a report. `in_process` are the tiers whose bytes are part of the process's resident memory."""

        def table(entries: dict[tuple[Tier, Kind], int]) -> dict[str, dict[str, int]]:
            return {
                tier.value: {kind.value: size for (where, kind), size in entries.items() if where is tier and size}
                for tier in Tier
            }

        accounted = sum(ledger.total(tier) for tier in in_process)
        return cls(table(ledger.now), table(ledger.peak), ledger.pinned_nbytes, resident, resident - accounted)

    def __str__(self) -> str:
        lines = [f"{'tier':<6}{'kind':<12}{'now':>12}{'peak':>12}"]
        for tier, kinds in self.peak.items():
            for kind, peak in kinds.items():
                lines.append(f"{tier:<6}{kind:<12}{_mb(self.now[tier].get(kind, 0)):>12}{_mb(peak):>12}")
        lines.append(
            f"resident {_mb(self.resident)}, of it not the engine's {_mb(self.unaccounted)}; pinned {_mb(self.pinned)}"
        )
        return "\n".join(lines)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
