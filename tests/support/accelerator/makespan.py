"""How long a log of stream work would take with given durations, in virtual time.

    schedule = makespan(accelerator.log(), lambda each: each.nbytes / 50e9 if each.kind == "copy up" else 1e-5)
    assert schedule.seconds < 0.03 and schedule.host_stopped == 0

A list schedule in the order of submission: an operation begins when the host has queued it, its stream and its engine
are free, and what it waits for has ended. `engine` names what several streams share, such as a device's copy engine for
one direction, which serves them in the order in which they were queued. `host` names the thread that queues or waits,
where there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from tests.support.accelerator import Operation


@dataclass(slots=True)
class Schedule:
    """Begin and end of each operation by id, and sums, in seconds.

    host_stopped: how long the host stood still. busy: by (device, stream). idle() tells a stream's gaps.
    """

    seconds: float = 0.0
    host_stopped: float = 0.0
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    busy: dict[tuple[int, int], float] = field(default_factory=dict)

    def idle(self, device: int, stream: int) -> float:
        """How long a stream was idle while the whole schedule ran."""
        return self.seconds - self.busy.get((device, stream), 0.0)


def copy_engines(operation: Operation) -> Hashable:
    """One engine a device for each direction of copies, as a GPU has them."""
    return (operation.device, operation.kind) if operation.kind.startswith("copy ") else None


def one_host(operation: Operation) -> Hashable:
    """One thread queues everything."""
    return None


def makespan(
    log: Iterable[Operation],
    seconds: Callable[[Operation], float],
    *,
    engine: Callable[[Operation], Hashable] = copy_engines,
    host: Callable[[Operation], Hashable] = one_host,
    after: Mapping[int, int] = {},
    submission: float = 0.0,
) -> Schedule:
    """Return the schedule of a log.

    seconds: the duration of each operation of a stream (events and frees too), and of what the host does at a "host
    access". after: what an operation waits for besides its own waits, by ids. submission: what queueing one operation
    takes the host.
    """
    schedule = Schedule()
    free: dict[Hashable, float] = {}
    now: dict[Hashable, float] = {}
    for each in log:
        # What ended before the log began is not waited for.
        waits = [*each.waits, *([after[each.id]] if each.id in after else [])]
        ready = max((schedule.spans[other][1] for other in waits if other in schedule.spans), default=0.0)
        thread = host(each)
        time = now.get(thread, 0.0)
        if each.kind in ("host wait", "host access"):
            schedule.host_stopped += max(0.0, ready - time)
            begin = max(time, ready)
            now[thread] = begin + (seconds(each) if each.kind == "host access" else 0.0)
            schedule.spans[each.id] = (begin, now[thread])
            continue
        now[thread] = time = time + submission
        stream, shared = ("stream", each.device, each.stream), engine(each)
        begin = max(time, ready, free.get(stream, 0.0), 0.0 if shared is None else free.get(("engine", shared), 0.0))
        duration = seconds(each)
        end = begin + duration
        free[stream] = end
        if shared is not None:
            free["engine", shared] = end
        place = (each.device, each.stream)
        schedule.busy[place] = schedule.busy.get(place, 0.0) + duration
        schedule.spans[each.id] = (begin, end)
    schedule.seconds = max([0.0, *now.values(), *(end for _, end in schedule.spans.values())])
    return schedule
