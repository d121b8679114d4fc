"""The arena against a model of it: pieces never overlap, are aligned, and become one range again."""

from __future__ import annotations

import random

import pytest
import torch

from infinity.memory.arena import Arena, piece_nbytes
from infinity.memory.tiers.pinned import page_aligned
from infinity.plan.types import EXTENT_ALIGNMENT

PAGE = EXTENT_ALIGNMENT


@pytest.mark.parametrize("seed", range(8))
def test_pieces_never_overlap_and_none_is_lost(seed):
    rng = random.Random(seed)
    pages = rng.randint(1, 24)
    arena = Arena("test", page_aligned(pages * PAGE))
    held: list[tuple[torch.Tensor, int]] = []
    for count in range(300):
        if rng.random() < 0.55:
            nbytes = rng.randint(1, max(1, pages * PAGE // 3))
            piece = arena.take(nbytes)
            free = [True] * pages
            for other, size in held:
                first = other.storage_offset() // PAGE
                free[first : first + piece_nbytes(size) // PAGE] = [False] * (piece_nbytes(size) // PAGE)
            wanted = piece_nbytes(nbytes) // PAGE
            fits = any(all(free[at : at + wanted]) for at in range(pages - wanted + 1))
            assert (piece is not None) == fits
            if piece is not None:
                assert piece.numel() == nbytes and piece.data_ptr() % PAGE == 0
                piece.fill_(count % 251)
                held.append((piece, nbytes))
        elif held:
            piece, _ = held.pop(rng.randrange(len(held)))
            assert (piece == piece[0]).all(), "somebody wrote into this piece"
            arena.give(piece)
        assert arena.taken_nbytes == sum(piece_nbytes(size) for _, size in held) <= arena.nbytes
    for piece, _ in held:
        arena.give(piece)
    whole = arena.take(pages * PAGE)
    assert whole is not None and whole.numel() == pages * PAGE


def test_returning_a_piece_twice_is_an_error():
    arena = Arena("test", page_aligned(4 * PAGE))
    piece = arena.take(PAGE)
    arena.give(piece)
    with pytest.raises(KeyError):
        arena.give(piece)


def test_pieces_without_bytes_do_not_collide():
    arena = Arena("test", page_aligned(4 * PAGE))
    first, second = arena.take(0), arena.take(0)
    assert arena.taken_nbytes == 2 * PAGE
    arena.give(first)
    arena.give(second)
    assert arena.taken_nbytes == 0


def test_a_tail_shorter_than_a_page_is_not_handed_out():
    arena = Arena("test", page_aligned(2 * PAGE)[: PAGE + 100])
    assert arena.take(10) is not None
    assert arena.take(10) is None


def test_after_close_nothing_is_handed_out_and_pieces_stay_valid():
    arena = Arena("test", page_aligned(2 * PAGE))
    piece = arena.take(PAGE)
    arena.close()
    assert arena.take(1) is None
    piece.fill_(3)
    arena.give(piece)
    assert (piece == 3).all()
