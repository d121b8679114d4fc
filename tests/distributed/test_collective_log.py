"""What the watchdog is told of collectives for which only an accelerator waits."""

from __future__ import annotations

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.flight_record import CollectiveLog


class Work:
    """A collective of an accelerator: the host is let go at once."""

    def __init__(self) -> None:
        self.over = False

    def wait(self) -> None:
        """Queue the wait."""

    def is_completed(self) -> bool:
        return self.over


class Watching:
    """The part of a watchdog that a group uses when it waits."""

    def __init__(self) -> None:
        self.log = CollectiveLog(2)


def test_a_collective_that_only_the_device_waits_for_is_reported_until_it_is_over() -> None:
    watching, first, second = Watching(), Work(), Work()
    group = AxisGroup("data", 0, 2, channel=1, watchdog=watching, host_waits=False)  # type: ignore[arg-type]
    for number, (name, work) in enumerate((("gather of a", first), ("gather of b", second)), 1):
        watching.log.submit(1, name, 8)
        group.wait(work, number, name)
    wait = watching.log.wait
    assert wait is not None and (wait.group, wait.number, wait.name) == (1, 1, "gather of a")
    assert watching.log.wait is wait, "its time goes on"
    first.over = True
    later = watching.log.wait
    assert later is not None and later.name == "gather of b" and later.began >= wait.began
    second.over = True
    assert watching.log.wait is None


def test_a_wait_of_the_host_goes_before_the_devices() -> None:
    watching, work = Watching(), Work()
    group = AxisGroup("data", 0, 2, watchdog=watching, host_waits=False)  # type: ignore[arg-type]
    group.wait(work, 1, "gather")
    watching.log.begin_wait(1, 5, "sum")
    assert watching.log.wait is not None and watching.log.wait.name == "sum"
    watching.log.end_wait()
    assert watching.log.wait is not None and watching.log.wait.name == "gather"
