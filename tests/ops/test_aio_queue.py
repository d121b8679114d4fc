"""What waits goes first, what is cancelled does not begin, and a queue holds no more than it was told to.

The Python fallback serves requests in their order.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infinity.errors import TransferError
from infinity.memory.tiers.pinned import page_aligned
from infinity.ops.aio import File, Queue, Request
from tests.support.backends import WORKING, every_backend, every_native_backend

_MIB = 1 << 20
# One transfer of this many bytes keeps a queue of depth 1 busy for longer than a few calls take.
_GATE_NBYTES = 32 * _MIB
_NBYTES = 65536


class Gated:
    """A queue that serves one block at a time, and has a long one in flight. All buffers are aligned: what is not goes
    another way, past the gate.
    """

    def __init__(self, folder: Path, backend: str, *, pending_max: int = 100) -> None:
        self.file = File.create(folder / "data.bin", _GATE_NBYTES + 8 * _MIB)
        self.queue = Queue(backend, depth=1, threads=1, block_nbytes=_GATE_NBYTES, pending_max=pending_max)
        self._filling = page_aligned(_GATE_NBYTES)
        # Made before: what is submitted behind a gate must be submitted fast.
        self._values = [page_aligned(_NBYTES).fill_(value) for value in range(10)]

    def shut(self) -> Request:
        """Nothing submitted after this begins before it is done."""
        return self.queue.write(self.file, 8 * _MIB, self._filling)

    def write(self, value: int, offset: int = 0, priority: int = 0) -> Request:
        return self.queue.write(self.file, offset, self._values[value], priority=priority)

    def value(self, offset: int = 0) -> int:
        """The last value that was written there."""
        found = page_aligned(_NBYTES)
        self.queue.read(self.file, offset, found).wait()
        assert found.eq(found[0]).all()
        return int(found[0])

    def close(self) -> None:
        self.queue.close()
        self.file.close()


@pytest.fixture
def gated(tmp_path: Path, request: pytest.FixtureRequest):
    made: list[Gated] = []

    def make(backend: str, **options: int) -> Gated:
        made.append(Gated(tmp_path, backend, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@every_native_backend
def test_what_somebody_waits_for_goes_before_every_priority(gated, backend: str) -> None:
    with_gate = gated(backend)
    for _ in range(50):
        gate = with_gate.shut()
        requests = [with_gate.write(value, priority=5) for value in range(1, 9)]
        last = with_gate.write(9, priority=-5)
        begun_late = not gate.done()
        last.wait()
        for request in requests:
            request.wait()
        found = with_gate.value()
        # Held up before it began to wait, this thread may come when all is written. Without a word of who waits, the
        # last in the order of arrival and of priority is the last to be written, every time.
        if begun_late and found == 8:
            break
    assert begun_late
    assert found == 8


@every_native_backend
def test_greater_priorities_go_first_and_equals_in_order(gated, backend: str) -> None:
    with_gate = gated(backend)
    for _ in range(50):
        gate = with_gate.shut()
        order = [3, -2, 7, 0, -(1 << 31), 7, (1 << 31) - 1]
        requests = [with_gate.write(index, priority=priority) for index, priority in enumerate(order)]
        begun_late = not gate.done()
        while not all(request.done() for request in requests):
            time.sleep(0.001)
        if begun_late:
            break
    assert begun_late
    assert with_gate.value() == order.index(min(order))


@every_native_backend
def test_reads_and_writes_take_turns_and_what_has_time_stays_behind_both(gated, backend: str) -> None:
    with_gate = gated(backend)
    pages = [page_aligned(_NBYTES) for _ in range(4)]
    for _ in range(50):
        gate = with_gate.shut()
        behind = with_gate.write(9, offset=8 * _NBYTES, priority=-1)
        writes = [with_gate.write(at, offset=at * _NBYTES) for at in range(4)]
        reads = [
            with_gate.queue.read(with_gate.file, (4 + at) * _NBYTES, page, priority=5) for at, page in enumerate(pages)
        ]
        begun_late = not gate.done()
        # It goes before other reads, not before the writes.
        reads[-1].wait()
        while not all(request.done() for request in [behind, *writes, *reads]):
            time.sleep(0.001)
        began = sorted([behind, *writes, *reads], key=lambda request: request.moments[0])
        # This thread may be held up before it begins to wait.
        if begun_late and began[0] is reads[-1]:
            break
    assert begun_late
    order = ["behind" if each is behind else "write" if each in writes else "read" for each in began]
    # The gate was a write.
    assert order == ["read", "write"] * 4 + ["behind"]
    assert began[0] is reads[-1]


def test_the_fallback_serves_requests_in_their_order_whoever_waits(gated) -> None:
    with_gate = gated("python")
    with_gate.shut()
    requests = [with_gate.write(value, priority=value % 3) for value in range(1, 9)]
    requests[-1].wait()
    assert all(request.done() for request in requests)
    assert sorted(requests, key=lambda request: request.moments[0]) == requests
    assert with_gate.value() == 8


@every_backend
def test_what_is_cancelled_before_it_begins_never_does(gated, backend: str) -> None:
    with_gate = gated(backend)
    with_gate.write(1).wait()
    stopped = False
    for _ in range(50):
        gate = with_gate.shut()
        request = with_gate.write(2)
        stopped = request.cancel()
        if stopped:
            # Nothing of it is in flight: it is over although the gate is not.
            assert request.done()
            for _ in range(2):
                with pytest.raises(TransferError, match="Operation canceled after 0 of 65536 bytes") as caught:
                    request.wait()
                assert caught.value.errno == errno.ECANCELED
            gate.wait()
            assert with_gate.value() == 1
            break
        request.wait()
        with_gate.write(1).wait()
    assert stopped


@every_backend
def test_cancelling_what_has_begun_lets_the_blocks_in_flight_end(tmp_path: Path, backend: str) -> None:
    data = page_aligned(64 * _MIB).fill_(9)
    with (
        File.create(tmp_path / "data.bin", data.nbytes) as file,
        Queue(backend, depth=2, threads=2, block_nbytes=_MIB) as queue,
    ):
        for _ in range(50):
            request = queue.write(file, 0, data)
            if request.cancel():
                break
            request.wait()
        with pytest.raises(TransferError, match="canceled") as caught:
            request.wait()
        assert caught.value.errno == errno.ECANCELED
        moved = int(str(caught.value).split(" after ")[1].split()[0])
        assert moved % _MIB == 0 and moved < data.nbytes
        # From now on the buffer is the caller's.
        data.fill_(1)
        assert not request.cancel()
        found = torch.empty(moved, dtype=torch.uint8)
        queue.read(file, 0, found).wait()
        assert found.eq(9).all()


@every_backend
def test_cancelling_what_is_done_changes_nothing(gated, backend: str) -> None:
    with_gate = gated(backend)
    request = with_gate.write(4)
    request.wait()
    assert not request.cancel()
    request.wait()
    assert with_gate.value() == 4


@every_backend
def test_a_cancelled_request_is_no_failure_of_the_queue(tmp_path: Path, backend: str) -> None:
    with File.create(tmp_path / "data.bin", 8 * _MIB) as file, Queue(backend) as queue:
        for _ in range(50):
            queue.write(file, 0, torch.zeros(8 * _MIB, dtype=torch.uint8)).cancel()


@every_backend
def test_a_full_queue_waits_for_room(gated, backend: str) -> None:
    with_gate = gated(backend, pending_max=2)
    waited = False
    for _ in range(50):
        gate, second = with_gate.shut(), with_gate.write(1)
        waited = waited or not gate.done()
        third = with_gate.write(2)
        assert gate.done()
        second.wait()
        third.wait()
    assert waited


@every_backend
def test_a_queue_that_stays_full_is_an_error(gated, backend: str) -> None:
    with_gate = gated(backend, pending_max=1)
    raised: TransferError | None = None
    for _ in range(50):
        gate = with_gate.shut()
        with_gate.queue.timeout_s, limit_s = 1e-6, with_gate.queue.timeout_s
        try:
            with_gate.write(1).wait(timeout_s=30)
        except TransferError as error:
            raised = error
        with_gate.queue.timeout_s = limit_s
        gate.wait()
        if raised is not None:
            break
    assert raised is not None and raised.errno == errno.ETIMEDOUT
    assert "the queue was full for 0.0 s" in str(raised)


@every_backend
def test_many_submitters_share_a_small_queue(tmp_path: Path, backend: str) -> None:
    file_nbytes, count = 4 * _MIB, 300
    with File.create(tmp_path / "data.bin", file_nbytes) as file, Queue(backend, pending_max=3) as queue:

        def submit(number: int) -> None:
            rng = random.Random(number)
            for _ in range(count):
                offset = (rng.randrange(200) * 5 + number) * 4096
                queue.write(file, offset, torch.full((4096,), number, dtype=torch.uint8), priority=rng.randrange(3))

        threads = [threading.Thread(target=submit, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert len(queue._requests) <= 2 * queue._sweep_least
    found = torch.frombuffer(bytearray((tmp_path / "data.bin").read_bytes()), dtype=torch.uint8)
    for index, page in enumerate(found[: 1000 * 4096].split(4096)):
        assert page.eq(index % 5).all() or page.eq(0).all()


def _round_trip(queue: Queue, file: File, buffer: Tensor, value: int) -> None:
    buffer.fill_(value)
    queue.write(file, 0, buffer).wait()
    buffer.fill_(0)
    queue.read(file, 0, buffer).wait()
    assert buffer.eq(value).all()


@every_backend
def test_memory_and_files_may_be_registered_and_taken_back(tmp_path: Path, backend: str) -> None:
    whole = torch.empty(9 * _MIB, dtype=torch.uint8)
    buffer = whole[-whole.data_ptr() % 4096 :][: 8 * _MIB]
    with Queue(backend, block_nbytes=_MIB) as queue, File.create(tmp_path / "a.bin", 8 * _MIB) as file:
        for value in range(1, 4):
            taken = queue.register(buffer), queue.register(file)
            assert queue.register(file) == taken[1]
            assert backend == "io_uring" or not any(taken)
            _round_trip(queue, file, buffer, value)
            _round_trip(queue, file, buffer[:4096], value + 10)
            _round_trip(queue, file, buffer[100:5000], value + 20)
            queue.unregister(file)
            queue.unregister(buffer)
            queue.unregister(buffer)
            _round_trip(queue, file, buffer, value + 30)


@pytest.mark.skipif("io_uring" not in WORKING, reason="no io_uring here")
def test_more_registrations_than_the_kernel_takes_are_told_and_do_no_harm(tmp_path: Path) -> None:
    buffers = [torch.empty(4096, dtype=torch.uint8) for _ in range(300)]
    files = [File.create(tmp_path / f"{index}.bin", 4096) for index in range(70)]
    with Queue("io_uring") as queue:
        taken = [queue.register(buffer) for buffer in buffers]
        kept = [queue.register(file) for file in files]
        assert not taken[-1] and not kept[-1]
        for index, (file, buffer) in enumerate(zip(files, buffers[-70:], strict=True)):
            _round_trip(queue, file, buffer, index)
    for file in files:
        file.close()


@every_backend
def test_a_registered_file_that_was_closed_is_not_taken_for_another(tmp_path: Path, backend: str) -> None:
    buffer = torch.empty(2 * _MIB, dtype=torch.uint8)[:_MIB]
    with Queue(backend) as queue:
        for value in range(1, 6):
            file = File.create(tmp_path / f"{value}.bin", _MIB)
            queue.register(file)
            _round_trip(queue, file, buffer, value)
            file.close()
    for value in range(1, 6):
        assert (tmp_path / f"{value}.bin").read_bytes() == bytes([value]) * _MIB
