"""The first run on an accelerator: what can be shown of it without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.memory.tiers.device import Device
from tests import first_run
from tests.support.accelerator.process import AcceleratedProcess
from tests.support.simulated_device import engines_use


def test_without_an_accelerator_it_says_so_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if Device.detect(0).is_accelerator:
        pytest.skip("this machine has one")
    assert first_run.main([]) == 2
    assert "no accelerator" in capsys.readouterr().out


def test_a_step_reports_its_status_and_one_that_cannot_run_its_reason() -> None:
    names = [step.name for step in first_run.steps(1)]
    assert names[0] == "tests marked gpu" and names[-1] == "peers"
    alone = next(step for step in first_run.steps(1) if step.name == "two devices")
    assert first_run.run(alone).status is None and "two devices" in first_run.run(alone).tail[0]
    failing = first_run.Step("fails", ("python3", "-c", "print('why'); raise SystemExit(3)"), {})
    assert (first_run.run(failing).status, first_run.run(failing).tail) == (3, ["why"])


def _on_the_simulated_device() -> dict[str, Any]:
    with engines_use():
        first_run.STEPS = 2
        return first_run.placements(workers=0)


@pytest.mark.matrix
def test_its_placements_have_one_hash_on_the_simulated_device(process: AcceleratedProcess) -> None:
    found = process.run(_on_the_simulated_device)
    assert len(found) == 30
    for dtype in ("fp32", "bf16"):
        assert len({digest for name, digest in found.items() if name.startswith(dtype)}) == 1


def _traced(folder: str) -> int:
    with engines_use():
        first_run.ROOT = Path(folder)
        return first_run.PARTS["trace"]()


@pytest.mark.matrix
def test_its_timeline_is_written(process: AcceleratedProcess, tmp_path: Path) -> None:
    assert process.run(_traced, str(tmp_path)) == 0
    events = json.loads((tmp_path / "runs" / "first_run.json").read_text())
    found = {event.get("name") for event in events}
    assert {"gathers: param of 0", "wait for copy from the device: grad of 15", "forward", "backward", "step"} <= found
