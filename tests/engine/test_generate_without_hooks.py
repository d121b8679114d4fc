"""TRL takes DeepSpeed's hooks off while it generates, and puts them back: harmless here, with the right tokens."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity
from infinity.config import DEEPSPEED
from tests.support.oracle import join, settings

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")

ACCELERATOR = SimpleNamespace(
    unwrap_model=lambda model: model.module, state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
)


@contextmanager
def deepspeed_for_trl() -> Iterator[None]:
    """What TRL imports while it gathers."""
    before = sys.modules.get("deepspeed")
    sys.modules["deepspeed"] = SimpleNamespace(zero=infinity.zero)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop("deepspeed")
        if before is not None:
            sys.modules["deepspeed"] = before


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tokens_of(model: Any, rank: int) -> list[list[int]]:
    # Ranks generate as many tokens as they like: nothing is gathered in the block.
    ids = torch.tensor([[5, 6, 7 + rank], [8, 9, 10]])
    return model.generate(ids, max_new_tokens=6 + 2 * rank, do_sample=False).tolist()


def train(rank: int, world: int, folder: str, generating: bool) -> tuple[list[Any], list[Any], list[float]]:
    """(tokens within TRL's block before each step, those of a plain model of the same weights, losses)."""
    join(world)
    inside, outside, losses = [], [], []
    config = settings(folder, param="nvme", optimizer="cpu")
    with infinity.initialize(model=llama(), config=config, conventions=DEEPSPEED)[0] as engine, deepspeed_for_trl():
        offload = engine.optimizer.parameter_offload
        for step in range(3):
            if generating:
                for param in engine.parameters():
                    param.ds_active_sub_modules.add(step)
                utils = importlib.import_module("trl.models.utils")
                with torch.no_grad(), utils.unwrap_model_for_generation(engine, ACCELERATOR) as unwrapped:
                    assert unwrapped is engine.module is offload.module
                    inside.append(tokens_of(unwrapped, rank))
                assert not any(param.ds_active_sub_modules for param in engine.parameters())
                assert offload.forward_hooks == offload.backward_hooks == []
                weights = engine.state_dict()
                plain = llama()
                if rank == 0:
                    plain.load_state_dict(weights)
                    outside.append(tokens_of(plain, rank))
            ids = (torch.arange(16).view(2, 8) * (step + 3)) % 50 + 3 + rank
            loss = engine(input_ids=ids, labels=ids).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            engine.store.check()
    return inside, outside, losses


@pytest.mark.parametrize("world", [1, 2])
def test_tokens_are_right_and_training_goes_on_as_without(rank_pools, tmp_path, world):
    with_it = rank_pools[world].run(train, str(tmp_path / "nvme"), True, timeout=200)
    without = rank_pools[world].run(train, str(tmp_path / "nvme"), False, timeout=200)
    inside, outside, _ = with_it[0]
    assert inside == outside and len({str(tokens) for tokens in inside}) > 1, "the weights have changed in between"
    assert all(len(row) > 3 for tokens in inside for row in tokens)
    assert [losses for *_, losses in with_it] == [losses for *_, losses in without]
