"""The sections about monitors: where figures of a run are written."""

from __future__ import annotations

from typing import Annotated

from infinity.config.section import HONOURED, Section
from infinity.config.values import Flag, Place, Text


class _Folder(Section):
    enabled: Annotated[Flag, HONOURED] = False
    """Write it."""
    output_path: Annotated[Place, HONOURED] = ""
    """Folder of the runs; empty is the working folder."""
    job_name: Annotated[Text, HONOURED] = "DeepSpeedJobName"
    """Folder of this run, in output_path."""


class TensorBoard(_Folder):
    """Figures of each optimizer step as TensorBoard events; needs the package tensorboard (docs/monitoring.md)."""


class CsvMonitor(_Folder):
    """Figures of each optimizer step in CSV files, one for each kind; rows are appended (docs/monitoring.md)."""


class Wandb(Section):
    """Figures of each optimizer step to Weights & Biases; needs the package wandb (docs/monitoring.md)."""

    enabled: Annotated[Flag, HONOURED] = False
    """Send it."""
    group: Annotated[Text | None, HONOURED] = None
    """Group of runs that this one belongs to."""
    team: Annotated[Text | None, HONOURED] = None
    """Team, or user, that the project belongs to."""
    project: Annotated[Text, HONOURED] = "deepspeed"
    """Project."""
