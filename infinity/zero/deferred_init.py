"""The values of a model while it is being built under `infinity.Init`, in bounded memory.

Every parameter that a module registers is adopted. The latest ones stay in memory. Beyond a bound the oldest ones are
written to this rank's files on the tier that the configuration names for parameters, and are released. Code that then
initialises such a parameter (an in-place function, a copy, an index) makes it whole again, and its change is kept. So
the model's own constructor builds a model of any size, with the values that an ordinary construction would give.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from infinity.distributed.process_groups import ProcessGroups
from infinity.errors import ConfigError, StateError
from infinity.memory.pages import page_aligned
from infinity.memory.tiers.base import QueueOptions
from infinity.memory.tiers.nvme import NvmeTier
from infinity.memory.tiers.pinned import trim
from infinity.ops.transfer import Transfer
from infinity.plan.types import EXTENT_ALIGNMENT, Extent, align_up
from infinity.zero import parameter

# Bytes of values in memory at once, besides the parameter being worked on.
WINDOW_NBYTES = 256 << 20
# Swap files of the spool grow by whole files of at least this many bytes.
_FILE_NBYTES = 1 << 30

# Bytes written at a time, and how many such parts are in flight.
_PART_NBYTES = 8 << 20
_PARTS_MAX = 8


# Functions that replace every value of the only parameter among their arguments, so its old values are not read.
_OVERWRITES = {"normal_", "uniform_", "zero_"}


class WeightSource(Protocol):
    """The source of a parameter's values until the program changes them; the same on every rank.

    dtype: of the values in the source.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, target: Tensor) -> None:
        """Copy the parameter's elements from `start` on into `target` [n], converted to its floating dtype."""


@dataclass(slots=True)
class _Place:
    """The place of one parameter's values: memory (`data`), a file (`tier`, `extent`), or still its `origin`."""

    param: weakref.ref[nn.Parameter]
    data: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    tier: NvmeTier | None = None
    extent: Extent | None = None
    origin: WeightSource | None = None

    def put(self, tier: NvmeTier, extent: Extent) -> None:
        """The values have a place in a file."""
        self.tier, self.extent = tier, extent


class DeferredInit:
    """Adopts parameters and keeps their values. `directory` names the folders that values beyond the window go to;
    None: they stay in memory.
    """

    def __init__(self, directory: Sequence[str] | None, *, groups: ProcessGroups, timeout_seconds: float) -> None:
        self._directory = directory
        # The engine that takes the model over takes the process groups with it.
        self.groups = groups
        self._timeout = timeout_seconds
        self._places: dict[int, _Place] = {}
        # Parameters whose values are in memory, the one used longest ago first.
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._files: list[tuple[NvmeTier, int]] = []
        self._freed_nbytes = 0
        # Parts on their way to the drive, with the memory that they lie in, and memory for others.
        self._writing: deque[tuple[Transfer, Tensor]] = deque()
        self._rooms: list[Tensor] = []
        # A parameter's values on their way back.
        self._coming: dict[int, tuple[Tensor, list[Transfer]]] = {}
        # Keys of parameters that the model has dropped (one that was tied to another) and that are not yet forgotten.
        self._dead: list[int] = []
        # Whether the model is still being built: then using a parameter makes it whole.
        self.open = True
        # What origins need open.
        self.resources = ExitStack()

    @property
    def held_nbytes_max(self) -> int:
        """Bytes of values that lie in memory at a time, besides the parameter being worked on."""
        if self._directory is not None:
            return WINDOW_NBYTES
        return sum(_nbytes(place) for place in self._places.values() if place.data is not None)

    def attach(self, param: nn.Parameter, name: str, origin: WeightSource | None = None) -> None:
        """Adopt a parameter that a module has just registered; a known parameter is left as it is.

        origin: the source of its values. They are read from there when the program first uses the parameter, and its
        own data is ignored.
        """
        self._forget_dead()
        if id(param) in self._places or param.is_meta or isinstance(param, nn.UninitializedParameter):
            return
        key, dead = id(param), self._dead
        alive = weakref.ref(param, lambda _: dead.append(key))
        if origin is not None:
            self._places[key] = _Place(alive, None, param.shape, param.dtype, origin=origin)
            parameter.attach(param, self, name)
            parameter.release(param, parameter.placeholder(param.shape, param.dtype, param.device))
            return
        data = param.data
        self._places[key] = _Place(alive, data, data.shape, data.dtype)
        parameter.attach(param, self, name)
        self._use(id(param))

    def materialize(self, params: Sequence[nn.Parameter], use: str) -> None:
        """Make released parameters whole again, all of one operation at once, while the model is being built."""
        if not self.open:
            raise StateError(
                f"{parameter.name_of(params[0])} is on its tier since the model was built, and {use} needs its data: "
                "pass the model to infinity.initialize() first, then use infinity.read() or infinity.modify()"
            )
        for param in params:
            place = self._places[id(param)]
            if parameter.is_released(param):
                replaced = use in _OVERWRITES and len(params) == 1 and id(param) not in self._coming
                fresh = torch.empty(place.shape, dtype=place.dtype, device="cpu") if replaced else None
                place.data = self._load(place) if fresh is None else fresh
                parameter.restore(param, place.data)
            self._recent.pop(id(param), None)
            self._recent[id(param)] = None
        self._shrink(keep=len(params))

    def holds(self, param: nn.Parameter) -> bool:
        self._forget_dead()
        return id(param) in self._places

    def dtype(self, param: nn.Parameter) -> torch.dtype:
        """The dtype that a parameter's values have where they come from."""
        place = self._places[id(param)]
        return place.origin.dtype if place.origin is not None and self.at_origin(param) else place.dtype

    def at_origin(self, param: nn.Parameter) -> bool:
        """Return whether a parameter's values are still those of its origin."""
        self._forget_dead()
        place = self._places.get(id(param))
        return place is not None and place.origin is not None and place.data is None and place.extent is None

    def read(self, param: nn.Parameter, start: int, target: Tensor) -> None:
        """Copy the parameter's elements from `start` on into `target` ([n]), converted to its dtype."""
        origin = self._places[id(param)].origin
        if origin is not None and self.at_origin(param):
            origin.read(start, target)
        else:
            target.copy_(self.values(param)[start : start + target.numel()])

    def values(self, param: nn.Parameter) -> Tensor:
        """A parameter's values, flat; what is written into them is kept. Valid until the next call."""
        place = self._places[id(param)]
        if not parameter.is_released(param):
            place.data = param.data = param.data.contiguous()
        elif place.data is None:
            place.data = self._load(place)
        self._use(id(param))
        assert place.data is not None
        return place.data.detach().view(-1)

    def prefetch(self, param: nn.Parameter) -> None:
        """Begin to read the values of a parameter that is wanted next, if they lie in a swap file."""
        place = self._places.get(id(param))
        if place is not None and place.data is None and place.extent is not None and not self._coming:
            self._drain()
            self._coming[id(param)] = self._submit_reads(place)

    def forget(self, param: nn.Parameter) -> None:
        """The engine has taken the values over: free them here."""
        self._forget(id(param))

    def _forget_dead(self) -> None:
        """Note that a parameter was freed. That may happen while the places are iterated, so it is forgotten later."""
        while self._dead:
            self._forget(self._dead.pop())

    def _forget(self, key: int) -> None:
        place = self._places.pop(key, None)
        self._recent.pop(key, None)
        if (coming := self._coming.pop(key, None)) is not None:
            for read in coming[1]:
                read.wait()
        if place is not None and not any(other.tier is place.tier for other in self._places.values()):
            self._close_file(place.tier)

    def seal(self) -> None:
        """End the construction: a released parameter that the program uses from now on raises StateError."""
        self.open = False
        self._drain()
        self._rooms.clear()

    def __del__(self) -> None:
        # A model that was built and never trained: its files go with it.
        self.close()

    def close(self) -> None:
        """Remove every file and forget every value."""
        # Their queues end what is in flight.
        for tier, _ in self._files:
            tier.close()
        self._files.clear()
        self._writing.clear()
        self._coming.clear()
        self._rooms.clear()
        self.resources.close()
        self._places.clear()
        self._recent.clear()

    def _use(self, key: int) -> None:
        """Note a use, and write out the parameters used longest ago until the window is within its bound."""
        self._recent.pop(key, None)
        self._recent[key] = None
        self._shrink(keep=1)

    def _shrink(self, keep: int) -> None:
        """Write out parameters until the window is within its bound; the latest `keep` parameters stay."""
        self._forget_dead()
        if self._directory is None:
            return
        held = sum(_nbytes(self._places[key]) for key in self._recent)
        while held > WINDOW_NBYTES and len(self._recent) > keep:
            oldest = next(iter(self._recent))
            held -= _nbytes(self._places[oldest])
            self._spill(self._places[oldest])
            del self._recent[oldest]

    def _spill(self, place: _Place) -> None:
        """Write a parameter's values if they are new, and release it."""
        param = place.param()
        if param is None:
            place.data = None
            return
        assert place.data is not None
        if not parameter.is_released(param):
            place.data = param.data
        nbytes = _nbytes(place)
        if nbytes:
            if place.extent is None:
                place.put(*self._allocate(align_up(nbytes, EXTENT_ALIGNMENT)))
            assert place.tier is not None and place.extent is not None
            self._write(place.tier, place.extent, place.data.detach().contiguous().view(-1).view(torch.uint8))
        if not parameter.is_released(param):
            parameter.release(param, parameter.placeholder(place.shape, place.dtype, place.data.device))
        place.data = None
        self._freed_nbytes += nbytes
        if self._freed_nbytes >= WINDOW_NBYTES // 4:
            # The allocator keeps what constructors gave back, in pieces that the next layer does not fit.
            self._freed_nbytes = 0
            trim()

    def _write(self, tier: NvmeTier, extent: Extent, values: Tensor) -> None:
        """Submit writes of `values` (uint8, flat) in parts, from buffers that direct I/O accepts."""
        for begin in range(0, values.numel(), _PART_NBYTES):
            part = values[begin : begin + _PART_NBYTES]
            room = self._room()
            room[: part.numel()].copy_(part)
            nbytes = align_up(part.numel(), EXTENT_ALIGNMENT)
            self._writing.append((tier.write(Extent(extent.offset + begin, nbytes), room[:nbytes]), room))

    def _room(self) -> Tensor:
        """Return memory for a part: new memory, or that of the oldest part in flight, once it is written."""
        if self._rooms:
            return self._rooms.pop()
        if len(self._writing) < _PARTS_MAX:
            return page_aligned(_PART_NBYTES)
        transfer, room = self._writing.popleft()
        transfer.wait()
        return room

    def _drain(self) -> None:
        """Wait until every part is on the drive."""
        while self._writing:
            transfer, room = self._writing.popleft()
            transfer.wait()
            self._rooms.append(room)

    def _load(self, place: _Place) -> Tensor:
        if place.extent is None or place.tier is None:
            fresh = torch.empty(place.shape, dtype=place.dtype, device="cpu")
            if place.origin is not None:
                place.origin.read(0, fresh.view(-1))
            return fresh
        coming = self._coming.pop(id(place.param()), None)
        if coming is None:
            self._drain()
            coming = self._submit_reads(place)
        buffer, reads = coming
        for read in reads:
            read.wait()
        numel = place.shape.numel()
        return buffer.view(place.dtype)[:numel].view(place.shape)

    def _submit_reads(self, place: _Place) -> tuple[Tensor, list[Transfer]]:
        assert place.extent is not None and place.tier is not None
        offset, nbytes = place.extent.offset, place.extent.nbytes
        buffer = page_aligned(nbytes)
        # Cut as it was written: of each part the tier knows a checksum.
        parts = [(begin, buffer[begin : begin + _PART_NBYTES]) for begin in range(0, nbytes, _PART_NBYTES)]
        return buffer, [place.tier.read(Extent(offset + begin, part.numel()), part) for begin, part in parts]

    def _allocate(self, nbytes: int) -> tuple[NvmeTier, Extent]:
        """A place in the newest swap file, or in a new one."""
        assert self._directory is not None
        if not self._files or self._files[-1][1] + nbytes > self._files[-1][0].nbytes:
            size = max(_FILE_NBYTES, nbytes)
            options = QueueOptions(timeout_seconds=self._timeout)
            tier = NvmeTier.open(self._directory, nbytes=size, rank=self.groups.ranks.rank, options=options)
            self._files.append((tier, 0))
        tier, used = self._files[-1]
        self._files[-1] = (tier, used + nbytes)
        return tier, Extent(used, nbytes)

    def _close_file(self, tier: NvmeTier | None) -> None:
        """Remove a swap file without values; the newest one stays while parameters may still be registered."""
        for index, (candidate, _) in enumerate(self._files):
            if candidate is tier and not self.open:
                candidate.close()
                del self._files[index]
                return


def _nbytes(place: _Place) -> int:
    return place.shape.numel() * place.dtype.itemsize


def spool_of(params: list[nn.Parameter]) -> DeferredInit | None:
    """The spool that keeps a model's parameters, if it was built under `Init`."""
    spools = {
        id(keeper): keeper
        for param in params
        if isinstance(keeper := param.__dict__.get("_infinity_keeper"), DeferredInit)
    }
    if len(spools) > 1:
        raise ConfigError(
            "the model's parameters were built under different infinity.Init contexts: build it under one"
        )
    return next(iter(spools.values()), None)
