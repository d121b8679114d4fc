"""The walk of docs/architecture.md is the way that a step takes: its functions run, in the order of its rows."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import infinity
from tests.support.oracle import Case, settings
from tests.support.spawn import RankPool

ROOT = Path(infinity.__file__).parent
PAGE = ROOT.parent / "docs" / "architecture.md"
# The first row of a step, and what runs beside the program, at no certain moment.
FIRST = ("engine/engine.py", "forward")
BESIDE = {
    ("step/update.py", "run"), ("step/update.py", "update"), ("ops/adam.py", "adam_step"), ("memory/store.py", "flush"),
    ("memory/partition.py", "begin_flush"),
}  # fmt: skip


def walk() -> list[tuple[str, str]]:
    rows = re.findall(r"^\|[^|]*\| `(\w+)` \| `([\w/]+\.py)` \|", PAGE.read_text(encoding="utf-8"), re.M)
    return [(file, name) for name, file in rows]


def calls_of_a_step(rank: int, world: int, folder: str) -> tuple[list[tuple[str, str]], set[tuple[str, str]]]:
    """The functions of the walk in the order of their first calls by the program's thread in the second step, and those
    that other threads have called.
    """
    wanted, seen, beside = {*walk()}, list[tuple[str, str]](), set[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)):
            call = str(Path(path).relative_to(ROOT)), frame.f_code.co_name
            if threading.current_thread() is not threading.main_thread():
                beside.add(call)
            elif call in wanted and call not in seen:
                seen.append(call)

    case = Case()
    config = settings(Path(folder), param="nvme", optimizer="nvme", clip=1.0)
    engine, *_ = infinity.initialize(model=case.model(), config=config)
    # Of threads that begin from now on: the worker does in the first step.
    threading.setprofile(note)
    with engine, ExitStack() as undo:
        undo.callback(threading.setprofile, None)
        for step in range(2):
            sys.setprofile(note if step else None)
            try:
                for loss in case.losses(engine, step, 0):
                    engine.backward(loss)
                engine.step()
            finally:
                sys.setprofile(None)
        engine.synchronize()
    return seen, beside & wanted


def test_a_step_goes_the_way_that_the_page_says(tmp_path: Path, rank_pools: dict[int, RankPool]) -> None:
    rows = walk()
    expected = [row for row in rows[rows.index(FIRST) :] if row not in BESIDE]
    for seen, beside in rank_pools[2].run(calls_of_a_step, str(tmp_path)):
        assert [row for row in seen if row in expected] == expected
        assert beside >= BESIDE
