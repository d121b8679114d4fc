"""A simulated accelerator: a torch device of type "simulated" whose streams are threads. See README.md.

    accelerator.load()                                  once, before the first backward of the process
    accelerator.configure(seed=3, delays=True)          seeded delays: the order of streams differs by the seed
    x = torch.ones(8, device="simulated")
    torch.accelerator.synchronize()
    assert not accelerator.races()

`load` raises Unavailable, with the reason, on a machine that cannot build it. It makes "simulated" the process's
accelerator, so a test calls it in a process of its own (`isolated` in tests/support/accelerator/process.py).
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.accelerator import device_module
from tests.support.accelerator.build import Unavailable, library

__all__ = [
    "Delays", "Operation", "Race", "Unavailable", "call", "configure", "fail_at", "host_access", "is_loaded", "load",
    "log", "memory_stats", "races", "register", "reset", "unregister",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Delays:
    """The longest delay, in seconds, before a copy, an event's recording or wait, and one of four other operations."""

    copy: float = 0.02
    event: float = 0.02
    operator: float = 0.001


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the log: work that a stream was given, or a stop of the host.

    kind: "operator", "copy up", "copy down", "copy across", "copy" (within a device), "record", "wait", "free", and of
    the host "host wait" and "host access". waits: ids of the operations whose end this one waits for, besides those of
    its own stream. device and stream are -1 where there is none. line: of the program, where it is known.
    """

    id: int
    kind: str
    device: int
    stream: int
    name: str
    nbytes: int
    line: str
    waits: tuple[int, ...]

    def __str__(self) -> str:
        place = f" on simulated:{self.device} stream {self.stream}" if self.stream >= 0 else " on the host"
        return f"{self.name} ({self.kind} {self.id}{place}{', ' + self.line if self.line else ''})"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to the same bytes that no edge orders."""

    first: Operation
    second: Operation
    first_writes: bool
    second_writes: bool
    nbytes: int
    where: str

    def __str__(self) -> str:
        verbs = ["writes" if each else "reads" for each in (self.first_writes, self.second_writes)]
        return f"{self.first} {verbs[0]} and {self.second} {verbs[1]} {self.nbytes} bytes of {self.where}"


_lib: ctypes.CDLL | None = None
_CALL = ctypes.CFUNCTYPE(None)
# Functions that streams have still to run, and those that have run, whose last lines may still be running.
_calls: dict[int, Any] = {}
_called: list[int] = []
_numbers = itertools.count()


def is_loaded() -> bool:
    """Whether this process has the device."""
    return _lib is not None


def load() -> None:
    """Make "simulated" the accelerator of this process; Raise Unavailable if it cannot be built."""
    global _lib
    if _lib is not None:
        return
    path = library()
    torch.ops.load_library(str(path))
    lib = ctypes.CDLL(str(path))
    _declare(lib)
    torch.utils.rename_privateuse1_backend("simulated")
    module = device_module.make(lib)
    torch._register_device_module("simulated", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    lib.simulated_catch_faults()
    atexit.register(lib.simulated_close)
    _lib = lib
    _start_autograd(lib)
    configure()
    reset()


def _start_autograd(lib: ctypes.CDLL) -> None:
    """Let autograd make its device threads, which it does once, for as many devices as there may ever be."""
    configure(devices=lib.simulated_devices_max())
    weight = torch.ones(1, device="simulated", requires_grad=True)
    try:
        (weight * 2).backward()
    except RuntimeError as error:
        raise RuntimeError("load() must come before the first backward of the process") from error


def configure(
    *,
    seed: int = 0,
    delays: Delays | bool = False,
    devices: int = 1,
    limit: int | None = None,
    poison: bool = True,
    lines: bool = True,
) -> None:
    """Set all of the simulation's properties; what is not given takes its default.

    delays: True for those of `Delays`. devices: their number. limit: reserved bytes of each device. poison: fill freed
    and fresh memory with NaN. lines: note the program's line with every operation. Kernels use as many
    threads as torch.get_num_threads() says now, so that sums have the CPU's bits.
    """
    lib = _loaded()
    longest = delays if isinstance(delays, Delays) else Delays() if delays else Delays(0, 0, 0)
    microseconds = [int(each * 1e6) for each in (longest.copy, longest.event, longest.operator)]
    lib.simulated_configure(seed, *microseconds, poison, lines, devices, limit or 0)
    torch.get_device_module("simulated").count = devices


def reset() -> None:
    """Wait for all devices, give back unused memory, forget the log, the races and the planned failure."""
    _loaded().simulated_reset()


def fail_at(nth: int) -> None:
    """Make the nth device allocation from now on fail with torch.OutOfMemoryError; 0 for none."""
    _loaded().simulated_fail_at(nth)


def races() -> list[Race]:
    """Pairs of accesses without an edge, as they were found."""
    found = json.loads(_loaded().simulated_races())
    return [
        Race(
            first=_operation(each["first"]),
            second=_operation(each["second"]),
            first_writes=each["first_writes"],
            second_writes=each["second_writes"],
            nbytes=each["end"] - each["begin"],
            where=each["where"],
        )
        for each in found
    ]


def log() -> list[Operation]:
    """The operations in the order in which the host queued them, since the last reset. It grows until the next."""
    return [_operation(each) for each in json.loads(_loaded().simulated_log())]


def memory_stats(device: int = 0) -> dict[str, int]:
    """Bytes (allocated, reserved, each with its _peak), blocks, segments, allocations, failures and the limit."""
    stats: dict[str, int] = json.loads(_loaded().simulated_stats(device))
    return stats


def register(pointer: int, nbytes: int) -> str | None:
    """Pin host memory; return the reason of a refusal."""
    reason = _loaded().simulated_register(pointer, nbytes)
    return None if reason is None else reason.decode()


def unregister(pointer: int) -> str | None:
    """Undo `register`; return the reason of a refusal. A copy that may still run makes a race."""
    reason = _loaded().simulated_unregister(pointer)
    return None if reason is None else reason.decode()


def host_access(tensor: Tensor, *, write: bool, name: str = "host access") -> None:
    """Declare that the host now reads or writes the bytes of a contiguous CPU tensor, for the checker."""
    assert tensor.is_cpu and tensor.is_contiguous()
    _loaded().simulated_host_access(tensor.data_ptr(), tensor.nbytes, write, name.encode())


def call(function: Callable[..., None], *, reads: Sequence[Tensor], writes: Sequence[Tensor], name: str) -> None:
    """Queue a function on the current stream, as CUDA's host functions are: it runs on the stream's thread, once the
    stream comes to it, with CPU tensors over the memory of `reads` and `writes` (contiguous, on the device).
    """
    lib = _loaded()
    tensors = [*reads, *writes]
    stream = torch.accelerator.current_stream(tensors[0].device)

    # Of the memory that they have now: what the program does with the tensors meanwhile does not matter.
    views = [_host_view(tensor) for tensor in tensors]

    def run() -> None:
        with torch.no_grad():
            function(*views)
        _called.append(number)

    number = next(_numbers)
    kept = _calls[number] = _CALL(run)
    for old in _called[:-64]:
        _calls.pop(old, None)
    del _called[:-64]
    ranges = [
        value
        for index, tensor in enumerate(tensors)
        for value in (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, index >= len(reads))
    ]
    array = (ctypes.c_uint64 * len(ranges))(*ranges)
    lib.simulated_call(tensors[0].device.index, stream.stream_id, name.encode(), array, len(tensors), kept)


def _host_view(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_char * tensor.nbytes).from_address(_loaded().simulated_host_view(tensor.data_ptr()))
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _operation(fields: dict[str, Any]) -> Operation:
    return Operation(**{**fields, "waits": tuple(fields["waits"])})


def _loaded() -> ctypes.CDLL:
    assert _lib is not None, "accelerator.load() comes first"
    return _lib


def _declare(lib: ctypes.CDLL) -> None:
    number, flag, text, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p
    size = ctypes.c_uint64
    lib.simulated_configure.argtypes = [size, size, size, size, flag, flag, flag, number]
    lib.simulated_configure.restype = None
    lib.simulated_fail_at.argtypes = [number]
    lib.simulated_register.argtypes = [pointer, size]
    lib.simulated_unregister.argtypes = [pointer]
    lib.simulated_host_access.argtypes = [pointer, size, flag, text]
    lib.simulated_call.argtypes = [flag, number, text, pointer, flag, _CALL]
    lib.simulated_call.restype = None
    lib.simulated_host_view.argtypes = [size]
    lib.simulated_host_view.restype = size
    lib.simulated_seed.argtypes = [flag, size]
    lib.simulated_stats.argtypes = [flag]
    for name in ("register", "unregister", "log", "races", "stats"):
        getattr(lib, f"simulated_{name}").restype = text
