"""A checkpoint of DeepSpeed's is a pickle that others made: nothing in it runs, and a defect is one CheckpointError."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import io
import logging
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infinity.checkpoint.deepspeed import torch_file
from infinity.checkpoint.deepspeed.checkpoint import DeepSpeedCheckpoint, read_deepspeed, verify_deepspeed
from infinity.checkpoint.deepspeed.torch_file import PickledObject, TorchFile, TorchTensor, Unloaded
from infinity.checkpoint.run_state import encode_client_state
from infinity.errors import CheckpointError, TransferError

SAVED = Path(__file__).parents[1] / "data" / "deepspeed_checkpoints"
TAG = "global_step4"


def whole(value: Any) -> Any:
    """A value as torch.save takes it: tensors themselves, and no objects of DeepSpeed's classes."""
    if isinstance(value, TorchTensor):
        return value.whole()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items() if not isinstance(each, PickledObject)}
    return type(value)(map(whole, value)) if isinstance(value, list | tuple) else value


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Write a file anew with a change in its value."""
    value = whole(TorchFile(path).value)
    change(value)
    torch.save(value, path)


@pytest.fixture
def zero2(tmp_path: Path) -> Path:
    return shutil.copytree(SAVED / "zero2-bf16" / TAG, tmp_path / "zero2" / TAG)


@pytest.fixture
def zero3(tmp_path: Path) -> Path:
    return shutil.copytree(SAVED / "zero3-fp32" / TAG, tmp_path / "zero3" / TAG)


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    return shutil.copytree(SAVED / "zero2-bf16-universal" / TAG, tmp_path / "universal" / TAG)


def one(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[-1]


def read_all(folder: Path) -> DeepSpeedCheckpoint:
    saved = read_deepspeed(folder)
    shares = [sum(verify_deepspeed(saved, share, 3)) for share in range(3)]
    assert sum(shares) == sum(verify_deepspeed(saved)) == saved.stored_nbytes >= sum(saved.layout.nbytes().values())
    return saved


def inner(value: Any) -> Any:
    return value["optimizer_state_dict"]


def test_what_was_written_anew_is_read(zero2: Path, zero3: Path) -> None:
    """The changes below are what is refused, not the writing. A writer may compute no checksums."""
    for folder, checksums in ((zero2, True), (zero3, True), (zero2, False)):
        torch.serialization.set_crc32_options(checksums)
        try:
            for path in folder.glob("*.pt"):
                rewrite(path, lambda value: None)
        finally:
            torch.serialization.set_crc32_options(True)
        read_all(folder)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "evil", [Evil(), argparse.ArgumentParser, os.system, random.Random(1)],
    ids=["reduced", "class", "function", "instance"],
)  # fmt: skip
def test_no_name_is_imported_and_nothing_runs(evil: Any, zero2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(zero2.parent)
    rewrite(one(zero2, "mp_rank*"), lambda value: value.update(note=evil))
    with pytest.raises(CheckpointError, match="none of the types that are read") as refused:
        read_deepspeed(zero2)
    assert "mp_rank_00_model_states.pt" in str(refused.value) and not Path("executed").exists()


def test_plain_values_come_back(zero2: Path) -> None:
    given = {
        "args": argparse.Namespace(lr=0.5, names=["a"]), "rng": np.arange(6, dtype=np.uint32).reshape(2, 3).T,
        "number": np.float64(1.5), "raw": b"\0\xff", "set": {1, 2}, "view": torch.arange(6).view(2, 3).T, "none": None,
        "big": 2**70,
    }  # fmt: skip
    rewrite(one(zero2, "mp_rank*"), lambda value: value.update(given))
    found = read_all(zero2).client_state
    assert found["args"] == {"lr": 0.5, "names": ["a"]} and found["number"] == 1.5 and found["raw"] == b"\0\xff"
    assert np.array_equal(found["rng"], given["rng"]) and torch.equal(found["view"], given["view"])
    assert (found["set"], found["none"], found["big"]) == ({1, 2}, None, 2**70)


class Hyper(dict):  # type: ignore[type-arg]
    """A dictionary of a program's own, as Lightning keeps hyper-parameters."""


class Progress:
    """An object of a program's own."""

    made = 0

    def __init__(self) -> None:
        Progress.made += 1
        self.best, self.itself, self.weights = 0.5, self, torch.arange(3.0)


class Mode(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass(slots=True)
class Slotted:
    rank: int


def test_objects_of_a_programs_classes_are_left_out_by_name(zero2: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "hyper": Hyper(lr=0.1, layers=[1, 2]), "progress": Progress(), "mode": Mode.FAST, "kind": Progress, "epoch": 3,
        "by": {Mode.FAST: 1}, "slotted": Slotted(2), "when": datetime.datetime(2026, 1, 2), "loss": torch.nn.ReLU(),
    }  # fmt: skip
    rewrite(one(zero2, "mp_rank*"), lambda value: value.update(given))
    Progress.made = 0
    logging.getLogger("infinity").propagate = True
    found = read_all(zero2).client_state
    assert Progress.made == 0 and found["epoch"] == 3
    here = __name__
    names = {key: each.name for key, each in found.items() if isinstance(each, Unloaded)}
    assert names == {
        "hyper": f"{here}.Hyper", "progress": f"{here}.Progress", "mode": f"{here}.Mode", "kind": f"{here}.Progress",
        "slotted": f"{here}.Slotted", "when": "datetime.datetime", "loss": "torch.nn.modules.activation.ReLU",
    }  # fmt: skip
    assert repr(found["mode"]) == f"Unloaded('{here}.Mode')" and found["mode"].arguments == ("fast",)
    assert found["hyper"].items == {"lr": 0.1, "layers": [1, 2]} and found["slotted"].state == {"rank": 2}
    progress = found["progress"].state
    assert progress["best"] == 0.5 and progress["itself"] is found["progress"]
    assert progress["weights"].tolist() == [0.0, 1.0, 2.0]
    assert [(each.name, value) for each, value in found["by"].items()] == [(f"{here}.Mode", 1)]
    (said,) = [record.getMessage() for record in caplog.records if "client_state" in record.getMessage()]
    assert all(name in said for name in names.values()) and "mp_rank_00_model_states.pt" in said


@pytest.mark.parametrize("name", [
    "posix system", "nt system", "os system", "subprocess Popen", "builtins eval", "__builtin__ eval",
    "commands getoutput", "copy_reg _reconstructor", "functools partial", "torch.hub load", "torch load",
    "numpy.testing runstring", "deepspeed.launcher.runner main", "importlib import_module", "my.module a b",
    "my..module f", "my.module f()",
])  # fmt: skip
def test_names_that_no_checkpoint_needs_are_refused(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.partition(" ")
    parts = b"".join(b"X" + struct.pack("<I", len(part)) + part.encode() for part in (module, attribute))
    (tmp_path / "x.pt").write_bytes(archive_of(b"\x80\x04" + parts + b"\x93)R.", {}))
    with pytest.raises(CheckpointError, match="none of the types that are read"):
        TorchFile(tmp_path / "x.pt")


def test_what_stands_for_an_object_is_not_saved(zero2: Path) -> None:
    rewrite(one(zero2, "mp_rank*"), lambda value: value.update(hyper=Hyper(lr=0.1)))
    with pytest.raises(CheckpointError, match=r"client_state\.hyper is a .*Unloaded"):
        encode_client_state(read_all(zero2).client_state, {}, path=zero2)


def drop(key: str) -> Callable[[Any], Any]:
    return lambda value: inner(value).pop(key)


def state(value: Any) -> Any:
    return inner(value)["base_optimizer_state"]["state"]


DEFECTS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("*optim*", lambda value: [state(value)[at].pop("step") for at in (0, 1)], "without its step count"),
    ("*optim*", lambda value: state(value)[1].update(step=torch.tensor(2.0)), "not saved together"),
    ("*optim*", lambda value: state(value)[1].update(step=float("nan")), "its step count is nan"),
    ("*optim*", lambda value: state(value)[1].pop("exp_avg_sq"), "exp_avg_sq"),
    ("*optim*", lambda value: state(value).clear(), "do not both hold"),
    ("*optim*", lambda value: state(value)[0].update(exp_avg=torch.zeros(3)), "exp_avg"),
    ("*optim*", drop("single_partition_of_fp32_groups"), "is missing where DeepSpeed writes a list"),
    ("*optim*", drop("partition_count"), "ranks saved it"),
    ("*optim*", lambda value: inner(value).update(zero_stage=7), "ZeRO stage"),
    ("*optim*", lambda value: inner(value)["single_partition_of_fp32_groups"].pop(), "groups of parameters"),
    ("*optim*", lambda value: value.clear(), "optimizer_state_dict is missing"),
    ("mp_rank*", lambda value: value["param_shapes"].pop(), "groups of parameters"),
    ("mp_rank*", lambda value: value["param_shapes"][0].update({"words.weight": torch.Size([13, 600])}), "elements"),
    ("mp_rank*", lambda value: value["param_shapes"][0].update({"words.weight": (-13, 6)}), "shape"),
    ("mp_rank*", lambda value: value["param_shapes"][0].update({"words.weight": (2**40, 2**40)}), "shape"),
    ("mp_rank*", lambda value: value.update(param_shapes={}), "param_shapes"),
    ("mp_rank*", lambda value: value.update(global_steps=-1), "global_steps is -1"),
    ("mp_rank*", lambda value: value.update(global_steps=3), "the model's file 3"),
    ("mp_rank*", lambda value: value.pop("module"), "module is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "change", "said"), DEFECTS, ids=range(len(DEFECTS)))
def test_a_contradiction_is_refused(pattern: str, change: Callable[[Any], Any], said: str, zero2: Path) -> None:
    rewrite(one(zero2, pattern), change)
    with pytest.raises(CheckpointError, match=said) as refused:
        read_all(zero2)
    assert str(zero2) in str(refused.value)


def test_a_stage_3_vector_of_another_length_is_refused(zero3: Path) -> None:
    rewrite(one(zero3, "*optim*"), lambda value: inner(value)["fp32_flat_groups"].__setitem__(0, torch.zeros(5)))
    with pytest.raises(CheckpointError, match="elements"):
        read_all(zero3)


def test_stage_3_without_its_states_is_refused(zero3: Path) -> None:
    for path in zero3.glob("*optim*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no files"):
        read_deepspeed(zero3)


def test_the_other_steps_of_a_group_are_taken(zero2: Path) -> None:
    """FusedAdam of DeepSpeed keeps the step in the group; older versions a list of states, without padding."""
    for path in zero2.glob("*optim*"):
        rewrite(path, move_step)
    assert set(read_all(zero2).layout.steps.values()) == {4}
    for path in zero2.glob("*optim*"):
        rewrite(path, as_list_of_states)
    assert set(read_all(zero2).layout.steps.values()) == {4}


def move_step(value: Any) -> None:
    for number, each in state(value).items():
        inner(value)["base_optimizer_state"]["param_groups"][number]["step"] = int(each.pop("step"))


def as_list_of_states(value: Any) -> None:
    base = inner(value)["base_optimizer_state"]
    inner(value)["base_optimizer_state_step"] = base["param_groups"][0]["step"]
    inner(value)["base_optimizer_state"] = [
        {kind: each[kind][: len(master)] for kind in ("exp_avg", "exp_avg_sq")}
        for each, master in zip(base["state"].values(), inner(value)["single_partition_of_fp32_groups"], strict=True)
    ]


@pytest.mark.parametrize("cell", ["zero2-bf16", "zero3-fp32", "zero3-bf16-universal"])
def test_a_file_that_is_cut_short_or_missing_is_named(cell: str, tmp_path: Path) -> None:
    for number, path in enumerate(sorted((SAVED / cell / TAG).rglob("*.pt"))):
        folder = shutil.copytree(SAVED / cell / TAG, tmp_path / str(number))
        own = folder / path.relative_to(SAVED / cell / TAG)
        own.write_bytes(own.read_bytes()[: own.stat().st_size // 2])
        with pytest.raises(CheckpointError, match=own.name.replace(".", r"\.")):
            read_all(folder)
        own.unlink()
        if own.name == "step.pt":
            continue
        with pytest.raises(CheckpointError):
            read_all(folder)


def test_a_ranks_states_that_are_anothers_are_named(zero2: Path, zero3: Path) -> None:
    for folder in (zero2, zero3):
        first, second, *_ = sorted(folder.glob("*optim*"))
        shutil.copyfile(first, second)
        with pytest.raises(CheckpointError, match=rf"{second.name}: it holds the tensors of {first.name}, another"):
            read_deepspeed(folder)


def test_a_model_that_is_divided_is_refused(zero2: Path) -> None:
    others = {
        "mp_rank_01_model_states.pt": "divided", "layer_0_expert_1_mp_rank_00_model_states.pt": "mixture",
        "layer_01-model_00-model_states.pt": "pipeline",
    }  # fmt: skip
    for name, said in others.items():
        shutil.copyfile(one(zero2, "mp_rank_00*"), zero2 / name)
        with pytest.raises(CheckpointError, match=said):
            read_deepspeed(zero2)
        (zero2 / name).unlink()


def test_no_link_leads_out_of_the_folder(zero2: Path, tmp_path: Path) -> None:
    path = one(zero2, "*optim*")
    path.rename(tmp_path / "elsewhere.pt")
    path.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CheckpointError, match="outside"):
        read_deepspeed(zero2)


@pytest.mark.parametrize("name", ["../../words.weight", "..", "a/b", "", "x" * 5000, "\ud800"])
def test_a_parameters_name_is_no_path(name: str, universal: Path) -> None:
    rewrite(one(universal, "mp_rank*"), lambda value: value["param_shapes"][0].update({name: (13, 6)}))
    with pytest.raises(CheckpointError, match=r"called|name of a tensor"):
        read_deepspeed(universal)


def test_a_folder_of_states_that_is_a_link_is_refused(universal: Path, tmp_path: Path) -> None:
    own = universal / "zero" / "words.weight"
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="link"):
        read_deepspeed(universal)


def archive_of(data: bytes, records: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in {"data.pkl": data, "byteorder": b"little", **records}.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def tensor_pickle(numel: int, start: int, shape: tuple[int, ...], strides: tuple[int, ...], key: str = "0") -> bytes:
    """A pickle of one tensor, as torch writes it."""

    class Storage:
        pass

    class Pickler(pickle._Pickler):
        def persistent_id(self, each: Any) -> Any:
            if not isinstance(each, Storage):
                return None
            return ("storage", torch.FloatStorage, key, "cpu", numel)

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), start, shape, strides, False, None)

    file = io.BytesIO()
    Pickler(file, protocol=2).dump({"x": Tensor()})
    return file.getvalue()


GOOD = tensor_pickle(6, 0, (2, 3), (3, 1))
FLOATS = {"data/0": bytes(24)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (archive_of(tensor_pickle(7, 0, (2, 3), (3, 1)), FLOATS), "its pickle says 7 elements"),
        (archive_of(tensor_pickle(6, 1, (2, 3), (3, 1)), FLOATS), "exceeds its storage"),
        (archive_of(tensor_pickle(6, 0, (2, 3), (2**62, 1)), FLOATS), "exceeds its storage"),
        (archive_of(tensor_pickle(6, 0, (2, 3), (-3, 1)), FLOATS), "none that is read"),
        (archive_of(tensor_pickle(6, 0, (2, 3), (3, 1), "../1"), FLOATS), "is missing"),
        (archive_of(GOOD, FLOATS, compression=zipfile.ZIP_DEFLATED), "compressed"),
        (archive_of(GOOD, {**FLOATS, "byteorder": b"big"}), "the order"),
        (archive_of(b"\x80\x02]q\xffq\x00h\x05.", {}), "cannot be read"),
        (archive_of(b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.", {}), "builtins.eval"),
        (archive_of(b"\x80\x02(" * 3 + b".", {}), "cannot be read"),
        (archive_of(b"\x80\x02)" + b"\x85" * 100_000 + b"}q\x00" + b"0.", {}), "POP"),
        (archive_of(b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.", {}), "is a key"),
        (b"PK\5\6" + bytes(18), "no data.pkl"),
        (b"\x80\x02}q\x00.", "no file of torch.save"),
        (b"", "no file of torch.save"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_torchs_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        TorchFile(tmp_path / "x.pt")


def test_values_that_repeat_each_other_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes name a list of many items again and again."""
    assert torch_file._COPIED_MAX < 1 << 28
    monkeypatch.setattr(torch_file, "_COPIED_MAX", 1 << 22)
    items = b"]q\x00(" + b"K\x01" * 50_000 + b"e"
    copies = b"".join(b"c__builtin__\nset\nh\x00\x85R" for _ in range(100))
    (tmp_path / "x.pt").write_bytes(archive_of(b"\x80\x02" + items + copies + b".", {}))
    with pytest.raises(CheckpointError, match="repeat each other"):
        TorchFile(tmp_path / "x.pt")


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    content = bytearray(archive_of(GOOD, {**FLOATS, "data/1": bytes(24)}))
    # The central directory's entry of data/1 is led to the middle of data/0.
    at = content.rindex(b"archive/data/1") - 46
    (offset,) = struct.unpack_from("<I", content, at + 42)
    struct.pack_into("<I", content, at + 42, offset - 30)
    (tmp_path / "x.pt").write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="another's"):
        TorchFile(tmp_path / "x.pt")


def test_a_file_that_is_replaced_after_it_was_looked_at_is_refused(zero2: Path) -> None:
    saved = read_deepspeed(zero2)
    for path in zero2.glob("*optim*"):
        shutil.copyfile(path, zero2 / "copy")
        os.replace(zero2 / "copy", path)
    with pytest.raises(TransferError, match="not the file any more"):
        list(verify_deepspeed(saved))


@pytest.mark.parametrize("cell", ["zero2-fp16", "zero3-bf16"])
def test_flipped_bytes_are_found(cell: str, tmp_path: Path) -> None:
    """Whatever stands in a file, reading it ends: in an error of ours where a tensor or the pickle has changed."""
    folder = shutil.copytree(SAVED / cell / TAG, tmp_path / TAG)
    chance = random.Random(7)
    refused = 0
    for path in sorted(folder.glob("*.pt")):
        record = max(TorchFile(path).storages, key=lambda record: record.nbytes)
        content = bytearray(path.read_bytes())
        content[record.offset + record.nbytes // 2] ^= 1
        path.write_bytes(bytes(content))
        with pytest.raises(CheckpointError, match=rf"{path.name}: the .* bytes of its record '{record.name}' are not"):
            read_all(folder)
        content[record.offset + record.nbytes // 2] ^= 1
        path.write_bytes(bytes(content))
    for path in sorted(folder.glob("*.pt")):
        whole_file = path.read_bytes()
        for _ in range(40):
            content = bytearray(whole_file)
            for _ in range(chance.choice((1, 1, 8))):
                content[chance.randrange(len(content))] = chance.randrange(256)
            path.write_bytes(bytes(content))
            try:
                read_all(folder)
            except (CheckpointError, TransferError):
                refused += 1
        path.write_bytes(whole_file)
    assert refused > 30 and read_all(folder).tensors
