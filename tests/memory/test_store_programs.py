"""Random programs over the store against a dictionary of what every partition must hold.

Partitions, arenas and programs are drawn from a seed. Arenas are as tight as the largest lease of the program allows,
so that eviction, waiting and the new start from an empty arena happen all the time.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from infinity.errors import StateError, TransferError
from infinity.memory.arena import piece_nbytes
from infinity.memory.partition import State
from infinity.memory.store import TieredStore
from infinity.plan.types import Key, Kind, PartitionSpec, Tier
from tests.memory.conftest import PAGE, Bench, param, states

VERBS = ("read", "write", "write", "fresh", "prefetch", "prefetch", "flush", "flush", "drop", "discard", "settle")


class Program:
    """One random program: a step is one verb on a few partitions, followed by every check there is."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        homes = [Tier.NVME] * 6 + [Tier.CPU, Tier.GPU]
        params = [
            param(index, self.rng.randint(0, 5), self.rng.choice(homes)) for index in range(self.rng.randint(3, 7))
        ]
        groups = [
            states(index, self.rng.randint(1, 4), self.rng.choice(homes)) for index in range(self.rng.randint(1, 3))
        ]
        self.specs: list[PartitionSpec] = [*params, *groups]
        self.sets = [
            self.rng.sample([spec.key for spec in self.specs], self.rng.randint(1, min(3, len(self.specs))))
            for _ in range(6)
        ]
        self.sets += [[spec.key] for spec in self.specs]
        # None: the store may forget it, zeros are expected.
        self.expected: dict[Key, int | None] = {spec.key: None for spec in self.specs}
        self.value = 0

    def pages(self, kind: Kind) -> int:
        """The tightest arena that holds every set of partitions that is leased at once."""
        nbytes = {
            spec.key: piece_nbytes(spec.nbytes) if spec.home is Tier.NVME and spec.nbytes else 0 for spec in self.specs
        }
        return max(sum(nbytes[key] for key in keys if key.kind is kind) for keys in self.sets) // PAGE

    def step(self, made: Bench) -> None:
        """One verb on one of the sets."""
        keys, verb = self.latest = self.rng.choice(self.sets), self.rng.choice(VERBS)
        store = made.store
        if verb == "read":
            with store.read(*keys) as partitions:
                for partition in partitions:
                    self.verify(partition.key, partition.buffer)
                self.disturb(made, keys)
                for partition in partitions:
                    self.verify(partition.key, partition.buffer)
        elif verb in ("write", "fresh"):
            with store.write(*keys, fresh=verb == "fresh") as partitions:
                for partition in partitions:
                    if verb == "write":
                        self.verify(partition.key, partition.buffer)
                    self.value = (self.value + 1) % 251
                    self.expected[partition.key] = self.value
                    partition.buffer.fill_(self.value)
        elif verb == "settle":
            store.settle()
            assert all(store[spec.key].transfer is None for spec in self.specs)
        elif verb == "discard":
            store.discard(*keys)
            self.expected.update(dict.fromkeys(keys))
        else:
            getattr(store, verb)(*keys)
        store.check()

    def disturb(self, made: Bench, keys: list[Key]) -> None:
        """While partitions are read, everything that does not wait for them may happen to them and to others."""
        other = self.rng.choice(self.sets)
        self.rng.choice([made.store.prefetch, made.store.flush, made.store.drop])(*other)
        made.store.check()

    def verify(self, key: Key, buffer: torch.Tensor) -> None:
        """The oracle."""
        expected = self.expected[key] or 0
        assert (buffer == expected).all(), f"{key} holds {buffer[:4].tolist()}, not {expected}"

    def finish(self, made: Bench) -> None:
        """Everything, once more."""
        for key in self.expected:
            self.verify(key, made.content(key))
        made.store.check()


def run(bench, number: int, steps: int, **options: object) -> tuple[Program, Bench]:
    program = Program(number)
    made = bench(
        program.specs, param_pages=program.pages(Kind.PARAM), states_pages=program.pages(Kind.STATES), **options
    )
    for _ in range(steps):
        program.step(made)
    program.finish(made)
    return program, made


@pytest.mark.parametrize("seed", range(40))
def test_every_value_is_kept_on_a_tier_that_delays_and_reorders(bench, seed):
    run(bench, seed, 120, seed=seed, polls_max=seed % 12)


@pytest.mark.parametrize("seed", range(6))
def test_every_value_is_kept_in_a_file(bench, seed):
    run(bench, seed, 120, real=True)


@pytest.mark.parametrize("seed", range(6))
def test_without_overlap_every_value_is_kept_and_nothing_is_in_flight(bench, seed):
    _, made = run(bench, seed, 120, seed=seed, overlap=False, polls_max=1000)
    assert not made.tier.flying


def test_the_programs_evict_wait_and_start_anew(bench, monkeypatch):
    # Otherwise the claims above would be about nothing.
    cleared: list[object] = []
    clear = TieredStore._clear
    monkeypatch.setattr(TieredStore, "_clear", lambda store, keys: (cleared.append(keys), clear(store, keys)))
    reads = writes = 0
    for seed in range(40):
        _, made = run(bench, seed, 120, seed=seed, polls_max=seed % 12)
        reads += sum(not asked.is_write for asked in made.tier.requests)
        writes += sum(asked.is_write for asked in made.tier.requests)
    assert len(cleared) >= 5 and reads > 400 and writes > 400


@pytest.mark.parametrize("seed", range(20))
def test_what_did_not_fail_is_kept_when_transfers_fail(bench, seed):
    program = Program(seed)
    rng = random.Random(seed)
    made = bench(
        program.specs, param_pages=program.pages(Kind.PARAM), states_pages=program.pages(Kind.STATES), seed=seed,
        faults=lambda asked: rng.random() < 0.1,
    )  # fmt: skip
    for _ in range(100):
        before = dict(program.expected)
        try:
            program.step(made)
        except (TransferError, StateError):
            # What the step was about to write was not written; what it was to replace or to forget may be gone.
            program.expected = before
            keys, verb = program.latest
            forget(program, made, keys if verb in ("fresh", "discard") else [])
        made.store.check()
        forget(program, made, [key for key in program.expected if made.store[key].state is State.FAILED])
    made.tier.faults = lambda asked: False
    while any(made.store[key].transfer for key in program.expected):
        with contextlib.suppress(TransferError):
            made.store.settle()
    forget(program, made, [key for key in program.expected if made.store[key].state is State.FAILED])
    assert any(value is not None for value in program.expected.values())
    program.finish(made)


def forget(program: Program, made: Bench, keys: list[Key]) -> None:
    for key in keys:
        while made.store[key].state is not State.ABSENT:
            with contextlib.suppress(TransferError):
                made.store.discard(key)
        program.expected[key] = None
