"""The swap file: one a tier, gone on close, gone at the next start after a kill, never taken from a living owner."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from infinity.errors import CapacityError, TransferError
from infinity.memory.drives import free_nvme_nbytes
from infinity.memory.tiers import nvme
from infinity.memory.tiers.base import QueueOptions
from infinity.memory.tiers.nvme import NvmeTier, SwapFile, clean
from infinity.memory.tiers.pinned import page_aligned
from infinity.ops.aio import Queue
from infinity.plan.types import Extent

ROOT = Path(__file__).resolve().parents[2]
# Makes a tier, says so, and waits to be killed.
OWNER = """
import sys, time
from infinity.memory.tiers.nvme import NvmeTier
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


def test_a_file_into_which_a_kernel_still_writes_is_removed_once_its_process_has_ended(tmp_path, monkeypatch):
    """And who takes it over waits for that write."""
    with owner_in(tmp_path) as (process, path):
        process.send_signal(signal.SIGKILL)
        process.wait()
    with open(path, "rb") as ring, Queue("python", threads=1) as queue:
        fcntl.flock(ring, fcntl.LOCK_EX)
        monkeypatch.setattr(nvme, "_LOCK_SECONDS", 0.2)
        with pytest.raises(TransferError, match="a process still has it"):
            SwapFile.adopt(path, nbytes=1 << 16, queue=queue)
        assert clean(tmp_path) == [path]


def test_what_only_has_the_name_of_a_swap_file_is_neither_waited_for_nor_removed(tmp_path):
    """Opening a pipe waits for its writer, under the lock that every run of the folder takes."""
    names = [tmp_path / f"infinity-swap-{kind}-rank0.bin" for kind in ("pipe", "link", "folder", "socket", "circle")]
    pipe, link, folder, bound, circle = names
    (tmp_path / "kept").write_bytes(b"x" * 4096)
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "kept")
    folder.mkdir()
    circle.symlink_to(circle)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bound))
        assert clean(tmp_path) == []
        with tier_in(tmp_path) as tier:
            assert swap_files(tmp_path) == sorted([*names, tier.path])
    assert (tmp_path / "kept").read_bytes() == b"x" * 4096


def test_a_folder_that_is_made_is_named_once_with_its_drive_and_free_space(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("infinity"), "propagate", True)
    with caplog.at_level("INFO", logger="infinity"):
        for _ in range(2):
            with tier_in(tmp_path / "new" / "drive"):
                pass
    (said,) = [each.getMessage() for each in caplog.records if "made the folder" in each.getMessage()]
    assert re.fullmatch(rf"made the folder {tmp_path}/new/drive for swap files, on .* with [\d.]+ GB free", said), said


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
    real = fcntl.flock

    def refuse(descriptor, how):
        if how & fcntl.LOCK_NB:
            raise OSError(errno.EIO, "no answer")
        return real(descriptor, how)

    with Queue("python", threads=1) as queue, monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(OSError, match="no answer"):
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
from infinity.memory.tiers.nvme import NvmeTier
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


def drives_in(directory: Path, count: int = 3) -> list[Path]:
    return [directory / f"drive{index}" for index in range(count)]


@pytest.mark.parametrize("checksum", [False, "sampled", True])
def test_extents_on_several_drives_keep_their_bytes(tmp_path, checksum):
    nbytes = 40 << 20
    options = QueueOptions(weights=(3, 1, 2), checksum=checksum)
    drives = drives_in(tmp_path)
    tier = NvmeTier.open(drives, nbytes=nbytes, rank=0, options=options)
    try:
        sizes = tier.nbytes_by_path
        assert tier.nbytes == sum(sizes.values()) == nbytes
        assert [path.parent for path in sizes] == drives
        for (path, size), weight in zip(sizes.items(), options.weights, strict=True):
            assert path.stat().st_size == size == pytest.approx(nbytes * weight / 6, rel=0.05)
        content = page_aligned(nbytes)
        content.random_(generator=torch.Generator().manual_seed(0))
        cuts = [0, 4096, 12288, 17 << 20, 33 << 20, nbytes]
        extents = [Extent(begin, end - begin) for begin, end in pairwise(cuts)]
        for transfer in [tier.write(e, content[e.offset : e.offset + e.nbytes]) for e in extents]:
            transfer.wait()
            assert transfer.done()
        read = page_aligned(nbytes)
        for transfer in [tier.read(e, read[e.offset : e.offset + e.nbytes], priority=1) for e in reversed(extents)]:
            transfer.wait()
        assert torch.equal(read, content)
    finally:
        tier.close()
    assert not any(swap_files(drive) for drive in drives)


def test_stale_files_are_removed_on_every_drive(tmp_path):
    drives = drives_in(tmp_path, 2)
    for drive in drives:
        drive.mkdir()
        (drive / "infinity-swap-gone-rank0.bin").write_bytes(b"x" * 4096)
    tier = NvmeTier.open(drives, nbytes=1 << 20, rank=0, options=QueueOptions(weights=(1, 1)))
    assert [swap_files(drive) for drive in drives] == [[path] for path in tier.nbytes_by_path]
    tier.close()


def test_a_drive_too_small_for_its_share_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    drives = drives_in(tmp_path, 2)
    real = os.statvfs

    class Space:
        f_bavail, f_frsize, f_blocks = 10, 4096, 10

    monkeypatch.setattr(nvme.os, "statvfs", lambda path: Space() if Path(path) == drives[1] else real(path))
    # Folders of one file system: together they need more than the one that is asked says.
    with pytest.raises(CapacityError, match=r"drive1 has 40,960 bytes free .* needs 1,048,576 \(bytes a folder: "):
        NvmeTier.open(drives, nbytes=1 << 20, rank=0, options=QueueOptions(weights=(1, 1)))
    assert not any(swap_files(drive) for drive in drives)


def test_a_file_that_cannot_be_made_takes_the_others_with_it(tmp_path, monkeypatch):
    drives = drives_in(tmp_path, 2)
    real = nvme.File.create

    def refuse(path, nbytes):
        if "drive1" in str(path):
            raise TransferError("create", path=str(path), offset=0, nbytes=nbytes, errno=errno.EIO, reason="broken")
        return real(path, nbytes)

    monkeypatch.setattr(nvme.File, "create", refuse)
    with pytest.raises(TransferError, match="broken"):
        NvmeTier.open(drives, nbytes=1 << 20, rank=0, options=QueueOptions(weights=(1, 1)))
    assert not any(swap_files(drive) for drive in drives)


def test_free_space_of_drives_counts_each_drive_once(tmp_path):
    one = free_nvme_nbytes(tmp_path)
    # Other processes write to the drive, too.
    assert free_nvme_nbytes(drives_in(tmp_path)) == pytest.approx(one, rel=0.2)
    assert free_nvme_nbytes(drives_in(tmp_path), (1, 2, 3)) == pytest.approx(one, rel=0.2)


@pytest.mark.parametrize("drives", [1, 2])
def test_a_flipped_bit_is_found_by_the_checksum(tmp_path, drives):
    options = QueueOptions(weights=(1,) * drives, checksum=True)
    tier = NvmeTier.open(drives_in(tmp_path, drives), nbytes=16 << 20, rank=0, options=options)
    extent, other = Extent(4096, 15 << 20), Extent(0, 4096)
    content = page_aligned(extent.nbytes).random_(generator=torch.Generator().manual_seed(1))
    for each in (extent, other):
        tier.write(each, content[: each.nbytes]).wait()
    path = list(tier.nbytes_by_path)[-1]
    with open(path, "r+b") as file:
        file.seek(4096 * 50 + 17)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())
    read = page_aligned(extent.nbytes)
    for _ in range(2):
        with pytest.raises(TransferError, match=r"CRC-32C 0x[0-9a-f]{8}, but 0x[0-9a-f]{8} was expected") as caught:
            tier.read(extent, read).wait()
        assert (caught.value.errno, caught.value.path) == (errno.EBADMSG, str(path))
    tier.read(other, read[:4096]).wait()
    # Written anew, it is what is expected.
    tier.write(extent, content).wait()
    tier.read(extent, read).wait()
    assert torch.equal(read, content)
    tier.close()


def tamper(path: Path, offset: int, content: bytes) -> bytes:
    """Change bytes of a swap file behind its owner's back; returns those that were there."""
    with open(path, "r+b") as file:
        file.seek(offset)
        before = file.read(len(content))
        file.seek(offset)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return before


@pytest.mark.parametrize("case", ["lost", "lost page", "misdirected", "foreign"])
@pytest.mark.parametrize("drives", [1, 2])
def test_bytes_that_are_not_those_of_the_latest_write_are_never_taken(tmp_path, case, drives):
    """With the configuration's defaults. The drive keeps the old bytes, writes them to another place, or has a file of
    another process in its place."""
    extents = [Extent(index << 20, 1 << 20) for index in range(8)]
    options = QueueOptions(weights=(1,) * drives)
    tier, other = (
        NvmeTier.open(drives_in(tmp_path, drives), nbytes=8 << 20, rank=0, options=options) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(4)
    contents = [page_aligned(1 << 20).random_(generator=generator) for _ in range(17)]
    for extent, content in zip(extents, contents, strict=False):
        tier.write(extent, content).wait()
        other.write(extent, contents[8 + extents.index(extent)]).wait()
    path, foreign = tier.path, other.path
    here, there = 1 << 20, 2 << 20
    with open(path, "rb") as file:
        file.seek(here)
        before = file.read(1 << 20)
    changed = contents[16]
    tier.write(extents[1], changed).wait()
    read = page_aligned(1 << 20)
    tier.read(extents[1], read).wait()
    assert torch.equal(read, changed)
    if case == "lost":
        tamper(path, here, before)
    elif case == "lost page":
        tamper(path, here + 7 * 4096, before[7 * 4096 : 8 * 4096])
    elif case == "misdirected":
        tamper(path, there, tamper(path, here, before))
    else:
        tamper(path, here, foreign.read_bytes()[here : here + (1 << 20)])
    for index in (1, 2) if case == "misdirected" else (1,):
        with pytest.raises(TransferError, match="CRC-32C") as caught:
            tier.read(extents[index], read).wait()
        assert caught.value.errno == errno.EBADMSG
    tier.read(extents[4], read).wait()
    assert torch.equal(read, contents[4])
    tier.close()
    other.close()


class Waited:
    """A request that is over once it has been waited for, cancelled or not."""

    over = False

    def cancel(self) -> None:
        pass

    def wait(self) -> None:
        self.over = True


def test_a_submission_that_fails_half_way_leaves_nothing_in_flight(tmp_path, monkeypatch):
    tier = NvmeTier.open(drives_in(tmp_path, 2), nbytes=16 << 20, rank=0, options=QueueOptions(weights=(1, 1)))
    submitted, (first, second) = Waited(), tier._drives

    def refuse(*words, **named):
        raise TransferError("write", path="there", offset=0, nbytes=1, errno=errno.ETIMEDOUT, reason="no room")

    monkeypatch.setattr(first.queue, "write", lambda *words, **named: submitted)
    monkeypatch.setattr(second.queue, "write", refuse)
    with pytest.raises(TransferError, match="no room"):
        tier.write(Extent(0, 16 << 20), page_aligned(16 << 20))
    assert submitted.over
    tier.close()
