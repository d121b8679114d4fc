"""Kernels for tensors on a CUDA device: Adam, and cast, scale and norm in one pass. None of them stops the host.

They have the same bits as the code for the CPU: Adam is the same text (csrc/adam/arithmetic.inl), the norm has the
same reduction tree. Where the library cannot be built or does not run on a device, `available` says so once, and the
Python fallbacks, which take CUDA tensors as well, give the same results.

    if kernels.available(device):
        left_out = kernels.adam_step(table, count, device)     # tensors: reading one waits for the device
    stats = kernels.cast_stats(grads, halves, scale=1 / 3)     # halves = grads / 3 in bf16, with their norm
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infinity.ops import build, reference

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_TARGET = -1

_log = logging.getLogger("infinity")


class DeviceStats(NamedTuple):
    """Of a list of tensors, on their device: sums of squares of finite elements, and numbers of the others."""

    sum_of_squares: Tensor  # [count] fp64
    nonfinite_count: Tensor  # [count] int64


def available(device: torch.device) -> bool:
    """Whether the kernels run on `device`. The first call for a device may build them, and says why they do not."""
    return device.type == "cuda" and _reason(_index(device)) is None


def kernels_report(device: torch.device) -> str:
    """What steps tensors on `device`: "kernels", or "Python fallback" and why."""
    reason = _reason(_index(device)) if device.type == "cuda" else f"{device} is no CUDA device"
    return "kernels" if reason is None else f"Python fallback: {reason}"


def adam_step(table: bytes, count: int, device: torch.device) -> Tensor:
    """Step `count` pieces, which all lie on `device`, on its current stream. `table` holds them as struct Piece of
    csrc/adam/types.h, one behind the other.

    Returns how many elements keep their state because their gradient is not finite: int64 [], on the device. Needs
    `available(device)`; RuntimeError with the driver's words where a launch fails.
    """
    left_out = torch.zeros((), dtype=torch.int64, device=device)
    _call("infinity_kernels_adam_step", device, table, ctypes.c_uint64(count), _address(left_out))
    return left_out


def grad_stats(tensors: Sequence[Tensor]) -> DeviceStats:
    """Sums of squares and counts of non-finite elements of tensors ([numel] fp32, bf16 or fp16, of one device)."""
    return cast_stats(tensors, None)


def cast_stats(sources: Sequence[Tensor], targets: Sequence[Tensor] | None, scale: float = 1.0) -> DeviceStats:
    """targets = scale * sources, cast to nearest even, in one pass with the statistics of what the targets then hold.

    All are [numel] fp32, bf16 or fp16, contiguous and on one device; the product is taken in fp32. A target may be its
    source where both have the same dtype. Without targets, the statistics are the sources'. ValueError where tensors
    do not fit each other.
    """
    pairs = list(zip(sources, [None] * len(sources) if targets is None else targets, strict=True))
    for index, (source, target) in enumerate(pairs):
        _check(f"sources[{index}]", source, sources[0])
        if target is not None:
            _check(f"targets[{index}]", target, sources[0])
            if target.numel() != source.numel():
                raise ValueError(f"targets[{index}] has {target.numel()} elements, its source {source.numel()}")
    if not pairs:
        return DeviceStats(*(torch.zeros(0, dtype=kind, device="cpu") for kind in (torch.float64, torch.int64)))
    device = sources[0].device
    if not available(device):
        return _reference(pairs, scale)
    table = (_CastC * len(pairs))(*(_CastC.of(source, target, scale) for source, target in pairs))
    count = ctypes.c_uint64(len(pairs))
    numel = _handle().infinity_kernels_cast_workspace(table, count)
    workspace = torch.empty(numel, dtype=torch.float64, device=device)
    sums = torch.empty(len(pairs), dtype=torch.float64, device=device)
    nonfinite = torch.empty(len(pairs), dtype=torch.int64, device=device)
    addresses = map(_address, (workspace, sums, nonfinite))
    _call("infinity_kernels_cast", device, table, count, *addresses)
    return DeviceStats(sums, nonfinite)


class _CastC(ctypes.Structure):
    # struct Cast of csrc/kernels/cast.cu
    _fields_ = (
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("numel", ctypes.c_uint64),
        ("source_dtype", ctypes.c_int32),
        ("target_dtype", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )

    @classmethod
    def of(cls, source: Tensor, target: Tensor | None, scale: float) -> _CastC:
        return cls(
            source.data_ptr(),
            None if target is None else target.data_ptr(),
            source.numel(),
            _DTYPE_CODES[source.dtype],
            _NO_TARGET if target is None else _DTYPE_CODES[target.dtype],
            scale,
        )


def _reference(pairs: Sequence[tuple[Tensor, Tensor | None]], scale: float) -> DeviceStats:
    """`cast_stats` in torch."""
    device = pairs[0][0].device
    factor = ctypes.c_float(scale).value
    found = []
    for source, target in pairs:
        if target is not None:
            target.copy_(source.float() * factor)
        found.append(reference.grad_stats((source if target is None else target).cpu()))
    sums, counts = zip(*found, strict=True)
    return DeviceStats(
        torch.tensor(sums, dtype=torch.float64, device=device), torch.tensor(counts, dtype=torch.int64, device=device)
    )


@functools.cache
def _reason(index: int) -> str | None:
    """Why the kernels do not run on a device; None where they do."""
    if build.load("kernels") is None:
        # Said by `build`.
        return "the library is off or cannot be built"
    code = _handle().infinity_kernels_runs_on(ctypes.c_int32(index))
    if code == 0:
        return None
    reason = _text(code)
    _log.warning(
        "the CUDA kernels do not run on device %d, the slower Python fallbacks give the same results: %s. "
        "They need a driver as new as the CUDA toolkit that built them.",
        index,
        reason,
    )
    return reason


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _handle() -> ctypes.CDLL:
    handle = build.require("kernels")
    handle.infinity_kernels_error.restype = ctypes.c_char_p
    handle.infinity_kernels_cast_workspace.restype = ctypes.c_uint64
    return handle


def _text(code: int) -> str:
    text = _handle().infinity_kernels_error(ctypes.c_int32(code))
    return f"{text.decode()} (CUDA error {code})"


@contextlib.contextmanager
def _place(device: torch.device) -> Iterator[tuple[int, int]]:
    """Makes `device` the current one; its index and its current stream."""
    with torch.cuda.device(device):
        yield _index(device), torch.cuda.current_stream(device).cuda_stream


def _call(function: str, device: torch.device, *arguments: object) -> None:
    """Call `function`(device, stream, *arguments) of the library."""
    with _place(device) as (index, stream):
        code = getattr(_handle(), function)(ctypes.c_int32(index), ctypes.c_void_p(stream), *arguments)
    if code:
        raise RuntimeError(f"{function} on {device} failed: {_text(code)}")


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _check(name: str, tensor: Tensor, first: Tensor) -> None:
    if tensor.device != first.device:
        raise ValueError(f"{name} is on {tensor.device}: a tensor on {first.device} is needed")
    if tensor.dtype not in _DTYPE_CODES:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, _DTYPE_CODES))}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {tensor.stride()} for shape {tuple(tensor.shape)}")
