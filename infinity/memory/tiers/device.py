"""The device tier: where computation happens. `Device` is the CPU and its memory; a device class adds an accelerator.

A further type of device is a subclass of `Device`, given to `add_device`. This is the only file of the memory manager
that names torch.cuda: streams for copies, registration of CPU memory, free memory.

[Note: copies and streams] Each direction has a stream of its own, so that parameters going up and gradients going down
do not wait for each other, and neither stops the host. A copy begins after the work that the current stream had queued
when the copy was submitted. An event marks its end: `transfer.wait()` makes the current stream wait for it, `arrived`
the host.

The allocator must not reuse device memory before a copy from or to it completes, and must get it back no later than
planned. record_stream would break the second rule: it frees memory when the host happens to poll. So the owner of the
target of an upward copy frees it only after `wait()`. The source of a downward copy is kept alive here until its event
has passed. The number and bytes of such sources are bounded: beyond the bound the current stream, which is the one that
reuses the memory, waits for the oldest copy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from infinity.memory.pages import page_aligned
from infinity.memory.resizable_buffer import ElasticBuffer, SparePages
from infinity.observability import trace
from infinity.ops.transfer import Completed, StreamTransfer, Transfer
from infinity.plan.types import HUGE_PAGE

# Bounds of memory on its way down: a few milliseconds of a bus, and few enough to scan.
_HELD_NBYTES_MAX = 64 << 20
_HELD_COUNT_MAX = 64


class Device:
    """The CPU as the device: its memory is the process's own, and copies are done when they return.

    name: of the type of device, for tables and messages. is_accelerator: whether the device has memory of its own, so
    that values are copied to it. collectives: the back end of collectives between such devices.
    """

    name = "cpu"
    is_accelerator = False
    collectives = "gloo"

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        # Pages of elastic buffers; None where the device's allocator keeps freed memory itself.
        self.spare: SparePages | None = SparePages()

    @classmethod
    def is_available(cls) -> bool:
        """Whether this machine has such a device."""
        return True

    @classmethod
    def of_rank(cls, local_rank: int) -> Device:
        """The device of one of the node's ranks, made the current one."""
        return cls(torch.device("cpu"))

    @staticmethod
    def detect(local_rank: int) -> Device:
        """The device of this rank: of the first type that the machine has."""
        return next(each for each in _types if each.is_available()).of_rank(local_rank)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor on the device for good, its content undefined. In CPU memory it lies in large pages."""
        nbytes = numel * dtype.itemsize
        if nbytes < HUGE_PAGE:
            return torch.empty(numel, dtype=dtype, device=self.torch)
        return page_aligned(nbytes, inherited=False)[:nbytes].view(dtype)

    def allocate(self, nbytes: int) -> Tensor:
        """A buffer of a partition: uint8, [nbytes]."""
        return self.empty(nbytes, torch.uint8)

    def release(self, buffer: Tensor) -> None:
        """Prepare a buffer for the end of its last reference."""

    def close(self) -> None:
        """Prepare all buffers."""

    def resizable(self, numel: int, dtype: torch.dtype) -> ElasticBuffer:
        """A flat buffer on the device whose memory can be given back."""
        return ElasticBuffer(numel, dtype, self.torch, self.spare)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on an accelerator."""
        return False

    def copy(self, target: Tensor, source: Tensor) -> Transfer:
        """Copy [numel] elements between CPU and device, cast to the target's dtype, without stopping the host.

        The device casts: the dtype that travels is the source's on the way up, the target's on the way down. `target`
        must stay allocated, and CPU memory on either side unchanged, until the transfer has been waited for. A device
        source may be released at once. From or to pageable memory the driver stops the host meanwhile.
        """
        with trace.span(trace.COPY, "copy", nbytes=target.nbytes):
            target.copy_(source)
        return Completed()

    def arrived(self, transfer: Transfer) -> None:
        """Stop the host until a copy completes: before the CPU touches what the device wrote or still reads."""
        transfer.wait()

    def synchronize(self) -> None:
        """Stop the host until the device has done everything queued."""

    def mark(self) -> Any:
        """A point in the device's time, after everything queued before it. Does not stop the host."""
        return time.perf_counter()

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Seconds from one `mark` to a later one that the device has passed."""
        return float(end - begin)

    def free_nbytes(self) -> int | None:
        """Free bytes of the device's own memory; None where it has none."""
        return None

    def allocated_nbytes(self) -> int | None:
        """Bytes of living tensors in the device's own memory; None where it has none."""
        return None

    def random_state(self) -> Tensor | None:
        """The state of the accelerator's random numbers ([n] uint8, CPU); None for the CPU."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Set what `random_state` gave; nothing on the CPU."""

    def register(self, pointer: int, nbytes: int) -> str | None:
        """Pin CPU memory for every device; return the driver's reason when it refuses, None when it is pinned."""
        return "the device copies from any memory"

    def unregister(self, pointer: int) -> None:
        """Undo `register`."""


class CudaDevice(Device):
    """One CUDA device with its copy streams. See [Note: copies and streams]."""

    name = "cuda"
    is_accelerator = True
    collectives = "nccl"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.spare = None
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        # Sources of downward copies, oldest first; guarded by the lock.
        self._lock = threading.Lock()
        self._held: deque[tuple[StreamTransfer, Tensor]] = deque()

    @classmethod
    def is_available(cls) -> bool:
        return torch.cuda.is_available()

    @classmethod
    def of_rank(cls, local_rank: int) -> Device:
        index = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return cls(torch.device("cuda", index))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.torch)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def copy(self, target: Tensor, source: Tensor) -> Transfer:
        from_device, to_device = self.holds(source), self.holds(target)
        if not (from_device or to_device):
            return super().copy(target, source)
        if from_device and to_device:
            target.copy_(source)
            return self._mark(torch.cuda.current_stream(self.torch))
        return self._copy_up(target, source) if to_device else self._copy_down(target, source)

    def arrived(self, transfer: Transfer) -> None:
        if isinstance(transfer, StreamTransfer):
            transfer.synchronize()
        else:
            transfer.wait()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)
        with self._lock:
            self._held.clear()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def free_nbytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def allocated_nbytes(self) -> int | None:
        return int(torch.cuda.memory_allocated(self.torch))

    def random_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self.torch)

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch)

    def register(self, pointer: int, nbytes: int) -> str | None:
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(pointer, nbytes, 1)
        if int(status) == 0:
            return None
        self._forget_error()
        return f"cudaHostRegister: {runtime.cudaGetErrorString(status)}"

    def unregister(self, pointer: int) -> None:
        if int(torch.cuda.cudart().cudaHostUnregister(pointer)) != 0:
            self._forget_error()

    def _copy_up(self, target: Tensor, source: Tensor) -> Transfer:
        self._up.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(self._up):
            if target.dtype == source.dtype:
                target.copy_(source, non_blocking=True)
            else:
                # The block that is cast from belongs to this stream, which orders its reuse.
                target.copy_(source.to(self.torch, non_blocking=True))
            return self._mark(self._up)

    def _copy_down(self, target: Tensor, source: Tensor) -> Transfer:
        with self._lock:
            self._give_back(source.nbytes)
            self._down.wait_stream(torch.cuda.current_stream(self.torch))
            with torch.cuda.stream(self._down):
                target.copy_(source.to(target.dtype), non_blocking=True)
                transfer = self._mark(self._down)
            self._held.append((transfer, source))
        return transfer

    def _give_back(self, nbytes: int) -> None:
        """Release sources whose copies completed; for `nbytes` more, order the reuse of the oldest one's memory."""
        while self._held and (self._held[0][0].done() or self._is_full(nbytes)):
            transfer, _ = self._held.popleft()
            transfer.wait()

    def _is_full(self, nbytes: int) -> bool:
        held_nbytes = sum(source.nbytes for _, source in self._held)
        return len(self._held) >= _HELD_COUNT_MAX or held_nbytes + nbytes > _HELD_NBYTES_MAX

    def _mark(self, stream: torch.cuda.Stream) -> StreamTransfer:
        event = torch.cuda.Event()
        event.record(stream)
        return StreamTransfer(event)

    def _forget_error(self) -> None:
        """Clear the error of a refused registration: the runtime would report it for the next kernel."""
        with contextlib.suppress(RuntimeError):
            self.empty(1, torch.uint8).zero_()


# The types of devices, the preferred first.
_types: list[type[Device]] = [CudaDevice, Device]


def add_device(device: type[Device]) -> None:
    """Prefer a further type of device to those before it."""
    _types.insert(0, device)


def remove_device(device: type[Device]) -> None:
    """Undo `add_device`."""
    _types.remove(device)
