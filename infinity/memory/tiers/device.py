"""The device tier: where compute happens. On a machine without an accelerator it is the process's own memory.

The only file of the memory manager that names torch.cuda: streams for copies, registration of CPU memory, free memory.

[Note: copies and streams] Each direction has a stream of its own, so that parameters on their way up and gradients on
their way down do not wait for each other, and neither stops the host. A copy begins after what the current stream had
queued when it was submitted. Its end is an event: `transfer.wait()` makes the current stream wait for it, `arrived`
the host.

Device memory that a copy uses must not be handed to somebody else before the copy is over, and must be given back no
later than planned, which rules out record_stream (it frees memory when the host happens to look). What goes up is
written into memory that its owner frees only after `wait()`. What goes down is kept alive here until its event has
passed; of those still on their way only so many are kept, for then the current stream, which is the one that reuses
the memory, is made to wait for the oldest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

import torch
from torch import Tensor

from infinity.memory.pages import page_aligned
from infinity.memory.resizable_buffer import ElasticBuffer, SparePages
from infinity.observability import trace
from infinity.ops.transfer import Completed, StreamTransfer, Transfer
from infinity.plan.types import HUGE_PAGE

# Memory on its way down that is not yet given back: a few milliseconds of a bus, and few enough to look through.
_HELD_NBYTES_MAX = 64 << 20
_HELD_COUNT_MAX = 64


class Device:
    """One compute device with its copy streams."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.is_accelerator = device.type == "cuda"
        # Of elastic buffers; an accelerator's allocator keeps what was given back itself.
        self.spare = None if self.is_accelerator else SparePages()
        self._up = torch.cuda.Stream(device) if self.is_accelerator else None
        self._down = torch.cuda.Stream(device) if self.is_accelerator else None
        # See [Note: copies and streams]. Oldest first; guarded by the lock.
        self._lock = threading.Lock()
        self._held: deque[tuple[StreamTransfer, Tensor]] = deque()

    @classmethod
    def detect(cls, local_rank: int) -> Device:
        """The accelerator of this rank, or the CPU."""
        if torch.cuda.is_available():
            index = local_rank % torch.cuda.device_count()
            torch.cuda.set_device(index)
            return cls(torch.device("cuda", index))
        return cls(torch.device("cpu"))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor on the device for good; its content is not defined. In CPU memory it lies in large pages."""
        nbytes = numel * dtype.itemsize
        if self.is_accelerator or nbytes < HUGE_PAGE:
            return torch.empty(numel, dtype=dtype, device=self.torch)
        return page_aligned(nbytes, inherited=False)[:nbytes].view(dtype)

    def resizable(self, numel: int, dtype: torch.dtype) -> ElasticBuffer:
        """A flat buffer on the device whose memory can be given back."""
        return ElasticBuffer(numel, dtype, self.torch, self.spare)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on an accelerator."""
        return tensor.is_cuda

    def copy(self, target: Tensor, source: Tensor) -> Transfer:
        """Copy [numel] elements between CPU and device, cast to the target's dtype; does not stop the host.

        A cast is done on the device: the dtype that travels is the source's on the way up, the target's on the way
        down. `target` must stay allocated, and CPU memory on either side unchanged, until the transfer has been waited
        for. A device source may be let go of at once. From or to pageable memory the driver stops the host meanwhile.
        """
        from_device, to_device = self.holds(source), self.holds(target)
        if not (from_device or to_device):
            with trace.span(trace.COPY, "copy", nbytes=target.nbytes):
                target.copy_(source)
            return Completed()
        if from_device and to_device:
            target.copy_(source)
            return self._mark(torch.cuda.current_stream(self.torch))
        if to_device:
            return self._copy_up(target, source)
        return self._copy_down(target, source)

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
            with self._lock:
                self._held.clear()

    def mark(self) -> float | torch.cuda.Event:
        """A point in the device's time: everything queued before it lies before it. Does not stop the host."""
        if not self.is_accelerator:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def seconds_between(self, begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
        """Seconds from one `mark` to a later one that the device has passed."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float) and isinstance(end, float)
            return end - begin
        return float(begin.elapsed_time(end)) / 1e3

    def free_nbytes(self) -> int | None:
        """Free device memory, or None where the device is the CPU."""
        return int(torch.cuda.mem_get_info(self.torch)[0]) if self.is_accelerator else None

    def allocated_nbytes(self) -> int | None:
        """Bytes of living tensors on the device, or None where the device is the CPU."""
        return int(torch.cuda.memory_allocated(self.torch)) if self.is_accelerator else None

    def random_state(self) -> Tensor | None:
        """The state of the accelerator's random numbers ([n] uint8, CPU), or None where the device is the CPU."""
        return torch.cuda.get_rng_state(self.torch) if self.is_accelerator else None

    def set_random_state(self, state: Tensor) -> None:
        """Set what `random_state` gave; nothing on the CPU."""
        if self.is_accelerator:
            torch.cuda.set_rng_state(state, self.torch)

    def register(self, pointer: int, nbytes: int) -> str | None:
        """Pin CPU memory for every device; returns the driver's reason when it refuses, None when it is pinned."""
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(pointer, nbytes, 1)
        if int(status) == 0:
            return None
        self._forget_error()
        return f"cudaHostRegister: {runtime.cudaGetErrorString(status)}"

    def unregister(self, pointer: int) -> None:
        """Undo `register`."""
        if int(torch.cuda.cudart().cudaHostUnregister(pointer)) != 0:
            self._forget_error()

    def _copy_up(self, target: Tensor, source: Tensor) -> Transfer:
        assert self._up is not None
        self._up.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(self._up):
            if target.dtype == source.dtype:
                target.copy_(source, non_blocking=True)
            else:
                # The block that is cast from belongs to this stream, which orders its reuse.
                target.copy_(source.to(self.torch, non_blocking=True))
            return self._mark(self._up)

    def _copy_down(self, target: Tensor, source: Tensor) -> Transfer:
        assert self._down is not None
        with self._lock:
            self._give_back(source.nbytes)
            self._down.wait_stream(torch.cuda.current_stream(self.torch))
            with torch.cuda.stream(self._down):
                target.copy_(source.to(target.dtype), non_blocking=True)
                transfer = self._mark(self._down)
            self._held.append((transfer, source))
        return transfer

    def _give_back(self, nbytes: int) -> None:
        """Let go of sources that have gone down; to make room for `nbytes` more, order the reuse of the oldest's."""
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
        """Clear what a refused registration left: the runtime would blame the next kernel, whoever launches it."""
        with contextlib.suppress(RuntimeError):
            self.empty(1, torch.uint8).zero_()
