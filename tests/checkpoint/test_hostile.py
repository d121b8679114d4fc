"""A checkpoint of another's making: it names no file outside its folder, and whatever it says, one error answers."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infinity.checkpoint import format
from infinity.checkpoint.format import check_files, find, latest_tag, read_manifest
from infinity.checkpoint.inspect import verify
from infinity.checkpoint.run_state import check_alike, decode, encode
from infinity.cli.main import main
from infinity.errors import CheckpointError
from tests.checkpoint import cells
from tests.checkpoint.hostile import CELLS, body_of, change_index, change_manifest, copied, hostile, save

CELL = CELLS[0]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    """One that has other values than the checkpoints."""
    with cells.engine_of(tmp_path / "nvme", CELL, seed=9) as made:
        yield made


def hostile_index(source: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy in which rank 0's index was changed, and the manifest vouches for it."""
    copied(source, target)
    body = body_of(target / "manifest.json")
    index = body_of(target / body["ranks"][0]["name"])
    change(index)
    body = change_index(target, body, 0, json.dumps(index).encode())
    change_manifest(target, json.dumps(body).encode())
    return target


def renamed(index: dict[str, Any], name: str) -> str:
    """Call the file of frozen parameters otherwise; returns its name."""
    (old,) = (file for file in index["files"] if file.endswith("frozen.bin"))
    index["files"][name] = index["files"].pop(old)
    for extent in index["extents"]:
        extent[0] = name if extent[0] == old else extent[0]
    return old


@pytest.mark.parametrize("name", ["../../outside.bin", "ABSOLUTE", "a/b.bin", "", ".hidden", "x" * 300, "a\0b", "a\nb"])
def test_a_data_file_outside_the_folder_is_not_opened(name: str, bases: Path, tmp_path: Path, engine: Any) -> None:
    source = bases / "bf16-1" / "global_step2"
    (frozen,) = source.glob("*frozen.bin")
    outside = tmp_path / "outside.bin"
    shutil.copyfile(frozen, outside)
    name = str(outside) if name == "ABSOLUTE" else name
    folder = hostile_index(source, tmp_path / "saved" / "a", lambda index: renamed(index, name))
    with pytest.raises(CheckpointError, match=r"no plain file name"):
        engine.load_checkpoint(tmp_path / "saved", "a")
    with pytest.raises(CheckpointError, match=r"no plain file name"):
        check_files(folder, read_manifest(folder))
    assert any("no plain file name" in str(damage) for damage in verify(folder, read_manifest(folder)))
    (tmp_path / "saved" / "latest").write_text("a\n")
    engine.save_checkpoint(tmp_path / "saved", "b")
    assert outside.stat().st_nlink == 1, "the next save has linked it"


@pytest.mark.parametrize("part", ["manifest.json", "rank-00000.json", "frozen.bin", "client.safetensors", "latest"])
def test_a_link_that_leads_out_of_the_folder_is_not_followed_and_one_within_is(
    part: str, bases: Path, tmp_path: Path, engine: Any
) -> None:
    folder = copied(bases / "bf16-1" / "global_step2", tmp_path / "saved" / "a")
    (tmp_path / "saved" / "latest").write_text("a\n")
    (path,) = [*folder.glob(f"*{part}"), *folder.parent.glob(part)]
    kept = path.with_name(path.name + ".kept")
    path.rename(kept)
    path.symlink_to(kept.name)
    assert engine.load_checkpoint(tmp_path / "saved")[0] == str(folder)
    os.replace(kept, tmp_path / "outside")
    path.unlink()
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"a link to .*outside, outside the checkpoint's folder.*cp -rL"):
        engine.load_checkpoint(tmp_path / "saved")
    assert part == "latest" or main(["ckpt", "verify", str(folder)]) == 1


@pytest.mark.parametrize("content", [
    "..\n", ".\n", "../other\n", "manifest.json\n", "\x1b[2J\n", "x" * 5000, None, 1 << 40,
])  # fmt: skip
def test_what_latest_says_is_the_name_of_a_folder(content: Any, tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    if content is None:
        latest.mkdir()
    elif isinstance(content, int):
        latest.touch()
        os.truncate(latest, content)
    else:
        latest.write_text(content)
    with pytest.raises(CheckpointError, match="latest: it"):
        latest_tag(tmp_path)
    with pytest.raises(CheckpointError):
        find(tmp_path)


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    """Change one place of a body."""

    def change(body: Any) -> None:
        for step in path[:-1]:
            body = body[step]
        body[path[-1]] = value(body[path[-1]]) if callable(value) else value

    return change


MANIFESTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a name of an index": (put("ranks", 0, "name", value="../x.json"), r"ranks\.0\.name: '\.\./x\.json' is no plain"),
    "a name of a client": (put("client", "name", value="/x"), r"client\.name: '/x' is no plain file name"),
    "no data axis": (put("plan", "dp", value=None), r"plan\.dp is None"),
    "a data axis of 3": (put("plan", "dp", value=3), "ranks are not"),
    "an axis in words": (put("plan", "tp", value="1"), r"plan\.tp is '1'"),
    "no ranks": (put("ranks", value=[]), "ranks is"),
    "one index for two": (put("ranks", value=lambda ranks: ranks * 2), "two ranks have the same index"),
    "an index of 10 GB": (put("ranks", 0, "nbytes", value=10**10), r"10,000,000,000 bytes, and at most"),
    "a shape below 0": (put("tensors", "norm.weight", "shape", value=[-16]), r"tensors\.norm\.weight\.shape\.0 is -16"),
    "a shape beyond 64 bits": (put("tensors", "norm.weight", "shape", value=[2**32, 2**32]), "too large for any mem"),
    "a shape of fractions": (put("tensors", "norm.weight", "shape", value=[16.0]), "shape.0 is 16.0"),
    "a shape of truths": (put("tensors", "norm.weight", "shape", value=[True]), "shape.0 is True"),
    "a dtype": (put("tensors", "norm.weight", "dtype", value="fp7"), "no dtype 'fp7'"),
    "a kind twice": (put("tensors", "norm.weight", "kinds", value=["param", "param"]), "named twice"),
    "states without a parameter": (put("tensors", "norm.weight", "kinds", value=["exp_avg"]), "neither a buffer nor"),
    "a trainable that is a number": (put("tensors", "norm.weight", "trainable", value=1), "trainable is 1"),
    "counters": (put("engine", "counters", "global_steps", value="2"), "engine.counters.global_steps is '2'"),
    "steps": (put("engine", "optimizer", "steps", value=[]), "engine.optimizer.steps is"),
    "another version": (put("version", value=3), "version 3"),
    "a truth for a version": (put("version", value=True), "version True"),
    "no engine": (lambda body: body.pop("engine"), "engine is missing"),
    "an identity": (put("id", value="../../../x"), "id is "),
    "a number": (put("number", value=2**63), "number is 9223372036854775808"),
    "a hyper-parameter": (put("engine", "optimizer", "groups", 0, "hyper", "lr", value="fast"), "it.lr is 'fast'"),
    "parameters for others": (put("engine", "optimizer", "groups", 0, "hyper", "params", value=[]), "replace the par"),
    "a scheduler": (put("engine", "scheduler", "state", value={"last_batch_iteration": []}), "state of the scheduler"),
    "a precision": (put("engine", "precision", value={}), "state of the precision"),
    "a loader": (put("engine", "loader", "seed", value=10**30), "state of the data loader"),
    "a client state": (put("client_state", "mask", value={"$tensor": "none"}), "client_state cannot be read"),
    "a spelling": (put("client_state", "raw", value={"$bytes": 3}), "client_state cannot be read"),
}  # fmt: skip


def assert_refused(engine: Any, saved: Path, message: str) -> None:
    """A load of tag "a" fails so, changes nothing, and the engine trains on."""
    before, drawn = cells.digest(engine), cells.draws()
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(saved, "a")
    assert cells.digest(engine) == before and cells.draws() == drawn
    assert len(list(cells.train(engine, 1))) == 1


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_lies_is_refused_and_nothing_is_changed(
    case: str, bases: Path, tmp_path: Path, engine: Any
) -> None:
    change, message = MANIFESTS[case]
    hostile(bases / "bf16-1" / "global_step2", tmp_path / "saved" / "a", change)
    assert_refused(engine, tmp_path / "saved", message)


def moved(column: int, by: int, at: int = 0) -> Callable[[Any], None]:
    """Change a number of an array."""
    return put("arrays", at, column, value=lambda value: value + by)


INDEXES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another rank's": (put("rank", value=1), "it is rank 1's, not rank 0's"),
    "an extent behind the end": (put("extents", -1, 1, value=lambda at: at + 4096), "an extent begins at byte"),
    "extents that overlap": (put("extents", 1, 1, value=0), "an extent begins at byte 0"),
    "an extent between pages": (put("extents", 0, 1, value=8), "multiple of 4096"),
    "an extent in no file": (put("extents", -1, 0, value="other.bin"), "'other.bin', which is none of the rank"),
    "too many checksums": (put("extents", 0, 3, value=lambda crcs: [*crcs, 0]), "have 2 checksums"),
    "a checksum below 0": (put("extents", 0, 3, 0, value=-1), r"extents\.0\.3\.0 is -1"),
    "a file that is longer": (put("files", value=lambda files: {k: v + 4096 for k, v in files.items()}), "its extents"),
    "an array behind the end": (moved(6, 1 << 40), "of extent"),
    "an array before the start": (put("arrays", 0, 6, value=-8), r"arrays\.0\.6 is -8"),
    "an array of less than nothing": (put("arrays", 0, 4, value=-1), r"arrays\.0\.4 is -1"),
    "an array in no extent": (put("arrays", 0, 5, value=10**6), "lies in extent 1000000 of"),
    "an array beyond its tensor": (moved(3, 10**6), "it holds elements up to"),
    "an array of another's": (put("arrays", 0, 0, value="nobody"), r"it holds 'nobody' .*manifest says nothing"),
    "a kind of which the manifest says nothing": (put("arrays", 0, 1, value="moment"), "the manifest says nothing"),
    "another dtype": (put("arrays", 0, 2, value="int16"), "which is kept as"),
    "a dtype that is none": (put("arrays", 0, 2, value="fp7"), "as 'fp7'"),
    "arrays that overlap": (lambda index: index["arrays"].append(list(index["arrays"][0])), "in what is another's"),
    "random numbers": (put("rng", "torch", value={"$bytes": "AAAA"}), "state of the random-number generators"),
    "no random numbers": (put("rng", value={}), "state of the random-number generators"),
    "singles": (put("singles", value={"a": 1}), r"singles\.a is 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_lies_is_refused_and_nothing_is_changed(
    case: str, bases: Path, tmp_path: Path, engine: Any
) -> None:
    change, message = INDEXES[case]
    hostile_index(bases / "bf16-1" / "global_step2", tmp_path / "saved" / "a", change)
    assert_refused(engine, tmp_path / "saved", message)


TEXTS = {
    "nested without end": (b"[" * 200_000, "nested deeper"), "nested deep": (b"[" * 900 + b"]" * 900, "nested deeper"),
    "a number without end": (b'{"format":' + b"9" * 5000 + b"}", "Exceeds the limit|format 9"),
    "not a number": (b'{"format":NaN}', "NaN is no number"), "infinity": (b'{"format":1e999}', "inf is no number"),
    "a key twice": (b'{"id":1,"id":2}', "the key 'id' twice"), "no object": (b"[]", "format None"),
    "no UTF-8": (b'"\xff"', "can't decode"), "half a pair": (b'{"format":"\\ud800"}', "format '"),
    "nothing": (b"", "Expecting value"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
def test_json_that_is_none_or_that_hurts_is_refused(case: str, tmp_path: Path) -> None:
    text, message = TEXTS[case]
    change_manifest(tmp_path, text)
    with pytest.raises(CheckpointError, match=f"(?s)manifest.json: .*({message})"):
        read_manifest(tmp_path)


def test_a_file_that_is_endless_or_waits_is_refused_at_once(bases: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    path = tmp_path / "manifest.json"
    path.touch()
    os.truncate(path, 10 << 30)
    with pytest.raises(CheckpointError, match=r"10,737,418,240 bytes, and at most"):
        read_manifest(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_manifest(tmp_path)
    folder = copied(bases / "bf16-1" / "global_step2", tmp_path / "a")
    manifest = read_manifest(folder)
    for make in (os.mkfifo, os.mkdir, lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 10 << 30)):
        index = folder / manifest.ranks[0].name
        index.rmdir() if index.is_dir() else index.unlink()
        make(index)
        with pytest.raises(CheckpointError, match=index.name):
            check_files(folder, manifest)
    assert time.monotonic() - began < 5


def test_resume_passes_over_all_that_lies_and_takes_the_next(
    bases: Path, tmp_path: Path, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source, saved = bases / "bf16-1" / "global_step2", tmp_path / "saved"
    copied(source, saved / "good")
    lies = [
        *((hostile, MANIFESTS[case][0]) for case in ("a dtype", "no engine", "a loader", "a spelling", "a precision")),
        *((hostile_index, INDEXES[case][0]) for case in ("another dtype", "random numbers", "arrays that overlap")),
    ]
    for at, (make, change) in enumerate(lies):
        make(source, saved / f"bad{at}", change)
        path = saved / f"bad{at}" / "manifest.json"
        body = body_of(path)
        change_manifest(path.parent, json.dumps({**body, "number": 100 + at}).encode())
    change_manifest(copied(source, saved / "deep"), b"[" * 200_000)
    with caplog.at_level(logging.INFO, "infinity"):
        assert engine.resume(saved)[0] == str(saved / "good")
    for name in (*(f"bad{at}" for at in range(len(lies))), "deep"):
        assert any(f"not resumed from {saved / name}: " in line for line in caplog.messages), name
    shutil.rmtree(saved / "good")
    with pytest.raises(CheckpointError, match="none of its 9 checkpoints can be loaded"):
        engine.resume(saved)


def test_a_save_writes_through_no_link(tmp_path: Path, engine: Any) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "saved" / "a").mkdir(parents=True)
    for name in ("latest", "latest.part", "a/manifest.json", "a/manifest.json.part"):
        (tmp_path / "saved" / name).symlink_to(outside)
    engine.save_checkpoint(tmp_path / "saved", "a")
    assert outside.read_text() == "mine" and find(tmp_path / "saved") == tmp_path / "saved" / "a"
    assert engine.load_checkpoint(tmp_path / "saved")[0] is not None


def test_what_a_later_version_adds_is_passed_over(bases: Path, tmp_path: Path, engine: Any) -> None:
    def change(body: dict[str, Any]) -> None:
        for place in (body, body["engine"], body["tensors"]["norm.weight"], body["ranks"][0], body["plan"]):
            place["more"] = {"of": [1]}

    hostile(bases / "bf16-1" / "global_step2", tmp_path / "a", change)
    assert engine.load_checkpoint(tmp_path, "a")[0] == str(tmp_path / "a")


def test_a_save_refuses_what_a_load_would(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested: Any = []
    for _ in range(300):
        nested = [nested]
    engine.save_checkpoint(tmp_path, "a")
    with pytest.raises(CheckpointError, match="nested deeper than 256"):
        engine.save_checkpoint(tmp_path, "b", client_state={"nested": nested})
    monkeypatch.setattr(format, "METADATA_NBYTES_MAX", 100_000)
    with pytest.raises(CheckpointError, match=r"at most 100,000 are read.*as tensors or arrays"):
        engine.save_checkpoint(tmp_path, "b", client_state={"long": "x" * 100_000})
    assert find(tmp_path) == tmp_path / "a" and not (tmp_path / "b").exists()
    change = put("number", value=2**62)
    body = body_of(tmp_path / "a" / "manifest.json")
    change(body)
    change_manifest(tmp_path / "a", json.dumps(body).encode())
    with pytest.raises(CheckpointError, match="has the number 4611686018427387904, behind which there is none"):
        engine.save_checkpoint(tmp_path, "c")


def load_on_ranks(rank: int, world: int, folder: str, nvme: str) -> tuple[str, list[float]]:
    """What a load raises, and the loss of a step behind it."""
    cells.join(world)
    with cells.engine_of(nvme, CELL, seed=9) as made:
        before = cells.digest(made)
        try:
            made.load_checkpoint(folder, "a")
        except CheckpointError as error:
            assert cells.digest(made) == before
            return str(error), list(cells.train(made, 1))
    return "", []


def test_what_one_ranks_index_lies_about_all_ranks_refuse(bases: Path, tmp_path: Path, two_ranks: Any) -> None:
    two_ranks.run(save, str(tmp_path / "bases"))
    folder = copied(tmp_path / "bases" / "bf16-2" / "global_step2", tmp_path / "saved" / "a")
    body = body_of(folder / "manifest.json")
    index = body_of(folder / body["ranks"][1]["name"])
    index["rng"]["python"] = {"$tuple": [3, {"$tuple": [1]}, None]}
    body = change_index(folder, body, 1, json.dumps(index).encode())
    change_manifest(folder, json.dumps(body).encode())
    first, second = two_ranks.run(load_on_ranks, str(tmp_path / "saved"), str(tmp_path / "nvme"))
    assert "rank 1 failed with CheckpointError" in first[0] and "random-number generators" in second[0]
    assert len(first[1]) == len(second[1]) == 1


def test_states_that_a_save_may_hold_are_alike_whatever_their_length_and_others_are_not() -> None:
    """Of every scheduler of torch's, fresh and after some steps."""
    value = torch.nn.Parameter(torch.ones(1))
    adam = torch.optim.AdamW([value])
    schedulers = torch.optim.lr_scheduler
    one, other = schedulers.LinearLR(adam), schedulers.CosineAnnealingLR(adam, 5)
    for made in (
        one, other, schedulers.MultiStepLR(adam, [2, 3]), schedulers.OneCycleLR(adam, 1.0, 9),
        schedulers.ReduceLROnPlateau(adam), schedulers.SequentialLR(adam, [one, other], [3]),
        schedulers.ChainedScheduler([one, other], adam), schedulers.LambdaLR(adam, lambda step: 1.0),
    ):  # fmt: skip
        fresh = copy.deepcopy(made.state_dict())
        for step in range(4):
            adam.step()
            made.step(*([float(step)] if isinstance(made, schedulers.ReduceLROnPlateau) else []))
        later = decode(encode(made.state_dict()))
        check_alike(fresh, later)
        check_alike(made.state_dict(), decode(encode(fresh)))
        with pytest.raises(ValueError, match=r"it\.\w+ is 'x', in the place of"):
            check_alike(fresh, {**later, "last_epoch": "x", "_schedulers": "x"})
    check_alike({"seen": np.int64(3), "on": np.bool_(True), "betas": [0.9, 0.99]}, {"seen": 4, "betas": (0.8, 0.9)})
    check_alike({"object": object()}, {"object": 3})
    for own, saved in (((1, 2), (1, 2, 3)), ({"a": 1}, {"a": True}), ({"a": 1}, {"a": 2**63}), ([1], ["1"])):
        with pytest.raises(ValueError, match="it"):
            check_alike(own, saved)
