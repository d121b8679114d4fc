"""The model, data and configuration of the checkpoints that DeepSpeed wrote; needs torch alone.

Tied weights, a frozen layer, a buffer, two parameter groups, and parameters whose elements two ranks cannot halve.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 13
# Divides among one, two and three ranks.
BATCH = 6
SAVED_STEPS = 4
STEPS = 7


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a trained and a frozen layer, a norm, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, 6)
        self.inner = nn.Linear(6, 7)
        self.fixed = nn.Linear(7, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        x = self.words(ids)
        x = self.norm(x + self.fixed(torch.tanh(self.inner(x))))
        targets = (ids * 5 + 1) % VOCABULARY
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0},
    ]


def config(stage: int, dtype: str, world: int) -> dict[str, Any]:
    """The part of a configuration that DeepSpeed and infinity share."""
    found: dict[str, Any] = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    if dtype == "fp16":
        # The first steps overflow: the scale falls, and they are skipped.
        found["fp16"] = {"enabled": True, "initial_scale_power": 15, "hysteresis": 1, "loss_scale_window": 3}
    elif dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if stage == 3:
        found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return found


def batch(rank: int, world: int, step: int) -> Tensor:
    """A rank's rows of a step's batch, which is the same at every number of ranks."""
    rows = torch.randint(VOCABULARY, (BATCH, 3), generator=torch.Generator().manual_seed(step))
    return rows[rank * BATCH // world : (rank + 1) * BATCH // world]
