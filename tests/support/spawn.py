"""Run a function in N real processes with the environment that torchrun would give them.

    values = run_ranks(train, 2, "nvme")              fresh processes, one call
    with RankPool(4) as pool:                         processes that live for many calls
        values = pool.run(train, "nvme")

`fn(rank, world_size, *args)` must be a top-level function of an importable module. Its values come back in rank order;
when a rank raises, dies or is late, all are killed and the caller gets RankError with the remote traceback. A process
group is the function's own affair: every call gets a fresh MASTER_PORT, and what a function left open is destroyed.
The default timeout is below pytest's own, which could not say which rank is late.

Ranks are forked from one server a test process, which has imported what they need: a start is a fork, and not
the nine seconds of a processor that these imports take. They have the caller's environment of that moment, but the
server's hash seed.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = ["infinity.engine.initialize", "transformers.models.llama.modeling_llama", "transformers.trainer"]
# Seconds between the request to end and the kill of a rank.
_EXIT_SECONDS = 5.0


class RankError(AssertionError):
    """Report a failed rank with its number and its traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 110) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in `world_size` fresh processes; return the values in rank order."""
    with RankPool(world_size) as pool:
        return pool.run(fn, *args, timeout=timeout)


class RankPool:
    """A pool of `world_size` processes that run one function after another and are replaced after a failure."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 110) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank; return the values in rank order."""
        # Pickled here, so that a function that cannot be pickled raises in the caller.
        task = pickle.dumps((fn, args))
        if not all(process.is_alive() for process, _ in self._ranks):
            self._kill()
        if not self._ranks:
            self._start()
        try:
            port = _free_port()
            for _, pipe in self._ranks:
                pipe.send((port, task))
            return self._collect(getattr(fn, "__qualname__", repr(fn)), time.monotonic() + timeout, timeout)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End the processes; kill those that do not end on request."""
        for _, pipe in self._ranks:
            try:
                pipe.send(None)
            except OSError:
                continue
        deadline = time.monotonic() + _EXIT_SECONDS
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        _start_server()
        for rank in range(self.world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(theirs, rank, self.world_size, dict(os.environ), _Output()), name=f"rank{rank}",
                daemon=True,
            )  # fmt: skip
            process.start()
            # The child holds the only other end, so that its death is an EOF here.
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, name: str, deadline: float, timeout: float) -> list[Any]:
        values: dict[int, Any] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise RankError(f"{name}: rank {late} of {self.world_size} gave no answer within {timeout:g} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    succeeded, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    process = self._ranks[rank][0]
                    process.join(_EXIT_SECONDS)
                    raise RankError(f"{name}: rank {rank} died with exit code {process.exitcode}") from None
                if not succeeded:
                    raise RankError(f"{name}: rank {rank} of {self.world_size} failed:\n{value}")
                values[rank] = value
        return [values[rank] for rank in range(self.world_size)]

    def _kill(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            process.close()
            pipe.close()
        self._ranks.clear()


class _Output:
    """Unpickled in a rank, it makes the starter's standard output and error the rank's, instead of the server's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _write_to, (reduction.DupFd(1), reduction.DupFd(2))


def _write_to(output: Any, error: Any) -> None:
    for number, end in ((1, output), (2, error)):
        taken = end.detach()
        os.dup2(taken, number)
        os.close(taken)


@functools.cache
def _start_server() -> None:
    """Start the process that ranks are forked from, with what is read from the environment once set for ranks."""
    for_ranks = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    before = {name: os.environ.get(name) for name in for_ranks}
    os.environ.update(for_ranks)
    multiprocessing.set_forkserver_preload(_IMPORTED)
    forkserver.ensure_running()
    for name, value in before.items():
        os.environ.pop(name)
        os.environ.update({} if value is None else {name: value})


def _serve(pipe: Connection, rank: int, world_size: int, environment: dict[str, str], _: None) -> None:
    """Serve tasks from the pipe as a rank until the other end is closed."""
    os.environ.clear()
    os.environ.update(environment)
    # Print the stack of a crash in native code.
    faulthandler.enable()
    # What the server has imported is no garbage: a search through all of it takes a fifth of a second.
    gc.freeze()
    of_rank = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in of_rank.items()})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message is None:
            return
        port, task = message
        os.environ["MASTER_PORT"] = str(port)
        try:
            # Unpickling imports the function's module, which can fail like the function itself.
            fn, args = pickle.loads(task)
            answer = (True, fn(rank, world_size, *args))
            _destroy_process_group()
            pipe.send(answer)
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _end_with_parent() -> None:
    """End this rank when the test run is killed, which it would not notice inside a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _destroy_process_group() -> None:
    """Close the process groups that the function left open, because the next call uses another port."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
