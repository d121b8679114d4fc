"""Adam and its relatives on CPU memory: one call steps every piece, and gives the same bits however it is run.

The arithmetic is defined once (csrc/adam/arithmetic.inl; `infinity.ops.reference` says it again in torch): fp32,
explicit fused multiply-adds, IEEE square root and division. Instruction set, number of threads, native code or Python
fallback, and how a tensor is cut into pieces change nothing, so that placement never changes a result. (The bits of a
NaN are not defined; that it is one, is.)

    piece = Piece(param, grad, exp_avg, exp_avg_sq, remainder=remainder, hyper=AdamHyper(...))
    adam_step([piece], step=1, grad_scale=1.0)

A weight is stored in one of three ways: an fp32 PARAM; a bf16 PARAM with an int16 REMAINDER (`split`, `join`); a 16-bit
PARAM that is the rounded copy of an fp32 MASTER.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from infinity.ops import build, kernels, reference
from infinity.ops.cores import allowed_cores, thread_count
from infinity.ops.piece import Piece
from infinity.ops.rules import AdagradHyper, AdamHyper, Hyper, LionHyper, MomentumHyper, Rule, StepConstants

__all__ = [
    "AdagradHyper",
    "AdamHyper",
    "GradStats",
    "Hyper",
    "LionHyper",
    "MomentumHyper",
    "Piece",
    "Rule",
    "accumulate",
    "adam_step",
    "grad_stats",
    "join",
    "set_simd",
    "set_threads",
    "shutdown_threads",
    "simd",
    "simds",
    "split",
]

_CPU = torch.device("cpu")
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLOATS = tuple(_DTYPE_CODES)
_FP32, _BF16, _INT16 = torch.float32, torch.bfloat16, torch.int16
_ISAS = ("scalar", "avx2", "avx512", "neon")
_PLAIN, _SPLIT, _MASTER_HALF, _MASTER_BFLOAT = range(4)
_ACCUMULATE_NUMEL = 1 << 20
# struct Piece of csrc/adam/types.h: what differs from piece to piece, then what its hyper-parameters and the step say.
_HEAD = struct.Struct("@6PQ2i")
# With what C puts behind it, so that the next piece begins where a pointer may.
_TAIL = struct.Struct(f"@i{StepConstants.COUNT}f0P")


class GradStats(NamedTuple):
    """Of one tensor: the sum of squares of its finite elements, in fp64, and the number of the others."""

    sum_of_squares: float
    nonfinite_count: int


def adam_step(
    pieces: Sequence[Piece], *, step: int, grad_scale: float, grad_bound: float = math.inf, native: bool | None = None
) -> int | Tensor:
    """Step every piece in place, by the rule of its hyper-parameters: gradients are multiplied by `grad_scale`, then
    moved into [-grad_bound, grad_bound]; `step` counts from 1.

    An element whose gradient, so multiplied, is not finite keeps every bit of its weight and moments. Returns how many
    those are, over all pieces; for pieces on a CUDA device as a tensor there (int64 []), so that the host goes on.

    native: None takes native code where it is there, False the Python fallback, True raises ExtensionError without
    it. Raises ValueError before anything is written where a tensor does not fit the others.
    """
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    # Most pieces share theirs, as the very object; hashing its values would cost more than all else here.
    hypers = {id(piece.hyper): piece.hyper for piece in pieces}
    constants = {key: hyper.constants(step=step, grad_scale=grad_scale) for key, hyper in hypers.items()}
    if grad_bound != math.inf:
        constants = {key: replace(each, grad_bound=grad_bound) for key, each in constants.items()}
    table = _table(pieces, {key: _TAIL.pack(hypers[key].rule, *each.floats()) for key, each in constants.items()})
    elsewhere = {piece.param.device for piece in pieces if not piece.param.is_cpu}
    if len(elsewhere) == 1 and native is not False and all(not piece.param.is_cpu for piece in pieces):
        (device,) = elsewhere
        # The device's kernel knows Adam and AdamW; the Python fallback knows every rule, on every device.
        if kernels.available(device) and all(piece.hyper.rule.two_states for piece in pieces):
            return kernels.adam_step(table, len(pieces), device)
    if elsewhere or not _runtime.uses_native(native):
        return sum(reference.adam_step(piece, constants[id(piece.hyper)]) for piece in pieces)
    nonfinite = ctypes.c_uint64()
    _runtime.call("infinity_adam_step", table, ctypes.c_uint64(len(pieces)), ctypes.byref(nonfinite))
    return nonfinite.value


def grad_stats(tensors: Sequence[Tensor], native: bool | None = None) -> list[GradStats]:
    """Sum of squares and count of non-finite elements of each tensor ([numel] fp32, bf16 or fp16, contiguous).

    All lie on the CPU, or on one CUDA device, which is then waited for.

    The reduction tree depends on the tensor alone: blocks of 4096 elements from its start, in a block 16 fp64 lanes
    (index % 16) added pairwise, blocks added in order.
    """
    if tensors and tensors[0].is_cuda:
        there = kernels.grad_stats(tensors)
        pairs = zip(there.sum_of_squares.tolist(), there.nonfinite_count.tolist(), strict=True)
        return [GradStats(*pair) for pair in pairs]
    for index, tensor in enumerate(tensors):
        _check_tensor(f"tensors[{index}]", tensor, _FLOATS, tensor.numel())
    if not _runtime.uses_native(native):
        return [GradStats(*reference.grad_stats(tensor)) for tensor in tensors]
    count = len(tensors)
    spans = (_SpanC * count)(*(_SpanC(t.data_ptr(), t.numel(), _DTYPE_CODES[t.dtype]) for t in tensors))
    sums, nonfinite = (ctypes.c_double * count)(), (ctypes.c_uint64 * count)()
    _runtime.call("infinity_adam_stats", spans, ctypes.c_uint64(count), sums, nonfinite)
    return [GradStats(*pair) for pair in zip(sums, nonfinite, strict=True)]


def split(
    values: Tensor, native: bool | None = None, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """fp32 [numel] -> (bf16 [numel] nearest with ties away from zero, int16 [numel] remainder), into `out` if given.

    `join` gives back the very bits of every fp32, NaN payloads included. A finite value that is nearest to a bf16
    infinity shows as infinity in the bf16 part alone, and a NaN whose upper fraction bits are all ones as a zero.
    """
    _check_tensor("values", values, (torch.float32,), values.numel())
    if out is None:
        param = torch.empty(values.shape, dtype=torch.bfloat16, device=_CPU)
        out = param, torch.empty(values.shape, dtype=torch.int16, device=_CPU)
    param, remainder = out
    _check_tensor("out[0]", param, (torch.bfloat16,), values.numel())
    _check_tensor("out[1]", remainder, (torch.int16,), values.numel())
    if not _runtime.uses_native(native):
        for target, made in zip(out, reference.split(values), strict=True):
            target.copy_(made)
        return out
    numel = ctypes.c_uint64(values.numel())
    _runtime.call("infinity_adam_split", _address(values), _address(param), _address(remainder), numel)
    return param, remainder


def join(param: Tensor, remainder: Tensor, native: bool | None = None) -> Tensor:
    """(bf16 [numel], int16 [numel]) of `split` -> the fp32 [numel] that it was given, bit for bit."""
    _check_tensor("param", param, (torch.bfloat16,), param.numel())
    _check_tensor("remainder", remainder, (torch.int16,), param.numel())
    if not _runtime.uses_native(native):
        return reference.join(param, remainder)
    values = torch.empty(param.shape, dtype=torch.float32, device=_CPU)
    numel = ctypes.c_uint64(param.numel())
    _runtime.call("infinity_adam_join", _address(param), _address(remainder), _address(values), numel)
    return values


def accumulate(dst: Tensor, src: Tensor, scale: float = 1.0) -> None:
    """dst += scale * src, both [numel] fp32, bf16 or fp16 on CPU: in fp32 (two roundings), stored nearest even."""
    _check_tensor("dst", dst, _FLOATS, dst.numel())
    _check_tensor("src", src, _FLOATS, dst.numel())
    # Product and sum are separate operations: torch's fused one rounds differently in vector bodies and tails.
    flat_dst, flat_src = dst.view(-1), src.view(-1)
    for begin in range(0, dst.numel(), _ACCUMULATE_NUMEL):
        part = flat_dst[begin : begin + _ACCUMULATE_NUMEL]
        addend = flat_src[begin : begin + _ACCUMULATE_NUMEL].float()
        if scale != 1.0:
            addend = addend * scale
        part.copy_(part.float().add_(addend))


def set_threads(count: int | None, cores: Sequence[int] | None = None) -> None:
    """Use `count` threads (the caller's one of them) from now on; None: as many as there are cores and quota for.

    cores: what the threads may run on, the caller during a call too; `infinity.ops.cores.share_of_cores` gives a rank
    its own. None: whatever the first caller may. Raises ValueError for a core that this process may not use.
    """
    if count is not None and count < 1:
        raise ValueError(f"at least 1 thread is needed, got {count}")
    if cores is not None and (not cores or not set(cores) <= set(allowed_cores())):
        raise ValueError(f"cores {list(cores)} are not among those of this process: {allowed_cores()}")
    _runtime.set_threads(count, () if cores is None else tuple(sorted(set(cores))))


def shutdown_threads() -> None:
    """End the pool's threads. The next call starts them again."""
    _runtime.shutdown_threads()


def set_simd(name: str | None) -> None:
    """Force an instruction set ("scalar", "avx2", "avx512", "neon"); None: the best one. ValueError if not runnable."""
    _runtime.set_simd(name)


def simd() -> str:
    """The instruction set in use: one of those `set_simd` takes, or "reference" without native code."""
    return _runtime.simd()


def simds() -> list[str]:
    """The instruction sets that `set_simd` takes on this machine."""
    return _runtime.simds()


class _Runtime:
    """The loaded library with its pool of threads. One per process: a forked child forgets its parent's pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ctypes.c_void_p | None = None
        self._threads: int | None = None
        self._cores: tuple[int, ...] = ()
        self._isa: int | None = None

    def uses_native(self, native: bool | None) -> bool:
        if native:
            build.require("adam")
        return native is not False and build.load("adam") is not None

    def call(self, function: str, *arguments: object) -> None:
        """Call `function`(pool, isa, *arguments) of the library, one call at a time."""
        library = build.require("adam")
        with self._lock:
            if self._pool is None:
                library.infinity_adam_pool_new.restype = ctypes.c_void_p
                threads = self._threads or thread_count(len(self._cores or allowed_cores()))
                cores = (ctypes.c_int32 * len(self._cores))(*self._cores)
                self._pool = ctypes.c_void_p(
                    library.infinity_adam_pool_new(ctypes.c_int32(threads), cores, ctypes.c_uint64(len(cores)))
                )
                if not self._pool:
                    raise MemoryError("no memory for the pool of threads of the optimizer")
            isa = library.infinity_adam_isa_best() if self._isa is None else self._isa
            errno = getattr(library, function)(self._pool, ctypes.c_int32(isa), *arguments)
        if errno:
            raise MemoryError(f"{function} failed: {os.strerror(errno)}")

    def set_threads(self, count: int | None, cores: tuple[int, ...]) -> None:
        self.shutdown_threads()
        self._threads, self._cores = count, cores

    def shutdown_threads(self) -> None:
        with self._lock:
            if self._pool is not None:
                build.require("adam").infinity_adam_pool_delete(self._pool)
                self._pool = None

    def simds(self) -> list[str]:
        library = build.load("adam")
        if library is None:
            return []
        return [name for code, name in enumerate(_ISAS) if library.infinity_adam_isa_supported(ctypes.c_int32(code))]

    def set_simd(self, name: str | None) -> None:
        if name is not None and name not in self.simds():
            raise ValueError(f"instruction set {name!r} does not run here: there are {', '.join(self.simds())}")
        self._isa = None if name is None else _ISAS.index(name)

    def simd(self) -> str:
        library = build.load("adam")
        if library is None:
            return "reference"
        return _ISAS[library.infinity_adam_isa_best() if self._isa is None else self._isa]

    def forget(self) -> None:
        # In a forked child the pool's threads are gone and its locks may be held for ever: it is left behind.
        self._lock = threading.Lock()
        self._pool = None


_runtime = _Runtime()
os.register_at_fork(after_in_child=_runtime.forget)


class _SpanC(ctypes.Structure):
    # struct Span of csrc/adam/types.h
    _fields_ = (("data", ctypes.c_void_p), ("numel", ctypes.c_uint64), ("dtype", ctypes.c_int32))


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _table(pieces: Sequence[Piece], tails: Mapping[int, bytes]) -> bytes:
    """An array of struct Piece, with the tail of each piece's hyper-parameters by their id.

    ValueError where a piece's tensors do not fit each other. A step has hundreds of pieces: what almost every one is,
    is asked without a call, and anything else is looked at closely.
    """
    records = []
    for index, piece in enumerate(pieces):
        param, grad, m, v, rest = piece.param, piece.grad, piece.exp_avg, piece.exp_avg_sq, piece.remainder
        numel, code = param.numel(), _DTYPE_CODES.get(grad.dtype)
        split_or_plain = (
            param.dtype is _FP32
            if rest is None
            else param.dtype is _BF16
            and rest.dtype is _INT16
            and rest.numel() == numel
            and rest.is_cpu
            and rest.is_contiguous()
        )
        if (
            split_or_plain
            and piece.master is None
            and v is not None
            and piece.hyper.rule.two_states
            and code is not None
            and (m.dtype is _FP32 and v.dtype is _FP32)
            and numel == grad.numel() == m.numel() == v.numel()
            and (param.is_cpu and grad.is_cpu and m.is_cpu and v.is_cpu)
            and (param.is_contiguous() and grad.is_contiguous() and m.is_contiguous() and v.is_contiguous())
        ):
            storage = _PLAIN if rest is None else _SPLIT
        else:
            storage, code = _check_piece(index, piece), _DTYPE_CODES[grad.dtype]
        others = (_pointer(v), _pointer(rest), _pointer(piece.master))
        head = _HEAD.pack(param.data_ptr(), grad.data_ptr(), m.data_ptr(), *others, numel, storage, code)
        records.append(head + tails[id(piece.hyper)])
    return b"".join(records)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check_piece(index: int, piece: Piece) -> int:
    """The storage code of a piece; ValueError where its tensors do not fit each other."""
    numel, device = piece.param.numel(), piece.param.device

    def say(field: str) -> str:
        return f"pieces[{index}].{field}"

    _check_tensor(say("param"), piece.param, _FLOATS, numel, device)
    _check_tensor(say("grad"), piece.grad, _FLOATS, numel, device)
    _check_tensor(say("exp_avg"), piece.exp_avg, (torch.float32,), numel, device)
    if piece.hyper.rule.two_states != (piece.exp_avg_sq is not None):
        kept = "two states" if piece.hyper.rule.two_states else "one state"
        raise ValueError(f"{say('exp_avg_sq')}: {piece.hyper.rule.name} keeps {kept} an element")
    if piece.exp_avg_sq is not None:
        _check_tensor(say("exp_avg_sq"), piece.exp_avg_sq, (torch.float32,), numel, device)
    if piece.remainder is not None and piece.master is not None:
        raise ValueError(f"{say('remainder')} and {say('master')} exclude each other")
    if piece.remainder is not None:
        _check_tensor(say("param"), piece.param, (torch.bfloat16,), numel, device)
        _check_tensor(say("remainder"), piece.remainder, (torch.int16,), numel, device)
        return _SPLIT
    if piece.master is not None:
        _check_tensor(say("param"), piece.param, (torch.float16, torch.bfloat16), numel, device)
        _check_tensor(say("master"), piece.master, (torch.float32,), numel, device)
        return _MASTER_HALF if piece.param.dtype == torch.float16 else _MASTER_BFLOAT
    if piece.param.dtype != torch.float32:
        raise ValueError(f"{say('param')} is {piece.param.dtype}: a 16-bit param needs a remainder or a master")
    return _PLAIN


def _check_tensor(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int, device: torch.device = _CPU
) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}: a tensor on {device} is needed")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {numel}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {tensor.stride()} for shape {tuple(tensor.shape)}")
