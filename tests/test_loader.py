"""The data loader of `initialize`: an order that all ranks share, and that any number of ranks can go on in."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from infinity.loader import Loader


class Numbers(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self._count


def loaders(count: int, ranks: int, batch: int, *, seed: int = 5, drop_last: bool = False) -> list[Loader]:
    return [
        Loader(Numbers(count), rank=rank, ranks=ranks, batch=batch, seed=seed, collate=None, drop_last=drop_last)
        for rank in range(ranks)
    ]


def drawn(each: list[Loader], batches: int | None = None) -> list[list[int]]:
    """What each rank draws in an epoch, or in so many batches of it, in one list."""
    return [[int(number) for batch in islice(iter(loader), batches) for number in batch] for loader in each]


@pytest.mark.parametrize(("count", "ranks", "batch"), [(24, 1, 4), (24, 3, 2), (23, 2, 3), (3, 4, 2)])
def test_ranks_share_an_epoch_and_epochs_differ(count, ranks, batch):
    each = loaders(count, ranks, batch)
    first, second = drawn(each), drawn(each)
    for epoch in (first, second):
        assert set().union(*map(set, epoch)) == set(range(count))
        assert len({len(mine) for mine in epoch}) == 1
        assert sum(map(len, epoch)) == -(-count // ranks) * ranks
    assert count < 4 or first != second
    assert drawn(loaders(count, ranks, batch)) == first, "the seed says it all"
    assert [len(loader) for loader in each] == [-(-len(mine) // batch) for mine in first]


def test_drop_last_gives_whole_batches_only():
    each = loaders(23, 2, 3, drop_last=True)
    assert [len(mine) for mine in drawn(each)] == [9, 9]
    assert [len(loader) for loader in each] == [3, 3]


@pytest.mark.parametrize(("ranks", "batch"), [(1, 2), (2, 1), (2, 2), (4, 1), (1, 8)])
def test_any_number_of_ranks_goes_on_behind_what_was_drawn(ranks, batch):
    """Of 24 samples, 2 ranks have drawn 2 batches of 2 each."""
    before = loaders(24, 2, 2)
    whole = drawn(before)
    before = loaders(24, 2, 2)
    drawn(before)
    iterators = [iter(loader) for loader in before]
    got = [int(number) for _ in range(2) for iterator in iterators for number in next(iterator)]
    state = before[0].state_dict()
    assert state == before[1].state_dict()
    after = loaders(24, ranks, batch, seed=99)
    for loader in after:
        loader.load_state_dict(state)
    rest = drawn(after)
    assert sorted(got + [number for mine in rest for number in mine]) == list(range(24))
    # The next epoch is a whole one, in the old seed's order.
    following = drawn(after)
    assert sorted(number for mine in following for number in mine) == list(range(24))
    assert whole != following


def test_the_same_topology_goes_on_with_the_next_batch():
    full = loaders(30, 1, 4)
    drawn(full)
    expected = [batch.tolist() for batch in full[0]] + [batch.tolist() for batch in full[0]]
    cut = loaders(30, 1, 4)
    drawn(cut)
    got = [batch.tolist() for batch in islice(iter(cut[0]), 3)]
    again = loaders(30, 1, 4)
    again[0].load_state_dict(cut[0].state_dict())
    got += [batch.tolist() for batch in again[0]] + [batch.tolist() for batch in again[0]]
    assert got == expected


def test_a_finished_epoch_is_followed_by_the_next():
    each = loaders(8, 1, 4)
    first, second = drawn(each), drawn(each)
    again = loaders(8, 1, 4)
    drawn(again)
    taken = loaders(8, 1, 4)
    taken[0].load_state_dict(again[0].state_dict())
    assert drawn(again) == second != first
    assert drawn(taken) == second


@pytest.mark.parametrize(("count", "ranks", "batch", "batches"), [(10, 1, 4, 2), (23, 2, 3, 3)])
def test_an_epoch_without_another_whole_batch_is_finished(count, ranks, batch, batches):
    each = loaders(count, ranks, batch, drop_last=True)
    drawn(each, batches - 1)
    began = each[0].state_dict()
    drawn(each, batches)
    ended = each[0].state_dict()
    expected = drawn(each)
    for state, left in ((began, 1), (ended, batches)):
        again = loaders(count, ranks, batch, drop_last=True)
        for loader in again:
            loader.load_state_dict(state)
        rest = drawn(again)
        assert [len(mine) for mine in rest] == [left * batch] * ranks
    assert rest == expected


def test_nothing_is_taken_from_the_programs_generator():
    state = torch.get_rng_state()
    drawn(loaders(8, 1, 4))
    assert torch.equal(torch.get_rng_state(), state)
