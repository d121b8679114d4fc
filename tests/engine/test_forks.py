"""A process forked while an engine is open: it has nothing of the engine's, is told so, and ends without a trace.

See [Note: forks] in `infinity.memory.resizable_buffer`. A data loader's worker is such a child.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import infinity
from infinity.distributed.watchdog import leave
from infinity.engine import Engine
from infinity.errors import StateError
from infinity.memory.transaction import Reservation
from tests.engine.test_hygiene import background
from tests.support.forked import in_child
from tests.support.models import mlp, vector_batch

# Stage and home of parameters and optimizer states.
PLACES = [(0, "none"), (2, "none"), (3, "none"), (3, "cpu"), (3, "nvme")]
places = pytest.mark.parametrize(("stage", "home"), PLACES)


@contextmanager
def trained(folder: Path, stage: int, home: str, **more: Any) -> Iterator[Engine]:
    """An engine that has done a step, on a model of which a unit lies in large pages."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        where = {"device": home, **({"nvme_path": str(folder)} if home == "nvme" else {})}
        zero |= {"offload_param": where, "offload_optimizer": where, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": zero,
        "bf16": {"enabled": False}, **more,
    }  # fmt: skip
    model = mlp()
    model.wide = nn.Linear(1024, 1024)
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        step(engine, 0)
        yield engine


def step(engine: Engine, number: int) -> None:
    engine.backward(engine(**vector_batch(0, number)))
    engine.step()


@places
def test_a_parameter_read_in_a_child_says_whose_it_is(tmp_path, stage, home):
    with trained(tmp_path, stage, home) as engine:
        for name in ("wide.weight", "enter.weight", "leave.bias"):
            param = engine.module.get_parameter(name)
            with pytest.raises(StateError, match=f"{name}.*belongs to process {os.getpid()}.*state_dict"):
                in_child(lambda param=param: float(param.sum()))
            assert in_child(lambda param=param: tuple(param.shape)) == tuple(param.shape)
        step(engine, 1)


USES: dict[str, Callable[[Engine], Any]] = {
    "forward": lambda engine: engine(**vector_batch(0, 1)),
    "forward of the module": lambda engine: engine.module(**vector_batch(0, 1)),
    "step": lambda engine: engine.step(),
    "state_dict": lambda engine: engine.state_dict(),
    "save_checkpoint": lambda engine: engine.save_checkpoint("unused"),
    "read": lambda engine: infinity.read(engine.module).__enter__(),
    "state": lambda engine: infinity.state(engine.module.enter.weight).exp_avg,
    "synchronize": lambda engine: engine.synchronize(),
}


@places
def test_every_verb_in_a_child_says_so(tmp_path, stage, home):
    with trained(tmp_path, stage, home) as engine:
        for use in USES.values():
            with pytest.raises(StateError, match=f"belongs to process {os.getpid()}"):
                in_child(lambda use=use: use(engine))
        step(engine, 1)


@places
def test_close_in_a_child_returns_at_once_and_takes_nothing(tmp_path, stage, home):
    """Also while a thread of the parent's has the store's lock, which in the child nobody ever gives back."""
    with trained(tmp_path, stage, home) as engine:
        files = sorted(tmp_path.iterdir())
        with engine.store._lock:
            in_child(engine.close)
            in_child(lambda: engine.__exit__(None, None, None))
        assert sorted(tmp_path.iterdir()) == files
        step(engine, 1)


ENDS = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from infinity.distributed.groups import Ranks, open_group
from tests.engine.test_forks import step, trained
open_group(Ranks())
with trained(Path(sys.argv[1]), 3, "nvme") as engine:
    for number, how in enumerate(("close", "exit", "error")):
        # A step goes on behind the program in a thread that the child has not.
        step(engine, number)
        child = os.fork()
        if not child:
            if how == "close":
                engine.close()
            if how == "error":
                raise RuntimeError("the child's own")
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    engine.state_dict()
    print("parent", len(list(Path(sys.argv[1]).iterdir())), dist.is_initialized(), flush=True)
"""


def test_a_child_forked_behind_a_step_ends_as_any_process(tmp_path):
    """By the end of the program, through the engine's `with` and all that is registered for the end."""
    process = background(ENDS, str(tmp_path))
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert out.split("\n")[:-1] == ["0", "0", "1", "parent 1 True"], err
    assert process.returncode == 0 and list(tmp_path.iterdir()) == []
    assert err.count("Traceback") == 1 and "the child's own" in err, err


class Rows(Dataset[Any]):
    """Batches for workers; `model` is what a careless data set refers to."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._model is not None:
            self._model.get_parameter("enter.weight").sum()
        return {name: value[0] for name, value in vector_batch(0, index).items()}

    def __len__(self) -> int:
        return 8


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@places
def test_workers_of_a_data_loader_serve_a_run(tmp_path, stage, home):
    with trained(tmp_path, stage, home) as engine:
        loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            engine.backward(engine(**batch))
            engine.step()
        assert engine.global_steps == 3


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_whose_data_set_reads_the_model_says_what_is_wrong(tmp_path):
    with trained(tmp_path, 3, "cpu") as engine:
        loader = DataLoader(Rows(engine.module), batch_size=4, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(StateError, match=r"enter.weight.*belongs to process"):
            next(iter(loader))
        step(engine, 1)


def test_weights_of_a_closed_engine_are_the_programs_in_a_child_too(tmp_path):
    with trained(tmp_path, 0, "none") as engine:
        pass
    weight = engine.module.wide.weight.detach()
    assert in_child(lambda: float(weight[-1, -1])) == float(weight[-1, -1])


def test_a_child_trains_an_engine_of_its_own(tmp_path):
    def act() -> int:
        with trained(tmp_path, 3, "nvme") as own:
            return own.global_steps

    with trained(tmp_path, 3, "nvme") as engine:
        assert in_child(act, seconds=60) == 1
        step(engine, 1)


def test_a_signal_that_the_engine_waits_for_ends_a_child_at_once(tmp_path):
    """A worker is ended by SIGTERM; it has no step after which it would look."""
    section = {"path": str(tmp_path), "on_signal": ["SIGTERM"]}
    ended = pytest.raises(AssertionError, match=f"ended with -{signal.SIGTERM.value}")
    with trained(tmp_path, 3, "cpu", checkpoint=section), ended:
        in_child(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(10)))


def test_a_reservation_in_a_child_is_refused(tmp_path):
    with trained(tmp_path, 3, "nvme") as engine:
        keys = list(engine.store.keys())
        with pytest.raises(StateError, match="belongs to process"):
            in_child(lambda: engine.store.access.reserve(Reservation(), keys[0]))


def of_two_ranks(rank: int, world: int, folder: str) -> list[float]:
    """Children of rank 0 that end in every way, between steps of both ranks."""
    losses = []
    with trained(Path(folder), 3, "nvme") as engine:
        for number in range(1, 4):
            if rank == 0:
                error = RuntimeError("the child's own")
                in_child(engine.close)
                in_child(lambda error=error: engine.__exit__(RuntimeError, error, None))
                in_child(lambda error=error: engine.groups.failed(error))
                in_child(leave)
            loss = engine(**vector_batch(rank, number))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def test_a_child_is_no_rank(rank_pools, tmp_path):
    """Whatever becomes of it, the other ranks are told nothing, and go on; in a second engine of the process, too."""
    for _ in range(2):
        found = rank_pools[2].run(of_two_ranks, str(tmp_path), timeout=100)
        assert [len(losses) for losses in found] == [3, 3]
