"""CPU memory: exact sizes, whole pages, zeroed, pinned where there is an accelerator and given back."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from infinity import log
from infinity.memory.ledger import Ledger
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.tiers import pinned as host_module
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import HostMemory, trim

ROOT = Path(__file__).resolve().parents[2]


class FakeAccelerator(Device):
    """A device whose driver only keeps books. It pins at most `limit_nbytes`, at most `piece_nbytes` at a time."""

    def __init__(self, limit_nbytes: int = 1 << 60, piece_nbytes: int = 1 << 60) -> None:
        super().__init__(torch.device("cpu"))
        self.is_accelerator = True
        self.own_memory, self.pinning = True, "registration"
        self.pinned: dict[int, int] = {}
        self.asked = 0
        self.synchronized = 0
        self._limit = limit_nbytes
        self._piece = piece_nbytes

    def register(self, pointer: int, nbytes: int) -> str | None:
        self.asked += 1
        if nbytes > self._piece or sum(self.pinned.values()) + nbytes > self._limit:
            return "error 2"
        self.pinned[pointer] = nbytes
        return None

    def unregister(self, pointer: int) -> None:
        del self.pinned[pointer]

    def synchronize(self) -> None:
        self.synchronized += 1


def host(device: Device | None = None, pin: bool = True) -> HostMemory:
    return HostMemory(device or Device(torch.device("cpu")), pin=pin, ledger=Ledger())


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, (4 << 20) + 5])
def test_a_buffer_has_the_size_asked_for_and_starts_on_a_zeroed_page(nbytes):
    buffer = host().allocate(nbytes)
    assert buffer.numel() == nbytes and buffer.dtype is torch.uint8 and buffer.is_contiguous()
    assert buffer.data_ptr() % mmap.PAGESIZE == 0 and not buffer.any()
    buffer.fill_(1)


def test_memory_goes_back_to_the_system_with_the_last_reference():
    nbytes = 64 << 20
    buffer = page_aligned(nbytes).fill_(1)
    view = buffer[100:200].view(torch.int16)
    del buffer
    gc.collect()
    # A view is a reference: the mapping may not go away under it.
    assert (view == 0x0101).all()
    before = psutil.Process().memory_info().rss
    del view
    gc.collect()
    assert before - psutil.Process().memory_info().rss > nbytes * 0.9


# Prints, in MiB, by how much the heap has grown for 128 of parameters, and what of 4 and 8 comes from elsewhere
# afterwards: with a plain heap, with ours, and with ours beside what a user may have said; each in a fork.
HEAP = """
import contextlib, ctypes, os
import torch
from infinity.memory.tiers.pinned import mappings_of_their_own

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used free f".split()]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Heap

for ours, said in (False, {}), (True, {}), (True, {"MALLOC_MMAP_THRESHOLD_": "1"}), (True, {"GLIBC_TUNABLES": TUNED}):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        os.environ.update(said)
        break
else:
    os._exit(0)
torch.empty(7 << 20)  # 28 MiB: what is smaller comes from the heap from here on
before = library.mallinfo2()
with mappings_of_their_own() if ours else contextlib.nullcontext():
    parameters = [torch.empty(1 << 20) for _ in range(32)]
built = library.mallinfo2().arena - before.arena
del parameters
before = library.mallinfo2()
next_ones = torch.empty(1 << 20), torch.empty(1 << 21)
print(built >> 20, library.mallinfo2().mapped - before.mapped >> 20)
""".replace("TUNED", repr(f"glibc.malloc.mmap_threshold={32 << 20}"))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33 or newer")
def test_a_model_is_built_outside_the_heap_where_it_would_leave_holes():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", HEAP], env=clean, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    plain, own, *told = [[*map(int, line.split())] for line in done.stdout.splitlines()]
    # Of what training allocates the small comes from the heap again, which is faster: of 4 and 8 MiB the first.
    assert plain[0] >= 100 and own[0] < 20 and own[1] == 8
    # Whoever tunes it keeps what they have said.
    assert [built >= 100 for built, _ in told] == [True, True]


def test_without_an_accelerator_nothing_is_pinned():
    memory = host()
    buffer = memory.allocate(4096)
    memory.release(buffer)
    memory.close()


def test_pinned_bytes_are_those_of_the_plan_rounded_to_pages():
    device = FakeAccelerator()
    memory = host(device)
    first, second = memory.allocate(5000), memory.allocate(4096)
    assert sorted(device.pinned.values()) == [4096, 8192]
    assert memory._ledger.pinned_nbytes == 3 * 4096
    memory.release(first)
    assert list(device.pinned) == [second.data_ptr()] and memory._ledger.pinned_nbytes == 4096
    memory.release(first)
    memory.close()
    assert not device.pinned and memory._ledger.pinned_nbytes == 0 and device.synchronized == 1
    memory.close()


def test_pinning_may_be_turned_off_and_nothing_is_not_pinned():
    device = FakeAccelerator()
    host(device, pin=False).allocate(4096)
    host(device).allocate(0)
    assert not device.pinned


@pytest.fixture
def warnings_said(caplog, monkeypatch):
    """The engine's warnings, of which none has been said yet."""
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger="infinity"):
        yield caplog


def test_a_driver_that_refuses_is_told_once_and_memory_stays_pageable(warnings_said):
    device = FakeAccelerator(limit_nbytes=0)
    memory = host(device)
    for _ in range(3):
        assert memory.allocate(4096).numel() == 4096
    assert device.asked == 1 and memory._ledger.pinned_nbytes == 0
    assert len(warnings_said.records) == 1
    assert (
        "error 2" in warnings_said.text
        and "not ulimit -l" in warnings_said.text
        and "results the same" in warnings_said.text
    )
    memory.close()


def test_a_driver_that_takes_no_large_piece_gets_chunks(monkeypatch, warnings_said):
    monkeypatch.setattr(host_module, "_CHUNK_NBYTES", 8192)
    device = FakeAccelerator(piece_nbytes=8192)
    memory = host(device)
    small, large = memory.allocate(8192), memory.allocate(5 * 4096)
    spans = sorted((pointer - large.data_ptr(), size) for pointer, size in device.pinned.items())
    assert {(0, 8192), (8192, 8192), (16384, 4096)} <= set(spans) and len(spans) == 4
    assert memory._ledger.pinned_nbytes == 7 * 4096 and not warnings_said.records
    memory.release(large)
    assert list(device.pinned) == [small.data_ptr()] and memory._ledger.pinned_nbytes == 8192
    memory.close()
    assert not device.pinned and memory._ledger.pinned_nbytes == 0


@pytest.mark.parametrize("limit_pages", range(7))
def test_a_limit_met_at_any_byte_leaves_whole_buffers_pinned_and_the_rest_pageable(
    limit_pages, monkeypatch, warnings_said
):
    monkeypatch.setattr(host_module, "_CHUNK_NBYTES", 4096)
    device = FakeAccelerator(limit_nbytes=limit_pages * 4096 + 17)
    memory = host(device)
    buffers = [memory.allocate(3 * 4096) for _ in range(2)]
    # No buffer is pinned in part: a copy may not cross the border.
    whole = 3 * (limit_pages // 3)
    assert sum(device.pinned.values()) == memory._ledger.pinned_nbytes == whole * 4096
    assert len(warnings_said.records) == (limit_pages < 6)
    for buffer in buffers:
        buffer.fill_(7)
        memory.release(buffer)
    assert not device.pinned and memory._ledger.pinned_nbytes == 0


def test_a_kernel_without_large_pages_is_fine(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    assert page_aligned(8 << 20).numel() == 8 << 20


def test_trim_may_be_called_any_time():
    trim()
