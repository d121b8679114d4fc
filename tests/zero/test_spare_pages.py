"""Where the CPU computes, released units leave their pages to the next ones: never more than the plan has for them."""

from __future__ import annotations

import itertools
import resource

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.memory.resizable_buffer import SparePages
from infinity.zero.gather import GatheredMemory
from infinity.zero.unit import Unit

# Elements of the first layer of a pair; 4 and 8 MiB.
SMALL, LARGE = 1024 * 1024, 2048 * 1024


class Model(nn.Module):
    """Layers of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [1024, 1024, 2048, 1024, 1024, 2048, 1024]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def configuration(folder: object) -> dict[str, object]:
    """Room for two large units."""
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 1, "log_level": "error", "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3, "offload_param": nvme, "offload_optimizer": nvme, "stage3_max_live_parameters": 2 * LARGE,
            "stage3_max_reuse_distance": SMALL, "stage3_prefetch_bucket_size": SMALL,
            "stage3_param_persistence_threshold": 0,
        },
    }  # fmt: skip


@pytest.mark.parametrize("evaluating", [False, True])
def test_spare_pages_are_within_the_plan_and_gathers_take_no_fresh_ones(tmp_path, monkeypatch, evaluating):
    gather, most = GatheredMemory.gather, []
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=Model(), config=configuration(tmp_path))
    device = engine._runtime.device
    assert isinstance(device.spare, SparePages)

    def watched(self: GatheredMemory, unit: Unit) -> None:
        gather(self, unit)
        self.check()
        held = sum(each.layout.nbytes for each in engine._runtime.access.units if each.buffer.has_bytes)
        most.append(held + device.spare.nbytes)

    monkeypatch.setattr(GatheredMemory, "gather", watched)
    x = torch.randn(2, 1024)
    with engine:
        for step in range(6):
            if step == 3:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            if evaluating:
                with torch.no_grad():
                    engine(x)
            else:
                engine.backward(engine(x))
                engine.step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert max(most) <= engine.plan.pools.gathered_nbytes
        gathered = sum(unit.layout.nbytes for unit in engine._runtime.access.units)
        print(f"{faults} faults, {gathered / 1e6:.0f} MB a pass")
        if evaluating and device.spare.put(0, 0, None):  # type: ignore[arg-type]
            # Three passes over more than there is room for: from fresh pages even large ones would be some 50.
            assert faults < 20
