"""The simulated accelerator: torch's bits, memory, streams, and that it finds what it is for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.support import accelerator
from tests.support.accelerator.process import AcceleratedProcess
from tests.support.spawn import RankError


@pytest.fixture(scope="module")
def process() -> Iterator[AcceleratedProcess]:
    """The process of this file's tests."""
    try:
        process = AcceleratedProcess()
    except accelerator.Unavailable as reason:
        pytest.skip(str(reason))
    with process:
        yield process


def model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32),
        nn.RMSNorm(32), nn.SiLU(), nn.Linear(32, 50),
    )  # fmt: skip


def trained(device: str, dtype: torch.dtype, fused: bool) -> Tensor:
    torch.manual_seed(0)
    net = model().to(device, dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused, foreach=not fused)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        tokens = torch.randint(0, 50, (4, 9), generator=generator).to(device)
        loss = nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([each.detach().cpu().flatten() for each in net.parameters()])


def check_training(dtype: torch.dtype, fused: bool) -> None:
    expected = trained("cpu", dtype, fused)
    for seed in range(3):
        accelerator.configure(seed=seed, delays=seed > 0)
        assert torch.equal(trained("simulated", dtype, fused), expected)
    assert not accelerator.races()
    stops = {each.name for each in accelerator.log() if each.kind == "host wait"}
    assert stops <= {"pageable copy up", "pageable copy down"}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_gives_the_bits_of_the_cpu(process: AcceleratedProcess, dtype: torch.dtype, fused: bool) -> None:
    process.run(check_training, dtype, fused)


def check_interface() -> None:
    assert str(torch.accelerator.current_accelerator()) == "simulated"
    stream, event = torch.Stream("simulated"), torch.Event("simulated")
    assert torch.accelerator.current_stream() != stream
    with stream:
        assert torch.accelerator.current_stream() == stream
        values = torch.arange(6.0, device="simulated").reshape(2, 3).t()[1:] * 2
        event.record(stream)
    event.synchronize()
    assert event.query() and stream.query()
    assert torch.equal(values.cpu(), torch.tensor([[2.0, 8.0], [4.0, 10.0]]))
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned() and not torch.ones(4).is_pinned()
    memory = torch.ones(1024)
    assert accelerator.register(memory.data_ptr(), memory.nbytes) is None
    assert memory.is_pinned() and accelerator.register(memory.data_ptr() + 8, 8) is not None
    assert accelerator.unregister(memory.data_ptr()) is None and not memory.is_pinned()
    with pytest.raises(RuntimeError, match="same device"):
        values.add_(torch.ones(2, 2))


def test_torch_accelerator_streams_events_and_pinned_memory(process: AcceleratedProcess) -> None:
    process.run(check_interface)


def check_random() -> None:
    torch.manual_seed(3)
    state = torch.get_device_module("simulated").get_rng_state()
    first = torch.randn(100, device="simulated")
    assert not torch.equal(first, torch.randn(100, device="simulated"))
    torch.get_device_module("simulated").set_rng_state(state)
    assert torch.equal(first, torch.randn(100, device="simulated"))
    generator = torch.Generator(device="simulated").manual_seed(5)
    kept = generator.get_state()
    dropped = torch.rand(100, device="simulated", generator=generator)
    generator.set_state(kept)
    assert torch.equal(dropped, torch.rand(100, device="simulated", generator=generator))
    layer = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)).to("simulated")
    rows = torch.randn(4, 8, device="simulated")
    torch.manual_seed(0)
    layer(rows).sum().backward()
    expected = layer[0].weight.grad.clone()
    layer.zero_grad()
    torch.manual_seed(0)
    torch.utils.checkpoint.checkpoint(layer, rows, use_reentrant=False).sum().backward()
    assert torch.equal(layer[0].weight.grad, expected)


def test_random_numbers_follow_the_generators_state(process: AcceleratedProcess) -> None:
    process.run(check_random)


def check_memory() -> None:
    before = accelerator.memory_stats()
    kept = torch.ones(1000, device="simulated")
    assert accelerator.memory_stats()["allocated"] == before["allocated"] + 4096
    address = kept.data_ptr()
    del kept
    assert accelerator.memory_stats()["allocated"] == before["allocated"]
    again = torch.empty(1000, device="simulated")
    assert again.data_ptr() == address and again.isnan().all()
    with torch.Stream("simulated"):
        assert torch.empty(1000, device="simulated").data_ptr() != address
    accelerator.fail_at(2)
    torch.empty(8, device="simulated")
    with pytest.raises(torch.OutOfMemoryError, match="on request"):
        torch.empty(8, device="simulated")
    del again
    accelerator.reset()
    accelerator.configure(limit=1 << 20)
    halves = [torch.empty(1 << 19, dtype=torch.uint8, device="simulated")]
    with pytest.raises(torch.OutOfMemoryError, match="1048576"):
        halves += [torch.empty(1 << 19, dtype=torch.uint8, device="simulated") for _ in range(2)]
    halves.clear()
    # The cached blocks are given back for a larger one.
    assert torch.empty(1000 << 10, dtype=torch.uint8, device="simulated").nbytes == 1000 << 10
    storage = torch.ones(8, device="simulated").untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0


def test_the_allocator_counts_poisons_limits_and_fails(process: AcceleratedProcess) -> None:
    process.run(check_memory)


def read_from_the_host() -> None:
    values = torch.ones(1000, device="simulated")
    torch.accelerator.synchronize()
    ctypes.string_at(values.data_ptr(), 4)


def test_a_host_access_to_device_memory_ends_the_process(
    process: AcceleratedProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    # The stray read kills a process of its own, whose standard error is this test's.
    with pytest.raises(RankError, match="died with exit code -11"), AcceleratedProcess() as fresh:
        fresh.run(read_from_the_host)
    printed = capfd.readouterr().err
    assert "The host touched device memory: simulated:0 allocation" in printed and "of 4000 bytes, at byte 0" in printed
    assert "in read_from_the_host" in printed
