"""Monitors by DeepSpeed's keys: figures of each optimizer step to CSV files, TensorBoard or Weights & Biases.

A figure is a tag, a value and the samples trained on so far; rank 0 writes them. Rows are collected and written several
steps at a time, so that nobody waits for a loss on the device at every step, and no file stays open. A monitor that
fails is given up with a warning: training goes on.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.config.monitors import CsvMonitor, TensorBoard, Wandb
from infinity.config.schema import Config
from infinity.errors import ConfigError
from infinity.log import warn_once

# Steps whose rows may wait.
_ROWS_MAX = 100
_ROWS = 10

# Samples trained on so far, and the figures of the step that ended there; at a tensor nobody has looked yet.
Row = tuple[int, Mapping[str, float | Tensor]]


class Monitor(Protocol):
    """Where rows go. Both verbs may raise anything."""

    def write(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Put rows there for good, oldest first."""

    def close(self) -> None:
        """Nothing more comes."""


class Monitors:
    """All that a configuration asks for. `add` a row a step; `close` writes what is left."""

    def __init__(self, config: Config) -> None:
        """ConfigError where one cannot be opened."""
        self._open = {name: _opened(name, make) for name, make in _wanted(config).items()}
        self._rows: list[Row] = []
        self._every = min(config.steps_per_print or _ROWS, _ROWS_MAX)

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, samples: int, figures: Mapping[str, float | Tensor]) -> None:
        """The figures of a step."""
        self._rows.append((samples, figures))
        if len(self._rows) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected."""
        waiting, self._rows = self._rows, []
        if waiting:
            self._each(lambda monitor: monitor.write([(at, _looked_at(figures)) for at, figures in waiting]))

    def close(self) -> None:
        """Write the rest, and end every monitor."""
        self.flush()
        self._each(lambda monitor: monitor.close())
        self._open.clear()

    def _each(self, use: Callable[[Monitor], None]) -> None:
        for name, monitor in [*self._open.items()]:
            try:
                use(monitor)
            except Exception as error:
                del self._open[name]
                warn_once(
                    f"{name}-failed", f"{name}: {type(error).__name__}: {error}; nothing more is written there"
                )


def check_installed(config: Config) -> None:
    """ConfigError where a monitor needs a package that is not there: on every rank, before anything is built."""
    for name, extra in (("tensorboard", "infinity-engine[tensorboard]"), ("wandb", "infinity-engine[wandb]")):
        if getattr(config, name).enabled and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name}.enabled is true, but the package {name} is not installed: run `pip install '{extra}'`, or "
                "use the section csv_monitor, which needs nothing"
            )


def mean_loss(losses: Sequence[Tensor]) -> Tensor:
    """Of one step's micro-batches, each of one element; stays on its device."""
    return torch.stack([loss.reshape(()).float() for loss in losses]).mean()


def _looked_at(figures: Mapping[str, float | Tensor]) -> dict[str, float]:
    return {tag: float(value) for tag, value in figures.items()}


class _Csv:
    """A file a tag, as DeepSpeed names them: Train/Samples/lr -> Train_Samples_lr.csv, columns step and lr."""

    def __init__(self, section: CsvMonitor) -> None:
        self._folder = _folder(section)

    def write(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        by_tag: dict[str, list[tuple[int, float]]] = {}
        for samples, figures in rows:
            for tag, value in figures.items():
                by_tag.setdefault(tag, []).append((samples, value))
        for tag, found in by_tag.items():
            self._append(self._folder / f"{tag.replace('/', '_').replace(' ', '_')}.csv", tag.rpartition("/")[2], found)

    def close(self) -> None:
        pass

    @staticmethod
    def _append(path: Path, name: str, rows: Sequence[tuple[int, float]]) -> None:
        text = io.StringIO()
        with path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if not end:
                csv.writer(text).writerow(("step", name))
            else:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    # A run that was killed in the middle of a row: the next one begins below it.
                    text.write("\r\n")
            csv.writer(text).writerows(rows)
            file.write(text.getvalue().encode())


class _TensorBoard:
    """Events through torch's own writer."""

    def __init__(self, section: TensorBoard) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(log_dir=str(_folder(section)))

    def write(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for samples, figures in rows:
            for tag, value in figures.items():
                self._writer.add_scalar(tag, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """One row a call: the x axis is the samples."""

    def __init__(self, section: Wandb) -> None:
        module = importlib.import_module("wandb")
        self._run: Any = module.init(project=section.project, group=section.group, entity=section.team)

    def write(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for samples, figures in rows:
            self._run.log(dict(figures), step=samples)

    def close(self) -> None:
        self._run.finish()


def _wanted(config: Config) -> dict[str, Callable[[], Monitor]]:
    made: dict[str, Callable[[], Monitor]] = {}
    if config.csv_monitor.enabled:
        made["csv_monitor"] = lambda: _Csv(config.csv_monitor)
    if config.tensorboard.enabled:
        made["tensorboard"] = lambda: _TensorBoard(config.tensorboard)
    if config.wandb.enabled:
        made["wandb"] = lambda: _Wandb(config.wandb)
    return made


def _opened(name: str, make: Callable[[], Monitor]) -> Monitor:
    try:
        return make()
    except Exception as error:
        raise ConfigError(f"{name} cannot be opened: {type(error).__name__}: {error}") from error


def _folder(section: CsvMonitor | TensorBoard) -> Path:
    folder = Path(section.output_path) / section.job_name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
