"""Safetensors files of anybody's making: whatever a header or an index says, it is read right or refused by name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from infinity.checkpoint.weight_files import SafetensorsFile, WeightFolder
from infinity.errors import ConfigError, TransferError

DATA = bytes(range(48))
A = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
B = {"dtype": "BF16", "shape": [8], "data_offsets": [32, 48]}


def file_of(header: Any, data: bytes = DATA, length: int | None = None) -> bytes:
    """A safetensors file with this header, a value or its text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def with_a(**change: Any) -> bytes:
    return file_of({"a": {**A, **change}, "b": B})


MALFORMED = {
    "nothing": b"", "seven bytes": bytes(7), "a length alone": struct.pack("<Q", 100),
    "a header of nothing": file_of(b""), "a header of one byte": file_of(b"{"),
    "a length beyond the file": file_of({"a": A, "b": B}, length=10_000),
    "a length below 0": file_of({"a": A, "b": B}, length=2**64 - 1),
    "a length that is too short": file_of({"a": A, "b": B}, length=20),
    "no JSON": file_of(b"hello, world"), "no UTF-8": file_of(b'{"\xff":1}'), "a list": file_of([A]),
    "a text": file_of("a"),
    "null": file_of(None), "nested without end": file_of(b"[" * 100_000), "a number without end": file_of(b"9" * 5000),
    "NaN": file_of(b'{"a":NaN}'), "a key twice": file_of(b'{"a":%s,"a":%s}' % ((json.dumps(A).encode(),) * 2)),
    "an entry that is null": file_of({"a": None, "b": B}), "an entry that is a list": file_of({"a": [1], "b": B}),
    "an entry without dtype": file_of({"a": {"shape": [8], "data_offsets": [0, 32]}, "b": B}),
    "an entry without offsets": file_of({"a": {"dtype": "F32", "shape": [8]}, "b": B}),
    "a dtype that is none": with_a(dtype="F7"), "a dtype that is a number": with_a(dtype=32),
    "a dtype that is a list": with_a(dtype=["F32"]),
    "a shape that is a number": with_a(shape=8), "a shape below 0": with_a(shape=[-2, -4]),
    "a shape of fractions": with_a(shape=[2.0, 4]), "a shape of truths": with_a(shape=[True, 8]),
    "a shape of another size": with_a(shape=[2, 5]), "a shape beyond 64 bits": with_a(shape=[2**33, 2**33]),
    "a shape of none and too much": file_of(
        {"a": A, "b": B, "c": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [48, 48]}}
    ),
    "a shape of 100 dimensions": with_a(shape=[1] * 98 + [2, 4]),
    "offsets below 0": with_a(data_offsets=[-32, 0]), "offsets in the header": with_a(data_offsets=[-8, 24]),
    "offsets the wrong way": with_a(data_offsets=[32, 0]), "three offsets": with_a(data_offsets=[0, 16, 32]),
    "one offset": with_a(data_offsets=[0]), "offsets that are texts": with_a(data_offsets=["0", "32"]),
    "offsets that are fractions": with_a(data_offsets=[0.0, 32.0]),
    "ranges that overlap": file_of({"a": A, "b": {**B, "data_offsets": [16, 32]}}, DATA[:32]),
    "the same range twice": file_of({"a": A, "b": A}, DATA[:32]),
    "a hole": file_of({"a": A, "b": {**B, "data_offsets": [36, 52]}}, DATA + bytes(4)),
    "a hole at the start": file_of({"b": B}), "bytes behind the end": file_of({"a": A, "b": B}, DATA + b"x"),
    "bytes that are not there": file_of({"a": A, "b": B}, DATA[:-1]),
    "metadata that is a number": file_of({"__metadata__": 3, "a": A, "b": B}),
    "metadata that cannot be printed": file_of(
        b'{"__metadata__":{"a":"\\ud800"},"a":%s,"b":%s}' % (json.dumps(A).encode(), json.dumps(B).encode())
    ),
    "metadata of numbers": file_of({"__metadata__": {"format": 3}, "a": A, "b": B}),
    "a name that cannot be printed": file_of(
        b'{"\\ud800":%s,"b":%s}' % (json.dumps(A).encode(), json.dumps(B).encode())
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(MALFORMED[case])
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        WeightFolder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == open_files


# What the library takes and this reader does not, and what torch refuses in its stead.
STRICTER = {"a shape of 100 dimensions", "a key twice", "a shape of none and too much"}


@pytest.mark.parametrize("case", sorted(MALFORMED.keys() - STRICTER))
def test_the_library_refuses_the_same(case: str) -> None:
    with pytest.raises(SafetensorError):
        load(MALFORMED[case])


def test_well_formed_files_are_read_in_any_order_of_names(tmp_path: Path) -> None:
    none = {"dtype": "I64", "shape": [0, 3], "data_offsets": [32, 32]}
    header = {"b": B, "none": none, "__metadata__": {"format": "pt"}, "a": A}
    (tmp_path / "model.safetensors").write_bytes(file_of(header))
    weights = WeightFolder(tmp_path)
    theirs = load((tmp_path / "model.safetensors").read_bytes())
    assert weights.tensors.keys() == theirs.keys() == {"a", "b", "none"}
    for name, tensor in weights.tensors.items():
        assert torch.equal(tensor.whole().view(torch.uint8), theirs[name].view(torch.uint8))
    weights.close()
    save_file({"x": torch.arange(5)}, tmp_path / "model.safetensors")
    assert list(WeightFolder(tmp_path).tensors) == ["x"]


INDEXES = {
    "up": b'{"weight_map":{"a":"../outside.safetensors"}}', "absolute": b'{"weight_map":{"a":"ABSOLUTE"}}',
    "below": b'{"weight_map":{"a":"sub/outside.safetensors"}}', "no text": b'{"weight_map":{"a":3}}',
    "no name": b'{"weight_map":{"a":""}}', "NUL": b'{"weight_map":{"a":"a\\u0000b"}}', "a list": b"[]",
    "no map": b'{"metadata":{}}', "a map that is a list": b'{"weight_map":["a"]}', "no JSON": b"hello",
    "nested": b"[" * 100_000, "no UTF-8": b"\xff", "a key twice": b'{"weight_map":{"a":"b","a":"c"}}',
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_names_files_of_its_folder_only(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder / "sub"):
        (place / "outside.safetensors").write_bytes(file_of({"a": A, "b": B}))
    text = INDEXES[case].replace(b"ABSOLUTE", str(tmp_path / "outside.safetensors").encode())
    (folder / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"index\.json is no index of safetensors files"):
        WeightFolder(folder)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    """A snapshot has links to files that are called by their hash, two folders up."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (blobs / "aaaa").write_bytes(file_of({"a": A, "b": B}))
    (blobs / "bbbb").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/aaaa")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/bbbb")
    weights = WeightFolder(snapshot)
    assert weights.tensors["a"].whole().shape == (2, 4)
    weights.close()


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for make in (os.mkfifo, os.mkdir):
        make(path)
        with pytest.raises(ConfigError, match="not a regular file"):
            SafetensorsFile(path)
        path.rmdir() if path.is_dir() else path.unlink()
    path.symlink_to(path)
    with pytest.raises(TransferError, match=r"read of 0 bytes .*model\.safetensors"):
        SafetensorsFile(path)
