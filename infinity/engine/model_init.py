"""Building a model straight into its tiers: `infinity.Init`, and what it and `infinity.load_hf` fill."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.config import STRICT, Config, Conventions, ResolveContext, ResolvedConfig, load_config, resolve
from infinity.distributed.groups import Patience, ProcessGroups, Ranks, all_ranks_after, detect
from infinity.errors import ConfigError
from infinity.log import configure_logging
from infinity.memory.drives import check_drives
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import mappings_of_their_own, trim
from infinity.plan.types import Topology
from infinity.zero import parameter
from infinity.zero.access import modify_deferred
from infinity.zero.deferred_init import DeferredInit
from infinity.zero.parameter import publish

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config | None


class Init:
    """`with infinity.Init(config=config):` builds a model of any size straight into its tiers.

    Constructors and initialisers run unchanged, so the values equal those of an ordinary construction. Parameters
    beyond a window of 256 MB go to the NVMe folder of the configuration; without one they stay in CPU memory. One that
    is larger than the window (the packed experts of a mixture) is filled there in parts. Inside another block the outer
    one has the parameters.

    module: an existing model whose parameters are taken in at once, in the constructor; every rank gets rank 0's
        values. Collective.
    config, config_dict_or_path: the configuration, as for `initialize`; values that are still "auto" are fine.
    enabled: False for a block that does nothing.
    dtype: of floating parameters (fp32, bf16, fp16); default: what the constructor makes, see `Conventions`. Buffers
        keep theirs.
    conventions: how the configuration is read, as for `initialize`.
    others: further arguments of DeepSpeed's. Those that only say where and how values are stored are accepted, for
        the configuration decides that; those that would change values or ranks are refused.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        config: ConfigSource = None,
        config_dict_or_path: ConfigSource = None,
        enabled: bool = True,
        *,
        dtype: torch.dtype | None = None,
        conventions: Conventions = STRICT,
        **others: Any,
    ) -> None:
        check_init_arguments(others, dtype)
        self._enabled = enabled
        self._source = config if config is not None else config_dict_or_path
        self._dtype = dtype
        self._conventions = conventions
        self._on_drive = str(others.get("remote_device")).endswith("nvme")
        self._exit = ExitStack()
        if module is not None and enabled:
            self._take_in(module)

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        init, dtype = self._open()
        self._exit.enter_context(mappings_of_their_own())

        def adopt(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None:
                self._adopt(init, param, f"{type(module).__name__}.{name}", dtype)

        hook = register_module_parameter_registration_hook(adopt)
        self._exit.callback(hook.remove)
        self._exit.push(lambda kind, *_: init.seal() if kind is None else init.close())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exit.__exit__(*exception)
        trim()

    def _open(self) -> tuple[DeferredInit, torch.dtype | None]:
        """Return what holds the values, and the dtype of its parameters; None for their own."""
        config, resolved, ranks = _read(self._source, self._conventions)
        if self._on_drive and resolved.nvme_path is None:
            raise ConfigError(
                'Init(remote_device="nvme"): the configuration names no drive; set zero_optimization.offload_param to '
                '{"device": "nvme", "nvme_path": ...}'
            )
        dtype = self._dtype
        if dtype is None and self._source is not None and self._conventions.init_dtype == "trained":
            # None while the configuration leaves it to the program.
            is_open = resolved.compute_dtype == "fp32" and config.provenance.autos & _PRECISIONS
            dtype = None if is_open else _DTYPES[resolved.compute_dtype]
        return _init(resolved, ranks), dtype

    def _adopt(self, init: DeferredInit, param: nn.Parameter, name: str, dtype: torch.dtype | None) -> None:
        other = dtype is not None and param.dtype is not dtype and param.is_floating_point()
        # One without values here has nothing to cast.
        if other and not (param.is_meta or isinstance(param, nn.UninitializedParameter) or parameter.is_kept(param)):
            param.data = param.data.to(dtype)
        init.attach(param, name)
        if self._conventions.parameter_attributes:
            publish(param, parts=init.groups.data.size)

    def _take_in(self, module: nn.Module) -> None:
        init, dtype = self._open()
        with mappings_of_their_own(), init.groups.telling():
            try:
                for name, param in module.named_parameters():
                    self._adopt(init, param, name, dtype)
                init.seal()
                for param in module.parameters() if init.groups.world.size > 1 else ():
                    if init.holds(param):
                        with modify_deferred(init, [param], 0):
                            pass
            except BaseException:
                init.close()
                raise
        trim()


# Arguments of DeepSpeed's `zero.Init` that are accepted with any value: they say where values are kept, how fast they
# are moved, or describe ranks that the process group knows.
_HARMLESS = {"remote_device", "pin_memory", "mem_efficient_linear", "zero_param_parallel_group"}
# Those that are accepted with a value that says nothing, and the reason against others.
_QUANTIZED = "weights are never quantized on their way between ranks; leave it out"
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "param_swapper": ("the drives that offload_param names are read and written by infinity itself", (None,)),
    "zero_quantized_weights": (_QUANTIZED, (None, False)),
    "zero_quantized_nontrainable_weights": (_QUANTIZED, (None, False)),
}
_GROUPS = ("data_parallel_group", "sequence_data_parallel_group")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PRECISIONS = {"bf16.enabled", "fp16.enabled"}


def check_init_arguments(others: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """Raise ConfigError for arguments of DeepSpeed's `zero.Init` that would change what is trained, or are unknown."""
    if dtype is not None and dtype not in _DTYPES.values():
        raise ConfigError(f"Init(dtype={dtype}): parameters are made in torch.float32, torch.bfloat16 or torch.float16")
    for name, value in others.items():
        if name in _HARMLESS:
            continue
        if name in _GROUPS:
            if value is not None and dist.get_world_size(value) != dist.get_world_size():
                raise ConfigError(
                    f"Init({name}=...) names a group of {dist.get_world_size(value)} of {dist.get_world_size()} ranks: "
                    "parameters are partitioned among all ranks; leave it out"
                )
        elif name == "mpu":
            size = getattr(value, "get_model_parallel_world_size", lambda: 1)()
            if size > 1:
                raise ConfigError(f"Init(mpu=...) has {size} ranks of model parallelism, which is not supported here")
        elif name in _REFUSED:
            why, says_nothing = _REFUSED[name]
            if value not in says_nothing:
                raise ConfigError(f"Init({name}=...): {why}")
        else:
            raise ConfigError(
                f"Init({name}=...) is not supported: build the model inside `with infinity.Init(config=...):`"
            )


def open_init(source: ConfigSource, conventions: Conventions = STRICT) -> DeferredInit:
    """Return what will hold a model's values, on the configuration's drives, with the process groups."""
    _, resolved, ranks = _read(source, conventions)
    return _init(resolved, ranks)


def all_ranks_read() -> AbstractContextManager[Patience]:
    """Return a block in which each rank reads its configuration: where one refuses it, all raise. Collective."""
    return all_ranks_after(
        "reading its configuration", "Mend what it says, and give every rank the same configuration"
    )


def _read(source: ConfigSource, conventions: Conventions) -> tuple[Config, ResolvedConfig, Ranks]:
    """Read the configuration, as far as it is known before there is a model. Collective."""
    ranks = detect()
    with all_ranks_read() as patience:
        config = load_config(source, conventions=conventions)
        configure_logging(ranks.rank, config.log_level)
        context = ResolveContext(world_size=ranks.world_size, local_size=ranks.local_size, detected=True)
        resolved = resolve(_for_building(config), context)
        patience.last(resolved.sections.watchdog_seconds)
    return config, resolved, ranks


def _init(resolved: ResolvedConfig, ranks: Ranks) -> DeferredInit:
    groups = groups_of(resolved, ranks, Device.detect(ranks.local_rank))
    with ExitStack() as undo, groups.telling():
        undo.callback(groups.close)
        check_drives(resolved)
        undo.pop_all()
    return DeferredInit(resolved.nvme_path, groups=groups, timeout_seconds=resolved.sections.watchdog_seconds)


def _for_building(config: Config) -> Config:
    """Return `config` without the settings that a program may fill between building its model and `initialize`."""
    left_out: dict[str, Any] = {"optimizer": None, "scheduler": None}
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if config.provenance.autos.intersection(batch):
        left_out |= dict.fromkeys(batch)
    return config.model_copy(update=left_out)


def groups_of(config: ResolvedConfig, ranks: Ranks, device: Device) -> ProcessGroups:
    """Open the process groups of the configuration's axes, with its time limit. Collective."""
    return ProcessGroups(
        ranks, Topology.of(config), backends=device.backends, timeout_seconds=config.sections.watchdog_seconds,
        cross_memory_attach=config.sections.cross_memory_attach,
    )  # fmt: skip
