"""The device tier: where computation happens. `Device` is the CPU and its memory; a device class adds an accelerator.

A further type of device is a subclass of `Device`, given to `add_device`. This is the only file of the memory manager
that names torch.cuda and torch.accelerator: streams for copies, registration of CPU memory, free memory.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from infinity.base import trace
from infinity.base.transfer import Completed, Transfer
from infinity.memory.resizable_buffer import ElasticBuffer, SparePages, page_aligned
from infinity.plan.capacity import ACCELERATOR, PROCESS
from infinity.plan.types import HUGE_PAGE

# Bounds of memory on its way down where the plan has none, and of the number of copies, which are scanned.
HELD_NBYTES_MIN = 64 << 20
_HELD_COUNT_MAX = 1024

# Elements that the CPU casts at a time where gradients are added in another dtype than they arrive in.
_CAST_NUMEL = 1 << 20

# torch's names of the back ends of collectives of its types of accelerators.
_COLLECTIVES = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}

# How CPU memory is pinned: any mapping by a call of the driver; what the driver has allocated; not at all.
Pinning = Literal["registration", "allocation", "none"]


class StreamTransfer:
    """A copy on a side stream; `wait` makes the current stream wait for it, not the host."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        torch.accelerator.current_stream(self._event.device).wait_event(self._event)

    def synchronize(self) -> None:
        """Block the host until the bytes have arrived; needed before the CPU reads them."""
        self._event.synchronize()


class Device:
    """The CPU as the device: its memory is the process's own, and copies are done when they return.

    name: of the type of device, for tables and messages. is_accelerator: whether it computes beside the CPU, on tensors
    of its own type. own_memory: whether its memory is apart from the CPU's, so that values are copied to it. pinning:
    how CPU memory is prepared for its copies. collectives: the back end of collectives between such devices; gloo is
    given tensors in CPU memory. allocator: what the device's takes beyond living tensors.
    """

    name = "cpu"
    is_accelerator = False
    own_memory = False
    pinning: Pinning = "none"
    collectives = "gloo"
    allocator = PROCESS

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

    @property
    def unified(self) -> bool:
        """Whether this is an accelerator that has its tensors in the CPU's memory."""
        return self.is_accelerator and not self.own_memory

    @property
    def backends(self) -> str:
        """The back ends of collectives in torch's words: gloo between CPUs, `collectives` between these devices."""
        return "gloo" if self.collectives == "gloo" else f"cpu:gloo,{self.torch.type}:{self.collectives}"

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
        """Copy [numel] elements, cast to the target's dtype, without stopping the host.

        Between two tensors of the device, the copy is work of the program's stream. Between CPU and device, the device
        casts: the dtype that travels is the source's on the way up, the target's on the way down. `target` must stay
        allocated, and CPU memory on either side unchanged, until the transfer has been waited for. A device source may
        be released at once. From or to pageable memory the driver stops the host meanwhile.
        """
        with trace.span(trace.COPY, "copy", nbytes=target.nbytes):
            target.copy_(source)
        return Completed()

    def copy_since(self, target: Tensor, source: Tensor, begun: Any) -> Transfer:
        """Copy between CPU memory and a tensor of the device, of one dtype, as `copy` does. It follows what the program
        had queued at the mark `begun` and nothing later; the device's tensor must stay allocated, too.
        """
        return self.copy(target, source)

    def add(self, target: Tensor, source: Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """`target += source`, flat, under the rules of `copy`, once the copies `after` have written the target. A
        target in CPU memory travels to the device and back, where the sum costs the host nothing.

        Where the dtypes differ torch casts all of the source first, on the CPU into memory of its own; there it is
        given a part at a time.
        """
        step = _CAST_NUMEL if target.dtype is not source.dtype else max(target.numel(), 1)
        for begin in range(0, target.numel(), step):
            target[begin : begin + step].add_(source[begin : begin + step])
        return Completed()

    def before_overwrite(self, tensor: Tensor) -> None:
        """Order what the program queues next after the copies out of this tensor's memory."""

    def following(self, transfer: Transfer) -> AbstractContextManager[Any]:
        """A block whose work follows an upward copy, while the program's stream does not wait for it."""
        transfer.wait()
        return nullcontext()

    def arrived(self, transfer: Transfer) -> None:
        """Stop the host until a copy completes: before the CPU touches what the device wrote or still reads."""
        transfer.wait()

    def let_hold(self, nbytes: int) -> None:
        """Let sources of downward copies keep so many bytes of the device's memory: what the plan has for them. Where
        it has none, what else goes down (activation checkpoints) may keep a few milliseconds of a bus.
        """

    def program_stream(self) -> Any:
        """The stream that this thread's work is queued on; None on a device without streams."""
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A block whose work is queued on a stream that `program_stream` gave, in any thread."""
        return nullcontext()

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

    def reserved_nbytes(self) -> int | None:
        """Bytes of the device that its allocator keeps, free blocks included; None where it has no memory."""
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


class Accelerator(Device):
    """A device that torch.accelerator names, with a stream of its own for copies in each direction. See [Note: copies
    and streams].

    Written against what torch documents of every accelerator, with CPU memory pinned by allocation. What a type of
    device does otherwise is a subclass.
    """

    is_accelerator = True
    own_memory = True
    pinning: Pinning = "allocation"
    allocator = ACCELERATOR

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.name = device.type
        self.spare = None
        self.collectives = _COLLECTIVES.get(device.type, "gloo")
        self._up = torch.Stream(device)
        self._down = torch.Stream(device)
        # Sources of downward copies, oldest first; guarded by the lock.
        self._lock = threading.Lock()
        self._held: deque[tuple[StreamTransfer, tuple[Tensor, ...]]] = deque()
        self._held_nbytes = 0
        self._held_nbytes_max = HELD_NBYTES_MIN

    @classmethod
    def is_available(cls) -> bool:
        found = torch.accelerator.current_accelerator(check_available=True)
        # Of Apple's no stream is documented.
        return found is not None and found.type != "mps"

    @classmethod
    def of_rank(cls, local_rank: int) -> Device:
        found = torch.accelerator.current_accelerator()
        assert found is not None
        index = local_rank % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        return cls(torch.device(found.type, index))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.torch)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.torch.type

    def let_hold(self, nbytes: int) -> None:
        self._held_nbytes_max = nbytes or HELD_NBYTES_MIN

    def program_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.torch)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return _on(stream)

    def copy(self, target: Tensor, source: Tensor) -> Transfer:
        from_device, to_device = self.holds(source), self.holds(target)
        if not (from_device or to_device):
            return super().copy(target, source)
        if from_device and to_device:
            target.copy_(source)
            # The program's own stream orders everything that it does with the target.
            return Completed()
        if to_device:
            return self._copy_up(target, source)
        if target.dtype == source.dtype:
            return self._send_down(target, source, (source,))
        cast = self._beside(target, source)
        return self._send_down(target, cast, (source, cast), lambda: cast.copy_(source))

    def copy_since(self, target: Tensor, source: Tensor, begun: Any) -> Transfer:
        stream = self._up if self.holds(target) else self._down
        stream.wait_event(begun)
        with _on(stream):
            target.copy_(source, non_blocking=True)
            return self._mark(stream)

    def add(self, target: Tensor, source: Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        if self.holds(target):
            target.add_(source.to(self.torch))
            return Completed()
        if not self.holds(source):
            for transfer in after:
                self.arrived(transfer)
            return super().add(target, source)
        total = self._beside(target, source)
        with _on(self._up):
            for transfer in after:
                transfer.wait()
        arriving = self._copy_up(total, target)

        def add() -> None:
            arriving.wait()
            total.add_(source)

        return self._send_down(target, total, (source, total), add)

    def before_overwrite(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage().data_ptr()
        with self._lock:
            while any(memory == each.untyped_storage().data_ptr() for _, sources in self._held for each in sources):
                self._pop()

    def following(self, transfer: Transfer) -> AbstractContextManager[Any]:
        # Only the stream for upward copies waits for the copy: it has made it.
        return _on(self._up) if isinstance(transfer, StreamTransfer) else super().following(transfer)

    def arrived(self, transfer: Transfer) -> None:
        if isinstance(transfer, StreamTransfer):
            if not transfer.done():
                transfer.synchronize()
        else:
            transfer.wait()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch)
        with self._lock:
            self._held.clear()
            self._held_nbytes = 0

    def mark(self) -> Any:
        event = torch.Event(self.torch, enable_timing=True)
        event.record(self.program_stream())
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def free_nbytes(self) -> int | None:
        return int(torch.accelerator.get_memory_info(self.torch)[0])

    def allocated_nbytes(self) -> int | None:
        return int(torch.accelerator.memory_allocated(self.torch))

    def reserved_nbytes(self) -> int | None:
        return int(torch.accelerator.memory_reserved(self.torch))

    def random_state(self) -> Tensor | None:
        state: Tensor = torch.get_device_module(self.torch).get_rng_state(self.torch)
        return state

    def set_random_state(self, state: Tensor) -> None:
        torch.get_device_module(self.torch).set_rng_state(state, self.torch)

    def _copy_up(self, target: Tensor, source: Tensor) -> StreamTransfer:
        self._up.wait_stream(self.program_stream())
        with _on(self._up):
            if target.dtype == source.dtype:
                target.copy_(source, non_blocking=True)
            else:
                # The block that is cast from belongs to this stream, which orders its reuse.
                target.copy_(source.to(self.torch, non_blocking=True))
            return self._mark(self._up)

    def _beside(self, target: Tensor, source: Tensor) -> Tensor:
        """Memory for what will be sent into `target`, after that of older copies as far as the bound needs it."""
        with self._lock:
            self._give_back(source.nbytes + target.nbytes)
        return self.empty(target.numel(), target.dtype)

    def _send_down(
        self, target: Tensor, result: Tensor, held: tuple[Tensor, ...], prepare: Callable[[], object] | None = None
    ) -> Transfer:
        """Copy `result` into CPU memory once `prepare` has made it, on the stream for downward copies."""
        nbytes = sum(each.nbytes for each in held)
        with self._lock:
            self._give_back(nbytes)
            self._down.wait_stream(self.program_stream())
            with _on(self._down):
                if prepare is not None:
                    prepare()
                target.copy_(result, non_blocking=True)
                transfer = self._mark(self._down)
            self._held.append((transfer, held))
            self._held_nbytes += nbytes
        return transfer

    def _give_back(self, nbytes: int) -> None:
        """Release sources whose copies completed; for `nbytes` more, order the reuse of the oldest one's memory."""
        while self._held and (
            self._held[0][0].done()
            or len(self._held) >= _HELD_COUNT_MAX
            or self._held_nbytes + nbytes > self._held_nbytes_max
        ):
            self._pop()

    def _pop(self) -> None:
        transfer, sources = self._held.popleft()
        self._held_nbytes -= sum(each.nbytes for each in sources)
        transfer.wait()

    def _mark(self, stream: torch.Stream) -> StreamTransfer:
        event = torch.Event(self.torch)
        event.record(stream)
        return StreamTransfer(event)


@contextlib.contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """A block whose work is queued on a stream. As a context, a torch.Stream keeps what it replaces in itself: two
    threads that enter the same one would leave it on each other's stream.
    """
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class CudaDevice(Accelerator):
    """One device of CUDA, or of ROCm, which has the same interface. CPU memory of any mapping can be registered."""

    pinning = "registration"

    @classmethod
    def is_available(cls) -> bool:
        return torch.cuda.is_available()

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

    def _forget_error(self) -> None:
        """Clear the error of a refused registration: the runtime would report it for the next kernel."""
        with contextlib.suppress(RuntimeError):
            self.empty(1, torch.uint8).zero_()


# The types of devices, the preferred first.
_types: list[type[Device]] = [CudaDevice, Accelerator, Device]


def count_devices() -> int:
    """Return the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def add_device(device: type[Device]) -> None:
    """Prefer a further type of device to those before it."""
    _types.insert(0, device)


def remove_device(device: type[Device]) -> None:
    """Undo `add_device`."""
    _types.remove(device)
