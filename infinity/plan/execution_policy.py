"""How a plan is executed: the choices of the run that are not bytes, homes or order.

`make_policy` is the only place that derives them. The engine, the simulator, the phases and the estimator read them
from the plan, so that what is predicted is what runs, and ranks that compare plans compare them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.layout import SubGroup, UnitLayout
from infinity.plan.placement import Placement
from infinity.plan.request import PlanRequest
from infinity.plan.stepping import undoable
from infinity.plan.topology import Topology


@dataclass(frozen=True, slots=True)
class ExecutionPolicy:
    """One decision a field. A False is the plain way: wait for each thing where it begins."""

    # Transfers between tiers run beside the computation.
    overlap: bool
    # Units are gathered ahead of their use, because a collective or a copy engine works meanwhile. Otherwise their
    # partitions are only fetched ahead.
    gather_ahead: bool
    # Prefetches are timed in one warm step, and from then on submitted as late as those times allow.
    time_prefetch: bool
    # Released units keep their memory for the next gathers, within the plan's bound: where the device's memory is the
    # process's, the system is slow to give it again.
    retain_released: bool
    # A forward gathers over the ranks, so that all of them have to take part in it.
    collective_forward: bool
    # Sub-groups that the program cannot see are stepped beside the next forward. See [Note: step behind the program].
    step_behind: bool
    # Some of those begin in backward, when their gradients are complete. See [Note: step in backward].
    step_in_backward: bool


def make_policy(
    request: PlanRequest, topology: Topology, layouts: Sequence[UnitLayout], groups: Sequence[SubGroup],
    placement: Placement,
) -> ExecutionPolicy:  # fmt: skip
    """The policy of a request whose values have these homes."""
    several, accelerator, overlap = topology.dp > 1, request.accelerator, request.overlap
    early = overlap and request.steps_early and not placement.grad_whole
    gathers = not all(placed.whole for placed in placement.units)
    on_drive = any(home.on_drive for home in placement.states) or any(
        placed.param.on_drive and layout.numel for layout, placed in zip(layouts, placement.units, strict=True)
    )
    return ExecutionPolicy(
        overlap=overlap,
        gather_ahead=overlap and (several or accelerator),
        time_prefetch=overlap and gathers,
        retain_released=not accelerator,
        collective_forward=several and gathers,
        # There is something to gain where bytes move: to a drive, or to a device that computes.
        step_behind=overlap and (accelerator or on_drive),
        step_in_backward=early and any(undoable(group, placement) for group in groups),
    )
