"""Resolution of every "auto" and of the batch sizes; no other module resolves any.

The result names the source of each value: the file, the schema's default, or a reason.

The batch sizes: train_batch_size = micro-batch x accumulation x ranks. Any consistent subset determines the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from infinity.base.tiers import drive_names
from infinity.config.conflicts import conflicts, pipeline_sizes, tensor_sizes
from infinity.config.explain import idle, meanings, notes
from infinity.config.load import complaint
from infinity.config.schema import Config
from infinity.config.section import Absent, NoEffect, mark, replaced, reply_of, section_leaves, sections_of
from infinity.config.training import Adam
from infinity.config.zero import OffloadGradients, OffloadOptimizer, OffloadParam, ZeroOptimization

_TOTAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """The three batch sizes in samples, where `total` = `micro` x `accumulation` x ranks."""

    total: int
    micro: int
    accumulation: int


@dataclass(frozen=True)
class _Ranks:
    """The number of ranks as an error message shows it, with a hint if the number is only assumed."""

    count: int
    detected: bool
    divided: str = ""

    def __str__(self) -> str:
        if self.divided:
            return f"{self.count} data-parallel rank{'s' if self.count > 1 else ''} ({self.divided})"
        return f"{self.count} rank{'s' if self.count > 1 else ''} {'detected' if self.detected else 'assumed'}"

    @property
    def hint(self) -> str:
        return "" if self.detected else "; say with --ranks N how many there will be"


class Unsolvable(ValueError):
    """Report batch sizes that contradict each other; the message names the nearest valid sizes."""


def solve_batch(
    *, total: int | None, micro: int | None, accumulation: int | None, ranks: int, detected: bool = True,
    divided: str = "",
) -> Batch:  # fmt: skip
    """Return all three sizes, derived from those that are not None; a size that nothing determines is 1.

    Arguments:
        total: samples of one optimizer step over all ranks.
        micro: samples of one forward on one rank.
        accumulation: backward passes of one optimizer step.
        ranks: data-parallel ranks.
        detected: True if `ranks` was detected, False if a command assumes it to check a file.
        divided: of which quotient `ranks` is the value, in words, where other axes have a share of the job's ranks.

    Raises:
        Unsolvable: the given sizes contradict each other or `ranks`.
    """
    counted = _Ranks(ranks, detected, divided)
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * ranks, micro, accumulation)
    if micro is None:
        # As in DeepSpeed, only an explicit key turns accumulation on.
        accumulation = accumulation or 1
        micro = _share(total, accumulation * ranks, f"{_STEPS} {accumulation}", counted)
    elif accumulation is None:
        accumulation = _share(total, micro * ranks, f"{_MICRO} {micro}", counted)
    if micro * accumulation * ranks != total:
        raise Unsolvable(_contradiction(total, micro, accumulation, counted))
    return Batch(total, micro, accumulation)


def _share(total: int, divisor: int, given: str, ranks: _Ranks) -> int:
    if total % divisor == 0:
        return total // divisor
    below, above = total // divisor * divisor, (total // divisor + 1) * divisor
    nearest = f"{below} or {above}" if below else str(above)
    raise Unsolvable(
        f"{_TOTAL} {total} cannot be divided by {given} x {ranks} = {divisor}: the "
        f"nearest {_TOTAL} is {nearest}{ranks.hint}"
    )


def _contradiction(total: int, micro: int, accumulation: int, ranks: _Ranks) -> str:
    product = micro * accumulation * ranks.count
    choices = [f"{_TOTAL} {product}"]
    for key, others in ((_STEPS, micro * ranks.count), (_MICRO, accumulation * ranks.count)):
        if total % others == 0:
            choices.append(f"{key} {total // others}")
    return (
        f"{_TOTAL} {total} is not {_MICRO} {micro} x {_STEPS} {accumulation} x {ranks} = {product}: "
        f"nearest valid choices are {' or '.join(choices)}, or leave one of the three keys out{ranks.hint}"
    )


DtypeName = Literal["fp32", "bf16", "fp16"]
# "gpu", "cpu", "auto" or a tier of drives.
TierName = str


@dataclass(frozen=True)
class ResolveContext:
    """The facts about program, model and ranks that `resolve` uses; None means unknown."""

    # All ranks, and those of a node; `detected` is False if a command that checks a file assumes their number.
    world_size: int = 1
    local_size: int | None = None
    detected: bool = False
    hidden_size: int | None = None
    model_dtype: DtypeName | None = None
    optimizer_lr: float | None = None
    total_num_steps: int | None = None
    warmup_num_steps: int | None = None
    # Stages of a pipeline that the model itself asks for; they count where the configuration does not say it.
    stages: int | None = None
    # Dotted path -> the next step, for keys whose "auto" is refused because only the file can give their value.
    no_auto: Mapping[str, str] = field(default_factory=dict)
    # False in a command that checks a file: keys that the program or its model fills stay open, and print as "auto".
    program: bool = True


def unfilled(*, optimizer: bool = False, scheduler: bool = False) -> Mapping[str, str]:
    """Return dotted path -> the next step, for keys whose "auto" has no value in a program.

    optimizer, scheduler: whether the program passes its own to `initialize()`.
    """
    steps, found = "write the number of steps, or pass initialize() a scheduler", {}
    if not optimizer:
        found["optimizer.params.lr"] = "write the rate, such as 1e-4, or pass initialize() an optimizer"
    if not scheduler:
        found |= {f"scheduler.params.{name}": steps for name in ("warmup_num_steps", "total_num_steps")}
    return found


@dataclass(frozen=True)
class ResolvedConfig(Mapping[str, Any]):
    """A configuration without "auto", with short names for the values that the engine reads most.

    It is a mapping, too, of the file's keys to their values: `config["zero_optimization"]["stage"]`. Defaults are in
    it, and what is absent is not.
    """

    sections: Config
    # Dotted path -> "file", "default" or "auto: reason", for every value.
    sources: Mapping[str, str]
    # Keys that only a program or its model can fill; until then `sections` holds their defaults.
    open: frozenset[str] = frozenset()
    # Ranks along the data axis, and ranks of a node.
    data: int = 1
    local_size: int = 1

    def _by_key(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for leaf in section_leaves(self.sections):
            if leaf.value is not None and not mark(leaf.field, Absent):
                *sections, key = leaf.path.split(".")
                inner = found
                for section in sections:
                    inner = inner.setdefault(section, {})
                inner[key] = "auto" if leaf.path in self.open else leaf.value
        return found

    def __getitem__(self, key: str) -> Any:
        return self._by_key()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key())

    def __len__(self) -> int:
        return len(self._by_key())

    @property
    def zero(self) -> ZeroOptimization:
        return self.sections.zero_optimization

    @property
    def stage(self) -> int:
        return self.zero.stage

    @property
    def tensor(self) -> int:
        """Ranks along the tensor axis."""
        return self.sections.parallel.tensor

    @property
    def pipeline(self) -> int:
        """Ranks along the pipeline axis."""
        return self.sections.parallel.pipeline

    @property
    def sequence(self) -> int:
        """Ranks that share each sequence; so many neighbours on the data axis."""
        return self.sections.sequence_parallel_size

    @property
    def compute_dtype(self) -> DtypeName:
        if self.sections.bf16.enabled:
            return "bf16"
        return "fp16" if self.sections.fp16.enabled else "fp32"

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, because backward computes in fp16, where small gradients underflow."""
        autocast = self.sections.torch_autocast
        return self.compute_dtype == "fp16" or (autocast.enabled and autocast.dtype == "fp16")

    @property
    def casts_inputs(self) -> bool:
        """Whether forward's positional arguments are cast to fp16."""
        return self.sections.fp16.auto_cast and self.compute_dtype == "fp16"

    @property
    def checks_gradients(self) -> bool:
        """Whether a non-finite gradient skips the whole step; if False, only its non-finite elements are left out."""
        # Where the loss is scaled, conflicts.py refuses to leave the check out.
        config = self.sections
        return config.check_grad_overflow and (config.bf16.check_grad_overflow or not config.bf16.enabled)

    @property
    def steps_early(self) -> bool:
        """Whether a step may begin during backward, because it needs neither a norm nor a check of all gradients."""
        return self.sections.overlap and not self.checks_gradients and not self.clip_norm

    @property
    def speculates_always(self) -> bool:
        """Whether steps begin on a guess wherever they can, whatever became of the last ones."""
        return self.sections.speculative_step is True

    @property
    def param_tier(self) -> TierName:
        return _tier(self.zero.offload_param)

    @property
    def optimizer_tier(self) -> TierName:
        return _tier(self.zero.offload_optimizer)

    @property
    def optimizer_share(self) -> float:
        """Share of the optimizer states at `optimizer_tier`; the rest is on the device."""
        section = self.zero.offload_optimizer
        return 1.0 if section is None or section.device == "none" else section.ratio

    @property
    def param_cpu_numel(self) -> int:
        """Elements of a rank's parameters that stay in CPU memory although their device is NVMe."""
        section = self.zero.offload_param
        return section.max_in_cpu if section is not None and section.device in drive_names() else 0

    @property
    def state_buffers(self) -> int:
        """Sub-groups whose states are in memory at once if their device is NVMe; the plan may need more."""
        section = self.zero.offload_optimizer
        return section.buffer_count if section is not None and section.device in drive_names() else 0

    @property
    def param_nvme_path(self) -> tuple[str, ...] | None:
        return self.zero.drives(self.zero.offload_param)

    @property
    def optimizer_nvme_path(self) -> tuple[str, ...] | None:
        return self.zero.drives(self.zero.offload_optimizer)

    @property
    def grad_tier(self) -> TierName:
        """Home of gradients whose states are not on the device."""
        section = self.zero.offload_gradients
        return "auto" if section is None else section.device

    @property
    def grad_share(self) -> float:
        """Share of the gradients on the drive if `grad_tier` is one."""
        section = self.zero.offload_gradients
        return 1.0 if section is None else section.ratio

    @property
    def nvme_path(self) -> tuple[str, ...] | None:
        """A folder on each drive that holds values; None if NVMe holds none."""
        return self.folders("nvme")

    def folders(self, tier: str) -> tuple[str, ...] | None:
        """A folder on each drive of a tier of drives; None if nothing may live there."""
        devices = {tier, *(("none", "cpu", "auto") if tier == "nvme" else ())}
        found = (self.zero.drives(section) for section in self.zero.offloads if section.device in devices)
        path = next((path for path in found if path is not None), None)
        if path is None and tier == "nvme" and self.sections.checkpoint.every_step != "off":
            # Copies of what lives in memory.
            path = self.zero.folders_of_others(tier)
        return path

    @property
    def calls_a_step(self) -> int:
        """Calls of the engine's `step()` that make an optimizer step."""
        return self.accumulation if self.sections.managed_gradient_accumulation else 1

    @property
    def checkpoint_tier(self) -> str:
        """Tier of the inputs of recomputed blocks between forward and backward."""
        section = self.sections.activation_checkpointing
        if section.offload.device != "none":
            return section.offload.device
        return "cpu" if section.cpu_checkpointing else "gpu"

    @property
    def checkpoint_nvme_path(self) -> tuple[str, ...] | None:
        """A folder on each drive that holds those inputs; None if their tier has no drives."""
        tier = self.checkpoint_tier
        if tier not in drive_names():
            return None
        return self.sections.activation_checkpointing.offload.nvme_path or self.zero.folders_of_others(tier)

    @property
    def train_batch(self) -> int:
        return cast(int, self.sections.train_batch_size)

    @property
    def micro_batch(self) -> int:
        return cast(int, self.sections.train_micro_batch_size_per_gpu)

    @property
    def accumulation(self) -> int:
        return cast(int, self.sections.gradient_accumulation_steps)

    @property
    def clip_norm(self) -> float:
        """Bound of the global gradient norm; 0 turns clipping off."""
        return self.sections.gradient_clipping

    @property
    def clip_value(self) -> float:
        """Bound of each gradient element; 0 turns clipping off."""
        return self.sections.gradient_clipping_value

    @property
    def grad_accum_dtype(self) -> DtypeName | None:
        return self.sections.data_types.grad_accum_dtype

    @property
    def communication_dtype(self) -> DtypeName | None:
        return self.sections.communication_data_type

    def report(self) -> list[str]:
        """Return one line for each key that the user set and that has no effect."""
        given = self.sections.provenance.given
        return self.sections.report() + [
            f"{path} = {given[path]!r}: no effect here: {why}" for path, why in idle(self.sections).items()
        ]

    def explain(self) -> str:
        """Return every value with its source, one a line, without the features that infinity lacks."""
        lines, beside_others = [], idle(self.sections)
        compute = "the model's type" if self.open & _PRECISIONS else self.compute_dtype
        absent, more = meanings(self.sections, compute), notes(self.sections)
        for leaf in section_leaves(self.sections):
            if mark(leaf.field, Absent):
                continue
            source = self.sources[leaf.path]
            never = not sections_of(leaf.field) and isinstance(reply_of(leaf.field), NoEffect)
            if never or leaf.path in beside_others:
                source += "; no effect here"
            elif leaf.value in (None, ()) and leaf.path in absent:
                source = source.removesuffix(f": {_LATER}")
                source += f": {absent[leaf.path]}" if source in ("file", "default", "auto") else ""
            elif leaf.path in more and source != "file":
                source += f"; {more[leaf.path]}"
            value = "auto" if leaf.path in self.open else _shown(leaf.value)
            lines.append(f"{leaf.path} = {value}  ({source})")
        return "\n".join(lines)


def drives(config: Config) -> tuple[str, ...]:
    """Return every folder on a drive that `config` may use; `config` need not be resolved."""
    for name in ("offload_param", "offload_optimizer", "offload_gradients"):
        if (path := f"zero_optimization.{name}.device") in config.provenance.autos:
            config = replaced(config, path, "auto")
    zero, checkpoints = config.zero_optimization, config.activation_checkpointing.offload
    found = [zero.drives(section) for section in zero.offloads]
    found += [checkpoints.nvme_path] if checkpoints.device in drive_names() else []
    return tuple(dict.fromkeys(folder for folders in found for folder in folders or ()))


def resolve(config: Config, context: ResolveContext) -> ResolvedConfig:
    """Return `config` with every "auto" and the batch sizes resolved from `context`.

    Raises:
        ConfigError: a value cannot be resolved, or the resolved keys contradict each other or the number of ranks.
    """
    provenance = config.provenance
    still_open = {} if context.program else _open(config, context)
    reasons: dict[str, str] = {}
    settled = config.from_source(replace(provenance, autos=frozenset(still_open)))
    # A rule may read keys that are "auto" themselves; the schema lists those first, so they are resolved by then.
    for leaf in [leaf for leaf in section_leaves(config) if leaf.path in provenance.autos] if provenance.autos else ():
        value, reason = leaf.value, _LATER if leaf.value is None else "the default"
        if leaf.path in _RULES:
            value, reason = _RULES[leaf.path](settled, context, leaf.value)
        settled = replaced(settled, leaf.path, value)
        reasons[leaf.path] = f"auto: {still_open.get(leaf.path, reason)}"
    settled, named = _settle_axes(settled, context)
    data = context.world_size // (settled.parallel.pipeline * settled.parallel.tensor)
    # Ranks that share a sequence train on the same samples.
    replicas = data // settled.sequence_parallel_size
    settled, derived = _settle_batch(settled, context, replicas)
    settled, chosen = _settle_defaults(settled)
    refused = {path: why for path, why in context.no_auto.items() if path in provenance.autos - still_open.keys()}
    # A key whose "auto" is refused is not reported as missing too.
    problems = conflicts(settled.from_source(replace(settled.provenance, autos=frozenset({*still_open, *refused}))))
    problems = [f'{path}: "auto" is refused: {why}' for path, why in refused.items()] + problems
    if problems := problems + _ranks(settled, context, replicas):
        raise complaint(provenance.origin, problems)
    chosen |= named
    sources = {
        leaf.path: derived.get(leaf.path) or reasons.get(leaf.path) or chosen.get(leaf.path)
        or ("file" if leaf.path in provenance.given else "default")
        for leaf in section_leaves(settled)
    }  # fmt: skip
    return ResolvedConfig(settled, sources, frozenset(still_open), data, context.local_size or context.world_size)


def _open(config: Config, context: ResolveContext) -> dict[str, str]:
    """Return "auto" key -> its source, for keys that only the program or its model can fill."""
    autos = config.provenance.autos
    left = dict(context.no_auto)
    if "optimizer.params.lr" not in config.provenance.given:
        # A warm-up may end at the optimizer's own rate; a cycle needs a number for its peak.
        left["scheduler.params.cycle_max_lr"] = "give a number"
    found = {
        path: f"for the program that trains to fill; initialize() refuses it otherwise: {why}"
        for path, why in left.items()
    }
    if context.model_dtype is None:
        found |= {path: f"true if the model's weights are {path[:4]}: set --dtype" for path in _PRECISIONS}
    if context.hidden_size is None:
        found |= {path: f"{words} of the model's hidden size: set --hidden" for path, (words, _) in _SIZES.items()}
    return {path: why for path, why in found.items() if path in autos}


_LATER = "chosen from the machine or the model at run time"
# A rule for one key: (the configuration so far, the context, the default) -> (value, reason).
_Rule = Callable[[Config, ResolveContext, Any], tuple[Any, str]]


def _known(name: str, words: str) -> _Rule:
    def rule(config: Config, context: ResolveContext, default: Any) -> tuple[Any, str]:
        value = getattr(context, name)
        return (default, f"the default, {words} is unknown") if value is None else (value, words)

    return rule


def _from_hidden_size(words: str, formula: Callable[[int], int]) -> _Rule:
    def rule(config: Config, context: ResolveContext, default: Any) -> tuple[Any, str]:
        if context.hidden_size is None:
            return default, "the default, the model's hidden size is unknown"
        return formula(context.hidden_size), f"{words} of the model's hidden size {context.hidden_size}"

    return rule


def _precision(dtype: DtypeName) -> _Rule:
    def rule(config: Config, context: ResolveContext, default: Any) -> tuple[Any, str]:
        return context.model_dtype == dtype, f"the model is {context.model_dtype or 'of unknown type'}"

    return rule


def _peak_lr(config: Config, context: ResolveContext, default: Any) -> tuple[Any, str]:
    if context.optimizer_lr is not None:
        return context.optimizer_lr, "the optimizer's learning rate"
    if config.optimizer is not None and "optimizer.params.lr" in config.provenance.given:
        return config.optimizer.params.lr, "optimizer.params.lr"
    return None, "the optimizer's own rate"


def _by_budget(config: Config, context: ResolveContext, default: Any) -> tuple[Any, str]:
    return "auto", "filled by budget when the plan is made: docs/memory.md"


_PRECISIONS = frozenset({"bf16.enabled", "fp16.enabled"})
# The sizes that the DeepSpeed integration of transformers sets for "auto": path -> (words, elements of a hidden size).
_SIZES: dict[str, tuple[str, Callable[[int], int]]] = {
    "zero_optimization.reduce_bucket_size": ("square", lambda size: size * size),
    "zero_optimization.stage3_prefetch_bucket_size": ("0.9 times the square", lambda size: int(0.9 * size * size)),
    "zero_optimization.stage3_param_persistence_threshold": ("10 times", lambda size: 10 * size),
}
_RULES: dict[str, _Rule] = {
    "zero_optimization.offload_param.device": _by_budget,
    "zero_optimization.offload_optimizer.device": _by_budget,
    "zero_optimization.offload_gradients.device": _by_budget,
    "kernels.liger": lambda *_: ("auto", "on where Liger-Kernel, a CUDA device and a model that it knows are"),
    "bf16.enabled": _precision("bf16"),
    "fp16.enabled": _precision("fp16"),
    "optimizer.params.lr": _known("optimizer_lr", "the optimizer's learning rate"),
    "scheduler.params.warmup_max_lr": _peak_lr,
    "scheduler.params.cycle_max_lr": _peak_lr,
    "scheduler.params.warmup_num_steps": _known("warmup_num_steps", "the program's number of warm-up steps"),
    "scheduler.params.total_num_steps": _known("total_num_steps", "the program's number of steps"),
    **{path: _from_hidden_size(words, formula) for path, (words, formula) in _SIZES.items()},
}


def _settle_defaults(config: Config) -> tuple[Config, dict[str, str]]:
    """Add the default optimizer, set max_in_cpu to 0 unless it was written, give gradients the drive of the states or
    of the parameters, and return the reasons by path.

    Without `conventions.default_optimizer`, or where "optimizer" is null, there is none.
    """
    defaults = config.provenance.conventions.default_optimizer and "optimizer" not in config.provenance.given
    if config.optimizer is None and defaults:
        config = config.model_copy(update={"optimizer": Adam(type="AdamW")})
    chosen = {}
    path, section = "zero_optimization.offload_param.max_in_cpu", config.zero_optimization.offload_param
    if section is not None and path not in config.provenance.given:
        config = replaced(config, path, 0)
        chosen[path] = "default: only a number that is written counts"
    zero, gradients = config.zero_optimization, config.zero_optimization.offload_gradients
    if gradients is not None and gradients.nvme_path is None and gradients.device != "cpu":
        tier = "nvme" if gradients.device == "auto" else gradients.device
        if (folders := zero.folders_of_others(tier)) is not None:
            path = "zero_optimization.offload_gradients.nvme_path"
            config = replaced(config, path, folders)
            chosen[path] = "the path of offload_optimizer or offload_param"
    if config.checkpoint.every_step == "power" and "aio.checksum" not in config.provenance.given:
        config = replaced(config, "aio.checksum", True)
        chosen["aio.checksum"] = 'checkpoint.every_step is "power": a drive without power may lose any block'
    if not config.zero_optimization.sub_group_size:
        config = replaced(config, "zero_optimization.sub_group_size", ZeroOptimization().sub_group_size)
        chosen["zero_optimization.sub_group_size"] = "default: the file has 0"
    return config, chosen


def _settle_axes(config: Config, context: ResolveContext) -> tuple[Config, dict[str, str]]:
    """Give the pipeline and the tensor axis their sizes, whichever of their names says it, and check them; return the
    source by path.

    Raises ConfigError where the ranks cannot be divided so.
    """
    stages, sizes = pipeline_sizes(config), tensor_sizes(config)
    asked = {} if context.stages is None else {"num_stages of the model": context.stages}
    above, pipeline = next(iter((stages or asked).items()), ("parallel.pipeline", 1))
    name, size = next(iter(sizes.items()), ("parallel.tensor", 1))
    why = (
        _indivisible(name, size, context) or _no_pipeline(above, pipeline, size, context)
        or _idle_sequence(config, size, context) or _idle_stages(config, pipeline)
        or _no_sequence(config, pipeline * size, context)
    )  # fmt: skip
    if why:
        raise complaint(config.provenance.origin, [why])
    source = {} if "parallel.tensor" in {name, *sizes} else {"parallel.tensor": f"file: {name}"}
    if "parallel.pipeline" not in {above, *stages}:
        source["parallel.pipeline"] = f"file: {above}" if stages else f"the program: {above}"
    config = replaced(config, "parallel.pipeline", pipeline)
    return replaced(config, "parallel.tensor", size), source


def _indivisible(name: str, size: int, context: ResolveContext) -> str:
    """Return what stands against so many ranks along the tensor axis, with the nearest sizes; "" if nothing does."""
    world, local = context.world_size, context.local_size or context.world_size
    if world % size == 0 and local % size == 0:
        return ""
    fitting = _tensor_sizes_of(context)
    nearest = {max(each for each in fitting if each < size), *[each for each in fitting if each > size][:1]}
    against = (
        _ranks_in_words(context) if world % size
        else f"a node has {local} of the {world} ranks, and a tensor group stays within a node"
    )  # fmt: skip
    return (
        f"{name} is {size} but {against}: the size must divide the ranks of a node: the nearest is "
        f"{' or '.join(map(str, sorted(nearest)))}{_ranks_hint(context)}"
    )


def _ranks_in_words(context: ResolveContext) -> str:
    world = context.world_size
    many = f"{world} rank{'s' if world > 1 else ''} {'are' if world > 1 else 'is'}"
    return f"{many} {'detected' if context.detected else 'assumed'}"


def _ranks_hint(context: ResolveContext) -> str:
    return "" if context.detected else "; say with --ranks N how many there will be"


def _no_pipeline(name: str, size: int, tensor: int, context: ResolveContext) -> str:
    """Return what stands against so many ranks along the pipeline axis, with the nearest sizes; "" if nothing does."""
    left = context.world_size // tensor
    if left % size == 0:
        return ""
    fitting = [each for each in range(1, left + 1) if left % each == 0]
    nearest = {max(each for each in fitting if each < size), *[each for each in fitting if each > size][:1]}
    beside = f", {left} beside parallel.tensor {tensor}" if tensor > 1 else ""
    return (
        f"{name} is {size} but {_ranks_in_words(context)}{beside}: the size must divide them: the nearest is "
        f"{' or '.join(map(str, sorted(nearest)))}{_ranks_hint(context)}"
    )


def _no_sequence(config: Config, others: int, context: ResolveContext) -> str:
    """Return what stands against so many ranks to a sequence; "" if nothing does."""
    size, world = config.sequence_parallel_size, context.world_size
    if size == 1:
        return ""
    if others > 1:
        return (
            f"sequence_parallel_size is {size} beside parallel.tensor or parallel.pipeline: a sequence axis lies along "
            "data-parallel ranks only. Leave one of them out (parallel.sequence divides activations beside a tensor "
            "axis)"
        )
    if world % size == 0:
        return ""
    below = max(each for each in range(1, size) if world % each == 0)
    return (
        f"sequence_parallel_size is {size}, which does not divide the {world} ranks: set it to {below}, or start "
        f"{world + -world % size} ranks"
    )


def _idle_stages(config: Config, pipeline: int) -> str:
    if pipeline > 1:
        return ""
    given = config.provenance.given
    idle = [f"parallel.{key}" for key in ("schedule", "virtual_stages", "stages") if f"parallel.{key}" in given]
    return f"{idle[0]} needs stages, but parallel.pipeline is 1: set parallel.pipeline, or leave it out" if idle else ""


def _idle_sequence(config: Config, tensor: int, context: ResolveContext) -> str:
    if not config.parallel.sequence or tensor > 1:
        return ""
    larger = [size for size in _tensor_sizes_of(context) if size > 1]
    instead = f"set parallel.tensor to {larger[0]}" if larger else "start at least 2 ranks and set parallel.tensor to 2"
    return f"parallel.sequence is true but parallel.tensor is 1: leave sequence out, or {instead}"


def _tensor_sizes_of(context: ResolveContext) -> list[int]:
    """Return the sizes of a tensor axis that these ranks can have."""
    common = math.gcd(context.world_size, context.local_size or context.world_size)
    return [size for size in range(1, common + 1) if common % size == 0]


def _settle_batch(config: Config, context: ResolveContext, data: int) -> tuple[Config, dict[str, str]]:
    given = {
        "train_batch_size": config.train_batch_size,
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
    }
    total, micro, accumulation = given.values()
    if config.provenance.conventions.batch_of == "any" and micro and accumulation:
        # Ranks that train on the same samples count once.
        total = micro * accumulation * data if total == micro * accumulation * context.world_size else total
    try:
        batch = solve_batch(
            total=total, micro=micro, accumulation=accumulation, ranks=data, detected=context.detected,
            divided="" if data == context.world_size else _divided(config, context),
        )  # fmt: skip
    except Unsolvable as error:
        raise complaint(config.provenance.origin, [str(error)]) from None
    sizes = dict(zip(given, (batch.total, batch.micro, batch.accumulation), strict=True))
    kind = "ranks" if data == context.world_size else "data-parallel ranks"
    reason = f"auto: {batch.total} = {batch.micro} a rank x {batch.accumulation} accumulated x {data} {kind}"
    return config.model_copy(update=sizes), {name: reason for name, value in given.items() if value is None}


def _divided(config: Config, context: ResolveContext) -> str:
    axes = {
        "parallel.pipeline": config.parallel.pipeline, "parallel.tensor": config.parallel.tensor,
        "sequence_parallel_size": config.sequence_parallel_size,
    }  # fmt: skip
    return " / ".join([f"{context.world_size} ranks", *(f"{name} {size}" for name, size in axes.items() if size > 1)])


def _ranks(config: Config, context: ResolveContext, data: int) -> list[str]:
    size = config.data_parallel_size
    if size is None or size == data:
        return []
    needed = size * config.parallel.tensor * config.parallel.pipeline * config.sequence_parallel_size
    there = f"{context.world_size} ranks are"
    if data != context.world_size:
        there = f"{data} ({_divided(config, context)}) are"
    if not context.detected:
        return [f"data_parallel_size is {size} but {there} assumed: set --ranks {needed}"]
    return [f"data_parallel_size is {size} but {there} detected: start {needed} ranks, or leave the key out"]


def _tier(section: OffloadParam | OffloadOptimizer | None) -> TierName:
    return "gpu" if section is None or section.device == "none" else section.device


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted path as they stand in a configuration file."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return tree


def changed(config: ResolvedConfig, values: Mapping[str, Any]) -> ResolvedConfig:
    """Return `config` with other values at some dotted paths; a missing offload section is added with its defaults."""
    made = config.sections
    zero = made.zero_optimization
    sections = {
        "offload_param": OffloadParam(), "offload_optimizer": OffloadOptimizer(),
        "offload_gradients": OffloadGradients(),
    }  # fmt: skip
    for name, section in sections.items():
        if getattr(zero, name) is None and any(path.startswith(f"zero_optimization.{name}.") for path in values):
            made = replaced(made, f"zero_optimization.{name}", section)
    for path, value in values.items():
        # As a file may have it: one folder, or a list.
        folder = path.endswith(".nvme_path") and isinstance(value, str)
        made = replaced(made, path, (value,) if folder else value)
    return replace(
        config, sections=made, sources={**config.sources, **dict.fromkeys(values, "file")}, open=frozenset()
    )
