"""Initial values: from an ordinary model, or one built under `Init`, into partitions on their tiers, unit by unit.

Master weights take the full precision that the model came with: a model in fp32 trained in bf16 starts from its fp32
values. Rank 0's values win. Each parameter's own memory is freed as soon as its unit has its partitions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from infinity.comm import collectives
from infinity.comm.mesh import Mesh
from infinity.memory.master import encode
from infinity.memory.partition import DTYPES, Partition
from infinity.memory.store import TieredStore
from infinity.plan.layout import Slice, SubGroup
from infinity.plan.plan import Plan
from infinity.plan.types import Key, Kind
from infinity.zero import parameter
from infinity.zero.spool import Spool
from infinity.zero.unit import Unit


class Materializer:
    """Fills the store from the model's parameters. `spool` holds the values of a model that was built under `Init`."""

    def __init__(
        self, units: Sequence[Unit], *, plan: Plan, store: TieredStore, mesh: Mesh, spool: Spool | None
    ) -> None:
        self._units = list(units)
        self._plan = plan
        self._store = store
        self._mesh = mesh
        # An empty spool stands for none.
        self._spool = spool or Spool(None, mesh=mesh, timeout_seconds=1.0)
        self._agreed: set[int] = set()

    def run(self) -> None:
        """Give every partition its value and every parameter its place in its unit."""
        for unit in self._units:
            if not unit.layout.trainable:
                self._fill_frozen(unit)
                self._taken(unit)
        seen: list[Unit] = []
        for group in self._plan.sub_groups:
            for unit in self._fill_group(group):
                if unit not in seen:
                    seen.append(unit)
            done = [unit for unit in seen if self._last_group(unit) is group]
            for unit in done:
                self._taken(unit)
        for unit in self._units:
            # Units without elements belong to no sub-group.
            self._taken(unit)
        self._store.settle()
        for unit in self._units:
            if unit.placed.whole:
                unit.refresh()

    def _fill_frozen(self, unit: Unit) -> None:
        numel = unit.layout.partition_numel(unit.placed.parts)
        with self._store.write(unit.key, fresh=True) as (partition,):
            self._read(unit, 0, partition.view(Kind.PARAM)[:numel])
        self._store.flush(unit.key)

    def _fill_group(self, group: SubGroup) -> list[Unit]:
        units = [self._units[piece.unit] for piece in group.slices]
        states_key = Key(Kind.STATES, group.index)
        with (
            self._store.write(states_key, fresh=True) as (states,),
            self._store.write(*(u.key for u in units)) as params,
        ):
            at = 0
            for piece, unit, partition in zip(group.slices, units, params, strict=True):
                self._fill_slice(unit, piece, partition, states, at)
                at += piece.numel
            for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
                states.view(kind).zero_()
        self._store.flush(states_key, *(unit.key for unit in units))
        return units

    def _fill_slice(self, unit: Unit, piece: Slice, partition: Partition, states: Partition, at: int) -> None:
        """One slice of a trainable partition: PARAM, and what completes it to the fp32 master."""
        target = partition.view(Kind.PARAM)[piece.start : piece.start + piece.numel]
        if target.dtype is torch.float32:
            self._read(unit, piece.start, target)
            return
        values = torch.zeros(piece.numel, dtype=torch.float32)
        self._read(unit, piece.start, values)
        encode(values, target, states, at)

    def _read(self, unit: Unit, start: int, target: Tensor) -> None:
        """Copy the elements of this rank's partition from `start` on into `target`; padding becomes zero."""
        target.zero_()
        self._agree(unit)
        first = unit.rank_in_parts * unit.layout.partition_numel(unit.placed.parts) + start
        by_name = dict(zip((slot.name for slot in unit.layout.slots), unit.params, strict=True))
        for overlap in unit.layout.overlaps(first, first + target.numel()):
            param = by_name[overlap.slot.name]
            piece = target[overlap.range_start : overlap.range_start + overlap.numel]
            flat = self._spool.values(param) if self._spooled(param) else param.detach().reshape(-1)
            piece.copy_(flat[overlap.slot_start : overlap.slot_start + overlap.numel])

    def _agree(self, unit: Unit) -> None:
        """Make every rank start from rank 0's values."""
        if self._mesh.ranks.world_size == 1 or unit.layout.index in self._agreed:
            return
        self._agreed.add(unit.layout.index)
        for param, slot in zip(unit.params, unit.layout.slots, strict=True):
            if not param.numel():
                continue
            name = f"broadcast of {slot.name}"
            if self._spooled(param):
                collectives.broadcast(self._spool.values(param), self._mesh.control, name=name)
            else:
                values = param.detach().contiguous().cpu()
                collectives.broadcast(values, self._mesh.control, name=name)
                param.data = values

    def _spooled(self, param: nn.Parameter) -> bool:
        return self._spool.holds(param)

    def _taken(self, unit: Unit) -> None:
        """The unit's values are in its partitions: let the parameters' own memory go."""
        dtype = DTYPES[unit.layout.dtype]
        for param, slot in zip(unit.params, unit.layout.slots, strict=True):
            self._spool.forget(param)
            if not parameter.is_released(param) or param.dtype is not dtype:
                _detach_data(param, slot.shape, dtype, unit.full.device)

    def _last_group(self, unit: Unit) -> SubGroup:
        return next(
            group
            for group in reversed(self._plan.sub_groups)
            if any(piece.unit == unit.layout.index for piece in group.slices)
        )


def _detach_data(param: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    stand_in = parameter.placeholder(shape, dtype, device)
    if parameter.is_released(param):
        parameter.restore(param, stand_in)
    parameter.release(param, stand_in)
