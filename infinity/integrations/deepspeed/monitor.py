"""`deepspeed.monitor`: figures of a program's own, written where an engine of the same configuration writes its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from infinity.config.schema import Config
from infinity.distributed.groups import detect
from infinity.observability.monitors import Monitors, check_installed


class MonitorMaster:
    """All monitors of a configuration; rank 0 writes."""

    def __init__(self, monitor_config: Config) -> None:
        """monitor_config: `DeepSpeedConfig(...).monitor_config`."""
        check_installed(monitor_config)
        sections = (monitor_config.tensorboard, monitor_config.wandb, monitor_config.csv_monitor)
        self.enabled = any(section.enabled for section in sections)
        self._monitors = Monitors(monitor_config) if self.enabled and detect().rank == 0 else None

    def write_events(self, event_list: Iterable[tuple[str, Any, int]], flush: bool = True) -> None:
        """Write values, each with its tag and its position on the x axis; an engine's position is samples."""
        if self._monitors is not None:
            for tag, value, position in event_list:
                self._monitors.add(position, {tag: value})
            if flush:
                self._monitors.flush()


class _One(MonitorMaster):
    """One monitor; it has the keys of its section as attributes."""

    section: ClassVar[str]

    def __init__(self, config: Any) -> None:
        """config: the section of `DeepSpeedConfig(...).monitor_config`."""
        super().__init__(Config.model_validate({self.section: config.model_dump()}))
        vars(self).update(config.model_dump())


class TensorBoardMonitor(_One):
    """Events of TensorBoard."""

    section = "tensorboard"


class WandbMonitor(_One):
    """Weights & Biases."""

    section = "wandb"


class csvMonitor(_One):
    """One CSV file for each tag."""

    section = "csv_monitor"
