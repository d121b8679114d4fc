"""`deepspeed.accelerator.get_accelerator()`: the device that this process trains on."""

from __future__ import annotations

import functools
import resource
from typing import Any

import psutil
import torch

from infinity.distributed.groups import detect
from infinity.errors import UnknownNameError
from infinity.memory.tiers.device import Device
from infinity.ops.cores import allowed_cores

_OF_TORCH = ("Event", "Stream", "get_rng_state", "initial_seed", "manual_seed", "set_rng_state")


class Accelerator:
    """DeepSpeed's methods of a device; the rest is torch's module of that kind of device, such as `torch.cuda`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._name = device.torch.type
        self._communication_backend_name = device.backends.rpartition(":")[2]

    def __getattr__(self, name: str) -> Any:
        own = torch.get_device_module(self._device.torch)
        if not name.startswith("__"):
            if hasattr(own, name):
                return getattr(own, name)
            # torch has a type of tensors, generators and streams of the CPU at its top.
            if self._name == "cpu" and (name in _OF_TORCH or name.endswith("Tensor")) and hasattr(torch, name):
                return getattr(torch, name)
        raise UnknownNameError(f"get_accelerator().{name}: neither infinity nor torch has it for a {self._name} device")

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda" or "cuda:1"; a CPU has no index."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """Return the name of this process's device."""
        return str(self._device.torch)

    def communication_backend_name(self) -> str:
        """Return torch.distributed's name of the back end for tensors on this device."""
        return self._communication_backend_name

    def is_available(self) -> bool:
        """Return True: every process has a device."""
        return True

    def device_count(self) -> int:
        """Return how many ranks have a device of their own on this machine: on a CPU, as many as it has cores."""
        if self._name == "cpu":
            return max(detect().local_size, len(allowed_cores()))
        return int(torch.get_device_module(self._device.torch).device_count())

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the types that an engine trains in here."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def random(self) -> Any:
        """Return torch's module of random numbers."""
        return torch.random

    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices."""
        return torch.manual_seed(seed)

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of living tensors on the device; on a CPU those of the process."""
        return self._device.allocated_nbytes() or psutil.Process().memory_info().rss

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the most that they have been."""
        if self._name == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(torch.get_device_module(self._device.torch).max_memory_allocated(device_index))

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes that torch keeps on the device; on a CPU those of the process."""
        return self._device.reserved_nbytes() or self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the most that they have been."""
        if self._name == "cpu":
            return self.max_memory_allocated()
        return int(torch.get_device_module(self._device.torch).max_memory_reserved(device_index))

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16."""
        return self._name == "cpu" or bool(torch.get_device_module(self._device.torch).is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Return True: every device computes in fp16."""
        return True

    def is_synchronized_device(self) -> bool:
        """Return whether the program waits for each operation."""
        return self._name == "cpu"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this kind of device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor in pinned memory, where the device has such copies."""
        return tensor if self._name == "cpu" else tensor.pin_memory()


@functools.cache
def get_accelerator() -> Accelerator:
    """Return this process's device, as its local rank says."""
    return Accelerator(Device.detect(detect().local_rank))


def is_current_accelerator_supported() -> bool:
    """Return True: a device that torch finds is one that an engine trains on."""
    return True
