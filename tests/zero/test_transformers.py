"""Unmodified transformers models, 2 ranks, everything on NVMe, against plain torch in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, PretrainedConfig

import infinity
from tests.support.spawn import RankPool

VOCABULARY = 128
STEPS = 3
RANKS = 2


def config_of(name: str) -> PretrainedConfig:
    """A tiny configuration of each class; dropout off, so that one process can say what two ranks must give."""
    tiny = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=64, **off, **tiny)
    shape = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    if name == "llama":
        return LlamaConfig(**shape, **tiny)
    return MixtralConfig(**shape, **tiny, num_local_experts=4, num_experts_per_tok=1)


def build(name: str, reentrant: bool | None) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name))
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model.train()


def batch(step: int, rank: int, *, narrow: bool) -> Tensor:
    """Token ids [2, 16]. `narrow` repeats one token, so that a rank's tokens all go to the same expert."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(3, VOCABULARY, (2, 16), generator=generator)
    return tokens[:1, :1].expand(2, 16).contiguous() if narrow and rank == 0 else tokens


def expert_loads(model: Any, tokens: Tensor) -> list[list[int]]:
    """Tokens that each expert of each layer gets."""
    logits = model(input_ids=tokens, output_router_logits=True).router_logits
    return [torch.bincount(layer.argmax(-1), minlength=4).tolist() for layer in logits]


def reference(name: str, *, narrow: bool) -> tuple[list[Tensor], float]:
    """Plain torch: one process that sees every rank's batch."""
    model = build(name, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.01)
    norm = 0.0
    for step in range(STEPS):
        for rank in range(RANKS):
            tokens = batch(step, rank, narrow=narrow)
            (model(input_ids=tokens, labels=tokens).loss / RANKS).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()], norm


def train(rank: int, world_size: int, name: str, reentrant: bool | None, narrow: bool, nvme: str) -> dict[str, Any]:
    drive = {"device": "nvme", "nvme_path": nvme}
    model = build(name, reentrant)
    engine, *_ = infinity.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 3, "offload_param": drive, "offload_optimizer": drive,
                "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 40_000,
            },
        },
    )  # fmt: skip
    with engine:
        loads = []
        for step in range(STEPS):
            tokens = batch(step, rank, narrow=narrow)
            if name == "mixtral":
                with torch.no_grad():
                    loads.append(expert_loads(engine, tokens))
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            engine.store.check()
        assert all(param.grad is None for param in model.parameters())
        peak = engine.memory().peak["gpu"]["full"]
        return {
            "masters": [infinity.state(param).master for param in model.parameters()],
            "norm": engine.get_global_grad_norm(),
            "peak": peak,
            "whole": sum(layout.nbytes for layout in engine.plan.layouts),
            "loads": loads,
        }


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(RANKS) as ranks:
        yield ranks


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["kept", "reentrant", "recomputed"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_model_from_the_hub_trains_as_it_is(
    name: str, reentrant: bool | None, pool: RankPool, tmp_path: Path
) -> None:
    results = pool.run(train, name, reentrant, False, str(tmp_path))
    masters, norm = reference(name, narrow=False)
    for result in results:
        worst = max(float((a - b).abs().max()) for a, b in zip(result["masters"], masters, strict=True))
        assert worst <= 1e-6
        assert abs(result["norm"] / norm - 1) <= 1e-5
        # Units come and go: never the whole model at once.
        assert 0 < result["peak"] < result["whole"]


def test_an_expert_without_tokens_on_one_rank_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(train, "mixtral", None, True, str(tmp_path))
    starving = [min(layer) == 0 for step in results[0]["loads"] for layer in step]
    assert any(starving), "the batch was meant to leave an expert without a token"
    masters, _ = reference("mixtral", narrow=True)
    worst = max(float((a - b).abs().max()) for a, b in zip(results[0]["masters"], masters, strict=True))
    assert worst <= 1e-6
