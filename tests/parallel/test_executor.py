"""A step by any table has the bits of a sequential one, its messages have the forms that were sent, and its bubble is
the planned one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from infinity.base import trace
from infinity.distributed.collectives import exchange
from infinity.distributed.consistency import agree_on_numbers
from infinity.distributed.groups import ProcessGroups, Ranks, detect
from infinity.distributed.links import Boundary, Gradients
from infinity.errors import ConfigError
from infinity.parallel.executor import PipelineExecutor
from infinity.plan.pipeline import (
    Action,
    ActionKind,
    ActionSeconds,
    MessageLink,
    Tables,
    forward_tables,
    make_tables,
    time_tables,
)
from infinity.plan.types import Topology
from tests.parallel.stages import WIDTH, AffineStages, in_sequence, length_of, links_of
from tests.pipeline_tables import Cell, cells
from tests.support.cells import kept


def all_tables(pp: int) -> Iterator[tuple[Cell, Tables]]:
    for cell in cells((pp,), range(1, 10), (1, 2, 3)):
        try:
            yield cell, make_tables(*cell)
        except ConfigError:
            continue
    for m in (1, 4, 9):
        for virtual in (1, 2, 3):
            yield ("forward", pp, m, virtual), forward_tables(pp, m, virtual)


def run_all(rank: int, world: int, keyed: bool) -> list[tuple[Cell, str]]:
    """The cells in which this rank's losses, gradients or order of actions are not the expected ones."""
    torch.set_num_threads(1)
    groups = ProcessGroups(detect(), Topology(pp=world, local_size=world), timeout_seconds=60)
    links = links_of(groups)
    executor, wrong = PipelineExecutor(links, index=groups.pipeline.index), []
    for cell, tables in all_tables(world):
        schedule, _, m, virtual = cell
        if not keyed and m not in (2, 9):
            continue
        own = range(rank, world * virtual, world)
        trains = schedule != "forward"
        stages = AffineStages(world * virtual, own, split=schedule == "zero_bubble", trains=trains)
        links.forget()
        executor.run(tables, stages, [length_of(each) for each in range(m)] if keyed else ())
        wrong += [(cell, what) for what in _differences(stages, in_sequence(world * virtual, m), tables[rank])]
        agree_on_numbers([1.0], groups.world, "exchange of norms")
    groups.close()
    return wrong


def _values(losses: dict[int, Tensor]) -> dict[int, float]:
    return {micro_batch: loss.item() for micro_batch, loss in losses.items()}


def _differences(stages: AffineStages, whole: AffineStages, actions: tuple[Action, ...]) -> Iterator[str]:
    if tuple(stages.order) != actions:
        yield "order"
    if stages.last in stages.weights and _values(stages.losses) != _values(whole.losses):
        yield "losses"
    if not stages.trains:
        return
    if any(
        not torch.equal(mine, theirs)
        for stage in stages.weights
        for mine, theirs in zip(stages.sums[stage], whole.sums[stage], strict=True)
    ):
        yield "weights"
    if 0 in stages.weights and any(not torch.equal(grad, whole.inputs[each]) for each, grad in stages.inputs.items()):
        yield "inputs"


@pytest.mark.parametrize(
    ("ranks", "keyed"),
    kept([(ranks, keyed) for keyed in (True, False) for ranks in (2, 3, 4)], [(2, True), (3, False), (4, True)]),
)
def test_every_table_has_the_bits_of_a_sequential_step(rank_pools: Any, ranks: int, keyed: bool) -> None:
    assert rank_pools[ranks].run(run_all, keyed, timeout=200) == [[]] * ranks


def test_one_rank_runs_all_its_stages_without_a_process_group() -> None:
    groups = ProcessGroups(Ranks(), timeout_seconds=5)
    for cell, tables in all_tables(1):
        schedule, _, m, virtual = cell
        stages = AffineStages(virtual, range(virtual), split=schedule == "zero_bubble", trains=schedule != "forward")
        PipelineExecutor(links_of(groups), index=0).run(tables, stages)
        assert not list(_differences(stages, in_sequence(virtual, m), tables[0])), cell


class Sleeping:
    """A handler that computes nothing for a while. busy: the seconds for which it has slept."""

    def __init__(self) -> None:
        self.busy = 0.0

    def forward(self, action: Action, received: Boundary | None) -> Boundary | None:
        self._sleep(1)
        return (torch.ones(4, requires_grad=True),)

    def backward(self, action: Action, grads: Gradients | None) -> Gradients | None:
        self._sleep(2 if action.kind is ActionKind.BACKWARD else 1)
        return (torch.ones(4),)

    def backward_weight(self, action: Action) -> None:
        self._sleep(1)

    def _sleep(self, blocks: int) -> None:
        began = time.perf_counter()
        time.sleep(blocks * BLOCK_SECONDS)
        self.busy += time.perf_counter() - began


# Noise only adds time: the best of some tries counts.
BLOCK_SECONDS, TRIES, POINTS = 0.02, 15, 0.03
SLEPT = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))

# The planned bubble without and with the time of messages, and the one measured.
Bubbles = tuple[float, float, float]


def sleep_through(rank: int, world: int) -> list[Bubbles]:
    """By schedule, the bubbles of one step. The time of a message is measured just before, by torch alone."""
    torch.set_num_threads(1)
    groups = ProcessGroups(detect(), Topology(pp=world, local_size=world), timeout_seconds=60)
    executor, found = PipelineExecutor(links_of(groups), index=rank), []
    for schedule, virtual in SLEPT:
        tables, seconds = make_tables(schedule, world, 8, virtual), (BLOCK_SECONDS,) * world * virtual
        tries: list[Bubbles] = []
        while len(tries) < TRIES and not any(map(planned_well, tries)):
            message, mine = _message_seconds(groups), Sleeping()
            exchange([0.0], groups.world, "begin")
            began = time.perf_counter()
            executor.run(tables, mine, [0] * 8)
            rows = exchange([time.perf_counter() - began, mine.busy, message], groups.world, "times")
            makespan, busy = max(row[0] for row in rows), sum(row[1] for row in rows)
            without, with_messages = (
                time_tables(tables, ActionSeconds(seconds, seconds, seconds), message_seconds=each).bubble
                for each in (0.0, max(row[2] for row in rows))
            )
            tries.append((without, with_messages, 1 - busy / (world * makespan)))
        found.append(min(tries, key=lambda bubbles: bubbles[2] - bubbles[1]))
    groups.close()
    return found


def planned_well(bubbles: Bubbles) -> bool:
    without, with_messages, measured = bubbles
    return without - POINTS < measured < with_messages + POINTS


def _message_seconds(groups: ProcessGroups) -> float:
    """From the end of a block to the beginning of the next one on another rank, which waits for a message of the first:
    two ranks take turns, with calls of torch alone. The mean of some, in the first rank of a pair.
    """
    members, index = groups.pipeline_forward.process_group, groups.pipeline.index
    rounds, other, going = 8, index ^ 1, []
    began = time.perf_counter()
    for turn in range(2 * rounds):
        coming = dist.irecv(torch.empty(4), group=members, group_src=other, tag=turn) if turn % 2 != index % 2 else None
        if coming is not None:
            coming.wait()
        else:
            time.sleep(BLOCK_SECONDS)
            going.append(dist.isend(torch.ones(4), group=members, group_dst=other, tag=turn))
    seconds = (time.perf_counter() - began) / (2 * rounds) - BLOCK_SECONDS
    for work in going:
        assert work is not None
        work.wait()
    return seconds if index % 2 == 0 else 0.0


def test_the_bubble_of_sleeping_stages_is_the_planned_one(rank_pools: Any) -> None:
    for schedule, bubbles in zip(SLEPT, rank_pools[4].run(sleep_through, timeout=200)[0], strict=True):
        assert planned_well(bubbles), (schedule, bubbles)


def watched(rank: int, world: int) -> dict[str, Any]:
    """What the links tell the watchdog and the trace in three steps, the first two of which have the same keys."""
    groups = ProcessGroups(detect(), Topology(pp=world, local_size=world), timeout_seconds=60)
    links, tables = links_of(groups), make_tables("1f1b", world, 6)
    executor, watchdog = PipelineExecutor(links, index=rank), groups.watchdog
    assert watchdog is not None
    headers, keys = [], [length_of(each) for each in range(6)]
    recording = trace.start_recording()
    for step_keys in (keys, keys, [*keys[:5], None]):
        executor.run(tables, AffineStages(world, [rank]), step_keys)
        names = [name for history in watchdog.log.histories() for name in history.values()]
        headers.append(sum("the shapes of" in name for name in names))
    recording.stop()
    agree_on_numbers([1.0], groups.world, "exchange of norms")
    channel = watchdog.channels.of_link(MessageLink(0, 1, True))
    history = list(watchdog.log.histories()[channel].values())
    waits = {(span.cause, str(span.subject)) for span in recording.spans if span.what == trace.WAIT}
    flights = {(each.lane, str(each.subject), each.nbytes) for each in recording.flights if each.over}
    groups.close()
    return {"headers": headers, "history": history, "waits": waits, "flights": flights}


def test_a_header_goes_ahead_of_new_shapes_only_and_messages_are_watched_and_traced(rank_pools: Any) -> None:
    first, second = rank_pools[2].run(watched)
    # Five lengths in six micro-batches; and one without a key.
    assert first["headers"] == second["headers"] == [5, 5, 6]
    assert first["history"] == second["history"], "both ends"
    nbytes = 4 * length_of(0) * WIDTH
    assert first["history"][:5] == [
        "the first message of a link, 1 bytes", "the shapes of activation 0 of stage 0, 2048 bytes",
        f"activation 0 of stage 0, {nbytes} bytes", "activation 0 of stage 0, tensor 1, 8 bytes",
        f"activation 0 of stage 0, tensor 2, {nbytes // 2} bytes",
    ]  # fmt: skip
    assert ("gradient of an activation", "the gradient of micro-batch 2 behind stage 0") in first["waits"]
    assert ("receiver", "activation 5 of stage 0") in first["waits"]
    assert ("activation", "activation 4 of stage 0") in second["waits"]
    assert ("sends", "activation 0 of stage 0", nbytes + 8 + nbytes // 2) in first["flights"]
    assert ("receives", "activation 0 of stage 0", nbytes + 8 + nbytes // 2) in second["flights"]
    assert ("sends", "the gradient of micro-batch 0 behind stage 0", nbytes + nbytes // 2) in second["flights"]


class Changing(AffineStages):
    """A stage whose boundary has one tensor less in the second step."""

    def outputs(self, stage: int, received: Boundary) -> Boundary:
        made = super().outputs(stage, received)
        return made[:2] if self.case == "changes" and stage == 0 else made

    case = ""


def refuse(rank: int, world: int) -> dict[str, str]:
    """By case, the error of the first rank."""
    found = {}
    for case in ("changes", "raises", "none", "closed"):
        groups = ProcessGroups(detect(), Topology(pp=world, local_size=world), timeout_seconds=60)
        executor, tables = PipelineExecutor(links_of(groups), index=rank), make_tables("gpipe", world, 2)
        stages = Changing(world, [rank])
        executor.run(tables, stages, [(1,), (2,)])
        exchange([0.0], groups.world, "first step")
        if rank == 0:
            found[case] = _second(case, groups, executor, tables, stages)
        else:
            time.sleep(0.1)
        groups.close()
    return found


def _second(
    case: str, groups: ProcessGroups, executor: PipelineExecutor, tables: Tables, stages: Changing
) -> str:  # fmt: skip
    texts = []
    if case == "closed":
        groups.close()
    stages.case = case
    if case in ("raises", "none"):
        stages.forward = lambda action, received: None if case == "none" else 1 / 0  # type: ignore[assignment]
    for _ in range(2):
        try:
            executor.run(tables, stages, [(1,), (2,)])
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
    return " | ".join(texts)


def test_what_cannot_be_sent_is_refused_and_ends_the_links(rank_pools: Any) -> None:
    found, _ = rank_pools[2].run(refuse)
    again = "StateError: the pipeline's messages are out of step since an error in an earlier step"
    for case, words in {
        "changes": "StateError: activation 0 of stage 0 is float32 [6, 3] (trained), int64 [], and was float32 [6, 3] ("
        "trained), int64 [], float32 [3, 3] (trained) for a micro-batch with the same key",
        "raises": "ZeroDivisionError: division by zero ['in the forward of micro-batch 0 in stage 0']",
        "none": "StateError: 0F0: the handler returned None, and another stage waits for tensors",
        "closed": "StateError: the pipeline's process groups are closed",
    }.items():
        first, second = found[case].split(" | ")
        assert first.startswith(words), first
        assert second.startswith(again), second
