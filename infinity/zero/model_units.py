"""A model's units, made of its plan and its parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from infinity.distributed.axis_group import AxisGroup
from infinity.memory.ledger import Ledger
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.plan.plan import Plan
from infinity.plan.spec import ModelSpec, ParamSpec
from infinity.zero import parameter, weight_tiles
from infinity.zero.coordinator import Coordinator
from infinity.zero.unit import Unit


def make_units(
    model: nn.Module, plan: Plan, *, store: TieredStore, device: Device, group: AxisGroup, ledger: Ledger
) -> list[Unit]:
    """Return the units of a model in the plan's order. group: the ranks that share the partitions of a unit."""
    by_name = dict(model.named_parameters())
    return [
        Unit(
            layout, placed, weight_tiles.params_of(layout, by_name), store=store, device=device, group=group,
            ledger=ledger,
        )  # fmt: skip
        for layout, placed in zip(plan.layouts, plan.placement.units, strict=True)
    ]


def taken_in_order(model: nn.Module, units: ModelSpec) -> list[tuple[nn.Parameter, ParamSpec, int]]:
    """Return each parameter of a whole model once, with its specification and the number of its (first) unit, in the
    order in which all ranks take them in, whatever they have of the model.
    """
    by_name = dict(model.named_parameters())
    found: dict[str, tuple[nn.Parameter, ParamSpec, int]] = {}
    numbered = sorted(enumerate(units.units), key=lambda each: each[1].trainable)
    for number, unit in numbered:
        for spec in unit.params:
            found.setdefault(spec.name, (by_name[spec.name], spec, number))
    return [*found.values()]


def attach_units(units: Sequence[Unit], coordinator: Coordinator) -> None:
    """Let the coordinator bring each parameter that a program uses."""
    for unit in units:
        for param, slot in zip(unit.params, unit.layout.slots, strict=True):
            parameter.attach(param, coordinator, slot.name)
    weight_tiles.adopt_tiles(units, coordinator)
