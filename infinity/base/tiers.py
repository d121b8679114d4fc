"""The tiers: where bytes may live, by name. A configuration names them, the plan places bytes on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

# O_DIRECT wants offsets and lengths in multiples of the logical block; 4 KiB serves 512-byte and 4Kn drives alike.
EXTENT_ALIGNMENT = 4096
# Sections of a buffer and parameters of a unit start on a cache line.
CACHE_LINE = 64
# Elements whose states in 8 bits share a scale, as in bitsandbytes.
BLOCK_NUMEL = 256


@dataclass(frozen=True, slots=True)
class DriveRates:
    """Bytes a second of a node's drives of one tier: of reads alone, of writes alone, and of both together where half
    of the bytes are reads.
    """

    read: float
    write: float
    mixed: float


class _TierRegistry(type):
    """Makes the class of tiers the ordered registry of its instances: `for tier in Tier`, the fastest first."""

    def __iter__(cls) -> Iterator[Tier]:
        return iter(_tiers.values())


_tiers: dict[str, Tier] = {}


class Tier(metaclass=_TierRegistry):
    """Where bytes live: a value with the properties that the plan, the store and the simulator ask for.

    value: its name in tables, messages, configurations and manifests.
    on_device: the bytes are where computation happens. Without an accelerator that is the process's own memory.
    addressable: instructions read the bytes where they lie; otherwise they are moved through arenas in CPU memory.
    alignment: of offsets and lengths of a transfer, in bytes.
    capacity: bytes that a rank may use where the configuration has no limit for the tier; None: no limit.
    rates: how fast its drives are; None: as the hardware profile (`infinity.plan.hardware`) has it.

    What moves its bytes is its back end (`infinity.memory.tiers`). A tier is compared by identity, and copied and
    pickled as a reference by name.
    """

    __slots__ = ("addressable", "alignment", "capacity", "on_device", "rates", "value")

    GPU: ClassVar[Tier]
    CPU: ClassVar[Tier]
    NVME: ClassVar[Tier]

    def __init__(
        self, value: str, *, addressable: bool, on_device: bool = False, alignment: int = CACHE_LINE,
        capacity: int | None = None, rates: DriveRates | None = None,
    ) -> None:  # fmt: skip
        self.value = value
        self.rates = rates
        self.addressable = addressable
        self.on_device = on_device
        self.alignment = alignment
        self.capacity = capacity

    @property
    def on_drive(self) -> bool:
        """Whether the bytes are moved through an arena to be used."""
        return not self.addressable

    @classmethod
    def register(cls, tier: Tier) -> Tier:
        """Add a tier behind the others, as the slowest; ValueError where its name is taken."""
        if tier.value in _tiers:
            raise ValueError(f"there is a tier {tier.value!r} already")
        _tiers[tier.value] = tier
        return tier

    @classmethod
    def unregister(cls, tier: Tier) -> None:
        """Remove a tier that `register` added."""
        del _tiers[tier.value]

    @classmethod
    def named(cls, value: str) -> Tier:
        """The tier of a name; KeyError where there is none."""
        return _tiers[value]

    def __reduce__(self) -> tuple[Callable[[str], Tier], tuple[str]]:
        return Tier.named, (self.value,)

    def __str__(self) -> str:
        return f"Tier.{self.value.upper()}"

    __repr__ = __str__


for _name, _tier in (
    ("GPU", Tier("gpu", addressable=True, on_device=True)),
    ("CPU", Tier("cpu", addressable=True)),
    ("NVME", Tier("nvme", addressable=False, alignment=EXTENT_ALIGNMENT)),
):
    setattr(Tier, _name, Tier.register(_tier))


def drive_names() -> set[str]:
    """Return the names of the tiers of drives, those that were added included."""
    return {tier.value for tier in Tier if tier.on_drive}
