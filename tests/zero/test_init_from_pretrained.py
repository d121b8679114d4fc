"""transformers loads, extends and adapts a model at stage 3 as under DeepSpeed: values are those without it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import infinity
from infinity.zero import deferred_init
from infinity.zero.parameter import is_released
from tests.conftest import RankPools
from tests.init_from_pretrained import FORMATS, save
from tests.support.hub import lora
from tests.support.zero3_names import transformers_at_stage_3

SIZE = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 400, "n_positions": 32}
TOKENS = torch.arange(8)[None]


def config(folder: str, tier: str) -> dict[str, Any]:
    home = {"device": tier, "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": home, "offload_optimizer": home},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


def steps(folder: Path) -> list[nn.Module]:
    """What a program does between loading and training, in turn: the same code with and without the engine."""
    found: list[nn.Module] = [
        GPT2LMHeadModel.from_pretrained(folder / name.replace(" ", "-")) for name in FORMATS
    ]  # fmt: skip
    torch.manual_seed(3)
    found.append(_without_some(folder))
    found.append(BertForMaskedLM.from_pretrained(folder / "bert"))
    torch.manual_seed(4)
    resized = GPT2LMHeadModel.from_pretrained(folder / "safetensors")
    resized.resize_token_embeddings(410, mean_resizing=False)
    resized.tie_weights()
    found.append(resized)
    torch.manual_seed(5)
    base = GPT2LMHeadModel.from_pretrained(folder / "safetensors")
    found.append(lora(base, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True))
    torch.manual_seed(6)
    found.append(GPT2LMHeadModel._from_config(base.config))
    return found


def _without_some(folder: Path) -> nn.Module:
    """A model of more layers than the files have: what they lack is initialized."""
    larger = GPT2Config.from_pretrained(folder / "safetensors", n_layer=3)
    return GPT2LMHeadModel.from_pretrained(folder / "safetensors", config=larger)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def load(rank: int, world_size: int, path: str, folder: str, tier: str) -> list[dict[str, Tensor]]:
    deferred_init.WINDOW_NBYTES = 100_000
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"
    given, found = config(folder, tier), []
    with transformers_at_stage_3(given):
        models = steps(Path(path))
        assert is_released(models[0].transformer.wte.weight) or (world_size == 1 and tier == "cpu")
        for model in models:
            with infinity.read(model):
                found.append(values(model))
    # The one with adapters trains as the others do.
    for model in (models[0], models[-2]):
        engine, *_ = infinity.initialize(model=model.train(), config=given)
        with engine:
            engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
            engine.step()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    save(found, SIZE)
    torch.manual_seed(1)
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=400, **shape)).save_pretrained(found / "bert")
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "tier"), [(1, "nvme"), (2, "nvme"), (2, "cpu")])
def test_values_are_those_without_the_engine(
    ranks: int, tier: str, folder: Path, tmp_path: Path, rank_pools: RankPools
) -> None:
    plain = [values(model) for model in steps(folder)]
    for found in rank_pools[ranks].run(load, str(folder), str(tmp_path), tier):
        # transformers draws other numbers for a model without files where constructors draw none.
        made, expected = found.pop(), plain[-1]
        assert made.keys() == expected.keys()
        for name, value in expected.items():
            assert abs(made[name].std(correction=0) - value.std(correction=0)) < 0.002, name
            assert abs(made[name].mean() - value.mean()) < 0.002, name
        for number, (ours, theirs) in enumerate(zip(found, plain[:-1], strict=True)):
            differing = [name for name, value in theirs.items() if not torch.equal(ours[name], value)]
            assert (number, ours.keys(), differing) == (number, theirs.keys(), [])
