"""The activation tier keeps every byte for as long as somebody holds it and no longer, on a drive that is awkward."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infinity.base.transfer import Transfer
from infinity.errors import StateError, TierMemoryError, TransferError
from infinity.memory import scratch
from infinity.memory.activation_tier import ActivationTier, SavedTensor
from infinity.memory.ledger import Ledger
from infinity.memory.tiers.device import Device
from infinity.plan.capacity import Capacity
from infinity.plan.types import Kind, Tier
from tests.support.private_memory import private_now
from tests.support.simulated_tier import Asked, SimulatedTier

CPU = Device(torch.device("cpu"))
PAGE = 4096


class Bench:
    """A tier over simulated files, which it remembers."""

    def __init__(
        self, home: str, *, seed: int = 0, faults: Callable[[Asked], bool] = lambda asked: False, polls_max: int = 4,
        device: Device = CPU, **options: Any,
    ) -> None:  # fmt: skip
        self.ledger = Ledger(limits=options.pop("limits", Capacity()))
        self.files: list[SimulatedTier] = []

        def open_file(nbytes: int) -> Any:
            self.files.append(SimulatedTier(nbytes, seed=seed + len(self.files), polls_max=polls_max, faults=faults))
            return self.files[-1]

        folders = SimpleNamespace(tier=Tier.NVME, open=open_file) if home == "nvme" else None
        self.tier = ActivationTier(device, ledger=self.ledger, folders=folders, **options)

    def quiet(self) -> None:
        """Let everything in flight end."""
        for file in self.files:
            while file.flying:
                file.poll()
        self.tier.settle()

    def now(self, kind: Kind = Kind.ACTIVATION) -> dict[str, int]:
        self.tier.settle()
        return {tier.value: self.ledger.now.get((tier, kind), 0) for tier in Tier}


class Queueing(Device):
    """A device that copies when it comes to it: once `late`, only when the host stops for it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.late = False
        self.queue: list[Queued] = []

    def copy(self, target: Tensor, source: Tensor) -> Transfer:
        copy = Queued(target, source)
        self.queue.append(copy)
        if not self.late:
            self.synchronize()
        return copy

    def arrived(self, transfer: Transfer) -> None:
        if isinstance(transfer, Queued):
            self.synchronize()
        transfer.wait()

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0).move()


class Queued:
    """One copy. As with a stream, waiting for it does not stop the host."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._tensors: tuple[Tensor, Tensor] | None = target, source

    def move(self) -> None:
        if self._tensors is not None:
            target, source = self._tensors
            target.copy_(source)
            self._tensors = None

    def done(self) -> bool:
        return self._tensors is None

    def wait(self) -> None:
        return None


def random_tensor(chance: random.Random) -> Tensor:
    """Of any size up to forty pages and any layout that a model passes from block to block."""
    rows, columns = chance.randint(1, 20), chance.choice([1, 100, 512])
    dtype = chance.choice([torch.float32, torch.bfloat16])
    tensor = torch.randn(rows, columns, 2).to(dtype)
    layout = chance.randrange(4)
    if layout == 1:
        return tensor.transpose(0, 1)
    if layout == 2:
        return tensor[:, :, :1]
    return tensor[:1].expand(3, columns, 2) if layout == 3 else tensor


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype == expected.dtype


@pytest.mark.parametrize("seed", range(8))
def test_every_tensor_comes_back_as_it_was(seed):
    """Random programs: puts, gets in any order and again, drops at any time."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    home = chance.choice(["cpu", "nvme", "nvme"])
    bench = Bench(home, seed=seed, buffer_count=chance.randint(1, 4), overlap=chance.random() < 0.8)
    held: dict[int, tuple[SavedTensor, Tensor]] = {}
    for step in range(200):
        action = chance.random()
        if action < 0.45 or not held:
            tensor = random_tensor(chance)
            expected = _copy(tensor)
            saved = bench.tier.put(tensor)
            assert saved is not None
            # The tensor's own memory is somebody else's now.
            tensor.untyped_storage().fill_(0)
            held[step] = saved, expected
        elif action < 0.8:
            saved, expected = held[chance.choice([*held][-4:])]
            assert same(bench.tier.get(saved), expected)
        else:
            del held[chance.choice([*held])]
        if len(held) > 25:
            held.clear()
    for saved, expected in held.values():
        assert same(bench.tier.get(saved), expected)
    del saved
    held.clear()
    bench.quiet()
    assert bench.tier.live_nbytes == 0
    assert not any(bench.now().values())
    bench.tier.close()
    assert not any(bench.ledger.now.values())


def _copy(tensor: Tensor) -> Tensor:
    """Its values and strides on other memory."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def puts(bench: Bench, count: int, numel: int = PAGE) -> list[tuple[SavedTensor, Tensor]]:
    """`count` tensors of `numel` floats, whose own memory is gone."""
    found = []
    for index in range(count):
        tensor = torch.full((numel,), float(index))
        saved = bench.tier.put(tensor)
        assert saved is not None
        found.append((saved, tensor))
    return found


def test_backward_finds_what_forward_put_read_ahead_of_it():
    bench = Bench("nvme", buffer_count=3)
    held = puts(bench, 12)
    (file,) = bench.files
    bench.quiet()
    writes = len(file.requests)
    reads = []
    for saved, expected in reversed(held):
        assert torch.equal(bench.tier.get(saved), expected)
        reads.append(len(file.requests) - writes)
    # The last three are still in staging; from then on each get finds its read begun two gets before.
    assert reads == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]
    assert all(not asked.is_write for asked in file.requests[writes:])


@pytest.mark.parametrize("ordered", [True, False])
def test_the_backward_of_an_earlier_micro_batch_finds_its_tensors_read_ahead(ordered):
    """One forward and one backward in turns, as on the first of three pipeline ranks."""
    bench = Bench("nvme", buffer_count=4)
    # Last in, first out, were it not said.
    bench.tier.order.expect(range(6) if ordered else range(5, -1, -1))
    open_: dict[int, list[tuple[SavedTensor, Tensor]]] = {}
    cold = []
    for micro_batch in range(8):
        if micro_batch < 6:
            bench.tier.order.begin_forward(micro_batch)
            open_[micro_batch] = puts(bench, 5)
            bench.quiet()
        if micro_batch < 2:
            continue
        for at, (saved, expected) in enumerate(reversed(open_.pop(micro_batch - 2))):
            if saved.record.buffer is None:
                cold.append((micro_batch - 2, at))
            assert torch.equal(bench.tier.get(saved), expected)
        del saved
        bench.quiet()
    assert cold == ([] if ordered else [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)])
    assert bench.ledger.peak[Tier.CPU, Kind.POOL] == 4 * 4 * PAGE


def test_what_is_in_flight_is_bounded_by_the_buffers():
    bench = Bench("nvme", buffer_count=2)
    puts(bench, 20)
    assert bench.ledger.peak[Tier.CPU, Kind.POOL] == 2 * 4 * PAGE
    assert bench.ledger.now.get((Tier.GPU, Kind.ACTIVATION), 0) == 0


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_staging_buffer_is_not_read_into_while_a_copy_from_it_is_queued(forgotten):
    """The host runs ahead of the device: `get` returns before a byte has moved, and the write is not done either."""
    device = Queueing()
    bench = Bench("nvme", device=device, buffer_count=1, polls_max=1 << 30)
    first, (saved, expected) = puts(bench, 2)
    device.late = True
    found = bench.tier.get(saved)
    if forgotten:
        del saved
    before = bench.tier.get(first[0])
    device.synchronize()
    assert torch.equal(found, expected) and torch.equal(before, first[1])
    bench.tier.close()
    assert not any(bench.ledger.now.values())


def test_memory_is_not_given_back_while_a_copy_from_it_is_queued():
    device = Queueing()
    bench = Bench("cpu", device=device)
    held = puts(bench, 2)
    device.late = True
    found = [bench.tier.get(saved) for saved, _ in held]
    expected = [tensor for _, tensor in held]
    del held
    assert bench.now()["cpu"] == 2 * 4 * PAGE
    device.synchronize()
    assert not any(bench.now().values())
    assert all(map(torch.equal, found, expected))


def test_a_pass_reuses_the_space_of_the_one_before(monkeypatch):
    """The first pass finds out how much there is; then there is one slab of that size, and no pass adds to it."""
    monkeypatch.setattr(scratch, "FILE_NBYTES", 4 * PAGE)
    for home in ("cpu", "nvme"):
        bench = Bench(home)
        sizes = []
        for _ in range(4):
            held = puts(bench, 40)
            for saved, expected in reversed(held):
                assert torch.equal(bench.tier.get(saved), expected)
            del held, saved
            bench.quiet()
            sizes.append((bench.now(Kind.POOL), len(bench.files)))
        assert sizes[1] == sizes[2] == sizes[3]
        own = sizes[-1][0]["nvme" if home == "nvme" else "cpu"]
        assert own == 40 * 4 * PAGE
        assert not any(bench.now().values())


def test_a_tensor_that_several_blocks_save_is_kept_once():
    bench = Bench("cpu")
    shared = torch.arange(1000.0)
    first, second = bench.tier.put(shared), bench.tier.put(shared.detach())
    assert first is second
    assert bench.now()["cpu"] == PAGE
    # Changed, or another view, it is another tensor.
    assert bench.tier.put(shared[:500]) is not first
    shared.add_(1)
    assert bench.tier.put(shared) is not first
    assert torch.equal(bench.tier.get(first), shared - 1)


def test_a_tensor_with_gaps_stays_where_it_is():
    bench = Bench("cpu")
    assert bench.tier.put(torch.zeros(64, 64)[:, :4]) is None
    assert bench.tier.put(torch.zeros(0, 64)) is None


@pytest.mark.parametrize("buffer_count", [1, 3])
def test_a_write_that_fails_is_a_transfer_error(buffer_count):
    """At the latest when its buffer is wanted; what is in other places goes on, and so does what comes after it."""
    bench = Bench("nvme", buffer_count=buffer_count, faults=lambda asked: asked.is_write and asked.count == 1)
    held: list[tuple[SavedTensor, Tensor]] = []
    with pytest.raises(TransferError, match="write of"):
        held += puts(bench, 9)
        for saved, _ in reversed(held):
            bench.tier.get(saved)
    # What has failed goes with its graph.
    held = []
    saved = None
    after = puts(bench, 9)
    for saved, expected in reversed(after):
        assert torch.equal(bench.tier.get(saved), expected)
    bench.tier.close()
    assert not any(bench.ledger.now.values())


def test_a_read_that_fails_is_a_transfer_error():
    bench = Bench("nvme", buffer_count=2, faults=lambda asked: not asked.is_write)
    held = puts(bench, 9)
    with pytest.raises(TransferError, match="read of"):
        for saved, _ in reversed(held):
            bench.tier.get(saved)
    bench.tier.close()
    assert not any(bench.ledger.now.values())


@pytest.mark.parametrize(("nbytes", "given_back"), [(1 << 20, False), (8 << 20, True)])
def test_between_the_layers_of_a_long_sequence_gaps_of_the_heap_go_back(nbytes, given_back):
    bench = Bench("cpu")
    subject: Any = torch.ones(nbytes // 4)
    for move in (bench.tier.put, bench.tier.get):
        # 56 MB in pieces of the heap, each eighth of which stays.
        kept = [torch.ones(25_600) for _ in range(640)][::8]
        before = private_now().own
        subject = move(subject)
        assert (before - private_now().own > 30e6) is given_back and len(kept) == 80
    assert subject.eq(1).all()
    bench.tier.close()


def test_a_limit_of_the_tier_is_kept():
    for home, limits in (("cpu", Capacity(cpu=10 * PAGE)), ("nvme", Capacity(nvme=10 * PAGE))):
        bench = Bench(home, limits=limits)
        with pytest.raises(TierMemoryError, match=f"no room on {home} for activation checkpoints"):
            puts(bench, 3)


def test_after_close_a_graph_says_why_it_is_lost():
    bench = Bench("nvme")
    held = puts(bench, 9)
    bench.tier.close()
    bench.tier.close()
    assert all(file.closed for file in bench.files)
    with pytest.raises(StateError, match="run its backward before close"):
        bench.tier.get(held[0][0])
    del held
    bench.tier.settle()
    assert not any(bench.ledger.now.values())
