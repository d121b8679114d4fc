"""The simulated accelerator: torch's bits, memory, streams, and that it finds what it is for."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor, nn

from tests.support import accelerator
from tests.support.accelerator.makespan import makespan
from tests.support.accelerator.mutants import MUTANTS, outcome
from tests.support.accelerator.process import AcceleratedProcess
from tests.support.spawn import RankError


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
    assert event.query()
    stream.synchronize()
    assert stream.query()
    assert torch.equal(values.cpu(), torch.tensor([[2.0, 8.0], [4.0, 10.0]]))
    begin, end = (torch.Event("simulated", enable_timing=True) for _ in range(2))
    accelerator.configure(delays=accelerator.Delays(copy=0, event=0.02, operator=0))
    begin.record()
    end.record()
    end.synchronize()
    assert 0 <= begin.elapsed_time(end) < 10_000
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
    resized = torch.ones(8, device="simulated")
    resized.untyped_storage().resize_(0)
    assert resized.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="its storage has 0"):
        resized.add_(1)
    resized.untyped_storage().resize_(64)
    assert torch.equal(resized.fill_(2.0).cpu(), torch.full((8,), 2.0))


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


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_is_caught_and_its_healthy_version_is_clean(process: AcceleratedProcess, name: str) -> None:
    for seed in (0, 1):
        mutant, healthy = (process.run(outcome, name, version, seed) for version in (False, True))
        assert mutant.named, mutant
        assert healthy.clean, healthy


def check_what_is_no_race() -> None:
    # Columns of one matrix, and two reads of it, on two streams that know nothing of each other.
    matrix = torch.zeros(64, 64, device="simulated")
    torch.accelerator.synchronize()
    streams = [torch.Stream("simulated") for _ in range(2)]
    for number, stream in enumerate(streams):
        with stream:
            matrix[:, number * 32 : number * 32 + 32].fill_(number + 1.0)
    torch.accelerator.synchronize()
    sums = []
    for stream in streams:
        with stream:
            sums.append(matrix.sum())
    torch.accelerator.synchronize()
    # A host that has seen an event's end may use the memory on any stream.
    event = torch.Event("simulated")
    with streams[0]:
        matrix.zero_()
        event.record()
    while not event.query():
        time.sleep(0.001)
    with streams[1]:
        matrix.add_(1)
    torch.accelerator.synchronize()
    assert not accelerator.races() and [each.item() for each in sums] == [64 * 32 * 3.0] * 2
    with streams[0]:
        matrix[:, 0].zero_()
    with streams[1]:
        matrix[5:6].zero_()
    torch.accelerator.synchronize()
    (race,) = accelerator.races()
    assert race.nbytes == 4 and "aten::zero_" in str(race) and "test_accelerator.py" in race.first.line


def test_the_checker_knows_strides_reads_and_what_the_host_saw(process: AcceleratedProcess) -> None:
    process.run(check_what_is_no_race)


def check_devices() -> None:
    accelerator.configure(devices=2, delays=True)
    assert torch.accelerator.device_count() == 2
    source = torch.arange(1000.0, device="simulated:0")
    target = (source * 2).to("simulated:1")
    assert target.device.index == 1 and torch.equal((target + 1).cpu(), torch.arange(1000.0) * 2 + 1)
    with pytest.raises(RuntimeError, match="same device"):
        torch.where(target > 1, source, target)
    first, second = nn.Linear(8, 8).to("simulated:0"), nn.Linear(8, 8).to("simulated:1")
    second(first(torch.ones(2, 8, device="simulated:0")).to("simulated:1")).sum().backward()
    assert first.weight.grad.device.index == 0 and second.weight.grad.device.index == 1
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    assert not accelerator.races()


def test_copies_between_devices_are_ordered_with_both(process: AcceleratedProcess) -> None:
    process.run(check_devices)


def check_stops() -> None:
    accelerator.configure(delays=accelerator.Delays(copy=0.05, event=0, operator=0))
    pageable, pinned = torch.ones(4096), torch.ones(4096).pin_memory()
    device = torch.empty(4096, device="simulated")
    torch.accelerator.synchronize()
    accelerator.reset()
    device.copy_(pinned, non_blocking=True)
    pinned.copy_(device, non_blocking=True)
    (device * 2).sum()
    assert not [each for each in accelerator.log() if each.kind == "host wait"]
    device.copy_(pageable, non_blocking=True)
    device.copy_(pinned)
    pageable.copy_(device, non_blocking=True)
    device.nonzero()
    assert [each.name for each in accelerator.log() if each.kind == "host wait"] == [
        "pageable copy up", "blocking copy up", "pageable copy down", "aten::nonzero",
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
        device.view(4, 1024).index_put_((torch.tensor([9]),), torch.ones(1024, device="simulated"))
        torch.accelerator.synchronize()


def test_the_log_has_every_stop_of_the_host_and_kernels_fail_later(process: AcceleratedProcess) -> None:
    process.run(check_stops)


def check_makespan() -> None:
    copies, arrived = torch.Stream("simulated"), torch.Event("simulated")
    units = [torch.ones(1000).pin_memory() for _ in range(3)]
    places = [torch.empty(1000, device="simulated") for _ in units]
    torch.accelerator.synchronize()
    accelerator.reset()
    for unit, place in zip(units, places, strict=True):
        with copies:
            place.copy_(unit, non_blocking=True)
            arrived.record(copies)
        torch.accelerator.current_stream().wait_event(arrived)
        place.mul_(2)
    durations = {"copy up": 2.0, "operator": 3.0}
    log = accelerator.log()
    schedule = makespan(log, lambda each: durations.get(each.kind, 0.0))
    # The first copy is exposed, the others are behind computation.
    assert schedule.seconds == 2 + 3 * 3 and schedule.host_stopped == 0
    assert schedule.idle(0, 0) == 2 and schedule.idle(0, copies.stream_id) == 11 - 6
    # A host that reads a value in between stops for it.
    places[0][0].item()
    schedule = makespan(accelerator.log(), lambda each: durations.get(each.kind, 0.0))
    assert schedule.host_stopped == 11
    # A second thread works for ten seconds. It queues the last product, or the product waits for it.
    (last,) = [each.id for each in log if each.kind == "operator"][2:]
    accelerator.host_access(units[0], write=False)
    (worked,) = [each for each in accelerator.log() if each.kind == "host access"]
    durations["host access"] = 10.0
    for second, after in (({worked.id, last}, {}), ({worked.id}, {last: worked.id})):
        schedule = makespan(
            [worked, *log], lambda each: durations.get(each.kind, 0.0), after=after,
            host=lambda each, second=second: each.id in second,
        )  # fmt: skip
        assert schedule.seconds == 10 + 3 and schedule.spans[last][0] == 10
    assert not accelerator.races()


def test_the_makespan_of_overlapped_copies(process: AcceleratedProcess) -> None:
    process.run(check_makespan)


_PROGRAM = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from tests.support import accelerator
accelerator.load()
accelerator.configure(delays=True)
kept = torch.ones(8, device="simulated")
rows = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2, pin_memory=True)
for (row,) in rows:
    assert row.is_pinned()
    print((row.to("simulated", non_blocking=True) * 2).tolist())
child = os.fork()
if child == 0:
    try:
        torch.ones(1, device="simulated")
    except RuntimeError as error:
        print(error, flush=True)
    del kept
    os._exit(0)
os.waitpid(child, 0)
late = torch.ones(8).pin_memory()
for _ in range(20):
    kept.copy_(late, non_blocking=True)
print("end")
"""


def test_forked_workers_and_the_end_of_a_process_with_work_in_its_queues(process: AcceleratedProcess) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each or "." for each in sys.path)}
    reply = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert reply.returncode == 0, reply.stderr
    first, second, child, end = reply.stdout.splitlines()
    assert (first, second, end) == ("[0.0, 2.0, 4.0, 6.0]", "[8.0, 10.0, 12.0, 14.0]", "end")
    assert "forked process" in child
