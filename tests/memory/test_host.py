"""CPU memory: exact sizes, whole pages, zeroed, pinned where there is an accelerator and given back."""

from __future__ import annotations

import gc
import logging
import mmap

import psutil
import pytest
import torch

from infinity import log
from infinity.memory.device import Device
from infinity.memory.host import HostMemory, page_aligned, trim
from infinity.memory.ledger import Ledger


class FakeAccelerator(Device):
    """A device whose driver only keeps books."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.is_accelerator = True
        self.pinned: dict[int, int] = {}
        self.synchronized = 0
        self._refuses = refuses

    def register(self, pointer: int, nbytes: int) -> str | None:
        if self._refuses:
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


def test_a_driver_that_refuses_is_told_once_and_memory_stays_pageable(caplog, monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log.logger, "propagate", True)
    memory = host(FakeAccelerator(refuses=True))
    with caplog.at_level(logging.WARNING, logger="infinity"):
        for _ in range(3):
            assert memory.allocate(4096).numel() == 4096
    assert len(caplog.records) == 1 and "error 2" in caplog.text and "ulimit -l" in caplog.text
    memory.close()


def test_a_kernel_without_large_pages_is_fine(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    assert page_aligned(8 << 20).numel() == 8 << 20


def test_trim_may_be_called_any_time():
    trim()


def test_on_the_cpu_a_copy_is_over_at_once():
    device = Device(torch.device("cpu"))
    target, source = device.empty(3, torch.float32), torch.arange(3.0)
    transfer = device.copy(target, source)
    assert transfer.done() and torch.equal(target, source)
    device.arrived(transfer)
    device.synchronize()
    assert device.free_nbytes() is None
    with device.scope():
        pass
