"""Bytes arrive as they were sent, on every back end, whatever size, offset and alignment; errors say what failed."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infinity.errors import TransferError
from infinity.ops.aio import File, Queue, Request
from infinity.ops.file import Descriptors
from tests.support.backends import WORKING, every_backend

_MIB = 1 << 20


def _bytes(nbytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def _open_files(folder: Path) -> int:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.lexists(link))


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def _threads_return_to(baseline: int) -> bool:
    # A joined thread may be listed for another moment.
    deadline = time.monotonic() + 5
    while _tasks() > baseline and time.monotonic() < deadline:
        time.sleep(0.01)
    return _tasks() <= baseline


@every_backend
@pytest.mark.parametrize("block_nbytes", [1, 65536, _MIB])
def test_random_requests_agree_with_a_byte_oracle(tmp_path: Path, backend: str, block_nbytes: int) -> None:
    rng, nbytes = random.Random(f"{backend}{block_nbytes}"), 4 * _MIB
    pool = _bytes(_MIB + 64, seed=1)
    oracle = torch.zeros(nbytes, dtype=torch.uint8)
    rounds = 40 if block_nbytes > 1 else 10
    with File.create(tmp_path / "data.bin", nbytes) as file, Queue(backend, block_nbytes=block_nbytes) as queue:
        for _ in range(rounds):
            flying: list[tuple[Request, Tensor | None, int]] = []
            taken: list[tuple[int, int]] = []
            for _ in range(30):
                size = rng.choice([0, 1, 511, 512, 4096, 4097, 8192, 65536, 716928, rng.randrange(100_000)])
                offset = rng.randrange(nbytes - size + 1)
                if rng.random() < 0.6:
                    offset -= offset % 4096
                if any(offset < end and begin < offset + size for begin, end in taken):
                    continue
                taken.append((offset, offset + size))
                shift = rng.choice([0, 0, 1, 4])
                if rng.random() < 0.5:
                    start = rng.randrange(64)
                    data = pool[start : start + size]
                    oracle[offset : offset + size] = data
                    flying.append((queue.write(file, offset, data), None, offset))
                else:
                    buffer = torch.empty(size + shift, dtype=torch.uint8)[shift:]
                    flying.append((queue.read(file, offset, buffer, priority=rng.randrange(3)), buffer, offset))
            for request, read, offset in flying:
                request.wait()
                assert request.done()
                assert read is None or read.equal(oracle[offset : offset + read.numel()])
    assert (tmp_path / "data.bin").read_bytes() == oracle.numpy().tobytes()


@every_backend
def test_every_dtype_comes_back(tmp_path: Path, backend: str) -> None:
    tensors = [_bytes(40_960).view(dtype) for dtype in (torch.bfloat16, torch.float16, torch.int16, torch.float32)]
    tensors += [torch.randn(3, 5, 7), torch.tensor(1.5, dtype=torch.float64)]
    with File.create(tmp_path / "data.bin", _MIB) as file, Queue(backend) as queue:
        for index, tensor in enumerate(tensors):
            queue.write(file, index * 65536, tensor).wait()
        for index, tensor in enumerate(tensors):
            copy = torch.empty_like(tensor)
            queue.read(file, index * 65536, copy).wait()
            assert copy.view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))


@every_backend
def test_a_read_beyond_the_end_says_how_much_it_got(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "data.bin"
    for size in (0, 100, 65536, 200_000):
        path.write_bytes(b"x" * size)
        with File.open(path) as file, Queue(backend, block_nbytes=65536) as queue:
            for _ in range(3):
                request = queue.read(file, 0, torch.empty(409_600, dtype=torch.uint8))
                for _ in range(2):
                    with pytest.raises(TransferError, match=f"got {size} of 409600 bytes") as caught:
                        request.wait()
                    error = caught.value
                    named = (error.operation, error.path, error.offset, error.nbytes, error.errno)
                    assert named == ("read", str(path), 0, 409_600, errno.EIO)


@every_backend
def test_a_failure_nobody_waited_for_is_raised_by_close(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"x")
    with File.open(path) as file:
        queue = Queue(backend, depth=2)
        queue.read(file, 0, torch.empty(50, dtype=torch.uint8))
        for _ in range(50):
            queue.read(file, 0, torch.empty(1, dtype=torch.uint8))
        with pytest.raises(TransferError, match="got 1 of 50 bytes"):
            queue.close()
        queue.close()


@every_backend
def test_a_closed_descriptor_is_an_error_of_the_request(tmp_path: Path, backend: str) -> None:
    with File.create(tmp_path / "data.bin", _MIB) as file, Queue(backend) as queue:
        read_only = File.open(file.path)
        read_only.writable = True
        with read_only, pytest.raises(TransferError, match="Bad file descriptor after 0 of 4096 bytes") as caught:
            queue.write(read_only, 4096, torch.zeros(4096, dtype=torch.uint8)).wait()
        assert caught.value.errno == errno.EBADF


@every_backend
def test_two_queues_and_many_files(tmp_path: Path, backend: str) -> None:
    with Queue(backend, depth=4) as first, Queue(backend, threads=2) as second:
        files = [File.create(tmp_path / f"{index}.bin", 65536 + index) for index in range(40)]
        data = [_bytes(file.nbytes, seed=index) for index, file in enumerate(files)]
        writes = [(first, second)[i % 2].write(f, 0, d) for i, (f, d) in enumerate(zip(files, data, strict=True))]
        for write in reversed(writes):
            write.wait()
        copies = [torch.empty_like(tensor) for tensor in data]
        reads = [(second, first)[i % 2].read(f, 0, c) for i, (f, c) in enumerate(zip(files, copies, strict=True))]
        # Transfers in flight keep what they need of a closed file.
        for file in files:
            file.close()
        del files
        for read, copy, expected in zip(reads, copies, data, strict=True):
            read.wait()
            assert copy.equal(expected)
        assert _open_files(tmp_path) == 0


@every_backend
def test_threads_and_descriptors_are_given_back(tmp_path: Path, backend: str) -> None:
    data = _bytes(300_000)
    fds, tasks = _fds(), _tasks()
    for _ in range(3):
        with File.create(tmp_path / "data.bin", _MIB) as file, Queue(backend, block_nbytes=4096) as queue:
            # Dropped at once: the queue holds on to tensor and file until the bytes have moved.
            for offset in range(0, _MIB - data.numel(), 65536):
                queue.write(file, offset, data.clone())
        assert _fds() == fds
        assert _threads_return_to(tasks)
        os.unlink(tmp_path / "data.bin")


@every_backend
def test_wait_may_be_called_from_several_threads(tmp_path: Path, backend: str) -> None:
    with File.create(tmp_path / "data.bin", 8 * _MIB) as file, Queue(backend) as queue:
        request = queue.write(file, 0, _bytes(8 * _MIB))
        waiters = [threading.Thread(target=request.wait) for _ in range(4)]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join(30)
            assert not waiter.is_alive()
        assert request.done()


@every_backend
def test_a_forked_child_is_told_to_make_its_own(tmp_path: Path, backend: str) -> None:
    with File.create(tmp_path / "data.bin", _MIB) as file, Queue(backend) as queue:
        buffer = torch.zeros(4096, dtype=torch.uint8)
        request = queue.write(file, 0, buffer)
        child = os.fork()
        if child == 0:
            refused = 0
            for forbidden in (lambda: queue.write(file, 0, buffer), request.wait):
                try:
                    forbidden()
                except RuntimeError as error:
                    refused += "forked child" in str(error)
            queue.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        request.wait()
        queue.write(file, 0, buffer).wait()


def _hanging(tmp_path: Path) -> tuple[File, list[int]]:
    """A file whose reads hang until somebody writes to a pipe; io_uring alone takes a pipe at an offset."""
    file = File.create(tmp_path / "data.bin", 65536)
    read_end, write_end = os.pipe()
    file._descriptors = Descriptors(os.dup(read_end), read_end)
    file.alignment = file.memory_alignment = 1
    return file, [write_end]


@pytest.mark.skipif("io_uring" not in WORKING, reason="no io_uring here")
def test_a_transfer_that_the_kernel_keeps_is_left_behind(tmp_path: Path) -> None:
    file, ends = _hanging(tmp_path)
    tasks = _tasks()
    started = time.monotonic()
    queue = Queue("io_uring", timeout_s=1.0)
    request = queue.read(file, 0, torch.empty(4096, dtype=torch.uint8))
    with pytest.raises(TransferError, match=r"not complete after 0\.1 s"):
        request.wait(timeout_s=0.1)
    with pytest.raises(TransferError, match=r"not complete after 1\.\d s") as caught:
        queue.close()
    file.close()
    assert caught.value.errno == errno.ETIMEDOUT
    assert time.monotonic() - started < 5
    with pytest.raises(TransferError, match="not complete"):
        request.wait()
    assert _threads_return_to(tasks)
    os.close(ends[0])


@pytest.mark.skipif("io_uring" not in WORKING, reason="no io_uring here")
def test_a_wait_that_ran_out_may_be_repeated_and_interrupted(tmp_path: Path) -> None:
    file, ends = _hanging(tmp_path)
    buffer = torch.zeros(4096, dtype=torch.uint8)
    with file, Queue("io_uring", timeout_s=30.0) as queue:
        request = queue.read(file, 0, buffer)
        with pytest.raises(TransferError, match=r"not complete after 0\.0 s"):
            request.wait(timeout_s=0.0)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            request.wait()
        os.write(ends[0], b"\7" * 4096)
        request.wait()
    assert buffer.eq(7).all()
    os.close(ends[0])


def test_creation_is_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    with File.create(path, 70_000) as file:
        assert (file.nbytes, file.path, path.stat().st_size) == (70_000, str(path), 70_000)
        assert path.stat().st_blocks * 512 >= 70_000
        file.sync()
    file.close()
    with pytest.raises(TransferError) as caught:
        File.create(path, 10)
    assert caught.value.errno == errno.EEXIST and path.stat().st_size == 70_000
    File.create(tmp_path / "empty.bin", 0).close()
    free_nbytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(TransferError, match=r"bytes were free, \d+ are needed") as caught:
        File.create(tmp_path / "huge.bin", free_nbytes + (1 << 40))
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert not (tmp_path / "huge.bin").exists()
    assert _open_files(tmp_path) == 0


def test_opening_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="No such file"):
        File.open(tmp_path / "missing.bin")
    with pytest.raises(TransferError):
        File.open(tmp_path)


def test_a_file_system_without_direct_io_is_served_buffered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    monkeypatch.setattr("infinity.ops.file._told_buffered", set())
    for backend in WORKING:
        with File.create(tmp_path / backend, _MIB) as file, Queue(backend) as queue:
            assert not file.direct
            data, copy = _bytes(_MIB), torch.empty(_MIB, dtype=torch.uint8)
            queue.write(file, 0, data).wait()
            queue.read(file, 0, copy).wait()
            assert copy.equal(data)
    assert sum("does not take O_DIRECT" in record.message for record in caplog.records) == 1


def test_direct_io_takes_ordinary_tensors_where_the_kernel_allows_it(tmp_path: Path) -> None:
    with File.create(tmp_path / "data.bin", _MIB) as file:
        for alignment in (file.alignment, file.memory_alignment):
            assert alignment >= 1 and alignment & (alignment - 1) == 0


@pytest.mark.parametrize(("call", "words"), [
    (lambda q, f: q.write(f, 0, torch.zeros(8, 8).t()), "not contiguous"),
    (lambda q, f: q.read(f, 0, torch.zeros(8, device="meta")), "is on meta"),
    (lambda q, f: q.read(f, -1, torch.zeros(8)), "offset -1 .* is negative"),
    (lambda q, f: q.write(f, 4090, torch.zeros(8)), "it has 4096 bytes"),
    (lambda q, f: q.write(File.open(f.path), 0, torch.zeros(8)), "for reading only"),
])  # fmt: skip
def test_what_cannot_be_transferred_is_refused(
    tmp_path: Path, call: Callable[[Queue, File], Request], words: str
) -> None:
    with File.create(tmp_path / "data.bin", 4096) as file, Queue() as queue:
        with pytest.raises(ValueError, match=words):
            call(queue, file)
        file.close()
        with pytest.raises(ValueError, match="is closed"):
            queue.read(file, 0, torch.zeros(8))
        queue.close()
        with pytest.raises(ValueError, match="queue is closed"):
            queue.read(file, 0, torch.zeros(8))


def test_back_ends_are_chosen_by_name() -> None:
    with Queue() as queue:
        assert queue.backend == WORKING[0]
    with pytest.raises(ValueError, match="no back end 'posix'"):
        Queue("posix")
    with pytest.raises(ValueError, match="depth 0"):
        Queue(depth=0)
