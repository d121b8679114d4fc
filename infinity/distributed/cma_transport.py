"""Exchanges between ranks of one host without sockets: each rank copies from the others' memory.

gloo sends through the loopback interface: a thread on each side copies bytes into the kernel and out again in packets.
For two ranks of one host the kernel can copy from one process into the other directly (process_vm_readv, "cross memory
attach" in MPI libraries; man 2 process_vm_readv), at a third of the processor time.

A rank tells the others where its bytes lie; each copies what it needs and confirms. Only these two messages go through
gloo, so a rank that fails or ends is noticed as before. The kernel requires the same user. If Yama restricts debuggers
(/proc/sys/kernel/yama/ptrace_scope 1) it also requires a permission, which a rank grants to processes with the same
parent, such as torchrun. A trial at the start decides; if it fails, bytes go through gloo.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.log import logger

# Smaller rows go through gloo: there one message is faster than two.
SMALLEST_NBYTES = 256 << 10
# The watchdog ends a wait of this thread by breaking the group.
_FOR_EVER = timedelta(days=365)
_CLOSE_SECONDS = 2.0
_SECRET_NBYTES = 16
_PR_SET_PTRACER = 0x59616D61
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Piece(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = [ctypes.c_int, *[ctypes.POINTER(_Piece), ctypes.c_ulong] * 2, ctypes.c_ulong]


def copy_from(pid: int, source: int, target: int, nbytes: int) -> None:
    """Copy `nbytes` at address `source` of process `pid` to address `target` of this one.

    Releases Python's lock meanwhile. OSError if the kernel refuses.
    """
    if _readv is None:
        raise OSError("this system has no process_vm_readv")
    done = 0
    while done < nbytes:
        here, there = (_Piece(address + done, nbytes - done) for address in (target, source))
        moved = _readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if moved <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process_vm_readv of process {pid}: {os.strerror(number)}")
        done += moved


class Introduction:
    """What a rank tells others so that they can try to read its memory, and its trial of theirs."""

    def __init__(self, *, wanted: bool) -> None:
        self._secret = ctypes.create_string_buffer(os.urandom(_SECRET_NBYTES), _SECRET_NBYTES)
        self._host = ""
        self.reason = "cross_memory_attach is false"
        if wanted:
            with contextlib.suppress(OSError):
                self._host = _BOOT.read_text().strip()
            self.reason = "" if self._host and _readv is not None else "this system has no process_vm_readv"
            _permit_siblings()

    @property
    def said(self) -> tuple[str, int, int, str]:
        """What to tell every rank: host, process, address of a secret, and the secret."""
        secret = "" if self.reason else self._secret.raw.hex()
        return self._host, os.getpid(), ctypes.addressof(self._secret), secret

    def readable(self, said: Sequence[Any]) -> int | None:
        """Return the process that has introduced itself so, if its memory can be read from here; else None.

        In containers of one host a process number may mean different processes, so the secret is compared.
        """
        host, pid, address, secret = said
        if self.reason or not secret or host != self._host:
            return None
        found = ctypes.create_string_buffer(_SECRET_NBYTES)
        try:
            copy_from(pid, address, ctypes.addressof(found), _SECRET_NBYTES)
        except OSError as error:
            self.reason = str(error)
            return None
        if found.raw.hex() != secret:
            self.reason = f"process {pid} is another one here"
            return None
        return int(pid)


def _permit_siblings() -> None:
    """Let processes with this one's parent read its memory, if Yama's scope is 1; scopes 2 and 3 permit nothing."""
    with contextlib.suppress(OSError, ValueError):
        if int(_YAMA.read_text()) == 1:
            _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def acquaint(introductions: Sequence[Sequence[Any]], rank: int, mine: Introduction) -> dict[int, int]:
    """Return the process of each other rank whose memory can be read from here, by rank."""
    found = {other: mine.readable(said) for other, said in enumerate(introductions) if other != rank}
    return {other: pid for other, pid in found.items() if pid is not None}


def log_transport(pids: Mapping[int, int], reasons: Sequence[str]) -> None:
    """Log how ranks of this host exchange bytes."""
    if pids:
        logger.info("gathers and reductions: from the memory of %d other rank(s) of this host", len(pids))
    elif reason := next(filter(None, reasons), ""):
        logger.info("gathers and reductions: through sockets (%s)", reason)


@dataclass(slots=True)
class _Row:
    """The exchange with one other rank."""

    member: int
    pid: int
    row: Tensor
    # Address and number of the other rank's bytes, once `coming` is over. `taken` is over once it has copied this
    # rank's.
    place: Tensor
    coming: Any
    taken: Any
    sending: Any


class Swap:
    """Rows in flight, with the interface of torch.distributed's works."""

    def __init__(self, members: Any, limit_seconds: float, *, place_tag: int, taken_tag: int) -> None:
        self._members = members
        self._limit_seconds = limit_seconds
        self._place_tag, self._taken_tag = place_tag, taken_tag
        self._rows: list[_Row] = []
        self._over = threading.Event()
        self._error: BaseException | None = None

    def add(self, member: int, pid: int, row: Tensor, part: Tensor) -> None:
        """Tell a member where its `part` lies, and receive where this rank's `row` lies."""
        group, theirs = self._members, torch.zeros(2, dtype=torch.int64, device="cpu")
        mine = torch.tensor([part.data_ptr(), part.nbytes], device="cpu")
        self._rows.append(
            _Row(
                member, pid, row, theirs,
                coming=dist.irecv(theirs, group=group, group_src=member, tag=self._place_tag),
                taken=dist.irecv(torch.zeros_like(theirs[:1]), group=group, group_src=member, tag=self._taken_tag),
                sending=dist.isend(mine, group=group, group_dst=member, tag=self._place_tag),
            )
        )  # fmt: skip

    def run(self) -> None:
        """Copy all rows; called on the reader's thread."""
        try:
            telling: list[Any] = []
            for row in self._rows:
                row.coming.wait(_FOR_EVER)
                source, nbytes = row.place.tolist()
                if nbytes != row.row.nbytes:
                    raise RuntimeError(f"rank {row.member} has {nbytes} bytes where {row.row.nbytes} are expected")
                copy_from(row.pid, source, row.row.data_ptr(), nbytes)
                done = torch.ones(1, dtype=torch.int64, device="cpu")
                telling.append(dist.isend(done, group=self._members, group_dst=row.member, tag=self._taken_tag))
            for row, told in zip(self._rows, telling, strict=True):
                for work in (row.sending, row.taken, told):
                    work.wait(_FOR_EVER)
        except BaseException as error:
            self._error = error
        self._rows = []
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        if not self._over.wait(self._limit_seconds):
            raise RuntimeError(f"Timed out after {self._limit_seconds:.0f} s: ranks of this host have not met")
        if isinstance(self._error, OSError):
            raise RuntimeError(f"{self._error}; cross_memory_attach: false sends through sockets") from self._error
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


class RowCopier:
    """A thread that copies rows from other ranks' memory, in the order in which a group's collectives were started.

    That order is the same on every rank, so ranks never wait for each other in a circle.
    """

    def __init__(self, members: Any, pids: Mapping[int, int], limit_seconds: float) -> None:
        """members: torch's process group. pids: by index in it, the processes that can read each other's memory."""
        self.pids = dict(pids)
        self._members = members
        self._limit_seconds = limit_seconds
        self._jobs: queue.SimpleQueue[Swap | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def reads(self, member: int, row: Tensor) -> bool:
        """Return whether a row of a member is copied from its memory; the member decides the same for this size."""
        return member in self.pids and row.nbytes >= SMALLEST_NBYTES

    def swap(
        self, rows: Sequence[Tensor] | Tensor, parts: Sequence[Tensor] | Tensor, others: Sequence[int], *,
        place_tag: int, taken_tag: int,
    ) -> Swap:  # fmt: skip
        """Begin to copy `rows[other]` from each of the others, and let it copy `parts[other]`.

        place_tag, taken_tag: the tags of the two messages of each exchange.
        """
        swap = Swap(self._members, self._limit_seconds, place_tag=place_tag, taken_tag=taken_tag)
        for other in others:
            swap.add(other, self.pids[other], rows[other], parts[other])
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-reader", daemon=True)
            self._thread.start()
        self._jobs.put(swap)
        return swap

    def close(self) -> None:
        """End the thread. Waits only a moment: the thread may be in a wait that ends with the group."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (swap := self._jobs.get()) is not None:
            swap.run()
            del swap
