"""CRC-32C by instruction, by tables and by the Python fallback: the published values, and the same for any bytes."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest
import torch

from infinity.errors import TransferError
from infinity.ops import build
from infinity.ops.aio import File, Queue
from infinity.ops.crc32c import crc32c
from tests.support.backends import every_backend

# RFC 3720, appendix B.4, and the check value of the catalogue of parametrised CRC algorithms.
_PUBLISHED = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
]
_SIZES = [0, 1, 7, 8, 9, 255, 256, 257, 511, 512, 767, 768, 769, 4097, 12287, 12288, 12289, 50_000, 716_928]


def _native(data: bytes, crc: int, way: int) -> int:
    function = build.require("aio").infinity_aio_crc32c
    function.restype = ctypes.c_uint32
    return function(ctypes.c_uint32(crc), data, ctypes.c_uint64(len(data)), ctypes.c_int32(way))


@pytest.mark.parametrize(("data", "expected"), _PUBLISHED)
def test_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@pytest.mark.skipif(build.load("aio") is None, reason="no native library here")
@pytest.mark.parametrize("way", [0, 1, 2])
def test_native_code_agrees_with_the_fallback(way: int) -> None:
    for data, expected in _PUBLISHED:
        assert _native(data, 0, way) == expected
    pool = torch.randint(256, (800_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    before = 0
    for index, size in enumerate(_SIZES):
        data = pool[index : index + size].tobytes()
        assert _native(data, before, way) == crc32c(data, before)
        before = crc32c(data)


@pytest.mark.parametrize("cut", [0, 1, 300, 5000, 9999, 10_000])
def test_a_checksum_goes_on_where_another_ended(cut: int) -> None:
    data = bytes(index * index % 251 for index in range(10_000))
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


@every_backend
@pytest.mark.parametrize("block_nbytes", [65536, 1 << 20])
def test_requests_know_their_checksum(tmp_path: Path, backend: str, block_nbytes: int) -> None:
    with File.create(tmp_path / "data.bin", 8 << 20) as file, Queue(backend, block_nbytes=block_nbytes) as queue:
        for size in (1, 511, 4096, 4097, 716_928, 3 << 20):
            data = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
            expected = crc32c(data.numpy().tobytes())
            written = queue.write(file, 4096, data, checksum=True)
            written.wait()
            assert written.checksum == expected
            back = torch.empty_like(data)
            read = queue.read(file, 4096, back, expected=expected)
            read.wait()
            assert read.checksum == expected and back.equal(data)
            plain = queue.read(file, 4096, back)
            plain.wait()
            assert plain.checksum is None


@every_backend
def test_bytes_that_differ_are_an_error_that_names_them(tmp_path: Path, backend: str) -> None:
    with File.create(tmp_path / "data.bin", 1 << 20) as file, Queue(backend) as queue:
        buffer = torch.empty(8192, dtype=torch.uint8)
        found = crc32c(bytes(8192))
        for _ in range(2):
            request = queue.read(file, 4096, buffer, expected=found ^ 1)
            with pytest.raises(TransferError) as caught:
                request.wait()
            error = caught.value
            assert (error.errno, error.path, error.offset) == (errno.EBADMSG, file.path, 4096)
            assert f"CRC-32C {found:#010x}, but {found ^ 1:#010x} was expected" in str(error)


def lines_of(data: bytes) -> bytes:
    """The bytes that a sampled checksum is of."""
    places = (4096 * page + page * 37 % 64 * 64 for page in range(-(-len(data) // 4096)))
    return b"".join(data[at : at + 64] for at in places)


@every_backend
@pytest.mark.parametrize("block_nbytes", [512, 65536, 1 << 20])
def test_a_sampled_checksum_is_of_one_line_a_page(tmp_path: Path, backend: str, block_nbytes: int) -> None:
    with File.create(tmp_path / "data.bin", 2 << 20) as file, Queue(backend, block_nbytes=block_nbytes) as queue:
        for size in (1, 4096, 4097, 716_928):
            data = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
            written = queue.write(file, 4096, data, checksum=True, sampled=True)
            written.wait()
            assert written.checksum == crc32c(lines_of(data.numpy().tobytes()))
            back = torch.empty_like(data)
            queue.read(file, 4096, back, expected=written.checksum, sampled=True).wait()
            assert back.equal(data)
            # What lies outside the lines does not count; what lies in them does.
            for at in (5 * 4096 + 100, 5 * 4096 + 5 * 37 * 64 % 4096):
                if at < size:
                    data[at] ^= 1
            queue.write(file, 4096, data).wait()
            request = queue.read(file, 4096, back, expected=written.checksum, sampled=True)
            if size > 6 * 4096:
                with pytest.raises(TransferError, match="CRC-32C"):
                    request.wait()
            else:
                request.wait()
