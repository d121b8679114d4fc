"""Tiny models and data for parity tests; a step takes well under a second."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 96


class MLP(nn.Module):
    """Four linear layers with GELU; returns a mean squared error."""

    def __init__(self, width: int = 32, hidden: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(width, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.leave = nn.Linear(hidden, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.mse_loss(self.leave(x), y)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-5)


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        inner = self.norm2(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class TinyLlama(nn.Module):
    """Llama-like, with learned positions; about 40 thousand parameters; `tied` shares embedding and head."""

    def __init__(self, dim: int = 32, layers: int = 3, heads: int = 2, hidden: int = 80, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.randn(64, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[-1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


def mlp(seed: int = 0) -> MLP:
    """An MLP with the weights of `seed`."""
    torch.manual_seed(seed)
    return MLP()


def tiny_llama(seed: int = 0, *, tied: bool = False) -> TinyLlama:
    """A TinyLlama with the weights of `seed`."""
    torch.manual_seed(seed)
    return TinyLlama(tied=tied)


def token_batch(rank: int, step: int, *, batch: int = 2, positions: int = 16) -> dict[str, Tensor]:
    """Token ids and labels that differ by rank and by step, always the same for the same two."""
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1) + step)
    ids = torch.randint(VOCABULARY, (batch, positions), generator=generator)
    return {"input_ids": ids, "labels": ids}


def vector_batch(rank: int, step: int, *, batch: int = 4, width: int = 32) -> dict[str, Tensor]:
    """Inputs and targets of the MLP that differ by rank and by step."""
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1) + step)
    return {name: torch.randn(batch, width, generator=generator) for name in ("x", "y")}
