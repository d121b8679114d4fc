"""Checkpoints of earlier versions load for ever: those in tests/data, at other ranks, stages and tiers, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.checkpoint.format import read_manifest
from infinity.checkpoint.inspect import verify
from tests.data.make_checkpoints import CELLS, Tied, config, digests, train

SAVED = Path(__file__).parents[1] / "data" / "checkpoints"


def load(rank: int, world: int, dtype: str, stage: int, tier: str, saved: str, folder: str) -> Any:
    home = {"device": tier, "nvme_path": folder}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": home}
    if stage == 3:
        zero["offload_param"] = home
    engine, *_ = infinity.initialize(model=Tied(), config=config(dtype, world, **zero))
    with engine:
        path, client = engine.load_checkpoint(saved)
        found = digests(engine)
        return Path(path).name, client, engine.global_steps, found, train(engine, rank, 3, 5)


@pytest.mark.parametrize("version", sorted(path.name for path in SAVED.iterdir()))
@pytest.mark.parametrize(("dtype", "ranks"), CELLS)
@pytest.mark.parametrize(("world", "stage", "tier"), [(1, 3, "nvme"), (1, 1, "cpu"), (2, 3, "cpu"), (2, 2, "nvme")])
def test_a_checkpoint_of_an_earlier_version_loads_and_goes_on(
    version: str, dtype: str, ranks: int, world: int, stage: int, tier: str, tmp_path: Path, rank_pools: Any
) -> None:
    # Loading writes nothing into it, and does not have to be able to.
    saved = shutil.copytree(SAVED / version / f"{dtype}-{ranks}", tmp_path / "saved")
    expected = json.loads((saved / "expected.json").read_text())
    results = rank_pools[world].run(load, dtype, stage, tier, str(saved), str(tmp_path / "swap"))
    for tag, client, steps, found, loss in results:
        assert (tag, client, steps) == ("step3", {"epoch": 1, "best": 0.5}, 3)
        assert found == expected["digests"]
        if world == ranks:
            assert abs(results[0][-1] - expected["loss"]) <= 1e-5 and loss > 0


@pytest.mark.parametrize("folder", sorted(SAVED.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_checkpoint_of_an_earlier_version_is_whole(folder: Path) -> None:
    assert not list(verify(folder / "step3", read_manifest(folder / "step3")))
