"""One hash of weights and moments after some steps, whatever runs the step and wherever its states live."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity.engine.build_runtime
from infinity.ops import adam, aio, build
from tests.support.cells import kept
from tests.support.oracle import CLIP, Case, SmallModel, reference, settings, train

STEPS = 8
TIERS = ("gpu", "cpu", "nvme")


class Larger(Case):
    """More than 100,000 parameters, so that sub-groups of 1e5 elements cut something."""

    def model(self) -> SmallModel:
        torch.manual_seed(0)
        return SmallModel(dim=96, layers=2)


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains once and gives the hash. `use` says what to run the step with."""

    def run(
        dtype: str, *, simd: str | None = None, threads: int | None = None, backend: str = "", fallback: bool = False,
        look: Any = None, **options: Any,
    ) -> str:  # fmt: skip
        with monkeypatch.context() as patch:
            if threads is not None:
                # The engine would choose by the machine.
                patch.setattr(infinity.engine.build_runtime, "set_threads", lambda *_, **__: adam.set_threads(threads))
            if backend:
                patch.setattr(aio, "BACKENDS", (backend,))
            if fallback:
                patch.setattr(build, "load", lambda name: None)
            adam.set_simd(simd)
            try:
                config = settings(tmp_path, dtype=dtype, clip=CLIP, **options)
                return train(Larger(), config, steps=STEPS, look=look).digest
            finally:
                adam.set_simd(None)
                adam.set_threads(None)

    return run


class WholeVectors(Larger):
    """The parameter of one element is frozen: torch steps what is less than a vector with other roundings."""

    def model(self) -> SmallModel:
        model = super().model()
        model.temperature.requires_grad_(False)
        assert all(param.numel() % 16 == 0 for param in model.parameters() if param.requires_grad)
        return model


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_has_the_weights_and_moments_of_plain_torch_bit_by_bit(tmp_path, stage, tier):
    """Of its fused AdamW, where torch has fused multiply-adds."""
    plain = reference(WholeVectors(), steps=STEPS)
    param = tier if stage == 3 else "gpu"
    ours = train(WholeVectors(), settings(tmp_path, stage=stage, param=param, optimizer=tier), steps=STEPS)
    assert ours.exp_avg.keys() == plain.exp_avg.keys()
    capable = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    for mine, theirs in ((ours.master, plain.master), (ours.exp_avg, plain.exp_avg)):
        for name, value in theirs.items():
            if capable:
                assert mine[name].equal(value), name
            torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)


NVME = {"param": "nvme", "optimizer": "nvme"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_hash_for_instruction_sets_threads_and_the_fallback(digest, dtype):
    seen = {f"simd {name}": digest(dtype, simd=name) for name in adam.simds()}
    assert len(seen) >= 2, "a vector path and the scalar one"
    seen.update({f"{threads} threads": digest(dtype, threads=threads, **NVME) for threads in (1, 2, 3)})
    seen["fallback"] = digest(dtype, fallback=True, **NVME)
    assert len(set(seen.values())) == 1, seen


@pytest.mark.slow
@pytest.mark.parametrize("dtype", kept(["fp32", "bf16"], ["bf16"]))
def test_one_hash_for_back_ends_overlap_and_sub_groups(digest, dtype):
    backends: list[str] = []

    def note(engine: Any) -> None:
        backends.append(engine.store.io_backend)

    seen = {"in memory": digest(dtype)}
    seen.update({f"I/O by {name}": digest(dtype, backend=name, look=note, **NVME) for name in aio.BACKENDS})
    assert backends == [*aio.BACKENDS]
    seen["no overlap"] = digest(dtype, overlap=False, **NVME)
    for size in (100_000, 1_000_000, 10_000_000, 100_000_000):
        seen[f"sub-groups of {size}"] = digest(dtype, zero={"sub_group_size": size}, **NVME)
        on_cpu = {"param": "cpu", "optimizer": "cpu", "zero": {"sub_group_size": size}}
        seen[f"sub-groups of {size} on cpu"] = digest(dtype, **on_cpu)
    assert len(set(seen.values())) == 1, seen


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_hash_for_every_placement(digest, dtype):
    places = itertools.product(TIERS, TIERS)
    seen = {(param, optimizer): digest(dtype, param=param, optimizer=optimizer) for param, optimizer in places}
    assert len(set(seen.values())) == 1, seen
