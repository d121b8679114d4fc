"""How fast memory, the optimizer and a transformer block are: what a profile holds beside its drives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.memory.device import Device
from infinity.memory.host import HostMemory
from infinity.memory.ledger import Ledger
from infinity.memory.pages import page_aligned
from infinity.ops.adam import AdamHyper, Piece, adam_step, grad_stats
from infinity.plan.hardware import Compute

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COPY_NBYTES = 256 << 20
# Sub-groups of a step from NVMe have about this many elements each.
_PIECE_NUMEL, _PIECES = 1 << 21, 16
_VOCABULARY = 32_000
# Enough for their weights not to stay in a cache from one pass to the next.
_BLOCKS = 6
_HOPELESS = 3
_HYPER = AdamHyper(
    lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, adamw=True, bias_correction=True
)


def repeat(body: Callable[[], object], seconds: float, least: int = 2) -> float:
    """Median seconds of a call, over as many as fit into `seconds` after one to warm up; at least `least`.

    The first call, which may compile and take memory, is the answer only where it takes several times as long.
    """
    began = time.perf_counter()
    body()
    first = time.perf_counter() - began
    if first > _HOPELESS * seconds:
        return first
    taken: list[float] = []
    ends = time.monotonic() + seconds - first
    while len(taken) < least or time.monotonic() < ends:
        began = time.perf_counter()
        body()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def copy_rate(seconds: float) -> float:
    """Bytes copied a second within CPU memory."""
    source, target = page_aligned(_COPY_NBYTES).fill_(1), page_aligned(_COPY_NBYTES)
    return _COPY_NBYTES / repeat(lambda: target.copy_(source), seconds)


def adam_seconds(dtype: str, seconds: float) -> tuple[float, float]:
    """Seconds a parameter of an Adam step, and of the gradients' norm, on the CPU."""
    pieces = [_piece(_DTYPES[dtype]) for _ in range(_PIECES)]
    numel = _PIECES * _PIECE_NUMEL
    norm = repeat(lambda: [grad_stats([piece.grad]) for piece in pieces], seconds / 3)
    step = repeat(lambda: [adam_step([piece], step=1, grad_scale=1.0) for piece in pieces], 2 * seconds / 3)
    return step / numel, norm / numel


def _piece(dtype: torch.dtype) -> Piece:
    def make(kind: torch.dtype) -> Tensor:
        tensor = page_aligned(_PIECE_NUMEL * kind.itemsize).view(kind)
        return tensor.fill_(1e-3) if kind.is_floating_point else tensor

    return Piece(
        param=make(dtype), grad=make(dtype), exp_avg=make(torch.float32), exp_avg_sq=make(torch.float32),
        remainder=make(torch.int16) if dtype == torch.bfloat16 else None,
        master=make(torch.float32) if dtype == torch.float16 else None, hyper=_HYPER,
    )  # fmt: skip


class TransformerBlock(nn.Module):
    """A Llama's block as model libraries write it in eager PyTorch: norms in fp32, rotary positions, SwiGLU."""

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
    """What a transformer block reaches in forward and backward: measured at two numbers of tokens; and a head's loss.

    What does not grow with the tokens (reading weights, making gradients) is kept apart.
    """
    large = device.is_accelerator
    # As wide as models that are trained on such a device: the wider, the less element-wise work and attention weigh.
    hidden, intermediate, heads = (4096, 11008, 32) if large else (768, 2048, 12)
    positions, few, many = (1024, 1024, 8192) if large else (256, 256, 1024)
    blocks = nn.ModuleList(TransformerBlock(hidden, intermediate, heads) for _ in range(_BLOCKS))
    blocks.to(device.torch, _DTYPES[dtype])
    numel = sum(param.numel() for param in blocks.parameters())
    taken = {}
    for tokens in (few, many):
        x = torch.randn(tokens // positions, positions, hidden, device=device.torch, dtype=_DTYPES[dtype])
        angles = torch.randn(2, positions, hidden // heads, device=device.torch).to(_DTYPES[dtype])

        def run(x: Tensor = x, angles: Tensor = angles) -> None:
            for block in blocks:
                x = block(x, *angles)
            x.sum().backward()
            blocks.zero_grad(set_to_none=True)
            device.synchronize()

        taken[tokens] = repeat(run, seconds / 3)
        if tokens == few and taken[few] * many / few > seconds:
            # Too slow for the rest: one rate is all that the time allows.
            return Compute(rate=3 * (2 * numel + 4 * _BLOCKS * positions * hidden) * few / taken[few])
    found = fit(numel, {tokens: 3 * (2 * numel + 4 * _BLOCKS * positions * hidden) * tokens for tokens in taken}, taken)
    head = repeat(_head(many, hidden, _DTYPES[dtype], device), seconds / 3)
    operations = 6 * many * hidden * _VOCABULARY
    beyond = head - operations / found.rate - hidden * _VOCABULARY * found.parameter_seconds
    return found.model_copy(update={"logit_seconds": max(beyond, 0.0) / (many * _VOCABULARY)})


def _head(tokens: int, hidden: int, dtype: torch.dtype, device: Device) -> Callable[[], None]:
    """Forward and backward of a language model's head and its loss, which is computed in fp32."""
    # As small as trained ones: probabilities next to nothing would be denormal numbers, which are slow.
    weight = torch.randn(_VOCABULARY, hidden, device=device.torch).mul_(hidden**-0.5).to(dtype).requires_grad_()
    x = torch.randn(tokens, hidden, device=device.torch, dtype=dtype, requires_grad=True)
    labels = torch.randint(_VOCABULARY, (tokens,), device=device.torch)

    def run() -> None:
        F.cross_entropy(F.linear(x, weight).float(), labels).backward()
        weight.grad = x.grad = None
        device.synchronize()

    return run


def fit(numel: int, flops: dict[int, float], taken: dict[int, float]) -> Compute:
    """From floating-point operations and seconds by number of tokens: the rate, and what a parameter takes anyway."""
    few, many = min(taken), max(taken)
    slope = (taken[many] - taken[few]) / (flops[many] - flops[few])
    fixed = taken[few] - slope * flops[few]
    if slope <= 0 or fixed < 0:
        # More tokens did not take proportionally longer, or noise says so: one rate is all that is known.
        return Compute(rate=flops[many] / taken[many])
    return Compute(rate=1 / slope, parameter_seconds=fixed / numel)


def link_rates(device: Device, seconds: float) -> tuple[float, float, float]:
    """Bytes a second from pinned CPU memory to the accelerator, back, and copied within its memory."""
    memory = HostMemory(device, pin=True, ledger=Ledger())
    host = memory.allocate(_COPY_NBYTES)
    there, beside = (device.empty(_COPY_NBYTES, torch.uint8) for _ in range(2))

    def up() -> None:
        device.arrived(device.copy(there, host))

    def down() -> None:
        device.arrived(device.copy(host, there))

    def within() -> None:
        beside.copy_(there)
        device.synchronize()

    try:
        to, back, inside = (_COPY_NBYTES / repeat(way, seconds / 3) for way in (up, down, within))
    finally:
        memory.close()
    return to, back, inside
