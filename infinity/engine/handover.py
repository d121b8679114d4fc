"""Closing an engine so that its module keeps the weights: where they go, and what is given up for them.

The weights leave an engine with their model: whole, unit by unit, as ordinary parameters or into a `DeferredInit`.

The parameters stay the objects that they are, so that an optimizer's groups of before hold; they have the dtype that
the engine has computed in. Until `finish` everything can be undone: the partitions keep their values meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infinity.base.sizes import format_bytes
from infinity.distributed.consistency import agree_on_numbers
from infinity.engine.model_init import groups_of
from infinity.engine.runtime import Runtime
from infinity.errors import CapacityError
from infinity.log import logger
from infinity.memory.drives import free_for_rank
from infinity.memory.store import TieredStore
from infinity.memory.tiers.pinned import mappings_of_their_own, trim
from infinity.plan.types import Kind, Tier
from infinity.zero import parameter
from infinity.zero.deferred_init import DeferredInit
from infinity.zero.gather import GatheredMemory
from infinity.zero.parameter import whole_of
from infinity.zero.unit import Unit


def is_handed_over(unit: Unit) -> bool:
    """Whether the values of a unit are copied out: those of a unit that stays whole are whole parameters already,
    unless it is a tile.
    """
    return not unit.placed.whole or unit.layout.is_tile


@dataclass(frozen=True, slots=True)
class _Before:
    """A parameter as the engine has it: released."""

    param: nn.Parameter
    kind: type[nn.Parameter]
    attributes: dict[str, Any]
    stand_in: Tensor

    @staticmethod
    def of(param: nn.Parameter) -> _Before:
        with torch._C.DisableTorchFunctionSubclass():
            return _Before(param, type(param), dict(param.__dict__), param.data)

    def restore(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            parameter.set_data(self.param, self.stand_in)
        self.param.__class__ = self.kind
        self.param.__dict__.clear()
        self.param.__dict__.update(self.attributes)


class Handover:
    """Takes the parameters of all units of which `is_handed_over` says so.

    init: takes them from here; None: they stay in CPU memory. discard: give each partition's memory back once its
    values are out, after which nothing can be undone.
    """

    def __init__(
        self, units: Sequence[Unit], memory: GatheredMemory, store: TieredStore, *, init: DeferredInit | None,
        discard: bool = False,
    ) -> None:  # fmt: skip
        self._units = units
        self._memory = memory
        self._store = store
        self._init = init
        self._discard = discard
        self._before: list[_Before] = []
        # Tensors of parameters in tiles of which some tiles are still to come.
        self._growing: dict[int, Tensor] = {}

    def take(self) -> None:
        """Make every parameter whole in CPU memory, one unit gathered at a time. Collective.

        An error leaves the parameters as they were.
        """
        try:
            for unit in self._units:
                if is_handed_over(unit):
                    self._take(unit)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Give the parameters back to the engine."""
        if self._init is not None:
            self._init.close()
        for before in reversed(self._before):
            before.restore()
        self._before.clear()
        self._growing.clear()

    def finish(self) -> None:
        """The engine is closed: from now on the parameters are the program's, or the `DeferredInit`'s."""
        self._before.clear()
        if self._init is not None:
            self._init.seal()

    def _take(self, unit: Unit) -> None:
        done: list[tuple[nn.Parameter, str, Tensor]] = []
        with self._memory.holding([unit]):
            for param, slot in zip(unit.params, unit.layout.slots, strict=True):
                whole = whole_of(param)
                # In memory of their own; of a tile, what there is of the whole parameter so far.
                values = self._growing.get(id(whole))
                if values is None:
                    values = self._growing[id(whole)] = torch.empty(slot.shape, dtype=param.dtype, device="cpu")
                values.view(-1)[slot.start : slot.start + slot.numel].copy_(param.detach().reshape(-1))
                if slot.ends:
                    self._growing.pop(id(whole), None)
                    done.append((whole, slot.name, values))
        for param, name, values in done:
            self._before.append(_Before.of(param))
            parameter.restore(param, values)
            parameter.forget(param)
            if self._init is not None:
                self._init.attach(param, name)
        if self._discard:
            self._store.discard(unit.key)


# What a process needs beside the weights while they are copied out.
_MARGIN = 0.1


def why_not_kept(runtime: Runtime) -> str | None:
    """Why the module cannot keep the weights of an engine; None where it can."""
    pipeline, tensor = runtime.groups.pipeline.size, runtime.groups.tensor.size
    if pipeline > 1:
        return f"each of {pipeline} ranks of the pipeline axis has stages, of which no module is made"
    return f"each of {tensor} ranks of the tensor axis has shards, of which no module is made" if tensor > 1 else None


class WeightKeeper:
    """Hands the weights of one engine over to its module. `take` before the engine is closed, `finish` after it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._handover: Handover | None = None

    def take(self) -> None:
        """Copy the weights out of the partitions. Collective. An error leaves the engine as it was, gradients aside."""
        runtime = self._runtime
        for settle in (runtime.step.reset, runtime.gradients.reset, runtime.coordinator.next_step):
            settle()
        for unit in runtime.access.units:
            if unit.placed.whole:
                # One that `offload_states` has vacated.
                runtime.coordinator.memory.gather(unit)
                unit.finish_gather()
        needed = sum(unit.layout.nbytes for unit in runtime.access.units if is_handed_over(unit))
        init, discard = self._place(needed)
        if discard:
            runtime.health.mark_broken("its states were given up for its weights, which are on their way to the module")
            held = [partition.key for partition, _ in runtime.store.held()]
            runtime.store.discard(*(key for key in held if key.kind is not Kind.PARAM))
            trim()
        self._handover = Handover(
            runtime.access.units, runtime.coordinator.memory, runtime.store, init=init, discard=discard
        )
        with ExitStack() as undo, mappings_of_their_own():
            if init is not None:
                undo.callback(init.groups.close)
            self._handover.take()
            undo.pop_all()
        if needed:
            place = "CPU memory" if init is None else f"swap files in {', '.join(runtime.config.nvme_path or ())}"
            logger.info("the module keeps its weights, in %s: %s", place, format_bytes(needed))

    def finish(self) -> None:
        """The engine is closed: bring what was whole on the device to the rest of the weights."""
        runtime = self._runtime
        assert self._handover is not None
        self._handover.finish()
        if not any(map(is_handed_over, runtime.access.units)):
            return
        for unit in runtime.access.units:
            for param in unit.params if not is_handed_over(unit) else ():
                parameter.set_data(param, param.data.cpu())
        for module in runtime.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.cpu()

    def _place(self, needed: int) -> tuple[DeferredInit | None, bool]:
        """Decide where `needed` bytes go, the same on every rank: (a `DeferredInit` or None for CPU memory, whether
        states are given up before). CapacityError where they have no room; nothing has changed then.
        """
        runtime = self._runtime
        ranks, config = runtime.groups.ranks, runtime.config
        free = free_for_rank(ranks=ranks.local_size, device_free_nbytes=None, own_nbytes=0, nvme_free_nbytes=None)
        limit, room = runtime.store.ledger.limits.of(Tier.CPU), float(free.process or 0)
        freed = sum(
            partition.spec.nbytes for partition, own in runtime.store.held()
            if own and partition.key.kind is not Kind.PARAM and partition.buffer is not None
            and not partition.on_drive and partition.buffer.is_cpu
        )  # fmt: skip
        bound = room if limit is None else min(room, float(limit))
        rows = agree_on_numbers([bound, room + freed], runtime.groups.world, "room for the weights")
        least, with_states = (min(column) for column in zip(*rows, strict=True))
        wanted = needed * (1 + _MARGIN)
        if wanted <= least or not needed:
            return None, False
        if config.nvme_path is not None:
            groups = groups_of(config, ranks, runtime.device)
            seconds = config.sections.watchdog_seconds
            return DeferredInit(config.nvme_path, groups=groups, timeout_seconds=seconds), False
        if wanted <= with_states:
            return None, True
        raise CapacityError(
            f"the module cannot keep its weights: they take {format_bytes(needed)}, and CPU memory has "
            f"{format_bytes(int(least))} for a rank and no drive is configured. Name one "
            "(zero_optimization.offload_param.nvme_path), or call engine.save_checkpoint(folder) and engine.close()"
        )
