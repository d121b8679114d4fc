"""checkpoint.every_step: what a run leaves behind each step, and the run that goes on from it.

A kill is a copy of the folder of swap files, taken while the engine lives; `tests/record_kills.py` kills for real.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import infinity
from infinity.base.sizes import format_bytes
from infinity.checkpoint.records import killed_runs, left_runs, make_checkpoint, remove_run
from infinity.cli.main import main
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError, StateError, TransferError
from infinity.memory.tiers import nvme as tier
from infinity.step.optimizer_step import OptimizerStep
from tests import record_cuts, record_kills
from tests.support.models import token_batch
from tests.support.oracle import SmallModel, join, settings, swap_files
from tests.support.simulated_device import engines_use

STEPS, KILLED_AT = 6, 3
ON_NVME = {"param": "nvme", "optimizer": "nvme"}
# By name: where things are, and what makes the step another one.
CELLS: dict[str, dict[str, Any]] = {
    "all on NVMe, clipped": {**ON_NVME, "dtype": "bf16", "clip": 0.05},
    "parameters whole and in memory": {"param": "gpu", "optimizer": "nvme", "dtype": "fp16",
                                       "zero": {"stage3_param_persistence_threshold": 1000}},
    "states in memory, accumulated": {"param": "nvme", "optimizer": "cpu", "accumulation": 2},
    "stage 1": {"stage": 1, "optimizer": "nvme"},
    "begun in backward": {**ON_NVME, "check_grad_overflow": False, "zero": {"sub_group_size": 700}},
    "in memory, on a guess": {"param": "cpu", "optimizer": "cpu", "clip": 5.0, "speculative_step": True,
                              "check_grad_overflow": False},
}  # fmt: skip


def config(folder: Path, swap: str = "nvme", *, every_step: str = "process", **given: Any) -> dict[str, Any]:
    row = settings(folder / swap, **given)
    # A run with nothing on NVMe has its copies there.
    row["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder / swap)
    return {**row, "checkpoint": {"path": str(folder / "checkpoints"), "every_step": every_step}}


def started(row: dict[str, Any]) -> Engine:
    torch.manual_seed(1)
    return infinity.initialize(model=SmallModel(), config=row)[0]


def trained(engine: Engine, until: int, rank: int = 0) -> None:
    while engine.global_steps < until:
        for _ in range(engine.config.accumulation):
            engine.backward(engine(**token_batch(rank, engine.micro_steps, positions=8)))
            engine.step()


def digest(engine: Engine) -> str:
    found = hashlib.sha256()
    for param in engine.module.parameters():
        state = infinity.state(param)
        for values in (state.master, *((state.exp_avg, state.exp_avg_sq) if state.trainable else ())):
            found.update(values.numpy().tobytes())
    return found.hexdigest()


def killed(engine: Engine, folder: Path, swap: str = "left") -> None:
    """Leave in another folder what a kill would leave now, once the record of the latest step is written."""
    engine.synchronize()
    shutil.copytree(folder / "nvme", folder / swap)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_killed_run_goes_on_with_the_bits_of_one_that_was_not(cell: str, device: str, tmp_path: Path) -> None:
    with engines_use() if device == "simulated" else mock.MagicMock():
        with started(config(tmp_path, **CELLS[cell])) as engine:
            trained(engine, KILLED_AT)
            killed(engine, tmp_path)
            trained(engine, STEPS)
            expected = digest(engine)
        assert not any((tmp_path / "nvme").iterdir()), "a run that is over leaves nothing"
        with started(config(tmp_path, "left", **CELLS[cell])) as engine:
            path, _ = engine.resume()
            assert path is not None and Path(path).parent == tmp_path / "left" and engine.global_steps == KILLED_AT
            engine.store.check()
            trained(engine, STEPS)
            assert digest(engine) == expected
            engine.store.check()


def in_ranks(rank: int, world: int, folder: str) -> tuple[str, int, str]:
    """Kill two ranks, of which one had its last record not yet written; go on."""
    join(world)
    at, given = Path(folder), {"param": "nvme", "optimizer": "cpu", "dtype": "bf16", "clip": 0.05}
    with started(config(at, **given)) as engine:
        trained(engine, KILLED_AT, rank)
        engine.synchronize()
        torch.distributed.barrier()
        if rank == 0:
            shutil.copytree(at / "nvme", at / "left")
            # Of rank 1, what was there one step before.
            (newest,) = (each for each in killed_runs(at / "left") if each.run.rank == 1)
            latest = max(newest.records)
            newest.path.with_suffix(tier.RECORD_SUFFIXES[latest % 2]).unlink()
        torch.distributed.barrier()
        trained(engine, STEPS, rank)
        expected = digest(engine)
    with started(config(at, "left", **given)) as engine:
        engine.resume()
        went_on = engine.global_steps
        trained(engine, STEPS, rank)
        found = digest(engine)
    return expected, went_on, found


def test_ranks_go_on_from_the_latest_step_that_all_have(rank_pools: Any, tmp_path: Path) -> None:
    for expected, went_on, found in rank_pools[2].run(in_ranks, str(tmp_path)):
        assert (found, went_on) == (expected, KILLED_AT - 1)
    assert not any((tmp_path / "left").iterdir())


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A folder with a run that was killed after KILLED_AT steps; its swap files are in "left"."""
    with started(config(tmp_path, **ON_NVME, dtype="bf16")) as engine:
        engine.client_state = {"epoch": 7, "kept": torch.arange(3)}
        trained(engine, KILLED_AT)
        killed(engine, tmp_path)
    return tmp_path


def test_nothing_is_trained_before_the_program_says_what_it_goes_on_from(left: Path) -> None:
    row = config(left, "left", **ON_NVME, dtype="bf16")
    with started(row) as engine:
        for verb in (lambda: engine(**token_batch(0, 0)), engine.step, lambda: engine.export(left / "out")):
            with pytest.raises(StateError, match=r"hold step 3.*engine\.resume\(\).*load_checkpoint.*remove"):
                verb()
    assert swap_files(left / "left"), "an engine that has not gone on leaves what it took over"
    with started(row) as engine:
        _, client = engine.resume()
        assert client["epoch"] == 7 and client["kept"].tolist() == [0, 1, 2]


def test_the_newer_of_checkpoint_and_swap_files_is_gone_on_from(left: Path) -> None:
    row = config(left, "left", **ON_NVME, dtype="bf16")
    shutil.copytree(left / "left", left / "again")
    with started(row) as engine:
        engine.resume()
        trained(engine, 5)
        engine.save_checkpoint(left / "checkpoints")
        expected = digest(engine)
    with started(config(left, "again", **ON_NVME, dtype="bf16")) as engine:
        path, _ = engine.resume()
        assert path == str(left / "checkpoints" / "global_step5") and digest(engine) == expected
        # From here on a kill finds the values of the checkpoint, not those before.
        engine.synchronize()
        with mock.patch("infinity.checkpoint.records.wait_for_end"):
            (run,) = killed_runs(left / "again")
        assert run.records[max(run.records)].step == 5


def test_a_change_between_steps_is_there_when_the_step_behind_it_was_killed(tmp_path: Path) -> None:
    row = config(tmp_path, **ON_NVME, dtype="bf16")
    apply = OptimizerStep.apply
    with started(row) as engine:
        trained(engine, 2)
        weight = engine.module.positions
        with infinity.modify(weight):
            weight.data.fill_(0.25)
        killed(engine, tmp_path, "before")
        expected = digest(engine)

        def killed_here(step: OptimizerStep, groups: Any) -> None:
            shutil.copytree(tmp_path / "nvme", tmp_path / "inside")
            apply(step, groups)

        with mock.patch.object(OptimizerStep, "apply", killed_here):
            trained(engine, 3)
    for swap, same in (("before", False), ("inside", True)):
        with started(config(tmp_path, swap, **ON_NVME, dtype="bf16")) as engine:
            engine.resume()
            assert engine.global_steps == 2
            assert (digest(engine) == expected) is same, swap


def test_what_is_not_trained_has_one_place_and_is_not_changed(left: Path) -> None:
    with started(config(left, "left", **ON_NVME, dtype="bf16")) as engine:
        engine.resume()
        fixed = engine.module.fixed.weight
        with pytest.raises(StateError, match="what a record names"), infinity.modify(fixed):
            fixed.data.fill_(1.0)


def test_an_error_leaves_the_run_as_a_kill_does(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="of the program"), started(config(tmp_path, **ON_NVME)) as engine:
        trained(engine, 2)
        raise RuntimeError("of the program")
    with started(config(tmp_path, **ON_NVME)) as engine:
        engine.resume()
        assert engine.global_steps >= 1


def test_a_step_that_is_skipped_has_a_record(tmp_path: Path) -> None:
    row = config(tmp_path, **ON_NVME, dtype="fp16")
    row["fp16"] = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    with started(row) as engine:
        trained(engine, 3)
        assert engine.skipped_steps
        killed(engine, tmp_path)
        skipped, scale = engine.skipped_steps, float(engine.loss_scale)
    row["zero_optimization"]["offload_param"]["nvme_path"] = str(tmp_path / "left")
    row["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "left")
    with started(row) as engine:
        engine.resume()
        assert (engine.global_steps, engine.skipped_steps, float(engine.loss_scale)) == (3, skipped, scale)


def test_a_checkpoint_is_made_of_swap_files_for_any_topology(left: Path, capsys: Any) -> None:
    with started(config(left, "left", **ON_NVME, dtype="bf16")) as engine:
        engine.resume()
        expected = digest(engine)
        engine.synchronize()
        killed(engine, left, "unused")
        shutil.copytree(left / "left", left / "copy")
    assert main(["ckpt", "from-swap", str(left / "copy"), str(left / "out"), "--tag", "made"]) == 0
    assert "which stay" in capsys.readouterr().out and swap_files(left / "copy")
    row = settings(left / "other", stage=2, dtype="bf16")
    with started(row) as engine:
        path, client = engine.load_checkpoint(left / "out")
        assert path == str(left / "out" / "made") and client["epoch"] == 7
        assert digest(engine) == expected and engine.global_steps == KILLED_AT
    with pytest.raises(CheckpointError, match="no swap files with a record"):
        make_checkpoint([left / "nvme"], left / "none")


def left_by(rank: int, world: int, folder: str, given: dict[str, Any]) -> str:
    """Train some ranks, and leave in "left" what a kill would; return the digest."""
    join(world)
    at = Path(folder)
    with started(config(at, **given)) as engine:
        trained(engine, KILLED_AT, rank)
        found = digest(engine)
        engine.synchronize()
        wait = torch.distributed.barrier if world > 1 else lambda: None
        wait()
        if rank == 0:
            shutil.copytree(at / "nvme", at / "left")
        wait()
        return found


def loaded_by(rank: int, world: int, folder: str, given: dict[str, Any]) -> tuple[str, int]:
    """Load what from-swap has made; return the digest, and the steps."""
    join(world)
    with started(settings(Path(folder) / f"to{world}", **given)) as engine:
        engine.load_checkpoint(Path(folder) / "out")
        return digest(engine), engine.global_steps


@pytest.mark.parametrize(
    ("made", "loaded"),
    [
        ((2, {"param": "nvme", "optimizer": "cpu"}), (1, {"stage": 1})),
        ((2, {"stage": 2, "optimizer": "nvme"}), (1, {"optimizer": "nvme", "param": "cpu"})),
        ((1, ON_NVME), (2, {"stage": 2})), ((1, {"stage": 1, "optimizer": "nvme"}), (2, {"param": "cpu"})),
    ],
)  # fmt: skip
def test_such_a_checkpoint_loads_with_another_number_of_ranks_and_at_another_stage(
    made: tuple[int, dict[str, Any]], loaded: tuple[int, dict[str, Any]], rank_pools: Any, tmp_path: Path
) -> None:
    """Masters and moments are those of the run that was killed."""
    (before, given), (after, other) = ((ranks, {**row, "dtype": "bf16"}) for ranks, row in (made, loaded))
    (expected,) = {*rank_pools[before].run(left_by, str(tmp_path), given)}
    make_checkpoint([tmp_path / "left"], tmp_path / "out")
    assert {*rank_pools[after].run(loaded_by, str(tmp_path), other)} == {(expected, KILLED_AT)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": "cpu"}, "optimizer_tier"), ({"dtype": "fp32"}, "compute_dtype"), ({"stage": 2}, "stage"),
        ({"dtype": "bf16", "zero": {"sub_group_size": 64}}, "sub_group_numel"),
    ],
)  # fmt: skip
def test_another_configuration_is_refused_by_name_and_nothing_is_lost(
    left: Path, change: dict[str, Any], words: str
) -> None:
    row = config(left, "left", **{**ON_NVME, "dtype": "bf16", **change})
    if change.get("stage") == 2:
        row["zero_optimization"].pop("offload_param", None)
    with pytest.raises(CheckpointError, match=f"(?s){words}.*from-swap"):
        started(row)
    with started(config(left, "left", **ON_NVME, dtype="bf16")) as engine:
        engine.resume()
        assert engine.global_steps == KILLED_AT


def test_another_model_is_refused(left: Path) -> None:
    row = config(left, "left", **ON_NVME, dtype="bf16")
    with pytest.raises(CheckpointError, match="another plan"):
        infinity.initialize(model=SmallModel(dim=32), config=row)


def two_of_one(rank: int, world: int, folder: str) -> str:
    """Start two ranks where one has left its files."""
    join(world)
    try:
        started(config(Path(folder), "left", **ON_NVME, dtype="bf16"))
    except CheckpointError as error:
        return str(error)
    return "started"


def test_another_number_of_ranks_is_sent_to_from_swap(left: Path, rank_pools: Any) -> None:
    for said in rank_pools[2].run(two_of_one, str(left)):
        assert "with 1 ranks; now there are 2" in said and "from-swap" in said


def test_a_file_that_somebody_has_is_never_passed_over(left: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tier, "_LOCK_SECONDS", 0.3)
    row = config(left, "left", **ON_NVME, dtype="bf16")
    with started(row) as engine:
        with pytest.raises(TransferError, match="a process still has it"):
            started(row)
        engine.resume()


def test_what_belongs_to_a_run_is_not_cleaned_up(left: Path) -> None:
    (swap,) = (left / "left").glob("*.bin")
    row = config(left, "left", every_step="off", **ON_NVME)
    with started(row) as engine:
        trained(engine, 1)
        assert swap.exists()
    for suffix in tier.RECORD_SUFFIXES:
        swap.with_suffix(suffix).unlink()
    with started(row):
        pass
    assert not any((left / "left").iterdir())


def test_what_another_drive_has_of_a_run_is_not_cleaned_up_either(tmp_path: Path) -> None:
    def on(*drives: str, every_step: str = "process") -> dict[str, Any]:
        row = config(tmp_path, every_step=every_step, **ON_NVME, dtype="bf16")
        for key in ("offload_param", "offload_optimizer"):
            row["zero_optimization"][key]["nvme_path"] = [str(tmp_path / drive) for drive in drives]
        return {**row, "aio": {"drive_weights": [1.0] * len(drives)}}

    with pytest.raises(RuntimeError, match="of the program"), started(on("one", "two")) as engine:
        trained(engine, KILLED_AT)
        engine.synchronize()
        expected = digest(engine)
        raise RuntimeError("of the program")
    (_, nothing), (_, second) = left_runs([tmp_path / "one", tmp_path / "two"]), left_runs([tmp_path / "two"])
    assert not nothing and ["no run in these folders tells of" in str(each) for each in second] == [True]
    for other in (on("two", "one", every_step="off"), on("two", every_step="off")):
        with started(other) as engine:
            trained(engine, 1)
    with started(on("one", "two")) as engine:
        engine.resume()
        assert (engine.global_steps, digest(engine)) == (KILLED_AT, expected)
    assert not [*(tmp_path / "one").iterdir(), *(tmp_path / "two").iterdir()]


@pytest.fixture
def two(left: Path) -> tuple[Path, Path]:
    """The folder of `left`, and the swap file of its run: in "left" lies another run, too, killed two steps later."""
    (older,) = (left / "left").glob("*.bin")
    with started(config(left, **ON_NVME, dtype="bf16")) as engine:
        trained(engine, KILLED_AT + 2)
        killed(engine, left, "later")
    for each in (left / "later").iterdir():
        each.rename(left / "left" / each.name)
    return left, older


@pytest.mark.parametrize("behind", [False, True])
def test_a_run_that_a_checkpoint_of_this_one_has_overtaken_goes_by_itself(
    two: tuple[Path, Path], behind: bool
) -> None:
    folder, older = two
    beside = [older.with_suffix(suffix) for suffix in (tier.RUN_SUFFIX, *tier.RECORD_SUFFIXES)]
    with started(config(folder, "left", **ON_NVME, dtype="bf16")) as engine:
        engine.resume()
        trained(engine, KILLED_AT + 4)
        engine.save_checkpoint(folder / "elsewhere")
        trained(engine, KILLED_AT + 6)
        engine.synchronize()
        assert older.exists() and all(each.exists() for each in beside), "no checkpoint of checkpoint.path is newer"
        engine.save_checkpoint(folder / "checkpoints", asynchronous=behind)
        engine.finish_saving()
        assert older.exists()
        trained(engine, KILLED_AT + 7)
        engine.synchronize()
        assert not older.exists() and not any(each.exists() for each in beside)
        assert len([*(folder / "left").glob("*.bin")]) == 1
    assert not any((folder / "left").iterdir())


def test_a_checkpoint_that_is_loaded_overtakes_once_the_next_steps_are_recorded(two: tuple[Path, Path]) -> None:
    folder, older = two
    with started(config(folder, "elsewhere", every_step="off", **ON_NVME, dtype="bf16")) as engine:
        trained(engine, KILLED_AT + 3)
        engine.save_checkpoint(folder / "checkpoints")
    with started(config(folder, "left", **ON_NVME, dtype="bf16")) as engine:
        path, _ = engine.resume()
        assert path == str(folder / "checkpoints" / f"global_step{KILLED_AT + 3}")
        engine.synchronize()
        assert older.exists(), "of the ranks some may have no record of their own"
        trained(engine, KILLED_AT + 4)
        engine.synchronize()
        assert not older.exists()


def test_what_a_process_has_taken_over_is_not_removed_as_overtaken(two: tuple[Path, Path]) -> None:
    folder, older = two
    (run,) = (each for each in killed_runs(folder / "left") if each.path == older)
    with started(config(folder, "left", **ON_NVME, dtype="bf16")) as engine, run.opened():
        engine.resume()
        engine.save_checkpoint(folder / "checkpoints")
        trained(engine, KILLED_AT + 4)
        engine.synchronize()
        assert older.exists() and not remove_run(run.run.files)
    assert remove_run(run.run.files) and not any((folder / "left").iterdir())


def begun(rank: int, world: int, folder: str) -> tuple[bool, bool]:
    """Kill two ranks after their first step, with rank 1's record not yet written; begin anew."""
    join(world)
    at, given = Path(folder), {**ON_NVME, "dtype": "bf16"}
    with started(config(at, **given)) as engine:
        trained(engine, 1, rank)
        engine.synchronize()
        torch.distributed.barrier()
        if rank == 0:
            shutil.copytree(at / "nvme", at / "left")
            (behind,) = (each for each in killed_runs(at / "left") if each.run.rank == 1)
            behind.path.with_suffix(tier.RECORD_SUFFIXES[1]).unlink()
        torch.distributed.barrier()
    old = next((at / "left").glob("*rank0.bin"))
    torch.distributed.barrier()
    with started(config(at, "left", **given)) as engine:
        assert engine.resume()[0] is None
        there = []
        for until in (1, 2):
            trained(engine, until, rank)
            engine.synchronize()
            torch.distributed.barrier()
            there.append(old.exists())
            torch.distributed.barrier()
    return there[0], there[1]


def test_what_ranks_killed_between_their_first_records_left_goes_once_all_have_one(
    rank_pools: Any, tmp_path: Path
) -> None:
    assert rank_pools[2].run(begun, str(tmp_path)) == [(True, False)] * 2


def test_what_stays_is_named_and_listed_and_removed_by_a_command(
    two: tuple[Path, Path], capsys: Any, caplog: Any
) -> None:
    folder, older = two
    swap = folder / "left"
    size = sum(each.stat().st_size for each in swap.glob("*.bin"))
    row = config(folder, "left", every_step="off", **ON_NVME) | {"log_level": "info"}
    with caplog.at_level("INFO", "infinity"), started(row) as engine:
        said = f"has swap files of killed runs (2, {format_bytes(size)}), which this run does not use"
        assert said in caplog.text and f"`infinity ckpt killed {swap}`" in caplog.text
        engine.save_checkpoint(folder / "checkpoints", tag="begun")
        assert main(["ckpt", "killed", str(swap)]) == 0
    listed = capsys.readouterr().out
    (run,) = (each.run.run for each in killed_runs(swap) if each.path == older)
    (row,) = (line for line in listed.splitlines() if line.startswith(run))
    assert re.split(" {2,}", row.rstrip()) == [
        run, str(folder / "checkpoints"), "1 of 1", str(KILLED_AT), format_bytes(older.stat().st_size), "step 0",
    ]  # fmt: skip
    assert f" {KILLED_AT + 2} " in listed and "DAMAGED" not in listed
    told = older.with_suffix(tier.RUN_SUFFIX).read_bytes()
    older.with_suffix(tier.RUN_SUFFIX).write_bytes(told[:-1])
    assert main(["ckpt", "killed", str(swap)]) == 0
    listed = capsys.readouterr().out
    assert f"DAMAGED {older.with_suffix(tier.RUN_SUFFIX)}" in listed and f" {KILLED_AT + 2} " in listed
    older.with_suffix(tier.RUN_SUFFIX).write_bytes(told)
    assert main(["ckpt", "killed", str(swap), "--remove", run]) == 0
    assert not older.exists() and len([*swap.glob("*.bin")]) == 1
    assert main(["ckpt", "killed", str(swap), "--remove", run]) == 2
    with started(config(folder, "left", **ON_NVME, dtype="bf16")) as engine:
        capsys.readouterr()
        assert main(["ckpt", "killed", str(swap)]) == 0
        assert "no killed run has left swap files" in capsys.readouterr().out
        engine.resume()


def test_damage_is_named_when_it_is_read(left: Path) -> None:
    (swap,) = (left / "left").glob("*.bin")
    (run,) = killed_runs(left / "left")
    record = run.records[max(run.records)]
    each, (slot, _, _) = next(
        (each, place) for each, place in zip(run.run.partitions, record.places, strict=True) if place[1]
    )
    extent = each.spare if slot else each.extent
    assert extent is not None
    with open(swap, "r+b") as file:
        file.seek(extent.offset)
        file.write(bytes(4096))
    with pytest.raises(TransferError, match=swap.name):
        make_checkpoint([left / "left"], left / "out")
    assert not (left / "out" / f"global_step{KILLED_AT}").exists()


@pytest.mark.parametrize(("key", "value", "words"), [
    ("path", None, r"checkpoint\.path is not set"), ("checksum", False, "known to be whole by its checksums"),
    ("nvme", None, "nothing has an nvme_path"), ("sampled", "power", "may lose any block"),
])  # fmt: skip
def test_what_records_need_is_said(key: str, value: Any, words: str, tmp_path: Path) -> None:
    row = config(tmp_path, **ON_NVME)
    match key:
        case "path":
            del row["checkpoint"]["path"]
        case "checksum":
            row["aio"] = {"checksum": value}
        case "nvme":
            row["zero_optimization"] = {"stage": 3}
        case "sampled":
            row["checkpoint"]["every_step"], row["aio"] = value, {"checksum": "sampled"}
    with pytest.raises(ConfigError, match=words):
        started(row)


@pytest.mark.parametrize("every_step", ["process", "power"])
def test_what_is_cut_off_anywhere_is_a_state_behind_one_of_the_last_two_steps(every_step: str, tmp_path: Path) -> None:
    power = every_step == "power"
    log = record_cuts.logged(tmp_path, every_step=every_step, checksum=True, params="cpu" if power else "nvme")
    assert len(log.states) == record_cuts.STEPS
    outcomes = [
        *record_cuts.try_cuts(log, 200, 3, power=power), *record_cuts.try_mutations(log, 60, 4),
        *record_cuts.try_records(log, every=501),
    ]  # fmt: skip
    assert [each for each in outcomes if each.startswith("wrong")] == []
    assert {"same", "next", "found", "older"} <= {*outcomes}


def test_a_process_that_is_killed_goes_on() -> None:
    """A real kill; more of them, in more settings, in `python -m tests.record_kills`."""
    setting = next(each for each in record_kills.SETTINGS if each.name == "parameters in memory")
    outcome = record_kills.run(setting, 1, 5)
    assert (outcome.wrong, outcome.kills) == ("", 1)
