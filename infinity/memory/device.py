"""The device tier: where compute happens. On a machine without an accelerator it is the process's own memory.

The only file of the memory manager that names torch.cuda: streams for copies, registration of CPU memory, free memory.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from infinity.transfer import Completed, StreamTransfer, Transfer


class Device:
    """One compute device with its copy stream."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.is_accelerator = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if self.is_accelerator else None

    @classmethod
    def detect(cls, local_rank: int) -> Device:
        """The accelerator of this rank, or the CPU."""
        if torch.cuda.is_available():
            index = local_rank % torch.cuda.device_count()
            torch.cuda.set_device(index)
            return cls(torch.device("cuda", index))
        return cls(torch.device("cpu"))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat tensor on the device."""
        return torch.empty(numel, dtype=dtype, device=self.torch)

    def copy(self, target: Tensor, source: Tensor) -> Transfer:
        """Copy between CPU and device; on a side stream, if there is one, after what the current stream has queued."""
        if self._copies is None:
            target.copy_(source)
            return Completed()
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            for tensor in (target, source):
                if tensor.is_cuda:
                    tensor.record_stream(self._copies)
            event = torch.cuda.Event()
            event.record(self._copies)
        return StreamTransfer(event)

    def arrived(self, transfer: Transfer) -> None:
        """Stop the host until a copy is over: before the CPU touches what the device wrote or still reads."""
        if isinstance(transfer, StreamTransfer):
            transfer.synchronize()
        else:
            transfer.wait()

    def synchronize(self) -> None:
        """Stop the host until the device has done everything queued."""
        if self.is_accelerator:
            torch.cuda.synchronize(self.torch)

    def free_nbytes(self) -> int | None:
        """Free device memory, or None where the device is the CPU."""
        return int(torch.cuda.mem_get_info(self.torch)[0]) if self.is_accelerator else None

    def register(self, pointer: int, nbytes: int) -> str | None:
        """Pin CPU memory; returns the driver's reason when it refuses, None when it is pinned."""
        status = torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 1)
        return None if int(status) == 0 else f"cudaHostRegister: {status}"

    def unregister(self, pointer: int) -> None:
        """Undo `register`."""
        torch.cuda.cudart().cudaHostUnregister(pointer)

    def scope(self) -> torch.cuda.device | nullcontext[None]:
        """A context in which new tensors and streams belong to this device."""
        return torch.cuda.device(self.torch) if self.is_accelerator else nullcontext()
