"""The pool of threads keeps to a rank's cores, and a caller leaves them again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infinity.ops import adam, cores
from infinity.ops.adam import adam_step
from infinity.ops.rules import AdamHyper, Piece

native = pytest.mark.skipif(not adam.simds(), reason="no native library here")


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    adam.set_threads(None)


def _piece(numel: int = 300_000) -> Piece:
    # Torch may start threads of its own here.
    tensors = [torch.randn(numel), torch.randn(numel), torch.zeros(numel), torch.zeros(numel)]
    return Piece(*tensors, hyper=AdamHyper(1e-3, 0.9, 0.999, 1e-8, 0.1, adamw=True))


def _step(piece: Piece) -> None:
    adam_step([piece], step=1, grad_scale=1.0, native=True)


def _masks() -> dict[int, set[int]]:
    return {int(task): os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}


@native
def test_threads_keep_to_their_cores_and_the_caller_is_let_go() -> None:
    adam.shutdown_threads()
    piece = _piece()
    before = _masks()
    core = max(cores.allowed_cores())
    adam.set_threads(3, [core])
    _step(piece)
    after = _masks()
    assert {task: mask for task, mask in after.items() if task in before} == before
    assert [mask for task, mask in after.items() if task not in before] == [{core}] * 2


@native
def test_a_caller_that_may_run_elsewhere_only_is_put_back_there() -> None:
    allowed = cores.allowed_cores()
    if len(allowed) < 2:
        pytest.skip("one core only")
    adam.set_threads(2, [allowed[0]])
    os.sched_setaffinity(0, {allowed[1]})
    try:
        _step(_piece())
        assert os.sched_getaffinity(0) == {allowed[1]}
    finally:
        os.sched_setaffinity(0, allowed)


def test_cores_of_others_are_refused() -> None:
    for wrong in ([], [10_000], [*cores.allowed_cores(), -1]):
        with pytest.raises(ValueError, match="are not among those of this process"):
            adam.set_threads(2, wrong)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_the_cores_without_overlap(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(3, 16)})
    shares = [cores.share_of_cores(index, ranks) for index in range(ranks)]
    assert sorted(core for share in shares for core in share) == list(range(3, 16))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    # More ranks than cores: one core each, by turns.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert [cores.share_of_cores(index, 6) for index in range(6)] == [[4], [5], [6], [7], [4], [5]]
    with pytest.raises(ValueError, match="is not among"):
        cores.share_of_cores(ranks, ranks)


def test_a_rank_that_its_launcher_bound_keeps_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 9, 10, 11})
    assert cores.share_of_cores(2, 4) == [8, 9, 10, 11]


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("files", "quota"), [
    ({}, None),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    # The narrowest level counts, also where the process's own says nothing.
    ({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/cpu.max": "300000 100000\n",
      "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n"}, 3.0),
    # In a container the path is the host's, and only the top is mounted.
    ({"proc/self/cgroup": "0::/kubepods/one\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
    ({"proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n",
      "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "50000\n",
      "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n"}, 0.5),
    ({"proc/self/cgroup": "5:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "what\n"}, None),
])  # fmt: skip
def test_the_quota_of_a_container_is_found(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    root = _write(tmp_path, files)
    assert cores.quota_cores(root) == quota
    expected = 8 if quota is None else max(1, -int(-quota // 1))
    assert cores.thread_count(8, root=root) == expected
    assert cores.thread_count(8, ranks=4, root=root) == (8 if quota is None else 1)
