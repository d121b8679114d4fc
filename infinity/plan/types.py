"""The words of the plan: tiers, kinds, dtypes by name, and what one partition is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NamedTuple

from infinity.plan.palette import KINDS

# Each dtype by the name that the plan uses: torch's name, the name in safetensors files, bytes an element.
_DTYPES = {
    "fp64": ("float64", "F64", 8), "fp32": ("float32", "F32", 4), "bf16": ("bfloat16", "BF16", 2),
    "fp16": ("float16", "F16", 2), "int64": ("int64", "I64", 8), "int32": ("int32", "I32", 4),
    "int16": ("int16", "I16", 2), "int8": ("int8", "I8", 1), "uint8": ("uint8", "U8", 1), "bool": ("bool", "BOOL", 1),
    "fp8_e4m3fn": ("float8_e4m3fn", "F8_E4M3", 1), "fp8_e5m2": ("float8_e5m2", "F8_E5M2", 1),
}  # fmt: skip
TORCH_NAMES = {name: theirs for name, (theirs, _, _) in _DTYPES.items()}
SAFETENSORS_NAMES = {name: theirs for name, (_, theirs, _) in _DTYPES.items()}
DTYPE_NBYTES = {name: nbytes for name, (_, _, nbytes) in _DTYPES.items()}
# Values of these are converted into each other.
FLOATING_DTYPES = ("fp64", "fp32", "bf16", "fp16")

# O_DIRECT wants offsets and lengths in multiples of the logical block; 4 KiB serves 512-byte and 4Kn drives alike.
EXTENT_ALIGNMENT = 4096
# A large page of CPU memory.
HUGE_PAGE = 2 << 20
# A checkpoint is written in blocks of so many bytes; so many at a time pass through memory of their own, where they
# cannot be written from where they are.
SAVE_BLOCK_NBYTES, SAVE_BLOCKS = 4 << 20, 8
# Sections of a buffer and parameters of a unit start on a cache line.
CACHE_LINE = 64


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


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

    How fast a tier is stands in the hardware profile (`infinity.plan.hardware`); what moves its bytes is its back end
    (`infinity.memory.tiers`). A tier is compared by identity, and copied and pickled as a reference by name.
    """

    __slots__ = ("addressable", "alignment", "capacity", "on_device", "value")

    GPU: ClassVar[Tier]
    CPU: ClassVar[Tier]
    NVME: ClassVar[Tier]

    def __init__(
        self, value: str, *, addressable: bool, on_device: bool = False, alignment: int = CACHE_LINE,
        capacity: int | None = None,
    ) -> None:  # fmt: skip
        self.value = value
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


def memory_names(*, accelerator: bool) -> dict[Tier, str]:
    """Return the name of the memory behind each tier, for tables and messages.

    Without an accelerator the tiers in memory are one, the process's: they share the name "device (cpu)".
    """
    return {tier: tier.value if accelerator or tier.on_drive else "device (cpu)" for tier in Tier}


class Kind(Enum):
    """What bytes are."""

    # Parameters in compute precision, this rank's partition.
    PARAM = "param"
    # Reduced gradients, this rank's partition.
    GRAD = "grad"
    # Signed 16-bit difference between the fp32 master and its bf16 rounding: with PARAM it is the master.
    REMAINDER = "remainder"
    # The fp32 master, where PARAM is fp16.
    MASTER = "master"
    # First moment of Adam, fp32.
    EXP_AVG = "exp_avg"
    # Second moment of Adam, fp32.
    EXP_AVG_SQ = "exp_avg_sq"
    # States of other optimizers, by torch's names, fp32.
    MOMENTUM_BUFFER = "momentum_buffer"
    SUM = "sum"
    SQUARE_AVG = "square_avg"
    GRAD_AVG = "grad_avg"
    EXP_INF = "exp_inf"
    STATE_1 = "state_1"
    STATE_2 = "state_2"
    STATE_3 = "state_3"
    STATE_4 = "state_4"
    # All optimizer states of one sub-group, adjacent: REMAINDER or MASTER, then what the optimizer keeps.
    STATES = "states"
    # Whole parameters, gathered for compute.
    FULL = "full"
    # Whole gradients on the device: inputs of a reduction, or kept until the boundary at stages 0 and 1.
    FULL_GRAD = "full_grad"
    # What autograd keeps from forward for backward, and the temporaries of both.
    ACTIVATION = "activation"
    # The model as it was built, until its values are in their partitions.
    MODEL = "model"
    # Pools that hold no value of their own: space reserved and not in use.
    POOL = "pool"

    __hash__ = object.__hash__

    @property
    def label(self) -> str:
        """As tables, messages and pictures call it."""
        return KINDS[self.value].label


# What Adam keeps of an element.
ADAM_MOMENTS = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)


class Key(NamedTuple):
    """Names one partition of this rank: PARAM and GRAD by unit index, STATES by sub-group index."""

    # A tuple, since keys are looked up all the time: its hash and comparison are not Python functions.
    kind: Kind
    index: int  # type: ignore[assignment]

    def __str__(self) -> str:
        owner = "sub-group" if self.kind is Kind.STATES else "unit"
        return f"{self.kind.value} of {owner} {self.index}"


@dataclass(frozen=True, slots=True)
class ArraySection:
    """One typed array inside a partition's buffer, at a byte offset."""

    kind: Kind
    dtype: str
    numel: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Extent:
    """A partition's place in this rank's NVMe file."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """One rank's slice at rest: what it holds, where its home is, and, on NVMe, which extents are its own."""

    key: Key
    sections: tuple[ArraySection, ...]
    home: Tier
    extent: Extent | None = None
    # A second one, where a step may begin before it is known to be wanted: see [Note: slots].
    spare: Extent | None = None
    # Bytes of the buffer that holds it in memory, padded so that one aligned transfer moves it.
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        # Sections lie one behind the other.
        end = self.sections[-1].offset + self.sections[-1].nbytes if self.sections else 0
        nbytes = align_up(end, self.home.alignment)
        object.__setattr__(self, "nbytes", nbytes)


def pack_sections(parts: list[tuple[Kind, str, int]]) -> tuple[ArraySection, ...]:
    """Lay (kind, dtype, numel) arrays one behind the other, each on a cache line."""
    sections = []
    offset = 0
    for kind, dtype, numel in parts:
        section = ArraySection(kind=kind, dtype=dtype, numel=numel, offset=offset)
        sections.append(section)
        offset = align_up(offset + section.nbytes, CACHE_LINE)
    return tuple(sections)
