"""Where the pipeline axis cuts a model, decided and proven before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from infinity.config import ResolvedConfig
from infinity.errors import ConfigError
from infinity.log import logger
from infinity.memory.partition import DTYPES
from infinity.parallel.module import PipelineModule
from infinity.parallel.stage_check import INSTEAD, record_cut
from infinity.plan.spec import ModuleNode
from infinity.plan.stages import StageCut, cut_model, find_blocks

# Tokens of the sequence with which a cut is proven.
_TOKENS = 8


def cut_into_stages(
    model: nn.Module, config: ResolvedConfig, node: ModuleNode, classes: tuple[str, ...]
) -> StageCut | None:  # fmt: skip
    """Return which blocks each stage runs; None where the pipeline axis has one rank.

    node: the tree of what a tensor axis leaves of the model. classes: those that the model calls its blocks.
    ConfigError for a model that cannot be cut so, which a pass on fake tensors shows before anything is allocated.
    """
    if isinstance(model, PipelineModule) and model.num_stages not in (None, config.pipeline):
        raise ConfigError(
            f"PipelineModule(num_stages={model.num_stages}) and parallel.pipeline {config.pipeline} differ: set "
            f"parallel.pipeline (or pipeline.stages) to {model.num_stages}, or leave num_stages out"
        )
    if config.pipeline == 1:
        return None
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} has an encoder and a decoder and is no causal language model: the blocks of its "
            "decoder take what the encoder has computed beside their first argument, and nothing else crosses a "
            f"boundary of stages: {INSTEAD}"
        )
    parallel = config.config.parallel
    stages, counts = config.pipeline * parallel.virtual_stages, parallel.stages or None
    if isinstance(model, PipelineModule):
        return cut_model(node, model.blocks, stages, counts=counts or model.stage_counts(stages))
    blocks = find_blocks(node, classes)
    cut = cut_model(node, blocks, stages, counts=counts)
    found = record_cut(model, blocks, _sample(model), DTYPES[config.compute_dtype], stages=counts)
    if found.unproven:
        logger.warning(
            "the cut into stages that parallel.stages asks for is not proven, because the model does not run on shapes "
            "alone (%s): what crosses a boundary beside the first argument of a block would be lost",
            found.unproven,
        )
    cut = cut_model(node, blocks, stages, after=found.after, counts=counts)
    return replace(cut, answers=tuple(sorted(found.answers.items())))


def _sample(model: nn.Module) -> Mapping[str, Tensor]:
    """A short micro-batch of a language model, of shapes alone."""
    if not isinstance(getattr(getattr(model, "config", None), "vocab_size", None), int):
        return {}
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="cpu")
    return {"input_ids": tokens, "labels": tokens}
