"""A pipeline over two hosts: network namespaces with two ranks each, pp 2 x dp 2, so that each host has a stage."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.two_hosts import RANKS, SAVED, STEPS, Hosts, why_no_hosts

WORLD = 2 * RANKS
# Four programs begin in each launch; other tests have the cores, too.
LAUNCH_SECONDS = 280.0
# Until the ranks of the other host are told: a host without signs of life is found after seconds.
TOLD_SECONDS = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    with Hosts() as hosts:
        yield hosts


def read(folder: Path, verb: str, rank: int) -> dict[str, object]:
    """What a rank has left."""
    found: dict[str, object] = json.loads((folder / f"{verb}-rank{rank}.json").read_text())
    return found


@pytest.mark.matrix
def test_two_hosts_train_save_and_go_on_from_what_they_saved(hosts: Hosts, tmp_path: Path) -> None:
    for verb in ("train", "resume"):
        ended = hosts.run(tmp_path, verb, timeout=LAUNCH_SECONDS)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    whole = [read(tmp_path, "train", rank) for rank in range(WORLD)]
    gone_on = [read(tmp_path, "resume", rank) for rank in range(WORLD)]
    losses = whole[0]["losses"]
    assert isinstance(losses, list) and len(losses) == STEPS
    assert all(each["losses"] == losses for each in whole)
    assert all(each["losses"] == losses[SAVED:] for each in gone_on)
    assert [each["digests"] for each in gone_on] == [each["digests"] for each in whole]


@pytest.mark.matrix
def test_a_host_that_is_gone_is_named_by_the_other(hosts: Hosts, tmp_path: Path) -> None:
    launchers = hosts.start(tmp_path, "wait")
    try:
        steps = [tmp_path / f"step-rank{rank}" for rank in range(WORLD)]
        until = time.monotonic() + LAUNCH_SECONDS
        while not all(path.exists() for path in steps):
            assert time.monotonic() < until and all(each.poll() is None for each in launchers), "no step was taken"
            time.sleep(0.1)
        killed = time.time()
        hosts.kill(hosts.names[1])
        for each in launchers:
            each.wait(TOLD_SECONDS)
    finally:
        for each in launchers:
            each.kill()
            each.wait()
    for rank in range(RANKS):
        told = read(tmp_path, "wait", rank)
        assert told["kind"] == "DesyncError", told
        assert any(f"rank {other} (pp 1, dp {other - RANKS})" in str(told["text"]) for other in (2, 3)), told
        assert float(str(told["time"])) - killed < TOLD_SECONDS, told
