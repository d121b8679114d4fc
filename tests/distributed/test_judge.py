"""The watchdog's judgement of all ranks' positions, without ranks: what ends a wait, and when."""

from __future__ import annotations

from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.flight_record import Channels, Position, Wait
from infinity.distributed.watchdog import Diagnosis, Judge, Judgement
from infinity.plan.types import Topology

GATHER = Wait(group=0, number=1, name="gather of a", began=0.0)


def positions(beat: int, **late: str) -> dict[int, Position]:
    """Rank 0 waits for a gather that rank 1 has not submitted."""
    waiting = Position(0, beat, (1,), wait=GATHER, names=(((1, "gather of a"),),))
    return {0: waiting, 1: Position(1, beat, (0,), names=((),), **late)}


def judged(seconds: float, looks: list[tuple[int, float]], **late: str) -> list[Judgement]:
    """The judgements of some looks, each the ranks' beat and the time."""
    judge = Judge(AxisPlace("world", 0, 2), Channels(Topology(dp=2)), seconds)
    return [judge.judge(positions(beat, **late), GATHER, now=now, connection_lost=False) for beat, now in looks]


def test_a_rank_may_let_others_wait_for_so_long() -> None:
    early, near, late = judged(10.0, [(1, 1.0), (2, 9.0), (3, 12.0)])
    assert early == Judgement()
    assert near.verdict is None and near.ask == (1,), "it is asked where it is before that is told"
    assert late.verdict is not None and "waited 12.0 s for rank 1 (watchdog_seconds is 10)" in late.verdict.text


def test_an_error_counts_once_its_rank_has_not_gone_on() -> None:
    first, second, third = judged(100.0, [(1, 1.0), (2, 1.5), (3, 2.0)], failure="KeyError")
    assert first.verdict is second.verdict is None
    assert third.verdict is not None and (third.verdict.rank, third.verdict.counts) == (1, None)
    assert "rank 1 has raised:\nKeyError" in third.verdict.text


def test_a_rank_without_a_sign_of_life_is_dead_and_a_long_wait_is_told_once() -> None:
    *_, reminded, dead = judged(1000.0, [(1, 1.0), (1, 30.0), (2, 60.5), (2, 121.0)])
    assert reminded.reminder.startswith("waiting for rank 1 since 60 s") and reminded.verdict is None
    assert dead.reminder == "" and dead.verdict is not None
    assert "rank 1 gives no sign of life for 60 s" in dead.verdict.text


def test_a_late_rank_is_named_also_by_one_that_waits_for_it_through_another() -> None:
    channels = Channels(Topology(dp=2, tp=2, local_size=4), axes=("dp", "tp"))
    gather, reduction = Wait(group=0, number=1, name="gather of a", began=0.0), GATHER._replace(group=1)
    ranks = {
        0: Position(0, 1, (1, 0), wait=gather),
        1: Position(1, 1, (0, 1), wait=reduction),
        2: Position(2, 1, (0, 0)),
        3: Position(3, 1, (0, 1), wait=reduction),
    }
    for rank in (0, 1, 3):
        judge, wait = Judge(AxisPlace("world", rank, 4), channels, 10.0), ranks[rank].wait
        near, late = (judge.judge(ranks, wait, now=now, connection_lost=False) for now in (9.0, 12.0))
        assert near.ask == (2,), "1 lacks rank 0's part, and rank 0 lacks rank 2's"
        assert late.verdict is not None and "for rank 2 (dp 1, tp 0) (watchdog" in late.verdict.text


def test_a_diagnosis_survives_the_store() -> None:
    gone = Diagnosis("gone", rank=1, counts=(3, 4), interrupt_seconds=None)
    assert Diagnosis.decode(gone.encode()) == gone
    assert not gone.stops(1, 4) and gone.stops(1, 5)
