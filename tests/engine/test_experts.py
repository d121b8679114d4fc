"""Packed experts a few at a time: the bits of the eager forward of whole ones, and nothing read that nobody chose."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

import infinity
from infinity.engine import Engine
from infinity.plan.types import Kind, Tier
from tests.conftest import RankPools
from tests.support.cells import covered
from tests.support.oracle import join, settings

VOCABULARY = 128
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4,
        "head_dim": 16, "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "gpt_oss": {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
}  # fmt: skip


def build(family: str, **more: Any) -> nn.Module:
    """A small model of a family, eager, with routers that choose."""
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **more})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, param in model.named_parameters():
        if "experts" in name or "router" in name:
            nn.init.normal_(param, std=0.05)
    model.set_experts_implementation("eager")
    return model.train()


def batch(step: int, rank: int = 0, rows: int = 2, tokens: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


def experts_numel(model: nn.Module) -> int:
    """Elements of the packed weights of the last layer."""
    last = [module for module in model.modules() if hasattr(module, "_apply_gate")][-1]
    return sum(param.numel() for param in last.parameters() if param.ndim == 3)


def configuration(
    folder: str | Path, model: nn.Module, *, tiled: bool, together: int = 0, **options: Any
) -> dict[str, Any]:  # fmt: skip
    """A quarter of a layer's experts may be gathered at once, or so many of them are a unit; or, with the same other
    units, a layer's are whole. (How a model is cut decides where autograd adds up gradients of inputs.)
    """
    numel = experts_numel(model)
    bounds = {"stage3_max_live_parameters": numel // 4}
    if together:
        experts = next(param.shape[0] for param in model.parameters() if param.ndim == 3)
        bounds = {"tile_parameters": together * (numel // experts)}
    zero = {**bounds, **({} if tiled else {"tile_parameters": 0}), **options.pop("zero", {})}
    return settings(folder, zero=zero, **{"param": "nvme", "optimizer": "nvme", **options})


def train(engine: Engine, rank: int, steps: int, accumulation: int = 1) -> list[float]:
    losses = []
    for step in range(steps * accumulation):
        loss = engine(**{name: ids.to(engine.device) for name, ids in batch(step, rank).items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def states(engine: Engine) -> dict[str, Tensor]:
    """All masters and first moments. Collective."""
    found = {}
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        found[f"{name} master"] = state.master
        if param.requires_grad:
            found[f"{name} exp_avg"] = state.exp_avg
    return found


def digest(values: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in values.values())).hexdigest()


def run(
    rank: int, world: int, folder: str, family: str, rows: list[dict[str, Any]]
) -> list[tuple[list[float], str]]:  # fmt: skip
    """Losses and digest of each row's run."""
    join(world)
    found = []
    for row in rows:
        checkpointed = row.pop("checkpointed", False)
        model = build(family)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointed == "reentrant"})
        engine, *_ = infinity.initialize(model=model, config=configuration(folder, model, **row))
        with engine:
            routed = [layout for layout in engine.plan.layouts if layout.routed]
            assert bool(routed) is row["tiled"]
            losses = train(engine, rank, 3, row.get("accumulation", 1))
            found.append((losses, digest(states(engine))))
            if row["tiled"] and not checkpointed and not row.get("together"):
                live = experts_numel(model) // 4 * (4 if row["dtype"] == "fp32" else 2)
                assert engine.store.ledger.peak[Tier.GPU, Kind.FULL] <= live
        assert model.config._experts_implementation == "eager"
    return found


@pytest.mark.parametrize(
    *covered(family=list(FAMILIES), dtype=["fp32", "bf16"], accumulation=[1, 2], world=[1, 2], clip=[0.0, 0.05])
)
def test_experts_a_few_at_a_time_have_the_bits_of_whole_ones(
    rank_pools: RankPools, tmp_path: Path, family: str, dtype: str, accumulation: int, world: int, clip: float
) -> None:
    """Also where one rank has no token for an expert, several experts are a unit, or blocks are computed again."""
    common = {"dtype": dtype, "accumulation": accumulation, "clip": clip}
    grads = {"offload_gradients": {"device": "nvme"}}
    rows: list[dict[str, Any]] = [
        {**common, "tiled": False}, {**common, "tiled": True}, {**common, "tiled": True, "zero": grads},
        {**common, "tiled": True, "checkpointed": "plain"},
        {**common, "tiled": True, "checkpointed": "reentrant", "param": "cpu", "optimizer": "cpu"},
    ]  # fmt: skip
    several: list[dict[str, Any]] = [{**common, "tiled": tiled, "together": 3} for tiled in (False, True)]
    for each in (rows, several):
        for found in rank_pools[world].run(run, str(tmp_path), family, each):
            assert len({str(losses) for losses, _ in found}) == len({held for _, held in found}) == 1, found
