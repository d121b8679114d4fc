"""The zero_optimization section: what is partitioned over the ranks, and on which tier it is kept."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

from infinity.base.tiers import drive_names
from infinity.config.section import (
    Absent,
    Also,
    Count,
    Device,
    Differs,
    Drives,
    Flag,
    Fraction,
    GradDevice,
    Int,
    Natural,
    NoAuto,
    NoEffect,
    Positive,
    Refused,
    Section,
    Stage,
    Texts,
    Unusable,
    read_flag,
)

_BUCKETS = NoEffect("gradients are reduced unit by unit, and the plan cuts the units")
_POOLS = NoEffect("the plan computes the sizes of its pools from the model")
_ALWAYS_PIPELINED = NoEffect("reads and writes always overlap with the computation")
_ONE_GATHER = NoEffect("a unit is gathered by one collective that the plan chooses")
_QUANTIZED = Refused(
    "quantised collectives are not supported", 'Remove the key; "communication_data_type" halves the traffic'
)
_NO_MICS = Refused(
    "sub-groups of ranks are not supported", "Remove the key: partitions go over all data-parallel ranks"
)


class OffloadParam(Section):
    """Home of the parameters between their uses; needs stage 3."""

    device: Annotated[
        Device,
        Differs("stages 1 and 2 refuse it, and with DeepSpeed's conventions say and ignore it, as DeepSpeed does"),
    ] = "none"
    """Home of the parameters: the accelerator ("none"), CPU memory or NVMe. "auto": the fastest tiers that have room by
    the budgets in section memory; NVMe only if a path is given."""
    nvme_path: Annotated[Drives | None, NoAuto("name a folder on the drive")] = None
    """Folder on the drive, or a list of folders on several drives, which share the bytes by their measured bandwidth
    (or by aio.drive_weights); required when the device is nvme, and what "auto" may use."""
    buffer_count: Annotated[Natural, _POOLS] = 5
    """Number of staging buffers."""
    buffer_size: Annotated[Natural, _POOLS] = 10**8
    """Elements in a staging buffer."""
    max_in_cpu: Annotated[Natural, Differs("only a number that is written counts: absent, it is 0")] = 10**9
    """Elements of a rank's parameters kept in CPU memory if the device is nvme: whole units, those nearest the input
    first. Absent: all parameters are on NVMe, as if the default did not exist."""
    pin_memory: Flag = True
    """Page-lock the CPU memory."""


class OffloadOptimizer(Section):
    """Home of the master weights and moments; works at every stage."""

    device: Annotated[
        Device, Differs('"nvme" is NVMe at every stage; DeepSpeed keeps the states in CPU memory at stages 1 and 2')
    ] = "none"
    """Home of the optimizer states: the accelerator ("none"), CPU memory or NVMe. "auto": the fastest tiers that have
    room after the parameters, by the budgets in section memory; NVMe only if a path is given."""
    nvme_path: Annotated[Drives | None, NoAuto("name a folder on the drive")] = None
    """Folder on the drive, or a list of folders on several drives, which share the bytes by their measured bandwidth
    (or by aio.drive_weights); required when the device is nvme, and what "auto" may use."""
    buffer_count: Annotated[Natural, Differs("it counts sub-groups, and is at least five")] = 4
    """Sub-groups whose states are in memory at once if the device is nvme, at least five: one is stepped while four are
    read and written. The states of any further sub-groups stay in memory between steps and are not read or written.
    Where nothing is read ahead (stage3_prefetch_bucket_size = 0, which memory may demand), as few as one."""
    pin_memory: Flag = True
    """Page-lock the CPU memory."""
    pipeline_read: Annotated[Flag, _ALWAYS_PIPELINED] = False
    """Read the next sub-group while this one is stepped."""
    pipeline_write: Annotated[Flag, _ALWAYS_PIPELINED] = False
    """Write the previous sub-group while this one is stepped."""
    fast_init: Annotated[Flag, NoEffect("states are written once, to their home")] = False
    """Initialise quickly on NVMe."""
    ratio: Annotated[Fraction, Differs("it works at every stage")] = 1.0
    """Share of the optimizer states that is kept on the device. The accelerator keeps and steps the rest, which belongs
    to the layers nearest the input."""
    super_offload: Annotated[
        Flag,
        Refused(
            "it is decided for all states at once",
            'Set the top-level "speculative_step" instead',
            ignored='the top-level "speculative_step" decides, with the same result',
        ),
    ] = False
    """Step sub-groups before the norm is known."""
    cpuadam_cores_perc: Annotated[Positive, NoEffect("the number of optimizer threads is chosen from the machine")] = (
        0.8
    )
    """Share of the cores for the optimizer."""


class OffloadGradients(Section):
    """Ours. Home of the gradients between their arrival and the step. Those of states that are kept on the device lie
    there with them."""

    device: GradDevice = "auto"
    """Ours. Home of the gradients: CPU memory or NVMe. "auto": CPU memory; if the plan does not fit it, the gradients
    that the step needs last go to the drive, and no more than must."""
    nvme_path: Annotated[Drives | None, NoAuto("name a folder on the drive")] = None
    """Ours. Folder on the drive, or a list of folders on several drives. Absent: the path of offload_optimizer or
    offload_param."""
    ratio: Fraction = 1.0
    """Ours. Share of the gradients on the drive if the device is nvme; the rest, which the step needs first, is in CPU
    memory."""


_MOE = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModule(Section):
    """Modules that are gathered whole, with all modules that they contain."""

    classes: Texts = _MOE
    """Class names, with or without their module."""
    names: Texts = ()
    """Full names of modules in the model."""
    name_suffixes: Texts = ()
    """Suffixes of such names."""


class ZeroOptimization(Section):
    """What is partitioned over the ranks, and on which tier it is kept. A bare `true` is the older form of stage 1."""

    stage: Annotated[Stage, NoAuto("choose 0, 1, 2 or 3; 3 partitions everything")] = 0
    """What is partitioned: nothing (0), optimizer states (1), also gradients (2), also parameters (3)."""
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    offload_gradients: OffloadGradients | None = None
    cpu_offload: Flag | None = None
    """Older form of offload_optimizer with device cpu."""
    cpu_offload_param: Flag | None = None
    """Older form of offload_param with device cpu."""
    cpu_offload_use_pin_memory: Flag | None = None
    """Older form of pin_memory in both."""
    sub_group_size: Annotated[Natural, Differs("it is an upper bound, at every stage")] = 10**9
    """Upper bound of the elements that the optimizer steps at a time; 0: the default. Where it is below 65,536, there
    are no more than 4,096 sub-groups."""
    stage3_prefetch_bucket_size: Annotated[
        Natural, Differs("it is an upper bound: the plan prefetches whole units"), Also(("prefetch_bucket_size",))
    ] = 50_000_000
    """Upper bound of the elements gathered before their use."""
    stage3_param_persistence_threshold: Annotated[
        Natural, Differs("it counts the elements of a unit, not of a parameter"), Also(("param_persistence_threshold",))
    ] = 100_000
    """Units with fewer elements stay gathered."""
    stage3_model_persistence_threshold: Annotated[Natural, Also(("model_persistence_threshold",))] = sys.maxsize
    """Upper bound of the elements that stay gathered."""
    stage3_max_live_parameters: Annotated[
        Natural, Differs("a weight beyond it is executed in tiles"), Also(("max_live_parameters",))
    ] = 10**9
    """Upper bound of the elements gathered at a time."""
    stage3_max_reuse_distance: Annotated[Natural, Also(("max_reuse_distance",))] = 10**9
    """A unit stays gathered until its next use if fewer elements than this are used in between."""
    tile_parameters: Natural | None = None
    """Ours. Upper bound of the elements of a linear or embedding weight gathered at a time; a larger weight is executed
    in tiles of its rows. 0: never. Absent: a weight of more than stage3_max_live_parameters elements is executed in
    tiles of a quarter of that. Below 65,536 elements, a weight has no more than 256 tiles. Needs stage 3."""
    leaf_module: LeafModule = LeafModule()
    contiguous_gradients: Annotated[Flag, NoEffect("gradients are reduced on arrival, never collected")] = True
    """Copy gradients to one buffer as they are produced."""
    reduce_scatter: Annotated[Flag, NoEffect("partitioned gradients are always reduce-scattered")] = True
    """Reduce-scatter instead of all-reduce."""
    reduce_bucket_size: Annotated[Natural, _BUCKETS] = 5 * 10**8
    """Elements in a reduction bucket."""
    use_multi_rank_bucket_allreduce: Annotated[Flag, _BUCKETS] = True
    """All-reduce a bucket that several ranks own."""
    allgather_partitions: Annotated[Flag, _ONE_GATHER] = True
    """All-gather updated parameters instead of broadcasting them."""
    allgather_bucket_size: Annotated[Natural, _ONE_GATHER] = 5 * 10**8
    """Elements in one all-gather."""
    overlap_comm: Annotated[Flag | None, NoEffect('the top-level "overlap" switches all overlap on or off')] = None
    """Overlap the reduction with backward."""
    round_robin_gradients: Annotated[Flag, NoEffect("the plan balances partitions over the ranks")] = False
    """Spread gradient copies over the ranks."""
    load_from_fp32_weights: Annotated[
        Flag, NoEffect("a checkpoint holds the fp32 weights, and loading always uses them")
    ] = True
    """Start master weights from the checkpoint's fp32 weights."""
    elastic_checkpoint: Annotated[
        Flag,
        Refused(
            "the older elastic format is not supported",
            "Remove the key",
            ignored="every checkpoint loads with any number of ranks",
        ),
    ] = False
    """Older elastic checkpoint format."""
    stage3_gather_16bit_weights_on_model_save: Annotated[
        Flag,
        NoEffect(
            "export() and save_16bit_model() always write whole weights; accelerate and transformers save by it, and "
            "read it from the engine"
        ),
        Also(("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")),
    ] = False
    """Write whole weights in save_16bit_model."""
    stage3_module_granularity_threshold: Annotated[
        Natural, NoEffect("the plan cuts units by their size"), Also(("module_granularity_threshold",))
    ] = 0
    """Modules of finer granularity become leaf modules."""
    stage3_use_all_reduce_for_fetch_params: Annotated[Flag, _ONE_GATHER, Also(("use_all_reduce_for_fetch_params",))] = (
        False
    )
    """Gather by an all-reduce."""
    stage3_allgather_sequential: Annotated[Flag, _ONE_GATHER, Also(("allgather_sequential",))] = False
    """Gather one parameter at a time."""
    ignore_unused_parameters: Annotated[Flag, NoEffect("parameters without a gradient are always allowed")] = True
    """Allow parameters that a step does not use."""
    legacy_stage1: Annotated[Flag, Refused("there is one implementation of stage 1", "Remove the key")] = False
    """Older implementation of stage 1."""
    compute_grad_norm: Annotated[Flag, NoEffect("the norm is computed where clipping or a check needs it")] = True
    """Compute the gradient norm in every step."""
    parameter_alignment: Annotated[Flag, NoEffect("every parameter of a unit starts on a cache line")] = False
    """Align parameters in flat buffers."""
    memory_efficient_linear: Annotated[Flag, NoEffect("torch's own functions are never patched")] = True
    """Patch the linear function."""
    pipeline_loading_checkpoint: Annotated[
        Flag, NoEffect("every rank reads only the bytes of its own partitions, in bounded memory")
    ] = False
    """Load on one rank after the other."""
    override_module_apply: Annotated[Flag, NoEffect("initialisation always works unit by unit")] = True
    """Gather parameters inside Module.apply."""
    log_trace_cache_warnings: Annotated[Flag, NoEffect("a changed order is fetched on demand and recorded")] = False
    """Warn when the order of modules changes."""
    enable_sanity_checks: Annotated[Flag, NoEffect("cheap checks are always on")] = False
    """Extra consistency checks."""
    save_muon_momentum_buffer_in_memory: Annotated[
        Flag, NoEffect("states stay in memory as far as it has room")
    ] = False
    """Keep Muon's momentum in memory."""
    zero_hpz_partition_size: Annotated[
        Count,
        Refused(
            "a secondary, local partition is not supported",
            "Set zero_hpz_partition_size to 1",
            ignored="there is no secondary partition on each node, so gathers go over all ranks, with the same result",
        ),
    ] = 1
    """Ranks of a secondary partition."""
    zero_quantized_weights: Annotated[Flag, _QUANTIZED] = False
    """Quantise weights before a gather."""
    zero_quantized_nontrainable_weights: Annotated[Flag, _QUANTIZED] = False
    """Quantise frozen weights."""
    zero_quantized_gradients: Annotated[Flag, _QUANTIZED] = False
    """Quantise gradients before a reduction."""
    zeropp_loco_param: Annotated[None, _QUANTIZED, Absent(switch=None, keys=("err_beta", "reset_T"))] = None
    """Error feedback of quantised gradients."""
    mics_shard_size: Annotated[Int, _NO_MICS] = -1
    """Ranks in a sub-group of partitions."""
    mics_hierarchical_params_gather: Annotated[Flag, _NO_MICS] = False
    """Gather in two levels."""
    zenflow: Annotated[
        None,
        Refused("delayed updates change the result", "Remove the section; offload_optimizer alone is exact"),
        Absent(
            switch=None,
            keys=(
                "topk_ratio",
                "select_strategy",
                "select_interval",
                "update_interval",
                "overlap_step",
                "offload",
                "auto_ratio",
                "full_warm_up_rounds",
                "pt_reserved_cores_perc",
                "steps_per_epoch",
            ),
        ),
    ] = None
    """Importance-based, delayed updates."""

    @classmethod
    def rewrite(cls, raw: Any) -> Any:
        if isinstance(raw, bool) or (isinstance(raw, str) and raw.lower() in ("true", "false")):
            return {"stage": 1 if read_flag(raw) else 0}
        if not isinstance(raw, Mapping):
            return raw
        current = dict(raw)
        pinned = current.pop("cpu_offload_use_pin_memory", None)
        pin = {} if pinned is None else {"pin_memory": _flag(pinned, "cpu_offload_use_pin_memory")}
        for older, name in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            wanted = current.pop(older, None)
            if wanted is not None and _flag(wanted, older):
                if current.get(name) is not None:
                    raise Unusable(f"{older} and {name} are both given: keep {name}, {older} is its older form")
                current[name] = {"device": "cpu"}
            if isinstance(current.get(name), Mapping):
                current[name] = {**pin, **current[name]}
        if pin and not (current.get("offload_optimizer") or current.get("offload_param")):
            # No section uses the key, so it stays and is reported as idle.
            current["cpu_offload_use_pin_memory"] = pinned
        return current

    @property
    def by_budget(self) -> bool:
        """Whether the plan chooses the home of parameters or optimizer states by budget."""
        sections = (self.offload_param, self.offload_optimizer)
        return any(section is not None and section.device == "auto" for section in sections)

    @property
    def offloads(self) -> list[OffloadParam | OffloadOptimizer | OffloadGradients]:
        """The sections that are there and name homes; of several paths that of the first counts."""
        sections = (self.offload_optimizer, self.offload_param, self.offload_gradients)
        return [section for section in sections if section is not None]

    def folders_of_others(self, tier: str) -> tuple[str, ...] | None:
        """Return the folders that a section names whose bytes do not live on another tier of drives than `tier`."""
        others = drive_names() - {tier}
        found = [each.nvme_path for each in self.offloads if each.device not in others]
        return next(filter(None, found), None)

    def drives(self, section: OffloadParam | OffloadOptimizer | OffloadGradients | None) -> tuple[str, ...] | None:
        """Return the folders that `section` uses, or may use if a home is chosen by budget; None if it uses none."""
        if section is None:
            return None
        by_budget = section.device == "auto" if isinstance(section, OffloadGradients) else self.by_budget
        return section.nvme_path if by_budget or section.device in drive_names() else None


def _flag(value: Any, key: str) -> bool:
    try:
        return read_flag(value)
    except (ValueError, TypeError):
        raise Unusable(f"{key} is {value!r}, expected true or false") from None
