"""Tiny transformers models, divided over the ranks of a tensor group as an engine would, without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from infinity.distributed.axis_group import AxisGroup
from infinity.parallel import tensor
from infinity.plan.shards import Replica, Shard
from infinity.plan.spec import module_tree
from infinity.plan.tensor_axis import TensorAxis, tensor_axis_of

PADDING = 3
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False, "attn_implementation": "eager", "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen3": (transformers.Qwen3Config, {}),
    "phi3": (transformers.Phi3Config, {}),
    "gemma2": (transformers.Gemma2Config, {"sliding_window": 4}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "output_router_logits": True}),
}


def make(kind: str, **more: Any) -> Any:
    config, own = MODELS[kind]
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(config(**{**COMMON, **own, **more}))
    # Norms of ones and biases of zeros would hide a mistake.
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.3)
    return model.train()


def axis_of(model: nn.Module, size: int, *, sequence: bool = False) -> TensorAxis:
    return tensor_axis_of(model, module_tree(model, compute_dtype="fp32"), size=size, sequence=sequence)


def with_sequence(axis: TensorAxis, first: str, last: str) -> TensorAxis:
    """The same with activations cut between two blocks, for models whose sequence `tensor_axis_of` does not cut."""
    among = first.rpartition(".")[0] + "."
    params: Mapping[str, tuple[Shard | None, Replica]] = {
        name: (shard, Replica.PARTIAL if replica is Replica.SAME and name.startswith(among) else replica)
        for name, (shard, replica) in axis.params.items()
    }
    return replace(axis, params=params, blocks=(first, last))


def part(whole: Tensor, shard: Shard | None, index: int) -> Tensor:
    if shard is None:
        return whole
    return torch.cat([whole.narrow(shard.dim, begin, end - begin) for begin, end in shard.ranges(index)], shard.dim)


def divide(model: nn.Module, axis: TensorAxis, group: AxisGroup) -> tensor.Applied:
    """Leave each parameter its shard, and each module the forward for it."""
    for name, param in model.named_parameters():
        param.data = part(param.data, axis.params[name][0], group.index).clone()
    return tensor.apply(model, axis, group)


def batch(tokens: int = 8, vocabulary: int = 64) -> dict[str, Tensor]:
    """Two rows, one of them padded on the left; padding has no label."""
    torch.manual_seed(7)
    words = torch.randint(PADDING + 1, vocabulary, (2, tokens))
    mask = torch.ones_like(words)
    words[0, :3], mask[0, :3] = PADDING, 0
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def gradients(model: nn.Module, axis: TensorAxis | None = None) -> dict[str, Tensor]:
    """By name; partial ones summed over the group of all ranks."""
    found = {}
    for name, param in model.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        if axis is not None and axis.params[name][1] is Replica.PARTIAL:
            dist.all_reduce(grad)
        found[name] = grad
    return found


def worst_error(
    found: dict[str, Tensor], expected: dict[str, Tensor], axis: TensorAxis, index: int
) -> tuple[float, str]:
    """The largest error of a gradient relative to the largest element of the whole one, and whose it is."""
    errors = []
    for name, grad in found.items():
        wanted = part(expected[name], axis.params[name][0], index)
        assert grad.shape == wanted.shape, name
        errors.append((float((grad - wanted).abs().max() / expected[name].abs().max()), name))
    return max(errors)
