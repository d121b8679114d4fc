"""Run by test_faults.py under its shim: transfers on a back end, one a line of JSON on standard input.

Argument: the native library to use (the build whose completions the shim decides).
A line in: the back end, mode, after, depth, operation, path. A line out: the error or null, what the buffer held, how
long it took.
"""

import ctypes
import json
import mmap
import os
import sys
import time

import torch

from infinity.errors import TransferError
from infinity.ops import build
from infinity.ops.aio import File, Queue
from infinity.ops.crc32c import crc32c

NBYTES = 1 << 20
OFFSET = 4096


def transfer(case: dict) -> dict:
    """One read or write of NBYTES at OFFSET under the fault that `case` describes."""
    ctypes.CDLL(None).fault_reset()
    os.environ["FAULT_AFTER"] = str(case["after"])
    os.environ["FAULT_MODE"] = case["mode"]
    # What a busy machine takes for a transfer that ends, and what is waited for one that does not.
    limit_s = 0.7 if case["mode"] == "hang" else 30.0
    open_before = open_files()
    started = time.monotonic()
    outcome: dict = {"error": None, "sum": None, "intact": None}
    try:
        # One thread and a depth of 1, so that the calls come in the order of the blocks.
        with (
            File.open(case["path"], writable=True) as file,
            Queue(case["backend"], depth=case["depth"], threads=1, timeout_s=limit_s, block_nbytes=NBYTES // 4)
            as queue,
        ):
            buffer = torch.frombuffer(mmap.mmap(-1, NBYTES), dtype=torch.uint8).fill_(7)
            request = getattr(queue, case["operation"])(file, OFFSET, buffer, checksum=True)
            request.wait()
            outcome["sum"] = int(buffer.sum())
            outcome["intact"] = request.checksum == crc32c(bytes(buffer.numpy()))
            outcome["direct"] = file.direct
    except TransferError as error:
        fields = ("operation", "path", "offset", "nbytes", "errno")
        outcome["error"] = {**{name: getattr(error, name) for name in fields}, "text": str(error)}
    outcome["seconds"] = time.monotonic() - started
    outcome["fds"] = open_files() - open_before
    return outcome


def open_files() -> int:
    """How many of the faulty file's descriptors are open; transfers that hang keep theirs."""
    return sum("faulty" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1])


def create(path: str) -> dict:
    """Make a file while the drive is full."""
    os.environ["FAULT_MODE"] = "enospc"
    try:
        File.create(path, NBYTES).close()
    except TransferError as error:
        return {"errno": error.errno, "text": str(error)}
    return {}


def use(library: ctypes.CDLL) -> None:
    """Make `library` the native one."""
    build.load = build.require = lambda name: library


if __name__ == "__main__":
    use(ctypes.CDLL(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        reply = create(request["path"]) if request["operation"] == "create" else transfer(request)
        print(json.dumps(reply), flush=True)
