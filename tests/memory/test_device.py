"""Copies between CPU and device: in the right order, in the narrow dtype, without stopping the host.

An accelerator is played by books: each stream notes what it was told to wait for and to run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infinity.memory.tiers import device as device_module
from infinity.memory.tiers.device import CudaDevice, Device


class Stream:
    """Notes, in order, what it was given to do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log: list[str] = []
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"after {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"after {event.where}")


class Event:
    """`over` is what the test lets the device have done."""

    over = False

    def __init__(self, device: torch.device) -> None:
        self.where, self.device = "", device

    def record(self, stream: Stream) -> None:
        stream.log.append("event")
        self.where = f"event {stream.log.count('event')} of {stream.name}"

    def query(self) -> bool:
        return Event.over

    def synchronize(self) -> None:
        stopped.append(self.where)


stopped: list[str] = []


class Copied:
    """A tensor that notes its copies on the stream in force; `on_device` says where it pretends to lie."""

    def __init__(self, cuda: FakeCuda, values: Tensor, on_device: bool) -> None:
        self._cuda, self.values, self.is_cuda, self.dtype = cuda, values, on_device, values.dtype
        self.nbytes, self.device = values.nbytes, torch.device("cuda" if on_device else "cpu")

    def numel(self) -> int:
        return self.values.numel()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def copy_(self, source: Copied, non_blocking: bool = False) -> None:
        assert non_blocking or source.is_cuda == self.is_cuda, "the host would stop"
        self._cuda.current.log.append(f"{source.dtype} to {self.dtype}".replace("torch.", ""))
        self.values.copy_(source.values)

    def to(self, what: Any, non_blocking: bool = False) -> Copied:
        if isinstance(what, torch.dtype):
            return self if what == self.dtype else self._made(self.values.to(what), self.is_cuda)
        assert non_blocking, "the host would stop"
        return self._made(self.values, True)

    def _made(self, values: Tensor, on_device: bool) -> Copied:
        made = Copied(self._cuda, torch.empty_like(values), on_device)
        moved = Copied(self._cuda, values, self.is_cuda)
        moved.dtype = self.dtype
        made.copy_(moved, non_blocking=True)
        return made


class FakeCuda:
    """Stands for torch.accelerator: streams in the order in which they are made are the one up and the one down."""

    def __init__(self) -> None:
        self.compute = self.current = Stream("compute")
        self.side: list[Stream] = []

    def make(self, _device: torch.device) -> Stream:
        self.side.append(Stream(("up", "down")[len(self.side)]))
        return self.side[-1]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "Stream", fake.make)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: fake.current)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: setattr(fake, "current", stream))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(Event, "over", False)
    stopped.clear()
    return fake


def test_on_the_cpu_a_copy_is_over_at_once() -> None:
    device = Device(torch.device("cpu"))
    target, source = device.empty(3, torch.float32), torch.arange(3.0)
    transfer = device.copy(target, source)
    assert transfer.done() and torch.equal(target, source)
    device.arrived(transfer)
    device.synchronize()
    assert device.free_nbytes() is None


def test_each_direction_has_a_stream_and_starts_after_the_compute_stream(cuda: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    above, below = Copied(cuda, torch.zeros(4), True), Copied(cuda, torch.arange(4.0), False)
    up = device.copy(above, below)
    down = device.copy(below, above)
    assert [stream.log for stream in cuda.side] == [["after compute", "float32 to float32", "event"]] * 2
    assert above.values.equal(torch.arange(4.0))
    # Nobody has waited yet, neither the host nor the compute stream.
    assert cuda.compute.log == [] and stopped == []
    up.wait()
    down.wait()
    assert cuda.compute.log == ["after event 1 of up", "after event 1 of down"] and stopped == []
    device.arrived(down)
    assert stopped == ["event 1 of down"]


def test_the_narrow_dtype_travels(cuda: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    device.empty = lambda numel, dtype: Copied(cuda, torch.zeros(numel, dtype=dtype), True)
    up, down = cuda.side
    wide, narrow = torch.tensor([1.00390625, -3e38, 7.0]), torch.zeros(3, dtype=torch.bfloat16)
    device.copy(Copied(cuda, narrow, False), Copied(cuda, wide, True))
    # Cast on the device, then the wire.
    assert down.log == ["after compute", "float32 to bfloat16", "bfloat16 to bfloat16", "event"]
    assert narrow.equal(wide.bfloat16())
    back = torch.zeros(3)
    device.copy(Copied(cuda, back, True), Copied(cuda, narrow, False))
    assert up.log == ["after compute", "bfloat16 to bfloat16", "bfloat16 to float32", "event"]
    assert back.equal(wide.bfloat16().float())


def test_a_copy_on_the_device_stays_on_the_stream_that_computes(cuda: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    device.copy(Copied(cuda, torch.zeros(2), True), Copied(cuda, torch.ones(2), True))
    assert cuda.compute.log == ["float32 to float32"]
    assert all(stream.log == [] for stream in cuda.side)


@pytest.mark.parametrize(("count_max", "nbytes_max"), [(2, 1 << 20), (100, 40)])
def test_memory_on_its_way_down_is_bounded_and_given_back_in_order(
    count_max: int, nbytes_max: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "_HELD_COUNT_MAX", count_max)
    monkeypatch.setattr(device_module, "HELD_NBYTES_MIN", nbytes_max)
    device = CudaDevice(torch.device("cuda", 0))
    below = Copied(cuda, torch.zeros(4), False)
    for _ in range(2):
        device.copy(below, Copied(cuda, torch.ones(4), True))
    assert cuda.compute.log == [], "two may be on their way"
    device.copy(below, Copied(cuda, torch.ones(4), True))
    # The stream that will reuse the memory waits; the host does not.
    assert cuda.compute.log == ["after event 1 of down"] and stopped == []
    assert len(device._held) == 2
    # One that is larger than the bound goes alone.
    device.copy(Copied(cuda, torch.zeros(99), False), Copied(cuda, torch.ones(99), True))
    assert len(device._held) == (1 if nbytes_max == 40 else 2)
    Event.over = True
    device.copy(below, Copied(cuda, torch.ones(4), True))
    assert len(device._held) == 1, "what has arrived is let go of"
    device.synchronize()
    assert not device._held


def test_memory_on_its_way_down_is_overwritten_after_it(cuda: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    below, scratch = Copied(cuda, torch.zeros(4), False), torch.ones(8)
    for part in (scratch[:4], torch.ones(4), scratch[4:]):
        device.copy(below, Copied(cuda, part, True))
    device.before_overwrite(torch.ones(4))
    assert cuda.compute.log == []
    device.before_overwrite(scratch[:4])
    assert cuda.compute.log[-1] == "after event 3 of down" and stopped == []


def test_a_copy_since_a_mark_follows_what_was_queued_before_it_alone(cuda: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    above, below = Copied(cuda, torch.zeros(4), True), Copied(cuda, torch.ones(4), False)
    begun = Event(device.torch)
    begun.record(cuda.compute)
    for target, source in ((above, below), (below, above)):
        device.copy_since(target, source, begun)
    assert [stream.log for stream in cuda.side] == [["after event 1 of compute", "float32 to float32", "event"]] * 2


def test_a_refused_registration_leaves_no_error_for_the_next_kernel(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda pointer, nbytes, flags: calls.append(("register", (pointer, nbytes, flags))) or 2,
        cudaHostUnregister=lambda pointer: calls.append(("unregister", pointer)) or 713,
        cudaGetErrorString=lambda status: f"text of {status}",
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    class Failing(CudaDevice):
        def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
            # As the runtime does: the first launch after a failure is told of it.
            calls.append(("launch", numel))
            raise RuntimeError("CUDA error: out of memory")

    device = Failing(torch.device("cpu"))
    assert device.register(4096, 100) == "cudaHostRegister: text of 2"
    device.unregister(4096)
    assert calls == [("register", (4096, 100, 1)), ("launch", 1), ("unregister", 4096), ("launch", 1)]
