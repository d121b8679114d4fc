"""Kernels for tensors on a CUDA device: the step of every rule, and cast, scale and norm in one pass.

No kernel makes the host wait. They give the same bits as the CPU code: the step uses the same source
(csrc/adam/arithmetic.inl), and the norm adds in the same order. If the library cannot be built or does not run on a
device, one warning is logged and the Python fallbacks, which accept CUDA tensors, give the same results.

    if kernels.available(device):
        skipped = kernels.adam_step(table, count, device)      # a tensor: reading it waits for the device
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
from infinity.ops.rules import CPU, DTYPE_CODES, FLOATS, address, check_tensor

_NO_TARGET = -1
# cudaErrorInsufficientDriver, cudaErrorNoKernelImageForDevice, cudaErrorUnsupportedPtxVersion
_INSUFFICIENT_DRIVER, _NO_KERNEL_IMAGE, _UNSUPPORTED_PTX = 35, 209, 222

_log = logging.getLogger("infinity")


class DeviceStats(NamedTuple):
    """Sums of squares of the finite elements of tensors, and numbers of their non-finite ones, on their device."""

    sum_of_squares: Tensor  # [count] fp64
    nonfinite_count: Tensor  # [count] int64


def available(device: torch.device) -> bool:
    """Return whether the kernels run on `device`; the first call may build them, and logs why they do not run."""
    return device.type == "cuda" and _reason(_index(device)) is None


def kernels_report(device: torch.device) -> str:
    """Return which code steps tensors on `device`: "kernels", or "Python fallback" with the reason."""
    reason = _reason(_index(device)) if device.type == "cuda" else f"{device} is no CUDA device"
    return "kernels" if reason is None else f"Python fallback: {reason}"


def adam_step(table: bytes, count: int, device: torch.device) -> Tensor:
    """Step pieces on the current stream of `device`; needs `available(device)`.

    Arguments:
        table: an array of `count` struct Piece of csrc/adam/types.h, of any rules.
        device: the CUDA device of all pieces.

    Returns:
        The number of elements that keep their state because their gradient is not finite: int64 [] on the device.

    Raises:
        RuntimeError: the launch fails; the message has the driver's words.
    """
    skipped = torch.zeros((), dtype=torch.int64, device=device)
    _call("infinity_kernels_adam_step", device, table, ctypes.c_uint64(count), address(skipped))
    return skipped


def grad_stats(tensors: Sequence[Tensor]) -> DeviceStats:
    """Return sums of squares and counts of non-finite elements of tensors ([numel] fp32, bf16 or fp16, one device)."""
    return cast_stats(tensors, None)


def read_grad_stats(tensors: Sequence[Tensor]) -> list[tuple[float, int]]:
    """Return what `grad_stats` returns as numbers: (sum of squares, non-finite elements). The host waits once."""
    device = _device_of(tensors, None)
    if not available(device):
        return reference.read_grad_stats(tensors)
    stats = grad_stats(tensors)
    # A count is exact in fp64.
    sums, counts = torch.stack([stats.sum_of_squares, stats.nonfinite_count.double()]).tolist()
    return list(zip(sums, map(int, counts), strict=True))


def cast_stats(sources: Sequence[Tensor], targets: Sequence[Tensor] | None, scale: float = 1.0) -> DeviceStats:
    """Set targets = scale * sources and return the statistics of the targets, in one pass.

    Arguments:
        sources, targets: [numel] fp32, bf16 or fp16, contiguous, all on one device. A target may be its source if both
            have the same dtype. Without targets, the statistics are those of the unscaled sources.
        scale: the product is computed in fp32 and rounded to nearest even.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    device = _device_of(sources, targets)
    pairs = list(zip(sources, [None] * len(sources) if targets is None else targets, strict=True))
    if not pairs:
        return DeviceStats(*(torch.zeros(0, dtype=kind, device="cpu") for kind in (torch.float64, torch.int64)))
    if not available(device):
        return _reference(pairs, scale)
    table = (_CastC * len(pairs))(*(_record(source, target, scale) for source, target in pairs))
    count = ctypes.c_uint64(len(pairs))
    numel = _handle().infinity_kernels_cast_workspace(table, count)
    workspace = torch.empty(numel, dtype=torch.float64, device=device)
    sums = torch.empty(len(pairs), dtype=torch.float64, device=device)
    nonfinite = torch.empty(len(pairs), dtype=torch.int64, device=device)
    _call("infinity_kernels_cast", device, table, count, *map(address, (workspace, sums, nonfinite)))
    return DeviceStats(sums, nonfinite)


def _device_of(sources: Sequence[Tensor], targets: Sequence[Tensor] | None) -> torch.device:
    """Return the device of all tensors; raise ValueError if they do not fit each other."""
    device = sources[0].device if sources else CPU
    for index, source in enumerate(sources):
        check_tensor(f"sources[{index}]", source, FLOATS, source.numel(), device)
    for index, (source, target) in enumerate(zip(sources, targets, strict=True) if targets is not None else ()):
        if target.numel() != source.numel():
            raise ValueError(f"targets[{index}] has {target.numel()} elements, its source {source.numel()}")
        check_tensor(f"targets[{index}]", target, FLOATS, source.numel(), device)
    return device


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


def _record(source: Tensor, target: Tensor | None, scale: float) -> _CastC:
    pointer, code = (None, _NO_TARGET) if target is None else (target.data_ptr(), DTYPE_CODES[target.dtype])
    return _CastC(source.data_ptr(), pointer, source.numel(), DTYPE_CODES[source.dtype], code, scale)


def _reference(pairs: Sequence[tuple[Tensor, Tensor | None]], scale: float) -> DeviceStats:
    """Return the result of `cast_stats`, computed in torch; the host waits for the blocks of all tensors together."""
    device = pairs[0][0].device
    factor = ctypes.c_float(scale).value
    for source, target in pairs:
        if target is not None:
            target.copy_(source.float() * factor)
    found = reference.read_grad_stats([source if target is None else target for source, target in pairs])
    # A count is exact in fp64.
    sums, counts = torch.tensor(found, dtype=torch.float64, device="cpu").t().to(device)
    return DeviceStats(sums, counts.long())


@functools.cache
def _reason(index: int) -> str | None:
    """Return why the kernels do not run on a device, or None if they do."""
    if build.load("kernels") is None:
        # `build` has logged the cause.
        return "the library is off or cannot be built"
    code = _handle().infinity_kernels_runs_on(ctypes.c_int32(index))
    if code == 0:
        return None
    reason = _text(code)
    _log.warning(
        "the CUDA kernels do not run on device %d, the slower Python fallbacks give the same results: %s.%s",
        index,
        reason,
        _remedy(code),
    )
    return reason


def _remedy(code: int) -> str:
    """Return a sentence that says what to do about an error of the first call, or "" if only its text can tell."""
    if code == _NO_KERNEL_IMAGE:
        return " They have code for compute capability 7.5 and later."
    if code not in (_INSUFFICIENT_DRIVER, _UNSUPPORTED_PTX):
        return ""
    driver, toolkit = _handle().infinity_kernels_driver_version(), _handle().infinity_kernels_runtime_version()
    if not driver:
        return " No driver is installed."
    return (
        f" They were built with CUDA {_version(toolkit)}, and the driver runs CUDA {_version(driver)} at most: update "
        "the driver, or build them with an older toolkit, whose nvcc NVCC names or CUDA_HOME contains (a wheel holds "
        "those of the machine that made it: install from source)."
    )


def _version(code: int) -> str:
    return f"{code // 1000}.{code % 1000 // 10}"


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
    """Make `device` the current one; yield its index and its current stream."""
    with torch.cuda.device(device):
        yield _index(device), torch.cuda.current_stream(device).cuda_stream


def _call(function: str, device: torch.device, *arguments: object) -> None:
    """Call `function`(device, stream, *arguments) of the library."""
    with _place(device) as (index, stream):
        code = getattr(_handle(), function)(ctypes.c_int32(index), ctypes.c_void_p(stream), *arguments)
    if code:
        raise RuntimeError(f"{function} on {device} failed: {_text(code)}")
