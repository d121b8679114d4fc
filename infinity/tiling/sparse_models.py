"""The section `sparse_attention` in models of transformers: their attention goes over blocks, with no dense mask.

It stands around the layers' attention functions ([Note: doors] of `infinity.zero.attention_doors`), within the exchange
of a sequence axis, so that it computes this rank's heads of the whole sequence. In the place of a mask [batch, 1,
tokens, tokens] the model gets one [batch, tokens]: of each token the number of its document, or as bool whether it is
no padding.
The causal order, a window, sinks and a soft cap come with each call of a layer. Layers without a layout go the same
way, and see all that the model's mask leaves.

A call with a cache, as `generate` makes, is the model's own in every way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from infinity.config import ResolvedConfig
from infinity.config.sparse_attention import SparseAttention
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import exchange
from infinity.distributed.groups import ProcessGroups
from infinity.errors import ConfigError
from infinity.log import logger
from infinity.memory.tiers.device import Device
from infinity.plan.block_layouts import block_layout
from infinity.tiling.sparse_attention import sparse_attention
from infinity.zero.attention_doors import (
    all_causal,
    check_options,
    forward_arguments,
    models_of_transformers,
    open_doors,
)
from infinity.zero.hooks import not_compiled

# What attention may be given that is no part of the masks that are known here.
_UNKNOWN = ("position_bias", "head_mask", "block_sequence_ids")
_CACHES = ("past_key_values", "cache")
_WAY_OUT = "leave sparse_attention out"

_outside_graphs = not_compiled("attention over blocks is chosen for each length outside of graphs")


class SparseModel:
    """Has a model's attention go over the blocks of a section's layouts until it is closed; None: does nothing."""

    def __init__(
        self, model: nn.Module, section: SparseAttention | None, seed: int, tensor: AxisGroup, sequence: AxisGroup,
        device: torch.device,
    ) -> None:  # fmt: skip
        """seed: of random blocks, the same on all ranks. tensor, sequence: the axes along which heads are divided.

        ConfigError for a model that it would not reach, or that would compute something else.
        """
        self._undo = ExitStack()
        if section is None:
            return
        self._section, self._seed, self._tensor, self._ranks = section, seed, tensor, tensor.size * sequence.size
        # Of the call under way: whether it has a cache; whether it has made a mask of a window that no layer has named.
        self._cached = self._unnamed = False
        models = models_of_transformers(model)
        if not models:
            raise ConfigError(
                f"sparse_attention is set, and {type(model).__name__} has no model of transformers: call "
                f"infinity.sparse_attention(query, key, value, layout=...) in its attention, and {_WAY_OUT}"
            )
        for each in models:
            self._refuse(each)
        self._undo.enter_context(open_doors(model, self._attend, self._mask))
        for each in models:
            self._undo.callback(each.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            self._undo.callback(each.register_forward_hook(self._end).remove)
        way = "FlexAttention" if device.type == "cuda" else "tiles (FlexAttention has no backward on the CPU)"
        logger.info("sparse_attention: %s in blocks of %d tokens, by %s", section.mode, section.block, way)
        if all_causal(model) and section.mode != "dense" and section.attention == "bidirectional":
            logger.info(
                'sparse_attention.attention is "bidirectional" and %s is causal: it sees the lower half of the layout',
                type(model).__name__,
            )

    @classmethod
    def of(cls, config: ResolvedConfig, model: nn.Module, groups: ProcessGroups, device: Device) -> SparseModel:
        """Return what a configuration asks for; random blocks are drawn by rank 0's seed. Collective."""
        section, seed = config.sections.sparse_attention, 0
        if section is not None and section.num_random_blocks:
            seed = int(exchange([float(torch.initial_seed() % 2**32)], groups.world, "seed of the layouts")[0][0])
        return cls(model, section, seed, groups.tensor, groups.sequence, device.torch)

    def close(self) -> None:
        """Take everything off the model."""
        self._undo.close()

    def _refuse(self, model: Any) -> None:
        """ConfigError for a model of transformers that is not reached."""
        name, layers = type(model).__name__, self._section.layers
        others = [kind for kind in ("vision_config", "audio_config") if hasattr(model.config, kind)]
        why = ""
        if model.config.is_encoder_decoder or others:
            why = "has attention to other inputs than its tokens"
        elif not getattr(model, "_supports_attention_backend", False):
            why = "does not call attention through transformers' interface"
        if why:
            raise ConfigError(f"sparse_attention is set, and {name} {why}: {_WAY_OUT} for this model")
        numbers = (getattr(module, "layer_idx", None) for module in model.modules())
        indices = {number for number in numbers if isinstance(number, int)}
        if layers != "all" and (missing := sorted({*layers} - indices)):
            raise ConfigError(
                f"sparse_attention.layers names layer {missing[0]}, and the layers of {name} that have attention are "
                f"{sorted(indices)}: name some of these, or \"all\""
            )

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = forward_arguments(module, args, kwargs)
        cached = bool(given.get("use_cache")) or any(given.get(name) is not None for name in _CACHES)
        self._cached, self._unnamed = cached and not module.training, False

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._unnamed:
            raise ConfigError(
                f"{type(module).__name__} makes a mask of a sliding window, and its layers do not tell attention how "
                f"long that is: {_WAY_OUT} for this model"
            )

    def _mask(self, make: Callable[[dict[str, Any]], Any], function: str, given: dict[str, Any]) -> Any:
        """[batch, tokens], the document of each token, or as bool whether it is no padding; None where all are of one
        document and none is padding.
        """
        if self._cached:
            return make(given)
        layers = getattr(given.get("config"), "layer_types", None) or ["sliding_attention"]
        self._unnamed |= function == "create_sliding_window_causal_mask" and "sliding_attention" in layers
        padding, positions = given.get("attention_mask"), given.get("position_ids")
        others = [name for name, value in given.items() if value is not None
                  and (name.endswith("_mask_function") or name in (*_UNKNOWN, "encoder_hidden_states"))]  # fmt: skip
        if others or function in ("create_chunked_causal_mask", "create_bidirectional_sliding_window_mask"):
            what = others[0] if others else function
            raise ConfigError(f"the model makes a mask with {what}, which attention over blocks has not: {_WAY_OUT}")
        if isinstance(padding, Tensor) and padding.dim() != 2:
            raise ConfigError(
                f"attention_mask has shape {tuple(padding.shape)}, and attention over blocks takes one of [batch, "
                f"tokens]: give the model that, or {_WAY_OUT}"
            )
        if padding is not None:
            kept = padding.bool()
            return None if bool(kept.all()) else kept
        if positions is None or any(given.get(name) is not None for name in _CACHES):
            return None
        # As transformers tells packed samples: a position that is not one more than that before it begins another.
        documents = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        embeddings = given.get("inputs_embeds", given.get("input_embeds"))
        rows = len(positions) if embeddings is None else len(embeddings)
        return documents.expand(rows, -1) if bool(documents[:, -1].any()) else None

    def _attend(self, core: Callable[..., Any], module: Any, *args: Any, **options: Any) -> Any:
        if self._cached:
            return core(module, *args, **options)
        call = _of_blocks if torch.compiler.is_compiling() else SparseModel.attend
        return call(self, module, *args, **options)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Do what transformers' attention functions do: query [batch, heads, tokens, width], key and value with their
        own heads; returns [batch, tokens, heads, width].
        """
        name, section, tokens = type(module).__name__, self._section, query.shape[2]
        check_options(
            name, options, _UNKNOWN, dropout="which attention over blocks does not",
            others="which attention over blocks has not", way_out=_WAY_OUT,
        )  # fmt: skip
        if key.shape[2] != tokens or (mask is not None and mask.shape != (len(query), tokens)):
            raise ConfigError(
                f"{name} has {tokens} queries, {key.shape[2]} keys and a mask of "
                f"{None if mask is None else tuple(mask.shape)}: attention over blocks is of one sequence with a mask "
                f"of [batch, tokens]; {_WAY_OUT}"
            )
        heads, window = query.shape[1], options.get("sliding_window")
        self._unnamed &= window is None
        layout = None
        if section.layers == "all" or module.layer_idx in section.layers:
            layout = block_layout(section, heads * self._ranks, -(-tokens // section.block), self._seed)
        causal = options.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        padding, documents = (mask, None) if mask is not None and mask.dtype == torch.bool else (None, mask)
        output = sparse_attention(
            query, key, value, layout=layout, causal=causal, scale=options.get("scaling"),
            window=window, padding=padding, documents=documents, sinks=options.get("s_aux"),
            softcap=options.get("softcap"),
            first_head=getattr(module, "first_head", self._tensor.index * heads),
        )  # fmt: skip
        return output.transpose(1, 2), None


_of_blocks = _outside_graphs(SparseModel.attend)
