"""The words of the plan: tiers, kinds, dtypes by name, and what one partition is made of.

Ranks and axes: a pure map between a global rank and its coordinate. Creates no process group.

Pipeline is the outermost axis and tensor the innermost, so that the ranks of one tensor group are neighbours on a node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from infinity.base.palette import KINDS
from infinity.base.tiers import BLOCK_NUMEL as BLOCK_NUMEL
from infinity.base.tiers import CACHE_LINE as CACHE_LINE
from infinity.base.tiers import EXTENT_ALIGNMENT as EXTENT_ALIGNMENT
from infinity.base.tiers import DriveRates as DriveRates
from infinity.base.tiers import Tier as Tier
from infinity.config.resolve import ResolvedConfig

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

# A large page of CPU memory.
HUGE_PAGE = 2 << 20
# A checkpoint is written in blocks of so many bytes; so many at a time pass through memory of their own, where they
# cannot be written from where they are.
SAVE_BLOCK_NBYTES, SAVE_BLOCKS = 4 << 20, 8


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


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
    # Adam's moments in 8 bits by bitsandbytes' names: a code for each element, and the largest magnitude of each block.
    CODES_1 = "state1"
    ABSMAX_1 = "absmax1"
    CODES_2 = "state2"
    ABSMAX_2 = "absmax2"
    # All optimizer states of one sub-group, adjacent: REMAINDER or MASTER, then what the optimizer keeps.
    STATES = "states"
    # Whole parameters, gathered for compute.
    FULL = "full"
    # Whole gradients on the device: inputs of a reduction, or kept until the boundary.
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

    @property
    def block(self) -> int:
        """Elements that share one value: those of a block, counted from the parameter's first element."""
        return BLOCK_NUMEL if self in (Kind.ABSMAX_1, Kind.ABSMAX_2) else 1

    @property
    def dtype(self) -> str:
        """Of a state of an optimizer."""
        return "uint8" if self in (Kind.CODES_1, Kind.CODES_2) else "fp32"

    def span(self, start: int, numel: int) -> slice:
        """The values of elements [start, start + numel); `start` is the first of a block."""
        return slice(start // self.block, -(-(start + numel) // self.block))


# What Adam keeps of an element.
ADAM_MOMENTS = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
# The same in 8 bits.
CODED_MOMENTS = (Kind.CODES_1, Kind.ABSMAX_1, Kind.CODES_2, Kind.ABSMAX_2)


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
    """One rank's slice at rest: what it holds, where its home is, and which extents are its own: on NVMe, or of copies
    there.
    """

    key: Key
    sections: tuple[ArraySection, ...]
    home: Tier
    extent: Extent | None = None
    # A second one, where the value before a step is to outlast it: see [Note: slots].
    spare: Extent | None = None
    # Bytes of the buffer that holds it in memory, padded so that one aligned transfer moves it.
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", aligned_nbytes(self.sections, self.home))

    @property
    def copied(self) -> bool:
        """Whether the value lies in memory, and its extents are of copies."""
        return self.extent is not None and not self.home.on_drive

    @property
    def drive(self) -> Tier | None:
        """The tier of the extents; None without any."""
        return self.home if self.home.on_drive else Tier.NVME if self.extent is not None else None


# What lies in memory is copied to NVMe in pieces of so many bytes.
COPY_NBYTES = 8 << 20


def moved_at_once(
    extent: Extent | None, nbytes: int, prefix_nbytes: int, *, copied: bool
) -> list[tuple[Extent, int]]:
    """What of a partition is written to one of its extents at once, and so has a checksum, each with its first byte of
    the value: the bytes before the zero tail, or pieces of a copy of what lies in memory.
    """
    if extent is None:
        return []
    end, step = (nbytes, COPY_NBYTES) if copied else (prefix_nbytes, max(prefix_nbytes, 1))
    return [(Extent(extent.offset + begin, min(step, end - begin)), begin) for begin in range(0, end, step)]


def aligned_nbytes(sections: tuple[ArraySection, ...], home: Tier) -> int:
    """Bytes of sections that lie one behind the other, padded as their home wants it."""
    end = sections[-1].offset + sections[-1].nbytes if sections else 0
    return align_up(end, home.alignment)


def pack_sections(parts: list[tuple[Kind, str, int]]) -> tuple[ArraySection, ...]:
    """Lay (kind, dtype, numel) arrays one behind the other, each on a cache line."""
    sections = []
    offset = 0
    for kind, dtype, numel in parts:
        section = ArraySection(kind=kind, dtype=dtype, numel=numel, offset=offset)
        sections.append(section)
        offset = align_up(offset + section.nbytes, CACHE_LINE)
    return tuple(sections)


class Coordinate(NamedTuple):
    """Where a rank stands on each axis."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the parallel axes; `world_size` is the product of `dp`, `pp` and `tp`. `local_size` is the number of
    ranks on one node.

    Partitions lie along `dp`. So many neighbours on it as `sp` says share each sequence, and other samples begin with
    the next ones.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    local_size: int = 1
    sp: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "pp", "tp", "local_size", "sp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"the {axis} axis has size {getattr(self, axis)}; it must be at least 1")
        if self.dp % self.sp:
            raise ValueError(f"{self.dp} ranks of the data axis are not divided by {self.sp} to a sequence")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp

    @classmethod
    def of(cls, config: ResolvedConfig) -> Topology:
        """The axes that a resolved configuration divides its ranks into."""
        return cls(config.data, config.pipeline, config.tensor, config.local_size, config.sequence)

    @property
    def replicas(self) -> int:
        """Groups of ranks that train on samples of their own."""
        return self.dp // self.sp

    def in_words(self) -> str:
        """The ranks, and where there is more than the data axis how they are divided: "8 ranks (data 2 x tensor 4)"."""
        axes = {"pipeline": self.pp, "data": self.replicas, "sequence": self.sp, "tensor": self.tp}
        along = f" ({' x '.join(f'{name} {size}' for name, size in axes.items() if size > 1)})"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return ranks + (along if self.world_size > self.replicas else "")

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of global `rank`; raises ValueError when the rank is outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        return Coordinate(pp=rank // (self.dp * self.tp), dp=rank // self.tp % self.dp, tp=rank % self.tp)

    def rank(self, coordinate: Coordinate) -> int:
        """The global rank at `coordinate`: the inverse of `coordinate()`."""
        return (coordinate.pp * self.dp + coordinate.dp) * self.tp + coordinate.tp

    def axis_members(self, rank: int, axis: str) -> tuple[int, ...]:
        """Global ranks that differ from `rank` on `axis` only, in the axis' order; "sp": that share its sequences."""
        here = self.coordinate(rank)
        if axis == "sp":
            first = here.dp - here.dp % self.sp
            return tuple(self.rank(here._replace(dp=index)) for index in range(first, first + self.sp))
        return tuple(self.rank(here._replace(**{axis: index})) for index in range(getattr(self, axis)))

    def axis_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The members of every group along `axis`, in the order of their first ranks: each rank is in one."""
        return tuple(dict.fromkeys(self.axis_members(rank, axis) for rank in range(self.world_size)))
