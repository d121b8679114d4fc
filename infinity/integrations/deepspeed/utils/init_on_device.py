"""`deepspeed.OnDevice`: build a model on a device, in a dtype."""

from __future__ import annotations

from contextlib import ExitStack

import torch


class OnDevice:
    """`with OnDevice(dtype=torch.bfloat16, device="meta"):` makes parameters there, in that dtype."""

    def __init__(self, dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True):
        self._dtype = dtype
        self._device = device
        self._enabled = enabled
        self._exit = ExitStack()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._exit.enter_context(torch.device(self._device))
            if self._dtype is not None:
                self._exit.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()
