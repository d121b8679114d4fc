"""A model in stages trains as one on a rank that accumulates: what the suite keeps of `tests.pipeline_matrix`."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import ConfigError, StateError
from infinity.plan.prefetch import FetchSchedule
from infinity.zero.parameter import is_elsewhere
from infinity.zero.unit import GatherState, Unit
from tests.conftest import RankPools
from tests.pipeline_matrix import Cell, batches, build, compare_exact, configuration, one_rank
from tests.support.oracle import join
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.timeout(300)

# Each schedule with stage, tier, precision and clipping; together they have every value of each.
LLAMA = Cell("llama", "fp32", 3, "nvme", 0.5)
MUON = Cell("llama", "bf16", 3, "nvme", 0.5, "Muon")
NEOX = Cell("gpt_neox", "bf16", 0, "gpu", 0.0)
MIXTRAL = Cell("mixtral", "bf16", 3, "gpu", 0.5)
CELLS = {
    4: {LLAMA: [("1f1b", 1)], NEOX: [("zero_bubble", 1)]},
    2: {MUON: [("zero_bubble", 2)], NEOX: [("gpipe", 1)], MIXTRAL: [("interleaved", 2)]},
}


def exact(rank: int, world: int, expected: dict[Cell, dict[str, Any]]) -> list[dict[str, Any]]:
    cells = CELLS[world].items()
    return [row for cell, each in cells for row in compare_exact(rank, world, {cell: expected[cell]}, each)]


def test_every_schedule_has_the_bits_of_accumulation_on_one_rank(rank_pools: RankPools) -> None:
    expected = rank_pools[1].run(one_rank, [LLAMA, MUON, NEOX, MIXTRAL], timeout=280)[0]
    rows = [row for world in CELLS for row in rank_pools[world].run(exact, expected, timeout=280)[0]]
    assert [row for row in rows if not row["right"]] == []
    # The first step may use units otherwise than the tree tells (experts); from then on the schedule is the model's.
    assert max(row["mismatches"] for row in rows) <= 1
    assert len(rows) == 5


def refusals(rank: int, world: int) -> list[str]:
    join(world)
    torch.set_num_threads(1)
    said = []

    def refused(call: Any, kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=words) as caught:
            call()
        said.append(str(caught.value))

    parallel = {"pipeline": world}
    with tempfile.TemporaryDirectory() as drive:
        config = configuration(drive, parallel, count=4, stage=3, param="nvme", optimizer="nvme")
        for changed, words in (
            ({"stages": [4, 3]}, r"parallel\.stages is \[4, 3\].* sum is the 8 blocks"),
            ({"schedule": "interleaved", "virtual_stages": 5}, "at most 8 stages"),
            ({"virtual_stages": 2}, "runs one stage a rank, and parallel.virtual_stages is 2"),
            ({"schedule": "interleaved", "virtual_stages": 2}, ""),
        ):
            given = config | {"parallel": parallel | changed}
            if words:
                refused(lambda given=given: infinity.initialize(model=build("llama"), config=given), ConfigError, words)
        routed = build("mixtral", output_router_logits=True)
        refused(lambda: infinity.initialize(model=routed, config=config), ConfigError, "output_router_logits=False")
        engine, *_ = infinity.initialize(model=build("llama"), config=config)
        with engine:
            fed = batches(0, count=4)
            refused(lambda: engine(**fed[0]), StateError, r"call engine\.train_batch")
            refused(lambda: engine.backward(torch.ones((), requires_grad=True)), StateError, "runs a whole model")
            refused(engine.step, StateError, "runs a whole model")
            refused(lambda: engine.train_batch(fed[:3]), ConfigError, "3 micro-batches, and a step has 4")
            refused(lambda: engine.train_batch(fed[0]), ConfigError, "a list of 4 micro-batches or an iterator")
            refused(engine.train_batch, ConfigError, "it was given none")
            other = next(filter(is_elsewhere, engine.module.parameters()))
            refused(lambda: other.sum(), StateError, f"belongs to another stage of the pipeline, .* pp {1 - rank}")
            # Nothing of that has harmed it.
            before = float(engine.eval_batch(iter(fed)))
            for _ in range(3):
                engine.train_batch(iter(fed))
            said.append(f"loss {before > float(engine.eval_batch(fed[:1]))} {engine.global_steps} {engine.training}")
    return said


def gathers(rank: int, world: int) -> list[str]:
    join(world)
    torch.set_num_threads(1)
    began: Counter[int] = Counter()
    start = Unit.start_gather

    def counted(unit: Unit, **how: bool) -> None:
        began[unit.layout.index] += unit.state is GatherState.PARTITIONED
        start(unit, **how)

    wrong = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "start_gather", counted)
        for live, schedule, virtual in ((10**9, "1f1b", 1), (10**9, "zero_bubble", 2), (30_000, "1f1b", 1)):
            zero = {
                "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": live,
                "stage3_max_reuse_distance": live, "stage3_prefetch_bucket_size": live // 4,
            }  # fmt: skip
            parallel = {"pipeline": world, "schedule": schedule, "virtual_stages": virtual}
            with tempfile.TemporaryDirectory() as drive:
                config = configuration(drive, parallel, stage=3, param="cpu", optimizer="cpu", zero=zero)
                engine, *_ = infinity.initialize(model=build("llama"), config=config)
                with engine:
                    # The prefetches of the third step are timed.
                    for step in range(5):
                        began.clear()
                        engine.train_batch(batches(step))
                    planned = planned_gathers(engine.coordinator.prefetcher._schedules["train"])
                    if +began != planned:
                        wrong.append(f"{live} {schedule}: gathered {began}, planned {planned}")
                    if live == 10**9 and set(planned.values()) != {1}:
                        wrong.append(f"{schedule}: planned {planned} with room for the whole stage")
                    if engine.coordinator.mismatches > (live < 10**9):
                        wrong.append(f"{live} {schedule}: {engine.coordinator.mismatches} passes off the schedule")
    return wrong


def planned_gathers(schedule: FetchSchedule) -> Counter[int]:
    """How often a step gathers each unit by its schedule."""
    found: Counter[int] = Counter()
    live = set()
    for use, keep in zip(schedule.uses, schedule.keep, strict=True):
        if use.needed:
            found[use.unit] += use.unit not in live
            (live.add if keep else live.discard)(use.unit)
    return found


def test_a_unit_is_gathered_as_scheduled_and_once_where_the_stage_has_room() -> None:
    assert run_ranks(gathers, 2, timeout=280) == [[], []]


def test_what_a_stage_cannot_do_is_refused_with_what_it_can() -> None:
    first, second = run_ranks(refusals, 2, timeout=280)
    assert first[-1] == second[-1] == "loss True 3 True"
    assert [re.sub(r"pp \d", "", each) for each in first[:-2]] == [re.sub(r"pp \d", "", each) for each in second[:-2]]


def test_train_batch_without_a_pipeline_is_the_loop() -> None:
    found = []
    for whole in (True, False):
        with tempfile.TemporaryDirectory() as drive:
            config = configuration(drive, {}, count=4, stage=3, param="cpu", optimizer="nvme")
            engine, *_ = infinity.initialize(model=build("llama"), config=config)
            with engine:
                losses = []
                for step in range(2):
                    if whole:
                        losses.append(float(engine.train_batch(batches(step, count=4))))
                        continue
                    each = []
                    for batch in batches(step, count=4):
                        loss = engine(**batch).loss
                        engine.backward(loss)
                        engine.step()
                        each.append(float(loss.detach()))
                    losses.append(float(torch.tensor(sum(each) / 4)))
                held = {name: infinity.state(param).master for name, param in engine.module.named_parameters()}
                found.append((losses, engine.micro_steps, engine.global_steps, held))
    (losses, *counts, weights), (others, *theirs, expected) = found
    assert losses == pytest.approx(others, rel=1e-7)
    assert counts == theirs == [8, 2]
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
