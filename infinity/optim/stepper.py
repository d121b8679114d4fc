"""The stepper: one pass over the sub-groups of a rank. Prefetch the next, step this one in place, flush the previous.

It knows partitions, layouts and hyper-parameters; what a sub-group is and where it lives is the plan's business. The
gradient norm is summed by unit in a fixed tree, so that its bits depend on neither placement nor threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from infinity.memory.partition import Partition
from infinity.memory.store import TieredStore
from infinity.ops.adam import AdamHyper, Piece, adam_step, grad_stats
from infinity.plan.layout import Slice, SubGroup
from infinity.plan.plan import Plan
from infinity.plan.types import Key, Kind


class Run(NamedTuple):
    """A stretch of a slice that one piece of the optimizer steps: same parameter group, same step count."""

    start: int
    numel: int
    group: int
    step: int


class Stepper:
    """Adam over a plan's sub-groups. `index` is this rank's among the ranks that share a unit."""

    def __init__(self, plan: Plan, store: TieredStore, *, index: int, decoupled: bool, bias_correction: bool) -> None:
        self._plan = plan
        self._store = store
        self._index = index
        self._decoupled = decoupled
        self._bias_correction = bias_correction
        # Steps that each parameter has taken: one without a gradient is not stepped, as in torch.
        self.steps: dict[str, int] = {
            slot.name: 0 for layout in plan.layouts if layout.trainable for slot in layout.slots
        }

    def grad_stats(self) -> tuple[float, int]:
        """Sum of squares (fp64) of this rank's accumulated gradients, and the number of non-finite elements."""
        total, nonfinite = 0.0, 0
        for layout in self._plan.layouts:
            if not layout.trainable:
                continue
            with self._store.read(Key(Kind.GRAD, layout.index)) as (partition,):
                (stats,) = grad_stats([_on_cpu(partition.view(Kind.GRAD))])
            total += stats.sum_of_squares
            nonfinite += stats.nonfinite_count
        return total, nonfinite

    def step(
        self, groups: Sequence[Mapping[str, Any]], *, grad_scale: float, arrived: Mapping[int, Sequence[bool]]
    ) -> None:
        """Step every parameter that has a gradient.

        `groups` are live parameter groups (lr, betas, eps, weight_decay). `arrived` says by unit index which of its
        parameters have had a gradient. `grad_scale` multiplies every gradient (unscaling, averaging and clipping in
        one).
        """
        hyper = [self._hyper(group) for group in groups]
        for index, flags in arrived.items():
            for slot, flag in zip(self._plan.layouts[index].slots, flags, strict=True):
                self.steps[slot.name] += flag
        groups_in_order = self._plan.sub_groups
        for group, following in zip_longest(groups_in_order, groups_in_order[1:]):
            if following is not None:
                self._store.prefetch(*_moved(following))
            self._step_group(group, hyper, grad_scale, arrived)
            later = set(_moved(following)) if following is not None else set()
            self._store.flush(*(key for key in _moved(group) if key not in later))

    def _step_group(
        self, group: SubGroup, hyper: Sequence[AdamHyper], grad_scale: float, arrived: Mapping[int, Sequence[bool]]
    ) -> None:
        grad_keys = [Key(Kind.GRAD, piece.unit) for piece in group.slices]
        with self._store.read(*grad_keys) as grads, self._store.write(*_moved(group)) as (states, *params):
            by_step: dict[int, list[Piece]] = {}
            copies: list[tuple[Tensor, Tensor]] = []
            at = 0
            for piece, grad, param in zip(group.slices, grads, params, strict=True):
                stop = piece.start + piece.numel
                home = param.view(Kind.PARAM)[piece.start : stop]
                state_device = states.view(Kind.EXP_AVG).device
                # A device partition stepped on the CPU is copied there and back.
                local = home if home.device == state_device else home.to(state_device)
                local_grad = grad.view(Kind.GRAD)[piece.start : stop].to(state_device)
                if local is not home:
                    copies.append((home, local))
                for run in self._runs(piece, arrived[piece.unit]):
                    span = slice(run.start, run.start + run.numel)
                    by_step.setdefault(run.step, []).append(
                        _piece(states, at, local[span], local_grad[span], run, hyper[run.group])
                    )
                at += piece.numel
            for step, pieces in by_step.items():
                adam_step(pieces, step=step, grad_scale=grad_scale)
            for home, local in copies:
                home.copy_(local)

    def _runs(self, piece: Slice, arrived: Sequence[bool]) -> list[Run]:
        """Cut a slice where the parameter group or the step count changes, and leave out what had no gradient.

        The padding between two parameters of a run is stepped with them: it is zero and stays zero.
        """
        layout = self._plan.layouts[piece.unit]
        parts = self._plan.placement.units[piece.unit].parts
        first = (self._index if parts > 1 else 0) * layout.partition_numel(parts) + piece.start
        has_grad = {slot.name: flag for slot, flag in zip(layout.slots, arrived, strict=True)}
        runs: list[Run] = []
        joined = False
        for overlap in layout.overlaps(first, first + piece.numel):
            slot = overlap.slot
            if not has_grad[slot.name]:
                joined = False
                continue
            step = self.steps[slot.name]
            if joined and (runs[-1].group, runs[-1].step) == (slot.group, step):
                runs[-1] = runs[-1]._replace(numel=overlap.range_start + overlap.numel - runs[-1].start)
            else:
                runs.append(Run(overlap.range_start, overlap.numel, slot.group, step))
            joined = True
        return runs

    def _hyper(self, group: Mapping[str, Any]) -> AdamHyper:
        return AdamHyper(
            lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
            eps=float(group["eps"]), weight_decay=float(group["weight_decay"]), adamw=self._decoupled,
            bias_correction=self._bias_correction,
        )  # fmt: skip


def _moved(group: SubGroup) -> list[Key]:
    """The partitions that a sub-group's step changes: its states, then its parameters."""
    return [Key(Kind.STATES, group.index), *(Key(Kind.PARAM, piece.unit) for piece in group.slices)]


def _piece(states: Partition, at: int, param: Tensor, grad: Tensor, run: Run, hyper: AdamHyper) -> Piece:
    span = slice(at + run.start, at + run.start + run.numel)
    kinds = {section.kind for section in states.spec.sections}
    return Piece(
        param=param, grad=grad, exp_avg=states.view(Kind.EXP_AVG)[span], exp_avg_sq=states.view(Kind.EXP_AVG_SQ)[span],
        remainder=states.view(Kind.REMAINDER)[span] if Kind.REMAINDER in kinds else None,
        master=states.view(Kind.MASTER)[span] if Kind.MASTER in kinds else None, hyper=hyper,
    )  # fmt: skip


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()
