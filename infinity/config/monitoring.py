"""The sections about monitors, which write a run's metrics to files or services."""

from __future__ import annotations

from infinity.config.section import Section
from infinity.config.values import Flag, Place, Text


class _Folder(Section):
    enabled: Flag = False
    """Turn the monitor on."""
    output_path: Place = ""
    """Folder of all runs; empty: the working folder."""
    job_name: Text = "DeepSpeedJobName"
    """Folder of this run inside output_path."""


class TensorBoard(_Folder):
    """Metrics of each optimizer step as TensorBoard events; needs the package tensorboard (docs/monitoring.md)."""


class CsvMonitor(_Folder):
    """Metrics of each optimizer step, appended to one CSV file for each metric (docs/monitoring.md)."""


class Wandb(Section):
    """Metrics of each optimizer step, sent to Weights & Biases; needs the package wandb (docs/monitoring.md)."""

    enabled: Flag = False
    """Turn the monitor on."""
    group: Text | None = None
    """Group that this run belongs to."""
    team: Text | None = None
    """Team or user that owns the project."""
    project: Text = "deepspeed"
    """Project that the run belongs to."""
