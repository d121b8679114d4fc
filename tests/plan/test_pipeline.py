"""Pipeline tables are torch's and cannot wait in a circle; what is derived from them is what a count by hand finds."""

from __future__ import annotations

from itertools import filterfalse

import pytest

from infinity.errors import ConfigError
from infinity.plan.pipeline import (
    Action,
    ActionKind,
    ActionSeconds,
    MessageLink,
    Tables,
    activations_in_flight,
    check_messages,
    check_tables,
    forward_tables,
    make_tables,
    message_order,
    sends_needed,
    time_tables,
    unit_uses,
)
from infinity.plan.prefetch import FetchBudget, FetchSchedule, UnitAccess, make_schedule
from tests.pipeline_tables import Cell, cells, compare, figures, prove, refusal

# With P = 8: fewer micro-batches than ranks, the widest ring, and the longest rounds.
CUT = [*cells((2, 3, 4), range(1, 12), (1, 2, 3)), *cells((8,), (7, 16, 22), (1, 3))]


def tables_of(*ranks: str) -> Tables:
    """Tables as they are written: one character each for stage, kind and micro-batch."""

    def action(text: str) -> Action:
        return Action(int(text[0]), ActionKind(text[1]), int(text[2]))

    return tuple(tuple(map(action, rank.split())) for rank in ranks)


def seconds_of(stages: int) -> ActionSeconds:
    """Equal times of F, I and W."""
    return ActionSeconds(*[(1.0,) * stages] * 3)


def test_tables_are_those_of_torch_and_refusals_name_the_nearest_numbers_that_torch_takes() -> None:
    verdicts = [compare(cell) for cell in CUT]
    assert {name: verdicts.count(name) for name in verdicts} == {"equal": 221, "refused": 54, "ours alone": 7}


def test_all_tables_have_every_dependency_met_and_form_no_circle() -> None:
    for cell in filterfalse(refusal, [*CUT, *cells((1, 5), (1, 3, 10), (1, 2))]):
        needed = prove(cell)
        # Only the ring that several chunks close can wait for itself.
        assert not needed or cell[3] > 1, cell
        if needed:
            with pytest.raises(ValueError, match="the ranks wait for each other"):
                check_messages(make_tables(*cell), sends_waiting=needed - 1)


def test_tables_of_forwards_alone_run_each_micro_batch_once_in_each_stage_and_form_no_circle() -> None:
    for pp in (1, 2, 3, 4):
        for m in range(1, 10):
            for virtual in (1, 2, 3):
                tables = forward_tables(pp, m, virtual)
                check_tables(tables, m)
                assert sorted(action[::2] for actions in tables for action in actions) == [
                    (stage, micro_batch) for stage in range(pp * virtual) for micro_batch in range(m)
                ]
                check_messages(tables, sends_waiting=0)
    assert " ".join(map(str, forward_tables(2, 3, 2)[1])) == "1F0 1F1 3F0 3F1 1F2 3F2"
    with pytest.raises(ConfigError, match=r"parallel\.virtual_stages is 0"):
        forward_tables(2, 1, 0)


def test_two_waiting_sends_a_link_are_too_few_for_zero_bubble_with_two_chunks_on_eight_ranks() -> None:
    tables = make_tables("zero_bubble", 8, 16, 2)
    assert sends_needed(tables) == 3
    # Receives posted further ahead do as well.
    assert sends_needed(tables, posted_ahead=4) == 0
    with pytest.raises(ValueError, match=r"rank 0 behind \d+I\d+ until rank 7 receives; rank 1 at \d+F\d+ for \d+F\d+"):
        check_messages(tables, sends_waiting=2)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (("0F0 0B0", "1B0 1F0"), "rank 0 at 0B0 for 1B0; rank 1 at 1B0 for 1F0"),
        (("0F0 2F0 2B0 0B0", "1F0 1B0 3F0 3B0"), "rank 0 at 2B0 for 3B0; rank 1 at 1B0 for 2B0"),
        (("0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"), r"stage 0 runs B of micro-batches \[1, 0\], not 0 to 1 in order"),
        (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), r"stage 0 runs B of micro-batches \[0\], not 0 to 1 in order"),
        (("0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1"), r"stage 0 runs B of micro-batches \[0, 1, 1\]"),
        (("0F0 0I0", "1F0 1I0"), "stage 0 runs F I; it must run F and B, or F, I and W"),
        (("0F0", "1F0 1B0"), "stage 0 runs F; it must run F and B, or F, I and W"),
        (("0F0", "2F0"), "stage 1 runs nothing"),
        (("0F0 0B0", "2F0 2B0"), "stage 1 runs nothing"),
        (("0F0 0B0 1F0", "1F0 1B0"), "stage 1 lies on rank 1, and 1F0 on rank 0"),
        (("0F0 0W0 0I0", "1F0 1I0 1W0"), "rank 0 at 0W0 for 0I0"),
    ],
)  # fmt: skip
def test_broken_tables_are_reported(broken: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_tables(tables_of(*broken), 1 + max(int(each[2]) for each in broken[1].split()))


def test_the_tables_of_four_ranks_and_eight_micro_batches_have_the_bubbles_and_activations_of_the_design() -> None:
    found = {(each["schedule"], each["virtual"]): (each["bubble"], each["stages_in_flight"]) for each in figures()}
    bubbles = {key: round(100 * bubble) for key, (bubble, _) in found.items()}
    assert bubbles == {
        ("gpipe", 1): 27, ("1f1b", 1): 27, ("interleaved", 2): 16, ("zero_bubble", 1): 11, ("zero_bubble", 2): 6
    }  # fmt: skip
    assert {key: stages for key, (_, stages) in found.items()} == {
        ("gpipe", 1): [8, 8, 8, 8], ("1f1b", 1): [4, 3, 2, 1], ("interleaved", 2): [5.5, 4.5, 3.5, 2.5],
        ("zero_bubble", 1): [4, 4, 4, 4], ("zero_bubble", 2): [4, 4, 4, 4],
    }  # fmt: skip


@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_bubble_and_activations_of_gpipe_and_1f1b_have_their_closed_forms(pp: int, m: int) -> None:
    for schedule, peaks in (("gpipe", (m,) * pp), ("1f1b", tuple(min(m, pp - rank) for rank in range(pp)))):
        tables = make_tables(schedule, pp, m)
        assert time_tables(tables, seconds_of(pp)).bubble == pytest.approx((pp - 1) / (m + pp - 1))
        assert activations_in_flight(tables) == peaks


def test_activations_are_counted_in_what_each_stage_saves_and_what_split_backwards_defer() -> None:
    (actions,) = tables_of("0F0 1F0 0F1 1I0 1F1 1W0")
    assert activations_in_flight((actions,), saved=(10, 3)) == (10 + 3 + 10 + 3,)
    # From the I on, 1 of the 3 stays until the W.
    assert activations_in_flight((actions,), saved=(10, 3), deferred=(9, 1)) == (10 + 10 + 1 + 3,)
    # An I may queue more than the forward had saved.
    assert activations_in_flight((actions,), saved=(10, 3), deferred=(9, 7)) == (10 + 10 + 7 + 3,)


def test_actions_begin_when_their_rank_is_free_and_messages_have_come_one_after_the_other() -> None:
    gpipe = time_tables(make_tables("gpipe", 2, 2), seconds_of(2), message_seconds=3.0)
    assert gpipe.spans == (((0, 1), (1, 2), (13, 15), (16, 18)), ((4, 5), (7, 8), (8, 10), (10, 12)))
    assert gpipe.makespan == 18
    assert gpipe.idle == (12, 12)
    # I sends before W computes; stages take different times.
    zero_bubble = time_tables(make_tables("zero_bubble", 2, 1), ActionSeconds((1, 2), (3, 1), (1, 5)))
    assert zero_bubble.spans == (((0, 1), (4, 7), (7, 8)), ((1, 3), (3, 4), (4, 9)))
    assert zero_bubble.bubble == pytest.approx((4 + 1) / 18)
    # Chunks of one rank need no message.
    assert time_tables(make_tables("interleaved", 1, 2, 2), seconds_of(2), message_seconds=9.0).bubble == 0


def test_messages_of_a_link_have_the_senders_order_and_the_ring_closes_between_chunks() -> None:
    order = message_order(make_tables("interleaved", 2, 2, 2))
    assert {link: " ".join(map(str, actions)) for link, actions in order.items()} == {
        MessageLink(0, 1, True): "0F0 0F1 2F0 2F1", MessageLink(1, 0, True): "1F0 1F1",
        MessageLink(1, 0, False): "3B0 3B1 1B0 1B1", MessageLink(0, 1, False): "2B0 2B1",
    }  # fmt: skip
    assert not message_order(make_tables("interleaved", 1, 2, 2))


def test_uses_are_in_order_forwards_and_reversed_backwards_and_weight_gradients_use_nothing() -> None:
    (actions,) = tables_of("0F0 2F0 2I0 2W0 0I0 0W0")
    lookup = UnitAccess(7, needed=False)
    found = unit_uses(actions, {0: (7, 4, 7), 2: (5, 6)}, {0: {0}})
    assert found == (*map(UnitAccess, (7, 4, 7, 5, 6, 6, 5, 7, 4)), lookup)
    whole = tables_of("0F0 2F0 2B0 0B0")[0]
    assert unit_uses(whole, {0: (7, 4, 7), 2: (5, 6)}, {0: {0}}) == found


def test_a_stage_is_gathered_once_a_step_where_it_fits_and_ahead_over_action_boundaries_where_not() -> None:
    uses = unit_uses(make_tables("1f1b", 2, 3)[0], {0: (0, 1, 2)})
    assert [use.unit for use in uses] == [0, 1, 2, *[0, 1, 2, 2, 1, 0] * 2, 2, 1, 0]

    def scheduled(live: int, reuse: int) -> FetchSchedule:
        budget = FetchBudget(live, live, reuse, live)
        return make_schedule(uses, full_nbytes=(1, 1, 1), fetch_nbytes=(0, 0, 0), budget=budget)

    assert len(uses) - sum(scheduled(3, 3).keep) == 3
    tight = scheduled(2, 0)
    # Unit 0 of the next forward, behind the last unit of the first.
    assert tight.gather_ahead[2] == (0,)
    assert tight.peak_nbytes == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("interleaved", 4, 9, 2), r"9 micro-batches in 2 equal rounds.* nearest .* are 8 and 10$"),
        (("zero_bubble", 2, 5, 1), r"5 micro-batches in 2 equal rounds.* nearest .* are 4 and 6$"),
        (("1f1b", 4, 8, 2), r"runs one stage a rank, and parallel.virtual_stages is 2; set it to 1"),
        (("gpipe", 4, 8, 3), r"'gpipe' runs one stage a rank"),
        (("zbv", 4, 8, 1), r"parallel.schedule is 'zbv'; the schedules are gpipe, 1f1b, interleaved, zero_bubble"),
        (("gpipe", 0, 8, 1), r"parallel.pipeline is 0; it must be at least 1"),
        (("gpipe", 2, 0, 1), r"the number of micro-batches is 0"),
        (("interleaved", 2, 2, 0), r"parallel.virtual_stages is 0"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_exist_are_refused(given: Cell, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_tables(*given)
