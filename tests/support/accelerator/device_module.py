"""`torch.simulated`: what torch and programs ask of a device type's module. load() in __init__.py registers it."""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def make(lib: ctypes.CDLL) -> types.ModuleType:
    """The module over the loaded back end."""
    module = types.ModuleType("torch.simulated")

    def index_of(device: Any = None) -> int:
        if device is None:
            return torch.accelerator.current_device_index()
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return torch.accelerator.current_device_index() if index is None else index

    def get_rng_state(device: Any = None) -> Tensor:
        words = (ctypes.c_uint64 * 2)()
        lib.simulated_random_state(index_of(device), words, 0)
        return torch.frombuffer(bytearray(words), dtype=torch.uint8)

    def set_rng_state(state: Tensor, device: Any = None) -> None:
        words = (ctypes.c_uint64 * 2).from_buffer_copy(state.numpy().tobytes())
        lib.simulated_random_state(index_of(device), words, 1)

    @contextlib.contextmanager
    def device_scope(device: Any) -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(index_of(device))
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: bool(lib.simulated_forked()),
        "device_count": lambda: module.count,
        "current_device": torch.accelerator.current_device_index,
        "device": device_scope,
        "set_device": lambda device: torch.accelerator.set_device_index(index_of(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(index_of(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index_of(device)),
        "empty_cache": torch.accelerator.empty_cache,
        "memory_allocated": lambda device=None: torch.accelerator.memory_allocated(index_of(device)),
        "max_memory_allocated": lambda device=None: torch.accelerator.max_memory_allocated(index_of(device)),
        "memory_reserved": lambda device=None: torch.accelerator.memory_reserved(index_of(device)),
        "mem_get_info": lambda device=None: torch.accelerator.get_memory_info(index_of(device)),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": lambda number: lib.simulated_seed(index_of(), number),
        "manual_seed_all": lambda number: [lib.simulated_seed(index, number) for index in range(module.count)],
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    module._initialized = True
    module.count = 1
    module.Stream, module.Event = torch.Stream, torch.Event
    return module
