"""A timeline of one or more steps: where the program waited, what moved meanwhile, what memory held.

    with engine.timeline("step.html") as timeline:
        engine.backward(engine(**batch))
        engine.step()
    print(timeline)

The same data in three forms: figures (`summary()`), a Chrome trace (`save("step.json")`, opens in Perfetto) and a page
that needs no network (`save("step.html")`).

The program's own lane is made of segments that do not overlap: at each moment the innermost span counts, so that
computing, copying, bookkeeping and waiting add up to the time that passed. Everything else lies in lanes beside it,
with the times at which it really began and ended: requests to a drive by the queue's own clock, gathers and reductions
from their submission until their bytes were waited for, modules from hook to hook.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from infinity.base import palette, trace
from infinity.base.trace import OUTSIDE, AsyncSpan, Recording, Span
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import exchange_values
from infinity.memory.residency import POOLS, PartitionExtent
from infinity.memory.store import TieredStore
from infinity.plan.plan import Plan
from infinity.plan.types import Key, Kind
from infinity.zero.coordinator import ModuleCall

SUFFIXES = (".html", ".json")
_PAGE = Path(__file__).with_suffix(".html")
# The placeholder that `Timeline.page` fills in.
_DATA, _PALETTE, _LIGHT, _DARK = "/*DATA*/null", "/*PALETTE*/null", "/*LIGHT*/", "/*DARK*/"
_OPTIMIZER = "infinity-step"
# What the lanes of a pipeline's ranks begin with.
PIPELINE = "pipeline rank"


class Bar(NamedTuple):
    """One bar of a lane; times in ns since the recording began. `queued`: ns from the submission to `begin`."""

    begin: int
    end: int
    what: str
    cause: str
    subject: str
    nbytes: int = 0
    queued: int = 0
    # False: still under way when the recording ended.
    over: bool = True


@dataclass(frozen=True)
class TimelineRow:
    """Bars of one kind. In a `flat` lane none overlap."""

    name: str
    bars: tuple[Bar, ...]
    flat: bool

    def rows(self) -> list[list[Bar]]:
        """Return the bars in the fewest rows in which none overlap."""
        rows: list[list[Bar]] = []
        for bar in sorted(self.bars, key=lambda bar: (bar.begin, -bar.end)):
            free = next((row for row in rows if row[-1].end <= bar.begin), None)
            if free is None:
                rows.append([bar])
            else:
                free.append(bar)
        return rows

    @property
    def busy(self) -> int:
        """Nanoseconds in which at least one bar of the lane was under way."""
        total, until = 0, 0
        for bar in sorted(self.bars):
            total += max(bar.end - max(bar.begin, until), 0)
            until = max(until, bar.end)
        return total


class Timeline:
    """Records while its block runs. `path` is written when the block ends."""

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, rank: int = 0, plan: Plan | None = None,
        store: TieredStore | None = None, pipeline: AxisGroup | None = None,
    ) -> None:  # fmt: skip
        """plan: has the names of what moves. store: knows what memory holds when it starts. pipeline: the ranks that
        tell each other their stages.
        """
        self.path = None if path is None else _of_rank(_checked(path), rank)
        self.rank = rank
        self.lanes: tuple[TimelineRow, ...] = ()
        self.seconds = 0.0
        # (ns, tier, kind, bytes) at every change.
        self.levels: tuple[tuple[int, str, str, int], ...] = ()
        self._plan = plan
        self._store = store
        self._pipeline = pipeline
        self._recording: Recording | None = None
        self._origin = 0

    @property
    def running(self) -> bool:
        """Whether it is recording."""
        return self._recording is not None

    def start(self) -> None:
        """Begin to record. RuntimeError while another timeline is recording."""
        self._recording = trace.start_recording()
        # What there is; changes are recorded where they happen.
        if self._store is not None:
            for (tier, kind), nbytes in self._store.ledger.now.items():
                trace.level(tier.value, kind.value, nbytes)
            for name, pool in self._store.pools().items():
                trace.level(POOLS, name, pool.used)

    def stop(self) -> None:
        """End the recording, and write the file."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.stop()
        self._origin = recording.begin
        self.seconds = (recording.end - recording.begin) / 1e9
        own, phases, *others = _lanes(recording, self._name)
        self.lanes = tuple(lane for lane in (own, phases, *self._stages(phases), *others) if lane.bars)
        self.levels = tuple(
            (max(level.at - recording.begin, 0), level.tier, level.kind, level.nbytes) for level in recording.levels
        )
        if self.path is not None:
            self.save(self.path)

    def _stages(self, phases: TimelineRow) -> Iterator[TimelineRow]:
        """A lane for each rank of the pipeline: its forwards and backwards, such as "2F0", that of micro-batch 0 in
        stage 2. Ranks of one node share a clock.
        """
        if self._pipeline is None or self._pipeline.size == 1:
            return
        mine = [[bar.begin + self._origin, bar.end + self._origin, bar.cause, bar.subject] for bar in phases.bars]
        for index, bars in enumerate(exchange_values(mine, self._pipeline, "a timeline's stages")):
            shown = (
                Bar(begin - self._origin, end - self._origin, trace.PHASE, cause, subject)
                for begin, end, cause, subject in bars
            )
            yield TimelineRow(f"{PIPELINE} {index}", tuple(bar for bar in shown if bar.end > 0), flat=True)

    def _name(self, subject: object) -> str:
        """The name of a recording's subject: the units that it belongs to."""
        if isinstance(subject, ModuleCall):
            return ", ".join(unit.layout.name for unit in subject.units) or "the whole model"
        key = subject.key if isinstance(subject, PartitionExtent) else subject
        if self._plan is None or not isinstance(key, Key):
            return str(subject)
        if key.kind is not Kind.STATES:
            return f"{key.kind.value} of {self._plan.layouts[key.index].name}"
        pieces = self._plan.sub_groups[key.index].slices
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return f"{key}: {self._plan.layouts[pieces[0].unit].name}{more}" if pieces else str(key)

    def abandon(self) -> None:
        """End the recording without a result; do nothing when there is none."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def lane(self, name: str) -> TimelineRow:
        """Return a lane by its name; KeyError where it recorded nothing."""
        for lane in self.lanes:
            if lane.name == name:
                return lane
        raise KeyError(name)

    def summary(self) -> dict[str, Any]:
        """Return the seconds of the program's lane by activity, waits by cause, and bytes and rate of every lane of
        transfers.
        """
        times: dict[str, float] = dict.fromkeys((trace.COMPUTE, trace.COPY, trace.ENGINE, OUTSIDE), 0.0)
        waits: dict[str, float] = {}
        for bar in self.lanes[0].bars if self.lanes else ():
            table, key = (waits, bar.cause) if bar.what == trace.WAIT else (times, bar.what)
            table[key] = table.get(key, 0.0) + (bar.end - bar.begin) / 1e9
        moved = {}
        for lane in self.lanes:
            nbytes = sum(bar.nbytes for bar in lane.bars)
            if nbytes and lane.name not in ("program", "optimizer thread"):
                busy = lane.busy / 1e9
                rate = nbytes / busy if busy else 0.0
                moved[lane.name] = {"bytes": nbytes, "busy_seconds": busy, "bytes_per_second": rate}
        ranked = dict(sorted(waits.items(), key=lambda item: -item[1]))
        return {"seconds": self.seconds, **times, "waits": ranked, "lanes": moved}

    def __str__(self) -> str:
        found = self.summary()
        total = max(self.seconds, 1e-9)
        waited = sum(found["waits"].values())
        causes = ", ".join(f"{cause} {seconds:.3f} s" for cause, seconds in found["waits"].items() if seconds > 5e-4)
        parts = [
            f"{palette.ACTIVITIES[what].label} {found[what] / total:.0%}"
            for what in (trace.COMPUTE, trace.COPY, trace.ENGINE, OUTSIDE)
            if found[what] / total >= 0.005
        ]
        moved = "".join(
            f"; {name} {lane['bytes'] / 1e6:,.1f} MB at {lane['bytes_per_second'] / 1e9:.2f} GB/s"
            for name, lane in found["lanes"].items()
        )
        return (
            f"{self.seconds:.3f} s: {', '.join(parts)}, waiting {waited / total:.0%}"
            f"{f' ({causes})' if causes else ''}{moved}"
        )

    def chrome_trace(self) -> list[dict[str, Any]]:
        """Events of the Trace Event Format, times in us: a process a rank, a thread a row of a lane, bytes as counters.

        Ranks of one node share a clock, so their files can be merged.
        """
        pid, since = self.rank, self._origin / 1e3
        events: list[dict[str, Any]] = [_name("process_name", pid, 0, f"rank {self.rank}")]
        tid = 0
        for lane in self.lanes:
            for index, row in enumerate(lane.rows()):
                tid += 1
                events.append(_name("thread_name", pid, tid, lane.name if not index else f"{lane.name} ({index + 1})"))
                events.append({**_name("thread_sort_index", pid, tid, ""), "args": {"sort_index": tid}})
                events += [_event(bar, pid, tid, since) for bar in row]
        held: dict[str, dict[str, int]] = {}
        for at, tier, kind, nbytes in self.levels:
            held.setdefault(tier, {})[kind] = nbytes
            events.append(
                {"name": f"memory: {tier}", "ph": "C", "pid": pid, "ts": since + at / 1e3, "args": dict(held[tier])}
            )
        return events

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page (".html") or a Chrome trace (".json"). ValueError for another name."""
        target = _checked(path)
        text = json.dumps(self.chrome_trace()) if target.suffix.lower() == ".json" else self.page()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def page(self) -> str:
        """Return the page, which needs no other file."""
        data = json.dumps(
            {
                "title": f"Timeline of rank {self.rank}", "line": str(self), "end": round(self.seconds * 1e6, 1),
                "summary": self.summary(),
                "lanes": [
                    {
                        "name": lane.name,
                        "rows": [[[*_times(bar), *bar[2:6], round(bar.queued / 1e3, 1), bar.over] for bar in row]
                                 for row in lane.rows()],
                    }
                    for lane in self.lanes
                ],
                "levels": [[round(at / 1e3, 1), *rest] for at, *rest in self.levels],
            },
            separators=(",", ":"),
        )  # fmt: skip
        # Only this sequence would end the script element.
        return _empty_page().replace(_DATA, data.replace("</", "<\\/"), 1)

    def __enter__(self) -> Timeline:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.stop()
        else:
            self.abandon()


def _empty_page() -> str:
    """Return the page with the palette's colours and words, without a recording."""
    activities = palette.ACTIVITIES.items()
    words = {
        "activities": {name: [activity.label, activity.note] for name, activity in activities},
        "kinds": palette.KINDS | palette.POOLS, "tiers": palette.TIERS,
    }  # fmt: skip
    text = _PAGE.read_text(encoding="utf-8")
    for mark, filling in (
        (_LIGHT, " ".join(f"--{name}: {activity.light};" for name, activity in activities)),
        (_DARK, " ".join(f"--{name}: {activity.dark};" for name, activity in activities)),
        (_PALETTE, json.dumps(words, separators=(",", ":"))),
    ):
        text = text.replace(mark, filling, 1)
    return text


def _lanes(recording: Recording, describe: Callable[[object], str]) -> Iterable[TimelineRow]:
    """Return the program's lane first, then those beside it, the busiest transfers last."""
    origin = recording.begin
    apart = {thread for thread, name in recording.threads.items() if name.startswith(trace.BESIDE)}
    behind = {thread for thread in apart if recording.threads[thread].startswith(_OPTIMIZER)}
    # On an accelerator backward runs on one of autograd's threads while the program waits: they are one lane.
    program = [span for span in recording.spans if span.thread not in apart]
    beside = [span for span in recording.spans if span.thread in behind]
    yield TimelineRow("program", tuple(flatten(program, origin, recording.end, describe)), flat=True)
    phases = [span for span in program if span.what == trace.PHASE]
    yield TimelineRow("phases", tuple(_bar(span, origin, describe) for span in phases), flat=True)
    if beside:
        segments = flatten(beside, origin, recording.end, describe)
        busy = tuple(bar for bar in segments if bar.what != OUTSIDE)
        yield TimelineRow("optimizer thread", busy, flat=True)
    flights: dict[str, list[Bar]] = {}
    for flight in recording.flights:
        flights.setdefault(flight.lane, []).append(_flight(flight, origin, describe))
    copies = [_bar(span, origin, describe) for span in recording.spans if span.what == trace.COPY]
    if copies:
        flights["copies"] = copies
    for name in sorted(flights, key=_place):
        yield TimelineRow(name, tuple(sorted(flights[name])), flat=False)


def _place(lane: str) -> tuple[int, str]:
    order = ("modules, forward", "modules, backward", "gathers", "reductions", "copies", "NVMe reads", "NVMe writes")
    return next((index for index, name in enumerate(order) if lane.startswith(name)), len(order)), lane


def flatten(spans: Iterable[Span], begin: int, end: int, describe: Callable[[Any], str] = str) -> list[Bar]:
    """What the innermost span of each moment from `begin` to `end` says: bars that do not overlap and leave no gap."""
    bars: list[Bar] = []
    # Spans around the moment, with the times at which they end, never after the one around them.
    around: list[tuple[Span, int]] = []
    at = begin

    def until(moment: int) -> None:
        nonlocal at
        if moment > at:
            what, cause, subject, nbytes = _said(around[-1][0], describe) if around else (OUTSIDE, OUTSIDE, "", 0)
            last = bars[-1] if bars else None
            if last is not None and last.end == at - begin and (last.what, last.cause, last.subject) == (
                what, cause, subject,
            ):  # fmt: skip
                bars[-1] = last._replace(end=moment - begin)
            else:
                bars.append(Bar(at - begin, moment - begin, what, cause, subject, nbytes))
            at = moment

    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while around and around[-1][1] <= span.begin:
            until(around[-1][1])
            around.pop()
        until(span.begin)
        around.append((span, min(span.end, around[-1][1]) if around else span.end))
    while around:
        until(around[-1][1])
        around.pop()
    until(end)
    return bars


def _said(span: Span, describe: Callable[[Any], str]) -> tuple[str, str, str, int]:
    """Return the activity of a span. Time in forward and backward that is neither waiting nor the engine's is the
    model's.
    """
    if span.what == trace.PHASE:
        return (trace.ENGINE if span.cause == "step" else trace.COMPUTE), span.cause, "", 0
    return span.what, span.cause, describe(span.subject), span.nbytes


def _bar(span: Span, origin: int, describe: Callable[[Any], str]) -> Bar:
    return Bar(span.begin - origin, span.end - origin, span.what, span.cause, describe(span.subject), span.nbytes)


def _flight(flight: AsyncSpan, origin: int, describe: Callable[[Any], str]) -> Bar:
    begin = max(flight.begin - origin, 0)
    return Bar(
        begin, max(flight.end - origin, begin), "flight", flight.lane, describe(flight.subject), flight.nbytes,
        queued=max(flight.begin - flight.asked, 0), over=flight.over,
    )  # fmt: skip


def _times(bar: Bar) -> tuple[float, float]:
    return round(bar.begin / 1e3, 1), round(bar.end / 1e3, 1)


def _event(bar: Bar, pid: int, tid: int, since: float) -> dict[str, Any]:
    begin, end = bar.begin / 1e3, bar.end / 1e3
    args: dict[str, Any] = {"bytes": bar.nbytes} if bar.nbytes else {}
    if bar.nbytes and end > begin:
        args["GB/s"] = round(bar.nbytes / (end - begin) / 1e3, 3)
    if bar.queued:
        args["queued us"] = round(bar.queued / 1e3, 1)
    if not bar.over:
        args["still under way"] = True
    name = f"{bar.cause}: {bar.subject}" if bar.subject else bar.cause
    if bar.what == trace.WAIT:
        name = f"wait for {name}"
    return {
        "name": name, "cat": bar.what, "ph": "X", "pid": pid, "tid": tid, "ts": since + begin, "dur": end - begin,
        "args": args,
    }  # fmt: skip


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _checked(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a timeline is written as {' or '.join(SUFFIXES)}, not as {target.name!r}")
    return target


def _of_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
