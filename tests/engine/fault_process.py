"""Run by test_faults.py under its shim: one training after the other, each with a drive that fails at a chosen moment.

A line of JSON in: folder, where (initialize, forward, backward, step, flush or never), mode, watchdog, and optionally
the number of transfers that still go through, and the home of gradients. A line of JSON out: the error with its
attributes, or the digest; how long it took from the fault to the error, how closing went, and the files that are left.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import torch

import infinity
from infinity.engine import Engine
from infinity.ops import aio
from tests.support.models import token_batch
from tests.support.oracle import Case, Result, collect, settings, swap_files

FIELDS = ("operation", "path", "offset", "nbytes", "errno")


class Fault:
    """Begins at a chosen moment, and remembers when."""

    def __init__(self, mode: str, after: int) -> None:
        self._mode, self._after = mode, after
        self.began = time.monotonic()
        os.environ.pop("FAULT_MODE", None)

    def begin(self) -> None:
        ctypes.CDLL(None).fault_reset()
        os.environ["FAULT_AFTER"] = str(self._after)
        os.environ["FAULT_MODE"] = self._mode
        self.began = time.monotonic()

    def end(self) -> None:
        os.environ.pop("FAULT_MODE", None)


def make(case: dict[str, Any]) -> Engine:
    """An engine with everything on NVMe."""
    config = settings(
        case["folder"], param="nvme", optimizer="nvme", watchdog_seconds=case["watchdog"],
        overlap=case.get("overlap", True),
        zero={"sub_group_size": 2000, "offload_gradients": {"device": case.get("gradients", "cpu")}},
        aio={"intra_op_parallelism": 1},
    )  # fmt: skip
    model = Case().model()
    return infinity.initialize(model=model, config=config, model_parameters=Case().groups(model))[0]


def train(engine: Engine, rank: int, where: str, fault: Fault) -> None:
    """Four steps; at the third the fault begins. What lay in memory is dropped first, so that it must be read."""
    for step in range(4):
        if step == 2 and where == "forward":
            drop(engine)
            fault.begin()
        loss = engine(**token_batch(rank, step, positions=8))
        if step == 2 and where == "backward":
            drop(engine)
            fault.begin()
        engine.backward(loss)
        if step == 2 and where in ("step", "flush"):
            if where == "step":
                drop(engine)
            fault.begin()
        engine.step()


def drop(engine: Engine) -> None:
    """Nothing stays in memory that is on NVMe."""
    engine.synchronize()
    engine.store.settle()
    engine.store.drop(*engine.store.keys())


def outcome(case: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    """One training; see the module's text."""
    fault = Fault(case["mode"], case.get("after", 0))
    reply: dict[str, Any] = {"error": None, "digest": None, "close_error": None}
    engine: Engine | None = None
    try:
        if case["where"] == "initialize":
            fault.begin()
        engine = make(case)
        train(engine, rank, case["where"], fault)
        engine.synchronize()
        engine.store.settle()
        fault.end()
        result = Result()
        collect(engine, result)
        reply["digest"] = result.digest
    except Exception as error:
        reply["error"] = {name: getattr(error, name, None) for name in FIELDS}
        reply["error"].update(type=type(error).__name__, text=str(error))
    reply["seconds"] = time.monotonic() - fault.began
    began = time.monotonic()
    if engine is not None:
        try:
            engine.close()
        except Exception as error:
            reply["close_error"] = f"{type(error).__name__}: {error}"
    fault.end()
    reply["close_seconds"] = time.monotonic() - began
    reply["files"] = [path.name for path in swap_files(case["folder"])]
    return reply


def one_rank(case: dict[str, Any]) -> None:
    """A rank of several: an error ends the process as it would end a program's."""
    rank = int(os.environ["RANK"])
    fault = Fault(case["mode"], 0)
    if case["where"] == "initialize":
        fault.begin()
    engine = make(case)
    train(engine, rank, case["where"], fault)
    engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The shim sees system calls, not what the kernel's own queues do.
    aio.BACKENDS = ("threads", "python")
    if len(sys.argv) > 1:
        one_rank(json.loads(sys.argv[1]))
        sys.exit(0)
    for line in sys.stdin:
        print(json.dumps(outcome(json.loads(line))), flush=True)
