"""What a training process takes beside its plan: forecast before anything is allocated."""

from __future__ import annotations

from torch import nn

from infinity.config import ResolvedConfig
from infinity.config.units import Share
from infinity.memory.tiers.device import Device
from infinity.plan.activation_bytes import OffloadedCheckpoints
from infinity.plan.capacity import Capacity
from infinity.plan.pipeline import make_tables
from infinity.plan.reserve import ANONYMOUS_OVERHEAD_NBYTES, UNKNOWN_ACTIVATION_NBYTES, Reserve
from infinity.plan.spec import dtype_name
from infinity.plan.stage_activations import in_stages
from infinity.plan.stages import PipelinePlace, StageCut
from infinity.plan.tensor_axis import TensorAxis
from infinity.plan.types import Tier
from infinity.zero.activation_forecast import MicroBatch, forecast
from infinity.zero.deferred_init import spool_of


def set_aside(
    config: ResolvedConfig, model: nn.Module, device: Device, checkpointed: tuple[str, ...], free: Capacity, *,
    axis: TensorAxis, place: PipelinePlace | None, taken_nbytes: int, measure: bool,
) -> Reserve:  # fmt: skip
    """Return what this process takes beside its plan.

    checkpointed: paths of the blocks that backward computes again. free: what is free for this rank. axis: the tensor
    axis. place: on the pipeline axis. taken_nbytes: in memory before the engine. measure: activations by a pass on fake
    tensors, where one can be run.
    """
    stated = config.config.memory.activations
    work = MicroBatch(
        config.micro_batch, stated.sequence_length, config.compute_dtype, checkpointed,
        config.config.activation_checkpointing.keep_ops, tensor=axis.size, divides_head=axis.head is not None,
        stages=place.cut.blocks if place is not None else (),
    )  # fmt: skip
    elsewhere = pooled = 0
    if stated.max_bytes is not None:
        limit = stated.max_bytes
        nbytes = limit.of(free.device or 0) if isinstance(limit, Share) else limit
        source = "memory.activations.max_bytes"
    elif (found := forecast(model, work, measure=measure)) is not None:
        found = found if place is None else in_stages(found, place)
        nbytes, pooled, source = found.nbytes, found.pooled_nbytes or 0, found.source
        if not (tier := Tier.named(config.checkpoint_tier)).on_device:
            elsewhere = OffloadedCheckpoints(tier, found.inputs, found.input_nbytes).freed_nbytes
    else:
        nbytes, source = UNKNOWN_ACTIVATION_NBYTES, "not known before a batch; memory.activations.max_bytes says more"
    in_cpu = elsewhere if config.checkpoint_tier == Tier.CPU.value else 0
    spool = spool_of(list(model.parameters()))
    floating = [param.dtype for param in model.parameters() if param.is_floating_point()]
    held_max = spool.held_nbytes_max if spool is not None else None
    if spool is None and all(param.device.type != "cpu" for param in model.parameters()):
        held_max = 0
    return Reserve(
        taken_nbytes=taken_nbytes, overhead_nbytes=ANONYMOUS_OVERHEAD_NBYTES, activation_nbytes=nbytes - elsewhere,
        activations=source, checkpoint_nbytes=in_cpu,
        gaps_nbytes=device.allocator.gaps_nbytes(pooled, free.device or 0),
        model_dtype=dtype_name(floating[0]) if floating else "fp32", model_nbytes_max=held_max,
    )  # fmt: skip


def place_of(cut: StageCut | None, config: ResolvedConfig, index: int) -> PipelinePlace | None:
    """Return the place of a rank on the pipeline axis; None without a cut. ConfigError for an impossible schedule."""
    if cut is None:
        return None
    parallel = config.config.parallel
    tables = make_tables(parallel.schedule, config.pipeline, config.accumulation, parallel.virtual_stages)
    return PipelinePlace(cut, tables, index)


def spooled_nbytes(model: nn.Module) -> int:
    """Return the bytes of values in memory that no parameter shows; they go, too."""
    spool = spool_of(list(model.parameters()))
    return 0 if spool is None else spool.released_nbytes
