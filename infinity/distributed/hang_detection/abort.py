"""Breaking a process group, so that every wait in it raises, here and on the ranks that are connected."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# A tag that no collective uses.
_TAG = 0x1F1F


def abort(group: Any) -> None:
    """Break a group for good. Callable from any thread; errors are ignored, because the group is given up anyway."""
    with contextlib.suppress(Exception):
        if dist.get_backend(group) == "gloo":
            _sever_gloo(group)
        else:
            group._get_backend(torch.accelerator.current_accelerator()).abort()


def _sever_gloo(group: Any) -> None:
    """Wait a moment for a message that no rank sends: when that times out, gloo closes all the group's connections."""
    for peer in dist.get_process_group_ranks(group):
        if peer != dist.get_rank():
            try:
                receiving = dist.irecv(torch.empty(1, device="cpu"), src=peer, group=group, tag=_TAG)
                assert receiving is not None
                receiving.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                # Any other error means that the connection to this peer is closed already.
                if "Timed out" in str(error):
                    return
