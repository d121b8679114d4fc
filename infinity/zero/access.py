"""Whole parameters outside the training loop: `read`, `modify`, and what `infinity.zero.states` builds on.

Both are collective, because a gather is: every rank must enter with the same parameters. They take parameters of
engines, those that `infinity.Init` has built and no engine has yet ([Note: slices] in `deferred_init` says what ranks
keep of these after a block), and ordinary ones.

[Note: saved weights] Hooks on a module call's outputs gather its units again before its backward. A program's own
computation has no hooks, so the weights that autograd saves of it are wrapped. When backward unpacks the first wrapper
of a unit, the unit is gathered until that backward ends.

The wrapper holds the saved tensor, a view of the unit's full buffer, whose address stays the same while its bytes come
and go. Weights that a module call uses of its own units are not wrapped.

Whole values in CPU memory are put together from what the ranks of an axis have: partitions over data, shards over the
tensor axis, parameters over the pipeline axis. They travel in pieces of bounded size, so that beside a whole tensor no
rank holds more than a piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import all_gather, broadcast_to_all
from infinity.distributed.consistency import on_any_rank
from infinity.distributed.groups import ProcessGroups, all_ranks_after
from infinity.errors import ConfigError, StateError
from infinity.log import warn_once
from infinity.memory.partition import DTYPES
from infinity.memory.shard_copy import gather_shard, scatter_shard
from infinity.memory.store import TieredStore
from infinity.plan.layout import Slot, states_of
from infinity.plan.plan import ModelParam, Plan, model_params
from infinity.plan.shards import Replica
from infinity.plan.types import Kind
from infinity.step.optimizer_step import OptimizerStep
from infinity.zero import parameter
from infinity.zero.coordinator import Coordinator, ModuleCall
from infinity.zero.deferred_init import PIECE_NBYTES, DeferredInit, broadcast_values, inits_of
from infinity.zero.gradients import Gradients
from infinity.zero.guards import not_pickled
from infinity.zero.health import Health
from infinity.zero.hooks import backward_comes, refuse_double
from infinity.zero.parameter import is_elsewhere, name_of
from infinity.zero.tiles import assembled, tiles_of
from infinity.zero.unit import Unit, fingerprint

_ON_EVERY_RANK = (
    "After it rank `source` sends its values to all ranks, so every rank must enter the block with the same "
    "parameters. A parameter that neither infinity.Init nor an engine has can be changed without the block, on each "
    "rank for itself; infinity.initialize() then takes rank 0's values"
)


def listed_params(params: Any) -> list[nn.Parameter]:
    """Return the parameters of a module, a parameter or anything iterable of these, each once.

    None is left out, and so are tensors that are no parameters (buffers, which no rank partitions).
    """
    found: dict[int, nn.Parameter] = {}
    for param in _flat(params):
        found.setdefault(id(param), param)
    return list(found.values())


def _flat(params: Any) -> Iterator[nn.Parameter]:
    if isinstance(params, nn.Module):
        yield from params.parameters()
    elif isinstance(params, torch.Tensor):
        if isinstance(params, nn.Parameter):
            yield params
    elif isinstance(params, Mapping):
        yield from _flat(params.values())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes)):
        for each in params:
            yield from _flat(each)
    elif params is not None:
        raise ConfigError(f"a parameter, a module or an iterable of these is expected, got {type(params).__name__}")


def deferred_of(params: list[nn.Parameter]) -> list[tuple[DeferredInit, list[nn.Parameter]]]:
    """Group the parameters that no engine has yet by what keeps them, in the same order on every rank."""
    return [
        (init, init.in_order(found))
        for init, group in inits_of(params).items()
        if (found := [param for param in group if init.holds(param)])
    ]


@contextmanager
def read_deferred(init: DeferredInit, params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Make parameters whole on every rank, with rank 0's values. Collective.

    Raises StateError on every rank if one of them was changed in place.
    """
    with _whole(init, params):
        for param in params:
            if not init.is_shared(param):
                init.take_over(param, 0, used=True)
        before = [(param._version, init.changes(param), fingerprint(param)) for param in params]
        with init.groups.telling():
            yield
        changed = [
            init.changes(param) == changes
            and (param._version != version or not torch.equal(values, fingerprint(param)))
            for param, (version, changes, values) in zip(params, before, strict=True)
        ]
        for param, flag in zip(params, on_any_rank(changed, init.groups.world, "end of read()"), strict=True):
            if flag:
                raise StateError(
                    f"{parameter.name_of(param)} was changed inside infinity.read(); the change is undone: make it "
                    "inside infinity.modify()"
                )


@contextmanager
def modify_deferred(init: DeferredInit, params: Sequence[nn.Parameter], source: int) -> Iterator[None]:
    """Make parameters whole on every rank for writing, and give every rank what rank `source` wrote. Collective.

    Inside, a parameter has rank 0's values on the source and the right shape elsewhere: there its values are what that
    rank itself built, until a first block has ended. An error in the block leaves parameters with a value.
    """
    size = init.groups.world.size
    if not 0 <= source < size:
        raise ConfigError(f"modify: rank {source} is to be the source, but the job has {size} rank(s), numbered from 0")
    with _whole(init, params):
        for param in params:
            if source and not init.is_shared(param):
                init.take_over(param, 0, used=True)
        with init.groups.telling(), torch.no_grad():
            yield
        for param in params:
            init.take_over(param, source)


@contextmanager
def _whole(init: DeferredInit, params: Sequence[nn.Parameter]) -> Iterator[None]:
    with ExitStack() as stack:
        for param in params:
            init.make_whole(param)
            stack.callback(init.release_whole, param)
        yield


@contextmanager
def modify_ordinary(params: Sequence[nn.Parameter], source: int) -> Iterator[None]:
    """Let the block change parameters that nothing of ours keeps, and give every rank what rank `source` wrote.

    Collective if torch.distributed is open; the ranks list the same parameters in the same order. A rank whose others
    do not come ends with DesyncError.
    """
    sent = [param for param in params if not param.is_meta and not isinstance(param, nn.UninitializedParameter)]
    with torch.no_grad():
        if not sent:
            yield
            return
        more = f" and of {len(sent) - 1} more" if len(sent) > 1 else ""
        call = (
            f"infinity.modify(source={source}), or GatheredParameters(modifier_rank={source}), of a parameter of shape "
            f"{tuple(sent[0].shape)} that no engine has{more}"
        )
        with all_ranks_after(call, _ON_EVERY_RANK):
            yield
        for param in sent:
            broadcast_to_all(param.data, source)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that autograd has saved, and the call whose backward begins when it is unpacked."""

    tensor: Tensor
    scope: ModuleCall
    coordinator: Coordinator


class _Uses:
    """The uses of units in one block: a call for each unit of which autograd has saved a tensor."""

    def __init__(self, coordinator: Coordinator, units: Sequence[Unit]) -> None:
        self.coordinator = coordinator
        self._units = {unit.full.untyped_storage().data_ptr(): unit for unit in units if not unit.placed.whole}
        self._scopes: dict[Unit, ModuleCall] = {}

    def scope_of(self, address: int) -> ModuleCall | None:
        """Return the call for the unit at a storage's address; None if there is no unit, or a module call has it."""
        unit = self._units.get(address)
        if unit is None or self.coordinator.calls.is_open(unit):
            return None
        return self._scopes.setdefault(unit, ModuleCall([unit]))

    def end(self) -> None:
        """End the block: the gradients of its units are incomplete until its backward has run."""
        for scope in self._scopes.values():
            self.coordinator.calls.await_backward(scope)


# Open blocks, the outermost first. Autograd calls the hooks of the innermost block only, so it sees the others here.
_BLOCKS: ContextVar[tuple[_Uses, ...]] = ContextVar("_BLOCKS", default=())


@contextmanager
def gathered_for_backward(uses: Mapping[Coordinator, Sequence[Unit]]) -> Iterator[None]:
    """Open a block whose results can be differentiated after it, when its units are released again.

    uses: all units of each engine, by coordinator; without one there is nothing to gather again.
    """
    if not uses or not torch.is_grad_enabled() or not all(map(backward_comes, uses)):
        yield
        return
    mine = tuple(_Uses(coordinator, units) for coordinator, units in uses.items())
    token = _BLOCKS.set((*_BLOCKS.get(), *mine))
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _BLOCKS.reset(token)
        for each in mine:
            each.end()


def _pack(tensor: Tensor) -> Any:
    if type(tensor) not in (Tensor, nn.Parameter):
        return tensor
    address = tensor.untyped_storage().data_ptr()
    for uses in _BLOCKS.get():
        scope = uses.scope_of(address)
        if scope is not None:
            return _Saved(tensor.detach(), scope, uses.coordinator)
    return tensor


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    refuse_double(saved.scope)
    saved.coordinator.join_backward()
    saved.coordinator.enter_backward(saved.scope)
    return saved.tensor


def rows_of_ranks(values: Tensor, group: AxisGroup, device: torch.device, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield every member's values ([numel], contiguous, of one size and dtype) in pieces: (first element, [size, n] in
    CPU memory). Collective: take all pieces. A piece is valid until the next one.

    device: where the group's collectives are, if they are not made by the host.
    """
    if group.size == 1:
        yield 0, values.cpu().view(1, -1)
        return
    step = max(PIECE_NBYTES // (values.element_size() * group.size), 1)
    for begin in range(0, values.numel(), step):
        mine = values[begin : begin + step]
        mine = mine if group.host_waits else mine.to(device)
        full = torch.empty(group.size * mine.numel(), dtype=mine.dtype, device=mine.device)
        all_gather(full, mine, group, name).wait()
        yield begin, full.cpu().view(group.size, -1)


def put_together(
    values: Tensor, slot: Slot, group: AxisGroup, device: torch.device, name: str, flat: Tensor | None
) -> None:  # fmt: skip
    """Put a slot's elements, and where it has a shard those of the other ranks of the tensor axis, into their places.

    values: [slot.numel], this rank's. flat: the whole parameter, flattened, in CPU memory; None on a rank that only
    sends. Collective over the tensor axis where the slot has a shard.
    """
    shard = slot.shard
    if shard is None:
        if flat is not None:
            flat[slot.start : slot.start + slot.numel].copy_(values)
        return
    for begin, rows in rows_of_ranks(values, group, device, name):
        if flat is None:
            continue
        for index, row in enumerate(rows):
            scatter_shard(row, slot.start + begin, slot.whole_shape, shard.dim, shard.ranges(index), flat, 0)


def pass_along(flat: Tensor, group: AxisGroup, source: int, name: str, *, keep: bool = True) -> None:
    """Copy `flat` ([numel] in CPU memory) of the group's member `source` into that of every other one. Collective.

    keep: whether this member wants the values; `flat` says only how many there are, and of which dtype, where it does
    not (a meta tensor does).
    """
    step = max(PIECE_NBYTES // flat.element_size(), 1)
    room = None if keep else torch.empty(min(step, flat.numel()), dtype=flat.dtype, device="cpu")
    for begin in range(0, flat.numel() if group.size > 1 else 0, step):
        piece = flat[begin : begin + step]
        broadcast_values(piece if room is None else room[: piece.numel()], group, source, name)


def take_own(flat: Tensor, slot: Slot, index: int, start: int, target: Tensor) -> None:
    """Copy the slot's elements from `start` on into `target` ([n]), of a whole parameter, flattened.

    index: this rank's on the tensor axis.
    """
    shard = slot.shard
    if shard is None:
        target.copy_(flat[slot.start + start :][: target.numel()])
    else:
        gather_shard(flat, 0, slot.whole_shape, shard.dim, shard.ranges(index), slot.start + start, target)


# Names in a parameter's attributes of what keeps or trains it.
_OURS = {"_infinity_owner", "_infinity_access"}
Params = nn.Module | nn.Parameter | Iterable[nn.Parameter]


@dataclass(frozen=True, eq=False)
class ParamAccess:
    """Through what the parameters of one engine are read and changed; `own_parameters` has each of them know it."""

    plan: Plan
    store: TieredStore
    groups: ProcessGroups
    units: list[Unit]
    gradients: Gradients
    coordinator: Coordinator
    step: OptimizerStep
    health: Health

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: what is pickled is a parameter that names this, or has one."""
        raise not_pickled("a parameter that an engine trains")

    def own_parameters(self, module: nn.Module) -> None:
        """Have every parameter of the engine's module, of other stages too, name this as the one that trains it."""
        for param in module.parameters():
            parameter.give_to(param, self)

    @cached_property
    def params(self) -> dict[str, ModelParam]:
        """The parameters of the whole model, by name."""
        return model_params(self.plan)


def owners_of(params: Iterable[nn.Parameter]) -> list[tuple[ParamAccess, list[nn.Parameter]]]:
    """Group parameters by the engine that trains them. Parameters without an engine are left out, and those that only
    other stages have.
    """
    found: dict[int, tuple[ParamAccess, list[nn.Parameter]]] = {}
    for param in params:
        owner = param.__dict__.get("_infinity_access")
        if owner is not None and not is_elsewhere(param):
            found.setdefault(id(owner), (owner, []))[1].append(param)
    return list(found.values())


def units_of(owner: ParamAccess, params: Iterable[nn.Parameter]) -> list[Unit]:
    """Return the units that have `params`, in the plan's order, each once."""
    found: dict[Unit, None] = {}
    for param in params:
        tiles = tiles_of(param)
        units = [owner.coordinator.unit_of(param)] if tiles is None else [tile.unit for tile in tiles.tiles]
        found.update(dict.fromkeys(units))
    return sorted(found, key=lambda unit: unit.layout.index)


def full_state_dict(owner: ParamAccess, *, wanted: bool, frozen: bool = True) -> dict[str, Tensor]:
    """Return the model's full parameters in CPU memory, by their first names, gathered unit by unit, with shards put
    together, those of other stages sent; {} unless `wanted`, which may be on rank 0 only. Collective.

    frozen: with those that are not trained, which are not even gathered otherwise.
    """
    groups = owner.groups
    # Rank 0's tensor group has the shards of what is wanted. At other stages those in its place send theirs.
    stands = groups.data.index == groups.tensor.index == 0
    own = _own_values(owner, frozen=frozen, wanted=wanted or (stands and groups.pipeline.index > 0))
    whole: dict[str, Tensor] = {}
    for name, param in owner.params.items():
        if not (frozen or param.trainable):
            continue
        holder = param.holders[0]
        values = next(own) if holder == groups.pipeline.index else None
        if values is None:
            device = "cpu" if wanted else "meta"
            values = torch.empty(param.shape, dtype=DTYPES[param.dtype], device=device)
        if stands and holder > 0:
            keep = wanted or holder == groups.pipeline.index
            pass_along(values.view(-1), groups.pipeline, holder, name, keep=keep)
        if wanted:
            whole[name] = values
    next(own, None)
    return whole


def _own_values(owner: ParamAccess, *, frozen: bool, wanted: bool) -> Iterator[Tensor | None]:
    """Yield each parameter for which this rank's stages speak, in their order: its values in CPU memory, None unless
    `wanted`. Collective over the stage's ranks, unit by unit.
    """
    groups, elsewhere = owner.groups, owner.plan.told_elsewhere
    # Those in tiles that are not complete yet, by name.
    rooms: dict[str, Tensor] = {}
    for unit in owner.units:
        if unit.layout.index in elsewhere or not (frozen or unit.layout.trainable):
            continue
        with owner.coordinator.memory.holding([unit]):
            for param, slot in zip(unit.params, unit.layout.slots, strict=True) if groups.data.index == 0 else ():
                if wanted and slot.name not in rooms:
                    rooms[slot.name] = torch.empty(slot.whole_shape, dtype=param.dtype, device="cpu")
                flat = rooms[slot.name].view(-1) if wanted else None
                name = f"shards of {slot.name}"
                put_together(param.detach().reshape(-1), slot, groups.tensor, unit.full.device, name, flat)
        for slot in unit.layout.slots:
            if slot.ends:
                yield rooms.pop(slot.name, None)


@contextmanager
def read(params: Params) -> Iterator[None]:
    """Gather parameters (of a module, one, or an iterable) on every rank for reading. Collective.

    A parameter that the tensor axis cuts has what the module computes with: this rank's shard (`infinity.state` has the
    whole one). One that only other stages of a pipeline have stays away: using it raises StateError.
    Parameters made under `infinity.Init` that no engine has yet are made whole likewise; ordinary ones are left alone.
    Raises StateError on every rank if one of them was changed, in place or through its `data`: use `modify` for that.
    The change is undone, except in a weight that is its own partition (stages 0 to 2 without offload), which keeps it.
    """
    with gathered(params, data_too=True):
        yield


@contextmanager
def gathered(params: Params, *, data_too: bool) -> Iterator[None]:
    """As `read`. data_too: raise for changes through `data` too, which torch does not count; else a warning says it."""
    wanted = listed_params(params)
    with ExitStack() as stack:
        for init, deferred in deferred_of(wanted):
            stack.enter_context(read_deferred(init, deferred))
        entered = owners_of(wanted)
        again = {}
        for owner, chosen in entered:
            owner.health.check("read parameters")
            together = _cut_together(units_of(owner, chosen))
            owner.coordinator.check_transform(together)
            stack.enter_context(owner.coordinator.memory.holding(together))
            if together:
                again[owner.coordinator] = owner.units
            for param in chosen:
                stack.enter_context(_assembled(owner, param))
        before = [[_Seen(owner, param) for param in chosen] for owner, chosen in entered]
        with gathered_for_backward(again):
            yield
        for param in wanted:
            if (tiles := tiles_of(param)) is not None:
                tiles.await_gradient()
        for (owner, chosen), seen in zip(entered, before, strict=True):
            counted, changed = [each.counted for each in seen], [each.changed for each in seen]
            flags = on_any_rank(counted + changed, owner.groups.stage, "end of read()")
            counted, changed = flags[: len(seen)], flags[len(seen) :]
            if True not in changed:
                continue
            units = units_of(owner, chosen)
            owner.coordinator.memory.refresh([unit for unit in units if not unit.placed.aliased])
            for unit in units:
                unit.accept_changes()
            refusal = seen[changed.index(True)].refusal()
            if data_too or True in counted:
                raise refusal
            warn_once("changed-inside-gathered", str(refusal))


class _Seen:
    """A whole parameter as it was when a block began that only reads it."""

    def __init__(self, owner: ParamAccess, param: nn.Parameter) -> None:
        self._param = param
        # Its values in tiles are a copy, which no step changes.
        self._unit = owner.coordinator.unit_of(param) if tiles_of(param) is None else None
        self._before = self._now()

    @cached_property
    def counted(self) -> bool:
        """Whether the block has changed it as torch counts changes. Data that was assigned to it is taken away."""
        assigned = self._unit is not None and self._unit.reassigned_data(self._param) is not None
        return assigned or self._param._version != self._before[0]

    @property
    def changed(self) -> bool:
        """Whether the block has changed it in any way."""
        (_, generation, values), now = self._before, self._now()
        # A step inside the block is allowed to change values.
        return self.counted or (generation == now[1] and not torch.equal(values, now[2]))

    def refusal(self) -> StateError:
        """What to raise if it was changed."""
        keeps = self._unit is not None and self._unit.placed.aliased
        outcome = (
            "it is its own partition and keeps what was written into it: set its value" if keeps else
            "the change is undone: make it"
        )  # fmt: skip
        name = name_of(self._param)
        return StateError(f"{name} was changed inside infinity.read(); {outcome} inside infinity.modify()")

    def _now(self) -> tuple[int, int, Tensor]:
        generation = 0 if self._unit is None else self._unit.versions.generation
        return self._param._version, generation, fingerprint(self._param)


@contextmanager
def modify(params: Params, source: int = 0) -> Iterator[None]:
    """Gather parameters on every rank for writing; the values of rank `source` are kept on all of them. Collective.

    Of a parameter that the tensor axis cuts, each rank has its shard, and the values of the rank in the same place on
    the tensor axis are kept, of those that compute the same model as `source`. Each stage of a pipeline has its own
    parameters, and keeps the values of its rank in the source's place on the other axes; of what several stages use the
    first one's count.
    Master weights follow: where a 16-bit value was changed its master becomes that value; elsewhere it is unchanged.
    Parameters that no engine has yet, made under `infinity.Init` or ordinary ones, get the source's values too.
    """
    wanted = listed_params(params)
    with ExitStack() as stack:
        for init, deferred in deferred_of(wanted):
            stack.enter_context(modify_deferred(init, deferred, source))
        ordinary = [param for param in wanted if param.__dict__.keys().isdisjoint(_OURS)]
        stack.enter_context(modify_ordinary(ordinary, source))
        entered = []
        for owner, chosen in owners_of(wanted):
            owner.health.check("change parameters")
            units = _cut_together(units_of(owner, chosen))
            stack.enter_context(owner.coordinator.memory.holding(units))
            tiled = [(param, stack.enter_context(_assembled(owner, param))) for param in chosen]
            # A unit that is whole for good may be its partition itself, and is changed without a lease.
            owner.store.access.await_saved(*(unit.key for unit in units))
            stack.enter_context(parameter.writable(chosen))
            entered.append((owner, units, [unit.local_partition.clone() for unit in units], tiled))
        with torch.no_grad():
            yield
        for owner, units, before, tiled in entered:
            for param, data in tiled:
                if data is not None:
                    _take(param, param.data if param.data.data_ptr() != data.data_ptr() else None, data)
                    _write_tiles(owner, param, data, source)
            for unit, old in zip(units, before, strict=True):
                for param in unit.params:
                    _take(param, unit.reassigned_data(param), param.data)
                _broadcast(owner, unit, source)
                _write_back(owner, unit, old)


def _broadcast(owner: ParamAccess, unit: Unit, source: int) -> None:
    """Give every rank the values that a gathered unit has on rank `source`; shards those of its data index."""
    groups, name = owner.groups, f"broadcast of {unit.layout.name}"
    if groups.world.size == 1:
        return
    if not 0 <= source < groups.world.size:
        raise ConfigError(
            f"modify: rank {source} is to be the source, but the job has {groups.world.size} ranks, numbered from 0"
        )
    at = owner.plan.topology.coordinate(source)
    if groups.data.size > 1:
        collectives.broadcast(unit.full, groups.data, at.dp, name)
    if groups.tensor.size > 1 and unit.layout.replica is not Replica.NONE:
        # What every rank of the tensor axis has stays the same on all of them.
        collectives.broadcast(unit.full, groups.tensor, at.tp, name)
    if (part := owner.plan.pipeline) is not None and unit.layout.index in part.shared:
        stages = groups.pipeline_ends if unit.layout.index in part.at_ends else groups.pipeline
        collectives.broadcast(unit.full, stages, 0, f"{name} over stages")


def _cut_together(units: list[Unit]) -> list[Unit]:
    """Return the units that are gathered together: tiles are gathered one by one."""
    return [unit for unit in units if not unit.layout.is_tile]


@contextmanager
def _assembled(owner: ParamAccess, param: nn.Parameter) -> Iterator[Tensor | None]:
    """Make a parameter in tiles whole on the device for the block, and yield its data; None for other parameters."""
    tiles = tiles_of(param)
    if tiles is None or not parameter.is_released(param):
        # The parameter is not in tiles, or a block around this one has made it whole.
        yield None if tiles is None else param.data
        return
    data = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    for tile in tiles.tiles:
        with owner.coordinator.memory.holding([tile.unit]):
            data[tile.start : tile.stop].copy_(tile.param.detach())
    with assembled(param, data):
        yield data


def _write_tiles(owner: ParamAccess, param: nn.Parameter, data: Tensor, source: int) -> None:
    """Put the changed values of a parameter in tiles into its partitions."""
    tiles = tiles_of(param)
    assert tiles is not None
    for tile in tiles.tiles:
        with owner.coordinator.memory.holding([tile.unit]):
            old = tile.unit.local_partition.clone()
            tile.param.data.copy_(data[tile.start : tile.stop])
            _broadcast(owner, tile.unit, source)
            _write_back(owner, tile.unit, old)


def _take(param: nn.Parameter, assigned: Tensor | None, data: Tensor) -> None:
    """Copy into `data` the tensor that a program has assigned to `param.data` instead of writing into it."""
    if assigned is None:
        return
    if assigned.shape != data.shape:
        raise StateError(
            f"{name_of(param)} has shape {tuple(data.shape)} in the engine's plan and was given data of shape "
            f"{tuple(assigned.shape)}: change shapes (resize embeddings) before infinity.initialize(), or close the "
            "engine and make a new one"
        )
    data.copy_(assigned)


def _write_back(owner: ParamAccess, unit: Unit, old: Tensor) -> None:
    """Put a unit's changed values into its partition and its master."""
    new = unit.local_partition.clone()
    with owner.store.write(unit.key) as (partition,):
        partition.view(Kind.PARAM).copy_(new)
    owner.store.flush(unit.key)
    unit.accept_changes()
    if not unit.layout.trainable or new.dtype is torch.float32:
        return
    changed = (new != old).cpu()
    for key, piece, at in states_of(owner.plan.sub_groups, unit.layout.index):
        start, numel = piece.start, piece.numel
        with owner.store.write(key) as (states,):
            mask = changed[start : start + numel]
            if new.dtype is torch.bfloat16:
                states.view(Kind.REMAINDER)[at : at + numel].masked_fill_(
                    mask.to(states.view(Kind.REMAINDER).device), 0
                )
            else:
                master = states.view(Kind.MASTER)[at : at + numel]
                values = new[start : start + numel].float().to(master.device)
                master.copy_(torch.where(mask.to(master.device), values, master))
        owner.store.flush(key)
