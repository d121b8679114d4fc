"""Whole parameters and whole states, outside the training loop: `read`, `modify`, `state`.

They work on every rank together: a gather is collective, so every rank must enter with the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from infinity.comm import collectives
from infinity.comm.mesh import Mesh
from infinity.errors import StateError
from infinity.memory.master import decode, encode
from infinity.memory.store import TieredStore
from infinity.plan.layout import slices_of
from infinity.plan.plan import Plan
from infinity.plan.types import Key, Kind
from infinity.zero.coordinator import Coordinator
from infinity.zero.gradients import Gradients, on_any_rank
from infinity.zero.parameter import name_of
from infinity.zero.unit import Unit

_MOMENTS = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ}

Params = nn.Module | nn.Parameter | Iterable[nn.Parameter]


class Owner(Protocol):
    """What an engine offers to this file."""

    plan: Plan
    store: TieredStore
    mesh: Mesh
    coordinator: Coordinator
    gradients: Gradients
    units: list[Unit]

    @property
    def grad_factor(self) -> float: ...


def owners_of(params: Params) -> list[tuple[Owner, list[nn.Parameter]]]:
    """The parameters by the engine that keeps them; those that no engine keeps are ordinary and left out."""
    if isinstance(params, nn.Module):
        chosen = list(params.parameters())
    else:
        chosen = [params] if isinstance(params, nn.Parameter) else list(params)
    found: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
    for param in chosen:
        owner = param.__dict__.get("_infinity_owner")
        if owner is not None:
            found.setdefault(id(owner), (owner, []))[1].append(param)
    return list(found.values())


def units_of(owner: Owner, params: Iterable[nn.Parameter]) -> list[Unit]:
    """The units that hold `params`, in the plan's order, each once."""
    wanted = {id(param) for param in params}
    return [unit for unit in owner.units if any(id(param) in wanted for param in unit.params)]


def full_state_dict(owner: Owner, module: nn.Module, *, wanted: bool) -> dict[str, Tensor]:
    """A module's full tensors in CPU memory, gathered unit by unit; empty where they are not wanted. Collective."""
    whole: dict[int, Tensor] = {}
    for unit in owner.units:
        with gathered(owner, [unit]):
            if wanted:
                whole.update((id(param), param.detach().cpu().clone()) for param in unit.params)
    if not wanted:
        return {}
    names = {name: param for name, param in module.named_parameters(remove_duplicate=False)}
    skipped = {
        f"{path}.{name}" if path else name
        for path, inner in module.named_modules()
        for name in inner._non_persistent_buffers_set
    }
    buffers = {name: b.detach().cpu() for name, b in module.named_buffers() if name not in skipped}
    return {**{name: whole[id(param)] for name, param in names.items()}, **buffers}


@contextmanager
def gathered(owner: Owner, units: list[Unit]) -> Iterator[None]:
    """Keep units whole for the length of the block."""
    held: list[Unit] = []
    try:
        for unit in units:
            unit.users += 1
            held.append(unit)
            unit.finish_gather()
        yield
    finally:
        for unit in held:
            unit.users -= 1
            if unit.users <= 0:
                unit.release()


@contextmanager
def read(params: Params) -> Iterator[None]:
    """Parameters (a module, a parameter or an iterable) whole and read-only, on every rank.

    Raises StateError on every rank when one of them was changed in place: use `modify` for that.
    """
    with ExitStack() as stack:
        entered = [(owner, chosen) for owner, chosen in owners_of(params)]
        for owner, chosen in entered:
            stack.enter_context(gathered(owner, units_of(owner, chosen)))
        versions = [[param._version for param in chosen] for _, chosen in entered]
        yield
        for (owner, chosen), before in zip(entered, versions, strict=True):
            home = {id(param): unit for unit in units_of(owner, chosen) for param in unit.params}
            changed = [
                param._version != version or home[id(param)].strayed(param) is not None
                for param, version in zip(chosen, before, strict=True)
            ]
            for param, flag in zip(chosen, on_any_rank(changed, owner.mesh, "end of read()"), strict=True):
                if flag:
                    raise StateError(
                        f"{name_of(param)} was changed inside infinity.read(), which would be lost: use "
                        f"infinity.modify()"
                    )


@contextmanager
def modify(params: Params, source: int = 0) -> Iterator[None]:
    """Parameters whole and writable on every rank; the values of rank `source` win and survive the next step.

    Master weights follow: where a 16-bit value was changed, its master is that value; elsewhere it keeps its precision.
    """
    with ExitStack() as stack:
        entered = []
        for owner, chosen in owners_of(params):
            units = units_of(owner, chosen)
            stack.enter_context(gathered(owner, units))
            # A unit that is whole for good may be its partition itself, and is changed without a lease.
            owner.store.await_saved(*(unit.key for unit in units))
            entered.append((owner, units, [unit.own.clone() for unit in units]))
        with torch.no_grad():
            yield
        for owner, units, before in entered:
            for unit, old in zip(units, before, strict=True):
                for param in unit.params:
                    _take(param, unit.strayed(param))
                if owner.mesh.ranks.world_size > 1:
                    collectives.broadcast(unit.full, owner.mesh.gather, source, f"broadcast of {unit.layout.name}")
                _write_back(owner, unit, old)


def _take(param: nn.Parameter, assigned: Tensor | None) -> None:
    """Keep data that was assigned to a parameter instead of being written into it."""
    if assigned is None:
        return
    if assigned.shape != param.shape:
        raise StateError(
            f"{name_of(param)} has shape {tuple(param.shape)} in the engine's plan and was given data of shape "
            f"{tuple(assigned.shape)}: change shapes (resize embeddings) before infinity.initialize(), or close the "
            "engine and make a new one"
        )
    param.data.copy_(assigned)


def _write_back(owner: Owner, unit: Unit, old: Tensor) -> None:
    """Put a unit's changed values into its partition and its master."""
    new = unit.own.clone()
    with owner.store.write(unit.key) as (partition,):
        partition.view(Kind.PARAM).copy_(new)
    owner.store.flush(unit.key)
    if not unit.layout.trainable or new.dtype is torch.float32:
        return
    changed = (new != old).cpu()
    for key, start, at, numel in _slices(owner.plan, unit):
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


def _slices(plan: Plan, unit: Unit) -> Iterator[tuple[Key, int, int, int]]:
    """Where a unit's states lie: (sub-group's key, start in the unit's partition, start in the states, numel)."""
    for group, piece, at in slices_of(plan.sub_groups, unit.layout.index):
        yield Key(Kind.STATES, group.index), piece.start, at, piece.numel


class ParameterState:
    """One parameter's full states from whatever tiers and ranks hold them.

    `master`, `exp_avg`, `exp_avg_sq` and `grad` gather on read (fp32 CPU tensors of the parameter's shape, the same
    on every rank) and scatter on assignment. Collective: every rank must do the same. A frozen parameter has only
    `master`. `local` and `set_local` touch what is this rank's, alone.
    """

    def __init__(self, param: nn.Parameter) -> None:
        owner = param.__dict__.get("_infinity_owner")
        if owner is None:
            raise StateError(
                "infinity.state: this parameter belongs to no engine; pass it to infinity.initialize() first"
            )
        self._owner: Owner = owner
        self._param = param
        (self._unit,) = units_of(owner, [param])
        index = next(i for i, other in enumerate(self._unit.params) if other is param)
        self._slot = self._unit.layout.slots[index]

    @property
    def trainable(self) -> bool:
        """Whether it has gradients and moments."""
        return self._unit.layout.trainable

    @property
    def master(self) -> Tensor:
        """The fp32 master weight."""
        return self._gather(self._own("master"))

    @master.setter
    def master(self, value: Tensor) -> None:
        self._replace("master", value)

    @property
    def exp_avg(self) -> Tensor:
        """The first moment."""
        return self._gather(self._own("exp_avg"))

    @exp_avg.setter
    def exp_avg(self, value: Tensor) -> None:
        self._replace("exp_avg", value)

    @property
    def exp_avg_sq(self) -> Tensor:
        """The second moment."""
        return self._gather(self._own("exp_avg_sq"))

    @exp_avg_sq.setter
    def exp_avg_sq(self, value: Tensor) -> None:
        self._replace("exp_avg_sq", value)

    @property
    def grad(self) -> Tensor:
        """The accumulated gradient, averaged over ranks and unscaled, before clipping; zeros after a step."""
        return self._gather(self._own("grad"))

    @grad.setter
    def grad(self, value: Tensor) -> None:
        self._replace("grad", value)

    def local(self, kind: str) -> Tensor:
        """This rank's elements of "master", "grad", "exp_avg" or "exp_avg_sq": [n] in fp32 on the CPU; n may be 0."""
        own = self._own(kind)
        return torch.cat([own[at : at + numel] for _, at, numel in self._pieces(own)] or [own[:0]])

    def set_local(self, kind: str, value: Tensor) -> None:
        """Set what `local` gives. Only this rank's: where every rank has everything, all must be given the same."""
        own = self._own(kind)
        flat = value.detach().cpu().float().reshape(-1)
        mine = sum(numel for _, _, numel in self._pieces(own))
        if flat.numel() != mine:
            raise ValueError(f"{self._slot.name}: this rank has {mine} elements, the new value {flat.numel()}")
        done = 0
        for _, at, numel in self._pieces(own):
            own[at : at + numel] = flat[done : done + numel]
            done += numel
        self._set_own(kind, own)

    def _own(self, kind: str) -> Tensor:
        """This rank's partition of one kind of state of the whole unit, on the CPU, in memory of its own."""
        if kind == "master":
            return self._read_master()
        if not self.trainable:
            raise StateError(f"{self._slot.name} is frozen and has no {kind}")
        if kind == "grad":
            return self._owner.gradients.own_sum(self._unit).float().cpu() * self._owner.grad_factor
        return self._read_states(_MOMENTS[kind])

    def _set_own(self, kind: str, own: Tensor) -> None:
        if kind == "master":
            self._write_master(own)
        elif kind == "grad":
            self._owner.gradients.replace(self._unit, self._param, own / self._owner.grad_factor)
        else:
            self._write_states(_MOMENTS[kind], own)

    def _replace(self, kind: str, value: Tensor) -> None:
        """Put this rank's part of a full value into its partition."""
        own = self._own(kind)
        if tuple(value.shape) != self._slot.shape:
            raise ValueError(f"{self._slot.name} has shape {self._slot.shape}, the new value {tuple(value.shape)}")
        flat = value.detach().cpu().float().reshape(-1)
        for start, at, numel in self._pieces(own):
            own[at : at + numel] = flat[start : start + numel]
        self._set_own(kind, own)

    def _pieces(self, own: Tensor) -> Iterator[tuple[int, int, int]]:
        """Where this rank's partition has elements of the parameter: (start in it, start in the partition, numel)."""
        first = self._unit.rank_in_parts * own.numel()
        for overlap in self._unit.layout.overlaps(first, first + own.numel()):
            if overlap.slot is self._slot:
                yield overlap.slot_start, overlap.range_start, overlap.numel

    def _read_master(self) -> Tensor:
        store, key = self._owner.store, self._unit.key
        if not self.trainable:
            with store.read(key) as (partition,):
                return decode(partition.view(Kind.PARAM), None, 0)
        pieces = []
        for states_key, start, at, numel in self._slices():
            with store.read(key, states_key) as (partition, states):
                pieces.append(decode(partition.view(Kind.PARAM)[start : start + numel], states, at))
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def _write_master(self, own: Tensor) -> None:
        store, key = self._owner.store, self._unit.key
        if not self.trainable:
            with store.write(key) as (partition,):
                encode(own, partition.view(Kind.PARAM), None, 0)
        for states_key, start, at, numel in self._slices():
            with store.write(key, states_key) as (partition, states):
                target = partition.view(Kind.PARAM)[start : start + numel]
                encode(own[start : start + numel], target, states, at)
            store.flush(states_key)
        store.flush(key)
        if self._unit.placed.whole:
            self._unit.refresh()

    def _read_states(self, kind: Kind) -> Tensor:
        """Put together from the sub-groups."""
        pieces = []
        for key, _, at, numel in self._slices():
            with self._owner.store.read(key) as (states,):
                pieces.append(states.view(kind)[at : at + numel].cpu().clone())
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def _write_states(self, kind: Kind, own: Tensor) -> None:
        for key, start, at, numel in self._slices():
            with self._owner.store.write(key) as (states,):
                states.view(kind)[at : at + numel].copy_(own[start : start + numel])
            self._owner.store.flush(key)

    def _slices(self) -> Iterator[tuple[Key, int, int, int]]:
        return _slices(self._owner.plan, self._unit)

    def _gather(self, own: Tensor) -> Tensor:
        """The parameter's elements from all ranks' partitions of its unit."""
        full = own
        if self._unit.placed.parts > 1:
            full = own.new_empty(self._unit.layout.numel)
            collectives.all_gather(full, own, self._owner.mesh.control, f"state of {self._slot.name}").wait()
        return full[self._slot.offset : self._slot.offset + self._slot.numel].clone().view(self._slot.shape)
