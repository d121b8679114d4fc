"""A model divided over the ranks of a tensor group computes what the undivided one does: its loss and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from infinity.distributed.axis_group import AxisGroup
from infinity.parallel import tensor
from infinity.plan.shards import Replica, Shard
from infinity.plan.tensor_axis import Region, Role, TensorAxis

WORDS, WIDTH, INNER = 64, 32, 48
COMMON = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 3, "use_cache": False,
    "attn_implementation": "eager",
}  # fmt: skip
MODELS = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen3": (transformers.Qwen3Config, {}),
    "phi3": (transformers.Phi3Config, {}),
    "gemma2": (transformers.Gemma2Config, {"sliding_window": 4}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "output_router_logits": True}),
}


def make(kind: str, **more: Any) -> Any:
    config, own = MODELS[kind]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config(**{**COMMON, **own, **more}))
    # Norms and biases that would hide a missing sum if they were ones and zeros.
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.3)
    return model.train()


def axis_of(model: Any, size: int, sequence: bool = False) -> TensorAxis:
    styles = {
        "q_proj": Role.COLWISE, "k_proj": Role.COLWISE, "v_proj": Role.COLWISE, "o_proj": Role.ROWWISE,
        "gate_proj": Role.COLWISE, "up_proj": Role.COLWISE, "down_proj": Role.ROWWISE,
        "qkv_proj": Role.COLWISE_GATHER, "gate_up_proj": Role.COLWISE_GATHER, "lm_head": Role.COLWISE_GATHER,
        "embed_tokens": Role.EMBEDDING, "experts": Role.EXPERTS,
    }  # fmt: skip
    roles, regions, params = {}, [], {}
    phi = any(name.endswith("qkv_proj") for name, _ in model.named_modules())
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name in styles:
            roles[path] = styles[name]
            if phi and roles[path] is Role.ROWWISE:
                roles[path] = Role.ROWWISE_SPLIT
        if name == "experts" or (name == "mlp" and not hasattr(module, "experts")) or name == "self_attn":
            regions.append(Region(path, not phi))
    for name, param in model.named_parameters():
        path, _, own = name.rpartition(".")
        role = roles.get(path)
        whole = (None, Replica.PARTIAL if sequence and ".layers." in name or "_norm." in name else Replica.SAME)
        if name.endswith(
            (".input_layernorm.weight", "post_attention_layernorm.weight", "feedforward_layernorm.weight")
        ):
            whole = (None, Replica.PARTIAL if sequence else Replica.SAME)
        if role is Role.EXPERTS:
            up = own == "gate_up_proj"
            params[name] = Shard(1, (INNER, INNER), size) if up else Shard(2, (INNER,), size), Replica.NONE
        elif role in (Role.COLWISE, Role.COLWISE_GATHER, Role.EMBEDDING):
            params[name] = Shard(0, (len(param),), size), Replica.NONE
        elif role in (Role.ROWWISE, Role.ROWWISE_SPLIT) and own == "weight":
            params[name] = Shard(1, (param.shape[1],), size), Replica.NONE
        else:
            params[name] = whole
    blocks = ("model.layers.0", "model.layers.1") if sequence else None
    return TensorAxis(size, params, roles, tuple(regions), "lm_head", blocks)


def part(whole: Tensor, shard: Shard | None, index: int) -> Tensor:
    if shard is None:
        return whole
    return torch.cat([whole.narrow(shard.dim, begin, end - begin) for begin, end in shard.ranges(index)], shard.dim)


def divide(model: nn.Module, axis: TensorAxis, group: AxisGroup) -> tensor.Applied:
    """What the engine does with parameters, and the forwards."""
    for name, param in model.named_parameters():
        param.data = part(param.data, axis.params[name][0], group.index).clone()
    return tensor.apply(model, axis, group)


def open_group(rank: int, world: int) -> AxisGroup:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=world)
    return AxisGroup("tensor", rank, world, dist.group.WORLD)


def batch(tokens: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(7)
    words = torch.randint(4, WORDS, (2, tokens))
    mask = torch.ones_like(words)
    words[0, :3], mask[0, :3] = 3, 0
    labels = words.masked_fill(mask == 0, -100)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def gradients(model: nn.Module, axis: TensorAxis | None) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        if axis is not None and axis.params[name][1] is Replica.PARTIAL:
            dist.all_reduce(grad)
        found[name] = grad
    return found


def step(kind: str, group: AxisGroup | None, sequence: bool, checkpointing: Any, **more: Any) -> Any:
    model = make(kind, **more)
    axis = None
    if group is not None:
        axis = axis_of(model, group.size, sequence)
        divide(model, axis, group)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    loss = model(**batch()).loss
    loss.backward()
    return float(loss.detach()), gradients(model, axis), axis


def compare(rank: int, world: int, kinds: list[str], sequence: bool) -> dict[str, tuple[float, float, str]]:
    """Relative errors of the loss and of the worst gradient, by case."""
    group = open_group(rank, world)
    found = {}
    for kind in kinds:
        for checkpointing in (None, False, True):
            # The undivided one recomputes, too: reentrant, transformers' recorded router logits have no gradients.
            expected_loss, expected, _ = step(kind, None, False, checkpointing)
            loss, grads, axis = step(kind, group, sequence and kind != "mixtral", checkpointing)
            worst, where = 0.0, ""
            for name, grad in grads.items():
                wanted = part(expected[name], axis.params[name][0], rank)
                assert grad.shape == wanted.shape, name
                error = float((grad - wanted).abs().max() / expected[name].abs().max())
                if error >= worst:
                    worst, where = error, name
            found[f"{kind} {checkpointing}"] = abs(loss / expected_loss - 1), worst, where
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_loss_and_gradients_are_those_of_the_undivided_model(rank_pools, sequence):
    for found in rank_pools[2].run(compare, list(MODELS), sequence):
        assert {name: errors for name, errors in found.items() if errors[0] > 1e-6 or errors[1] > 1e-5} == {}
