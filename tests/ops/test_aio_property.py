"""Ten thousand requests of mixed sizes, offsets and priorities in flight at a time, against a byte oracle."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from infinity.ops.aio import File, Queue
from tests.support.backends import every_backend

_COUNT = 10_000
_PAGE = 4096
_SIZES = [0, 1, 511, 512, 513, 4096, 4097]


def _places(rng: random.Random) -> list[tuple[int, int]]:
    """(offset, size) of requests of which no two touch one page, in any order."""
    places, page = [], 0
    for index in range(_COUNT):
        size = 716_928 if index % 400 == 0 else rng.choice(_SIZES)
        offset = page * _PAGE + rng.choice([0, 0, 512, 1024, rng.randrange(_PAGE)])
        places.append((offset, size))
        page = (offset + size) // _PAGE + 1
    rng.shuffle(places)
    return places


@every_backend
def test_ten_thousand_requests_in_flight_agree_with_an_oracle(tmp_path: Path, backend: str) -> None:
    rng = random.Random(backend)
    places = _places(rng)
    file_nbytes = max(offset + size for offset, size in places) + _PAGE
    pool = torch.randint(256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    oracle = torch.zeros(file_nbytes, dtype=torch.uint8)
    copies = torch.empty(file_nbytes, dtype=torch.uint8)
    with File.create(tmp_path / "data.bin", file_nbytes) as file, Queue(backend, block_nbytes=1 << 18) as queue:
        for reads in (0.0, 0.5):
            requests, read = [], []
            for offset, size in places:
                priority = rng.randrange(-3, 4)
                if rng.random() < reads:
                    part = copies[offset : offset + size]
                    requests.append(queue.read(file, offset, part, priority=priority))
                    read.append((offset, size))
                else:
                    start = rng.randrange(pool.numel() - size)
                    oracle[offset : offset + size] = pool[start : start + size]
                    requests.append(queue.write(file, offset, pool[start : start + size], priority=priority))
            # In another order than they were submitted, and some that nobody waits for.
            for request in rng.sample(requests, len(requests) // 2):
                request.wait()
            for request in requests:
                request.wait()
            for offset, size in read:
                assert copies[offset : offset + size].equal(oracle[offset : offset + size])
    assert torch.frombuffer(bytearray((tmp_path / "data.bin").read_bytes()), dtype=torch.uint8).equal(oracle)
