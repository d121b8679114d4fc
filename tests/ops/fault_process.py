"""Run by test_faults.py under its shim: transfers on a back end, one a line of JSON on standard input.

A line in: mode, after, operation, path. A line out: the error or null, what the buffer held, and how long it took.
"""

import ctypes
import json
import os
import sys
import time

import torch

from infinity.errors import TransferError
from infinity.ops.aio import File, Queue

NBYTES = 1 << 20
OFFSET = 4096


def transfer(backend: str, case: dict) -> dict:
    """One read or write of NBYTES at OFFSET under the fault that `case` describes."""
    ctypes.CDLL(None).fault_reset()
    os.environ["FAULT_AFTER"] = str(case["after"])
    os.environ["FAULT_MODE"] = case["mode"]
    started = time.monotonic()
    outcome: dict = {"error": None, "sum": None}
    try:
        # One thread, so that the calls come in the order of the blocks.
        with (
            File.open(case["path"], writable=True) as file,
            Queue(backend, threads=1, timeout_s=1.5, block_nbytes=NBYTES // 4) as queue,
        ):
            buffer = torch.full((NBYTES,), 7, dtype=torch.uint8)
            getattr(queue, case["operation"])(file, OFFSET, buffer).wait()
            outcome["sum"] = int(buffer.sum())
    except TransferError as error:
        fields = ("operation", "path", "offset", "nbytes", "errno")
        outcome["error"] = {**{name: getattr(error, name) for name in fields}, "text": str(error)}
    outcome["seconds"] = time.monotonic() - started
    outcome["fds"] = sum("faulty" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1])
    return outcome


def create(path: str) -> dict:
    """Make a file while the drive is full."""
    os.environ["FAULT_MODE"] = "enospc"
    try:
        File.create(path, NBYTES).close()
    except TransferError as error:
        return {"errno": error.errno, "text": str(error)}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        reply = create(request["path"]) if request["operation"] == "create" else transfer(sys.argv[1], request)
        print(json.dumps(reply), flush=True)
