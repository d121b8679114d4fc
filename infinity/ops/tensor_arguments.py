"""Tensors as arguments of native code: checks, dtype codes and addresses."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

# The codes of csrc/adam/types.h and csrc/kernels.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOATS = tuple(DTYPE_CODES)
CPU = torch.device("cpu")


def check_tensor(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int, device: torch.device = CPU
) -> None:
    """Raise ValueError that begins with `name` unless `tensor` is contiguous and has one of `dtypes`, `numel` elements
    and `device`.
    """
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}: a tensor on {device} is needed")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {numel}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {tensor.stride()} for shape {tuple(tensor.shape)}")


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Return the address of the tensor's first element as a C pointer; the caller keeps the tensor alive."""
    return ctypes.c_void_p(tensor.data_ptr())
