"""What an engine takes it gives back: memory, descriptors, threads, files. Engines and jobs leave each other alone."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity.engine.build_runtime
from infinity.engine import runtime
from infinity.errors import InfinityError
from infinity.plan.capacity import addressable_nbytes
from infinity.zero.materialize import Materializer
from tests.support.cells import kept
from tests.support.models import token_batch
from tests.support.oracle import CLIP, Case, Result, collect, join, settings, swap_files, train
from tests.support.spawn import run_ranks

ROOT = Path(__file__).parents[2]


def resources() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    kinds = {"descriptors": "/proc/self/fd", "threads": "/proc/self/task"}
    held = {name: len(os.listdir(folder)) for name, folder in kinds.items()}
    return {**held, "resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")}


def cycles(rank: int, world: int, folder: str, count: int) -> list[tuple[dict[str, int], float, str]]:
    """Resources after each create, train, close; the seconds it took; the digest."""
    join(world)
    found = []
    for _ in range(count):
        began = time.process_time()
        config = settings(folder, param="nvme", optimizer="nvme", dtype="bf16", clip=CLIP)
        digest = train(Case(), config, rank=rank, steps=2).digest
        found.append((resources(), time.process_time() - began, digest))
    return found


def test_free_pages_of_the_heap_go_back_only_where_memory_is_tight(tmp_path, monkeypatch):
    """Behind each forward, backward and step: a heap with small blocks that live on grows beyond the forecast."""
    trimmed: list[None] = []
    monkeypatch.setattr(runtime, "trim", lambda: trimmed.append(None))
    config = settings(tmp_path, param="nvme", optimizer="nvme")
    held: list[int] = []
    train(Case(), config, steps=2, look=lambda engine: held.append(addressable_nbytes(engine.plan.nbytes_by_tier())))
    # An engine that is closed has it done once.
    assert len(trimmed) == 1
    for share, count in ((0.5, 0), (0.95, 3 * 2)):
        trimmed.clear()
        given = {**config, "memory": {"cpu": {"max_bytes": int(held[0] / share)}, "activations": {"max_bytes": 1}}}
        train(Case(), given, steps=2)
        assert len(trimmed) == count + 1


@pytest.mark.slow
@pytest.mark.parametrize("world", kept([1, 2], [1]))
def test_ten_cycles_hold_nothing(rank_pools, tmp_path, world):
    """Create, train and close; also no step slower than at the start, in seconds of this process."""
    for rows in rank_pools[world].run(cycles, str(tmp_path), 11):
        first, last = rows[0], rows[-1]
        assert abs(last[0]["resident"] - first[0]["resident"]) < 20e6, rows
        # gloo's own threads end, and its sockets close, a moment after their group.
        for what in ("threads", "descriptors"):
            counts = [row[0][what] for row in rows]
            assert min(counts[-3:]) <= max(counts[:3]), counts
        assert len({digest for *_, digest in rows}) == 1
        early, late = sorted(row[1] for row in rows[1:5]), sorted(row[1] for row in rows[-4:])
        assert late[0] < 3 * early[0] + 0.1, "the same work takes ever longer"
    assert swap_files(tmp_path) == []


def without_own_group(rank: int, world: int, folder: str) -> list[str]:
    """Engines that open and close the process group themselves, one after the other."""
    torch.set_num_threads(1)
    config = settings(folder, param="nvme", optimizer="nvme")
    digests = []
    for _ in range(3):
        # Rank 1 is through first and opens the next group while rank 0 still has the last one.
        result = train(Case(), config, rank=rank, steps=1, look=lambda _: time.sleep(0.0 if rank else 0.5))
        digests.append(result.digest)
    return digests


@pytest.mark.slow
def test_ranks_make_engines_one_after_the_other(rank_pools, tmp_path):
    """Also where the program never opens a process group."""
    digests = rank_pools[2].run(without_own_group, str(tmp_path), timeout=60)
    assert len({digest for ranks in digests for digest in ranks}) == 1


class Broken(Exception):
    """Raised on purpose."""


@pytest.mark.parametrize("place", ["materialise", "after the file", "scheduler"])
def test_a_failed_initialize_cleans_up(tmp_path, monkeypatch, place):
    def fail(*_: Any, **__: Any) -> Any:
        raise Broken(place)

    def start(**given: Any) -> None:
        model = Case().model()
        config = settings(tmp_path, param="nvme", optimizer="nvme")
        infinity.initialize(model=model, config=config, model_parameters=Case().groups(model), **given)[0].close()

    start()
    before = resources()
    for _ in range(3):
        with monkeypatch.context() as patch:
            if place == "materialise":
                patch.setattr(Materializer, "_fill_group", fail)
            elif place == "after the file":
                patch.setattr(infinity.engine.build_runtime, "ModuleHooks", fail)
            with pytest.raises(Broken):
                start(**({"lr_scheduler": fail} if place == "scheduler" else {}))
        after = resources()
        assert swap_files(tmp_path) == []
        assert (after["descriptors"], after["threads"]) == (before["descriptors"], before["threads"])
    start()


def test_a_model_whose_initialize_failed_is_named(tmp_path, monkeypatch):
    """Its values are partly gone, so a second try is refused or works; it never trains on garbage."""

    def fail(*_: Any, **__: Any) -> Any:
        raise Broken

    model = Case().model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(infinity.engine.build_runtime, "ModuleHooks", fail)
        with pytest.raises(Broken):
            infinity.initialize(model=model, config=settings(tmp_path, param="nvme", optimizer="nvme"))
    try:
        engine, *_ = infinity.initialize(model=model, config=settings(tmp_path, param="nvme", optimizer="nvme"))
    except InfinityError:
        return
    with engine:
        for name, param in model.named_parameters():
            assert torch.equal(infinity.state(param).master, before[name]), name


TRAIN_FOR_EVER = """
import sys
from tests.support.oracle import Case, settings, train
def forever(engine, loss):
    engine.backward(loss)
    if engine.global_steps == 2:
        print("training", flush=True)
train(Case(), settings(sys.argv[1], param="nvme", optimizer="nvme"), steps=10**9, backward=forever)
"""


def background(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process that can import the tests."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


@pytest.mark.slow
def test_what_a_killed_process_leaves_goes_at_the_next_start(tmp_path):
    process = background(TRAIN_FOR_EVER, str(tmp_path))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        (left,) = swap_files(tmp_path)
        # A second engine starts beside the living one and leaves its file alone.
        beside = train(Case(), settings(tmp_path, param="nvme", optimizer="nvme"), steps=2).digest
        assert swap_files(tmp_path) == [left]
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    assert swap_files(tmp_path) == [left], "a killed process cannot clean up"
    foreign = tmp_path / "notes.bin"
    foreign.write_text("not ours")
    during: list[Path] = []
    config = settings(tmp_path, param="nvme", optimizer="nvme")
    again = train(Case(), config, steps=2, look=lambda _: during.extend(swap_files(tmp_path)))
    assert again.digest == beside
    assert left not in during and foreign in during and len(during) == 2
    assert swap_files(tmp_path) == [foreign]


def test_two_engines_in_one_process_do_not_disturb_each_other(tmp_path):
    """In turns, on one folder; the second is closed first."""
    configs = [settings(tmp_path, param="nvme", optimizer="nvme", dtype=dtype) for dtype in ("fp32", "bf16")]
    alone = [train(Case(), config, steps=4).digest for config in configs]
    engines = []
    for config in configs:
        model = Case().model()
        engines.append(
            infinity.initialize(model=model, config=config, model_parameters=Case().groups(model))[0]
        )
    assert len(swap_files(tmp_path)) == 2
    for micro in range(4):
        losses = [engine(**token_batch(0, micro, positions=8)) for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in reversed(engines):
            engine.step()
    results = [Result(), Result()]
    for engine, result in zip(reversed(engines), reversed(results), strict=True):
        collect(engine, result)
        engine.close()
    assert [result.digest for result in results] == alone
    assert swap_files(tmp_path) == []


def job(rank: int, world: int, folder: str) -> str:
    """Train as a program of one rank of its own."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(1)
    return train(Case(), settings(folder, param="nvme", optimizer="nvme"), steps=20).digest


@pytest.mark.slow
def test_two_jobs_on_one_folder_do_not_disturb_each_other(tmp_path):
    """They start at the same time."""
    assert run_ranks(job, 2, str(tmp_path)) == [job(0, 1, str(tmp_path))] * 2
    assert swap_files(tmp_path) == []


DROPPED = """
import gc, sys
import infinity.engine.initialize
from tests.support.models import token_batch
from tests.support.oracle import Case, settings
def make():
    model = Case().model()
    engine, *_ = infinity.initialize(model=model, config=settings(sys.argv[1], param="nvme", optimizer="nvme"))
    for micro in range(2):
        engine.backward(engine(**token_batch(0, micro)))
        engine.step()
    return engine
engine = make()
if sys.argv[2] == "in a step":
    loss = engine(**token_batch(0, 9))
if sys.argv[2] == "dropped":
    del engine
    gc.collect()
    make().close()
print("end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", kept(["dropped", "alive at the end", "in a step"], ["in a step"]))
def test_an_engine_that_is_never_closed_does_not_break_the_exit(tmp_path, how):
    process = background(DROPPED, str(tmp_path), how)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "end\n"), err
    assert "Traceback" not in err and "Fatal" not in err and "Exception ignored" not in err, err
    train(Case(), settings(tmp_path, param="nvme", optimizer="nvme"), steps=1)
    assert swap_files(tmp_path) == []
