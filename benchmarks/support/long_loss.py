"""Task: forward and backward of a language model's loss on a long sequence, plain or in tiles, and the memory it takes.

Resident memory is the kernel's peak (VmHWM) above what the process had with hidden states, weights and their gradients
in place, after a short sequence has prepared what libraries prepare.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.memory.tiers.pinned import trim
from support.machine import reset_peak, resident_nbytes


def run(options: dict[str, Any]) -> dict[str, Any]:
    """`how` ("plain" or "tiled"), `dtype`, `tokens`, `width`, `words`, `tile_tokens`."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    head = nn.Linear(options["width"], options["words"], bias=False).to(getattr(torch, options["dtype"]))
    _pass(head, options, 64)
    loss, _, _ = _pass(head, options, options["tokens"])
    return {"loss": loss, **_measured(head, options)}


def _measured(head: nn.Linear, options: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    trim()
    assert head.weight.grad is not None
    head.weight.grad = None
    _, peak, seconds = _pass(head, options, options["tokens"])
    return {"peak": peak, "seconds": seconds, "norm": float(head.weight.grad.float().norm())}  # type: ignore[union-attr]


def _pass(head: nn.Linear, options: dict[str, Any], tokens: int) -> tuple[float, int, float]:
    """(loss, bytes at the peak beyond hidden states and the gradients that stay, seconds)."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(1, tokens, options["width"], generator=generator).to(head.weight.dtype).requires_grad_()
    labels = torch.randint(options["words"], (1, tokens), generator=generator)
    reset_peak()
    before, began = resident_nbytes(), time.perf_counter()
    loss = _loss(head, hidden, labels, options)
    loss.backward()
    seconds = time.perf_counter() - began
    stays = head.weight.nbytes + hidden.nbytes
    return float(loss.detach()), resident_nbytes(peak=True) - before - stays, seconds


def _loss(head: nn.Linear, hidden: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
    if options["how"] == "tiled":
        return infinity.tiled_cross_entropy(hidden, head, labels, shift=True, tile_tokens=options["tile_tokens"])
    logits = head(hidden).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
