"""Measurement of memory copies, the optimizer and a transformer block for a hardware profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.memory.ledger import Ledger
from infinity.memory.pages import page_aligned
from infinity.memory.partition import DTYPES
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import HostMemory
from infinity.ops.adam import AdamHyper, Piece, adam_step, grad_stats
from infinity.plan.hardware import Compute

_COPY_NBYTES = 256 << 20
# About the elements of a sub-group that is stepped from NVMe.
_PIECE_NUMEL, _PIECES = 1 << 21, 16
_VOCABULARY = 32_000
# Enough blocks that their weights do not stay in a cache between passes.
_BLOCKS = 6
# Measuring n blocks and the head takes about as long as n * _PASSES_A_BLOCK + _PASSES_OF_HEAD passes of one block with
# few tokens.
_PASSES_A_BLOCK, _PASSES_OF_HEAD = 10, 28
_HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, adamw=True, bias_correction=True)


def repeat(body: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a call of `body`, over as many calls as fit into `seconds`.

    The first call may compile and allocate, so it counts only if no second call fits.
    """
    ends = time.perf_counter() + seconds
    taken: list[float] = []
    first = last = _timed(body)
    while time.perf_counter() + last <= ends:
        last = _timed(body)
        taken.append(last)
    return statistics.median(taken) if taken else first


def _timed(body: Callable[[], object]) -> float:
    began = time.perf_counter()
    body()
    return time.perf_counter() - began


def copy_rate(seconds: float) -> float:
    """Return the bandwidth of copies within CPU memory in bytes a second, measured for about `seconds`."""
    ends = time.perf_counter() + seconds
    # Larger than any cache, but small enough to be filled in a part of the time.
    nbytes = _COPY_NBYTES if seconds > 1 else _COPY_NBYTES // 4
    source, target = page_aligned(nbytes).fill_(1), page_aligned(nbytes)
    return nbytes / repeat(lambda: target.copy_(source), ends - time.perf_counter())


def adam_seconds(dtype: str, seconds: float) -> tuple[float, float]:
    """Return the seconds of an Adam step and of the gradient norm on the CPU, for one parameter of type `dtype`."""
    ends = time.perf_counter() + seconds
    pieces = [_piece(DTYPES[dtype])]
    # If allocation is slow, fewer pieces leave time for the measurement.
    while len(pieces) < _PIECES and time.perf_counter() < ends - 2 * seconds / 3:
        pieces.append(_piece(DTYPES[dtype]))
    numel = len(pieces) * _PIECE_NUMEL
    norm = repeat(lambda: [grad_stats([piece.grad]) for piece in pieces], (ends - time.perf_counter()) / 3)
    step = repeat(lambda: [adam_step([piece], step=1, grad_scale=1.0) for piece in pieces], ends - time.perf_counter())
    return step / numel, norm / numel


def _piece(dtype: torch.dtype) -> Piece:
    def make(kind: torch.dtype) -> Tensor:
        tensor = page_aligned(_PIECE_NUMEL * kind.itemsize).view(kind)
        # Filled, so that the kernel provides the pages before the first step.
        return tensor.fill_(1e-3) if kind.is_floating_point else tensor.zero_()

    return Piece(
        param=make(dtype), grad=make(dtype), exp_avg=make(torch.float32), exp_avg_sq=make(torch.float32),
        remainder=make(torch.int16) if dtype == torch.bfloat16 else None,
        master=make(torch.float32) if dtype == torch.float16 else None, hyper=_HYPER,
    )  # fmt: skip


class TransformerBlock(nn.Module):
    """A Llama block as model libraries write it in eager PyTorch: norms in fp32, rotary positions, SwiGLU."""

    def __init__(self, hidden: int, intermediate: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ParameterList(torch.ones(hidden, device="cpu") for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(hidden, hidden, bias=False, device="cpu") for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False, device="cpu") for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False, device="cpu")

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed = _rms_norm(x, self.norms[0])
        query, key, value = (
            linear(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        query, key = (part * cosine + _rotated(part) * sine for part in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        normed = _rms_norm(x, self.norms[1])
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def compute(dtype: str, device: Device, seconds: float) -> Compute:
    """Measure forward and backward of transformer blocks and of a language model's head for about `seconds`.

    Two numbers of tokens separate the rate from the time of each parameter that does not depend on the tokens, such as
    reading weights and writing gradients.
    """
    ends = time.perf_counter() + seconds
    large, kind = device.is_accelerator, DTYPES[dtype]
    # Typical widths for the device, because element-wise work and attention weigh less in wider models.
    hidden, intermediate, heads = (4096, 11008, 32) if large else (768, 2048, 12)
    positions, few, many = (1024, 1024, 8192) if large else (256, 256, 1024)
    blocks = nn.ModuleList()

    def passes(tokens: int, seconds: float) -> float:
        """Return the seconds of forward and backward through all blocks."""
        x = torch.randn(tokens // positions, positions, hidden, device=device.torch, dtype=kind)
        angles = torch.randn(2, positions, hidden // heads, device=device.torch).to(kind)

        def run() -> None:
            y = x
            for block in blocks:
                y = block(y, *angles)
            y.sum().backward()
            blocks.zero_grad(set_to_none=True)
            device.synchronize()

        return repeat(run, seconds)

    def add_block() -> None:
        blocks.append(TransformerBlock(hidden, intermediate, heads).to(device.torch, kind))

    def numel() -> int:
        return sum(param.numel() for param in blocks.parameters())

    def flops(tokens: int) -> float:
        return 3.0 * (2 * numel() + 4 * len(blocks) * positions * hidden) * tokens

    add_block()
    one = passes(few, seconds / 20)
    left = ends - time.perf_counter()
    fitting = int((left / one - _PASSES_OF_HEAD) / _PASSES_A_BLOCK)
    if fitting < 1:
        # A slow device leaves no time for the other measurements.
        return Compute(rate=flops(few) / one)
    while len(blocks) < min(fitting, _BLOCKS):
        add_block()
    taken = {tokens: passes(tokens, (ends - time.perf_counter()) / share) for tokens, share in ((few, 4), (many, 2))}
    found = fit_rates(numel(), {tokens: flops(tokens) for tokens in taken}, taken)
    head = repeat(_head(many, hidden, kind, device), ends - time.perf_counter())
    operations = 6 * many * hidden * _VOCABULARY
    beyond = head - operations / found.rate - hidden * _VOCABULARY * found.parameter_seconds
    return found.model_copy(update={"logit_seconds": max(beyond, 0.0) / (many * _VOCABULARY)})


def _head(tokens: int, hidden: int, dtype: torch.dtype, device: Device) -> Callable[[], None]:
    """Return a function that runs forward and backward of a language model's head with its loss in fp32."""
    # As small as trained weights, because tiny probabilities would be denormal numbers, which are slow.
    weight = torch.randn(_VOCABULARY, hidden, device=device.torch).mul_(hidden**-0.5).to(dtype).requires_grad_()
    x = torch.randn(tokens, hidden, device=device.torch, dtype=dtype, requires_grad=True)
    labels = torch.randint(_VOCABULARY, (tokens,), device=device.torch)

    def run() -> None:
        F.cross_entropy(F.linear(x, weight).float(), labels).backward()
        weight.grad = x.grad = None
        device.synchronize()

    return run


def fit_rates(numel: int, flops: dict[int, float], taken: dict[int, float]) -> Compute:
    """Fit the rate and the token-independent time of a parameter to two measurements.

    Arguments:
        numel: parameters of the measured blocks.
        flops: number of tokens -> floating-point operations.
        taken: number of tokens -> measured seconds.
    """
    few, many = min(taken), max(taken)
    slope = (taken[many] - taken[few]) / (flops[many] - flops[few])
    fixed = taken[few] - slope * flops[few]
    if slope <= 0 or fixed < 0:
        # Noise hides the token-independent part; only one rate is known.
        return Compute(rate=flops[many] / taken[many])
    return Compute(rate=1 / slope, parameter_seconds=fixed / numel)


def link_rates(device: Device, seconds: float) -> tuple[float, float, float]:
    """Return bandwidths in bytes a second: pinned CPU memory to the accelerator, back, and within its memory."""
    memory = HostMemory(device, pin=True, ledger=Ledger())
    host = memory.allocate(_COPY_NBYTES)
    source, target = (device.empty(_COPY_NBYTES, torch.uint8) for _ in range(2))

    def up() -> None:
        device.arrived(device.copy(source, host))

    def down() -> None:
        device.arrived(device.copy(host, source))

    def within() -> None:
        target.copy_(source)
        device.synchronize()

    try:
        up_rate, down_rate, within_rate = (_COPY_NBYTES / repeat(copy, seconds / 3) for copy in (up, down, within))
    finally:
        memory.close()
    return up_rate, down_rate, within_rate
