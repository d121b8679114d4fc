"""What only an accelerator can show: its kernels' bits, copies beside compute, placements, pinned memory of exact size.

`python -m pytest tests/test_gpu.py` on a machine with one; see docs/internals_kernels.md.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.memory.ledger import Ledger
from infinity.memory.tiers.device import Device, StreamTransfer
from infinity.memory.tiers.pinned import HostMemory
from infinity.ops import adam, build, kernels
from infinity.ops.rules import Piece
from tests.support.pieces import DTYPES, HYPERS, STORAGES, make_piece, on_device, same, states, table_of, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator on this machine"),
]


needs_nvcc = pytest.mark.skipif(
    build._compiler("kernels") is None, reason="needs nvcc, the compiler of the CUDA toolkit"
)
# Long enough to be seen beside a copy, in cycles of the device: some 50 ms.
CYCLES = 80_000_000


@pytest.fixture(autouse=True)
def queries_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's sanitizer sees that the host waits for an event, but not that it asks whether one is over."""
    if os.environ.get("TORCH_CUDA_SANITIZER"):
        query = StreamTransfer.done

        def done(transfer: StreamTransfer) -> bool:
            over = query(transfer)
            if over:
                transfer.synchronize()
            return over

        monkeypatch.setattr(StreamTransfer, "done", done)


@pytest.fixture(scope="module")
def device() -> Device:
    return Device.detect(0)


@pytest.fixture
def pinned(device: Device) -> Iterator[HostMemory]:
    """Pinned CPU memory, given back afterwards."""
    memory = HostMemory(device, pin=True, ledger=Ledger())
    yield memory
    memory.close()


@contextmanager
def no_host_stop() -> Iterator[None]:
    """Any call that makes the host wait for the device is an error."""
    try:
        with warnings.catch_warnings():
            # Once in a process: not every such call is detected.
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_nvcc
def test_the_kernels_run_here(device: Device) -> None:
    assert kernels.kernels_report(device.torch) == "kernels"
    assert build.native_report(cuda=True)["kernels"] != "Python fallback"


@needs_nvcc
@pytest.mark.parametrize("rule", HYPERS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_every_rule_has_the_bits_of_the_cpu(device: Device, rule: str, storage: str, grad_dtype: torch.dtype) -> None:
    # More pieces than a launch takes, of all alignments, some empty, with several learning rates.
    sizes = [(index * 1237) % 9001 if index % 5 else 0 for index in range(70)] + [3_000_017]
    hypers = [replace(HYPERS[rule], lr=10.0 ** -(1 + index % 4)) for index in range(len(sizes))]
    pieces = [make_piece(n, storage, grad_dtype, hyper) for n, hyper in zip(sizes, hypers, strict=True)]
    above = [on_device(piece, device.torch, shift=index % 5) for index, piece in enumerate(pieces)]
    fallbacks = [on_device(piece, device.torch) for piece in pieces]
    for step, bound in ((1, math.inf), (2, 0.25)):
        left_out = adam.adam_step(pieces, step=step, grad_scale=0.37, grad_bound=bound)
        with no_host_stop():
            counts = [
                adam.adam_step(above, step=step, grad_scale=0.37, grad_bound=bound),
                # What steps the pieces of a device that the kernels do not run on.
                adam.adam_step(fallbacks, step=step, grad_scale=0.37, grad_bound=bound, native=False),
            ]
        assert [int(count) for count in counts] == [left_out, left_out]
        assert left_out > 0
    for piece, *others in zip(pieces, above, fallbacks, strict=True):
        for other in others:
            assert all(map(same, [state.cpu() for state in states(other)], states(piece)))


@needs_nvcc
def test_pieces_of_all_rules_are_stepped_by_one_call(device: Device) -> None:
    kinds = list(HYPERS.values())
    pieces = [
        make_piece(
            (index * 517) % 2600, STORAGES[index % 4], DTYPES[index % 3], kinds[(index + index // 12) % len(kinds)]
        )
        for index in range(150)
    ]
    above = [on_device(piece, device.torch, shift=index % 5) for index, piece in enumerate(pieces)]
    left_out = adam.adam_step(pieces, step=3, grad_scale=0.5)
    with no_host_stop():
        counted = adam.adam_step(above, step=3, grad_scale=0.5)
    assert int(counted) == left_out > 0
    for piece, other in zip(pieces, above, strict=True):
        assert all(map(same, [state.cpu() for state in states(other)], states(piece)))


@needs_nvcc
@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("target_dtype", [None, *DTYPES])
def test_casts_and_norms_have_the_bits_of_the_cpu(
    device: Device, source_dtype: torch.dtype, target_dtype: torch.dtype | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    below = [
        values(numel, generator).to(source_dtype) for numel in (0, 1, 17, 4096, 70_001, 5_000_011, *range(80, 150))
    ]
    sources = [each.to(device.torch) for each in below]
    targets = None if target_dtype is None else [torch.empty_like(each, dtype=target_dtype) for each in sources]
    with no_host_stop():
        stats = kernels.cast_stats(sources, targets, 0.3)
    expected = below
    if targets is not None:
        expected = [(each.float() * float(torch.tensor(0.3))).to(target_dtype) for each in below]
        assert all(same(target.cpu(), each) for target, each in zip(targets, expected, strict=True))
    assert list(zip(*(each.tolist() for each in stats), strict=True)) == [tuple(s) for s in adam.grad_stats(expected)]


@needs_nvcc
@pytest.mark.parametrize("rule", HYPERS)
def test_a_step_runs_near_the_memorys_bandwidth(device: Device, rule: str) -> None:
    """fp32: 28 bytes an element with two states, 20 with one. Half of what a copy of the device reaches is a floor."""
    numel, hyper = 64 << 20, HYPERS[rule]
    tensors = [torch.rand(numel, device=device.torch) for _ in range(4 if hyper.rule.two_states else 3)]
    nbytes = (28 if hyper.rule.two_states else 20) * numel
    table = table_of([Piece(*tensors, hyper=hyper)], 1, 1.0)
    step_s = _seconds(lambda: kernels.adam_step(*table, device.torch))
    copy_s = _seconds(lambda: tensors[0].copy_(tensors[1]))
    ratio = (nbytes / step_s) / (8 * numel / copy_s)
    assert ratio > 0.5, f"{nbytes / step_s / 1e9:.0f} GB/s, a copy {8 * numel / copy_s / 1e9:.0f} GB/s"


def test_a_copy_does_not_stop_the_host_and_orders_itself(device: Device, pinned: HostMemory) -> None:
    numel = 4 << 20
    buffers = [pinned.allocate(2 * numel).view(torch.bfloat16) for _ in range(3)]
    for round_number in range(12):
        with no_host_stop():
            transfers = []
            for index, buffer in enumerate(buffers):
                torch.cuda._sleep(CYCLES // 20)
                source = torch.full((numel,), round_number + index / 4, device=device.torch)
                transfers.append(device.copy(buffer, source))
                # The memory goes back at once, and whoever has it next writes into it.
                del source
                torch.full((numel,), -1.0, device=device.torch)
        for index, (transfer, buffer) in enumerate(zip(transfers, buffers, strict=True)):
            device.arrived(transfer)
            assert bool((buffer == round_number + index / 4).all())
        with no_host_stop():
            above = [device.empty(numel, torch.float32) for _ in buffers]
            transfers = [device.copy(target, buffer) for target, buffer in zip(above, buffers, strict=True)]
            for transfer in transfers:
                transfer.wait()
            sums = [target.sum(dtype=torch.float64) for target in above]
        assert [float(total) for total in sums] == [numel * (round_number + index / 4) for index in range(3)]


def test_copies_run_beside_compute_and_beside_each_other(device: Device, pinned: HostMemory) -> None:
    nbytes = 512 << 20
    down, up = pinned.allocate(nbytes), pinned.allocate(nbytes)
    above, target = device.empty(nbytes, torch.uint8), device.empty(nbytes, torch.uint8)

    def copies(*pairs: tuple[torch.Tensor, torch.Tensor], cycles: int = 0) -> float:
        def run() -> None:
            transfers = [device.copy(to, of) for to, of in pairs]
            torch.cuda._sleep(cycles)
            for transfer in transfers:
                transfer.wait()

        return _seconds(run)

    alone, compute = copies((target, up)), copies(cycles=CYCLES)
    assert copies((target, up), cycles=CYCLES) < max(alone, compute) + 0.3 * min(alone, compute)
    # Some machines share one path between the directions: less than one after the other is all that is asked.
    assert copies((target, up), (down, above)) < 0.9 * (alone + copies((down, above)))


def test_a_prefetched_gather_does_not_stop_the_host(tmp_path: Path) -> None:
    engine = make_engine("cpu", "cpu", tmp_path)
    with engine:
        tokens = torch.randint(0, 50, (4, 32), device=engine.device)
        for _ in range(2):
            engine.backward(engine(tokens).float().sum())
            engine.step()
        engine.eval()
        with torch.no_grad():
            expected = engine(tokens)
            with no_host_stop():
                torch.cuda._sleep(CYCLES)
                again = engine(tokens)
        assert torch.equal(again, expected)


def test_a_refused_registration_leaves_the_device_usable(device: Device, pinned: HostMemory) -> None:
    buffer = pinned.allocate(1 << 20)
    reason = device.register(buffer.data_ptr(), buffer.numel())
    assert reason is not None and "already" in reason
    # The driver's last error would be raised by whatever runs next.
    assert float(torch.ones(4, device=device.torch).sum()) == 4.0


def _seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median time of `run` on the device."""
    found = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found[1:])


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(50, 64), *blocks, nn.Linear(64, 50))


def make_engine(param: str, optimizer: str, folder: Path) -> Any:
    """A small model in bf16 with its states on these tiers."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, "nvme_path": str(folder)},
            "offload_optimizer": {"device": optimizer, "nvme_path": str(folder)},
            "stage3_param_persistence_threshold": 0,
        },
    }
    engine, *_ = infinity.initialize(model=build_model(), config=config)
    return engine


def train(param: str, optimizer: str, folder: Path, steps: int = 5) -> tuple[str, Any]:
    """sha256 over masters and moments after some steps, and the engine's memory report."""
    engine = make_engine(param, optimizer, folder)
    generator = torch.Generator().manual_seed(1)
    with engine:
        for _ in range(steps):
            tokens = torch.randint(0, 50, (4, 32), generator=generator).to(engine.device)
            loss = nn.functional.cross_entropy(engine(tokens).float().view(-1, 50), tokens.view(-1))
            engine.backward(loss)
            engine.step()
        digest = hashlib.sha256()
        for weight in engine.module.parameters():
            state = infinity.state(weight)
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                digest.update(getattr(state, kind).numpy())
        return digest.hexdigest(), engine.memory()


def test_nine_placements_give_one_result(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    tiers = ("none", "cpu", "nvme")
    digests = {train(param, optimizer, tmp_path)[0] for param in tiers for optimizer in tiers}
    assert len(digests) == 1


def test_cpu_memory_is_pinned_to_the_byte(tmp_path: Path) -> None:
    _, report = train("cpu", "cpu", tmp_path, steps=1)
    held = sum(report.now["cpu"].values())
    assert held <= report.pinned <= 1.02 * held + (2 << 20)
