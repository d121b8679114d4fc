"""`deepspeed.utils` and `deepspeed.runtime.utils`: log lines, seeds, loaders, devices, recomputed functions."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy
import psutil
import torch
from torch.utils.checkpoint import checkpoint as recompute

from infinity.distributed.groups import detect
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.log import logger
from infinity.plan.stages import balance

_Function = TypeVar("_Function", bound=Callable[..., Any])


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on the named ranks; without names, or with -1 among them, on every rank."""
    if not ranks or -1 in ranks or detect().rank in ranks:
        logger.log(level, "[Rank %d] %s", detect().rank, message)


def print_json_dist(message: Mapping[str, Any], ranks: Sequence[int] | None = None, path: str | None = None) -> None:
    """Write a mapping as JSON into a file, on the named ranks; without names, or with -1 among them, on every rank."""
    if path is None:
        raise ConfigError("print_json_dist(path=None): name the file to write")
    if not ranks or -1 in ranks or detect().rank in ranks:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**message, "rank": detect().rank}, file)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of infinity's lines by its name, such as "warning". Raises ValueError for an unknown name."""
    levels = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
    name = log_level_str.lower()
    if name not in levels:
        raise ValueError(f"{name} is not one of the log levels {', '.join(levels)}")
    (custom_logger or logger).setLevel(levels[name])


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 what the device and the CPU hold now and held at most, if `force` is true.

    `engine.memory()` shows the engine's bytes by tier and kind.
    """
    if not force or detect().rank != 0:
        return
    device, memory = get_accelerator(), psutil.virtual_memory()
    figures = {"allocated": device.memory_allocated(), "at most": device.max_memory_allocated(),
               "reserved": device.memory_reserved(), "reserved at most": device.max_memory_reserved()}  # fmt: skip
    own = ", ".join(f"{what} {nbytes / 2**30:.2f} GB" for what, nbytes in figures.items())
    logger.info(
        "%s: %s: %s; CPU memory: used %.2f GB, %.1f %%; this process %.2f GB", message, device.current_device_name(),
        own, memory.used / 2**30, memory.percent, psutil.Process().memory_info().rss / 2**30,
    )  # fmt: skip


def instrument_w_nvtx(func: _Function) -> _Function:
    """Return the function as it is: `engine.timeline()` shows what the engine does."""
    return func


class TorchVersion(NamedTuple):
    """The first two numbers of a version of torch."""

    major: int
    minor: int

    @classmethod
    def of(cls, text: str | float) -> TorchVersion:
        """Read "2.11" or "2.11.0+cpu"."""
        major, minor = str(text).split("+")[0].split(".")[:2]
        return cls(int(major), int(minor))


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Return whether torch is at least, and at most, of these versions."""
    own = TorchVersion.of(torch.__version__)
    old_enough = max_version is None or own <= TorchVersion.of(max_version)
    return old_enough and (min_version is None or own >= TorchVersion.of(min_version))


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, on every device."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the folder that a file is to lie in."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """Return a call as text, such as `f(1, name='x')`."""
    named = [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join([*map(repr, args), *named])})"


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return where each of `num_parts` parts of `num_items` items begins, and the end; the first have one item more."""
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Do the same for items with weights: the heaviest part is as light as can be, and the others as equal as that
    allows. No part is empty, unless there are fewer items than parts.
    """
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return [0, *accumulate(balance(weights, num_parts))]


def _mapped(item: Any, chosen: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Return lists, tuples and dictionaries with what is chosen changed; other values as they are."""
    if chosen(item):
        return change(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_mapped(each, chosen, change) for each in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_mapped(each, chosen, change) for each in item)
    if isinstance(item, dict):
        return type(item)({key: _mapped(each, chosen, change) for key, each in item.items()})
    return item


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] = torch.is_tensor
) -> Any:
    """Return lists, tuples and dictionaries with what `criterion_func` accepts moved to a device."""
    return _mapped(item, criterion_func, lambda each: each.to(device))


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return lists, tuples and dictionaries with each tensor copied to `device`, without what it is a view of."""
    return _mapped(item, torch.is_tensor, lambda each: each.detach().to(device, copy=True))


class RepeatingLoader:
    """The batches of a loader, from its beginning again after its last one."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice:
    """`with OnDevice(dtype=torch.bfloat16, device="meta"):` makes parameters there, in that dtype."""

    def __init__(self, dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True):
        self._dtype = dtype
        self._device = device
        self._enabled = enabled
        self._exit = ExitStack()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._exit.enter_context(torch.device(self._device))
            if self._dtype is not None:
                self._exit.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()


# Activation checkpointing, which is torch's; the configuration decides the rest.
_configured = False


def configure(
    mpu_: Any, deepspeed_config: Any = None, partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None, profile: bool | None = None,
) -> None:  # fmt: skip
    """Say which of the arguments the configuration has to ask for; `checkpoint` works without this call."""
    global _configured
    _configured = True
    if checkpoint_in_cpu:
        logger.warning(
            "deepspeed.checkpointing.configure: an engine takes this from its configuration: set "
            "activation_checkpointing.cpu_checkpointing there"
        )


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _configured


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function whose activations are computed again in backward."""
    return recompute(function, *args, use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Do the same."""
    return checkpoint(function, *args)


def reset() -> None:
    """Do nothing: nothing is kept between steps."""
