"""A pass over sub-groups: what it reports as done, and when."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from infinity.memory.transaction import Reservation
from infinity.optim.update_rules import Segment, StepContext
from infinity.plan.layout import Slice, Slot, SubGroup, UnitLayout
from infinity.plan.types import Key, Kind
from infinity.step.update import StepPass


class Store:
    """Notes what ended; its drive may refuse the write-back."""

    def __init__(self, *, full: bool) -> None:
        self.access = self
        self.ended: list[tuple[Key, ...]] = []
        self._full = full

    def begin_work(self, reservation: Reservation) -> bool:
        return True

    def end_work(self, reservation: Reservation, *done: Key) -> None:
        self.ended.append(done)

    def prefetch(self, *keys: Key, by: Reservation | None) -> bool:
        return True

    def in_memory(self, key: Key) -> bool:
        return True

    def __getitem__(self, key: Key) -> Any:
        return type("Spec", (), {"on_drive": False})

    def flush(self, *keys: Key) -> None:
        if self._full:
            raise OSError("no space left")


class Updater:
    def update(self, *arguments: Any) -> None:
        """Step nothing."""

    def meets(self, group: SubGroup) -> bool:
        return False


@pytest.mark.parametrize("full", [False, True])
def test_a_sub_group_is_done_only_once_its_write_back_is_submitted(full: bool) -> None:
    group, store = SubGroup(0, (Slice(0, 0, 64),)), Store(full=full)
    step: Any = StepPass([group], store, Updater(), Reservation())  # type: ignore[arg-type]
    step.add([group], None)
    if full:
        with pytest.raises(OSError, match="no space"):
            step.run(1, threading.Event())
    else:
        step.run(1, threading.Event())
    keys = (Key(Kind.STATES, 0), Key(Kind.PARAM, 0), Key(Kind.GRAD, 0))
    assert store.ended == [() if full else keys]


def test_a_partition_is_done_once_no_sub_group_is_left_to_step_it() -> None:
    groups, store = [SubGroup(index, (Slice(0, 64 * index, 64),)) for index in range(2)], Store(full=False)
    step: Any = StepPass(groups, store, Updater(), Reservation())  # type: ignore[arg-type]
    step.add(groups, None)
    step.run(2, threading.Event())
    assert store.ended == [(Key(Kind.STATES, 0),), (Key(Kind.STATES, 1), Key(Kind.PARAM, 0), Key(Kind.GRAD, 0))]


def test_a_parameter_without_a_gradient_is_not_stepped_between_two_that_have_one() -> None:
    slots = tuple(Slot(name, (16,), 16 * at, 16, 0) for at, name in enumerate("abc"))
    layout = UnitLayout(0, "unit", (), "fp32", True, slots, 48)
    context = StepContext((), dict.fromkeys("abc", 0), 1.0, {0: [True, False, True]}, {0: [1, 1, 1]})
    segments = context.segments(layout, Slice(0, 0, 48), 0, joins=True)
    assert segments == [Segment(0, 16, 0, 1), Segment(32, 16, 0, 1)]


class Held(Store):
    """Has the states of the second sub-group in memory."""

    def __getitem__(self, key: Key) -> Any:
        return type("Spec", (), {"on_drive": True})

    def in_memory(self, key: Key) -> bool:
        return key.index == 1


@pytest.mark.parametrize("meets", [False, True])
def test_where_ranks_meet_none_goes_before_the_plans_order(meets: bool) -> None:
    """Another rank may have other sub-groups in memory."""
    groups, stepped = [SubGroup(index, (Slice(index, 0, 64),)) for index in range(2)], list[int]()

    class Watched(Updater):
        def update(self, *arguments: Any) -> None:
            stepped.append(arguments[0].index)

        def meets(self, group: SubGroup) -> bool:
            return meets

    step: Any = StepPass(groups, Held(full=False), Watched(), Reservation())  # type: ignore[arg-type]
    step.add(groups, None)
    step.run(2, threading.Event())
    assert stepped == ([0, 1] if meets else [1, 0])
