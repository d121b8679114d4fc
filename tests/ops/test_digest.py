"""Checksums that a step takes of what it writes are those of the bytes that it leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from infinity.ops import adam, build
from infinity.ops.adam import AdamHyper, LionHyper, Piece, adam_step
from infinity.ops.checksum import checksum
from infinity.ops.digest import Digest

pytestmark = pytest.mark.skipif(
    build.load("adam") is None or build.load("aio") is None, reason="no native library here"
)
_BLOCK = 1 << 18


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    adam.set_threads(None)


def _blocks(buffer: Tensor) -> tuple[int, ...]:
    return tuple(checksum(block.numpy()) for block in buffer.split(_BLOCK))


def _digest(buffer: Tensor) -> Digest:
    made = Digest(_BLOCK)
    made.buffer = buffer
    return made


class _States:
    """A buffer with sections one behind the other, some bytes between them, as a partition of states has."""

    def __init__(self, numel: int, kinds: tuple[torch.dtype, ...], gap: int) -> None:
        generator = torch.Generator().manual_seed(numel)
        # Sections begin at whole words.
        sizes = [-(-numel * kind.itemsize // 8) * 8 + gap for kind in kinds]
        nbytes = sum(sizes)
        self.buffer = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)
        self.sections: list[Tensor] = []
        at = 0
        for kind, size in zip(kinds, sizes, strict=True):
            section = self.buffer[at : at + numel * kind.itemsize].view(kind)
            section.copy_(torch.randn(numel, generator=generator).abs())
            self.sections.append(section)
            at += size


# Below a chunk, at its end, behind it, and over several blocks; the gaps put sections off the blocks.
@pytest.mark.parametrize("numel", [0, 1, 2047, 2049, 32768, 32769, 100_003, 1_000_000])
@pytest.mark.parametrize("gap", [0, 64, 4096])
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_are_those_of_the_bytes(numel: int, gap: int, threads: int) -> None:
    adam.set_threads(threads)
    states = _States(numel, (torch.int16, torch.float32, torch.float32), gap)
    remainder, exp_avg, exp_avg_sq = states.sections
    remainder.zero_()
    param, grad = torch.ones(numel, dtype=torch.bfloat16), torch.randn(numel)
    grad[numel // 2 : numel // 2 + 3] = torch.inf
    hyper = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, adamw=True)
    twin = [tensor.clone() for tensor in (param, exp_avg, exp_avg_sq, remainder)]
    # Two parameters that step apart, and between them some elements that are not stepped at all.
    cuts = [slice(0, numel // 3), slice(numel // 3 + 5, numel)]
    digest = _digest(states.buffer)
    for step, at in enumerate(cuts, start=1):
        piece = Piece(param[at], grad[at], exp_avg[at], exp_avg_sq[at], remainder[at], hyper=hyper)
        adam_step([piece], step=step, grad_scale=0.5, native=True, digests=[digest])
        again = Piece(twin[0][at], grad[at], twin[1][at], twin[2][at], twin[3][at], hyper=hyper)
        adam_step([again], step=step, grad_scale=0.5, native=True)
    assert digest.finish() == (_blocks(states.buffer) if numel > 5 else ())
    for tensor, expected in zip((param, exp_avg, exp_avg_sq, remainder), twin, strict=True):
        assert tensor.equal(expected)


def test_one_state_and_a_master_are_digested_too() -> None:
    states = _States(300_000, (torch.float32, torch.float32), 64)
    master, exp_avg = states.sections
    param = master.half()
    digest = _digest(states.buffer)
    piece = Piece(param, torch.randn(300_000), exp_avg, master=master, hyper=LionHyper(1e-3, 0.9, 0.99, 0.1))
    adam_step([piece], step=1, grad_scale=1.0, native=True, digests=[digest])
    assert digest.finish() == _blocks(states.buffer)


def test_a_parameter_has_a_digest_of_its_own_that_may_move() -> None:
    hyper = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, adamw=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        states = _States(300_000, (torch.float32, torch.float32, torch.float32), 64)
        *moments, master = states.sections
        params = _States(400_000, (dtype,), 64)
        digests = [_digest(params.buffer), _digest(states.buffer)]
        for at in (slice(0, 100_001), slice(100_003, 300_000)):
            # Parameters have been away in between, and lie elsewhere now.
            home = params.buffer.clone()
            digests[0].buffer = home
            param = home[: 400_000 * dtype.itemsize].view(dtype)
            cut = [tensor[at] for tensor in moments]
            piece = Piece(param[at], torch.ones(at.stop - at.start), *cut, hyper=hyper,
                          master=None if dtype is torch.float32 else master[at])  # fmt: skip
            adam_step([piece], step=1, grad_scale=1.0, native=True, digests=digests)
            params.buffer = home
        assert digests[0].finish() == _blocks(params.buffer)
        assert digests[1].finish() == _blocks(states.buffer)


def test_what_lies_elsewhere_or_is_stepped_by_the_twin_is_not_digested() -> None:
    states = _States(1000, (torch.float32, torch.float32), 0)
    hyper = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, adamw=True)
    elsewhere = Piece(*(torch.ones(1000) for _ in range(4)), hyper=hyper)
    digest = _digest(states.buffer)
    adam_step([elsewhere], step=1, grad_scale=1.0, native=True, digests=[digest])
    adam_step([Piece(torch.ones(1000), torch.ones(1000), *states.sections, hyper=hyper)], step=1, grad_scale=1.0,
              native=False, digests=[digest])  # fmt: skip
    assert digest.finish() == ()
