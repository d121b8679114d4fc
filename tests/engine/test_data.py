"""The data loader of `initialize`: an order that all ranks share, and that any number of ranks can go on in."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info
from transformers import BatchEncoding

import infinity
from infinity.engine.data import Loader, moved
from infinity.errors import ConfigError

CPU, META = torch.device("cpu"), torch.device("meta")


class Numbers(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self._count


def loaders(
    count: int, ranks: int, batch: int, *, seed: int = 5, drop_last: bool = False, device: torch.device = CPU,
    collate: Any = None,
) -> list[Loader]:  # fmt: skip
    return [
        Loader(
            Numbers(count), rank=rank, ranks=ranks, batch=batch, seed=seed, collate=collate, drop_last=drop_last,
            device=device,
        )
        for rank in range(ranks)
    ]  # fmt: skip


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


class Augmented(Numbers):
    """With a number that its process draws."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(())) if get_worker_info() else -1.0


KEPT = {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3}


@pytest.mark.parametrize("keys", [{}, KEPT], ids=["fresh", "persistent"])
def test_workers_change_no_order_and_what_they_have_ready_does_not_count(keys):
    """Of two epochs, in the first of which a run is cut and taken up by another process's loader."""

    def made(workers: int) -> Loader:
        options = {"dataloader_num_workers": workers, **(keys if workers else {}), "train_micro_batch_size_per_gpu": 4}
        torch.manual_seed(5)
        engine, _, loader, _ = infinity.initialize(
            model=nn.Linear(1, 1), config={**options, "log_level": "error"}, training_data=Augmented(24)
        )
        with engine:
            assert loader is not None
            assert (loader.num_workers, loader.persistent_workers) == (workers, bool(keys and workers))
            assert loader.prefetch_factor == (keys.get("dataloader_prefetch_factor", 2) if workers else None)
            return loader

    alone = made(0)
    expected = [numbers.tolist() for _ in range(2) for numbers, _ in alone]
    cut = made(2)
    batches = iter(cut)
    got = [next(batches)[0].tolist() for _ in range(2)]
    state = cut.state_dict()
    assert state["drawn"] == 8, "more is ready"
    del batches
    again = made(2)
    again.load_state_dict(state)
    drawn_at_random = []
    for _ in range(2):
        for numbers, luck in again:
            got.append(numbers.tolist())
            drawn_at_random += luck.tolist()
    assert got == expected
    assert len(set(drawn_at_random)) == len(drawn_at_random) and min(drawn_at_random) >= 0


@pytest.mark.parametrize("key", ["dataloader_prefetch_factor", "dataloader_persistent_workers"])
def test_a_key_for_workers_without_any_is_refused(key):
    with pytest.raises(ConfigError, match=f"{key} is for the loader's processes.*dataloader_num_workers"):
        infinity.initialize(model=nn.Linear(1, 1), config={key: 1}, training_data=Numbers(4))


class Pair(NamedTuple):
    inputs: Tensor
    labels: list[Tensor]


def test_batches_come_on_the_engines_device_and_count_as_before():
    """The device `meta` stands for an accelerator: a batch that lies there was moved."""
    (here,), (there,) = loaders(24, 1, 4), loaders(24, 1, 4, device=META)
    on_cpu, batches = iter(here), iter(there)
    for _ in range(2):
        assert next(on_cpu).device == CPU
        assert next(batches).device == META
    assert there.state_dict() == here.state_dict() == {"seed": 5, "epochs": 1, "drawn": 8}
    again = loaders(24, 1, 4, seed=99, device=META)[0]
    again.load_state_dict(there.state_dict())
    assert [batch.device for batch in again] == [META] * 4


def test_a_batch_on_the_cpu_is_the_very_object_that_was_collated():
    made = []

    def collate(samples: list[int]) -> dict[str, Any]:
        made.append({"x": torch.tensor(samples), "nested": [torch.zeros(1)]})
        return made[-1]

    (loader,) = loaders(8, 1, 4, collate=collate)
    for batch in loader:
        assert batch is made[-1]


class Graph:
    """A batch of a kind of its own."""

    def __init__(self, edges: Tensor) -> None:
        self.edges = edges

    def to(self, device: torch.device) -> Graph:
        return Graph(self.edges.to(device))


def test_tensors_move_out_of_any_container_and_nothing_else_changes():
    x = torch.arange(3)
    encoding = BatchEncoding({"input_ids": x, "names": ["a"]})
    counts = defaultdict(list, {"x": [x]})
    batch = {
        "pair": Pair(x, [x, x]),
        "plain": (x, "text", 3),
        "encoding": encoding,
        "counts": counts,
        "graph": Graph(x),
    }
    got = moved(batch, META)
    assert type(got["pair"]) is Pair
    tensors = [
        got["pair"].inputs, *got["pair"].labels, got["plain"][0], got["encoding"]["input_ids"], got["counts"]["x"][0],
        got["graph"].edges,
    ]  # fmt: skip
    assert all(tensor.device == META for tensor in tensors)
    assert got["plain"][1:] == ("text", 3)
    assert (got["encoding"]["names"], got["counts"]["other"]) == (["a"], [])
    assert batch["plain"][0] is counts["x"][0] is x, "the program's own containers are left alone"
