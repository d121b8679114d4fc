"""What the tests of exports run on ranks: a tiny model is trained a step, exported and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from tests.support.hub import hf_model, lora
from tests.support.models import TinyLlama

HYPER = {"lr": 1e-2, "eps": 1e-4}


def config(folder: str, dtype: str, stage: int = 3, tier: str = "nvme") -> dict[str, Any]:
    """Everything on NVMe, or on another tier."""
    drive = {"device": tier, **({"nvme_path": folder} if tier == "nvme" else {})}
    offload = {"offload_optimizer": drive, **({"offload_param": drive} if stage == 3 else {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "zero_optimization": {
            "stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 6000,
            **({} if tier == "none" else offload),
        },
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }  # fmt: skip


def tokens(rank: int) -> Tensor:
    return torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(rank))


def with_lora(model: Any) -> Any:
    torch.manual_seed(3)
    return lora(model, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def train_and_export(rank: int, world_size: int, name: str, dtype: str, folder: str) -> Tensor:
    """Logits of the engine's forward for rank 0's tokens; FOLDER/live, FOLDER/fp32 and FOLDER/saved are written."""
    settings = config(f"{folder}/drive", dtype)
    model = hf_model("llama" if name == "lora" else name)
    model.config._name_or_path = f"{folder}/base"
    engine, *_ = infinity.initialize(model=with_lora(model) if name == "lora" else model, config=settings)
    with engine:
        engine.backward(engine(input_ids=tokens(rank), labels=tokens(rank)).loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            logits = engine(input_ids=tokens(0)).logits
        assert engine.export(f"{folder}/live", dtype=dtype, max_shard_size="40KB") == Path(folder, "live")
        engine.export(f"{folder}/fp32", dtype="fp32", one_file=True)
        engine.save_checkpoint(f"{folder}/saved", exclude_frozen_parameters=name == "lora")
        return logits


class Zoo(nn.Module):
    """A tied language model beside a frozen layer, buffers that are kept and not, and nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyLlama(tied=True)
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.register_buffer("counts", torch.arange(5))
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids, labels) * self.scale


def zoo() -> Zoo:
    torch.manual_seed(5)
    return Zoo()


def export_zoo(
    rank: int, world_size: int, stage: int, dtype: str, tier: str, folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters and the values that are computed with, by name; the model is exported in fp32 and in its own dtype."""
    engine, *_ = infinity.initialize(model=zoo(), config=config(f"{folder}/drive", dtype, stage, tier))
    with engine:
        engine.backward(engine(input_ids=tokens(rank), labels=tokens(rank)))
        engine.step()
        engine.export(f"{folder}/fp32", dtype="fp32", one_file=True)
        engine.export(f"{folder}/own", dtype=dtype)
        engine.save_checkpoint(f"{folder}/saved")
        names = {name: param for name, param in engine.module.named_parameters() if param.numel()}
        masters = {name: infinity.state(param).master for name, param in names.items()}
        with infinity.read(engine.module):
            values = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        return masters, values
