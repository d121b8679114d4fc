"""The swap file: one a tier, gone on close, gone at the next start after a kill, never taken from a living owner."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from infinity.errors import TransferError
from infinity.memory.capacity import free_nvme_nbytes
from infinity.memory.host import page_aligned
from infinity.memory.nvme import NvmeTier, clean
from infinity.ops.aio import Queue
from infinity.plan.types import Extent

ROOT = Path(__file__).resolve().parents[2]
# Makes a tier, says so, and waits to be killed.
OWNER = """
import sys, time
from infinity.memory.nvme import NvmeTier
from infinity.ops.aio import Queue
tier = NvmeTier(sys.argv[1], nbytes=1 << 16, rank=5, queue=Queue("python"))
print(tier.path, flush=True)
time.sleep(60)
"""


def swap_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("infinity-swap-*"))


@contextmanager
def tier_in(directory: Path, nbytes: int = 1 << 16) -> Iterator[NvmeTier]:
    with Queue("python", threads=1) as queue:
        tier = NvmeTier(directory, nbytes=nbytes, rank=0, queue=queue)
        try:
            yield tier
        finally:
            tier.close()


@contextmanager
def owner_in(directory: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that has a tier in `directory`."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def test_the_file_has_the_size_of_the_plan_and_is_removed_on_close(tmp_path):
    with tier_in(tmp_path / "new" / "folder", 3 * 4096) as tier:
        assert tier.nbytes == tier.path.stat().st_size == 3 * 4096
        # Reserved on the drive, not only promised.
        assert tier.path.stat().st_blocks * 512 >= 3 * 4096
    assert not tier.path.exists()
    tier.close()


def test_extents_keep_their_bytes(tmp_path):
    with tier_in(tmp_path) as tier:
        for index in range(4):
            tier.write(Extent(index * 4096, 4096), page_aligned(4096).fill_(index + 1)).wait()
        target = page_aligned(2 * 4096)
        tier.read(Extent(4096, 2 * 4096), target).wait()
        assert torch.equal(target, torch.tensor([2, 3], dtype=torch.uint8).repeat_interleave(4096))


def test_two_tiers_in_one_directory_have_files_of_their_own(tmp_path):
    with tier_in(tmp_path) as first, tier_in(tmp_path) as second:
        assert first.path != second.path
        assert swap_files(tmp_path) == sorted([first.path, second.path])
    assert not swap_files(tmp_path)


def test_a_file_of_a_killed_process_is_removed_at_the_next_start_and_a_living_one_is_not(tmp_path):
    with owner_in(tmp_path) as (process, path):
        assert path.stat().st_size == 1 << 16
        with tier_in(tmp_path):
            assert path.exists()
        assert clean(tmp_path) == []
        free_nvme_nbytes(tmp_path)
        assert path.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path.exists()
        with tier_in(tmp_path) as tier:
            assert swap_files(tmp_path) == [tier.path]


def test_free_space_counts_what_killed_processes_left(tmp_path):
    (tmp_path / "infinity-swap-gone-rank0.bin").write_bytes(b"x" * 4096)
    assert free_nvme_nbytes(tmp_path) > 0
    assert not swap_files(tmp_path)


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path):
    assert free_nvme_nbytes(tmp_path / "a" / "b") > 0
    assert not (tmp_path / "a").exists()


def test_other_files_and_what_cannot_be_removed_are_left_alone(tmp_path):
    other = tmp_path / "weights.bin"
    other.write_bytes(b"x")
    folder = tmp_path / "infinity-swap-x-rank0.bin"
    folder.mkdir()
    with tier_in(tmp_path):
        assert other.exists() and folder.exists()


def test_a_forked_child_removes_nothing(tmp_path):
    with tier_in(tmp_path) as tier:
        child = os.fork()
        if child == 0:
            try:
                tier.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert tier.path.exists()
        assert clean(tmp_path) == []
        tier.write(Extent(0, 4096), page_aligned(4096)).wait()


def test_close_removes_the_file_although_a_transfer_failed_unseen(tmp_path, monkeypatch):
    with Queue("python", threads=1) as queue:
        tier = NvmeTier(tmp_path, nbytes=4096, rank=0, queue=queue)

        def fail() -> None:
            raise TransferError("write", path=str(tier.path), offset=0, nbytes=1, errno=errno.EIO, reason="unseen")

        with monkeypatch.context() as patch:
            patch.setattr(queue, "close", fail)
            with pytest.raises(TransferError, match="unseen"):
                tier.close()
        assert not swap_files(tmp_path)
        tier.close()


def test_a_lock_that_cannot_be_taken_leaves_no_file(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **named):
        if str(path).endswith(".bin") and flags == os.O_RDONLY | os.O_CLOEXEC:
            raise OSError(errno.EMFILE, "too many")
        return real(path, flags, *rest, **named)

    with Queue("python", threads=1) as queue, monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="too many"):
            NvmeTier(tmp_path, nbytes=4096, rank=0, queue=queue)
    assert not swap_files(tmp_path)


def test_a_drive_without_room_is_an_error_and_no_file_is_left(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(TransferError, match="bytes were free") as caught, tier_in(tmp_path, 2 * free + (1 << 20)):
        pass
    assert caught.value.errno == errno.ENOSPC
    assert not swap_files(tmp_path)


# A file that may not grow: the error comes from the reservation itself.
LIMITED = """
import resource, signal, sys
from infinity.errors import TransferError
from infinity.memory.nvme import NvmeTier
from infinity.ops.aio import Queue
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with Queue("python") as queue:
    try:
        NvmeTier(sys.argv[1], nbytes=1 << 20, rank=0, queue=queue)
    except TransferError as error:
        print(error.errno)
"""


def test_a_reservation_that_fails_leaves_no_file(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert finished.stdout.strip() == str(errno.EFBIG), finished.stderr
    assert not swap_files(tmp_path)
