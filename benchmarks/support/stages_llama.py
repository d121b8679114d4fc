"""The Llama of `support.models` in layers, for pipelines that take a sequence of modules: the same modules and weights.

Between two layers goes one tensor, the hidden states. Positions are angles that all blocks of a rank share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from support import models


class Angles:
    """Cosines and sines of the positions, computed once for each dtype. No module, since it has nothing to train."""

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._known: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        key = hidden.shape[1], hidden.dtype
        if key not in self._known:
            with torch.no_grad():
                self._known[key] = self._rotary(hidden, torch.arange(hidden.shape[1])[None])
        return self._known[key]


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, layer: nn.Module, angles: Angles) -> None:
        super().__init__()
        self.layer = layer
        self._angles = angles

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden, position_embeddings=self._angles(hidden))


class Head(nn.Module):
    """The last norm, and the head."""

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


def layers(options: dict[str, Any]) -> list[nn.Module]:
    """The whole model: the embedding, the blocks, the head."""
    model = models.build(options)
    angles = Angles(model.model.rotary_emb)
    blocks = [Block(layer, angles) for layer in model.model.layers]
    return [model.model.embed_tokens, *blocks, Head(model.model.norm, model.lm_head)]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As the model itself computes it."""
    return ForCausalLMLoss(logits, labels, logits.shape[-1])
