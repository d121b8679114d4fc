"""An export of another's checkpoint writes nothing outside its folder, and copies from where the user says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.checkpoint.extract import extract
from infinity.checkpoint.format import Manifest, read_manifest, seal
from infinity.cli.main import main
from infinity.errors import CheckpointError
from tests.checkpoint.exporting import config
from tests.checkpoint.hostile import hostile, hub_engine
from tests.support.hub import hf_model


@pytest.mark.parametrize("name", [
    "../pwned.json", "ABSOLUTE", "a/../../pwned.json", "pwned.json/../../pwned.json", "a.py",
])  # fmt: skip
def test_an_export_writes_no_text_outside_its_folder(
    name: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(tmp_path / "pwned.json") if name == "ABSOLUTE" else name
    folder = hostile(bases / "hub" / "global_step1", tmp_path / "saved" / "a",
                     lambda body: body["module"]["export"]["texts"].update({name: {}}))  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(folder), str(tmp_path / "in" / "out")]) == 2
    assert "module.export" in capsys.readouterr().err
    assert sorted(path for path in tmp_path.rglob("*") if path != tmp_path / "in") == before
    assert main(["ckpt", "verify", str(folder)]) == 1


@pytest.mark.parametrize("stem", ["../model", "ABSOLUTE", "a/../../model", "..", "a/b/c", ""])
def test_an_export_writes_no_weights_outside_its_folder(stem: str, bases: Path, tmp_path: Path) -> None:
    stem = str(tmp_path / "model") if stem == "ABSOLUTE" else stem

    def change(body: dict[str, Any]) -> None:
        name, info = next(each for each in body["tensors"].items() if each[1]["shape"])
        place = {"name": name, "source": name, "start": 0, "shape": info["shape"]}
        body["module"]["export"]["weights"] = {stem: [place]}

    folder = hostile(bases / "hub" / "global_step1", tmp_path / "saved" / "a", change)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="no plain file name"):
        extract(folder, read_manifest(folder), tmp_path / "in" / "out")
    assert sorted(path for path in tmp_path.rglob("*") if path != tmp_path / "in") == before


def test_a_checkpoint_chooses_no_folder_to_copy_from(
    bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "home"
    secret.mkdir()
    (secret / "tokenizer.json").write_text("secret")
    folder = hostile(bases / "hub" / "global_step1", tmp_path / "saved" / "a",
                     lambda body: body["module"]["export"].update(origin=str(secret)))  # fmt: skip
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    told = capsys.readouterr().out
    assert str(secret) in told and "--config FOLDER" in told
    assert main(["export", str(folder), str(tmp_path / "own"), "--config", str(secret)]) == 0
    assert (tmp_path / "own" / "tokenizer.json").read_text() == "secret"


@pytest.mark.parametrize("part", ["manifest.json", "rank-00000.json", "weights.bin"])
def test_an_export_follows_no_link_out_of_the_checkpoint(
    part: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hostile(bases / "hub" / "global_step1", tmp_path / "saved" / "a", lambda body: None)
    (path,) = folder.glob(f"*{part}")
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert "outside the checkpoint's folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_export_writes_through_no_link(bases: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "out").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "outside")
    assert main(["export", str(bases / "hub" / "global_step1"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "outside").read_text() == "mine"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_stored_tensors_that_share_elements_or_reach_beyond_their_source_are_refused(tmp_path: Path) -> None:
    """Before a file is made."""
    place = {"name": "a", "source": "w", "start": 0, "shape": [4]}
    for places in ([place, {**place, "name": "b", "start": 2}], [{**place, "start": 1}], [place, place]):
        with pytest.raises(CheckpointError, match=r"module\.export"):
            extract(tmp_path, manifest_with({"a": places}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def manifest_with(weights: dict[str, Any]) -> Manifest:
    """One that has a tensor "w" of 4 elements, and an export of these weights."""
    body = {
        "format": "infinity checkpoint", "version": 1, "id": "0" * 12, "tag": "a", "number": 1, "time": "",
        "versions": {"infinity": "", "torch": "", "python": ""}, "tied": {}, "client": None, "client_state": None,
        "plan": {"fingerprint": "", "stage": 0, "world_size": 1, "compute_dtype": "fp32"},
        "tensors": {"w": {"shape": [4], "dtype": "fp32", "trainable": True, "kinds": ["param"]}},
        "ranks": [{"name": "x.json", "nbytes": 0, "crc32c": 0}],
        "engine": {
            "counters": dict.fromkeys(("global_steps", "micro_steps", "global_samples", "skipped_steps"), 0),
            "precision": None, "scheduler": None, "optimizer": {"kind": "", "groups": [], "steps": {}}, "loader": None,
        },
        "module": {"export": {
            "class_name": "", "texts": {}, "origin": None, "weights": weights, "aliases": {}, "refusal": "",
        }},
    }  # fmt: skip
    return Manifest.from_bytes(seal(body), path="x")


def test_a_live_engine_exports_the_files_of_its_own_models_folder(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "tokenizer.json").write_text("own")
    with hub_engine(str(tmp_path)) as made:
        made.module.config._name_or_path = str(tmp_path / "base")
        made.export(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "own"


def test_a_foreign_folder_of_weights_chooses_no_other_to_copy_from(tmp_path: Path) -> None:
    for name in ("home", "base"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(name)
    hf_model("llama").save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    told = {"_name_or_path": str(tmp_path / "home"), "name_or_path": str(tmp_path / "home")}
    path.write_text(json.dumps({**json.loads(path.read_text()), **told}))
    settings = config(str(tmp_path / "nvme"), "bf16", tier="cpu")
    made, *_ = infinity.initialize(model=infinity.load_hf(tmp_path / "base", settings), config=settings)
    with made:
        made.export(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "base"
