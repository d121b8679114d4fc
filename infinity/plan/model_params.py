"""The parameters of a whole model, which every rank knows alike, whatever it has of the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infinity.plan.plan import Plan
from infinity.plan.shards import Shard
from infinity.plan.stages import PipelinePart


@dataclass(frozen=True, slots=True)
class ModelParam:
    """A parameter: its shape before a tensor axis cuts it by `shard`, its dtype, its optimizer parameter group when the
    plan was made (-1 for one that is frozen).

    holders: the pipeline indices of the ranks that have it, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    shard: Shard | None
    holders: tuple[int, ...]

    @property
    def trainable(self) -> bool:
        """Whether it has gradients and optimizer states."""
        return self.group >= 0


def model_params(plan: Plan) -> dict[str, ModelParam]:
    """Return the parameters of the model by name, in the order of its units; one in tiles once, at its last."""
    part = plan.pipeline
    found: dict[str, ModelParam] = {}
    for param in _own(plan) if part is None else _of_all_stages(part):
        found.pop(param.name, None)
        found[param.name] = param
    return found


def _own(plan: Plan) -> Iterator[ModelParam]:
    for layout in plan.layouts:
        for slot in layout.slots:
            yield ModelParam(slot.name, slot.whole_shape, layout.dtype, slot.group, slot.shard, (0,))


def _of_all_stages(part: PipelinePart) -> Iterator[ModelParam]:
    for number, unit in enumerate(part.split.units):
        holders = part.split.holders(number)
        for spec in unit.params:
            shape = spec.shape if spec.shard is None else spec.shard.whole_shape(spec.shape)
            yield ModelParam(spec.name, shape, unit.dtype, spec.group, spec.shard, holders)


def place_of_buffer(plan: Plan, name: str) -> int:
    """Return the pipeline index of the rank whose copy of a buffer counts: the first of those that run its module."""
    return 0 if plan.pipeline is None else plan.pipeline.split.place_of(name.rpartition(".")[0])
