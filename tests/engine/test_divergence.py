"""Ranks that part, fail, end or stop: every rank raises in time, and names what each was doing. Nobody hangs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infinity.distributed import cma_transport, collectives
from infinity.distributed.consistency import agree_on_numbers
from infinity.distributed.groups import ProcessGroups, detect
from infinity.errors import DesyncError
from tests.engine.divergence_process import train
from tests.support.cells import kept
from tests.support.forked import in_child
from tests.support.spawn import run_ranks

ROOT = Path(__file__).parents[2]
# What "within seconds" is for a true mismatch, which no watchdog has to find; and beyond `watchdog_seconds` for a rank
# that is late. Generous: the ranks share two cores with other tests.
MISMATCH_SECONDS, LATE_SECONDS = 10.0, 5.0
LONG, SHORT = 300.0, 2.0
# The smallest row that ranks read from each other's memory: more than any of these models has, or every one.
SOCKETS, MEMORY = 1 << 30, 1
WAYS = pytest.mark.parametrize("smallest", kept([SOCKETS, MEMORY], [MEMORY]), ids=["sockets", "memory"])


def diverge(
    rank: int, world: int, case: str, watchdog: float, stage: int, smallest: int, drive: str = ""
) -> tuple[str, str, float]:
    """(kind of error, its text, seconds from the parting until this rank was through and closed)."""
    torch.set_num_threads(1)
    parted: list[float] = []
    kind, text = "none", ""
    try:
        with mock.patch.object(cma_transport, "SMALLEST_NBYTES", smallest):
            train(case, watchdog, parted, stage=stage, drive=drive)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, time.time() - parted[0]


def run(
    rank_pools: Any, case: str, watchdog: float = LONG, *, world: int = 2, stage: int = 3, smallest: int = SOCKETS,
    drive: str = "",
) -> list[tuple[str, str]]:  # fmt: skip
    """(kind of error, text) of each rank, none of which was late."""
    found = rank_pools[world].run(diverge, case, watchdog, stage, smallest, drive, timeout=60)
    limit = MISMATCH_SECONDS if watchdog == LONG else watchdog + LATE_SECONDS
    assert all(seconds < limit for *_, seconds in found), found
    return [row[:2] for row in found]


WORLDS = [2, pytest.param(4, marks=pytest.mark.matrix)]


@WAYS
@pytest.mark.parametrize(
    ("case", "theirs", "world"),
    [
        ("branch", "gather of second", 2),
        ("same size", "gather of second", 2),
        ("expert", "gather of experts.1", 2),
        pytest.param("expert", "gather of experts.1", 4, marks=pytest.mark.matrix),
    ],
)
def test_ranks_that_go_different_ways_name_each_others_module(rank_pools, case, theirs, world, smallest):
    found = run(rank_pools, case, world=world, smallest=smallest)
    for kind, text in found:
        assert kind == "DesyncError", text
        lines = {rank: next(line for line in text.splitlines() if f"  rank {rank} " in line) for rank in range(world)}
        assert f"for {theirs} (at " in lines.pop(1), text
        assert all("for reduction of second (at " in line for line in lines.values()), text
        assert text == found[0][1], "all ranks say the same"


@WAYS
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_ranks_that_drop_different_layers_raise_before_bytes_of_another_size_arrive(
    rank_pools, tier, smallest, tmp_path
):
    found = run(rank_pools, "drops", smallest=smallest, drive=str(tmp_path) if tier == "nvme" else "")
    for kind, text in found:
        assert kind == "DesyncError", text
        ours, theirs = re.findall(r"  rank [01]: (gather of dropped\.\d, \d+ bytes) \(number \d+\)", text)
        assert ours.split(",") != theirs.split(","), text
        assert text == found[0][1], "both ranks say the same"


@pytest.mark.parametrize(
    ("stage", "smallest"), kept([(1, SOCKETS), (1, MEMORY), (3, SOCKETS), (3, MEMORY)], [(1, SOCKETS), (3, MEMORY)])
)
def test_an_exception_on_one_rank_ends_the_others_with_its_traceback(rank_pools, stage, smallest):
    other, own = run(rank_pools, "raises", stage=stage, smallest=smallest)
    assert own == ("ArithmeticError", "the batch of rank 1 is broken")
    assert other[0] == "DesyncError"
    assert "rank 1" in other[1] and "Traceback" in other[1] and "the batch of rank 1 is broken" in other[1]


@pytest.mark.parametrize("world", WORLDS)
def test_another_order_of_parameters_is_found_before_anything_is_trained(rank_pools, world):
    for kind, text in run(rank_pools, "order", world=world):
        assert kind == "DesyncError"
        assert "rank 0: first.up.weight [16, 16]" in text and "rank 1: second.up.weight [32, 16]" in text


@WAYS
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_sleeps_for_ever_ends_with_the_others(rank_pools, world, smallest):
    """The sleeper too, which is interrupted."""
    for kind, text in run(rank_pools, "sleeps", SHORT, world=world, smallest=smallest):
        assert kind == "DesyncError"
        assert "for rank 1 (watchdog_seconds is 2)" in text, text
        assert "rank 0 has waited" in text and "for gather of enter" in text, text
        assert "rank 1 is in the program's own code" in text and "in _leave" in text, "where it sleeps"


@WAYS
def test_a_rank_that_is_only_slow_is_waited_for(rank_pools, smallest):
    """Longer than any mismatch takes to be found."""
    assert [kind for kind, *_ in rank_pools[2].run(diverge, "slow", LONG, 3, smallest)] == ["none", "none"]


@WAYS
def test_a_rank_that_has_closed_its_engine_is_named(rank_pools, smallest):
    """Such as one whose data end earlier."""
    other, _ = run(rank_pools, "closes", smallest=smallest)
    assert other[0] == "DesyncError" and "rank 1 has closed its engine" in other[1]


def told_of_a_killed_one(rank: int, world: int, smallest: int) -> tuple[str, float]:
    """What rank 0 is told when the process of rank 1 is killed, and after how long."""
    if rank == 0:
        _, text, seconds = diverge(rank, world, "killed", LONG, 3, smallest)
        return text, seconds
    with pytest.raises(AssertionError, match=f"ended with -{signal.SIGKILL.value}"):
        in_child(lambda: diverge(rank, world, "killed", LONG, 3, smallest), seconds=60)
    return "", 0.0


@WAYS
def test_a_process_that_is_killed_takes_the_others_with_it(smallest):
    text, seconds = run_ranks(told_of_a_killed_one, 2, smallest)[0]
    assert "rank 1 gives no sign of life" in text and seconds < MISMATCH_SECONDS + 2.0, (text, seconds)


@WAYS
def test_a_program_that_ends_takes_the_others_with_it(smallest):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT,
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.engine.divergence_process", "user raises", str(LONG), str(smallest)]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **{name: str(value) for name, value in environment.items()}},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        out, errors = ranks[0].communicate(timeout=60)
        ended = time.time()
        ranks[1].wait(timeout=MISMATCH_SECONDS)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[0].returncode == 1
    assert ended - float(out.split()[0]) < MISMATCH_SECONDS + 2.0
    assert "DesyncError" in errors and "the data of rank 1 are" in errors and "rank 1" in errors, errors


def take_part(rank: int, world: int, kinds: Sequence[str], numels: Sequence[int], smallest: int) -> str:
    """What a rank is told when one half of the ranks takes part in another collective than the other half. It comes to
    the step if it can.
    """
    groups = ProcessGroups(detect(), timeout_seconds=60)
    half = 2 * rank // world
    kind, full, name = kinds[half], torch.zeros(numels[half]), f"{kinds[half]} of layers.{half}"
    try:
        with mock.patch.object(cma_transport, "SMALLEST_NBYTES", smallest):
            if kind == "gather":
                collectives.all_gather(full, torch.ones(len(full) // world), groups.data, name).wait()
            elif kind == "reduction":
                collectives.reduce_scatter(full, group=groups.data, name=name).wait()
            elif kind == "sum":
                collectives.all_reduce(full, groups.data, name).wait()
            else:
                collectives.broadcast(full, groups.data, name=name)
        agree_on_numbers([1.0], groups.world, "exchange")
    except DesyncError as error:
        return str(error)
    finally:
        groups.close()
        dist.destroy_process_group()
    return ""


@WAYS
@pytest.mark.parametrize(
    ("numels", "world"),
    [
        pytest.param((4, 12), 2, id="more"),
        pytest.param((12, 4), 2, id="fewer", marks=pytest.mark.matrix),
        pytest.param((4, 4), 2, id="equal", marks=pytest.mark.matrix),
        pytest.param((4, 12), 4, id="halves", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize(
    "kinds",
    [("gather",) * 2, ("reduction",) * 2, ("sum",) * 2, ("broadcast",) * 2, ("gather", "reduction"), ("sum", "gather")],
    ids="-".join,
)
def test_collectives_of_different_units_exchange_nothing_and_are_named(rank_pools, kinds, numels, world, smallest):
    for text in rank_pools[world].run(take_part, kinds, numels, smallest):
        # Ranks that have not waited for long say nothing yet.
        said = re.findall(r"  rank \d: (.+) \(number 1\)", text)
        assert set(said) == {f"{kinds[half]} of layers.{half}, {4 * numels[half]} bytes" for half in range(2)}, text


def test_what_did_not_hang_is_found_at_the_step(rank_pools):
    """Units without an element: no rank waits for another."""
    for text in rank_pools[2].run(take_part, ("gather", "gather"), (0, 0), SOCKETS):
        assert "not taken" in text, text
        assert all(f"rank {rank}: gather of layers.{rank}, 0 bytes (number 1)" in text for rank in range(2)), text
