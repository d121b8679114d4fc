"""Building a model straight into its tiers: `infinity.Init`, and the spool that it and `infinity.load_hf` fill."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.config import ResolveContext, ResolvedConfig, load_config, resolve
from infinity.distributed.process_groups import ProcessGroups, Ranks, detect
from infinity.errors import ConfigError
from infinity.log import configure_logging
from infinity.memory.queue_options import check_drives
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import mappings_of_their_own, trim
from infinity.zero.deferred_init import DeferredInit

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | None


class Init:
    """`with infinity.Init(config=config):` builds a model of any size straight into its tiers.

    Constructors and initialisers run unchanged, so the values equal those of an ordinary construction. Parameters
    beyond a window of 256 MB go to the NVMe folder of the configuration; without one they stay in CPU memory.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        config: ConfigSource = None,
        config_dict_or_path: ConfigSource = None,
        enabled: bool = True,
        **unknown: Any,
    ) -> None:
        if module is not None or unknown:
            what = "module" if module is not None else next(iter(unknown))
            raise ConfigError(
                f"Init({what}=...) is not supported: build the model inside `with infinity.Init(config=...):`"
            )
        self._enabled = enabled
        self._source = config if config is not None else config_dict_or_path
        self._exit = ExitStack()

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        spool = open_spool(self._source)
        self._exit.enter_context(mappings_of_their_own())
        hook = register_module_parameter_registration_hook(
            lambda module, name, param: (
                spool.attach(param, f"{type(module).__name__}.{name}") if param is not None else None
            )
        )
        self._exit.callback(hook.remove)
        self._exit.push(lambda kind, *_: spool.seal() if kind is None else spool.close())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exit.__exit__(*exception)
        trim()


def open_spool(source: ConfigSource) -> DeferredInit:
    """Return a spool for a model that will be built, on the configuration's drives, with the process groups."""
    config = load_config(source)
    ranks = detect()
    configure_logging(ranks.rank, config.log_level)
    resolved = resolve(config, ResolveContext(world_size=ranks.world_size, detected=True))
    groups = groups_of(resolved, ranks, Device.detect(ranks.local_rank))
    with ExitStack() as undo, groups.telling():
        undo.callback(groups.close)
        check_drives(resolved)
        undo.pop_all()
    return DeferredInit(resolved.nvme_path, groups=groups, timeout_seconds=config.watchdog_seconds)


def groups_of(config: ResolvedConfig, ranks: Ranks, device: Device) -> ProcessGroups:
    """Open the process groups, with the configuration's time limit."""
    return ProcessGroups(
        ranks, backends=device.backends, timeout_seconds=config.config.watchdog_seconds,
        cross_memory_attach=config.config.cross_memory_attach,
    )  # fmt: skip
