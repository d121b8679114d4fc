"""What a run's own modules see of this machine: everything in the doctor's answer that needs a package."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.cli.processor import processor
from infinity.errors import ExtensionError
from infinity.memory.tiers.device import Device
from infinity.ops.aio import BACKENDS, Queue
from infinity.plan.free_memory import free_cpu_nbytes


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Devices, queues, threads and memory."""

    is_accelerator: bool
    accelerator: str
    # What a queue takes by itself; and by back end why it does not work (empty: it does).
    backend: str
    backends: dict[str, str]
    processor: str
    torch_threads: int
    free_nbytes: int


def see() -> EngineFacts:
    """Try everything once."""
    device = Device.detect(0)
    free = device.free_nbytes()
    with Queue() as queue:
        backend = queue.backend
    return EngineFacts(
        is_accelerator=device.is_accelerator,
        accelerator="" if free is None else f"{device.torch}, {free / 1e9:.1f} GB free", backend=backend,
        backends={name: _trouble(name) for name in BACKENDS}, processor=processor(),
        torch_threads=torch.get_num_threads(), free_nbytes=free_cpu_nbytes(),
    )  # fmt: skip


def _trouble(backend: str) -> str:
    """Why a back end does not work here."""
    try:
        Queue(backend).close()
    except ExtensionError as error:
        return " ".join(str(error).split())
    return ""
