"""A future for bytes in flight: an I/O request, a copy on a stream of the device or a collective.

`done()` never blocks. `wait()` returns once the bytes have arrived, or raises the error of the transfer; it may be
called again. After an error, `done()` is True once the transfer no longer uses the memory; after a timeout it still
does.
"""

from __future__ import annotations

from typing import Protocol


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
