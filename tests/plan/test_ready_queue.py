"""Which sub-group is stepped next: what is in memory, then what the next forward needs first."""

from __future__ import annotations

import random
import threading

import pytest

from infinity.plan.layout import Slice, SubGroup
from infinity.plan.orders import ReadyQueue

GROUPS = [SubGroup(index, (Slice(index, 0, 64),)) for index in range(8)]
# The next forward needs sub-group 7 first.
ORDER = GROUPS[::-1]


class Memory:
    """Room for so many sub-groups."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: set[int] = set()
        self.asked: list[int] = []

    def fetch(self, group: SubGroup) -> bool:
        self.asked.append(group.index)
        if group.index not in self.held and len(self.held) >= self.room:
            return False
        self.held.add(group.index)
        return True

    def has(self, group: SubGroup) -> bool:
        return group.index in self.held


def taken(turns: ReadyQueue[str], count: int) -> list[int]:
    return [turns.take()[0].index for _ in range(count)]


def test_what_is_needed_first_goes_first_however_late_it_comes():
    memory, turns = Memory(0), ReadyQueue[str](ORDER)
    turns.add(GROUPS[:2], "a", memory.has)
    assert turns.take() == (GROUPS[1], "a")
    turns.add([GROUPS[5]], "b", memory.has)
    turns.add([GROUPS[3]], "c", memory.has)
    assert [turns.take() for _ in range(3)] == [(GROUPS[5], "b"), (GROUPS[3], "c"), (GROUPS[0], "a")]


def test_a_unit_that_has_begun_is_finished_first():
    """By what one of its sub-groups shares with the next, where units are joined, too."""
    units = [(0,), (0,), (0, 1), (1,), (2,), (2,)]
    groups = [SubGroup(at, tuple(Slice(unit, 0, 64) for unit in mine)) for at, mine in enumerate(units)]
    memory = Memory(2)
    turns = ReadyQueue[str](groups[::-1])
    turns.add(groups[:4], "", memory.has)
    assert turns.take()[0].index == 3
    turns.fetch(1, memory.fetch)
    turns.add(groups[4:], "", memory.has)
    assert taken(turns, 5) == [2, 1, 0, 5, 4]


def test_what_is_in_memory_goes_first():
    memory = Memory(2)
    memory.held.update((0, 2))
    turns = ReadyQueue[str](ORDER)
    turns.add(GROUPS[:4], "", memory.has)
    assert taken(turns, 4) == [0, 2, 3, 1]


def test_what_was_fetched_ahead_is_not_overtaken():
    """It would take its room until the end."""
    memory = Memory(2)
    turns = ReadyQueue[str](ORDER)
    turns.add(GROUPS[:3], "", memory.has)
    turns.fetch(2, memory.fetch)
    turns.add([GROUPS[7]], "", memory.has)
    assert memory.asked == [2, 1] and taken(turns, 4) == [2, 1, 7, 0]


def test_no_more_is_fetched_than_asked_for_or_than_there_is_room():
    memory = Memory(2)
    turns = ReadyQueue[str](ORDER)
    turns.add(GROUPS, "", memory.has)
    turns.fetch(1, memory.fetch)
    assert memory.held == {7}
    turns.fetch(3, memory.fetch)
    assert memory.held == {7, 6}
    memory.held.discard(turns.take()[0].index)
    turns.fetch(3, memory.fetch)
    assert memory.held == {6, 5}


def test_what_is_there_is_held_on_to():
    """It is asked for again, so that nothing else takes its room before its turn; where that fails nothing follows."""
    memory = Memory(3)
    memory.held.add(4)
    turns = ReadyQueue[str](ORDER)
    turns.add([GROUPS[4], GROUPS[6]], "", memory.has)
    turns.fetch(2, memory.fetch)
    assert memory.asked == [4, 6]
    memory.held.clear()
    memory.room = 0
    turns.add([GROUPS[7]], "", memory.has)
    turns.fetch(3, memory.fetch)
    assert memory.asked == [4, 6, 4] and taken(turns, 3) == [4, 6, 7]


def test_one_thread_adds_while_another_takes():
    groups = [SubGroup(index, (Slice(0, 0, 64),)) for index in range(2000)]
    memory, ready, found = Memory(3), threading.Semaphore(0), []
    turns = ReadyQueue[int](groups)

    def take() -> None:
        for _ in groups:
            ready.acquire()
            turns.fetch(2, memory.fetch)
            group, what = turns.take()
            memory.held.discard(group.index)
            found.append((group.index, what))

    thread = threading.Thread(target=take)
    thread.start()
    shuffled = random.Random(0).sample(groups, len(groups))
    for at in range(0, len(groups), 4):
        turns.add(shuffled[at : at + 4], at, memory.has)
        turns.fetch(1, memory.fetch)
        for _ in shuffled[at : at + 4]:
            ready.release()
    thread.join(30)
    assert not thread.is_alive()
    assert sorted(found) == sorted((group.index, at // 4 * 4) for at, group in enumerate(shuffled))


def test_nothing_is_taken_where_nothing_is_ready():
    with pytest.raises(IndexError):
        ReadyQueue[str](ORDER).take()
