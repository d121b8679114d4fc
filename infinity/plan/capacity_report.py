"""Refuse a plan that does not fit: say by how much, and name the nearest configuration that fits.

Every suggestion was planned for the same model and machine with the changed keys, and fits. If no change of keys helps,
more ranks are tried. If those do not help either, the smallest plan says what the hardware needs.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from infinity.base.sizes import format_bytes
from infinity.config.resolve import ResolvedConfig, changed, nested
from infinity.errors import CapacityError
from infinity.plan.capacity import Capacity, excesses
from infinity.plan.inputs import PlanInputs, lowered_in_words
from infinity.plan.plan import Plan, states_nbytes, sub_group_numel_min
from infinity.plan.spec import repeated_blocks
from infinity.plan.types import DTYPE_NBYTES, Tier, memory_names

_ZERO = "zero_optimization"
_PARAM, _OPTIMIZER = f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer"
_GRADIENTS = f"{_ZERO}.offload_gradients"
_LIVE, _AHEAD = f"{_ZERO}.stage3_max_live_parameters", f"{_ZERO}.stage3_prefetch_bucket_size"
_GROUP = f"{_ZERO}.sub_group_size"
# Stands for a drive in a suggestion when the configuration names none; the plan says how much room it needs.
_SOME_DRIVE = ("a folder on a drive",)
# Live parameters, in elements, of the tighter choices: they also bound the size of a unit, which is a quarter of it.
_LIVE_NUMELS = (200_000_000, 40_000_000, 8_000_000)
# Up to so many times the ranks are tried, by these factors from the least that could do.
_TIMES_MAX = 1024
_MARGINS = (1.1, 1.5, 3.0)


@dataclass(frozen=True, slots=True)
class Fit:
    """A configuration that fits: the keys to change (dotted path -> value), the number of ranks, and its plan."""

    changes: Mapping[str, Any]
    ranks: int
    plan: Plan

    def as_json(self) -> str:
        """The keys to change, as they stand in a configuration file."""
        drive = f"{_SOME_DRIVE[0]} with {format_bytes(self.plan.nvme_nbytes)} free for each rank"
        values = {path: drive if value == _SOME_DRIVE else value for path, value in self.changes.items()}
        return json.dumps(nested(values))


def refuse(inputs: PlanInputs, plan: Plan, rank: int = 0) -> None:
    """Raise CapacityError with a table of tiers, kinds and limits if `plan`, made from `inputs`, does not fit."""
    if inputs.fits(plan):
        return
    lines = list(excesses(plan.bytes_by_tier(), inputs.limits))[:1] or [_initial(inputs, plan)]
    lines[0] = f"rank {rank} {lines[0]}"
    if lowered := lowered_in_words(inputs.request, plan):
        lines.append(f"  That is with {lowered}.")
    lines.append(account(plan, inputs.limits))
    if aside := inputs.reserve.in_words():
        free = inputs.free
        rooms = {"the accelerator": free.gpu, "CPU memory": free.cpu, "memory": free.process}
        found = ", ".join(f"{format_bytes(nbytes)} of {name}" for name, nbytes in rooms.items() if nbytes is not None)
        lines.append(
            f"  Free: {found}. Of that is set aside: {aside}. The process had "
            f"{format_bytes(inputs.reserve.taken_nbytes)} before."
        )
        if fits_without_activations(inputs, plan):
            lines.append(f"  It would fit without the activations: {less_activations(inputs)}")
    raise CapacityError("\n".join([*lines, _way_out(inputs)]))


def less_activations(inputs: PlanInputs) -> str:
    """What would make a micro-batch's activations less, of what the configuration does not have yet."""
    config = inputs.config
    ways = []
    if config.micro_batch > 1:
        ways.append("lower train_micro_batch_size_per_gpu, and raise gradient_accumulation_steps as much")
    blocks = repeated_blocks(inputs.node, classes=inputs.blocks, every=1)
    if not config.sections.activation_checkpointing.every:
        ways += ["have blocks computed again in backward (activation_checkpointing.every = 1)"] if blocks else []
    elif Tier.named(config.checkpoint_tier).on_device:
        ways.append('keep the inputs of recomputed blocks elsewhere (activation_checkpointing.offload.device = "nvme")')
    ways.append("run MLPs and the loss in tiles (infinity.tile_sequence)" if blocks else "shorten the inputs")
    found = f"{', or '.join(ways)}."
    schedule = config.sections.parallel.schedule
    if inputs.cut is not None and schedule != "1f1b":
        fewest = 'Of the schedules, "1f1b" has the fewest micro-batches in flight'
        found += f' {fewest}; parallel.schedule is "{schedule}".'
    return found


def fits_without_activations(inputs: PlanInputs, plan: Plan) -> bool:
    """Whether a plan would fit if no memory were set aside for activations."""
    held = plan.nbytes_by_tier()
    held[Tier.GPU] -= inputs.reserve.activation_nbytes
    return inputs.limits.fits(held)


def _initial(inputs: PlanInputs, plan: Plan) -> str:
    """Explain that partitions and the model that they are made from do not fit side by side."""
    free = inputs.free.host
    text = (
        f"needs {format_bytes(inputs.reserve.initial_nbytes(plan))} of memory while the partitions are made from "
        f"the model, but {format_bytes(free or 0)} are free"
    )
    if inputs.reserve.model_nbytes_max is not None:
        return f"{text}."
    return (
        f"{text}: the model has its values in memory. Build it under `with infinity.Init(config=...):`, or load it "
        "with infinity.load_hf(folder, config)."
    )


def account(plan: Plan, capacity: Capacity) -> str:
    """The table: memory x kind x bytes x limit."""
    lines = [f"  {'tier':<13}{'kind':<22}{'planned':>12}{'limit':>12}"]
    names, held = memory_names(accelerator=plan.request.accelerator), plan.nbytes_by_tier()
    for name, kinds in plan.bytes_by_memory().items():
        parts = sorted(kinds.items(), key=lambda item: -item[1])
        lines += [f"  {name:<13}{kind.label:<22}{format_bytes(nbytes):>12}" for kind, nbytes in parts]
        tiers = [tier for tier in names if names[tier] == name]
        limits = [(tier, capacity.own(tier)) for tier in tiers]
        if len(tiers) > 1:
            # Tiers that share the memory may have limits of their own.
            apart = [_sum(f"{name:<13}of the {tier.value} tier", held[tier], own) for tier, own in limits if own]
            lines += [*apart, _sum(f"{name:<13}together", kinds.total(), capacity.process)]
        elif kinds:
            lines.append(_sum(f"{name:<13}together", kinds.total(), limits[0][1]))
    return "\n".join(lines)


def nearest_fit(inputs: PlanInputs) -> Fit | None:
    """Return the first change that fits: fewest keys first, then the fastest tiers, then more ranks. None: no change
    that was tried fits.
    """
    choices = [(keys, changed(inputs.config, keys)) for keys in _changes(inputs.config, _group_numel(inputs))]
    choices = [(keys, config) for keys, config in choices if not _hopeless(replace(inputs, config=config))]
    for keys, config in choices:
        other = replace(inputs, config=config)
        plan = other.plan(raised=False)
        if other.fits(plan):
            return Fit(keys, inputs.topology.world_size, plan)
    return _more_ranks(inputs)


def _more_ranks(inputs: PlanInputs) -> Fit | None:
    """Try more nodes like these, with the configuration as it is and then with homes found by budgets. Three numbers of
    ranks are tried, from the fewest that could be enough.
    """
    for keys in ({}, _different(inputs.config, _by_budget()) or None):
        if keys is None:
            continue
        other = replace(inputs, config=changed(inputs.config, keys))
        for times in _enough(other):
            there = _times(other, times)
            plan = there.plan(raised=False)
            if there.fits(plan):
                return Fit(keys, there.topology.world_size, plan)
    return None


def _enough(inputs: PlanInputs) -> list[int]:
    """Factors to multiply the ranks by: the smallest that could be enough, and larger ones."""
    numbers = range(2, _TIMES_MAX)

    def could_do(times: int) -> bool:
        return not _hopeless(_times(inputs, times))

    at = bisect_left(numbers, True, key=could_do)
    return [math.ceil(numbers[at] * margin) for margin in _MARGINS] if at < len(numbers) else []


def _times(inputs: PlanInputs, times: int) -> PlanInputs:
    return replace(inputs, topology=replace(inputs.topology, dp=inputs.topology.dp * times))


def smallest(inputs: PlanInputs) -> Plan:
    """The plan with as much as possible on NVMe and the least in memory: what any hardware must have for this model."""
    keys = {**_nvme(inputs.config, "offload_param", "offload_optimizer", "offload_gradients"), f"{_ZERO}.stage": 3}
    keys |= {_LIVE: _LIVE_NUMELS[-1], _AHEAD: 0, _GROUP: _group_numel(inputs)}
    return replace(inputs, config=changed(inputs.config, keys)).plan()


def _way_out(inputs: PlanInputs) -> str:
    fit = nearest_fit(inputs)
    if fit is None:
        needs = _takes(smallest(inputs))
        ranks = inputs.topology.world_size
        return (
            f"Nothing that was tried fits, on up to {ranks * _TIMES_MAX} ranks. The smallest plan of this model on "
            f"{ranks} needs {needs} for each rank: give it hardware that has so much, or raise the limits in memory."
        )
    where = f"on {fit.ranks} ranks" if fit.ranks != inputs.topology.world_size else ""
    with_keys = f"with {fit.as_json()}" if fit.changes else ""
    return f"Nearest configuration that fits: {' '.join(filter(None, (with_keys, where)))} (takes {_takes(fit.plan)})."


def _takes(plan: Plan) -> str:
    """What a plan takes: "21.4 GB on device (cpu), 990 GB on nvme"."""
    held = {name: kinds.total() for name, kinds in plan.bytes_by_memory().items()}
    return ", ".join(f"{format_bytes(nbytes)} on {name}" for name, nbytes in held.items() if nbytes)


def _changes(config: ResolvedConfig, group_numel: int) -> list[dict[str, Any]]:
    """Changes of keys to try, the nearest first: the fewest keys, then the fastest tiers."""
    found: list[dict[str, Any]] = []
    for keys in _proposals(config, group_numel):
        different = _different(config, keys)
        if different and different not in found:
            found.append(different)
    # A drive that is not there is further away than any key. Gradients leave memory last.
    gradients = f"{_GRADIENTS}.device"
    return sorted(found, key=lambda keys: (_SOME_DRIVE in keys.values(), gradients in keys, len(keys)))


def _group_numel(inputs: PlanInputs) -> int:
    """A small sub-group, yet not so small that a plan had too many."""
    return max(1 << 18, sub_group_numel_min(inputs.numels[1] // inputs.topology.dp))


def _proposals(config: ResolvedConfig, group_numel: int) -> Iterator[dict[str, Any]]:
    stage = {f"{_ZERO}.stage": 3}
    cpu_states, cpu_params = {f"{_OPTIMIZER}.device": "cpu"}, {f"{_PARAM}.device": "cpu", **stage}
    nvme_states, nvme_params = _nvme(config, "offload_optimizer"), {**_nvme(config, "offload_param"), **stage}
    yield {_GROUP: group_numel}
    yield {_AHEAD: 0}
    for numel in _LIVE_NUMELS:
        yield {_LIVE: numel, _AHEAD: numel // 8}
    yield cpu_states
    yield stage
    yield {**stage, **cpu_states}
    yield cpu_params
    yield nvme_states
    yield {**stage, **nvme_states}
    yield {**cpu_params, **cpu_states}
    yield {**cpu_params, **nvme_states}
    yield {**nvme_params, **nvme_states}
    yield {**nvme_params, **nvme_states, f"{_GRADIENTS}.device": "auto"}
    for by_budget in (_by_budget(), {**_by_budget(), f"{_OPTIMIZER}.nvme_path": _drive(config)}):
        yield by_budget
        for numel in _LIVE_NUMELS:
            yield {**by_budget, _LIVE: numel, _AHEAD: numel // 8}


def _by_budget() -> dict[str, Any]:
    return {f"{_PARAM}.device": "auto", f"{_OPTIMIZER}.device": "auto", f"{_ZERO}.stage": 3}


def _nvme(config: ResolvedConfig, *sections: str) -> dict[str, Any]:
    """Keys that put sections on the drive that the configuration names anywhere, or on some drive."""
    keys: dict[str, Any] = {}
    for name in sections:
        path = getattr(getattr(config.zero, name), "nvme_path", None)
        keys |= {f"{_ZERO}.{name}.device": "nvme", f"{_ZERO}.{name}.nvme_path": path or _drive(config)}
    return keys


def _drive(config: ResolvedConfig) -> tuple[str, ...]:
    sections = (config.zero.offload_optimizer, config.zero.offload_param)
    return next((section.nvme_path for section in sections if section is not None and section.nvme_path), _SOME_DRIVE)


def _different(config: ResolvedConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose present value differs; bounds are only lowered."""
    different = {}
    for path, value in keys.items():
        place: Any = config.sections
        for name in path.split("."):
            place = getattr(place, name, None)
        lower = path not in (_LIVE, _AHEAD, _GROUP) or place > value
        if place != value and lower:
            different[path] = value
    return different


def _hopeless(inputs: PlanInputs) -> bool:
    """Whether the bytes that any plan has to place exceed the limits. Needs no plan."""
    request, limits, dp = inputs.request, inputs.limits, inputs.topology.dp
    numel, trained = inputs.numels
    trained //= dp if request.stage else 1
    states = states_nbytes(request, trained)
    params = numel * DTYPE_NBYTES[request.compute_dtype]
    whole, cut = (params, 0) if request.stage < 3 else (0, params // dp)
    grads = trained * DTYPE_NBYTES[request.grad_dtype]
    # Without a drive at least one of the memory tiers has the gradients, or they have a part each.
    passing = request.drive and (request.grad_tier is None or request.grad_tier.on_drive)
    at_home = states if request.optimizer_share == 1 else 0
    least = {Tier.GPU: whole}
    if request.optimizer_tier is not None:
        least[request.optimizer_tier] = least.get(request.optimizer_tier, 0) + at_home
        if request.optimizer_tier.on_device:
            least[Tier.GPU] += grads if request.optimizer_share == 1 else 0
        elif not passing:
            least[Tier.CPU] = least.get(Tier.CPU, 0) + (grads if request.optimizer_share == 1 else 0)
    memory = [limits.process] if limits.process is not None else [limits.gpu, limits.cpu]
    rooms = [
        (memory, whole + (0 if passing else grads)),
        ([*memory, limits.nvme if request.drive else 0], whole + cut + grads + states),
    ]
    return not limits.fits(least) or any(
        None not in room and nbytes > sum(limit for limit in room if limit is not None) for room, nbytes in rooms
    )


def _sum(where: str, planned: int, limit: int | None) -> str:
    if limit is None:
        return f"  {where:<35}{format_bytes(planned):>12}{'none':>12}"
    excess = f"   {format_bytes(planned - limit)} too much" if planned > limit else ""
    return f"  {where:<35}{format_bytes(planned):>12}{format_bytes(limit):>12}{excess}"
