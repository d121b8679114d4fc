"""The doctor's facts that need torch: devices, I/O back ends, threads and free memory.

The processor's name.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import cpuinfo
import torch

from infinity.errors import ExtensionError
from infinity.memory.tiers.device import Device
from infinity.ops.aio import BACKENDS, Queue
from infinity.plan.capacity import free_cpu_nbytes


def processor() -> str:
    """Return the processor's model name, or its architecture if it has none. Takes about a second."""
    return str(cpuinfo.get_cpu_info().get("brand_raw") or platform.machine())


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Devices, I/O back ends, threads and free memory as a run would use them."""

    is_accelerator: bool
    accelerator: str
    # The back end that a queue selects.
    backend: str
    # Back end -> why it does not work; empty if it works.
    backends: dict[str, str]
    processor: str
    torch_threads: int
    free_nbytes: int


def see() -> EngineFacts:
    """Detect the device, try every I/O back end and read threads and free memory."""
    device = Device.detect(0)
    free = device.free_nbytes()
    with Queue() as queue:
        backend = queue.backend
    return EngineFacts(
        is_accelerator=device.is_accelerator,
        accelerator="" if free is None else f"{device.torch}, {free / 1e9:.1f} GB free", backend=backend,
        backends={name: _backend_trouble(name) for name in BACKENDS}, processor=processor(),
        torch_threads=torch.get_num_threads(), free_nbytes=free_cpu_nbytes(),
    )  # fmt: skip


def _backend_trouble(backend: str) -> str:
    """Return why a back end does not work on this machine, or an empty string."""
    try:
        Queue(backend).close()
    except ExtensionError as error:
        return " ".join(str(error).split())
    return ""
