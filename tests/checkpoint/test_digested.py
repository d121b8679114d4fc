"""A step before an expected save leaves checksums of what it writes: the checkpoint's, and those of its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoint.files import Writer
from infinity.ops import build
from infinity.optim.rhythm import Rhythm
from tests.support.checkpoints import assert_same, contents

pytestmark = pytest.mark.skipif(
    build.load("adam") is None or build.load("aio") is None, reason="no native library here"
)
# Saved behind steps 1 and 2 and at the same distance behind step 3.
STEPS = 3


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks of each extent came with their checksums."""
    counts: list[int] = []
    extent = Writer.extent

    def counting(self: Writer, buffer: torch.Tensor, checksums: tuple[int, ...] = ()) -> int:
        counts.append(len(checksums))
        return extent(self, buffer, checksums)

    monkeypatch.setattr(Writer, "extent", counting)
    return counts


def run(
    folder: Path, optimizer: str, dtype: str, *, asynchronous: bool, touch: str = "", sub_group_size: int = 10**9
) -> None:
    """Three steps, each saved. `touch`: the program sets this state in between."""
    torch.manual_seed(0)
    # 2.1 M parameters, and a bias whose gradient never comes: states of several blocks, and elements nobody steps.
    model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 3))
    config: dict[str, Any] = {
        "train_batch_size": 2, "bf16": {"enabled": dtype == "bf16"}, "log_level": "error",
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
            "sub_group_size": sub_group_size,
        },
    }  # fmt: skip
    with infinity.initialize(model, config)[0] as engine:
        for step in range(1, STEPS + 1):
            inputs = torch.randn(2, 1024, generator=torch.Generator().manual_seed(step))
            hidden = engine.module[1](engine.module[0](inputs.to(torch.bfloat16 if dtype == "bf16" else torch.float32)))
            engine.backward(hidden.float().square().mean())
            engine.step()
            if touch:
                setattr(infinity.state(engine.module[0].weight), touch, torch.full((2048, 1024), 0.5))
            engine.save_checkpoint(folder, asynchronous=asynchronous)
        engine.finish_saving()


@pytest.mark.parametrize(("optimizer", "dtype"), [("AdamW", "bf16"), ("AdamW", "fp32"), ("Lion", "bf16")])
def test_known_checksums_are_those_of_the_bytes(
    tmp_path: Path, known: list[int], optimizer: str, dtype: str
) -> None:
    run(tmp_path / "at once", optimizer, dtype, asynchronous=False)
    assert not any(known)
    run(tmp_path / "behind", optimizer, dtype, asynchronous=True)
    # The first save is not expected. Of the others, parameters and states have several blocks.
    assert sum(count > 1 for count in known) == (STEPS - 1) * 2
    for step in range(1, STEPS + 1):
        # Reading compares every block with its checksum.
        assert_same(*(contents(tmp_path / name, f"global_step{step}") for name in ("at once", "behind")))


def test_a_parameter_that_several_sub_groups_step_is_known_once_all_have(tmp_path: Path, known: list[int]) -> None:
    for at_once in (True, False):
        name = "at once" if at_once else "behind"
        run(tmp_path / name, "AdamW", "fp32", asynchronous=not at_once, sub_group_size=700_000)
    # In blocks of 4 MiB: a partition of parameters of 8.4 MB, in three sub-groups with states of 5.6 MB each.
    found = sorted((count for count in known if count > 1), reverse=True)
    assert found == [3] * (STEPS - 1) + [2, 2, 2] * (STEPS - 1)
    for step in range(1, STEPS + 1):
        assert_same(*(contents(tmp_path / name, f"global_step{step}") for name in ("at once", "behind")))


# A master weight is parameter and remainder; the other's parameters are as the step has left them.
@pytest.mark.parametrize(("touch", "extents"), [("exp_avg", STEPS - 1), ("master", 0)])
def test_what_is_changed_behind_the_step_is_digested_by_the_save(
    tmp_path: Path, known: list[int], touch: str, extents: int
) -> None:
    run(tmp_path, "AdamW", "bf16", asynchronous=True, touch=touch)
    assert sum(count > 0 for count in known) == extents
    assert contents(tmp_path, f"global_step{STEPS}")


def test_a_save_is_expected_at_the_distance_of_the_latest_two() -> None:
    rhythm = Rhythm()
    expected = []
    for step in range(1, 16):
        expected.append(rhythm.save_is_next)
        rhythm.stepped()
        if step in (3, 6, 7, 8, 12):
            rhythm.saved()
    # At 6 after 3, at 8 after 6 and 7, and in vain at 9 and at 16.
    assert [step for step, each in enumerate(expected, start=1) if each] == [6, 8, 9]
