"""Monitors get the figures of every step under DeepSpeed's names, against samples, and never stop the training."""

from __future__ import annotations

import csv
import importlib
import json
import logging
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import infinity
from infinity.errors import ConfigError
from infinity.observability import monitors
from tests.engine.test_hygiene import resources
from tests.engine.test_progress import Keep
from tests.support.models import tiny_llama, token_batch

# A stand-in that is installed like the real one and notes what it is asked for.
WANDB = """
import json, pathlib
NOTES = pathlib.Path(__file__).parent / "notes.jsonl"
def note(*what):
    with NOTES.open("a") as file:
        file.write(json.dumps(what) + "\\n")
class Run:
    def log(self, figures, step):
        note("log", figures, step)
    def finish(self):
        note("finish")
def init(**options):
    note("init", options)
    return Run()
"""


class Writer:
    """Stands in for torch's SummaryWriter, which needs a package that is not always installed."""

    def __init__(self, log_dir: str) -> None:
        self.events: list[tuple[str, float, int, float]] = []
        self.folder = log_dir
        WRITERS.append(self)

    def add_scalar(self, tag: str, value: float, global_step: int, walltime: float | None = None) -> None:
        self.events.append((tag, value, global_step, time.time() if walltime is None else walltime))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


WRITERS: list[Writer] = []


def train(steps: int, start: int = 0, dtype: str = "fp32", **options: Any) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "gradient_accumulation_steps": 2,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, **options,
    }  # fmt: skip
    if dtype != "fp32":
        config[dtype] = {"enabled": True, "initial_scale_power": 8}
    losses = []
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        engine.global_samples = start
        for step in range(steps):
            losses.append(0.0)
            for micro in range(2):
                loss = engine(**token_batch(0, 2 * step + micro))
                engine.backward(loss)
                engine.step()
                losses[-1] += loss.item() / 2
    return losses


def table(path: Path) -> tuple[list[str], list[tuple[int, float]]]:
    header, *rows = csv.reader(path.read_text().splitlines())
    return header, [(int(samples), float(value)) for samples, value in rows]


def section(folder: Path) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(folder), "job_name": "run"}


def test_a_csv_file_a_tag_against_samples(tmp_path: Path) -> None:
    losses = train(13, dtype="fp16", csv_monitor=section(tmp_path))
    names = {path.stem for path in (tmp_path / "run").iterdir()}
    assert {f"Train_Samples_{name}" for name in ("train_loss", "lr", "loss_scale")} <= names, "DeepSpeed's"
    assert {
        "Train_Samples_grad_norm", "Train_Samples_tokens_per_second", "Memory_cpu_bytes", "Train_Samples_step_seconds",
    } <= names  # fmt: skip
    header, rows = table(tmp_path / "run" / "Train_Samples_train_loss.csv")
    assert header == ["step", "train_loss"]
    assert [samples for samples, _ in rows] == [4 * step for step in range(1, 14)]
    assert [value for _, value in rows] == pytest.approx(losses, rel=1e-6)
    assert table(tmp_path / "run" / "Train_Samples_loss_scale.csv")[1][-1] == (52, 256.0)
    rates = [value for _, value in table(tmp_path / "run" / "Train_Samples_lr.csv")[1]]
    assert rates == sorted(rates) and rates[0] < rates[4] == 1e-3


def test_a_second_run_appends_below_a_torn_row(tmp_path: Path) -> None:
    train(2, csv_monitor=section(tmp_path))
    path = tmp_path / "run" / "Train_Samples_lr.csv"
    path.write_bytes(path.read_bytes() + b"12,0.0")
    train(2, start=8, csv_monitor=section(tmp_path))
    header, rows = table(path)
    assert header == ["step", "lr"] and [samples for samples, _ in rows] == [4, 8, 12, 12, 16]


def test_files_and_descriptors_stay_as_few_as_they_were(tmp_path: Path) -> None:
    found = []
    config = {"train_micro_batch_size_per_gpu": 2, "csv_monitor": section(tmp_path), "steps_per_print": 5}
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        for step in range(30):
            engine.backward(engine(**token_batch(0, step)))
            engine.step()
            if step % 10 == 9:
                found.append((resources()["descriptors"], len([*(tmp_path / "run").iterdir()])))
        assert len(table(tmp_path / "run" / "Train_Samples_lr.csv")[1]) == 30, "written every steps_per_print steps"
    assert len(set(found)) == 1 and found[0][1] <= 20, found


def test_tensorboard_has_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = train(3, tensorboard=section(tmp_path))
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("Train/Samples/train_loss")]
    assert found == [(4 * step, pytest.approx(loss, rel=1e-5)) for step, loss in enumerate(losses, start=1)]
    assert {"Train/Samples/lr", "Train/Samples/grad_norm", "Memory/gpu_bytes"} <= set(events.Tags()["scalars"])


def ends_of_steps(count: int, **options: Any) -> list[tuple[float, float]]:
    """Train; return between which moments each step ended. `steps_per_print` is not reached: only `close` writes."""
    config = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 100, **options}
    moments = []
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        for step in range(count):
            engine.backward(engine(**token_batch(0, step)))
            began = time.time()
            engine.step()
            moments.append((began, time.time()))
            # Longer than a clock of coarse resolution takes to advance.
            time.sleep(0.05)
    return moments


def test_an_event_has_the_time_at_which_its_step_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = Writer  # type: ignore[attr-defined]
    found = importlib.import_module
    monkeypatch.setattr(
        monitors.importlib, "import_module", lambda name: stand_in if name == stand_in.__name__ else found(name)
    )
    monkeypatch.setattr(monitors.importlib.util, "find_spec", lambda name: True)
    WRITERS.clear()
    moments = ends_of_steps(4, tensorboard=section(tmp_path))
    (writer,) = WRITERS
    for tag in ("Train/Samples/train_loss", "Train/Samples/lr", "Memory/cpu_bytes"):
        events = [(samples, at) for name, _, samples, at in writer.events if name == tag]
        assert [samples for samples, _ in events] == [2, 4, 6, 8], "the x axis counts samples"
        for (_, at), (began, ended) in zip(events, moments, strict=True):
            assert began <= at <= ended, (tag, at, moments)


def test_tensorboard_keeps_the_time_of_a_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    moments = ends_of_steps(3, tensorboard=section(tmp_path))
    events = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("Train/Samples/train_loss")
    assert [event.step for event in events] == [2, 4, 6]
    for event, (began, ended) in zip(events, moments, strict=True):
        assert began <= event.wall_time <= ended


def test_wandb_gets_a_row_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "wandb"
    package.mkdir()
    (package / "__init__.py").write_text(WANDB)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    losses = train(2, wandb={"enabled": True, "project": "p", "team": "t"})
    first, *rows, last = [json.loads(line) for line in (package / "notes.jsonl").read_text().splitlines()]
    assert first == ["init", {"project": "p", "group": None, "entity": "t"}] and last == ["finish"]
    assert [(row[2], row[1]["Train/Samples/train_loss"]) for row in rows] == [
        (4, pytest.approx(losses[0])), (8, pytest.approx(losses[1])),
    ]  # fmt: skip


def test_a_row_of_wandb_has_the_time_at_which_its_step_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "wandb"
    package.mkdir()
    (package / "__init__.py").write_text(WANDB)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    moments = ends_of_steps(3, wandb={"enabled": True, "project": "p"})
    _, *rows, _ = [json.loads(line) for line in (package / "notes.jsonl").read_text().splitlines()]
    for row, (began, ended) in zip(rows, moments, strict=True):
        assert began <= row[1]["_timestamp"] <= ended


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(monitors.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"{name}\.enabled is true, but .*pip install 'infinity-engine\[{name}\]'"):
        train(1, **{name: {"enabled": True}})


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="csv_monitor cannot be opened: "):
        train(1, csv_monitor=section(tmp_path / "file"))


def test_a_monitor_that_fails_is_given_up_and_training_goes_on(tmp_path: Path) -> None:
    keep = Keep(logging.WARNING)
    with keep.listening():
        target = tmp_path / "run" / "Train_Samples_lr.csv"
        target.mkdir(parents=True)
        assert len(train(12, csv_monitor=section(tmp_path))) == 12
    (line,) = keep.lines
    assert "csv_monitor: IsADirectoryError" in line and "nothing more is written there" in line


def rows_by_rank(rank: int, world: int, folder: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "csv_monitor": section(Path(folder) / str(rank))}
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        engine.backward(engine(**token_batch(rank, 0)))
        engine.step()


def test_only_rank_0_writes(rank_pools: Any, tmp_path: Path) -> None:
    rank_pools[2].run(rows_by_rank, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert table(tmp_path / "0" / "run" / "Train_Samples_train_loss.csv")[1][0][0] == 4
