"""The files: every damaged byte is found, every range is read back, and what is not whole is no checkpoint."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infinity.checkpoint.files import ExtentReader, Staging, Writer, file_nbytes
from infinity.checkpoint.format import (
    ALIGNMENT,
    BLOCK_NBYTES,
    Array,
    FileInfo,
    Manifest,
    RankIndex,
    TensorInfo,
    broken,
    complete,
    find,
    index_name,
    replace_file,
    seal,
    unseal,
)
from infinity.errors import CheckpointError
from infinity.ops.aio import Queue
from infinity.ops.crc32c import checksum

IDENTITY = "0123456789ab"


def test_every_flipped_byte_of_metadata_is_found():
    data = seal({"a": [1, 2.5, None], "b": "text", "c": {"d": -7}})
    assert unseal(data, path="x") == {"a": [1, 2.5, None], "b": "text", "c": {"d": -7}}
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(CheckpointError, match=r"some/file: its .* bytes are not those"):
                unseal(bytes(damaged), path="some/file")
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            unseal(data[:length], path="x")


def test_the_format_needs_no_torch():
    code = "import sys, infinity.checkpoint.format; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def make(directory: Path, tag: str, *, number: int = 1, identity: str = IDENTITY) -> Path:
    """A checkpoint of one rank: tensor "w" of 3 million fp32 in two extents, and "b" of 5."""
    folder = directory / tag
    folder.mkdir(parents=True)
    values = values_of(3_000_005)
    name = f"{identity}.rank-00000.weights.bin"
    parts = [values[:2_000_000], values[2_000_000:]]
    with Queue() as queue:
        writer = Writer(folder / name, file_nbytes([part.nbytes for part in parts]), queue, Staging())
        for part in parts:
            writer.extent(part.view(torch.uint8))
        extents = writer.close()
    arrays = (
        Array("w", "param", "fp32", 0, 2_000_000, 0, 0),
        Array("w", "param", "fp32", 2_000_000, 1_000_000, 1, 0),
        Array("b", "param", "fp32", 0, 5, 1, 4_000_000),
    )
    nbytes = sum(extent.nbytes for extent in extents)
    index = RankIndex(0, {name: nbytes}, tuple(extents), arrays).to_bytes()
    replace_file(folder / index_name(identity, 0), index)
    manifest = Manifest(
        id=identity, tag=tag, number=number, time="", tied={},
        versions={"infinity": "", "torch": "", "python": ""},
        plan={"fingerprint": "", "stage": 3, "world_size": 1, "compute_dtype": "fp32"},
        tensors={
            "w": TensorInfo((3000, 1000), "fp32", True, ("param",)), "b": TensorInfo((5,), "fp32", True, ("param",)),
        },
        ranks=(FileInfo(index_name(identity, 0), len(index), checksum(index)),),
        engine={
            "counters": {"global_steps": number, "micro_steps": 0, "global_samples": 0, "skipped_steps": 0},
            "precision": None, "scheduler": None, "optimizer": {"kind": "", "groups": [], "steps": {}}, "loader": None,
        },
        client_state={}, client=None, module={},
    )  # fmt: skip
    replace_file(folder / "manifest.json", manifest.to_bytes())
    return folder


def values_of(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


def test_any_range_is_read_back(tmp_path):
    folder = make(tmp_path, "a")
    (_, manifest), values = complete(tmp_path)[0], values_of(3_000_005)
    chance = random.Random(0)
    with ExtentReader(folder, manifest, [manifest.index(folder, 0)]) as reader:
        ranges = [(0, 3_000_000), (1_999_999, 2), (0, 1), (2_999_999, 1), (5, 0)]
        ranges += [(start := chance.randrange(2_999_000), chance.randrange(1, 3_000_000 - start)) for _ in range(20)]
        for start, numel in ranges:
            out = torch.full((numel + 1,), 7.0)
            reader.read("w", "param", start, numel, out[:numel])
            assert torch.equal(out[:numel], values[start : start + numel])
            assert out[numel] == 7, "nothing behind it is touched"
        with pytest.raises(CheckpointError, match="elements 3000000 to 3000001 of w"):
            reader.read("w", "param", 2_999_999, 2, torch.empty(2))
        assert sum(reader.verify()) == sum(manifest.index(folder, 0).files.values())


def test_a_flipped_byte_of_data_is_found_and_named(tmp_path):
    folder = make(tmp_path, "a")
    manifest = complete(tmp_path)[0][1]
    index = manifest.index(folder, 0)
    (name,) = index.files
    size = (folder / name).stat().st_size
    assert size == sum(extent.nbytes for extent in index.extents) and size % ALIGNMENT == 0
    chance = random.Random(1)
    # The last one lies in padding.
    for at in [0, BLOCK_NBYTES - 1, BLOCK_NBYTES, *(chance.randrange(size) for _ in range(6)), size - 1]:
        flip(folder / name, at)
        with ExtentReader(folder, manifest, [index]) as reader:
            with pytest.raises(CheckpointError, match=name) as caught:
                list(reader.verify())
            begin = max(extent.offset for extent in index.extents if extent.offset <= at)
            assert f"at offset {begin + (at - begin) // BLOCK_NBYTES * BLOCK_NBYTES} " in str(caught.value)
        flip(folder / name, at)
    with ExtentReader(folder, manifest, [index]) as reader:
        list(reader.verify())


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_what_is_not_whole_is_no_checkpoint(tmp_path):
    for number, tag in enumerate(("a", "b", "c", "d"), 1):
        make(tmp_path, tag, number=number)
    assert [path.name for path, _ in complete(tmp_path)] == ["d", "c", "b", "a"]
    (tmp_path / "d" / "manifest.json").unlink()
    data = tmp_path / "c" / f"{IDENTITY}.rank-00000.weights.bin"
    with open(data, "r+b") as file:
        file.truncate(data.stat().st_size - 1)
    flip(tmp_path / "b" / index_name(IDENTITY, 0), 40)
    (tmp_path / "other").mkdir()
    assert [path.name for path, _ in complete(tmp_path)] == ["a"]
    found = {path.name: why for path, why in broken(tmp_path)}
    assert "no manifest" in found["d"]
    assert data.name in found["c"] and "the index says" in found["c"]
    assert index_name(IDENTITY, 0) in found["b"]
    assert set(found) == {"b", "c", "d"}


def test_a_folder_that_cannot_be_read_hides_no_other_and_links_are_followed(tmp_path, monkeypatch):
    make(tmp_path, "z")
    make(tmp_path / "elsewhere", "b", number=2)
    (tmp_path / "y").symlink_to(tmp_path / "elsewhere" / "b")
    for name in ("gone", "lost+found"):
        (tmp_path / name).mkdir()
    real = os.listdir

    def listed(path: Path) -> list[str]:
        if path.name == "gone":
            raise FileNotFoundError(path)
        if path.name == "lost+found":
            raise PermissionError(path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listed)
    assert [path.name for path, _ in complete(tmp_path)] == ["y", "z"] and not broken(tmp_path)


def test_a_tag_or_the_latest_is_found(tmp_path):
    assert find(tmp_path / "nowhere") is None and find(tmp_path) is None
    make(tmp_path, "a")
    make(tmp_path, "b", number=2)
    assert find(tmp_path) is None, "nobody has said which is the latest"
    replace_file(tmp_path / "latest", b"b\n")
    assert find(tmp_path) == tmp_path / "b"
    assert find(tmp_path, "a") == tmp_path / "a"
    assert find(tmp_path, "c") is None


def test_another_version_is_refused_by_name(tmp_path):
    folder = make(tmp_path, "a")
    body = complete(tmp_path)[0][1].body()
    replace_file(folder / "manifest.json", seal({**body, "version": 3}))
    with pytest.raises(CheckpointError, match=r"manifest.json.*version 3"):
        Manifest.read(folder / "manifest.json")


def test_a_file_that_does_not_fit_is_not_begun(tmp_path):
    with Queue() as queue, pytest.raises(OSError, match=r"bytes were free, \d+ are needed"):
        Writer(tmp_path / "x", 1 << 60, queue, Staging())
    assert list(tmp_path.iterdir()) == []


def test_an_aborted_file_is_gone(tmp_path):
    with Queue() as queue:
        writer = Writer(tmp_path / "x", 1 << 20, queue, Staging())
        writer.extent(torch.zeros(1 << 20, dtype=torch.uint8))
        writer.abort()
    assert list(tmp_path.iterdir()) == []
