"""Safetensors files as a source of weights: parameters only, under their own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from infinity.checkpoint.format import PARAM, FileExtent, ShardRanges, TensorInfo
from infinity.checkpoint.pieces import TensorSpan
from infinity.plan.spec import dtype_name


class StoredLike(Protocol):
    """A tensor in a file."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, target: Tensor) -> None: ...


class Stored:
    """See `infinity.checkpoint.restore.ValueSource`."""

    def __init__(self, tensors: Mapping[str, StoredLike]) -> None:
        self.tensors = {
            name: TensorInfo(tensor.shape, dtype_name(tensor.dtype), trainable=False, kinds=(PARAM,))
            for name, tensor in tensors.items()
        }
        self._stored = tensors

    def masters(self, name: str, start: int, numel: int) -> Tensor:
        """Return elements [start, start + numel), in fp32 where the tensor is floating."""
        stored = self._stored[name]
        dtype = torch.float32 if stored.dtype.is_floating_point else stored.dtype
        values = torch.empty(numel, dtype=dtype, device="cpu")
        stored.read(start, values)
        return values

    def read(self, name: str, kind: str, start: int, numel: int, out: Tensor) -> None:
        """Read elements, unconverted, into `out`."""
        stored = self._stored[name]
        stored.read(start, out.view(stored.dtype))

    def read_shard(self, name: str, kind: str, shard: ShardRanges, start: int, numel: int, out: Tensor) -> bool:
        """Return False: tensors are whole."""
        return False

    def extent_of(self, piece: TensorSpan) -> FileExtent | None:
        """Return None: there are no extents."""
        return None

    def read_bytes(self, extent: FileExtent, begin: int, target: Tensor) -> None:
        """Never called, because there are no extents."""
        raise NotImplementedError
