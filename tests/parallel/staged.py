"""Tiny transformers models cut into stages, each in a copy of the model where the weights of other stages are NaN."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from infinity.parallel.stage import Boundary, StagedModel
from infinity.parallel.stage_check import record_cut
from infinity.plan.spec import module_tree
from infinity.plan.stages import StageCut, cut_model, find_blocks
from tests.zoo.families import FAMILIES, VOCABULARY

COUNTS = (2, 1, 2)
KINDS = (
    "llama", "llama tied", "qwen3", "gemma2", "gemma3_text", "gpt2", "mixtral", "phi3", "opt", "opt narrow", "bloom",
    "gpt_neox", "deepseek_v3",
)  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 2, "num_key_value_heads": 4,
}  # fmt: skip
_MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {**FAMILIES["llama"].sizes, **_LATENT}),
    # It scales embeddings in place.
    "ctrl": ("ctrl", {**FAMILIES["gpt2"].sizes, "dff": 64}),
    # Its blocks answer with a list.
    "openai-gpt": ("openai-gpt", FAMILIES["gpt2"].sizes),
    # Words of another width than the blocks': a linear layer stands between.
    "opt narrow": ("opt", {**FAMILIES["opt"].sizes, "word_embed_proj_dim": 16}),
}


def make(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A causal language model of five layers in training mode, without dropout; the same at every call."""
    model_type, sizes = _MADE.get(kind) or (FAMILIES[kind].model_type, FAMILIES[kind].sizes)
    layers: dict[str, Any] = {name: sum(COUNTS) for name in ("num_hidden_layers", "n_layer") if name in sizes}
    config = AutoConfig.for_model(model_type, **{**sizes, **layers, **more})
    take_chance_away(config)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train().to(dtype)


def take_chance_away(config: Any) -> None:
    """Set dropout, LayerDrop and the noise of routers to 0 in a model's configuration."""
    for name, value in vars(config).items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def batch(tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Two rows, one of them padded on the left; padding has no label."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, VOCABULARY, (2, tokens), generator=generator)
    mask = torch.ones_like(words)
    words[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def cut(model: nn.Module, counts: Sequence[int] = COUNTS, **inputs: Any) -> tuple[StageCut, Mapping[str, int]]:
    """The model's stages as recorded, and how its blocks answer."""
    root = module_tree(model, compute_dtype="fp32")
    recorded = record_cut(model, find_blocks(root), inputs or batch(8), torch.float32)
    return cut_model(root, recorded.blocks, len(counts), after=recorded.after, counts=counts), recorded.answers


class Stage:
    """One rank's stages of a model, in a copy that lacks what other ranks have."""

    def __init__(self, model: nn.Module, own: Sequence[int], cut: StageCut, answers: Mapping[str, int]) -> None:
        self.model: Any = copy.deepcopy(model)
        self.model.zero_grad()
        self.params = set(_names(model, own, cut))
        for name, param in self.model.named_parameters():
            if name not in self.params:
                param.data.fill_(float("nan"))
        dtype = next(model.parameters()).dtype
        self.staged = StagedModel(self.model, cut, own=own, dtype=dtype, answers=answers)

    def forward(self, stage: int, received: Boundary | None, inputs: Mapping[str, Any]) -> Any:
        return self.staged.forward(stage, received, (), inputs)

    def gradients(self) -> dict[str, Tensor]:
        """Of its own parameters; no other has one."""
        found = {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        assert set(found) <= self.params
        return found


def leaves(boundary: Boundary) -> Boundary:
    """What is received: tensors that begin a graph."""
    return tuple(each.detach().requires_grad_(each.is_floating_point()) for each in boundary)


def _names(model: nn.Module, own: Sequence[int], cut: StageCut) -> Iterator[str]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for tied in names.values():
        if any(stage in own for name in tied for stage in cut.stages_at(name.rpartition(".")[0])):
            yield tied[0]


def run(stages: Sequence[Stage], inputs: Mapping[str, Any]) -> tuple[Any, list[tuple[Boundary | None, Any]]]:
    """All stages' forward, stage s on rank s modulo their number: the output, and what each received and answered."""
    received: Boundary | None = None
    passed: list[tuple[Boundary | None, Any]] = []
    last = len(stages[0].staged._cut.counts) - 1
    for stage in range(last + 1):
        answer = stages[stage % len(stages)].forward(stage, received, inputs)
        passed.append((received, answer))
        received = leaves(answer) if stage < last else None
    return passed[-1][1], passed


def run_back(passed: Sequence[tuple[Boundary | None, Any]], loss: Tensor) -> None:
    """All stages' backward, the last one's first."""
    grads: Boundary | None = None
    for received, answer in reversed(passed):
        torch.autograd.backward(loss if grads is None else answer, grads)
        grads = None if received is None else tuple(each.grad for each in received)


def differences(stages: Sequence[Stage], model: nn.Module) -> list[str]:
    """Parameters whose gradient is not, bit for bit, that of the uncut model, summed over those that have it."""
    found = [stage.gradients() for stage in stages]
    wrong = []
    for name, param in model.named_parameters():
        parts = [grads[name] for grads in found if name in grads]
        if param.grad is None or not parts:
            wrong += [name] if parts or param.grad is not None else []
        elif len(parts) > 1:
            # Tied over stages: a sum in another order.
            error = float((torch.stack(parts).sum(0) - param.grad).abs().max() / param.grad.abs().max())
            limit = 1e-6 if param.dtype is torch.float32 else 2 * torch.finfo(param.dtype).eps
            wrong += [f"{name}: {error}"] if error > limit else []
        elif not torch.equal(parts[0], param.grad):
            wrong.append(name)
    return wrong
