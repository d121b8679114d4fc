"""Moments in 8 bits: a code for each element, and for each block of 256 elements the largest magnitude in it.

Block-wise dynamic quantisation (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022) with the maps
and the rounding of bitsandbytes 0.50 on a processor, so that codes have its bits: a value divided by its block's absmax
chooses one of 65,536 cells between -1 and 1, and the cell the code whose value is nearest to the cell's. So a value
near the middle between two codes may get the other one, and a zero in a block that is not zero becomes 2e-5 of absmax.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from infinity.base.tiers import BLOCK_NUMEL

_CELLS = 1 << 16


class CodeMap(NamedTuple):
    """values: [256] fp32, ascending: what each code stands for. cells: [65536] uint8: the code of each cell."""

    values: Tensor
    cells: Tensor


@lru_cache(maxsize=8)
def code_maps(device: torch.device) -> tuple[CodeMap, CodeMap]:
    """The maps of the first moment (signed) and of the second one, in one allocation: see `maps_address`."""
    found = [_values(signed=signed) for signed in (True, False)]
    room = torch.cat([
        *(each.view(torch.uint8) for each in found), *map(_cells, found),
        # A vector of processors reads four bytes at a time.
        torch.zeros(64, dtype=torch.uint8, device="cpu"),
    ]).to(device)  # fmt: skip
    values, cells = room[:2048].view(torch.float32).split(256), room[2048 : 2048 + 2 * _CELLS].split(_CELLS)
    return CodeMap(values[0], cells[0]), CodeMap(values[1], cells[1])


def maps_address(device: torch.device) -> int:
    """The address of struct Maps of csrc/adam/types.h; its memory lives as long as the process."""
    return code_maps(device)[0].values.data_ptr()


def _values(*, signed: bool) -> Tensor:
    """Values of a dynamic exponent and a fraction: with each power of ten less, the fraction has half as many steps."""
    found = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1, dtype=torch.float32, device="cpu")
        means = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        found += [*means.tolist(), *((-means).tolist() if signed else ())]
    found.sort()
    return torch.tensor(found, dtype=torch.float32, device="cpu")


def _cells(values: Tensor) -> Tensor:
    cells = torch.arange(_CELLS, dtype=torch.float32, device="cpu") / 32767.5 - 1
    after = torch.searchsorted(values, cells).clamp(1, 255)
    # In fp64 the differences of fp32 values are exact; of equal ones the lower code is taken.
    below, above = cells.double() - values.double()[after - 1], values.double()[after] - cells.double()
    return torch.where(below <= above, after - 1, after).to(torch.uint8)


def decoded(codes: Tensor, scales: Tensor, which: int) -> Tensor:
    """The moments [n] (fp32) of codes [n] and the absmax of their blocks. which: 0 or 1, of the first or the second."""
    values = code_maps(codes.device)[which].values[codes.int()]
    return values * scales.repeat_interleave(BLOCK_NUMEL)[: codes.numel()]


def encoded(moments: Tensor, which: int) -> tuple[Tensor, Tensor]:
    """The codes [n] and the absmax [blocks] of moments [n] (fp32), the first of which begins a block."""
    padded = torch.nn.functional.pad(moments, (0, -moments.numel() % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
    scales = torch.where(padded.isnan(), 0.0, padded.abs()).amax(1)
    scaled = padded * scales.new_ones(()).div(scales).view(-1, 1)
    cells = ((scaled + 1) * 32767.5 + 0.5).floor().nan_to_num(0.0).clamp(0, _CELLS - 1)
    codes = code_maps(moments.device)[which].cells[cells.int()]
    return codes.view(-1)[: moments.numel()], scales
