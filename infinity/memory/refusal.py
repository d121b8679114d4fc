"""One error for memory that the system or the accelerator's allocator refuses.

The C library, the kernel and torch raise different exceptions. All become `MemoryRefused`, which carries the ledger's
numbers and is caught as `TierMemoryError`, as `MemoryError`, and as the `torch.OutOfMemoryError` (a RuntimeError) that
programs written for torch expect.
"""

from __future__ import annotations

import errno

import torch

from infinity.errors import TierMemoryError

# Of torch's own allocators for CPU memory, which raise a plain RuntimeError.
_SAYINGS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")


class MemoryRefused(TierMemoryError, torch.OutOfMemoryError):
    """The system refused memory; its own exception is the cause."""


def is_refusal(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS)
