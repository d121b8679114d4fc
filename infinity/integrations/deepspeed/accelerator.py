"""`deepspeed.accelerator.get_accelerator()`: the device that this process trains on."""

from __future__ import annotations

import functools
from typing import Any

import torch

from infinity.distributed.process_groups import detect
from infinity.memory.tiers.device import Device


class Accelerator:
    """DeepSpeed's methods of a device; the rest is torch's module of that kind of device, such as `torch.cuda`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._name = device.torch.type
        self._communication_backend_name = device.backends.rpartition(":")[2]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.get_device_module(self._device.torch), name)

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
