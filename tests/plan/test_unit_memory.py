"""Memory of gathered and released units, and the order in which buffers go: known answers."""

from __future__ import annotations

from infinity.plan.orders import EvictionOrder
from infinity.plan.pools import Room, UnitMemory


def test_the_unit_released_longest_ago_gives_its_memory_up_first():
    memory = UnitMemory(100, retain=True)
    for unit in range(3):
        assert memory.gather(unit, 30) == Room((), 100 - 30 * unit)
    assert [memory.release(unit) for unit in (1, 0, 2)] == [True] * 3
    assert memory.gather(3, 40) == Room((1,), 40)
    assert memory.retained == (0, 2) and memory.live == (3,)
    assert (memory.live_nbytes, memory.retained_nbytes, memory.nbytes) == (40, 60, 100)


def test_a_unit_that_comes_back_has_its_own_memory():
    memory = UnitMemory(50, retain=True)
    memory.gather(0, 50)
    memory.release(0)
    assert memory.gather(0, 50) == Room()
    assert memory.nbytes == memory.live_nbytes == 50


def test_without_retention_a_released_unit_holds_nothing():
    memory = UnitMemory(50, retain=False)
    memory.gather(0, 50)
    assert not memory.release(0)
    assert memory.nbytes == 0


def test_buffers_go_by_rank_and_then_by_use():
    order = EvictionOrder[str](2)
    for item, rank in (("a", 1), ("b", 0), ("c", 0)):
        order.use(item, rank)
    assert [*order] == ["b", "c", "a"]
    order.use("b")
    order.move("c", 0)
    order.move("a", 0)
    assert [*order.queue(0)] == ["c", "b", "a"]
    order.remove("c")
    assert order.rank("c") is None and "c" not in order and len(order) == 2
