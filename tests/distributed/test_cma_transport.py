"""Ranks of one host that read each other's memory: the bytes, the order, refusals, and what happens when one fails."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any
from unittest import mock

import pytest
import torch

from infinity.distributed import cma_transport, collectives
from infinity.distributed.cma_transport import Introduction, acquaint, copy_from
from infinity.distributed.groups import ProcessGroups, detect
from infinity.errors import DesyncError

WORKS = cma_transport._readv is not None
pytestmark = pytest.mark.skipif(not WORKS, reason="this system has no process_vm_readv")


def test_bytes_are_copied_and_a_refusal_says_what_the_kernel_says():
    source = torch.arange(100_000, dtype=torch.int64)
    target = torch.zeros_like(source)
    copy_from(os.getpid(), source.data_ptr(), target.data_ptr(), source.nbytes)
    assert torch.equal(source, target)
    copy_from(os.getpid(), source.data_ptr(), target.data_ptr(), 0)
    with pytest.raises(OSError, match="process_vm_readv of process") as refused:
        copy_from(os.getpid(), 16, target.data_ptr(), 8)
    assert refused.value.errno == errno.EFAULT
    with pytest.raises(OSError, match="process_vm_readv") as refused:
        copy_from(2**22 + 1, source.data_ptr(), target.data_ptr(), 8)
    assert refused.value.errno == errno.ESRCH


def test_a_rank_is_known_by_its_secret_not_by_its_number():
    mine, other = Introduction(wanted=True), Introduction(wanted=True)
    host, pid, address, secret = other.said
    assert pid == os.getpid() and secret not in mine.said
    assert acquaint([mine.said, other.said], 0, mine) == {1: pid}
    for said, reason in (
        ((host, pid, address, "00" * 16), "is another one here"),
        ((host, 2**22 + 1, address, secret), "No such process"),
    ):
        asking = Introduction(wanted=True)
        assert asking.readable(said) is None and reason in asking.reason
    asking = Introduction(wanted=True)
    assert asking.readable(("elsewhere", pid, address, secret)) is None and asking.reason == ""
    unwilling = Introduction(wanted=False)
    assert acquaint([mine.said, unwilling.said], 0, mine) == {} == acquaint([mine.said, unwilling.said], 1, unwilling)
    assert "cross_memory_attach" in unwilling.reason


def test_how_ranks_exchange_bytes_is_said_with_the_reason(caplog):
    with caplog.at_level("INFO", logger="infinity"):
        cma_transport.log_transport({1: 7, 2: 8}, ["", "", ""])
        cma_transport.log_transport({}, ["", "process_vm_readv of process 7: Operation not permitted"])
        cma_transport.log_transport({}, ["", ""])
    first, second = (record.getMessage() for record in caplog.records)
    assert "memory of 2 other rank(s)" in first
    assert "through sockets (process_vm_readv of process 7: Operation not permitted)" in second


def test_only_what_has_the_same_parent_is_permitted_and_only_where_yama_asks(tmp_path):
    asked: list[Any] = []
    scope = tmp_path / "ptrace_scope"
    with (
        mock.patch.object(cma_transport, "_YAMA", scope),
        mock.patch.object(cma_transport._libc, "prctl", lambda *given: asked.append(given), create=True),
    ):
        cma_transport._permit_siblings()
        for text in ("0\n", "2\n", "odd\n"):
            scope.write_text(text)
            cma_transport._permit_siblings()
        assert asked == []
        scope.write_text("1\n")
        cma_transport._permit_siblings()
    ((option, parent, *_),) = asked
    assert option == cma_transport._PR_SET_PTRACER and parent.value == os.getppid()
    assert isinstance(parent, ctypes.c_ulong)


def many(rank: int, world_size: int, willing: tuple[bool, ...]) -> tuple[list[int], list[list[float]], list[bool]]:
    """Gathers and reductions of many sizes, several in flight, that ranks start in different orders of the two kinds:
    who reads from whom, digests of what came, and whether all of it is right.
    """
    groups = ProcessGroups(detect(), timeout_seconds=60, cross_memory_attach=willing[rank])
    readers = groups.data.reader
    everyone = [torch.Generator().manual_seed(each) for each in range(world_size)]
    right, seen = [], []
    cases = (torch.float32, 70_000), (torch.bfloat16, 3), (torch.float32, 1 << 20), (torch.uint8, 300_001)
    for dtype, numel in cases:
        own = [torch.randint(0, 17, (numel,), generator=each).to(dtype) for each in everyone]
        grads = [torch.randint(0, 17, (world_size * numel,), generator=each).to(torch.float32) for each in everyone]
        full = torch.zeros(world_size * numel, dtype=dtype)
        again = torch.zeros_like(full)
        again[rank * numel :][:numel] = own[rank]
        starts = [
            lambda full=full, own=own: collectives.all_gather(full, own[rank], groups.data, "a"),
            lambda again=again, n=numel: collectives.all_gather(again, again[rank * n :][:n], groups.data, "b"),
            lambda grads=grads: collectives.reduce_scatter(grads[rank], group=groups.reduction, name="c"),
        ]
        # Gathers keep their order; the reduction comes first on one rank and last on others.
        order = [2, 0, 1] if rank == 0 else [0, 1, 2]
        moving = {which: starts[which]() for which in order}
        for which in sorted(order, reverse=rank == 0):
            moving[which].wait()
        sums = torch.zeros(numel)
        moving[2].leave_in(sums)
        total = sum(grads)[rank * numel :][:numel]
        right += [torch.equal(full, torch.cat(own)), torch.equal(again, full), torch.equal(sums, total)]
        seen.append([full.double().sum().item(), sums.double().sum().item()])
    groups.close()
    return sorted(readers.pids) if readers is not None else [], seen, right


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_read_is_what_sockets_would_bring(rank_pools, ranks):
    read = rank_pools[ranks].run(many, (True,) * ranks)
    sent = rank_pools[ranks].run(many, (False,) * ranks)
    for rank in range(ranks):
        assert read[rank][0] == [other for other in range(ranks) if other != rank] and sent[rank][0] == []
        assert read[rank][1] == sent[rank][1]
        assert all(read[rank][2]) and all(sent[rank][2])


def test_a_rank_that_is_unwilling_is_reached_through_sockets(rank_pools):
    found = rank_pools[3].run(many, (True, False, True))
    assert [pids for pids, _, _ in found] == [[2], [], [0]]
    assert all(all(right) for *_, right in found)


def refused_later(rank: int, world_size: int) -> tuple[str, str]:
    """The kernel stops permitting it on rank 1, in the middle of a job."""
    groups = ProcessGroups(detect(), timeout_seconds=3)
    full = torch.zeros(world_size << 18)
    collectives.all_gather(full, torch.full((1 << 18,), float(rank)), groups.data, "first").wait()
    refusal = OSError(errno.EPERM, "process_vm_readv of process 7: Operation not permitted")
    refusing = {"side_effect": refusal} if rank == 1 else {"wraps": copy_from}
    try:
        with mock.patch.object(cma_transport, "copy_from", **refusing):
            collectives.all_gather(full, full[::world_size], groups.data, "second").wait()
        return "over", ""
    except DesyncError as error:
        return str(error), str(error.__cause__)
    finally:
        groups.close()


def test_a_refusal_in_the_middle_ends_every_rank_and_is_told(rank_pools):
    (waiting, _), (refused, cause) = rank_pools[2].run(refused_later, timeout=60)
    assert "Operation not permitted" in cause and "cross_memory_attach" in cause, cause
    assert "second" in refused and "second" in waiting, (refused, waiting)


def sizes_differ(rank: int, world_size: int) -> str:
    groups = ProcessGroups(detect(), timeout_seconds=3)
    numel = (1 << 18) + rank
    try:
        collectives.all_gather(torch.zeros(world_size * numel), torch.zeros(numel), groups.data, f"mine {rank}").wait()
        return "over"
    except DesyncError as error:
        return str(error)
    finally:
        groups.close()


def test_nothing_is_read_where_sizes_differ(rank_pools):
    for text in rank_pools[2].run(sizes_differ, timeout=60):
        assert "mine 0" in text and "mine 1" in text, text
