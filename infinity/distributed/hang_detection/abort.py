"""Breaking a process group, so that whatever waits in it raises: here, and on the ranks that are connected."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# A tag that no collective uses.
_TAG = 0x1F1F


def abort(group: Any) -> None:
    """Break one group for good. From any thread; whatever goes wrong, it is not in use any more."""
    with contextlib.suppress(Exception):
        if dist.get_backend(group) == "gloo":
            _sever_gloo(group)
        else:
            group._get_backend(torch.device("cuda")).abort()


def _sever_gloo(group: Any) -> None:
    """Wait a moment for what nobody sends: when the time is over, gloo closes the connections to all of the group."""
    for peer in dist.get_process_group_ranks(group):
        if peer != dist.get_rank():
            try:
                receiving = dist.irecv(torch.empty(1, device="cpu"), src=peer, group=group, tag=_TAG)
                assert receiving is not None
                receiving.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                # Anything else: the connection to this one is closed already.
                if "Timed out" in str(error):
                    return
