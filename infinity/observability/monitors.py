"""Monitors by DeepSpeed's keys: figures of each optimizer step to CSV files, TensorBoard or Weights & Biases.

Each optimizer step gives one row of figures, each under a tag; rank 0 writes them. A row has two positions. The x axis
is the number of samples that all ranks have trained on so far (DeepSpeed's axis, hence the tags `Train/Samples/...`),
not the number of steps. The wall time is the moment at which the step ended. Rows are written several steps at a time,
so that the training thread does not wait for a loss on the device at every step, and no file stays open; neither
position depends on when a row is written. A monitor that fails is given up with a warning: training goes on.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from infinity.config.schema import Config, CsvMonitor, TensorBoard, Wandb
from infinity.errors import ConfigError
from infinity.log import warn_once

# Most rows that wait to be written, and the default.
_ROWS_MAX = 100
_ROWS = 10


class Row(NamedTuple):
    """What one optimizer step reports."""

    # Samples that all ranks have trained on by the end of the step: the x axis.
    samples: int
    # When the step ended, in seconds since the epoch.
    wall_time: float
    # By tag.
    figures: Mapping[str, float]


class Monitor(Protocol):
    """A destination of rows. Both methods may raise anything."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows durably, oldest first."""

    def close(self) -> None:
        """End it; no more rows come."""


class Monitors:
    """All monitors of a configuration. `add` a row at each step; `close` writes the rest."""

    def __init__(self, config: Config) -> None:
        """Open them; ConfigError where one cannot be opened."""
        self._open = {name: _opened(name, make) for name, make in _wanted(config).items()}
        # As `Row`, with figures that may still be on the device: reading one would wait for it.
        self._pending: list[tuple[int, float, Mapping[str, float | Tensor]]] = []
        self._every = min(config.steps_per_print or _ROWS, _ROWS_MAX)

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, samples: int, figures: Mapping[str, float | Tensor]) -> None:
        """Add the figures, by tag, of a step that ends now. samples: number that all ranks have trained on by then."""
        self._pending.append((samples, time.time(), figures))
        if len(self._pending) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows."""
        pending, self._pending = self._pending, []
        if pending:
            rows = [Row(samples, at, _read(figures)) for samples, at, figures in pending]
            self._each(lambda monitor: monitor.write(rows))

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
    """Raise ConfigError where a monitor's package is missing: on every rank, before anything is built."""
    for name, extra in (("tensorboard", "infinity-engine[tensorboard]"), ("wandb", "infinity-engine[wandb]")):
        if getattr(config, name).enabled and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name}.enabled is true, but the package {name} is not installed: run `pip install '{extra}'`, or "
                "use the section csv_monitor, which needs nothing"
            )


def mean_loss(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of one step's losses, each of one element, on their device."""
    return torch.stack([loss.reshape(()).float() for loss in losses]).mean()


def _read(figures: Mapping[str, float | Tensor]) -> dict[str, float]:
    return {tag: float(value) for tag, value in figures.items()}


class _Csv:
    """One file for each tag, named as DeepSpeed does: Train/Samples/lr -> Train_Samples_lr.csv, columns step and lr."""

    def __init__(self, section: CsvMonitor) -> None:
        self._folder = _folder(section)

    def write(self, rows: Sequence[Row]) -> None:
        by_tag: dict[str, list[tuple[int, float]]] = {}
        for samples, _, figures in rows:
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
                    # A run was killed in the middle of a row: begin a new line.
                    text.write("\r\n")
            csv.writer(text).writerows(rows)
            file.write(text.getvalue().encode())


class _TensorBoard:
    """Events through torch's own writer: `step` is the samples, `wall_time` the end of the optimizer step."""

    def __init__(self, section: TensorBoard) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(log_dir=str(_folder(section)))

    def write(self, rows: Sequence[Row]) -> None:
        for samples, wall_time, figures in rows:
            for tag, value in figures.items():
                self._writer.add_scalar(tag, value, samples, walltime=wall_time)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """One call for each row: `step` is the samples, the row's time (`_timestamp`) the end of the optimizer step."""

    def __init__(self, section: Wandb) -> None:
        module = importlib.import_module("wandb")
        self._run: Any = module.init(project=section.project, group=section.group, entity=section.team)

    def write(self, rows: Sequence[Row]) -> None:
        for samples, wall_time, figures in rows:
            self._run.log({**figures, "_timestamp": wall_time}, step=samples)

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
