"""How long a log of stream work would take with given durations, in virtual time.

    schedule = makespan(accelerator.log(), lambda each: each.nbytes / 50e9 if each.kind == "copy up" else 1e-5)
    assert schedule.seconds < 0.03 and schedule.host_stopped == 0

A list schedule in the order of submission: an operation begins when the host has queued it, its stream and its engine
are free, and what it waits for has ended. `engine` names what several streams share, such as a device's copy engine for
one direction, which serves them in the order in which they were queued.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
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


def makespan(
    log: Iterable[Operation],
    seconds: Callable[[Operation], float],
    *,
    engine: Callable[[Operation], Hashable] = copy_engines,
    submission: float = 0.0,
) -> Schedule:
    """Return the schedule of a log.

    seconds: the duration of each operation of a stream (events and frees too). submission: what queueing one operation
    takes the host.
    """
    schedule = Schedule()
    free: dict[Hashable, float] = {}
    host = 0.0
    for each in log:
        # What ended before the log began is not waited for.
        ready = max((schedule.spans[other][1] for other in each.waits if other in schedule.spans), default=0.0)
        if each.kind in ("host wait", "host access"):
            schedule.host_stopped += max(0.0, ready - host)
            host = max(host, ready)
            schedule.spans[each.id] = (host, host)
            continue
        host += submission
        stream, shared = ("stream", each.device, each.stream), engine(each)
        begin = max(host, ready, free.get(stream, 0.0), 0.0 if shared is None else free.get(("engine", shared), 0.0))
        duration = seconds(each)
        end = begin + duration
        free[stream] = end
        if shared is not None:
            free["engine", shared] = end
        place = (each.device, each.stream)
        schedule.busy[place] = schedule.busy.get(place, 0.0) + duration
        schedule.spans[each.id] = (begin, end)
    schedule.seconds = max([host, *(end for _, end in schedule.spans.values())])
    return schedule
