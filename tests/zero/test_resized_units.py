"""Units whose full buffer is a storage that is resized, as on an accelerator, forced on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from infinity.memory.resizable_buffer import ElasticBuffer
from infinity.memory.tiers.device import Device
from tests.support.oracle import CLIP, Case, settings, train

# Every configuration of one rank in which units are released: at home on the device they are whole for good.
HOMES = [("cpu", "gpu"), ("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")]


@pytest.mark.parametrize(("param", "optimizer"), HOMES)
def test_released_units_of_resized_storages_train_the_same_bits(tmp_path, monkeypatch, param, optimizer):
    config = settings(tmp_path, param=param, optimizer=optimizer, dtype="bf16", clip=CLIP)
    expected = train(Case(), config, steps=3)
    made: list[ElasticBuffer] = []

    def resizable(self: Device, numel: int, dtype: torch.dtype) -> ElasticBuffer:
        made.append(ElasticBuffer(numel, dtype, self.torch, mapped=False))
        return made[-1]

    monkeypatch.setattr(Device, "resizable", resizable)
    found = train(Case(), config, steps=3)
    assert (found.digest, found.releases) == (expected.digest, expected.releases)
    assert found.releases and made
    assert all(buffer.tensor.untyped_storage().nbytes() == 0 for buffer in made if not buffer.has_bytes)
