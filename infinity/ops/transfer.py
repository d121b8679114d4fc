"""One future over whatever moves bytes: an I/O request, a CUDA event, a collective.

`done()` never blocks. `wait()` returns when the bytes have arrived and raises the mover's error; it may be called
again. After an error `done()` says whether the mover has let go of the bytes: one that is late has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Transfer(Protocol):
    """A copy in flight."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Completed:
    """A transfer that was over before it began: the plain path of a synchronous copy."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class StreamTransfer:
    """A copy on a side stream. `wait` makes the current stream wait for it and does not stop the host."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Stop the host until the bytes are there: before the CPU reads what the device wrote."""
        self._event.synchronize()


class WorkTransfer:
    """A collective in flight; `keep` are tensors that must live until it is over."""

    def __init__(self, work: Any, keep: Sequence[torch.Tensor] = ()) -> None:
        self._work = work
        self._keep: Sequence[torch.Tensor] = keep

    def done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._keep = ()
