"""A future for bytes in flight: an I/O request, a copy on a stream of the device or a collective.

`done()` never blocks. `wait()` returns once the bytes have arrived, or raises the error of the transfer; it may be
called again. After an error, `done()` is True once the transfer no longer uses the memory; after a timeout it still
does.
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
    """The transfer of a synchronous copy, which is always done."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


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


class WorkTransfer:
    """A collective in flight; it keeps the tensors `keep` alive until `wait` returns."""

    def __init__(self, work: Any, keep: Sequence[torch.Tensor] = ()) -> None:
        self._work = work
        self._keep: Sequence[torch.Tensor] = keep

    @property
    def kept(self) -> Sequence[torch.Tensor]:
        """The tensors that it keeps alive; none once it has been waited for."""
        return self._keep

    def done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._keep = ()
