"""Damaged manifests and headers: each is read, or refused by the declared error, and by no other."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from infinity.checkpoint.format import Manifest, RankIndex, seal
from infinity.checkpoint.model_folder import Description
from infinity.checkpoint.weight_files import WeightFolder
from infinity.errors import CheckpointError, ConfigError
from tests.checkpoint.hostile import body_of
from tests.checkpoint.hostile import save as save_checkpoints
from tests.checkpoint.test_sharded import index_body
from tests.support.cells import kept
from tests.support.hostile import damaged, headed, mutated, sealed

ROOT = Path(__file__).resolve().parents[2]
# How many, and how many whole loads.
COUNTS = pytest.mark.parametrize("count", kept([600, 10_000], [600]))
SHORT = [("manifests", 40), ("headers", 100)]
LOADS = pytest.mark.parametrize(("what", "loads"), kept([*SHORT, ("manifests", 500), ("headers", 500)], SHORT))


@pytest.fixture(scope="module")
def saved(bases: Path, rank_pools: Any) -> Path:
    """Checkpoints of one and of two ranks, in fp32 and in bf16, and a transformers model's."""
    rank_pools[2].run(save_checkpoints, str(bases))
    return bases


@COUNTS
def test_damaged_metadata_is_read_or_refused(saved: Path, count: int) -> None:
    paths = sorted(saved.glob("*/*/manifest.json")) + sorted(saved.glob("*/*/*.rank-*.json"))
    assert len(paths) == 5 + 7
    files = [(path, path.read_bytes(), body_of(path)) for path in paths]
    # Of a rank of a tensor axis.
    files += [(Path("sharded.json"), seal(index_body()), index_body())] * 4
    counts, told = Counter[str](), list[str]()
    for seed in range(count):
        chance = random.Random(seed)
        path, data, body = chance.choice(files)
        data = damaged(data, chance) if chance.random() < 0.15 else sealed(mutated(body, chance))
        kind = Manifest if path.name == "manifest.json" else RankIndex
        try:
            found = kind.from_bytes(data, path="some/file")
            counts[f"{kind.__name__} read"] += 1
            # What it says is what it writes, so that a reader of the format finds no other.
            assert kind.from_bytes(found.to_bytes(), path="again") == found
            if isinstance(found, Manifest) and "export" in found.module:
                Description.from_json(found.module["export"])
        except CheckpointError as error:
            told.append(str(error))
            counts[f"{kind.__name__} refused"] += 1
        except ValueError:
            counts["export refused"] += 1
    assert all(line.startswith("some/file: it") and len(line) < 2000 for line in told)
    ends = [f"{kind} {end}" for kind in ("Manifest", "RankIndex") for end in ("read", "refused")]
    assert min(counts[end] for end in ends) > count / 50, counts


@COUNTS
def test_damaged_headers_are_read_or_refused_and_the_library_takes_what_is_read(tmp_path: Path, count: int) -> None:
    whole = save({
        "a": torch.arange(6).view(2, 3).float(), "b": torch.ones(4, dtype=torch.bfloat16), "none": torch.zeros(0, 3),
        "c": torch.ones(2, 2, dtype=torch.int64), "d": torch.tensor(1.5, dtype=torch.float16),
    }, {"format": "pt"})  # fmt: skip
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    path = tmp_path / "model.safetensors"
    counts, told = Counter[str](), list[str]()
    for seed in range(count):
        chance = random.Random(seed)
        in_bytes = chance.random() < 0.15
        data = damaged(whole, chance) if in_bytes else headed(mutated(header, chance), whole[end:], chance)
        path.write_bytes(data)
        try:
            weights = WeightFolder(tmp_path)
        except ConfigError as error:
            told.append(str(error))
            counts["refused"] += 1
            continue
        theirs = load(data)
        assert weights.tensors.keys() == theirs.keys(), seed
        for name, tensor in weights.tensors.items():
            assert tensor.shape == tuple(theirs[name].shape) and tensor.dtype is theirs[name].dtype, seed
            assert torch.equal(tensor.whole().view(-1).view(torch.uint8), theirs[name].view(-1).view(torch.uint8)), seed
        weights.close()
        counts["read"] += 1
    assert all(line.startswith(str(path)) and len(line) < 2000 for line in told)
    assert min(counts["read"], counts["refused"]) > count / 20, counts


@LOADS
def test_damaged_files_through_whole_loads_touch_nothing_outside(what: str, saved: Path, loads: int) -> None:
    """`watched` says how; each failed load leaves an engine that trains, or says that it is broken."""
    words = [sys.executable, "-m", "tests.checkpoint.watched", what, str(saved), str(loads)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["wrong"] == [] and told["outside"] == []
    # The watch itself: an open, a link and a new file, and an open by native code.
    assert [line.split()[0] for line in told["planted"][:4]] == ["open", "os.link", "os.link", "open"]
    assert told["planted"][-1].startswith("inotify: ") and told["seen"]["open"] > loads
    assert told["counts"]["load: done"] > loads / 20 and told["counts"]["load: CheckpointError"]
