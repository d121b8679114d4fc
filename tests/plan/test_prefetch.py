"""The fetch schedule against an independent simulation that executes it as the engine would."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from infinity.plan.prefetch import FetchBudget, FetchSchedule, Timing, UnitAccess, make_schedule
from tests.support.clock import usual_seconds

NO_LIMIT = 10**12


def uses_of(trace: Iterable[int]) -> list[UnitAccess]:
    return [UnitAccess(unit) for unit in trace]


def execute(schedule: FetchSchedule, full: list[int], fetch: list[int], budget: FetchBudget) -> int:
    """Follow the schedule use by use, assert what it promises, and return the peak of live bytes."""
    live: set[int] = set()
    ahead: set[int] = set()
    fetched: set[int] = set()
    peak = 0
    for position, (unit, needed) in enumerate(schedule.uses):
        if not needed:
            assert not schedule.gather_ahead[position] and not schedule.fetch_ahead[position]
            assert not schedule.keep[position]
            continue
        later = [use.unit for use in schedule.uses[position + 1 :] if use.needed]
        live.add(unit)
        ahead.discard(unit)
        fetched.discard(unit)
        for other in schedule.gather_ahead[position]:
            assert other not in live, "gathered twice"
            assert other in later, "gathered for nothing"
            live.add(other)
            ahead.add(other)
            fetched |= {other} if fetch[other] else set()
        for other in schedule.fetch_ahead[position]:
            assert fetch[other] > 0 and other not in live and other not in fetched and other in later
            fetched.add(other)
        nbytes = sum(full[other] for other in live)
        peak = max(peak, nbytes)
        if schedule.gather_ahead[position] or len(live) > 1:
            assert nbytes <= budget.live_nbytes_max or nbytes == full[unit]
        assert sum(full[other] for other in ahead) <= budget.prefetch_nbytes_max
        assert sum(fetch[other] for other in fetched) <= budget.fetch_nbytes_max
        if schedule.keep[position]:
            assert unit in later
            between = set(later[: later.index(unit)])
            assert sum(full[other] for other in between) <= budget.reuse_nbytes_max
        else:
            live.remove(unit)
    assert not live and not ahead and not fetched, "something was fetched and never used"
    return peak


@pytest.mark.parametrize("seed", range(300))
def test_a_schedule_keeps_its_promises(seed):
    rng = random.Random(seed)
    units = rng.randint(1, 9)
    full = [rng.choice([0, rng.randint(1, 20), 60]) for _ in range(units)]
    fetch = [rng.choice([0, rng.randint(1, 10)]) for _ in range(units)]
    if rng.random() < 0.5:
        order = rng.sample(range(units), units)
        trace = [*order, *order[::-1]]
    else:
        trace = [rng.randrange(units) for _ in range(rng.randint(0, 40))]
    budget = FetchBudget(*(rng.choice([0, 5, 20, 50, 100, NO_LIMIT]) for _ in range(4)))
    uses = [UnitAccess(unit, rng.random() < 0.8) for unit in trace]
    schedule = make_schedule(uses, full_nbytes=full, fetch_nbytes=fetch, budget=budget)
    assert schedule.uses == tuple(uses) and schedule.trace == tuple(trace) and len(schedule) == len(trace)
    assert execute(schedule, full, fetch, budget) == schedule.peak_nbytes


def forward_and_backward(units: int) -> list[int]:
    return [*range(units), *reversed(range(units))]


def test_without_limits_everything_is_gathered_once():
    budget = FetchBudget(NO_LIMIT, NO_LIMIT, NO_LIMIT, NO_LIMIT)
    uses = uses_of(forward_and_backward(5))
    schedule = make_schedule(uses, full_nbytes=[10] * 5, fetch_nbytes=[5] * 5, budget=budget)
    assert schedule.gather_ahead[0] == (1, 2, 3, 4) and not any(schedule.gather_ahead[1:])
    assert schedule.keep == (True,) * 5 + (False,) * 5 and schedule.peak_nbytes == 50


def test_a_budget_of_nothing_leaves_the_unit_in_use():
    schedule = make_schedule(
        uses_of(forward_and_backward(4)), full_nbytes=[10] * 4, fetch_nbytes=[5] * 4, budget=FetchBudget(0, 0, 0, 0)
    )
    assert schedule.peak_nbytes == 10 and not any(schedule.gather_ahead) and not any(schedule.fetch_ahead)
    # The last unit of the forward is the first of the backward.
    assert schedule.keep == (False, False, False, True, False, False, False, False)


def test_the_bound_on_what_is_ahead_holds_for_all_of_it():
    budget = FetchBudget(NO_LIMIT, 20, 0, 0)
    schedule = make_schedule(uses_of(range(6)), full_nbytes=[10] * 6, fetch_nbytes=[0] * 6, budget=budget)
    assert schedule.gather_ahead == ((1, 2), (3,), (4,), (5,), (), ())


def test_a_partition_that_is_gathered_ahead_counts_as_read_ahead():
    budget = FetchBudget(NO_LIMIT, NO_LIMIT, 0, 10)
    schedule = make_schedule(uses_of(range(4)), full_nbytes=[10] * 4, fetch_nbytes=[5] * 4, budget=budget)
    assert schedule.gather_ahead == ((1, 2), (3,), (), ())


def test_partitions_are_read_further_ahead_than_units_are_gathered():
    budget = FetchBudget(20, 10, 0, 15)
    schedule = make_schedule(uses_of(range(5)), full_nbytes=[10] * 5, fetch_nbytes=[5] * 5, budget=budget)
    assert schedule.gather_ahead[0] == (1,) and schedule.fetch_ahead[0] == (2, 3)


def test_the_shortest_reuse_is_kept_first():
    budget = FetchBudget(30, 0, NO_LIMIT, 0)
    uses = uses_of(forward_and_backward(4))
    schedule = make_schedule(uses, full_nbytes=[10] * 4, fetch_nbytes=[0] * 4, budget=budget)
    assert schedule.keep[:4] == (False, True, True, True)


@pytest.mark.parametrize(
    "budget", [FetchBudget(*[NO_LIMIT] * 4), FetchBudget(200, 100, 100, 100), FetchBudget(0, 0, 0, 0)]
)
def test_a_long_trace_is_scheduled_quickly(budget):
    trace = forward_and_backward(50) * 100
    with usual_seconds() as taken:
        make_schedule(uses_of(trace), full_nbytes=[10] * 50, fetch_nbytes=[5] * 50, budget=budget)
    assert taken.seconds < 5


LOOSE = FetchBudget(NO_LIMIT, NO_LIMIT, 0, NO_LIMIT)


def timed(use_seconds: float, *, fetch_rate: float, gather_rate: float, units: int = 8) -> FetchSchedule:
    timing = Timing(use_seconds=(use_seconds,) * units, fetch_rate=fetch_rate, gather_rate=gather_rate)
    return make_schedule(
        uses_of(range(units)), full_nbytes=[1000] * units, fetch_nbytes=[1000] * units, budget=LOOSE, timing=timing
    )


def test_what_comes_fast_is_gathered_just_before_its_use():
    schedule = timed(1.0, fetch_rate=1e6, gather_rate=1e6)
    assert schedule.gather_ahead == ((1,), (2,), (3,), (4,), (5,), (6,), (7,), ())
    assert schedule.peak_nbytes == 2000
    untimed = make_schedule(uses_of(range(8)), full_nbytes=[1000] * 8, fetch_nbytes=[1000] * 8, budget=LOOSE)
    assert untimed.peak_nbytes == 8000


def test_a_slow_drive_is_asked_earlier_than_a_fast_link():
    # Reading unit 5 takes 1.2 s, planned as 2.4: it is asked for at use 2 and gathered at use 4.
    timing = Timing(use_seconds=(1.0,) * 8, fetch_rate=1000 / 1.2, gather_rate=1e6)
    fetch = [0] * 5 + [1000, 0, 0]
    schedule = make_schedule(uses_of(range(8)), full_nbytes=[1000] * 8, fetch_nbytes=fetch, budget=LOOSE, timing=timing)
    assert [position for position, units in enumerate(schedule.fetch_ahead) if 5 in units] == [2]
    assert [position for position, units in enumerate(schedule.gather_ahead) if 5 in units] == [4]


def test_when_nothing_can_be_hidden_everything_is_submitted_at_once():
    slow = timed(1e-6, fetch_rate=1.0, gather_rate=1.0)
    untimed = make_schedule(uses_of(range(8)), full_nbytes=[1000] * 8, fetch_nbytes=[1000] * 8, budget=LOOSE)
    assert slow == untimed


@pytest.mark.parametrize("seed", range(30))
def test_what_is_submitted_late_still_arrives_in_time(seed):
    """A simulation: two links, one transfer at a time each. Where all can be in time by the schedule's own margin, all
    are, and the peak is never above that of the untimed schedule."""
    rng = random.Random(seed)
    units = rng.randint(3, 12)
    order = rng.sample(range(units), units)
    trace = [*order, *order[::-1]]
    full = [rng.randint(1, 100) for _ in range(units)]
    seconds = tuple(rng.uniform(0.5, 2.0) for _ in trace)
    timing = Timing(use_seconds=seconds, fetch_rate=rng.uniform(200, 2000), gather_rate=rng.uniform(200, 2000))
    budget = FetchBudget(NO_LIMIT, NO_LIMIT, 0, NO_LIMIT)
    schedule = make_schedule(uses_of(trace), full_nbytes=full, fetch_nbytes=full, budget=budget, timing=timing)
    untimed = make_schedule(uses_of(trace), full_nbytes=full, fetch_nbytes=full, budget=budget)
    assert schedule.peak_nbytes <= untimed.peak_nbytes
    now, drive, link = 0.0, 0.0, 0.0
    fetched: dict[int, float] = {}
    gathered: dict[int, float] = {}
    for position, unit in enumerate(trace):
        for other in (*schedule.gather_ahead[position], *schedule.fetch_ahead[position]):
            if other not in fetched:
                drive = max(drive, now) + full[other] / timing.fetch_rate
                fetched[other] = drive
        for other in schedule.gather_ahead[position]:
            link = max(link, now, fetched[other]) + full[other] / timing.gather_rate
            gathered[other] = link
        if position > 1 and trace[position - 1] != unit:
            assert gathered[unit] <= now + 1e-9, f"unit {unit} is late at use {position}"
        fetched.pop(unit, None)
        gathered.pop(unit, None)
        now += seconds[position]


def test_a_use_without_weights_changes_nothing_for_the_others():
    """A lookup's backward: the schedule is that of the other uses, whose computation goes on through it."""
    budget = FetchBudget(NO_LIMIT, 1500, 0, NO_LIMIT)
    seconds = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    uses = [UnitAccess(0), UnitAccess(1), UnitAccess(2), UnitAccess(2), UnitAccess(0, needed=False), UnitAccess(1)]
    sizes = {"full_nbytes": [1000] * 3, "fetch_nbytes": [1000] * 3, "budget": budget}
    rates = {"fetch_rate": 500.0, "gather_rate": 500.0}
    found = make_schedule(uses, timing=Timing(seconds, **rates), **sizes)
    others = make_schedule(
        [use for use in uses if use.needed], timing=Timing((1.0, 2.0, 3.0, 4.0 + 5.0, 6.0), **rates), **sizes
    )
    for name in ("gather_ahead", "fetch_ahead", "keep"):
        values = list(getattr(found, name))
        assert not values.pop(4)
        assert tuple(values) == getattr(others, name)
    assert found.peak_nbytes == others.peak_nbytes


def test_a_busy_drive_is_asked_earlier():
    """What it has begun takes 1 s, planned as 2."""
    fetch = [0] * 5 + [1000, 0, 0]
    sizes = {"full_nbytes": [1000] * 8, "fetch_nbytes": fetch, "budget": LOOSE}
    for latency, at in ((0.0, 2), (1.0, 0)):
        timing = Timing((1.0,) * 8, fetch_rate=1000 / 1.2, gather_rate=1e6, fetch_latency=latency)
        schedule = make_schedule(uses_of(range(8)), timing=timing, **sizes)
        assert [position for position, units in enumerate(schedule.fetch_ahead) if 5 in units] == [at]
        assert [position for position, units in enumerate(schedule.gather_ahead) if 5 in units] == [4]
