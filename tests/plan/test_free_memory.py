"""What a node has free: the system's word, and the control groups' limits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from estimators.estimate import Machine
from infinity.plan import capacity
from infinity.plan.capacity import free_cpu_nbytes

SYSTEM = 1_000_000


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """`groups(lines of /proc/self/cgroup, {file below the tree: text})` puts a made-up tree in place."""

    def make(lines: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        own = tmp_path / "self"
        own.write_text(lines)
        real = Path.read_text

        def read_text(path: Path, *rest: object, **named: object) -> str:
            return real(own if str(path) == "/proc/self/cgroup" else path, *rest, **named)

        monkeypatch.setattr(Path, "read_text", read_text)
        monkeypatch.setattr(capacity, "_CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=SYSTEM))

    return make


def test_version_1_counts_cache_as_free(groups):
    groups(
        "9:name=systemd:/\n4:cpu,memory:/job/7\n1:cpu:/\n",
        {
            "memory/job/7/memory.limit_in_bytes": "500000\n",
            "memory/job/7/memory.usage_in_bytes": "300000\n",
            "memory/job/7/memory.stat": "cache 9\ntotal_inactive_file 90000\ntotal_active_file 10000\n",
        },
    )
    assert free_cpu_nbytes() == 300_000


def test_version_2_counts_cache_as_free(groups):
    groups(
        "0::/slice/job\n",
        {
            "slice/job/memory.max": "500000\n",
            "slice/job/memory.current": "300000\n",
            "slice/job/memory.stat": "anon 1\ninactive_file 50000\nactive_file 50000\n",
        },
    )
    assert free_cpu_nbytes() == 300_000


def test_no_limit_leaves_what_the_system_has(groups):
    groups("0::/job\n", {"job/memory.max": "max\n", "job/memory.current": "300000\n"})
    assert free_cpu_nbytes() == SYSTEM


def test_the_largest_number_of_version_1_is_no_limit(groups):
    files = {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"}
    groups("4:memory:/\n", files)
    assert free_cpu_nbytes() == SYSTEM


def test_a_limit_of_a_group_above_counts(groups):
    groups(
        "0::/slice/job\n",
        {
            "slice/memory.max": "200000", "slice/memory.current": "150000",
            "slice/job/memory.max": "500000", "slice/job/memory.current": "100000",
        },
    )  # fmt: skip
    assert free_cpu_nbytes() == 50_000


@pytest.mark.parametrize("path", ["/docker/1234", "/../../1234"])
def test_in_a_container_the_top_of_the_tree_is_its_own_group(groups, path):
    files = {"memory/memory.limit_in_bytes": "500000", "memory/memory.usage_in_bytes": "100000"}
    groups(f"4:memory:{path}\n0::/\n", files)
    assert free_cpu_nbytes() == 400_000


def test_a_group_over_its_limit_has_nothing_free(groups):
    groups("0::/job\n", {"job/memory.max": "100", "job/memory.current": "300"})
    assert free_cpu_nbytes() == 0


@pytest.mark.parametrize("text", ["", "nonsense\n", "4:memory\n"])
def test_an_unreadable_tree_is_no_limit(groups, text):
    groups(text, {"memory.max": "not a number"})
    assert free_cpu_nbytes() == SYSTEM


def test_the_real_machine_has_free_memory():
    assert 0 < free_cpu_nbytes() <= psutil.virtual_memory().total


def test_the_estimators_machine_has_what_a_group_above_leaves(groups, tmp_path):
    groups(
        "0::/slice/job\n",
        {
            "slice/memory.max": "200000", "slice/memory.current": "150000", "slice/job/memory.max": "max",
            "slice/job/memory.current": "100000",
        },
    )  # fmt: skip
    assert Machine.here(tmp_path, accelerator=False).cpu_nbytes == 50_000
