"""Which configuration suits a machine, and how large a model can be on it.

Candidates are the sensible placements (nothing lies farther out than what is needed more often), each with and without
recomputed activations, and with the loss in tiles where logits decide what is needed. Those whose states alone exceed a
tier are left out unplanned; of the others that fit, the one whose step is predicted to be the shortest wins. The inputs
of recomputed layers lie off the device where that is faster by more than a little, because what they leave is given to
partitions, or where nothing else fits. Every answer is an `Estimate` that was planned like any other, of a
configuration that says all of it but the loss in tiles, for which the program makes a call.

`advise` grows the micro-batch as far as it fits and accumulates up to a usual batch size; several ranks are divided
among the axes first. It keeps the three fastest distinct configurations whose drive lasts long enough.

The axes of many ranks are data, tensor and pipeline, with the schedule and the micro-batches of a step. Ways to divide
the ranks are compared at the same tokens a step. Closed forms of bytes and seconds sort out thousands of combinations
in a moment; the most promising ones are planned and simulated like any other configuration. A closed form that is wrong
costs a plan, never an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, gcd
from typing import Any, NamedTuple

from estimators.activations import may_tile_loss, may_tile_mlps
from estimators.compute import attention_columns, step_flops
from estimators.estimate import (
    RANKS_PER_NODE,
    Estimate,
    Machine,
    Workload,
    activations_of,
    complete_values,
    estimate,
    tensor_axis,
)
from estimators.model import PRESETS, Lora, described, family
from estimators.trees import LAYERS_MAX
from infinity.config.resolve import changed, nested
from infinity.errors import ConfigError
from infinity.plan.activations import Activations
from infinity.plan.capacity import Capacity
from infinity.plan.hardware import ASSUMED, HardwareProfile, assumed
from infinity.plan.pipeline import check_schedule
from infinity.plan.sequence_axis import possible_parts, sent_numel
from infinity.plan.stages import find_blocks
from infinity.plan.tensor_axis import TensorAxis
from infinity.plan.types import DTYPE_NBYTES, SAVE_BLOCK_NBYTES, SAVE_BLOCKS, Kind, Tier

# Of an accelerator, what whole units may take: the less, the more often they are gathered.
_LIVE_SHARES = (8, 32)
_LIVE_DEFAULT = 10**9
# Plans that a search for a nearby configuration makes at most.
_PLANS_MAX = 20
_CHECKPOINTS = "activation_checkpointing"
# Of the adapters that are proposed.
_RANK = 16
# Of a pipeline where nothing is said of them.
_MICRO_BATCHES_A_RANK = 4
# By what a step has to be shorter where activations lie on another tier.
_WORTH = 1.02
# Limits are written in hundredths of a GB.
_ROUNDED = 10**7
# A cautious start for tuning a model that is trained already: the one number that no search can find.
LR = 1e-5
# The same of adapters, which begin as nothing and take larger steps.
LORA_LR = 1e-4
_DEVICES = {Tier.GPU: "none", Tier.CPU: "cpu", Tier.NVME: "nvme"}
NAMES = {Tier.GPU: "GPU", Tier.CPU: "CPU", Tier.NVME: "NVMe"}
# Stage 3, parameters, optimizer states: from near to far.
_PLACEMENTS = (
    (3, Tier.GPU, Tier.GPU), (3, Tier.GPU, Tier.CPU), (3, Tier.GPU, Tier.NVME), (3, Tier.CPU, Tier.CPU),
    (3, Tier.CPU, Tier.NVME), (3, Tier.NVME, Tier.NVME),
)  # fmt: skip
# What several ranks can do beside: keep the parameters whole.
_WHOLE = tuple((stage, Tier.GPU, tier) for stage in (1, 2) for tier in _DEVICES)
# A section `activation_checkpointing`; nothing is computed again without one.
_Section = Mapping[str, Any]
_KEPT: _Section = {}
_RECOMPUTED: _Section = {"every": 1}


# Optimizers of searches, with the least bytes of an element that they keep.
OPTIMIZERS = {"AdamW": 8, "AdamW8bit": 2, "Muon": 4, "Lion": 4}


class Placed(NamedTuple):
    """A ZeRO stage, and the tiers of parameters and of optimizer states."""

    stage: int
    param: Tier
    states: Tier


@dataclass(frozen=True)
class Sparing:
    """What is done to need less of activations: the section, and whether the program tiles the loss, and the MLPs."""

    section: _Section
    tiled_loss: bool
    tiled_mlps: bool = False


@dataclass(frozen=True)
class Choice:
    """A configuration and what it takes."""

    config: Mapping[str, Any]
    estimate: Estimate

    def under(self, section: _Section) -> Choice:
        """With this much computed again: the plan is the same."""
        if not section:
            return self
        config = {**self.config, "activation_checkpointing": section}
        return Choice(config, self.estimate.under(config))

    def varied(self, sparing: Sparing) -> Choice:
        """With less of activations: the plan is the same."""
        return self.under(sparing.section).in_tiles(sparing)

    def in_tiles(self, sparing: Sparing) -> Choice:
        """With the tiles alone."""
        if not sparing.tiled_loss:
            return self
        return Choice(self.config, self.estimate.with_tiles(True, sparing.tiled_mlps))

    @property
    def seconds(self) -> float:
        """Of a step, predicted."""
        return self.estimate.outline.seconds

    @property
    def handicap(self) -> float:
        """What a step counts longer by among others: another tier for activations has to be worth its section."""
        return 1.0 if self.estimate.offloaded is None else _WORTH

    @property
    def lacking(self) -> float:
        """By what part of itself the scarcest tier is too small; 0 where all fits."""
        limits, excess = self.estimate.capacity, self.estimate.excess
        return max((nbytes / max(limits.of(tier) or 0, 1) for tier, nbytes in excess.items()), default=0.0)


@dataclass(frozen=True)
class Near:
    """A configuration that fits, by its differences from one that does not: dotted path -> value."""

    changes: Mapping[str, Any]
    estimate: Estimate

    @property
    def keys(self) -> dict[str, Any]:
        """The differences as they stand in a file."""
        return nested(self.changes)


@dataclass(frozen=True)
class Wish:
    """A model on a machine, as `estimate` takes them, without a configuration."""

    model: Any
    machine: Machine
    options: Mapping[str, Any]
    dtype: str = "bf16"
    # One of OPTIMIZERS.
    optimizer: str = "AdamW"
    # Whether activations are computed again in backward; None: where it is needed.
    checkpointing: bool | None = None
    # The folder on the drive.
    nvme_path: str = "nvme"
    # Whether the loss is computed in tiles; None: where it is needed.
    tiled_loss: bool | None = None
    # The same of the MLPs, which are tiled with the loss only.
    tiled_mlps: bool | None = None

    @property
    def limits(self) -> Capacity:
        """What a rank may have."""
        return self.machine.capacity(self.ranks_per_node)

    @property
    def ranks_per_node(self) -> int:
        return self.options.get("ranks_per_node") or min(self.options.get("ranks", 1), RANKS_PER_NODE)

    @property
    def tilings(self) -> Sequence[tuple[bool, bool]]:
        """Whether the loss may be in tiles, and the MLPs, the fast way first. A model that caps its logits has one way.
        """
        values = described(self.model).values
        known = [(False, False)]
        known += [(True, False)] if values is not None and may_tile_loss(values) else []
        known += [(True, True)] if values is not None and may_tile_mlps(values) else []
        asked = self.tiled_loss, self.tiled_mlps
        found = [tiles for tiles in known if all(own in (None, each) for own, each in zip(asked, tiles, strict=True))]
        # What was asked for by name is refused by name.
        return found or [(any(asked), bool(self.tiled_mlps))]

    @property
    def near(self) -> Sequence[Sparing]:
        """What may become of activations on the device, from fast to small."""
        sections = {None: (_KEPT, _RECOMPUTED), True: (_RECOMPUTED,), False: (_KEPT,)}[self.checkpointing]
        found = [Sparing(section, *tiles) for section in sections for tiles in self.tilings]
        return sorted(found, key=lambda sparing: sparing.tiled_mlps)

    @property
    def far(self) -> Sequence[Sparing]:
        """And off it. Without an accelerator CPU memory is the device's."""
        if self.checkpointing is False:
            return ()
        cpu, nvme = ({**_RECOMPUTED, "offload": self.offload(tier)} for tier in (Tier.CPU, Tier.NVME))
        sections = [*([cpu] if self.machine.accelerator else []), *([nvme] if self.limits.nvme is not None else [])]
        return [Sparing(section, *tiles) for section in sections for tiles in self.tilings]

    @property
    def ways(self) -> Sequence[Sparing]:
        """All of them. Tiles of MLPs are a change of the program and come last."""
        return sorted([*self.near, *self.far], key=lambda sparing: sparing.tiled_mlps)

    def offload(self, tier: Tier) -> dict[str, Any]:
        """The section of what lies on a tier."""
        return {"device": _DEVICES[tier], **({"nvme_path": self.nvme_path} if tier.on_drive else {})}

    def of(self, model: Any) -> Wish:
        """The same wish about another model, with the same adapters."""
        return replace(self, model=described(model).with_adapters(described(self.model).lora))

    @property
    def tensor(self) -> int:
        """Ranks of the tensor axis."""
        return self.options.get("tp") or 1

    @property
    def pipeline(self) -> int:
        """Ranks of the pipeline axis."""
        return self.options.get("pp") or 1

    @property
    def shared(self) -> int:
        """Ranks that share each sequence, of the data axis."""
        return self.options.get("sp") or 1

    @property
    def shares(self) -> Sequence[int]:
        """How many ranks may share each sequence, few first, where the others divide nothing else."""
        if self.options.get("sp") or self.tensor * self.pipeline > 1:
            return (self.shared,)
        return possible_parts(complete_values(described(self.model)) or {}, _divisors(self.data))

    @property
    def data(self) -> int:
        """Ranks of the data axis."""
        return max(self.options.get("ranks", 1) // (self.tensor * self.pipeline), 1)

    @property
    def parallel(self) -> dict[str, Any]:
        """The section of the configuration that says the axes."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline}
        given = {name: self.options.get(name) for name in ("schedule", "virtual_stages")}
        return {name: size for name, size in sizes.items() if size > 1} | {
            name: value for name, value in given.items() if value is not None
        }

    def placements(self, data: int) -> Sequence[Placed]:
        """What a search tries, from near to far."""
        return [Placed(*each) for each in ((*_WHOLE, *_PLACEMENTS) if data > 1 else _PLACEMENTS)]

    @property
    def numels(self) -> tuple[int, int]:
        """Elements of what the tensor axis leaves a rank of the model, and of what is trained of it; of a pipeline, of
        the mean stage.
        """
        model = described(self.model)
        root = model.tree(self.dtype)
        specs = tensor_axis(model, root, self.tensor).divide(root).all_params().values()
        numels = sum(spec.numel for spec in specs), sum(spec.numel for spec in specs if spec.trainable)
        return numels[0] // self.pipeline, numels[1] // self.pipeline

    @property
    def rate(self) -> float:
        """The learning rate that is written for the user to choose."""
        return LR if described(self.model).lora is None else LORA_LR

    def check(self) -> None:
        """Raise ConfigError if the memory of the accelerator or of the node is not given."""
        machine, missing = self.machine, []
        if machine.accelerator and machine.gpu_nbytes is None:
            missing.append("memory of each rank's accelerator (--gpu 24GB, or --no-gpu where ranks compute on the CPU)")
        if machine.cpu_nbytes is None:
            missing.append("memory of each node (--ram 64GB)")
        if missing:
            raise ConfigError(
                f"a search has to know the {' and the '.join(missing)}; without --nvme there is no drive. --fit alone "
                "asks this machine"
            )


def search(wish: Wish) -> Choice:
    """The configuration with the shortest step of those that fit; where none does, the one that lacks the least.

    ConfigError where the machine's memory is not known.
    """
    wish.check()
    planned = [*_planned(wish, _candidates(wish))]
    others: list[Choice] = []
    fitting: list[Choice] = []
    for choice in (*_varied(planned, wish.ways), *_by_budget(wish)):
        (fitting if choice.estimate.fits else others).append(choice)
    if fitting:
        # MLPs in tiles are a change of the program: only where nothing else fits.
        unchanged = [choice for choice in fitting if not choice.estimate.work.tiled_mlps]
        return min(unchanged or fitting, key=lambda choice: choice.seconds * choice.handicap)
    if not others:
        # All were left out for their states alone: the one that needs least nearby says what is missing.
        limits = wish.limits
        tier = Tier.CPU if limits.nvme is None else Tier.NVME
        share = _LIVE_SHARES[-1] if limits.gpu is not None else None
        others = [*_varied(_planned(wish, [_config(wish, (3, tier, tier), limits, share)]), wish.near)]
    return min(others, key=lambda choice: choice.lacking)


def states_fit(wish: Wish) -> bool:
    """Whether a rank's weights, states and gradients have room on all of its tiers together."""
    placed = Placed(3, Tier.CPU, Tier.CPU)
    needed = states_nbytes_of(wish.numels, wish.data, wish.dtype, placed, wish.machine, wish.optimizer)
    return sum(needed.values()) <= sum(wish.limits.of(tier) or 0 for tier in Tier)


def ways_out(wish: Wish, found: Choice, *, with_8_bits: bool = True) -> list[tuple[str, Choice]]:
    """What would fit where nothing does as asked, each in words: gradients in the dtype that is computed in, where
    several micro-batches add up in fp32; moments in 8 bits, unless they were tried before; and adapters, whose base has
    neither gradients nor states.
    """
    model, request, ways = described(wish.model), found.estimate.plan.request, list[tuple[str, Choice]]()
    if request.grad_dtype != request.compute_dtype:
        types = {"data_types": {"grad_accum_dtype": request.compute_dtype}}
        configs = [{**config, **types} for config in _candidates(wish)]
        choices = [*_varied(_planned(wish, configs), wish.ways)]
        fits = [choice for choice in choices if choice.estimate.fits]
        if fits:
            dtype = request.compute_dtype
            words = f'gradients that add up in {dtype} (data_types.grad_accum_dtype = "{dtype}")'
            ways.append((words, min(fits, key=lambda choice: choice.seconds)))
    if with_8_bits and wish.optimizer == "AdamW":
        with suppress(ConfigError):
            choice = search(replace(wish, optimizer="AdamW8bit"))
            if choice.estimate.fits:
                ways.append(("AdamW with moments in 8 bits (--optimizer AdamW8bit)", choice))
    if model.lora is None and model.module is None and wish.tensor == 1:
        with suppress(ConfigError):
            choice = search(replace(wish, model=model.with_adapters(Lora.of(_RANK, None))))
            if choice.estimate.fits:
                ways.append((f"low-rank adapters on a frozen model (--lora {_RANK})", choice))
    return ways


def fitting(wish: Wish, configs: Sequence[Mapping[str, Any]] | None = None) -> list[Choice]:
    """All that fits: of these configurations with the wish's micro-batch, or of all that `search` would try."""
    wish.check()
    if configs is None:
        tried = [*_varied([*_planned(wish, _candidates(wish))], wish.ways), *_by_budget(wish)]
    else:
        micro = {"train_micro_batch_size_per_gpu": wish.options["batch"]}
        plain = [{key: each[key] for key in each if key != "activation_checkpointing"} | micro for each in configs]
        apart = [config for index, config in enumerate(plain) if config not in plain[:index]]
        tried = [*_varied(_planned(wish, apart), wish.ways)]
    return [choice for choice in tried if choice.estimate.fits]


def nearest(found: Estimate, wish: Wish) -> Near | None:
    """Of configurations that differ from one that does not fit and that do fit, the one that differs the least."""
    topology, parallel = found.plan.topology, found.config.sections.parallel
    axes: dict[str, Any] = {"tp": topology.tp, "pp": topology.pp, "micro_batches": None}
    if topology.pp > 1:
        axes |= {"schedule": parallel.schedule, "virtual_stages": parallel.virtual_stages}
    wish = replace(wish, options={**wish.options, **axes})
    best: tuple[int, Near] | None = None
    for cost, moved in sorted(_moves(found, wish), key=lambda item: item[0])[:_PLANS_MAX]:
        if best is not None and best[0] <= cost:
            break
        planned = estimate(wish.model, changed(found.config, moved).sections, machine=wish.machine, **wish.options)
        planned = planned.with_tiles(found.work.tiled_loss, found.work.tiled_mlps)
        for more, varied in _sparing(planned, wish):
            under = planned.under(changed(planned.config, varied).sections) if varied else planned
            if under.fits and (best is None or cost + more < best[0]):
                best = cost + more, Near({**moved, **varied}, under)
    return None if best is None else best[1]


def sparingly(wish: Wish, found: Estimate) -> Estimate | None:
    """The same run with the fewest bytes of activations on the device; None where they are less than half of it."""
    held = 0 if found.activations is None else found.activations.nbytes
    if 2 * held < found.peak(found.tiers[0]):
        return None
    tier = "cpu" if wish.machine.accelerator else "nvme"
    keys: dict[str, Any] = {f"{_CHECKPOINTS}.every": 1, f"{_CHECKPOINTS}.offload.device": tier}
    if tier == "nvme":
        keys[f"{_CHECKPOINTS}.offload.nvme_path"] = wish.nvme_path
    return found.under(changed(found.config, keys).sections).with_tiles(*wish.tilings[-1])


def _moves(found: Estimate, wish: Wish) -> Iterator[tuple[int, dict[str, Any]]]:
    """States farther out, and less gathered at a time: how much each changes, and the keys."""
    config, zero = found.config, "zero_optimization"
    micro, steps, batches = config.micro_batch, config.accumulation, [(0, dict[str, Any]())]
    while micro % 2 == 0 and wish.options.get("batch") is None:
        micro, steps = micro // 2, 2 * steps
        sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
        batches.append((2 + len(batches), sizes))
    if "auto" in (config.param_tier, config.optimizer_tier):
        yield from batches
        return
    ranks, numels = found.plan.topology.dp, wish.numels
    order = {tier: place for place, tier in enumerate(Tier)}
    start = {"offload_optimizer": Tier.named(config.optimizer_tier), "offload_param": Tier.named(config.param_tier)}
    # Of the tiers that were added, those that the configuration names.
    tiers = [tier for tier in _DEVICES if tier.addressable or wish.limits.nvme is not None]
    tiers += [tier for tier in dict.fromkeys(start.values()) if tier not in _DEVICES]
    # A drive has one folder of an engine, whatever lies there.
    folders = config.nvme_path or config.checkpoint_nvme_path or (wish.nvme_path,)
    for states, param in product(tiers, tiers):
        moved: dict[str, Any] = {}
        cost = 0
        for (name, tier), to in zip(start.items(), (states, param), strict=True):
            cost += 2 * (order[to] - order[tier])
            if order[to] < order[tier]:
                break
            if to is not tier:
                moved[f"{zero}.{name}.device"] = _DEVICES.get(to, to.value)
                if to.on_drive:
                    moved[f"{zero}.{name}.nvme_path"] = (config.folders(to.value) or folders)[0]
        else:
            if not param.on_device and config.stage != 3:
                moved, cost = {f"{zero}.stage": 3, **moved}, cost + 1
            stage = moved.get(f"{zero}.stage", config.stage)
            placed = Placed(stage, param, states)
            kind = config.sections.optimizer.type if config.sections.optimizer is not None else ""
            needed = states_nbytes_of(numels, ranks, config.compute_dtype, placed, wish.machine, kind)
            if any(nbytes > (wish.limits.of(tier) or nbytes) for tier, nbytes in needed.items()):
                continue
            for more, sizes in batches:
                yield cost + more, {**sizes, **moved}
            if config.stage == 3 or f"{zero}.stage" in moved:
                live = {"stage3_max_live_parameters": 100_000_000, "stage3_prefetch_bucket_size": 25_000_000}
                tight = {**moved, **{f"{zero}.{name}": bound for name, bound in live.items()}}
                for more, sizes in batches:
                    yield cost + more + 1, {**sizes, **tight}


def _sparing(planned: Estimate, wish: Wish) -> Iterator[tuple[int, dict[str, Any]]]:
    """Less of activations: how much each changes, and the keys. The plan stays."""
    yield 0, {}
    section = "activation_checkpointing"
    again = {} if planned.work.checkpointing else {f"{section}.every": 1}
    if again:
        yield 1, again
    if planned.offloaded is None and wish.machine.accelerator:
        yield 2, {**again, f"{section}.offload.device": "cpu"}


def usual(wish: Wish) -> Iterator[tuple[str, Estimate]]:
    """The usual placements of parameters and of optimizer states by name, whether they fit or not."""
    names, seen = NAMES if wish.machine.accelerator else {**NAMES, Tier.GPU: "memory", Tier.CPU: "memory"}, set()
    for stage, param, states in _PLACEMENTS:
        name = f"{names[param]}, {names[states]}"
        if name in seen:
            # One memory, called by both of its names.
            continue
        seen.add(name)
        config = _config(wish, (stage, param, states), Capacity(), None)
        found = estimate(wish.model, config, machine=wish.machine, **wish.options)
        yield name, found.with_checkpointing(bool(wish.checkpointing)).with_tiles(
            bool(wish.tiled_loss), bool(wish.tiled_mlps)
        )


def largest(wish: Wish) -> tuple[Choice | None, Choice]:
    """The largest member of the model's family that fits (None: no known one does), and the model itself with as many
    layers as fit, of its own width.
    """
    wish.check()
    what = described(wish.model)
    if what.values is None or what.module is not None:
        raise ConfigError("the largest model is searched for from a name or a config.json, not from a module")
    members = [name for name in PRESETS if family(name) == family(what.name)] if what.name in PRESETS else []
    sized = sorted(members, key=_numel, reverse=True)
    member = next((found for name in sized if (found := search(wish.of(name))).estimate.fits), None)
    key = "n_layer" if "n_layer" in what.values else "num_hidden_layers"

    def with_layers(layers: int) -> dict[str, Any]:
        assert what.values is not None
        return {**what.values, "_name_or_path": f"{what.name} with {layers:,} layers", key: layers}

    count = _last(lambda layers: _fits(wish.of(with_layers(layers))))
    return member, search(wish.of(with_layers(max(count, 1))))


def _last(holds: Callable[[int], bool]) -> int:
    """The greatest number for which `holds`, which holds up to some number and no farther; 0 for none."""
    low, high = 0, 1
    while high < LAYERS_MAX and holds(high):
        low, high = high, min(2 * high, LAYERS_MAX)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _fits(wish: Wish) -> bool:
    """Whether any candidate fits: those that need the least of the accelerator are enough to know."""
    planned = _planned(wish, [*_candidates(wish, sparing=True)][::-1])
    least = wish.near[-len(wish.tilings) :]
    return any(choice.estimate.fits for choice in _varied(planned, (*least, *wish.far)))


def _numel(name: str) -> int:
    return described(name).tree("bf16").numel


def _planned(wish: Wish, candidates: Iterable[Mapping[str, Any]]) -> Iterator[Choice]:
    """Estimates of candidates that keep all activations."""
    for config in candidates:
        yield Choice(config, estimate(wish.model, config, machine=wish.machine, **wish.options))


def _varied(choices: Iterable[Choice], sparings: Sequence[Sparing]) -> Iterator[Choice]:
    """Each choice with these ways to spare activations in turn until one fits. Tiles are left out where they spare
    nothing, because what they cut is not what the busiest moment holds.
    """
    for choice in choices:
        whole: dict[int, int] = {}
        # A configuration is read once for all of its tiles.
        under: dict[int, Choice] = {}
        for sparing in sparings:
            section = id(sparing.section)
            if section not in under:
                under[section] = choice.under(sparing.section)
            varied = under[section].in_tiles(sparing)
            held = _held(varied)
            if sparing.tiled_loss and held >= whole.get(section, held + 1):
                continue
            whole[section] = held
            yield varied
            if varied.estimate.fits:
                break


def _held(choice: Choice) -> int:
    """Bytes of activations on the device, as far as they are known."""
    found, away = choice.estimate.activations, choice.estimate.offloaded
    return 0 if found is None else found.nbytes - (0 if away is None else away.freed_nbytes)


def _held_away(choice: Choice) -> int:
    """Bytes of activations in CPU memory off the device."""
    away = choice.estimate.offloaded
    if away is None:
        return 0
    return away.nbytes if away.tier.addressable else away.buffers * away.each_nbytes


def _by_budget(wish: Wish) -> Iterator[Choice]:
    """What the planner makes of what the activations leave, tier by tier."""
    room, local = wish.limits, wish.ranks_per_node
    nearest, cpu = room.of(Tier.GPU), room.of(Tier.CPU)
    assert nearest is not None and cpu is not None
    # The blocks that a checkpoint passes through are no partition's.
    cpu = max(cpu - SAVE_BLOCKS * SAVE_BLOCK_NBYTES, 0)
    drive = {"nvme_path": wish.nvme_path} if room.nvme is not None else {}
    plain = _config(wish, (3, Tier.GPU, Tier.GPU), room, None)
    (anywhere,) = _planned(wish, [plain])
    tried: set[int] = set()
    for sparing in wish.ways:
        if sparing.tiled_mlps and not wish.tiled_mlps:
            # A plan costs more than it is worth here: the candidates tried them.
            continue
        varied = anywhere.varied(sparing)
        held, away = _held(varied), _held_away(varied)
        if nearest <= held or cpu <= away or any(held >= other for other in tried):
            continue
        tried.add(held)
        zero = plain["zero_optimization"] | {
            name: {"device": "auto", **drive} for name in ("offload_param", "offload_optimizer")
        }
        memory = {"gpu": nearest - held, "cpu": (cpu - away) * local}
        if not wish.machine.accelerator:
            memory = {"cpu": (cpu - held - away) * local}
        if min(memory.values()) < _ROUNDED:
            # No limit that can be written.
            continue
        # As people write it, never above what it is.
        limits = {name: {"max_bytes": f"{nbytes // _ROUNDED / 100:g}GB"} for name, nbytes in memory.items()}
        config = {**plain, "zero_optimization": zero, "memory": limits}
        yield from _varied(_planned(wish, [config]), [sparing])


def _candidates(wish: Wish, *, sparing: bool = False) -> Iterator[dict[str, Any]]:
    """Configurations worth a plan; `sparing`: of each placement, only the one with the smallest bounds."""
    ranks, limits = wish.data, wish.limits
    numels = wish.numels
    for placed in wish.placements(ranks):
        stage, param, states = placed
        needed = states_nbytes_of(numels, ranks, wish.dtype, placed, wish.machine, wish.optimizer)
        # A tier without a limit counts as absent: a drive has to be named.
        if any(nbytes and (limits.of(tier) or 0) < nbytes for tier, nbytes in needed.items()):
            continue
        shares = (None, *_LIVE_SHARES) if stage == 3 and limits.gpu is not None else (None,)
        found: list[dict[str, Any]] = []
        for share in shares[-1:] if sparing else shares:
            config = _config(wish, (stage, param, states), limits, share)
            found += [] if config in found else [config]
        yield from found


def config_of(wish: Wish, placed: Placed) -> dict[str, Any]:
    """Return the configuration of a placement, with nothing in it that is not needed."""
    return _config(wish, placed, Capacity(), None)


def _config(
    wish: Wish, placement: tuple[int, Tier, Tier], limits: Capacity, share: int | None
) -> dict[str, Any]:
    """The training configuration of a candidate, with nothing in it that is not needed."""
    stage, param, states = placement
    zero: dict[str, Any] = {"stage": stage}
    for name, tier in (("offload_param", param), ("offload_optimizer", states)):
        if not tier.on_device:
            zero[name] = wish.offload(tier)
    if share is not None:
        assert limits.gpu is not None
        live = max(limits.gpu // share // (4 if wish.dtype == "fp32" else 2), 1_000_000)
        live = round(live, -6)
        if live < _LIVE_DEFAULT:
            zero |= {"stage3_max_live_parameters": live, "stage3_prefetch_bucket_size": min(live // 4, 50_000_000)}
    precision = {} if wish.dtype == "fp32" else {wish.dtype: {"enabled": True}}
    micro = wish.options.get("batch") or 1
    # A rate that suits AdamW suits Muon's matrices, too.
    more = {"adjust_lr_fn": "match_rms_adamw"} if wish.optimizer == "Muon" else {}
    optimizer = {"type": wish.optimizer, "params": {"lr": wish.rate, **more}}
    axes: dict[str, Any] = {"parallel": wish.parallel} if wish.parallel else {}
    axes |= {"sequence_parallel_size": wish.shared} if wish.shared > 1 else {}
    # So many leave a pipeline's bubble small, and all schedules take them.
    usual = _MICRO_BATCHES_A_RANK * wish.pipeline if wish.pipeline > 1 else 1
    steps = wish.options.get("micro_batches") or usual
    accumulated = {"gradient_accumulation_steps": steps} if steps > 1 else {}
    return {
        "train_micro_batch_size_per_gpu": micro, **accumulated, **precision, **axes, "optimizer": optimizer,
        "zero_optimization": zero,
    }  # fmt: skip


def states_nbytes_of(
    numels: tuple[int, int], ranks: int, dtype: str, placement: Placed, machine: Machine, optimizer: str
) -> dict[Tier, int]:
    """Return what states alone take of each tier, at the least; where ranks compute on the CPU, the GPU's is the CPU's.

    numels: elements of the model, and of what is trained of it.
    """
    (stage, param, states), (numel, trained) = placement, numels
    width = 4 if dtype == "fp32" else 2
    # What completes the master, and what the optimizer keeps.
    moments = {"fp32": 0, "bf16": 2, "fp16": 4}[dtype] + OPTIMIZERS.get(optimizer, 0)
    found = dict.fromkeys(Tier, 0)
    found[param] += numel * width // (ranks if stage == 3 else 1)
    found[states] += trained * moments // ranks
    # Where there is a drive, gradients that memory has no room for go there.
    if states.on_device or not (states.on_drive or param.on_drive):
        found[Tier.GPU if states.on_device else Tier.CPU] += trained * width // ranks
    if not machine.accelerator:
        found[Tier.CPU] += found[Tier.GPU]
        found[Tier.GPU] = 0
    return found


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
    # Ranks that share each sequence, of the data axis.
    shared: int = 1

    @property
    def axes(self) -> tuple[int, ...]:
        """Ranks along the data, the tensor and the pipeline axis, and those that share a sequence."""
        return self.data, self.tensor, self.pipeline, self.shared


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
    planned: dict[tuple[int, ...], int] = {}
    done: set[tuple[int, ...]] = set()
    # The options that no configuration says.
    names = ("ranks", "ranks_per_node", "sequence", "profile")
    others = {name: wish.options[name] for name in names if name in wish.options}
    candidates = sorted(_Model(wish).candidates(), key=lambda each: -each.tokens_a_second)
    for each in candidates:
        axes = each.layout.axes
        count = planned.get(axes, 0)
        if axes in done or count >= _PLANNED_OF_ONE or sum(planned.values()) >= _PLANNED:
            continue
        planned[axes] = count + 1
        config = _with_axes(wish, each)
        made = estimate(wish.model, config, machine=wish.machine, **others)
        choice = Choice(config, made.with_tiles(each.sparing.tiled_loss, each.sparing.tiled_mlps))
        if choice.estimate.fits:
            found.append(choice)
            done.add(axes)
    return sorted(found, key=lambda choice: -tokens_a_second(choice))


def _with_axes(wish: Wish, each: _Candidate) -> dict[str, Any]:
    layout = each.layout
    axes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "virtual_stages": layout.virtual}
    parallel: dict[str, Any] = {name: size for name, size in axes.items() if size > 1}
    if layout.pipeline > 1:
        parallel["schedule"] = layout.schedule
    config = config_of(wish, each.placed)
    config["train_micro_batch_size_per_gpu"] = each.micro
    config["gradient_accumulation_steps"] = each.micro_batches
    config |= {"parallel": parallel} if parallel else {}
    config |= {"sequence_parallel_size": layout.shared} if layout.shared > 1 else {}
    return config | ({"activation_checkpointing": each.sparing.section} if each.sparing.section else {})


class _Model:
    """A wish's model in closed forms."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._what = described(wish.model)
        self._root = self._what.tree(wish.dtype)
        self._blocks = len(find_blocks(self._root, self._what.blocks))
        self._values = complete_values(self._what) or {}
        self._activations: dict[tuple[int, int, int, bool, bool, bool], Activations | None] = {}
        self._axes: dict[int, TensorAxis] = {}
        specs = self._root.all_params().values()
        self._numel = sum(spec.numel for spec in specs)
        self._trained = sum(spec.numel for spec in specs if spec.trainable)

    def candidates(self) -> Iterator[_Candidate]:
        """Yield what may fit, with the tokens a second that closed forms promise. Ranks share sequences only where a
        rank has no room for one of its own.
        """
        # A program is changed for MLPs in tiles only where it was asked for.
        near = [sparing for sparing in self._wish.near if self._wish.tiled_mlps or not sparing.tiled_mlps]
        alone = False
        for layout in self._layouts():
            if layout.shared > 1 and alone:
                continue
            for micro, micro_batches in self._batches(layout):
                for sparing in near:
                    held = self._held(layout, micro, micro_batches, sparing)
                    for placed in self._wish.placements(layout.data):
                        if self._fits(layout, placed, held):
                            alone = alone or layout.tensor == layout.pipeline == 1
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
                        # A sequence axis lies along data-parallel ranks only.
                        for shared in self._wish.shares if data == ranks else (self._wish.shared,):
                            yield AxesLayout(tensor, pipeline, data, schedule, virtual, shared)

    def _divides(self, tensor: int) -> bool:
        try:
            self._axis(tensor)
        except ConfigError:
            return False
        return True

    def _batches(self, layout: AxesLayout) -> Iterator[tuple[int, int]]:
        """(sequences in a micro-batch, micro-batches of a step) of about equal tokens a step."""
        options, sequence = self._wish.options, self._work(1, self._wish.near[0]).sequence
        replicas = layout.data // layout.shared
        target = max(_TOKENS, options.get("ranks", 1) // layout.shared * sequence)
        sizes = [options["batch"]] if options.get("batch") else _MICRO_SIZES
        for micro in sizes:
            count = options.get("micro_batches") or round(target / (replicas * micro * sequence))
            while count > 0:
                try:
                    check_schedule(layout.schedule, layout.pipeline, count, layout.virtual)
                except ConfigError:
                    count = 0 if options.get("micro_batches") else count - 1
                    continue
                yield micro, count
                break

    def _work(self, micro: int, sparing: Sparing, shared: int = 1) -> Workload:
        whole = Workload.of(
            self._what, micro, self._wish.options.get("sequence"), checkpointing=bool(sparing.section),
            tiled_loss=sparing.tiled_loss, tiled_mlps=sparing.tiled_mlps,
        )  # fmt: skip
        return replace(whole, parts=shared)

    def _axis(self, tensor: int) -> TensorAxis:
        if tensor not in self._axes:
            self._axes[tensor] = tensor_axis(self._what, self._root, tensor)
        return self._axes[tensor]

    def _of_micro_batch(self, layout: AxesLayout, micro: int, sparing: Sparing) -> Activations | None:
        tensor, shared = layout.tensor, layout.shared
        key = tensor, shared, micro, bool(sparing.section), sparing.tiled_loss, sparing.tiled_mlps
        if key not in self._activations:
            self._activations[key] = activations_of(
                self._what, self._wish.dtype, self._work(micro, sparing, shared), self._wish.machine, self._axis(tensor)
            )
        return self._activations[key]

    def _held(self, layout: AxesLayout, micro: int, micro_batches: int, sparing: Sparing) -> int:
        """Bytes of activations on the scarcest place of the pipeline, about."""
        found = self._of_micro_batch(layout, micro, sparing)
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
        wish = self._wish
        needed = states_nbytes_of(numels, layout.data, wish.dtype, placed, wish.machine, wish.optimizer)
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
        work, rates = self._work(micro, sparing, layout.shared), self._rates
        compute = rates.compute.get(self._wish.dtype) or next(iter(rates.compute.values()))
        network = rates.network_rate or ASSUMED.network_rate or 1.0
        pp, share = layout.pipeline, layout.tensor * layout.pipeline
        width = DTYPE_NBYTES[self._wish.dtype]
        # The slowest stage has its blocks rounded up.
        uneven = ceil(self._blocks / (pp * layout.virtual)) * pp * layout.virtual / max(self._blocks, 1)
        own = self._flops(sparing, micro) / share / layout.shared * (uneven if pp > 1 else 1.0) / compute.rate
        hidden = self._what.hidden_size or 0
        sums = 4 * (1.5 if sparing.section else 1.0) * self._blocks * work.tokens * hidden * width
        own += sums / pp * 2 * (layout.tensor - 1) / layout.tensor / network
        # Queries, keys, values and outputs, there and back, of each of its tokens.
        columns = attention_columns(self._values, layout.shared)
        passes = 3 if sparing.section else 2
        own += passes * sent_numel(columns, tokens=work.tokens, size=layout.shared) * width / network
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
            moved = 2 + OPTIMIZERS[self._wish.optimizer]
            seconds = max(seconds, numel * moved * sharers / min(drives.read, drives.write))
        return seconds

    def _flops(self, sparing: Sparing, micro: int) -> float:
        key = bool(sparing.section), sparing.tiled_loss, sparing.tiled_mlps
        if key not in self._operations:
            work = self._work(1, sparing)
            self._operations[key] = step_flops(
                self._root, self._values, tokens=work.tokens, keys=work.sequence / 2,
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


# A drive must last `DAYS_MIN` days of training for `HOURS_A_DAY` hours each.
HOURS_A_DAY = 8
DAYS_MIN = 365
# Most tokens of a step over all ranks that accumulation aims at: fine-tuning rarely uses larger batches.
TOKENS_MAX = 1 << 17
_MICRO_MAX = 16
# How many of the fastest placements of one micro-batch are tried with the next.
_KEPT_ON_DRIVE = 4
SHOWN = 3
PARAMETERS = (Kind.PARAM, Kind.FULL)
_OTHERS = (*PARAMETERS, Kind.GRAD, Kind.FULL_GRAD, Kind.ACTIVATION, Kind.MODEL, Kind.POOL)
STATES = tuple(kind for kind in Kind if kind not in _OTHERS)


@dataclass(frozen=True)
class Advice:
    """At least one choice, the best first. lasting: whether their drives last as long as required."""

    choices: Sequence[Choice]
    lasting: bool

    @property
    def best(self) -> Choice:
        return self.choices[0]


def advise(wish: Wish) -> Advice:
    """Return the fastest configurations that fit and last; if none fits, the one that exceeds its limits least."""
    model = described(wish.model)
    divisible = wish.options.get("ranks", 1) > 1 and model.module is None and model.lora is None
    found = fit_axes(wish) if divisible else []
    # What keeps sequences whole goes first: activations hide on other tiers where sequences are long.
    for size in () if found else wish.shares:
        wish = replace(wish, options={**wish.options, "sp": size})
        if found := [*_grown(wish)]:
            break
    if not found:
        return Advice([search(wish)], lasting=True)
    lasting = [choice for choice in found if lasts(choice)]
    found = sorted(lasting or found, key=lambda choice: tokens_a_second(choice) / choice.handicap, reverse=True)
    if not lasting:
        found.sort(key=lambda choice: days_of_training(choice) or 0.0, reverse=True)
    return Advice([*_different(found)][:SHOWN], lasting=bool(lasting))


def tokens_a_second(choice: Choice) -> float:
    """Return the tokens a second of all ranks."""
    return choice.estimate.outline.tokens_a_second * choice.estimate.plan.topology.dp


def days_of_training(choice: Choice) -> float | None:
    """Return the days at `HOURS_A_DAY` until the drives reach their rated endurance; None if nothing is written."""
    days = choice.estimate.outline.days_to_endurance
    return None if days is None else days * 24 / HOURS_A_DAY


def lasts(choice: Choice) -> bool:
    """Return whether the drives last for `DAYS_MIN`."""
    days = days_of_training(choice)
    return days is None or days >= DAYS_MIN


def _grown(wish: Wish) -> Iterator[Choice]:
    """Yield what fits, from micro-batches of one sequence up, each with and without accumulation."""
    micro, ranks = wish.options.get("batch") or 1, wish.data
    known: Sequence[Mapping[str, Any]] | None = None
    while True:
        sized = replace(wish, options={**wish.options, "batch": micro})
        alone = fitting(sized, known)
        yield from alone
        if not alone:
            return
        tokens = alone[0].estimate.work.tokens * ranks
        configs = [choice.config for choice in sorted(alone, key=lambda choice: choice.seconds)[:_KEPT_ON_DRIVE]]
        if (steps := TOKENS_MAX // tokens) > 1:
            yield from fitting(sized, [{**config, "gradient_accumulation_steps": steps} for config in configs])
        micro, known = 2 * micro, configs
        if wish.options.get("batch") is not None or micro > _MICRO_MAX:
            return


def _different(choices: Sequence[Choice]) -> Iterator[Choice]:
    """Yield the first of the choices that differ only in batch and gathered bytes."""
    seen = set()
    for choice in choices:
        work, steps = choice.estimate.work, choice.estimate.accumulation
        computed = work.checkpointing, work.tiled_loss, work.tiled_mlps, steps > 1
        topology = choice.estimate.plan.topology
        axes = topology.dp, topology.tp, topology.pp, topology.sp
        kind = *(tuple(choice.estimate.homes(*kinds)) for kinds in (PARAMETERS, STATES)), computed, axes
        if kind not in seen:
            seen.add(kind)
            yield choice
