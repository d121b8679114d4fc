"""The values of a model while it is being built under `infinity.Init`, in bounded memory.

Every parameter that a module registers is adopted. The latest ones stay in memory. Beyond a bound the oldest ones are
written to this rank's files on the tier that the configuration names for parameters, and are released. Code that then
initialises such a parameter (an in-place function, a copy, an index) makes it whole again, and its change is kept. So
the model's own constructor builds a model of any size, with the values that an ordinary construction would give.

[Note: slices] Each rank builds the whole model, and what rank 0 has built counts. Once the model is built ("sealed"),
a parameter that all ranks read or modify together (`infinity.zero.access`) has one value on every rank. From
then on a rank keeps its slice of it only (`infinity.zero.deferred_init`), but for small parameters. Whether a parameter
is cut is decided only by what all ranks do alike: by the sizes of parameters and the order of these blocks.

Slices of a parameter's values that ranks keep before an engine has the model, exchanged a piece at a time.

Rank r of n keeps elements r * ceil(numel / n) and following of the flat values; the last ranks may keep fewer, or none.
All values are in CPU memory, and travel as bytes.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from infinity.base.transfer import Transfer
from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.groups import ProcessGroups
from infinity.errors import StateError
from infinity.memory import scratch
from infinity.memory.scratch import SwapFiles, SwapPlace
from infinity.memory.tiers.pinned import trim
from infinity.plan.types import EXTENT_ALIGNMENT, align_up
from infinity.zero import parameter

# Bytes that are exchanged at a time.
PIECE_NBYTES = 16 << 20


def kept_range(numel: int, group: AxisGroup) -> tuple[int, int]:
    """Return the elements, from and to, that this rank keeps of `numel`."""
    rows = -(-numel // group.size)
    return min(group.index * rows, numel), min((group.index + 1) * rows, numel)


def broadcast_values(values: Tensor, group: AxisGroup, source: int, name: str) -> None:
    """Copy the values ([numel], contiguous) of rank `source` into those of every rank. Collective."""
    if values.numel() and group.size > 1:
        collectives.broadcast(values.view(torch.uint8), group, source, f"broadcast of {name}")


def keep_broadcast(values: Tensor, group: AxisGroup, source: int, name: str) -> Tensor:
    """Return this rank's slice (a new tensor) of the values ([numel], contiguous) of rank `source`. Collective.

    The other ranks' values are neither read nor changed; what arrives takes `PIECE_NBYTES` at a time.
    """
    start, stop = kept_range(values.numel(), group)
    kept = torch.empty(stop - start, dtype=values.dtype, device="cpu")
    step = PIECE_NBYTES // values.dtype.itemsize
    room = None if group.index == source else torch.empty(min(step, values.numel()), dtype=values.dtype, device="cpu")
    for begin in range(0, values.numel(), step):
        end = min(begin + step, values.numel())
        piece = values[begin:end].cpu() if room is None else room[: end - begin]
        broadcast_values(piece, group, source, name)
        first, last = max(begin, start), min(end, stop)
        if first < last:
            kept[first - start : last - start].copy_(piece[first - begin : last - begin])
    return kept


def gather_range(
    kept: Tensor, numel: int, group: AxisGroup, name: str, wanted: tuple[int, int] | None = None
) -> Tensor:
    """Return elements `wanted` (from, to; None: all) of `numel` values of which every rank keeps its slice. Collective.

    Ranks may want different elements.
    """
    start, stop = wanted or (0, numel)
    found = torch.empty(stop - start, dtype=kept.dtype, device="cpu")
    rows = -(-numel // group.size)
    step = max(PIECE_NBYTES // (kept.dtype.itemsize * group.size), 1)
    mine = torch.zeros(min(step, rows), dtype=kept.dtype, device="cpu")
    full = torch.empty(group.size * mine.numel(), dtype=kept.dtype, device="cpu")
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        own = kept[begin : begin + count]
        mine[: own.numel()].copy_(own)
        everyone = full[: group.size * count]
        moving = collectives.all_gather(
            everyone.view(torch.uint8), mine[:count].view(torch.uint8), group, f"gather of {name}"
        )
        moving.wait()
        for index, row in enumerate(everyone.view(group.size, count)):
            base = index * rows + begin
            first, last = max(base, start), min(base + count, (index + 1) * rows, numel, stop)
            if first < last:
                found[first - start : last - start].copy_(row[first - base : last - base])
    return found


# Bytes of values in memory at once, besides the parameter being worked on.
WINDOW_NBYTES = 256 << 20
# Of a parameter that is larger than the window, so many bytes are read at a time.
_SPAN_NBYTES = 32 << 20
# A parameter of at most this many bytes leaves the window last, and may be used at any time: biases and norms, which
# programs change before they train. One of several dimensions is cut once such take a quarter of the window.
_SMALL_NBYTES = 1 << 20
_SERIALS = itertools.count()
# In the attributes of what `detach()` has returned for a released parameter.
_STANDS_FOR = "_infinity_stands_for"


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
    """The place of one parameter's values: memory (`data`), a file (`swapped`), or still its `origin`.

    serial: the parameters' order, the same on every rank.
    """

    param: weakref.ref[nn.Parameter]
    data: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    serial: int
    swapped: SwapPlace | None = None
    origin: WeightSource | None = None
    # The elements, from and to, that `data` or the file have of the flat values; None for all. See [Note: slices].
    kept: tuple[int, int] | None = None
    # How many blocks hold the parameter whole, and how many changes of theirs all ranks have taken over.
    blocks: int = 0
    changes: int = 0
    # Whether it counts as a small one that all ranks have whole.
    counted: bool = False

    @property
    def numel(self) -> int:
        """How many elements this rank keeps."""
        return self.shape.numel() if self.kept is None else self.kept[1] - self.kept[0]

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self.numel * self.dtype.itemsize

    def put(self, place: SwapPlace) -> None:
        """The values have a place in a file."""
        self.swapped, self.origin = place, None

    def take(self, data: Tensor) -> None:
        """The whole values are `data`, which may have another shape and dtype than before."""
        self.data, self.shape, self.dtype, self.kept = data, data.shape, data.dtype, None

    def cut(self, data: Tensor, shape: torch.Size, kept: tuple[int, int]) -> None:
        """This rank keeps a slice."""
        self.data, self.shape, self.dtype, self.kept, self.origin = data, shape, data.dtype, kept, None

    def enter(self) -> bool:
        """A block begins to hold the parameter whole; return whether it is the outermost."""
        self.blocks += 1
        return self.blocks == 1

    def leave(self) -> bool:
        """A block ends; return whether none is left."""
        self.blocks -= 1
        return self.blocks == 0

    def change(self) -> None:
        """All ranks have taken over a change."""
        self.changes += 1
        self.origin = None

    def count(self) -> None:
        """It counts as a small one."""
        self.counted = True


class DeferredInit:
    """Adopts parameters and keeps their values. `directory` names the folders that values beyond the window go to;
    None: they stay in memory.
    """

    def __init__(self, directory: Sequence[str] | None, *, groups: ProcessGroups, timeout_seconds: float) -> None:
        # The engine that takes the model over takes the process groups with it.
        self.groups = groups
        rank = groups.ranks.rank
        self._files = None if directory is None else SwapFiles(directory, rank=rank, timeout_seconds=timeout_seconds)
        self._places: dict[int, _Place] = {}
        self._serials = itertools.count()
        # Which one this is of all that the process has made.
        self.serial = next(_SERIALS)
        # Parameters whose values are in memory, the one used longest ago first; none that a block holds.
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._freed_nbytes = 0
        # Bytes of small parameters that all ranks have whole, those of parameters that are gone included.
        self._small_nbytes = 0
        # A parameter's values on their way back.
        self._coming: dict[int, tuple[Tensor, list[Transfer]]] = {}
        # Of a parameter that is too large for the window, values that were read last: from and to.
        self._span: tuple[nn.Parameter, int, int, Tensor] | None = None
        # Keys of parameters that the model has dropped (one that was tied to another) and that are not yet forgotten.
        self._dead: list[int] = []
        # Whether the model is still being built: then using a parameter makes it whole.
        self.open = True
        # What origins need open, and others whose files have parameters of this one.
        self.resources = ExitStack()
        self._absorbed: list[DeferredInit] = []

    @property
    def held_nbytes_max(self) -> int:
        """Bytes of values that lie in memory at a time, besides the parameter being worked on."""
        if self._files is not None:
            return WINDOW_NBYTES
        return sum(place.nbytes for place in self._places.values() if place.data is not None)

    @property
    def released_nbytes(self) -> int:
        """Bytes of values in memory that no parameter shows."""
        return sum(
            place.data.nbytes
            for place in self._places.values()
            if place.data is not None and (param := place.param()) is not None and parameter.is_released(param)
        )

    def attach(self, param: nn.Parameter, name: str, origin: WeightSource | None = None) -> None:
        """Adopt a parameter that a module has just registered; a known parameter, and another's, are left as they are.

        origin: the source of its values. They are read from there when the program first uses the parameter, and its
        own data is ignored.
        """
        self._forget_dead()
        if id(param) in self._places or param.is_meta or isinstance(param, nn.UninitializedParameter):
            return
        if parameter.is_kept(param):
            return
        key, serial, alive = id(param), next(self._serials), self._watch(param)
        if origin is not None:
            self._places[key] = _Place(alive, None, param.shape, param.dtype, serial, origin=origin)
            parameter.attach(param, self, name)
            parameter.release(param, parameter.placeholder(param.shape, param.dtype, param.device))
            return
        data = param.data
        self._places[key] = _Place(alive, data, data.shape, data.dtype, serial)
        parameter.attach(param, self, name)
        self._use(key)

    @property
    def gathers_on_use(self) -> bool:
        """Whether an operation makes the parameters whole that it uses: while the model is being built."""
        return self.open

    def materialize(self, params: Sequence[nn.Parameter], use: str) -> None:
        """Make released parameters whole again, all of one operation at once: while the model is being built, and what
        is in memory or small later too.
        """
        if not self.open and not all(map(self._is_usable, params)):
            raise StateError(
                f"{parameter.name_of(params[0])} is on its tier since the model was built, and {use} needs its data: "
                "read it inside `with infinity.read(param):`, change it inside `with infinity.modify(param):` (on all "
                "ranks together), or pass the model to infinity.initialize() first"
            )
        for stand_in in [param for param in params if _STANDS_FOR in param.__dict__]:
            self.materialize([stand_in.__dict__[_STANDS_FOR]], use)
            parameter.restore(stand_in, stand_in.__dict__[_STANDS_FOR].data)
        params = [param for param in params if _STANDS_FOR not in param.__dict__]
        for param in params:
            place = self._places[id(param)]
            if parameter.is_released(param):
                replaced = use in _OVERWRITES and len(params) == 1 and id(param) not in self._coming
                fresh = torch.empty(place.shape, dtype=place.dtype, device="cpu") if replaced else None
                place.data = self._load(place) if fresh is None else fresh
                parameter.restore(param, place.data)
            self._recent.pop(id(param), None)
            if not place.blocks:
                self._recent[id(param)] = None
        self._shrink(keep=len(params))

    def fill_by_parts(self, param: nn.Parameter, fill: Callable[[Tensor], object]) -> bool:
        """Fill a parameter that is too large for the window, and is not in memory, while the model is being built: a
        part at a time, in order, so that random numbers are those of the whole. Return whether that was done.
        """
        place = self._places.get(id(param))
        if place is None or not self.open or not self._is_apart(place) or place.data is not None:
            return False
        assert self._files is not None
        self._span = None
        if place.swapped is None:
            place.put(self._files.allocate(align_up(place.nbytes, EXTENT_ALIGNMENT)))
        swapped, width, numel = place.swapped, place.dtype.itemsize, place.numel
        assert swapped is not None
        self._files.drain()
        # torch draws normal values 16 at a time, and those that are left over at the end anew with the 16 last ones.
        begins = range(0, max(numel - 15, 1), scratch.PART_NBYTES // width)
        for begin, end in pairwise((*begins, numel)):
            part = torch.empty(end - begin, dtype=place.dtype, device="cpu")
            fill(part)
            self._files.submit(swapped.file, swapped.extent.offset + begin * width, part.view(torch.uint8))
        return True

    def stand_in(self, param: nn.Parameter) -> Tensor | None:
        """Return what `detach()` of a released parameter gives once the model is built: a tensor of its shape that is
        released too. So `state_dict()` has every name and shape, and only a use of its values asks for them.
        """
        if self.open:
            return None
        other = nn.Parameter(parameter.placeholder(param.shape, param.dtype, param.device), requires_grad=False)
        parameter.attach(other, self, parameter.name_of(param))
        parameter.release(other, other.data)
        other.__dict__[_STANDS_FOR] = param
        return other

    def holds(self, param: nn.Parameter) -> bool:
        """Return whether this has the parameter's values."""
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
        return place is not None and place.origin is not None and place.data is None and place.swapped is None

    # What all ranks do together. See [Note: slices].

    def in_order(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return parameters in the order in which they were registered, which is the same on every rank."""
        return sorted(params, key=lambda param: self._places[id(param)].serial)

    def make_whole(self, param: nn.Parameter) -> None:
        """Make a parameter whole until `release_whole`. Collective where ranks keep slices of it."""
        place = self._places[id(param)]
        if not place.enter():
            return
        self._recent.pop(id(param), None)
        if place.kept is not None:
            name = parameter.name_of(param)
            values = gather_range(self._load(place), place.shape.numel(), self.groups.world, name)
            parameter.restore(param, values.view(place.shape))
        elif parameter.is_released(param):
            place.data = self._load(place)
            parameter.restore(param, place.data)

    def release_whole(self, param: nn.Parameter) -> None:
        """End `make_whole`: what ranks have not taken over is lost where they keep slices, and stays otherwise."""
        place = self._places[id(param)]
        if not place.leave():
            return
        if place.kept is not None:
            parameter.release(param, parameter.placeholder(place.shape, place.dtype, torch.device("cpu")))
        else:
            place.take(param.data)
        if place.data is not None:
            self._recent[id(param)] = None
        self._shrink(keep=0)

    def changes(self, param: nn.Parameter) -> int:
        """Return how many changes of a parameter all ranks have taken over."""
        return self._places[id(param)].changes

    def is_shared(self, param: nn.Parameter) -> bool:
        """Return whether every rank has rank 0's value of a parameter that is held."""
        return self.groups.world.size == 1 or self.open or self._places[id(param)].kept is not None

    def take_over(self, param: nn.Parameter, source: int, *, used: bool = False) -> None:
        """Give all ranks the value that a held parameter has on rank `source`. Collective.

        used: the block goes on, so each rank gets the whole value. Otherwise only where an outer block goes on.
        """
        place, world = self._places[id(param)], self.groups.world
        name = parameter.name_of(param)
        place.change()
        if world.size == 1:
            place.take(param.data)
            return
        whole = param.data.contiguous()
        flat = whole.view(-1)
        if not self._is_cut(place, whole):
            broadcast_values(flat, world, source, name)
            parameter.set_data(param, whole)
            place.take(whole)
            return
        kept = kept_range(flat.numel(), world)
        if used or place.blocks > 1:
            broadcast_values(flat, world, source, name)
            parameter.set_data(param, whole)
            place.cut(flat[slice(*kept)].clone(), whole.shape, kept)
        else:
            place.cut(keep_broadcast(flat, world, source, name), whole.shape, kept)

    def settle(self, param: nn.Parameter, wanted: tuple[int, int]) -> None:
        """Exchange slices so that this rank has the elements `wanted` (from, to), for good. Collective."""
        place = self._places[id(param)]
        values = gather_range(
            self._load(place), place.shape.numel(), self.groups.world, parameter.name_of(param), wanted
        )
        place.cut(values, place.shape, wanted)
        self._use(id(param))

    def is_sliced(self, param: nn.Parameter) -> bool:
        """Return whether ranks keep slices of a parameter."""
        return self.holds(param) and self._places[id(param)].kept is not None

    def _is_cut(self, place: _Place, values: Tensor) -> bool:
        """Decide whether ranks keep slices of a parameter from now on, the same on every rank."""
        if place.kept is not None or self.open or place.counted:
            return place.kept is not None
        if not _is_small(values.nbytes) or (
            values.ndim > 1 and self._small_nbytes + values.nbytes > WINDOW_NBYTES // 4
        ):
            return True
        self._small_nbytes += values.nbytes
        place.count()
        return False

    def _is_usable(self, param: nn.Parameter) -> bool:
        """Return whether a released parameter can be used once the model is built: uncut, and in memory or small."""
        place = self._places.get(id(param.__dict__.get(_STANDS_FOR, param)))
        return place is not None and place.kept is None and (place.data is not None or _is_small(place.nbytes))

    # What the engine asks that takes the model over.

    def read(self, param: nn.Parameter, start: int, target: Tensor) -> None:
        """Copy the parameter's elements from `start` on into `target` ([n]), converted to its dtype."""
        origin = self._places[id(param)].origin
        if origin is not None and self.at_origin(param):
            origin.read(start, target)
            return
        each = _SPAN_NBYTES // target.element_size()
        for begin in range(0, target.numel(), each):
            part = target[begin : begin + each]
            part.copy_(self.elements(param, start + begin, part.numel()))

    def elements(self, param: nn.Parameter, start: int, numel: int) -> Tensor:
        """Return elements of the flat values, of a slice those that it has. Valid until the next call."""
        place = self._places[id(param)]
        if place.kept is None and self._is_apart(place) and place.data is None and place.swapped is not None:
            return self._span_of(param, place, start, start + numel)
        if place.kept is None:
            return self.values(param)[start : start + numel]
        if place.data is None:
            place.data = self._load(place)
        self._use(id(param))
        assert place.data is not None
        return place.data[start - place.kept[0] :][:numel]

    def values(self, param: nn.Parameter) -> Tensor:
        """A parameter's values, flat; what is written into them is kept. Valid until the next call."""
        place = self._places[id(param)]
        if not parameter.is_released(param):
            param.data = param.data.contiguous()
            place.take(param.data)
        elif place.data is None:
            place.data = self._load(place)
        self._use(id(param))
        assert place.data is not None
        return place.data.detach().view(-1)

    def prefetch(self, param: nn.Parameter) -> None:
        """Begin to read the values of a parameter that is wanted next, if they lie in a swap file."""
        place = self._places.get(id(param))
        if place is None or (place.kept is None and self._is_apart(place)):
            return
        if place.data is None and place.swapped is not None and not self._coming:
            self._coming[id(param)] = self._submit_reads(place)

    def _is_apart(self, place: _Place) -> bool:
        """Whether a parameter is too large for the window: then its values come and go in parts."""
        return self._files is not None and place.nbytes > WINDOW_NBYTES

    def _span_of(self, param: nn.Parameter, place: _Place, start: int, stop: int) -> Tensor:
        """Return elements, from and to, of the flat values in a file. What lies around them is read with them, and kept
        for the next call.
        """
        if self._span is None or self._span[0] is not param or not self._span[1] <= start < stop <= self._span[2]:
            self._span = None
            each = scratch.PART_NBYTES // place.dtype.itemsize
            begin = start // each * each
            end = min(max(stop, begin + _SPAN_NBYTES // place.dtype.itemsize), place.numel)
            buffer, reads = self._submit_reads(place, begin, end)
            for read in reads:
                read.wait()
            self._span = param, begin, end, buffer.view(place.dtype)
        _, begin, _, values = self._span
        return values[start - begin : stop - begin]

    def absorb(self, other: DeferredInit, params: Sequence[nn.Parameter]) -> None:
        """Take parameters over from another, so that one has all of a model. Collective: `other` may close its groups.

        Files stay the other's, which is closed with this one unless it has parameters of another model left.
        """
        if other._files is not None:
            other._files.settle()
        for param in other.in_order([param for param in params if other.holds(param)]):
            key, serial = id(param), next(self._serials)
            self._places[key] = replace(other._places.pop(key), param=self._watch(param), serial=serial)
            if key in other._recent:
                del other._recent[key]
                self._recent[key] = None
            parameter.attach(param, self, parameter.name_of(param))
        self._absorbed.append(other)
        if not other._places:
            other.groups.close()
        self._shrink(keep=0)

    def meet_in(self, groups: ProcessGroups) -> None:
        """Communicate by other groups, with the same data axis, from now on."""
        self.groups = groups

    def forget(self, param: nn.Parameter) -> None:
        """The engine has taken the values over: free them here."""
        self._forget(id(param))

    def _watch(self, param: nn.Parameter) -> weakref.ref[nn.Parameter]:
        """Return a reference by which this hears that the parameter was freed."""
        key, dead = id(param), self._dead
        return weakref.ref(param, lambda _: dead.append(key))

    def _forget_dead(self) -> None:
        """Note that a parameter was freed. That may happen while the places are iterated, so it is forgotten later."""
        while self._dead:
            self._forget(self._dead.pop())

    def _forget(self, key: int) -> None:
        place = self._places.pop(key, None)
        self._recent.pop(key, None)
        self._span = None
        if (coming := self._coming.pop(key, None)) is not None:
            for read in coming[1]:
                read.wait()
        # The newest file stays while parameters may still be registered.
        if place is None or place.swapped is None or self._files is None or self.open:
            return
        file = place.swapped.file
        if not any(other.swapped is not None and other.swapped.file is file for other in self._places.values()):
            self._files.remove(file)

    def seal(self) -> None:
        """End the construction: a released parameter that the program uses from now on raises StateError.

        Large parameters in memory are released too, though their use is no error. Otherwise a `state_dict()` that a
        program holds while it loads the model would hold their memory after they have left it.
        """
        self.open = False
        if self._files is not None:
            self._files.settle()
        if self._files is None and self.groups.world.size == 1:
            return
        for place in self._places.values():
            param = place.param()
            if param is not None and not parameter.is_released(param) and not _is_small(place.nbytes):
                place.take(param.data.contiguous())
                parameter.release(param, parameter.placeholder(place.shape, place.dtype, param.device))

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # A model that was built and never trained: its files go with it. At the interpreter's end, when modules are
        # gone, tiers have removed theirs.
        if not ending():
            self.close()

    def close(self) -> None:
        """Remove every file and forget every value."""
        if self._files is not None:
            self._files.close()
        self._coming.clear()
        for other in self._absorbed:
            if not other._places:
                other.close()
        self._absorbed.clear()
        self.resources.close()
        self._places.clear()
        self._recent.clear()

    def _use(self, key: int) -> None:
        """Note a use, and write out the parameters used longest ago until the window is within its bound."""
        self._recent.pop(key, None)
        if not self._places[key].blocks:
            self._recent[key] = None
        self._shrink(keep=1)

    def _shrink(self, keep: int) -> None:
        """Write out parameters until the window is within its bound; the latest `keep` parameters stay."""
        self._forget_dead()
        if self._files is None:
            return
        held = sum(self._places[key].nbytes for key in self._recent)
        # Once the model is built, the memory of parts on their way to the drive counts too.
        bound = WINDOW_NBYTES if self.open else max(WINDOW_NBYTES - self._files.buffer_nbytes, WINDOW_NBYTES // 2)
        if held <= bound:
            return
        recent = list(self._recent)
        recent = recent[: len(recent) - keep]
        # A stable sort: each kind in the order of use.
        for key in sorted(recent, key=lambda key: _is_small(self._places[key].nbytes)):
            if held <= bound:
                break
            held -= self._places[key].nbytes
            self._spill(self._places[key])
            del self._recent[key]

    def _spill(self, place: _Place) -> None:
        """Write a parameter's values if they are new, and release it."""
        param = place.param()
        if param is None:
            place.data = None
            return
        assert self._files is not None and place.data is not None
        self._span = None
        if place.kept is None and not parameter.is_released(param):
            place.take(param.data)
        nbytes = place.nbytes
        if nbytes:
            space = align_up(nbytes, EXTENT_ALIGNMENT)
            # A smaller value goes where the former one lay.
            if place.swapped is not None and place.swapped.extent.nbytes >= space:
                swapped = place.swapped.first(space)
            else:
                swapped = self._files.allocate(space)
            place.put(swapped)
            self._files.write(swapped, place.data)
        if place.kept is None and not parameter.is_released(param):
            parameter.release(param, parameter.placeholder(place.shape, place.dtype, place.data.device))
        place.data = None
        self._freed_nbytes += nbytes
        if self._freed_nbytes >= WINDOW_NBYTES // 4:
            # The allocator keeps what constructors gave back, in pieces that the next layer does not fit.
            self._freed_nbytes = 0
            trim()

    def _load(self, place: _Place) -> Tensor:
        """Return the values that this rank keeps: in the parameter's shape, or a slice, flat."""
        if place.data is not None:
            return place.data
        shape = place.shape if place.kept is None else (place.numel,)
        if place.swapped is None:
            fresh = torch.empty(shape, dtype=place.dtype, device="cpu")
            if place.origin is not None:
                place.origin.read(0, fresh.view(-1))
            return fresh
        coming = self._coming.pop(id(place.param()), None)
        if coming is None:
            coming = self._submit_reads(place)
        buffer, reads = coming
        for read in reads:
            read.wait()
        return buffer.view(place.dtype)[: place.numel].view(shape)

    def _submit_reads(self, place: _Place, begin: int = 0, end: int | None = None) -> tuple[Tensor, list[Transfer]]:
        """Of a place's elements, from and to; `begin` is where a part does."""
        assert place.swapped is not None
        if self._files is not None:
            self._files.drain()
        width = place.dtype.itemsize
        return place.swapped.read(begin * width, None if end is None else end * width)


def _is_small(nbytes: int) -> bool:
    return nbytes <= min(_SMALL_NBYTES, WINDOW_NBYTES // 4)


def init_of(params: list[nn.Parameter]) -> DeferredInit | None:
    """Return what keeps a model's parameters, if it was built under `Init`; `merged_spool` makes it one."""
    return next(iter(inits_of(params)), None)


def merged_init(params: list[nn.Parameter]) -> DeferredInit | None:
    """Have one `DeferredInit` hold all of a model's parameters that were built under several; return it. Collective."""
    first: DeferredInit | None = None
    for init, theirs in inits_of(params).items():
        if first is None:
            first = init
        else:
            first.absorb(init, theirs)
    return first


def inits_of(params: list[nn.Parameter]) -> dict[DeferredInit, list[nn.Parameter]]:
    """Group parameters by what holds their values until an engine takes them, in the order in which those were made."""
    found: dict[DeferredInit, list[nn.Parameter]] = {}
    for param in params:
        owner = param.__dict__.get("_infinity_owner")
        if isinstance(owner, DeferredInit):
            found.setdefault(owner, []).append(param)
    return dict(sorted(found.items(), key=lambda each: each[0].serial))
