"""`infinity ckpt` and `infinity export`: what is there is told, damage is found where it is, and so are differences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint.format import BLOCK_NBYTES, find, read_manifest
from infinity.checkpoint.inspect import verify
from infinity.cli.main import main
from tests.checkpoint.exporting import config, tokens, zoo


def save(rank: int, world_size: int, stage: int, dtype: str, tier: str, steps: int, folder: str) -> None:
    """Trains on the same batches, however many ranks there are, and saves."""
    settings = {**config(f"{folder}/drive", dtype, stage, tier), "train_micro_batch_size_per_gpu": 2 // world_size}
    engine, *_ = infinity.initialize(model=zoo(), config=settings)
    with engine:
        for step in range(steps):
            batch = tokens(step).chunk(world_size)[rank]
            engine.backward(engine(input_ids=batch, labels=batch))
            engine.step()
        engine.save_checkpoint(f"{folder}/saved", client_state={"mask": torch.arange(5), "epoch": 3})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any, rank_pools: Any) -> Path:
    """A folder of checkpoints; one of 2 ranks, bf16, on NVMe."""
    folder = tmp_path_factory.mktemp("checkpoints")
    rank_pools[2].run(save, 3, "bf16", "nvme", 2, str(folder))
    return folder / "saved"


def run(capsys: Any, *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(word) for word in words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_inspect_tells_what_is_there(saved: Path, capsys: Any) -> None:
    code, shown, _ = run(capsys, "ckpt", "inspect", saved, "--tensors")
    assert code == 0
    lines = shown.splitlines()
    assert any("2 steps (0 skipped)" in line and "AdamW" in line for line in lines)
    assert any(line.startswith("plan") and "stage 3, 2 rank(s), bf16" in line for line in lines)
    assert any(line.split() == ["frozen.bias", "7", "bf16", "no", "param"] for line in lines)
    code, shown, _ = run(capsys, "ckpt", "inspect", saved / "global_step2", "--json")
    facts = json.loads(shown)
    trained = facts["numel"]["trained"]
    assert facts["bytes"]["exp_avg"] == facts["bytes"]["exp_avg_sq"] == 4 * trained
    assert facts["bytes"]["remainder"] == 2 * trained
    assert facts["bytes"]["param"] == 2 * (trained + facts["numel"]["frozen"])
    assert facts["tied"] == {"model.head.weight": "model.embedding.weight"}
    assert facts["tensors"]["counts"] == {"shape": [5], "dtype": "int64", "trained": False, "kinds": ["buffer"]}


def test_a_whole_checkpoint_verifies(saved: Path, capsys: Any) -> None:
    code, shown, _ = run(capsys, "ckpt", "verify", saved)
    assert code == 0 and "whole" in shown and "/s" in shown


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("part", [
    "manifest.json", "rank-00001.json", "rank-00000.weights.bin", "rank-00001.frozen.bin", "rank-00001.states.bin",
    "client.safetensors",
])  # fmt: skip
def test_a_flipped_byte_is_found_and_named(part: str, saved: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(saved / "global_step2", tmp_path / "copy")
    (path,) = (tmp_path / "copy").glob(f"*{part}")
    for at in (0, path.stat().st_size // 2, path.stat().st_size - 1):
        flip(path, at)
        code, shown, _ = run(capsys, "ckpt", "verify", tmp_path / "copy")
        assert code == 1, at
        assert f"DAMAGED {path.name}" in shown, shown
        if part.endswith(".bin"):
            assert "bytes at offset" in shown and "they hold" in shown
        flip(path, at)
    assert run(capsys, "ckpt", "verify", tmp_path / "copy")[0] == 0


def test_all_damage_is_told_with_its_tensors(saved: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved / "global_step2", folder)
    manifest = read_manifest(folder)
    index = manifest.index(folder, 0)
    starts = [(extent.file, extent.offset) for extent in index.extents if extent.file.endswith("states.bin")]
    assert len(starts) > 2
    for file, offset in (starts[0], starts[2]):
        flip(folder / file, offset + 5)
    (frozen,) = folder.glob("*rank-00001.frozen.bin")
    frozen.unlink()
    found = list(verify(folder, manifest))
    assert [(damage.file, damage.offset) for damage in found[:2]] == [starts[0], starts[2]]
    for damage in found[:2]:
        number = next(at for at, e in enumerate(index.extents) if (e.file, e.offset) == (damage.file, damage.offset))
        there = {f"{array.tensor} ({array.kind})" for array in index.arrays if array.extent == number}
        assert set(damage.tensors) == there
    assert found[2].file == frozen.name and "it is missing" in str(found[2]) and "frozen." in str(found[2])
    assert len(found) == 3
    assert max(extent.nbytes for extent in index.extents) <= BLOCK_NBYTES


def test_what_is_saved_elsewhere_and_otherwise_differs_in_nothing(
    saved: Path, tmp_path: Path, rank_pools: Any, capsys: Any
) -> None:
    """The same run at another number of ranks, stage and tier: rounding differs, shapes and names do not."""
    rank_pools[1].run(save, 1, "bf16", "cpu", 2, str(tmp_path))
    code, shown, _ = run(capsys, "ckpt", "diff", saved, tmp_path / "saved")
    assert "added" not in shown and "removed" not in shown
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line}
    assert int(rows["weight"][1]) == int(rows["exp_avg"][1]) + 2
    assert float(rows["weight"][3]) < 0.02 and float(rows["exp_avg"][3]) < 1e-2
    # The very same values, cut otherwise.
    other = tmp_path / "other"
    engine, *_ = infinity.initialize(model=zoo(), config=config(str(tmp_path / "drive"), "bf16", 1, "nvme"))
    with engine:
        engine.load_checkpoint(saved)
        engine.save_checkpoint(other, client_state={"mask": torch.arange(5), "epoch": 3})
    code, shown, _ = run(capsys, "ckpt", "diff", saved, other)
    assert code == 0 and "nothing differs" in shown, shown


def test_differences_are_told_by_kind(saved: Path, tmp_path: Path, capsys: Any) -> None:
    model = zoo()
    model.extra = torch.nn.Parameter(torch.ones(3))
    model.frozen = torch.nn.Linear(5, 6).requires_grad_(False)
    engine, *_ = infinity.initialize(model=model, config=config(str(tmp_path / "drive"), "bf16"))
    with engine:
        engine.save_checkpoint(tmp_path / "other")
    code, shown, _ = run(capsys, "ckpt", "diff", saved, tmp_path / "other", "--all")
    assert code == 1
    lines = shown.splitlines()
    assert {"added: extra", "another shape: frozen.weight", "another shape: frozen.bias"} <= set(lines)
    assert any(line.split()[:2] == ["counters.global_steps", "2"] for line in lines)
    assert any(line.split()[:2] == ["model.positions", "weight"] for line in lines)


def test_what_one_side_keeps_more_of_is_told(saved: Path, tmp_path: Path, capsys: Any) -> None:
    engine, *_ = infinity.initialize(model=zoo(), config=config(str(tmp_path / "drive"), "bf16"))
    with engine:
        engine.load_checkpoint(saved)
        client = {"mask": torch.arange(5) + 1, "epoch": 3}
        engine.save_checkpoint(tmp_path / "other", client_state=client, exclude_frozen_parameters=True)
    code, shown, _ = run(capsys, "ckpt", "diff", saved, tmp_path / "other")
    rows = [line.split() for line in shown.splitlines()]
    assert code == 1 and "nothing differs" not in shown
    assert ["frozen.weight", "param", "nothing"] in rows
    assert any(row[:4] == ["tensors", "of", "client_state", '"crc32c'] for row in rows)


def test_a_changed_element_is_found_and_measured(saved: Path, tmp_path: Path, capsys: Any) -> None:
    engine, *_ = infinity.initialize(model=zoo(), config=config(str(tmp_path / "drive"), "bf16"))
    with engine:
        engine.load_checkpoint(saved)
        state = infinity.state(engine.module.model.positions)
        moment = state.exp_avg
        moment[1, 2] += 0.5
        state.exp_avg = moment
        engine.save_checkpoint(tmp_path / "other", client_state={"mask": torch.arange(5), "epoch": 3})
    code, shown, _ = run(capsys, "ckpt", "diff", saved, tmp_path / "other")
    assert code == 1
    assert ["model.positions", "exp_avg", "1", "of", "2,048", "0.5"] in [line.split() for line in shown.splitlines()]


def test_what_cannot_be_answered_is_said_in_a_sentence(saved: Path, tmp_path: Path, capsys: Any) -> None:
    code, _, told = run(capsys, "ckpt", "verify", tmp_path)
    assert code == 2 and "neither manifest.json nor a file that names the latest" in told
    code, _, told = run(capsys, "ckpt", "inspect", saved, "--tag", "other")
    assert code == 2 and "no checkpoint 'other'. Name one with --tag: there are global_step2" in told
    code, _, told = run(capsys, "export", saved, tmp_path / "out", "--dtype", "fp8")
    assert code == 2 and "there are fp32, bf16 and fp16" in told
    code, _, told = run(capsys, "export", saved, tmp_path / "out", "--max-shard-size", "many")
    assert code == 2 and "--max-shard-size" in told
    code, _, told = run(capsys, "export", saved, tmp_path / "out", "--config", tmp_path / "none")
    assert code == 2 and "no such folder" in told
    assert find(saved) is not None and not (tmp_path / "out").exists()


def test_export_takes_a_configuration_from_another_folder(saved: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "zoo"}')
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    words = ("export", saved, tmp_path / "out", "--dtype", "fp32", "--one-file", "--config", tmp_path / "base")
    code, shown, _ = run(capsys, *words)
    assert code == 0 and "global_step2 in fp32" in shown
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "zoo"}'
