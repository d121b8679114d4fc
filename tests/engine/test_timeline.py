"""A timeline of a step: it adds up, its bytes are the plan's, it opens, and it changes nothing."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.base import trace
from infinity.errors import ConfigError
from infinity.memory.tiers.nvme import NvmeTier
from infinity.observability.timeline import OUTSIDE, Bar, Timeline, TimelineRow, flatten
from tests.support.models import token_batch
from tests.support.oracle import Case, join, settings, train

NVME = {"param": "nvme", "optimizer": "nvme", "dtype": "bf16", "clip": 1.0}


@pytest.fixture
def idle():
    """Nothing is recorded before and after."""
    assert trace.span(trace.WAIT, "x") is trace.span(trace.WAIT, "y"), "somebody records"
    yield
    assert trace.span(trace.WAIT, "x") is trace.span(trace.WAIT, "y"), "somebody still records"


class Wide(nn.Module):
    """Steps long enough that what lies between two lines of Python does not show."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(768, 768, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.float().square().mean()


# A timeline, the plan of its engine, and the seconds that the step took by the test's own clock.
Recorded = tuple[Timeline, Any, float]


def recorded(folder: Path, *paths: Path | None, **more: Any) -> list[Recorded]:
    """Warm steps of `Wide` with everything on NVMe, all that they write included: one for each path."""
    zero = {"sub_group_size": 400_000, "stage3_prefetch_bucket_size": 700_000, "stage3_max_reuse_distance": 0}
    config = settings(folder, **{**NVME, **more}, zero=zero)
    x, found = torch.ones(256, 768, dtype=torch.bfloat16), []
    with infinity.initialize(model=Wide(), config=config)[0] as engine:
        for _ in range(4):
            engine.backward(engine(x))
            engine.step()
        for path in paths:
            engine.synchronize()
            engine.store.settle()
            with engine.timeline(path) as timeline:
                began = time.perf_counter()
                engine.backward(engine(x))
                engine.step()
                seconds = time.perf_counter() - began
                engine.synchronize()
                engine.store.settle()
            engine.store.check()
            found.append((timeline, engine.plan, seconds))
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """Recordings of three steps: kept in memory, written as a trace, written as a page."""
    folder = tmp_path_factory.mktemp("recorded")
    return recorded(folder, None, folder / "traces" / "step.json", folder / "step.html")


@pytest.mark.usefixtures("idle")
def test_computing_copying_and_waiting_are_the_steps_time(three):
    timeline, _, seconds = three[0]
    found = timeline.summary()
    explained = found["compute"] + found["copy"] + found["engine"] + sum(found["waits"].values())
    assert explained + found[OUTSIDE] == pytest.approx(found["seconds"], rel=1e-6), "nothing twice, nothing left out"
    program = timeline.lane("program").bars
    assert all(before.end == after.begin for before, after in pairwise(program))
    # What the test does after the step lies behind its last phase.
    end = max(bar.end for bar in timeline.lane("phases").bars)
    inside = sum(bar.end - bar.begin for bar in program if bar.end <= end and bar.what != OUTSIDE) / 1e9
    assert inside == pytest.approx(seconds, rel=0.05), found
    assert found["compute"] > 0 and found["copy"] > 0
    assert [bar.cause for bar in timeline.lane("phases").bars] == ["forward", "backward", "step"]
    assert str(timeline).startswith(f"{timeline.seconds:.3f} s: computing ")


@pytest.mark.usefixtures("idle")
def test_the_lanes_bytes_are_what_the_plan_moves(three):
    """Each sub-group and each unit's parameters are written once; states are read once, parameters as often as they are
    gathered and stepped, where the arena does not hold them.
    """
    timeline, plan, _ = three[0]
    states = sum(spec.nbytes for spec in plan.partitions if spec.key.kind.value == "states")
    params = sum(spec.nbytes for spec in plan.partitions if spec.key.kind.value == "param")
    writes, reads = timeline.lane("NVMe writes"), timeline.lane("NVMe reads")
    assert sum(bar.nbytes for bar in writes.bars if bar.over) == states + params
    assert 0 < sum(bar.nbytes for bar in reads.bars) <= states + 3 * params
    assert {bar.subject.partition(":")[0] for bar in writes.bars if "states" in bar.subject} <= {
        f"states of sub-group {group.index}" for group in plan.sub_groups
    }
    assert any("layers.3" in bar.subject for bar in reads.bars), "units by their names"
    for lane in (reads, writes):
        assert all(0 <= bar.begin <= bar.end <= timeline.seconds * 1e9 for bar in lane.bars)
        assert 0 < lane.busy <= timeline.seconds * 1e9
    gathered = [bar.subject for bar in timeline.lane("gathers").bars]
    assert len(gathered) >= 8 and len(timeline.lane("modules, backward").bars) >= 8
    thread = timeline.lane("optimizer thread")
    stepped = {bar.subject for bar in thread.bars if bar.cause == "optimizer"}
    assert len(stepped) == len(plan.sub_groups)


class SlowDrive:
    """Reads of the tier take `seconds` longer, so that the program has something to wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        submit = NvmeTier.read

        def read(tier: NvmeTier, *arguments: Any, **named: Any) -> Any:
            transfer = submit(tier, *arguments, **named)
            wait = transfer.wait

            class Late:
                def done(self) -> bool:
                    return False if not self.over else transfer.done()

                def wait(self) -> None:
                    time.sleep(seconds)
                    self.over = True
                    wait()

                over = False

            return Late()

        monkeypatch.setattr(NvmeTier, "read", read)


@pytest.mark.usefixtures("idle")
def test_a_slow_drive_is_what_the_step_waits_for(tmp_path, monkeypatch):
    # So slow that no write beside other tests takes as long.
    SlowDrive(monkeypatch, 0.05)
    ((timeline, *_),) = recorded(tmp_path, None, overlap=False)
    found = timeline.summary()
    cause, seconds = next(iter(found["waits"].items()))
    reads = len(timeline.lane("NVMe reads").bars)
    assert cause == "NVMe read" and seconds >= 0.05 * reads >= 0.05 * 16
    assert f"waiting {sum(found['waits'].values()) / found['seconds']:.0%} (NVMe read" in str(timeline)


@pytest.mark.usefixtures("idle")
def test_a_chrome_trace_is_one_that_perfetto_opens(three):
    """The fields and phases of the Trace Event Format; bars of a thread nest or do not touch."""
    timeline, *_ = three[1]
    events = json.loads(timeline.path.read_text())
    assert isinstance(events, list) and {event["ph"] for event in events} == {"M", "X", "C"}
    assert {event["pid"] for event in events} == {0}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"program", "optimizer thread", "NVMe reads", "NVMe writes"} <= set(names.values())
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["name"] and event["cat"]
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(rows) == set(names)
    for bars in rows.values():
        bars.sort()
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(bars))
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} >= {"memory: cpu", "memory: nvme", "memory: pools"}
    assert all(isinstance(value, int) for event in counters for value in event["args"].values())
    begun = min(begin for bars in rows.values() for begin, _ in bars)
    assert abs(time.perf_counter() * 1e6 - begun) < 120e6, "one clock for every rank of a node"
    assert timeline.path.parts[-2:] == ("traces", "step.json")


@pytest.mark.usefixtures("idle")
def test_the_page_stands_alone(three):
    timeline, *_ = three[2]
    page = timeline.path.read_text()
    assert not re.search(r'(src|href)\s*=|https?://(?!www\.w3\.org/2000/svg")|@import|fetch\(', page)
    data = json.loads(re.search(r"const data = (.*);\n", page)[1].replace("<\\/", "</"))
    assert [lane["name"] for lane in data["lanes"]] == [lane.name for lane in timeline.lanes]
    bars = [bar for lane in data["lanes"] for row in lane["rows"] for bar in row]
    assert len(bars) == sum(len(lane.bars) for lane in timeline.lanes)
    assert all(0 <= bar[0] <= bar[1] <= data["end"] + 1 for bar in bars)
    assert {level[1] for level in data["levels"]} == {"gpu", "cpu", "nvme", "pools"}


def test_names_in_the_page_do_not_end_its_script(tmp_path):
    timeline = Timeline(tmp_path / "page.html")
    with timeline, trace.span(trace.WAIT, "a", "</script><b>"):
        time.sleep(0.001)
    assert "</script><b>" not in (tmp_path / "page.html").read_text()
    assert timeline.lane("program").bars[1].subject == "</script><b>"


@pytest.mark.usefixtures("idle")
def test_a_recording_does_not_change_a_bit(tmp_path):
    config = settings(tmp_path, **NVME)
    expected = train(Case(), config, steps=4).digest
    timed = {**config, "timeline": {"path": str(tmp_path / "two.html"), "step": 2}}
    assert train(Case(), timed, steps=4).digest == expected


@pytest.mark.usefixtures("idle")
def test_the_configuration_records_the_step_that_it_names(tmp_path):
    path = tmp_path / "third.json"
    config = settings(tmp_path / "nvme", **NVME, accumulation=2, timeline={"path": str(path), "step": 3})
    with infinity.initialize(model=Case().model(), config=config)[0] as engine:
        for micro in range(8):
            engine.backward(engine(**token_batch(0, micro, positions=8)))
            engine.step()
            assert path.exists() == (micro >= 5)
    events = json.loads(path.read_text())
    program = [event["tid"] for event in events if event.get("args", {}).get("name") == "phases"]
    phases = [event["name"] for event in events if event.get("tid") in program and event["ph"] == "X"]
    assert phases == ["forward", "backward", "forward", "backward", "step"]


def of_both_ranks(rank: int, world: int, folder: str) -> tuple[dict[str, Any], list[str], str]:
    join(world)
    path = Path(folder) / "step.json"
    timelines: list[Timeline] = []

    def before(engine: Any, loss: torch.Tensor) -> None:
        # From the backward of the second step to that of the third.
        if engine.global_steps == 1:
            timelines.append(engine.timeline(path))
            timelines[0].start()
        elif engine.global_steps == 2:
            timelines[0].stop()
        engine.backward(loss)

    train(Case(), settings(folder, **NVME), rank=rank, steps=3, backward=before)
    return timelines[0].summary(), [lane.name for lane in timelines[0].lanes], str(timelines[0].path)


def test_two_ranks_write_two_files_and_see_each_other(rank_pools, tmp_path):
    replies = rank_pools[2].run(of_both_ranks, str(tmp_path))
    assert [Path(path).name for *_, path in replies] == ["step.json", "step.rank1.json"]
    events = [event for *_, path in replies for event in json.loads(Path(path).read_text())]
    assert {event["pid"] for event in events} == {0, 1}
    for summary, lanes, _ in replies:
        assert {"gathers", "reductions", "NVMe writes"} <= set(lanes)
        assert {"reduction", "other ranks"} <= set(summary["waits"])


@pytest.mark.usefixtures("idle")
def test_there_is_one_timeline_at_a_time_and_none_after_a_failure(tmp_path):
    with infinity.initialize(model=Case().model(), config=settings(tmp_path))[0] as engine:
        with engine.timeline(), pytest.raises(RuntimeError, match="one at a time"), engine.timeline():
            pass
        with pytest.raises(KeyError), engine.timeline(tmp_path / "step.html"):
            raise KeyError
        assert not (tmp_path / "step.html").exists()
        with pytest.raises(ValueError, match=r"\.html or \.json"):
            engine.timeline("step.png")
    with pytest.raises(ConfigError, match=r"timeline\.path"):
        infinity.initialize(model=Case().model(), config=settings(tmp_path, timeline={"path": "step.png"}))
    config = settings(tmp_path, timeline={"path": str(tmp_path / "first.html"), "step": 1})
    with infinity.initialize(model=Case().model(), config=config)[0] as engine:
        engine(**token_batch(0, 0, positions=8))
    assert not (tmp_path / "first.html").exists(), "the step did not come to its end"


def span_of(what: str, cause: str, begin: int, end: int, thread: int = 1) -> trace.Span:
    return trace.Span(thread, what, cause, "", begin, end, 0)


def test_the_innermost_span_counts():
    spans = [
        span_of(trace.PHASE, "forward", 10, 100),
        span_of(trace.ENGINE, "use", 20, 60),
        span_of(trace.WAIT, "NVMe read", 30, 40),
        span_of(trace.WAIT, "gather", 40, 50),
        span_of(trace.COPY, "copy", 90, 120),
    ]
    for order in (spans, spans[::-1]):
        bars = [(bar.begin, bar.end, bar.what, bar.cause) for bar in flatten(order, 0, 130)]
        assert bars == [
            (0, 10, OUTSIDE, OUTSIDE), (10, 20, trace.COMPUTE, "forward"), (20, 30, trace.ENGINE, "use"),
            (30, 40, trace.WAIT, "NVMe read"), (40, 50, trace.WAIT, "gather"), (50, 60, trace.ENGINE, "use"),
            (60, 90, trace.COMPUTE, "forward"), (90, 100, trace.COPY, "copy"), (100, 130, OUTSIDE, OUTSIDE),
        ]  # fmt: skip
    assert [(bar.begin, bar.end) for bar in flatten([], 0, 5)] == [(0, 5)]


def test_rows_are_as_few_as_it_takes_and_busy_is_the_union():
    def bar(begin: int, end: int) -> Bar:
        return Bar(begin, end, "flight", "NVMe reads", "", 10)

    lane = TimelineRow("NVMe reads", (bar(0, 10), bar(5, 15), bar(10, 20), bar(30, 40)), flat=False)
    assert [[(one.begin, one.end) for one in row] for row in lane.rows()] == [[(0, 10), (10, 20), (30, 40)], [(5, 15)]]
    assert lane.busy == 30


def test_spans_of_other_threads_and_those_still_open_are_kept():
    recording = trace.start_recording()
    ready, leave = threading.Event(), threading.Event()

    def work() -> None:
        with trace.span(trace.WAIT, "long", nbytes=7):
            ready.set()
            leave.wait(10)

    thread = threading.Thread(target=work, name="infinity-step_0")
    thread.start()
    ready.wait(10)
    trace.begin_async("gathers", "unit", 3)
    recording.stop()
    leave.set()
    thread.join()
    (span,) = recording.spans
    (flight,) = recording.flights
    assert (span.cause, span.end, span.nbytes) == ("long", recording.end, 7)
    assert (flight.subject, flight.over, flight.end) == ("unit", False, recording.end)
    assert recording.threads[span.thread] == "infinity-step_0"


def test_nothing_is_kept_while_nobody_records():
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(trace.span(trace.WAIT, "x"))
    trace.begin_async("gathers", "unit")
    trace.end_async("gathers", "unit")
    trace.level("cpu", "grad", 1)
    recording = trace.start_recording()
    recording.stop()
    assert not recording.spans and not recording.flights and not recording.levels
