"""What a training process takes beside its plan: forecast before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from infinity.config import ResolvedConfig
from infinity.config.units import Share
from infinity.memory.tiers.device import Device
from infinity.plan.activation_bytes import Activations, OffloadedCheckpoints
from infinity.plan.capacity import Capacity
from infinity.plan.pipeline import make_tables
from infinity.plan.reserve import ANONYMOUS_OVERHEAD_NBYTES, Reserve
from infinity.plan.spec import dtype_name
from infinity.plan.stages import PipelinePlace, StageCut
from infinity.plan.types import Tier
from infinity.zero.deferred_init import spool_of


def set_aside(
    config: ResolvedConfig, model: nn.Module, device: Device, free: Capacity, *, taken_nbytes: int,
    found: Activations | None = None, unknown_nbytes: int = 0,
) -> Reserve:  # fmt: skip
    """Return what this process takes beside its plan.

    free: what is free for this rank. taken_nbytes: in memory before the engine. found: a micro-batch's activations,
    where one is known. unknown_nbytes: to set aside for them where none is, and the configuration says nothing.
    """
    stated = config.config.memory.activations.max_bytes
    spool = spool_of(list(model.parameters()))
    floating = [param.dtype for param in model.parameters() if param.is_floating_point()]
    held_max = spool.held_nbytes_max if spool is not None else None
    if spool is None and all(param.device.type != "cpu" for param in model.parameters()):
        held_max = 0
    reserve = Reserve(
        taken_nbytes=taken_nbytes, overhead_nbytes=ANONYMOUS_OVERHEAD_NBYTES, activation_nbytes=unknown_nbytes,
        product_nbytes=0 if device.is_accelerator else _product_nbytes(model, config.compute_dtype),
        gaps_nbytes=int(device.allocator.free_gaps * (free.device or 0)),
        model_dtype=dtype_name(floating[0]) if floating else "fp32", model_nbytes_max=held_max,
    )  # fmt: skip
    if stated is not None:
        nbytes = stated.of(free.device or 0) if isinstance(stated, Share) else stated
        return replace(reserve, activation_nbytes=nbytes, activations="memory.activations.max_bytes")
    return reserve if found is None else with_activations(reserve, found, config, device, free)


def with_activations(
    reserve: Reserve, found: Activations, config: ResolvedConfig, device: Device, free: Capacity
) -> Reserve:  # fmt: skip
    """The same with a micro-batch's activations, which checkpoints on another tier leave."""
    elsewhere, tier = 0, Tier.named(config.checkpoint_tier)
    if not tier.on_device:
        elsewhere = OffloadedCheckpoints(tier, found.inputs, found.input_nbytes).freed_nbytes
    return replace(
        reserve, activation_nbytes=found.nbytes - elsewhere, activations=found.source,
        checkpoint_nbytes=elsewhere if tier is Tier.CPU else 0,
        gaps_nbytes=reserve.gaps_nbytes if device.own_memory else found.gaps_nbytes,
    )  # fmt: skip


def _product_nbytes(model: nn.Module, dtype: str) -> int:
    """What the largest gradient of a weight takes beside itself on a CPU without instructions for its 16 bits: there
    torch has the whole product in fp32 first.
    """
    has = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}.get(dtype)
    if has is None or getattr(torch.ops.mkldnn, has)():
        return 0
    weights = (
        param for module in model.modules() if not isinstance(module, nn.Embedding)
        for param in module.parameters(recurse=False) if param.requires_grad and param.ndim > 1
    )  # fmt: skip
    # Of the experts that lie in one tensor, one at a time.
    shapes = (weight.shape[-2:] if weight.ndim == 3 else weight.shape for weight in weights)
    return max((4 * math.prod(shape) for shape in shapes), default=0)


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
