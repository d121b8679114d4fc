"""Memory that a forked child does not inherit: see [Note: forks] in `infinity.memory.resizable_buffer`."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infinity.memory.ledger import Ledger
from infinity.memory.resizable_buffer import ElasticBuffer, let_inherit, page_aligned
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import HostMemory
from infinity.ops.aio import Queue
from tests.support.forked import in_child

NBYTES = 64 << 20
CPU = torch.device("cpu")


def private_dirty_nbytes() -> int:
    """Memory that this process alone has, copies that a fork has made among it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("Private_Dirty")))


def of_host() -> Tensor:
    return HostMemory(Device(CPU), pin=True, ledger=Ledger()).allocate(NBYTES)


def of_device() -> Tensor:
    return Device(CPU).empty(NBYTES, torch.uint8)


def of_elastic() -> Tensor:
    buffer = ElasticBuffer(NBYTES, torch.uint8, CPU)
    buffer.take()
    return buffer.tensor


def test_a_child_has_no_copy_of_memory_that_io_uring_has_pinned():
    """A fork copies pinned pages at once, before the child has done anything."""
    buffer = of_host().fill_(1)
    with Queue() as queue:
        if queue.backend != "io_uring" or not queue.register(buffer):
            pytest.skip("io_uring does not take memory here")
        copied = in_child(private_dirty_nbytes)
    assert copied < 16 << 20, f"{copied / 1e6:.0f} MB"
    assert int(buffer.sum()) == NBYTES


@pytest.mark.parametrize("make", [of_host, of_device, of_elastic])
def test_what_the_parent_writes_beside_a_child_is_not_copied(make: Callable[[], Tensor]):
    """The child may live as long as the run, as a worker does."""
    buffer = make().fill_(1)
    assert not in_child(lambda: is_inherited(buffer))
    let_inherit(buffer)
    assert in_child(lambda: (is_inherited(buffer), int(buffer[-1]))) == (True, 1)


def is_inherited(buffer: Tensor) -> bool:
    """Whether this process can read the memory of `buffer`, by the kernel's word."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= buffer.data_ptr() < end:
            return line.split()[1].startswith("r")
    return False


def test_a_stray_read_in_a_child_ends_it_and_gives_no_zeros():
    buffer = of_host().fill_(1)

    def act() -> int:
        # Not a failure of this test: no report of it.
        faulthandler.disable()
        return int(buffer[0])

    with pytest.raises(AssertionError, match=f"ended with -{signal.SIGSEGV.value}"):
        in_child(act)


def test_a_child_that_frees_an_engines_memory_frees_nothing_else():
    """Where the mapping were missing in the child, its own allocations would lie there and go with the engine's."""
    held = [of_host().fill_(1)]

    def act() -> int:
        own = [mmap.mmap(-1, NBYTES) for _ in range(4)]
        held.clear()
        gc.collect()
        for each in own:
            each[-1] = 7
        return sum(each[-1] for each in own)

    assert in_child(act) == 28


def test_other_pages_are_inherited():
    buffer = page_aligned(4096).fill_(5)
    assert in_child(lambda: int(buffer[0])) == 5
