"""The ledger: bytes now and at most by tier and kind, and the limits of tiers.

The owner of a buffer books it here: the store partitions and pools, units whole parameters, and the gradients whole
gradients. `taking` stands around an allocation and enforces the tier's limit. A refusal by the system becomes the same
error with the same numbers (see `infinity.memory.ledger`).

One error for memory that the system or the accelerator's allocator refuses.

The C library, the kernel and torch raise different exceptions. All become `MemoryRefused`, which carries the ledger's
numbers and is caught as `TierMemoryError`, as `MemoryError`, and as the `torch.OutOfMemoryError` (a RuntimeError) that
programs written for torch expect.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from infinity.base import trace
from infinity.base.sizes import format_bytes
from infinity.errors import TierMemoryError
from infinity.plan.capacity import Capacity
from infinity.plan.types import Kind, Tier

# Of torch's own allocators for CPU memory, which raise a plain RuntimeError.
_SAYINGS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")


class MemoryRefused(TierMemoryError, torch.OutOfMemoryError):
    """The system refused memory; its own exception is the cause."""


def is_refusal(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS)


_OWNERS = 5


@dataclass(frozen=True, slots=True)
class PoolUse:
    """An arena in CPU memory: bytes reserved, in use now, and in use at most."""

    reserved: int
    used: int
    most: int


@dataclass(slots=True)
class Ledger:
    """Bytes that the engine holds. `now` and `peak` are keyed by (tier, kind), `most` by tier.

    limits: bytes that this rank may hold on each tier. baseline_nbytes: resident memory before there was an engine,
    without the model and mapped files. predicted_nbytes: the plan's peak of the process, counted in the same way.
    """

    limits: Capacity = field(default_factory=Capacity)
    baseline_nbytes: int = 0
    predicted_nbytes: int = 0
    # Of a micro-batch, as far as one is known, and where the figure is from: "8 x 128, measured".
    activation_nbytes: int = 0
    activations: str = ""
    now: dict[tuple[Tier, Kind], int] = field(default_factory=dict)
    peak: dict[tuple[Tier, Kind], int] = field(default_factory=dict)
    # Of a tier as a whole: its kinds need not be at their peaks together.
    most: dict[Tier, int] = field(default_factory=dict)
    pinned_nbytes: int = 0
    # The sum over kinds, by tier: asked for at every gather.
    _totals: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))

    def add(self, tier: Tier, kind: Kind, nbytes: int, *, limited: bool = True) -> None:
        """Book `nbytes` more (or fewer, when negative) of one kind on one tier. limited: whether they count against its
        limit; False for what was set aside before limits were made.
        """
        entry = (tier, kind)
        held = self.now[entry] = self.now.get(entry, 0) + nbytes
        total = self._totals[tier] = self._totals[tier] + (nbytes if limited else 0)
        if trace.active():
            trace.level(tier.value, kind.value, held)
        if nbytes > 0:
            self.peak[entry] = max(self.peak.get(entry, 0), held)
            self.most[tier] = max(self.most.get(tier, 0), total)

    def forecast(self, predicted_nbytes: int, activation_nbytes: int, activations: str) -> None:
        """Take the figures of a micro-batch."""
        self.predicted_nbytes = predicted_nbytes
        self.activation_nbytes, self.activations = activation_nbytes, activations

    def activations_in_words(self) -> str:
        """A micro-batch's activations: "400 MB (8 x 128, counted)"; "" while they are not known."""
        return f"{format_bytes(self.activation_nbytes)} ({self.activations})" if self.activations else ""

    def pin(self, nbytes: int) -> None:
        """Book `nbytes` more (or fewer, when negative) of page-locked CPU memory."""
        self.pinned_nbytes += nbytes

    def total(self, tier: Tier) -> int:
        """Bytes held on one tier now, as far as they count against its limit."""
        return self._totals[tier]

    def room(self, tier: Tier) -> int | None:
        """Bytes that the limits leave to a tier, its own and the process's; None where there is none."""
        return self.limits.room(tier, self._totals)

    def taking(self, tier: Tier, kinds: Mapping[Kind, int], owner: str) -> _Taking:
        """Return a context manager that books what its block allocates for `owner`, after the block.

        Raises TierMemoryError before the block if the tier's limit would be exceeded, and MemoryRefused if the system
        refuses the allocation. Then nothing is booked.
        """
        asked = sum(kinds.values())
        room = self.room(tier)
        if room is not None and asked > room:
            used, owners = self.total(tier), self.owners(tier)
            # What the tier may hold beside what the others hold.
            limit = used + room
            raise TierMemoryError(
                f"no room on {tier.value} for {owner}: asked {mb(asked)}, used {mb(used)}, limit {mb(limit)}. "
                f"{_remedy(tier)}{holders(owners)}",
                tier=tier.value, kind=_largest(kinds), asked=asked, used=used, limit=limit, owners=owners,
            )  # fmt: skip
        return _Taking(self, tier, kinds, owner)

    def owners(self, tier: Tier) -> tuple[tuple[str, int], ...]:
        """The kinds that hold most on a tier, as (name, bytes), the largest first."""
        held = [(kind.value, nbytes) for (where, kind), nbytes in self.now.items() if where is tier and nbytes > 0]
        return tuple(sorted(held, key=lambda item: -item[1])[:_OWNERS])

    def refused(self, tier: Tier, kinds: Mapping[Kind, int], owner: str, error: BaseException) -> MemoryRefused:
        """The error for an allocation of `owner` that the system has refused."""
        asked, used = sum(kinds.values()), self.total(tier)
        return MemoryRefused(
            f"no room on {tier.value} for {owner}: asked {mb(asked)}, used {mb(used)}, and the system refused more: "
            f"{error}. {_remedy(tier)}{holders(self.owners(tier))}",
            tier=tier.value, kind=_largest(kinds), asked=asked, used=used, limit=self.limits.of(tier),
            owners=self.owners(tier),
        )  # fmt: skip


class _Taking:
    """See `Ledger.taking`."""

    __slots__ = ("_kinds", "_ledger", "_owner", "_tier")

    def __init__(self, ledger: Ledger, tier: Tier, kinds: Mapping[Kind, int], owner: str) -> None:
        self._ledger, self._tier, self._kinds, self._owner = ledger, tier, kinds, owner

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            for each, nbytes in self._kinds.items():
                self._ledger.add(self._tier, each, nbytes)
        elif not isinstance(error, TierMemoryError) and is_refusal(error):
            raise self._ledger.refused(self._tier, self._kinds, self._owner, error) from error


def _largest(kinds: Mapping[Kind, int]) -> str:
    return max(kinds, key=lambda kind: kinds[kind]).value if kinds else ""


def _remedy(tier: Tier) -> str:
    raise_limit = f"or raise memory.{tier.value}.max_bytes."
    if tier.on_device:
        return f"Lower stage3_max_live_parameters or the micro-batch, offload more, {raise_limit}"
    if tier.on_drive:
        return f"Free space on the drive, add one to nvme_path, {raise_limit}"
    return f'Put more on NVMe (device = "nvme"), lower sub_group_size, {raise_limit}'


def holders(owners: tuple[tuple[str, int], ...]) -> str:
    """The small table below a message: who holds most."""
    if not owners:
        return ""
    width = max(len(name) for name, _ in owners)
    return "\nlargest there:" + "".join(f"\n  {name:<{width}}  {mb(nbytes):>12}" for name, nbytes in owners)


def mb(nbytes: int) -> str:
    """An amount for people."""
    return f"{nbytes / 1e6:,.1f} MB"
