"""bitsandbytes on a processor as an oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def exact_root() -> Iterator[None]:
    """Have `Tensor.sqrt` of fp32 values be exact in the block. torch's misses the root by a bit in a fifth of cases."""
    real = Tensor.sqrt

    def root(self: Tensor) -> Tensor:
        return real(self.double()).float() if self.dtype is torch.float32 else real(self)

    Tensor.sqrt = root  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Tensor.sqrt = real  # type: ignore[method-assign]
