"""What follows from where the ranks are, on positions made by hand."""

from __future__ import annotations

from collections.abc import Sized

from infinity.distributed.flight_record import (
    STAGE,
    WORLD,
    Channels,
    Position,
    Wait,
    circle,
    first_difference,
    missing,
    parted,
    positions_table,
)
from infinity.plan.pipeline import MessageLink, pipeline_links
from infinity.plan.types import Topology

GATHER, REDUCE = 0, 1


def at(rank: int, counts: tuple[int, int], wait: tuple[int, int, str] | None = None, **others: object) -> Position:
    return Position(rank=rank, beat=5, counts=counts, wait=Wait(*wait, began=1.0) if wait else None, **others)  # type: ignore[arg-type]


def ranks(*positions: Position) -> dict[int, Position]:
    return {position.rank: position for position in positions}


def of(positions: Sized) -> Channels:
    """Channels of which each has every rank."""
    return Channels(Topology(dp=len(positions)), (WORLD, WORLD))


def test_a_position_survives_the_journey():
    position = at(
        1, (3, 2), (GATHER, 3, "gather of a"), names=(((2, "x"), (3, "gather of a")), ()), where="f:1 in g", latest="x",
        failure="Traceback", waited_seconds=2.5,
    )  # fmt: skip
    assert Position.decode(position.encode()) == position
    assert Position.decode(at(0, (0, 0)).encode()) == at(0, (0, 0))


def test_who_is_missing():
    everyone = ranks(at(0, (3, 1), (GATHER, 3, "a")), at(1, (2, 5)), at(2, (3, 0)), at(3, (4, 0)))
    assert missing(everyone, 0, Wait(GATHER, 3, "a", 0.0), of(everyone)) == [1]


def test_ranks_that_wait_for_each_other_are_a_circle():
    everyone = ranks(at(0, (3, 2), (REDUCE, 2, "r")), at(1, (4, 1), (GATHER, 4, "g")))
    assert circle(everyone, of(everyone)) == {0, 1}


def test_a_rank_that_computes_may_still_come():
    everyone = ranks(at(0, (3, 1), (GATHER, 3, "g")), at(1, (2, 1)), at(2, (3, 1), (GATHER, 3, "g")))
    assert circle(everyone, of(everyone)) == set()


def test_bytes_on_their_way_are_no_circle():
    """All have submitted it, and all wait."""
    everyone = ranks(*(at(rank, (3, 1), (GATHER, 3, "g")) for rank in range(3)))
    assert circle(everyone, of(everyone)) == set() and parted(everyone, of(everyone)) == ""


def test_who_waits_for_a_circle_is_stuck_with_it():
    everyone = ranks(
        at(0, (3, 2), (REDUCE, 2, "r")), at(1, (4, 1), (GATHER, 4, "g")), at(2, (3, 2), (REDUCE, 2, "r")),
        at(3, (5, 2), (GATHER, 5, "h")),
    )  # fmt: skip
    assert circle(everyone, of(everyone)) == {0, 1, 2, 3}


def test_a_chain_that_ends_at_a_working_rank_is_no_circle():
    everyone = ranks(at(0, (3, 2), (REDUCE, 2, "r")), at(1, (4, 1), (GATHER, 4, "g")), at(2, (2, 1)))
    # 0 waits for 1 and 2, 1 for 0 and 2: whatever 2 does, 0 and 1 wait for each other.
    assert circle(everyone, of(everyone)) == {0, 1}
    everyone = ranks(at(0, (4, 2), (REDUCE, 2, "r")), at(1, (4, 1), (GATHER, 4, "g")), at(2, (2, 1)))
    assert circle(everyone, of(everyone)) == set()


def test_the_first_collective_that_differs_is_found_whatever_the_windows():
    one = at(0, (4, 0), names=(((2, "b"), (3, "c"), (4, "d")), ()))
    two = at(1, (3, 0), names=(((1, "a"), (2, "b"), (3, "x")), ()))
    busy = at(2, (9, 0))
    assert parted(ranks(one, two, busy), of(range(3))) == "  rank 0: c (number 3)\n  rank 1: x (number 3)"
    assert parted({0: one, 1: at(1, (9, 0))}, of(range(2))) == ""


def test_histories_are_compared_where_all_know_them():
    assert first_difference([{1: "a", 2: "b"}, {1: "a", 2: "b"}]) is None
    assert first_difference([{1: "a", 2: "b"}, {2: "b"}]) is None
    assert first_difference([{1: "a", 2: "b"}, {1: "a", 2: "c"}]) == (2, ["b", "c"])
    assert first_difference([{1: "a", 2: "b"}, {1: "a"}]) == (2, ["b", "none"])
    assert first_difference([{}, {1: "a"}]) is None


def test_the_table_says_what_each_rank_does():
    lines = positions_table(
        ranks(
            at(1, (2, 1), where="train.py:7 in main", latest="gather of a"),
            at(0, (3, 1), (GATHER, 3, "gather of b"), waited_seconds=2.25),
        ),
        of(range(2)),
    ).splitlines()
    assert lines == [
        "  rank 0 has waited 2.2 s for gather of b",
        "  rank 1 is in the program's own code (at train.py:7 in main); its latest collective was gather of a",
    ]


LINKS = Channels(Topology(dp=2, pp=4), (WORLD, STAGE, *pipeline_links(4)))


def test_a_link_is_between_two_neighbours_of_one_pipeline():
    forward = LINKS.of_link(MessageLink(3, 0, forward=True))
    assert LINKS.members(7, forward) == LINKS.members(1, forward) == (7, 1)
    assert LINKS.members(2, forward) == LINKS.members(4, forward) == ()
    assert LINKS.groups(forward) == ((6, 0), (7, 1))
    assert LINKS.groups(LINKS.of_link(MessageLink(2, 1, forward=False))) == ((4, 2), (5, 3))
    assert LINKS.members(5, 1) == (4, 5) and LINKS.groups(1) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert len(set(LINKS.axes)) == 2 + 8
    assert all(sum(bool(LINKS.members(rank, channel)) for channel in range(2, 10)) == 4 for rank in range(8))


def test_a_rank_that_is_not_on_a_link_neither_waits_there_nor_parts():
    channel = LINKS.of_link(MessageLink(0, 1, forward=True))
    others: tuple[tuple[tuple[int, str], ...], ...] = ((),) * 10
    sent = (*others[:channel], ((1, "activation 0 of stage 0, 8 bytes"),), *others[channel + 1 :])
    counts = tuple(int(at == channel) for at in range(10))
    waiting = Wait(channel, 2, "activation 1 of stage 0", 0.0)
    everyone = {rank: Position(rank=rank, beat=1, counts=(0,) * 10) for rank in range(8)}
    everyone[0] = Position(rank=0, beat=1, counts=counts, names=sent)
    everyone[2] = Position(rank=2, beat=1, counts=(*counts[:channel], 2, *counts[channel + 1 :]), wait=waiting)
    assert missing(everyone, 2, waiting, LINKS) == [0], "1 is in another pipeline"
    assert parted(everyone, LINKS) == ""
    assert circle(everyone, LINKS) == set()
