"""Adam and the other update rules on CPU memory; one call steps any number of pieces.

The arithmetic is defined in csrc/adam/arithmetic.inl and repeated in torch by `infinity.ops.reference`: fp32, explicit
fused multiply-adds, IEEE square root and division. The results have the same bits with every instruction set and
number of threads, with native code and the Python fallback, and for every cut of a tensor into pieces. (A NaN stays a
NaN, but its payload is not defined.)

    piece = Piece(param, grad, exp_avg, exp_avg_sq, remainder=remainder, hyper=AdamHyper(...))
    adam_step([piece], step=1, grad_scale=1.0)

A weight is stored as an fp32 PARAM, as a bf16 PARAM with an int16 REMAINDER (`split`, `join`), or as a 16-bit PARAM
rounded from an fp32 MASTER.
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

from infinity.base.tiers import BLOCK_NUMEL
from infinity.ops import build, kernels, reference
from infinity.ops.codes import maps_address
from infinity.ops.cores import allowed_cores, thread_count
from infinity.ops.rules import (
    CPU,
    DTYPE_CODES,
    FLOATS,
    Piece,
    Rule,
    StepConstants,
    address,
    check_tensor,
)

_FP32, _BF16, _INT16 = torch.float32, torch.bfloat16, torch.int16
_ISAS = ("scalar", "avx2", "avx512", "neon")
_PLAIN, _SPLIT, _MASTER_HALF, _MASTER_BFLOAT = range(4)
_ACCUMULATE_NUMEL = 1 << 20
# struct Piece of csrc/adam/types.h: the fields of the piece, then those of its hyper-parameters and the step.
_HEAD = struct.Struct("@9PQ2i")
# "0P" adds C's padding, so that the next piece is aligned as a pointer.
_TAIL = struct.Struct(f"@i{StepConstants.COUNT}f0P")


class GradStats(NamedTuple):
    """The sum of squares of a tensor's finite elements, in fp64, and the number of its non-finite elements."""

    sum_of_squares: float
    nonfinite_count: int


def adam_step(
    pieces: Sequence[Piece], *, step: int, grad_scale: float, grad_bound: float = math.inf, native: bool | None = None
) -> int | Tensor:
    """Step every piece in place by the rule of its hyper-parameters.

    An element whose scaled gradient is not finite keeps every bit of its weight and states; with moments in 8 bits its
    whole block does.

    Arguments:
        pieces: all on the CPU, or all on one other device.
        step: number of the optimizer step, counted from 1.
        grad_scale: factor of every gradient.
        grad_bound: bound of the absolute value of every gradient element after scaling.
        native: None uses native code if available, False the Python fallback, True requires native code.

    Returns:
        The number of elements with a non-finite scaled gradient, over all pieces. For pieces on a device other than the
        CPU it is a tensor there (int64 []), so that the host does not wait.

    Raises:
        ValueError: the tensors of a piece do not fit each other; nothing has been written.
        ExtensionError: `native` is True but native code is not available.
    """
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    # Most pieces share one hyper-parameter object; hashing its values would dominate the cost of this function.
    hypers = {id(piece.hyper): piece.hyper for piece in pieces}
    constants = {key: hyper.constants(step=step, grad_scale=grad_scale) for key, hyper in hypers.items()}
    if grad_bound != math.inf:
        constants = {key: replace(each, grad_bound=grad_bound) for key, each in constants.items()}
    table = _table(pieces, {key: _TAIL.pack(hypers[key].rule, *each.floats()) for key, each in constants.items()})
    elsewhere = {piece.param.device for piece in pieces if not piece.param.is_cpu}
    if len(elsewhere) == 1 and native is not False and all(not piece.param.is_cpu for piece in pieces):
        (device,) = elsewhere
        if kernels.available(device):
            return kernels.adam_step(table, len(pieces), device)
    if elsewhere or not _runtime.uses_native(native):
        left_out = sum(reference.adam_step(piece, constants[id(piece.hyper)]) for piece in pieces)
        return left_out if elsewhere else int(left_out)
    nonfinite = ctypes.c_uint64()
    _runtime.call("infinity_adam_step", table, ctypes.c_uint64(len(pieces)), ctypes.byref(nonfinite))
    return nonfinite.value


def grad_stats(tensors: Sequence[Tensor], native: bool | None = None) -> list[GradStats]:
    """Return sum of squares and count of non-finite elements of each tensor.

    Arguments:
        tensors: [numel] fp32, bf16 or fp16, contiguous, all on the CPU or all on one other device, for which the host
            waits once.
        native: as in `adam_step`.

    The order of additions depends on the tensor alone: blocks of 4096 elements from its start, in a block 16 fp64 lanes
    (index % 16) added pairwise, blocks added in order.
    """
    if tensors and not tensors[0].is_cpu:
        return [GradStats(*pair) for pair in kernels.read_grad_stats(tensors)]
    for index, tensor in enumerate(tensors):
        check_tensor(f"tensors[{index}]", tensor, FLOATS, tensor.numel())
    if not _runtime.uses_native(native):
        return [GradStats(*reference.grad_stats(tensor)) for tensor in tensors]
    count = len(tensors)
    spans = (_SpanC * count)(*(_SpanC(t.data_ptr(), t.numel(), DTYPE_CODES[t.dtype]) for t in tensors))
    sums, nonfinite = (ctypes.c_double * count)(), (ctypes.c_uint64 * count)()
    _runtime.call("infinity_adam_stats", spans, ctypes.c_uint64(count), sums, nonfinite)
    return [GradStats(*pair) for pair in zip(sums, nonfinite, strict=True)]


def split(
    values: Tensor, native: bool | None = None, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Split fp32 values on the CPU into bf16, rounded to nearest with ties away from zero, and an int16 remainder.

    `join` restores the bits of every fp32 value but a NaN's: each is stored as 0x7FC00000, so that the bf16 part shows
    it. The bf16 part alone is infinite for a finite value nearest to a bf16 infinity.

    Arguments:
        values: [numel] fp32, contiguous.
        out: ([numel] bf16, [numel] int16) to write; allocated if None.
        native: as in `adam_step`.

    Returns:
        (bf16, int16): `out`, or new tensors of the shape of `values`.
    """
    check_tensor("values", values, (_FP32,), values.numel())
    if out is None:
        param = torch.empty(values.shape, dtype=_BF16, device=CPU)
        out = param, torch.empty(values.shape, dtype=_INT16, device=CPU)
    param, remainder = out
    check_tensor("out[0]", param, (_BF16,), values.numel())
    check_tensor("out[1]", remainder, (_INT16,), values.numel())
    if not _runtime.uses_native(native):
        for target, made in zip(out, reference.split(values), strict=True):
            target.copy_(made)
        return out
    numel = ctypes.c_uint64(values.numel())
    _runtime.call("infinity_adam_split", address(values), address(param), address(remainder), numel)
    return param, remainder


def join(param: Tensor, remainder: Tensor, native: bool | None = None) -> Tensor:
    """Return the fp32 values of which `split` made `param` (bf16) and `remainder` (int16), bit for bit."""
    check_tensor("param", param, (_BF16,), param.numel())
    check_tensor("remainder", remainder, (_INT16,), param.numel())
    if not _runtime.uses_native(native):
        return reference.join(param, remainder)
    values = torch.empty(param.shape, dtype=_FP32, device=CPU)
    numel = ctypes.c_uint64(param.numel())
    _runtime.call("infinity_adam_join", address(param), address(remainder), address(values), numel)
    return values


def accumulate(dst: Tensor, src: Tensor, scale: float = 1.0) -> None:
    """Add scale * src to `dst` in place; product and sum are rounded to fp32, the result to nearest even.

    dst, src: [numel] fp32, bf16 or fp16 on the CPU, contiguous.
    """
    check_tensor("dst", dst, FLOATS, dst.numel())
    check_tensor("src", src, FLOATS, dst.numel())
    # Product and sum are separate operations, because torch's fused one rounds differently in vector bodies and tails.
    flat_dst, flat_src = dst.view(-1), src.view(-1)
    for begin in range(0, dst.numel(), _ACCUMULATE_NUMEL):
        part = flat_dst[begin : begin + _ACCUMULATE_NUMEL]
        addend = flat_src[begin : begin + _ACCUMULATE_NUMEL].float()
        if scale != 1.0:
            addend = addend * scale
        part.copy_(part.float().add_(addend))


class _Runtime:
    """The loaded library and its pool of threads. There is one in a process; a forked child gets no pool."""

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
        """Call `function`(pool, isa, *arguments) of the library; the lock serializes calls."""
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

    def set_threads(self, count: int | None, cores: Sequence[int] | None = None) -> None:
        """Use `count` threads from now on, the caller's included; None: as many as the cores and their quota allow.

        cores: cores of the threads, and of the caller during a call; None: those that the first caller may use.
        `infinity.ops.cores.share_of_cores` gives each rank its own. Raises ValueError for a core outside of the
        process's affinity mask.
        """
        if count is not None and count < 1:
            raise ValueError(f"at least 1 thread is needed, got {count}")
        if cores is not None and (not cores or not set(cores) <= set(allowed_cores())):
            raise ValueError(f"cores {list(cores)} are not among those of this process: {allowed_cores()}")
        self.shutdown_threads()
        self._threads, self._cores = count, tuple(sorted(set(cores or ())))

    def shutdown_threads(self) -> None:
        """End the pool's threads. The next call starts them again."""
        with self._lock:
            if self._pool is not None:
                build.require("adam").infinity_adam_pool_delete(self._pool)
                self._pool = None

    def simds(self) -> list[str]:
        """Return the instruction sets that `set_simd` accepts on this machine."""
        library = build.load("adam")
        if library is None:
            return []
        return [name for code, name in enumerate(_ISAS) if library.infinity_adam_isa_supported(ctypes.c_int32(code))]

    def set_simd(self, name: str | None) -> None:
        """Force an instruction set ("scalar", "avx2", "avx512", "neon"); None: the best one.

        Raises ValueError for an instruction set that this machine does not have.
        """
        if name is not None and name not in self.simds():
            raise ValueError(f"instruction set {name!r} does not run here: there are {', '.join(self.simds())}")
        self._isa = None if name is None else _ISAS.index(name)

    def simd(self) -> str:
        """Return the instruction set in use: one that `set_simd` accepts, or "reference" without native code."""
        library = build.load("adam")
        if library is None:
            return "reference"
        return _ISAS[library.infinity_adam_isa_best() if self._isa is None else self._isa]

    def forget(self) -> None:
        # A forked child has no threads of the pool, and its locks may be held for ever, so the pool is abandoned.
        self._lock = threading.Lock()
        self._pool = None


_runtime = _Runtime()
os.register_at_fork(after_in_child=_runtime.forget)
set_threads, shutdown_threads = _runtime.set_threads, _runtime.shutdown_threads
set_simd, simd, simds = _runtime.set_simd, _runtime.simd, _runtime.simds


class _SpanC(ctypes.Structure):
    # struct Span of csrc/adam/types.h
    _fields_ = (("data", ctypes.c_void_p), ("numel", ctypes.c_uint64), ("dtype", ctypes.c_int32))


def _table(pieces: Sequence[Piece], tails: Mapping[int, bytes]) -> bytes:
    """Return an array of struct Piece; raise ValueError if the tensors of a piece do not fit each other.

    tails: id of a piece's hyper-parameters -> packed tail.

    A step has hundreds of pieces, so the common kinds are checked inline, and only other pieces by a function.
    """
    records = []
    for index, piece in enumerate(pieces):
        param, grad, m, v, rest = piece.param, piece.grad, piece.exp_avg, piece.exp_avg_sq, piece.remainder
        numel, code = param.numel(), DTYPE_CODES.get(grad.dtype)
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
            and piece.scales is None
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
            storage, code = _check_piece(f"pieces[{index}]", piece), DTYPE_CODES[grad.dtype]
        others = (_pointer(v), _pointer(rest), _pointer(piece.master))
        codes = (0, 0, 0) if piece.scales is None else (*map(_pointer, piece.scales), maps_address(param.device))
        head = _HEAD.pack(param.data_ptr(), grad.data_ptr(), m.data_ptr(), *others, *codes, numel, storage, code)
        records.append(head + tails[id(piece.hyper)])
    return b"".join(records)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check_piece(name: str, piece: Piece) -> int:
    """Return the storage code of a piece; raise ValueError if its tensors do not fit each other."""

    def check(field: str, *dtypes: torch.dtype) -> None:
        tensor = getattr(piece, field)
        if tensor is not None:
            check_tensor(f"{name}.{field}", tensor, dtypes, piece.param.numel(), piece.param.device)

    check("param", *FLOATS)
    check("grad", *FLOATS)
    coded = piece.hyper.rule is Rule.CODED_ADAMW
    check("exp_avg", torch.uint8 if coded else _FP32)
    if piece.hyper.rule.two_states != (piece.exp_avg_sq is not None):
        kept = "two states" if piece.hyper.rule.two_states else "one state"
        raise ValueError(f"{name}.exp_avg_sq: {piece.hyper.rule.name} keeps {kept} an element")
    check("exp_avg_sq", torch.uint8 if coded else _FP32)
    if coded != (piece.scales is not None):
        raise ValueError(f"{name}.scales: {piece.hyper.rule.name} has {'two' if coded else 'none'}")
    for scale in piece.scales or ():
        blocks = -(-piece.param.numel() // BLOCK_NUMEL)
        check_tensor(f"{name}.scales", scale, (_FP32,), blocks, piece.param.device)
    if piece.remainder is not None and piece.master is not None:
        raise ValueError(f"{name}.remainder and {name}.master exclude each other")
    if piece.remainder is not None:
        check("param", _BF16)
        check("remainder", _INT16)
        return _SPLIT
    if piece.master is not None:
        check("param", torch.float16, _BF16)
        check("master", _FP32)
        return _MASTER_BFLOAT if piece.param.dtype == _BF16 else _MASTER_HALF
    if piece.param.dtype != _FP32:
        raise ValueError(f"{name}.param is {piece.param.dtype}: a 16-bit param needs a remainder or a master")
    return _PLAIN
