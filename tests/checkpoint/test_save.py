"""A save is whole or not there: full drives, failing ranks, killed saves, retention, one tag twice."""

from __future__ import annotations

import errno
import gc
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint import files, publish, save
from infinity.checkpoint.format import check_files, complete, find, read_manifest
from infinity.checkpoint.pieces import checkpoint_buffers
from infinity.errors import CheckpointError, TransferError
from infinity.ops import file as ops_file
from tests.checkpoint.cells import join
from tests.checkpoint.test_format import flip
from tests.checkpoint.test_load import engine_of, same, states, train
from tests.support.models import token_batch


def listing(directory: Path) -> dict[str, int]:
    """Files below a folder, with their sizes."""
    return {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()}


# By what an engine does with gradients: whole until the boundary; in partitions; stepped while backward still runs.
ACCUMULATING = {
    "whole": {"stage": 1}, "partitioned": {"param": "nvme", "optimizer": "nvme"},
    "early": {
        "param": "nvme", "optimizer": "nvme", "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero": {"sub_group_size": 640},
    },
}  # fmt: skip


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("kind", list(ACCUMULATING))
def test_a_save_while_gradients_accumulate_holds_the_last_complete_step(tmp_path, caplog, kind, behind):
    options = ACCUMULATING[kind]

    def run(saving: bool) -> dict[str, list[torch.Tensor]]:
        with engine_of(tmp_path, accumulation=2, **options) as engine:
            caplog.set_level("WARNING", logger="infinity")
            for micro in range(6):
                engine.backward(engine(**token_batch(0, micro, positions=8)))
                if saving and micro == 3:
                    # Before the step that its gradients are for; with "early" it has begun.
                    before.update(states(engine))
                    assert engine.save_checkpoint(tmp_path / "out", asynchronous=behind) == "global_step1"
                    engine.finish_saving()
                engine.step()
            return states(engine)

    before: dict[str, list[torch.Tensor]] = {}
    assert same(run(saving=True), run(saving=False)), "the save has changed the run"
    assert caplog.text.count("without the gradients that have accumulated") == 1
    with engine_of(tmp_path, seed=1, accumulation=2, **options) as engine:
        engine.load_checkpoint(tmp_path / "out")
        assert same(states(engine), before)
        assert (engine.global_steps, engine.micro_steps) == (1, 2)


def test_the_options_of_a_program_are_saved_as_a_dictionary(tmp_path):
    options = Namespace(lr=0.1, names=["a"], inner=Namespace(depth=2))
    plain = {"lr": 0.1, "names": ["a"], "inner": {"depth": 2}}
    with engine_of(tmp_path) as engine:
        for given in (options, {"args": options}):
            engine.save_checkpoint(tmp_path / "out", client_state=given)
            assert engine.load_checkpoint(tmp_path / "out")[1] == (plain if given is options else {"args": plain})
        engine.client_state = lambda: options
        engine.save_checkpoint(tmp_path / "out")
        assert engine.load_checkpoint(tmp_path / "out")[1] == plain


def test_a_buffer_that_the_module_leaves_out_of_its_state_dict_is_not_saved(tmp_path):
    class Scaled(torch.nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            del destination[prefix + "cache"]

    model = Scaled(2, 2)
    model.register_buffer("cache", torch.zeros(2, dtype=torch.complex64))
    model.register_buffer("count", torch.zeros(2))
    assert [*checkpoint_buffers(model)] == ["count"]


@pytest.mark.parametrize("where", ["reserve", "write", "sync", "manifest"])
def test_a_drive_that_fails_leaves_the_older_checkpoint_and_the_run(tmp_path, monkeypatch, where):
    with engine_of(tmp_path, param="nvme", optimizer="cpu") as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "out", tag="a")
        before = listing(tmp_path / "out")
        with monkeypatch.context() as patched:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if where == "reserve":
                fail_at(patched, ops_file.os, "posix_fallocate", full, call=2)
                expected = (TransferError, r"create of \d+ bytes.*bytes were free, \d+ are needed")
            elif where == "write":
                late = TransferError("write", path="p", offset=0, nbytes=9, errno=errno.EIO, reason="bad")
                patched.setattr(files.Writer, "wait", lambda *_: raise_(late))
                expected = (TransferError, r"write of 9 bytes at offset 0 of p failed: bad")
            elif where == "sync":
                fail_at(patched, ops_file.os, "fdatasync", full, call=2)
                expected = (TransferError, r"sync of .* No space left")
            else:
                patched.setattr(publish, "replace_file", lambda *_: raise_(full))
                expected = (CheckpointError, "No space left")
            with pytest.raises(expected[0], match=expected[1]):
                engine.save_checkpoint(tmp_path / "out", tag="b")
        assert listing(tmp_path / "out") == before
        train(engine, 1)
        engine.store.check()
        engine.save_checkpoint(tmp_path / "out", tag="b")
        assert [path.name for path, _ in complete(tmp_path / "out")] == ["b", "a"]


def fail_at(patched: pytest.MonkeyPatch, module: Any, name: str, error: OSError, call: int) -> None:
    """The so-many-th call of a function fails."""
    real = getattr(module, name)
    calls = []

    def failing(*arguments: Any) -> Any:
        calls.append(name)
        if len(calls) >= call:
            raise error
        return real(*arguments)

    patched.setattr(module, name, failing)


def raise_(error: BaseException) -> None:
    raise error


def one_rank_fails(rank: int, world: int, folder: str) -> list[str]:
    """Rank 1's drive is full, then a rank names another tag: what each rank meets."""
    join(world)
    seen = []
    out = Path(folder) / "out"
    with engine_of(Path(folder), param="nvme", dtype="bf16", checkpoint={"tag_validation": "Fail"}) as engine:
        train(engine, 1)
        engine.save_checkpoint(out, tag="a")
        real = os.posix_fallocate
        if rank == 1:
            ops_file.os.posix_fallocate = lambda *_: raise_(OSError(errno.ENOSPC, "No space left on device"))
        try:
            engine.save_checkpoint(out, tag="b")
        except (CheckpointError, TransferError) as error:
            seen.append(f"{type(error).__name__}: {error}")
        os.posix_fallocate = real
        try:
            engine.save_checkpoint(out, tag=f"tag{rank}")
        except CheckpointError as error:
            seen.append(str(error))
        if rank == 1:
            (Path(out) / "a" / read_manifest(out / "a").ranks[1].name).write_bytes(b"{}")
        try:
            engine.load_checkpoint(out)
        except CheckpointError as error:
            seen.append(str(error))
        train(engine, 1)
        engine.save_checkpoint(out, tag="c")
    return seen


def test_when_one_rank_fails_every_rank_raises_and_training_goes_on(rank_pools, tmp_path):
    first, second = rank_pools[2].run(one_rank_fails, str(tmp_path))
    assert first[0].startswith("CheckpointError") and "rank 1 failed with TransferError: create of" in first[0]
    assert second[0].startswith("TransferError") and "No space left" in second[0]
    for said in (first[1], second[1]):
        assert "rank 0 saves 'tag0'" in said and "rank 1 'tag1'" in said and "same folder and tag" in said
    assert all("rank-00001.json" in said[2] for said in (first, second))
    assert [path.name for path, _ in complete(tmp_path / "out")] == ["c"]
    assert not (tmp_path / "out" / "b").exists() and not (tmp_path / "out" / "tag0").exists()


def test_retention_bounds_the_drive_and_descriptors(tmp_path):
    out = tmp_path / "out"
    # What earlier tests have left open goes now.
    gc.collect()
    with engine_of(tmp_path, param="nvme", optimizer="nvme", checkpoint={"keep_last": 3, "keep_every": 8}) as engine:
        counts, sizes = [], []
        for step in range(20):
            train(engine, 1)
            assert engine.save_checkpoint(out) == f"global_step{step + 1}"
            counts.append(len(os.listdir("/proc/self/fd")))
            names = sorted((path.name for path in out.iterdir() if path.is_dir()), key=lambda name: int(name[11:]))
            kept = {1 + age for age in range(20) if age <= step and (age > step - 3 or (age + 1) % 8 == 0)}
            assert names == [f"global_step{number}" for number in sorted(kept)]
            sizes.append(sum(os.stat(path).st_blocks for path in {p.stat().st_ino: p for p in out.rglob("*")}.values()))
        assert max(counts[3:]) == min(counts[3:])
        # Three of the latest, and two for good.
        assert max(sizes) <= 5.5 * sizes[0]
        assert find(out) == out / "global_step20"
        for folder, manifest in complete(out):
            check_files(folder, manifest)


def test_frozen_parameters_that_have_not_changed_are_shared(tmp_path):
    out = tmp_path / "out"

    def links(tag: str) -> int:
        (path,) = (out / tag).glob("*frozen*")
        return path.stat().st_nlink

    with engine_of(tmp_path, param="nvme", checkpoint={"keep_last": 2}) as engine:
        for tag in ("a", "b", "c"):
            train(engine, 1)
            engine.save_checkpoint(out, tag=tag)
        assert links("c") == links("b") == 2 and not (out / "a").exists()
        fixed = engine.module.fixed.weight
        with infinity.modify(fixed):
            fixed.mul_(2)
        engine.save_checkpoint(out, tag="d")
        assert links("d") == 1
        expected = states(engine)
    with engine_of(tmp_path, seed=3) as engine:
        engine.load_checkpoint(out)
        assert same(states(engine), expected)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize("damage", [lambda path: flip(path, 5), append])
def test_a_damaged_file_of_frozen_parameters_is_not_shared(tmp_path, caplog, damage):
    out = tmp_path / "out"
    with engine_of(tmp_path, param="nvme") as engine:
        train(engine, 1)
        engine.save_checkpoint(out, tag="a")
        (frozen,) = (out / "a").glob("*frozen*")
        damage(frozen)
        caplog.set_level("WARNING", logger="infinity")
        engine.save_checkpoint(out, tag="b")
        assert f"{frozen} is damaged; its frozen parameters are written anew" in caplog.text
        assert next((out / "b").glob("*frozen*")).stat().st_nlink == 1
        expected = states(engine)
        train(engine, 1)
        engine.load_checkpoint(out)
        assert same(states(engine), expected)


def test_a_save_that_does_not_read_back_is_never_a_checkpoint(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with engine_of(tmp_path, checkpoint={"keep_last": 1}) as engine:
        engine.save_checkpoint(out, tag="a")
        before = listing(out)
        real = save._read_back

        def damaged(folder: Path, extents: Any, *others: Any) -> None:
            flip(folder / extents[-1].file, extents[-1].offset)
            real(folder, extents, *others)

        with monkeypatch.context() as patched:
            patched.setattr(save, "_read_back", damaged)
            train(engine, 1)
            with pytest.raises(CheckpointError, match="are not those that were written"):
                engine.save_checkpoint(out, tag="b")
        assert listing(out) == before and find(out) == out / "a"
        engine.save_checkpoint(out, tag="b")
        assert [path.name for path, _ in complete(out)] == ["b"]


def test_retention_leaves_what_a_link_leads_to(tmp_path):
    out = tmp_path / "out"
    with engine_of(tmp_path, checkpoint={"keep_last": 1}) as engine:
        engine.save_checkpoint(tmp_path / "away", tag="a")
        out.mkdir()
        (out / "linked").symlink_to(tmp_path / "away" / "a")
        for tag in ("b", "c"):
            engine.save_checkpoint(out, tag=tag)
    assert [path.name for path, _ in complete(out)] == ["c", "linked"]


def test_one_tag_twice_is_replaced_at_one_moment(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with engine_of(tmp_path) as engine:
        train(engine, 1)
        engine.save_checkpoint(out, tag="best")
        first, before = read_manifest(out / "best"), states(engine)
        train(engine, 1)
        held = []
        real = publish.replace_file

        def look(path: Path, data: bytes) -> None:
            # The last moment: all new files are there, and the old checkpoint is still the one.
            if path.name == "manifest.json":
                assert read_manifest(out / "best") == first
                check_files(out / "best", first)
                held.append(len(list((out / "best").iterdir())))
            real(path, data)

        monkeypatch.setattr(publish, "replace_file", look)
        engine.save_checkpoint(out, tag="best")
        assert held == [9], "two saves of three files and an index, one manifest"
        assert len(list((out / "best").iterdir())) == 5
        assert not same(states(engine), before)
        now = states(engine)
        train(engine, 1)
        engine.load_checkpoint(out)
        assert same(states(engine), now)


def test_what_a_killed_save_has_left_is_removed_by_the_next(tmp_path):
    out = tmp_path / "out"
    with engine_of(tmp_path) as engine:
        engine.save_checkpoint(out, tag="a")
        for name in ("a/0123456789ab.rank-00000.states.bin", "b/0123456789ab.rank-00001.json.part", "b/note.txt"):
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_bytes(b"left")
        (out / "notes").mkdir()
        engine.save_checkpoint(out, tag="c")
    left = [path for path in out.rglob("*") if path.is_file() and path.read_bytes() == b"left"]
    assert left == [out / "b" / "note.txt"]
    assert (out / "notes").is_dir()


def test_two_runs_do_not_save_into_one_folder_at_a_time(tmp_path):
    with engine_of(tmp_path) as engine:
        with publish.claimed(tmp_path / "out"), pytest.raises(CheckpointError, match="another save into it"):
            engine.save_checkpoint(tmp_path / "out")
        engine.save_checkpoint(tmp_path / "out")


@pytest.mark.parametrize("tag", ["", "a/b", "..", "latest", " a"])
def test_a_tag_is_the_name_of_a_folder(tmp_path, tag):
    with engine_of(tmp_path) as engine, pytest.raises(CheckpointError, match="cannot be the tag"):
        engine.save_checkpoint(tmp_path / "out", tag=tag)


def test_client_state_that_would_be_pickled_is_refused_before_anything_is_written(tmp_path):
    with engine_of(tmp_path) as engine:
        with pytest.raises(CheckpointError, match=r"client_state.a\[0\] is a builtins.object"):
            engine.save_checkpoint(tmp_path / "out", client_state={"a": [object()]})
        assert not (tmp_path / "out").exists()
        shared = torch.arange(5)
        # Two names of one memory, and two that have one path.
        state = {"tensor": shared, "best": (1.5, None), "by": {3: "x"}, "view": shared[1:], "ema": {"w": torch.ones(2)}}
        state["ema.w"] = torch.zeros(2)
        engine.save_checkpoint(tmp_path / "out", client_state=state)
        _, again = engine.load_checkpoint(tmp_path / "out")
        again["ema"], state["ema"] = again["ema"]["w"], state["ema"]["w"]
        for name in ("tensor", "view", "ema", "ema.w"):
            assert torch.equal(again.pop(name), state.pop(name)), name
        assert again == state
