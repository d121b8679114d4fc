"""Which axes suit a model on many ranks: data, tensor and pipeline, the schedule, and the micro-batches of a step.

Ways to divide the ranks are compared at the same tokens a step. Closed forms of bytes and seconds sort out thousands of
combinations in a moment; the most promising ones are planned and simulated like any other configuration. A closed form
that is wrong costs a plan, never an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd
from typing import Any, NamedTuple

from estimators.compute import step_flops
from estimators.estimate import Workload, activations_of, complete_values, estimate, tensor_axis
from estimators.model import described
from estimators.search import Choice, Placed, Sparing, Wish, config_of, states_nbytes_of
from infinity.errors import ConfigError
from infinity.plan.activation_bytes import Activations
from infinity.plan.hardware import ASSUMED, HardwareProfile, assumed
from infinity.plan.pipeline import check_schedule
from infinity.plan.stages import find_blocks
from infinity.plan.tensor_axis import TensorAxis
from infinity.plan.types import DTYPE_NBYTES, Tier

# Tokens of a step, of all ranks: no fewer than one sequence for each.
_TOKENS = 1 << 17
_MICRO_SIZES = (1, 2, 4, 8)
_VIRTUAL = (1, 2)
# How many are planned at most, and of one way to divide the ranks until one fits.
_PLANNED, _PLANNED_OF_ONE = 5, 2
# Of the memory of an accelerator, what the closed forms may fill: plans round, and gather.
_FILLED = 0.97
# The bubble of split backwards against that of whole ones.
_SPLIT_BUBBLE = 0.45


class AxesLayout(NamedTuple):
    """A way to divide the ranks, and the schedule of the pipeline."""

    tensor: int
    pipeline: int
    data: int
    schedule: str
    virtual: int

    @property
    def axes(self) -> tuple[int, int, int]:
        """Ranks along the data, the tensor and the pipeline axis."""
        return self.data, self.tensor, self.pipeline


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layout with all that a configuration says beside, and what closed forms say of it."""

    layout: AxesLayout
    micro: int
    micro_batches: int
    placed: Placed
    sparing: Sparing
    tokens_a_second: float


def fit_axes(wish: Wish) -> list[Choice]:
    """Return configurations that fit, the fastest first; none where nothing that was tried does.

    The wish's options may fix any of tp, pp, schedule, virtual_stages, micro_batches and batch.
    """
    wish.check()
    found: list[Choice] = []
    planned: dict[tuple[int, int, int], int] = {}
    done: set[tuple[int, int, int]] = set()
    candidates = sorted(_Model(wish).candidates(), key=lambda each: -each.tokens_a_second)
    for each in candidates:
        axes = each.layout.axes
        count = planned.get(axes, 0)
        if axes in done or count >= _PLANNED_OF_ONE or sum(planned.values()) >= _PLANNED:
            continue
        planned[axes] = count + 1
        config = _config(wish, each)
        made = estimate(wish.model, config, machine=wish.machine, **_others(wish))
        choice = Choice(config, made.with_tiles(each.sparing.tiled_loss, each.sparing.tiled_mlps))
        if choice.estimate.fits:
            found.append(choice)
            done.add(axes)
    return sorted(found, key=lambda choice: -_tokens_a_second(choice))


def _tokens_a_second(choice: Choice) -> float:
    return choice.estimate.outline.tokens_a_second * choice.estimate.plan.topology.dp


def _others(wish: Wish) -> dict[str, Any]:
    """The options that no configuration says."""
    names = ("ranks", "ranks_per_node", "sequence", "profile")
    return {name: wish.options[name] for name in names if name in wish.options}


def _config(wish: Wish, each: _Candidate) -> dict[str, Any]:
    layout = each.layout
    axes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "virtual_stages": layout.virtual}
    parallel: dict[str, Any] = {name: size for name, size in axes.items() if size > 1}
    if layout.pipeline > 1:
        parallel["schedule"] = layout.schedule
    config = config_of(wish, each.placed)
    config["train_micro_batch_size_per_gpu"] = each.micro
    config["gradient_accumulation_steps"] = each.micro_batches
    config |= {"parallel": parallel} if parallel else {}
    return config | ({"activation_checkpointing": each.sparing.section} if each.sparing.section else {})


class _Model:
    """A wish's model in closed forms."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._what = described(wish.model)
        self._root = self._what.tree(wish.dtype)
        self._blocks = len(find_blocks(self._root, self._what.blocks))
        self._values = complete_values(self._what) or {}
        self._activations: dict[tuple[int, int, bool, bool, bool], Activations | None] = {}
        self._axes: dict[int, TensorAxis] = {}
        specs = self._root.all_params().values()
        self._numel = sum(spec.numel for spec in specs)
        self._trained = sum(spec.numel for spec in specs if spec.trainable)

    def candidates(self) -> Iterator[_Candidate]:
        """Yield what may fit, with the tokens a second that closed forms promise."""
        # A program is changed for MLPs in tiles only where it was asked for.
        near = [sparing for sparing in self._wish.near if self._wish.tiled_mlps or not sparing.tiled_mlps]
        for layout in self._layouts():
            for micro, micro_batches in self._batches(layout):
                for sparing in near:
                    held = self._held(layout, micro, micro_batches, sparing)
                    for placed in self._wish.placements(layout.data):
                        if self._fits(layout, placed, held):
                            speed = self._speed(layout, micro, micro_batches, sparing, placed)
                            yield _Candidate(layout, micro, micro_batches, placed, sparing, speed)

    def _layouts(self) -> Iterator[AxesLayout]:
        options, ranks = self._wish.options, self._wish.options.get("ranks", 1)
        for tensor in _divisors(gcd(ranks, self._wish.ranks_per_node)):
            if options.get("tp") not in (None, tensor) or not self._divides(tensor):
                continue
            for pipeline in _divisors(ranks // tensor):
                if options.get("pp") not in (None, pipeline) or (pipeline > 1 and pipeline > self._blocks):
                    continue
                data = ranks // tensor // pipeline
                for schedule, virtual in _schedules(pipeline, self._blocks):
                    if options.get("schedule") in (None, schedule) and options.get("virtual_stages") in (None, virtual):
                        yield AxesLayout(tensor, pipeline, data, schedule, virtual)

    def _divides(self, tensor: int) -> bool:
        try:
            self._axis(tensor)
        except ConfigError:
            return False
        return True

    def _batches(self, layout: AxesLayout) -> Iterator[tuple[int, int]]:
        """(sequences in a micro-batch, micro-batches of a step) of about equal tokens a step."""
        options, sequence = self._wish.options, self._work(1, self._wish.near[0]).sequence
        target = max(_TOKENS, options.get("ranks", 1) * sequence)
        sizes = [options["batch"]] if options.get("batch") else _MICRO_SIZES
        for micro in sizes:
            count = options.get("micro_batches") or round(target / (layout.data * micro * sequence))
            while count > 0:
                try:
                    check_schedule(layout.schedule, layout.pipeline, count, layout.virtual)
                except ConfigError:
                    count = 0 if options.get("micro_batches") else count - 1
                    continue
                yield micro, count
                break

    def _work(self, micro: int, sparing: Sparing) -> Workload:
        return Workload.of(
            self._what, micro, self._wish.options.get("sequence"), checkpointing=bool(sparing.section),
            tiled_loss=sparing.tiled_loss, tiled_mlps=sparing.tiled_mlps,
        )  # fmt: skip

    def _axis(self, tensor: int) -> TensorAxis:
        if tensor not in self._axes:
            self._axes[tensor] = tensor_axis(self._what, self._root, tensor)
        return self._axes[tensor]

    def _of_micro_batch(self, tensor: int, micro: int, sparing: Sparing) -> Activations | None:
        key = tensor, micro, bool(sparing.section), sparing.tiled_loss, sparing.tiled_mlps
        if key not in self._activations:
            self._activations[key] = activations_of(
                self._what, self._wish.dtype, self._work(micro, sparing), self._wish.machine, self._axis(tensor)
            )
        return self._activations[key]

    def _held(self, layout: AxesLayout, micro: int, micro_batches: int, sparing: Sparing) -> int:
        """Bytes of activations on the scarcest place of the pipeline, about."""
        found = self._of_micro_batch(layout.tensor, micro, sparing)
        if found is None or found.blocks is None:
            return 0
        if layout.pipeline == 1:
            return found.nbytes
        blocks, pp = found.blocks, layout.pipeline
        chunk = ceil(self._blocks / (pp * layout.virtual))
        stage = sum(blocks.saved[:chunk]) + 2 * blocks.boundary_nbytes
        warmup = {"gpipe": micro_batches, "1f1b": pp, "zero_bubble": pp + (layout.virtual - 1) * pp,
                  "interleaved": 2 * pp - 1 + (layout.virtual - 1) * pp}[layout.schedule]  # fmt: skip
        first = min(warmup, layout.virtual * micro_batches) * stage + max(blocks.working)
        flight = micro_batches if layout.schedule == "gpipe" else min(pp, micro_batches)
        late = flight * (sum(blocks.deferred[:chunk]) + blocks.head_deferred) if layout.schedule == "zero_bubble" else 0
        return max(first, layout.virtual * stage + late + blocks.loss_nbytes)

    def _fits(self, layout: AxesLayout, placed: Placed, held: int) -> bool:
        """Whether states, whole parameters and activations are within the limits, as far as closed forms tell."""
        share = layout.tensor * layout.pipeline
        numels = self._numel // share, self._trained // share
        needed = states_nbytes_of(numels, layout.data, self._wish.dtype, placed, self._wish.machine)
        device = Tier.GPU if self._wish.machine.accelerator else Tier.CPU
        needed[device] = needed.get(device, 0) + held
        if placed.stage < 3 and layout.data > 1:
            # Gradients that several micro-batches add up in are whole, too.
            needed[device] += numels[1] * (DTYPE_NBYTES["fp32"] if placed.stage < 2 else 0)
        for tier, nbytes in needed.items():
            limit = self._wish.limits.of(tier)
            if nbytes and (limit or 0) * _FILLED < nbytes:
                return False
        return True

    def _speed(self, layout: AxesLayout, micro: int, micro_batches: int, sparing: Sparing, placed: Placed) -> float:
        """Tokens a second of all ranks."""
        work, rates = self._work(micro, sparing), self._rates
        compute = rates.compute.get(self._wish.dtype) or next(iter(rates.compute.values()))
        network = rates.network_rate or ASSUMED.network_rate or 1.0
        pp, share = layout.pipeline, layout.tensor * layout.pipeline
        width = DTYPE_NBYTES[self._wish.dtype]
        # The slowest stage has its blocks rounded up.
        uneven = ceil(self._blocks / (pp * layout.virtual)) * pp * layout.virtual / max(self._blocks, 1)
        own = self._flops(sparing, micro) / share * (uneven if pp > 1 else 1.0) / compute.rate
        hidden = self._what.hidden_size or 0
        sums = 4 * (1.5 if sparing.section else 1.0) * self._blocks * work.tokens * hidden * width
        own += sums / pp * 2 * (layout.tensor - 1) / layout.tensor / network
        part, apart = (layout.data - 1) / layout.data, self._numel / share * width
        reduced = part * apart / network
        gathered = 2 * reduced if placed.stage == 3 else 0.0
        whole = reduced if placed.stage < 2 else 0.0
        # What travels for a layer hides behind another one in part only.
        each = own + gathered + (reduced if placed.stage > 1 else 0.0)
        waits = (pp - 1) / layout.virtual * (_SPLIT_BUBBLE if layout.schedule == "zero_bubble" else 1.0)
        seconds = each * (micro_batches + waits) + 2 * whole + self._stepping(layout, placed, rates)
        return work.tokens * micro_batches * layout.data / seconds

    def _stepping(self, layout: AxesLayout, placed: Placed, rates: HardwareProfile) -> float:
        """Seconds of the optimizer's step off the device."""
        if placed.states.on_device and self._wish.machine.accelerator:
            return 0.0
        numel = self._trained / (layout.tensor * layout.pipeline * layout.data)
        sharers = self._wish.ranks_per_node
        seconds = numel * next(iter(rates.adam_seconds.values())) * sharers
        if placed.states.on_drive:
            drives = rates.drive_rates
            seconds = max(seconds, numel * 10 * sharers / min(drives.read, drives.write))
        return seconds

    def _flops(self, sparing: Sparing, micro: int) -> float:
        key = bool(sparing.section), sparing.tiled_loss, sparing.tiled_mlps
        if key not in self._operations:
            work = self._work(1, sparing)
            self._operations[key] = step_flops(
                self._root, self._values, tokens=work.tokens, sequence=work.sequence,
                checkpointing=work.checkpointing, tiled_loss=work.tiled_loss, tiled_mlps=work.tiled_mlps,
            )  # fmt: skip
        return micro * self._operations[key]

    @cached_property
    def _operations(self) -> dict[tuple[bool, bool, bool], float]:
        return {}

    @cached_property
    def _rates(self) -> HardwareProfile:
        profile = self._wish.options.get("profile")
        return profile if isinstance(profile, HardwareProfile) else assumed(self._wish.machine.accelerator)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _schedules(pipeline: int, blocks: int) -> Iterator[tuple[str, int]]:
    """(schedule, stages of a rank) that are worth a look: gpipe holds more than 1f1b and is no faster."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    yield from [("1f1b", 1), ("zero_bubble", 1)]
    if 2 * pipeline <= blocks:
        yield from [("interleaved", 2), ("zero_bubble", 2)]
