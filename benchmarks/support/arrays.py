"""The arrays of an optimizer step, on pages that several processes share. Needs torch alone."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

_SECTION = 1 << 21


class Arrays:
    """fp32: weight, grad, exp_avg, exp_avg_sq. For steps with 16-bit parameters also low_param and low_grad (bf16) and
    remainder (int16). All of `numel` elements, flat, each beginning on a page of its own; none is touched before use.
    """

    def __init__(self, numel: int, descriptor: int | None = None) -> None:
        """descriptor: the memory file of another process; None makes one, which ends with the processes that map it."""
        self.numel = numel
        room = -(-numel * 4 // _SECTION) * _SECTION
        if descriptor is None:
            descriptor = os.memfd_create("arrays")
            os.ftruncate(descriptor, 7 * room)
        self.descriptor = descriptor
        region = mmap.mmap(descriptor, 7 * room)

        def at(index: int, dtype: torch.dtype) -> Tensor:
            return torch.frombuffer(region, dtype=dtype, count=numel, offset=index * room)

        self.weight, self.grad, self.exp_avg, self.exp_avg_sq = (at(index, torch.float32) for index in range(4))
        self.low_param, self.low_grad = at(4, torch.bfloat16), at(5, torch.bfloat16)
        self.remainder = at(6, torch.int16)

    def fill(self) -> None:
        """Draw weights and gradients; moments are zeros."""
        for full, low in ((self.weight, self.low_param), (self.grad, self.low_grad)):
            full.normal_()
            low.copy_(full)
        self.remainder.zero_()
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()
