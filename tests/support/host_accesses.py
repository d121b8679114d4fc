"""What the engine's CPU code reads and writes, declared to the checker of the simulated accelerator.

    with host_accesses_are_declared():
        train(...)

The checker sees what streams do with pinned memory, not what the host does there. So the calls by which the engine
computes in CPU memory or moves it to a drive declare it: optimizer steps, norms, copies and sums on the CPU, reads and
writes of NVMe. Both ends of an access are declared, because the device may come in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from infinity.base.transfer import Transfer
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.nvme import NvmeTier
from infinity.ops.rules import Piece
from infinity.optim import update_rules
from infinity.step import norms
from tests.support import accelerator


@contextmanager
def host_accesses_are_declared() -> Iterator[None]:
    """A block in which every engine of the process declares them. The simulated accelerator must be loaded."""
    with ExitStack() as patches:
        for owner, name, declaring in (
            (update_rules, "adam_step", _adam_step),
            (norms, "grad_stats", _grad_stats),
            (Device, "copy", _copy),
            (Device, "add", _add),
            (NvmeTier, "read", _nvme_read),
            (NvmeTier, "write", _nvme_write),
        ):
            patches.enter_context(mock.patch.object(owner, name, declaring(getattr(owner, name))))
        yield


def _access(tensors: Sequence[Tensor | None], *, write: bool, name: str) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.is_cpu and tensor.is_contiguous() and tensor.numel():
            accelerator.host_access(tensor, write=write, name=name)


@contextmanager
def _accessing(name: str, read: Sequence[Tensor | None], written: Sequence[Tensor | None] = ()) -> Iterator[None]:
    _access(read, write=False, name=name)
    _access(written, write=True, name=name)
    yield
    _access(read, write=False, name=name)
    _access(written, write=True, name=name)


def _adam_step(step: Callable[..., Any]) -> Callable[..., Any]:
    def declared(pieces: Sequence[Piece], **options: Any) -> Any:
        gradients = [piece.grad for piece in pieces]
        states = [
            tensor
            for piece in pieces
            for tensor in (piece.param, piece.exp_avg, piece.exp_avg_sq, piece.remainder, piece.master)
        ]
        with _accessing("optimizer step", gradients, states):
            return step(pieces, **options)

    return declared


def _grad_stats(stats: Callable[..., Any]) -> Callable[..., Any]:
    def declared(tensors: Sequence[Tensor], *options: Any) -> Any:
        with _accessing("norm", tensors):
            return stats(tensors, *options)

    return declared


def _copy(copy: Callable[..., Transfer]) -> Callable[..., Transfer]:
    def declared(self: Device, target: Tensor, source: Tensor) -> Transfer:
        with _accessing("copy on the CPU", [source], [target]):
            return copy(self, target, source)

    return declared


def _add(add: Callable[..., Transfer]) -> Callable[..., Transfer]:
    def declared(self: Device, target: Tensor, source: Tensor, *options: Any) -> Transfer:
        with _accessing("sum on the CPU", [source], [target]):
            return add(self, target, source, *options)

    return declared


def _nvme_read(read: Callable[..., Transfer]) -> Callable[..., Transfer]:
    def declared(self: NvmeTier, extent: Any, buffer: Tensor, **options: Any) -> Any:
        _access([buffer], write=True, name="begin of a read from NVMe")
        return _Declaring(read(self, extent, buffer, **options), buffer, write=True)

    return declared


def _nvme_write(write: Callable[..., Transfer]) -> Callable[..., Transfer]:
    def declared(self: NvmeTier, extent: Any, buffer: Tensor, **options: Any) -> Any:
        _access([buffer], write=False, name="begin of a write to NVMe")
        return _Declaring(write(self, extent, buffer, **options), buffer, write=False)

    return declared


class _Declaring:
    """A transfer that declares its access again when its end becomes known."""

    def __init__(self, transfer: Any, buffer: Tensor, *, write: bool) -> None:
        self._transfer = transfer
        self._buffer = buffer
        self._write = write
        self._ended = False
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def done(self) -> bool:
        return self._transfer.done() and self._end()

    def wait(self) -> None:
        try:
            self._transfer.wait()
        finally:
            self._end()

    def _end(self) -> bool:
        with self._lock:
            if not self._ended:
                name = f"end of a {'read from' if self._write else 'write to'} NVMe"
                _access([self._buffer], write=self._write, name=name)
            self._ended = True
        return True
