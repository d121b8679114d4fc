"""The sequence axis: ranks that share each sequence, so that none has more than its part of the activations.

A rank has consecutive tokens of each sample. Everything but attention treats tokens one by one, so the model runs as it
is on its part. In attention one exchange turns (tokens of a part, all heads) into (all tokens, heads of a part), any
attention function computes with these, and one exchange turns its output back: "DeepSpeed Ulysses", arXiv 2309.14509.
Partitions of ZeRO lie along data x sequence ranks, and gradients are averaged over both.

What a rank sends in an attention layer of H query heads, of which N tokens have G key and value heads, over P ranks: q,
k, v and the output, (2 H + 2 G) N / P x (P - 1) / P vectors in forward and as many in backward. Key and value heads
that P does not divide are repeated until it does, and then G counts them so often.

The exchanges stand around a layer's attention function, and the model's masks are made of the positions and the
padding of the whole sequence: see [Note: doors] of `infinity.zero.attention_doors`. In evaluation mode neither does
anything: in evaluation batches are whole.

Batches are cut by `SequenceCutter`: labels are shifted before the cut, positions are those of the whole, and the number
of labels that count is the whole's by the number of ranks, so that the mean over ranks of a model's own loss is the
mean over the sequence.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.consistency import check_same_batch
from infinity.errors import ConfigError, StateError
from infinity.parallel.functions import gather_columns, outside_graphs
from infinity.plan.sequence_axis import WAY_OUT, check_parts, key_heads
from infinity.zero.attention_doors import (
    all_causal,
    check_options,
    forward_arguments,
    models_of_transformers,
    open_doors,
)

# What attention may be given that is of a part, and cannot be made whole here.
_OF_A_PART = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "block_sequence_ids")
# The label that counts for nothing.
_IGNORED = -100

# The axis of each module of a model that has one.
_axes: weakref.WeakKeyDictionary[nn.Module, SequenceAxis] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class ShapesOnly(AxisGroup):
    """Ranks that are not there, for a pass on fake tensors: what they would send has shapes and no values."""


class SequenceAxis:
    """Has a model's attention exchange heads along a group until it is closed; does nothing in a group of one rank."""

    def __init__(self, model: nn.Module, group: AxisGroup) -> None:
        """ConfigError for a model that would compute something else in parts."""
        self.group = group
        # While a model of transformers runs in training: positions and padding of the whole sequence [batch, tokens].
        self.positions: Tensor | None = None
        self.padding: Tensor | None = None
        # The positions of the part that these were made of.
        self._part: Tensor | None = None
        self._exchanges = 0
        self._in_evaluation = False
        self._undo = ExitStack()
        if group.size == 1:
            return
        models = models_of_transformers(model)
        for each in models:
            self._refuse(each)
        for module in model.modules():
            _axes[module] = self
            self._undo.callback(_axes.pop, module, None)
        self._undo.enter_context(open_doors(model, self.attend, self._whole_mask))
        for each in models:
            for handle in (
                each.register_forward_pre_hook(self._begin, with_kwargs=True),
                each.register_forward_hook(self._end, always_call=True),
            ):
                self._undo.callback(handle.remove)
        for handle in (model.register_forward_pre_hook(self._begin_root), model.register_forward_hook(self._end_root)):
            self._undo.callback(handle.remove)

    def __deepcopy__(self, memo: Any) -> SequenceAxis:
        # The hooks on a copy of the model are its own.
        return self

    def close(self) -> None:
        """Take everything off the model."""
        self._undo.close()

    def divides(self, module: nn.Module) -> bool:
        """Return whether a module of the model is given parts in the mode that it is in."""
        return module.training or self._in_evaluation

    def divide_in_evaluation(self, whether: bool) -> None:
        """Take batches for parts in evaluation mode, too, or for whole ones, which is how an axis begins."""
        self._in_evaluation = whether

    def _refuse(self, model: Any) -> None:
        """ConfigError for a model of transformers that cannot run in parts."""
        name, config, size = type(model).__name__, model.config.get_text_config(), self.group.size
        others = [kind for kind in ("vision_config", "audio_config") if hasattr(model.config, kind)]
        why = ""
        if model.config.is_encoder_decoder or others:
            why = "has inputs beside one sequence of tokens"
        elif getattr(model, "_is_stateful", False):
            why = "has layers that pass a state from token to token"
        elif not getattr(model, "_supports_attention_backend", False):
            why = "does not call attention through transformers' interface"
        if why:
            raise ConfigError(f"sequence_parallel_size is {size}, and {name} {why}: {WAY_OUT} for this model")
        heads = getattr(config, "num_attention_heads", None)
        check_parts(name, {**config.to_dict(), "num_attention_heads": heads}, size)

    def _begin_root(self, module: nn.Module, args: Any) -> None:
        self._exchanges = 0

    def _end_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.divides(module) and not self._exchanges:
            raise StateError(
                f"the forward of {type(module).__name__} has exchanged no heads along the sequence axis, so its tokens "
                "saw those of their own part only: call infinity.sequence_attention(self, attention, query, key, "
                f"value) in its attention, or {WAY_OUT}"
            )

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.divides(module):
            return
        given = forward_arguments(module, args, kwargs)
        positions, padding = given.get("position_ids"), given.get("attention_mask")
        if positions is None and self.positions is None:
            raise ConfigError(
                f"{type(module).__name__} was called without position_ids on one of {self.group.size} ranks that share "
                "a sequence, and would take its part for the beginning: iterate over engine.sequence_batches(loader), "
                "or give position_ids of the whole sequence, cut as input_ids are"
            )
        if positions is None or positions is self._part:
            # The inner model of one that has begun.
            return
        for name, value in (("position_ids", positions), ("attention_mask", padding)):
            if value is not None and (not isinstance(value, Tensor) or value.dim() != 2):
                raise ConfigError(f"{name} must be of shape [batch, tokens] along a sequence axis, as it is cut there")
        self._part = positions
        self.positions = self._gather(positions, "positions")
        self.padding = None if padding is None else self._gather(padding, "padding")

    def _gather(self, tensor: Tensor, name: str) -> Tensor:
        """The columns of all ranks; of ranks that are not there, those that would follow this rank's."""
        if isinstance(self.group, ShapesOnly):
            parts = [tensor + index * tensor.shape[1] * (name == "positions") for index in range(self.group.size)]
            return torch.cat(parts, 1)
        return gather_columns(tensor, self.group, name)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        # The inner ones end before the outer, which makes no masks any more.
        self.positions = self.padding = self._part = None

    @outside_graphs
    def attend(
        self, core: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """What transformers' attention function `core` does, for this rank's heads of the whole sequence.

        query: [batch, heads, tokens / size, width]; key and value with their own heads. Returns [batch, tokens / size,
        heads, width].
        """
        if not self.divides(module):
            return core(module, query, key, value, mask, **options)
        name, size = type(module).__name__, self.group.size
        check_options(
            name, options, _OF_A_PART, others="of this rank's part only", way_out=WAY_OUT,
            dropout="and along a sequence axis ranks would draw other elements than one rank",
        )  # fmt: skip
        tokens = size * query.shape[2]
        if mask is not None and mask.dim() == 4 and mask.shape[1:] != (1, tokens, tokens):
            raise ConfigError(
                f"{name} gives attention a mask of shape {tuple(mask.shape)} where the whole sequence has {tokens} "
                f"tokens: give the model position_ids and a mask of shape [batch, tokens], or {WAY_OUT}"
            )
        if isinstance(positions := options.get("position_ids"), Tensor):
            options["position_ids"] = self._gather(positions, "positions")
        query, key, value = self.exchanged(name, query, key, value)
        own = slice(query.shape[1] * self.group.index, query.shape[1] * (self.group.index + 1))
        if isinstance(sinks := options.get("s_aux"), Tensor):
            options["s_aux"] = sinks[own]
        output, *_ = core(_LocalHeads(module, own, query.shape[1] // key.shape[1]), query, key, value, mask, **options)
        (output,) = _Exchange.apply(self.group, f"output of {name}", False, output.transpose(1, 2))
        return output.transpose(1, 2), None

    def exchanged(self, name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, heads / size, tokens, width] of each, from [batch, heads, tokens / size, width]."""
        self._exchanges += 1
        heads, size = query.shape[1], self.group.size
        if heads % size:
            raise ConfigError(f"{name}: {size} ranks of a sequence do not divide {heads} attention heads: {WAY_OUT}")
        copies = key_heads(key.shape[1], size) // key.shape[1]
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        query, key, value = _Exchange.apply(self.group, f"heads of {name}", True, query, key, value)
        return query, key, value

    def _whole_mask(self, make: Callable[[dict[str, Any]], Any], function: str, given: dict[str, Any]) -> Any:
        """What a function of `transformers.masking_utils` makes, for the whole sequence while a part of one runs."""
        if self.positions is None:
            return make(given)
        whole = {"position_ids": self.positions, "attention_mask": self.padding}
        for name, value in given.items():
            if name in ("inputs_embeds", "input_embeds"):
                # Its shape, dtype and device count.
                given[name] = value.detach()[:, :1].expand(-1, self.positions.shape[1], -1)
            elif name == "cache_position":
                given[name] = torch.arange(self.positions.shape[1], device=self.positions.device)
            elif name in whole:
                given[name] = whole[name] if value is not None else None
            elif isinstance(value, Tensor) or (name.endswith("_mask_function") and value is not None):
                raise ConfigError(
                    f"the model makes a mask with {name}, of this rank's part of the sequence only: {WAY_OUT}"
                )
        return make(given)


def axis_of(model: nn.Module) -> SequenceAxis | None:
    """Return the axis of a model whose tokens ranks share, until it is closed."""
    return _axes.get(model)


def sequence_attention(
    module: nn.Module, attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """Return `attention(query, key, value, **options)`, along a sequence axis for the whole sequence.

    For attention of a program's own; models of transformers need no such call. module: the layer that calls it, part of
    the model of an engine; without a sequence axis, or in evaluation mode, `attention` is called as it is.
    query, key, value: [batch, heads, tokens, width], as torch's `scaled_dot_product_attention` takes them; `attention`
    gets a part of the heads of all tokens, so that a mask in `options` is that of the whole sequence. Returns what it
    returns, [batch, heads, tokens, width].

    ConfigError for heads that the ranks do not divide.
    """
    axis = _axes.get(module)
    if axis is None or not axis.divides(module):
        return attention(query, key, value, **options)
    name = type(module).__name__
    output = attention(*axis.exchanged(name, query, key, value), **options)
    (output,) = _Exchange.apply(axis.group, f"output of {name}", False, output)
    return output


class _LocalHeads:
    """An attention layer as its function sees it: with this rank's heads."""

    def __init__(self, module: Any, own: slice, groups: int) -> None:
        self._module, self._own, self._groups = module, own, groups
        self.first_head = own.start

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name == "num_key_value_groups":
            return self._groups
        return value[self._own] if name == "sinks" else value


class _Exchange(torch.autograd.Function):
    """Tensors of heads of all tokens from tokens of all heads, or the other way; backward goes the opposite way."""

    @staticmethod
    def forward(ctx: Any, group: AxisGroup, name: str, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.what, ctx.to_heads = group, name, to_heads
        return _exchange(tensors, group, name, to_heads=to_heads)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        name = f"gradients of {ctx.what}"
        return None, None, None, *_exchange(grads, ctx.group, name, to_heads=not ctx.to_heads)


def _exchange(tensors: Sequence[Tensor], group: AxisGroup, name: str, *, to_heads: bool) -> tuple[Tensor, ...]:
    """All `tensors` in one exchange: [batch, heads, tokens / size, width] to [batch, heads / size, tokens, width], or
    back.
    """
    size, parts = group.size, []
    for tensor in tensors:
        batch, heads, tokens, width = tensor.shape
        # By the rank that each goes to.
        if to_heads:
            parts.append(tensor.reshape(batch, size, heads // size, tokens, width).transpose(0, 1))
        else:
            parts.append(tensor.reshape(batch, heads, size, tokens // size, width).permute(2, 0, 1, 3, 4))
    sent = torch.cat([part.reshape(size, -1) for part in parts], 1)
    rows = torch.empty_like(sent)
    if not isinstance(group, ShapesOnly):
        collectives.all_to_all(rows, sent, group, name).wait()
    found = []
    for part, row in zip(parts, rows.split([part[0].numel() for part in parts], 1), strict=True):
        # By the rank that each has come from.
        _, batch, heads, tokens, width = part.shape
        arrived = row.to(part.dtype).reshape(part.shape)
        if to_heads:
            found.append(arrived.permute(1, 2, 0, 3, 4).reshape(batch, heads, size * tokens, width))
        else:
            found.append(arrived.transpose(0, 1).reshape(batch, size * heads, tokens, width))
    return tuple(found)


def leading_of(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tensor of a batch whose first two sizes, [batch, tokens], are those of what is cut; None without."""
    leading = tensors.get("input_ids", tensors.get("inputs_embeds"))
    return None if leading is None or leading.dim() < 2 else leading


def next_labels(labels: Tensor) -> Tensor:
    """Return the next token's label at each token, [batch, tokens]; the last one's counts for nothing."""
    return nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]


class SequenceCutter:
    """Cuts batches into the parts of the ranks that share a sequence."""

    def __init__(self, model: nn.Module, group: AxisGroup) -> None:
        self._group = group
        config = getattr(model, "config", None)
        pad = getattr(config, "pad_token_id", None)
        # By name of a batch's tensor, what fills it up to a length that the ranks divide.
        self._fill = {"labels": _IGNORED, "shift_labels": _IGNORED}
        self._fill["input_ids"] = pad if isinstance(pad, int) and pad >= 0 else 0
        # Tokens that are added behind a causal sequence are seen by none before them.
        self._causal = all_causal(model)
        self._loss = getattr(model, "loss_type", None)

    def cut(self, batch: Any) -> dict[str, Any]:
        """Return this rank's part of a batch, which must be the same on all ranks of the group. Collective.

        batch: a mapping with "input_ids" or "inputs_embeds" [batch, tokens, ...]. Tensors whose first two sizes are
        those are cut along their tokens, filled up to a multiple of the group's size before; others stay. With labels
        [batch, tokens] the part has "shift_labels", of the next token each, and "num_items_in_batch", the whole's
        number of those that count by the number of ranks: with these a model of transformers computes a loss whose mean
        over the ranks is the whole sequence's. Without "position_ids" they are counted from 0.
        """
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        leading = leading_of(tensors)
        if leading is None:
            raise ConfigError(
                "a batch that is cut along a sequence axis needs input_ids (or inputs_embeds) of shape [batch, tokens, "
                f"...], and this one has {', '.join(batch) or 'nothing'}"
            )
        group, (rows, tokens) = self._group, leading.shape[:2]
        if group.size > 1:
            check_same_batch((), tensors, group)
        found = {**batch}
        if "labels" in tensors or "shift_labels" in tensors:
            if self._loss not in (None, "ForCausalLM", "ForCausalLMLoss"):
                raise ConfigError(
                    "a batch with labels is cut for the loss of causal language models, and this model's is "
                    f"{self._loss}: compute the loss in the program, and leave labels out of the batch"
                )
            if "shift_labels" not in tensors:
                found["shift_labels"] = next_labels(tensors["labels"])
            counted = batch.get("num_items_in_batch")
            if counted is None:
                counted = (found["shift_labels"] != _IGNORED).sum().clamp(min=1)
            found["num_items_in_batch"] = counted / group.size
        if "position_ids" not in batch:
            found["position_ids"] = torch.arange(tokens, device=leading.device).expand(rows, -1)
        more = -tokens % group.size
        if more and not self._causal and "attention_mask" not in batch:
            found["attention_mask"] = torch.ones(rows, tokens, dtype=torch.long, device=leading.device)
        length = (tokens + more) // group.size
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.shape[:2] != (rows, tokens):
                continue
            if more and name == "position_ids":
                behind = value[:, -1:] + torch.arange(1, more + 1, device=value.device)
                value = torch.cat([value, behind], 1)
            elif more:
                filled = value.new_full((rows, more, *value.shape[2:]), self._fill.get(name, 0))
                value = torch.cat([value, filled], 1)
            found[name] = value[:, group.index * length : (group.index + 1) * length].contiguous()
        return found
