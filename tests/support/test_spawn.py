"""Claims about the tests' processes: values return in order, failures with their traceback, no process remains."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch
import torch.distributed

from tests.support.spawn import RankError, RankPool, run_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")


def environment(rank: int, world_size: int) -> tuple[list[str], int]:
    return [os.environ[name] for name in NAMES], int(os.environ["MASTER_PORT"])


def pid(rank: int, world_size: int) -> int:
    return os.getpid()


def summed(rank: int, world_size: int, value: int) -> float:
    torch.distributed.init_process_group("gloo")
    total = torch.tensor(float(value + rank))
    torch.distributed.all_reduce(total)
    return total.item()


def fail_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {rank} says no")
    time.sleep(60)


def die(rank: int, world_size: int) -> None:
    os._exit(7)


def sleep(rank: int, world_size: int) -> None:
    time.sleep(60)


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as ranks:
        yield ranks


def test_ranks_see_the_environment_of_torchrun():
    (values, port), = run_ranks(environment, 1)  # fmt: skip
    assert values == ["0", "1", "0", "1", "127.0.0.1", "1"]
    assert port > 0


def test_values_come_back_in_rank_order(pool):
    assert [values[0] for values, _ in pool.run(environment)] == ["0", "1"]


def test_a_process_group_left_open_does_not_disturb_the_next_call(pool):
    assert pool.run(summed, 1) == [3.0, 3.0]
    assert pool.run(summed, 5) == [11.0, 11.0]


def test_processes_are_reused_between_calls(pool):
    assert pool.run(pid) == pool.run(pid)


def test_a_failure_carries_the_remote_traceback_and_does_not_wait_for_the_others(pool):
    before = pool.run(pid)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed.*ValueError: rank 1 says no"):
        pool.run(fail_on, 1)
    assert time.monotonic() - began < 20
    assert not any(psutil.pid_exists(process) for process in before)
    assert not set(pool.run(pid)) & set(before)


def test_a_dead_rank_is_an_error(pool):
    with pytest.raises(RankError, match="exit code 7"):
        pool.run(die)


def test_a_late_rank_is_killed(pool):
    before = pool.run(pid)
    with pytest.raises(RankError, match=r"rank \[0, 1\] of 2 gave no answer within 0.5 s"):
        pool.run(sleep, timeout=0.5)
    assert not any(psutil.pid_exists(process) for process in before)


def test_closing_leaves_no_process():
    with RankPool(1) as ranks:
        (process,) = ranks.run(pid)
    assert not psutil.pid_exists(process)
