"""A program that says itself where each optimizer step ends gets the steps that the engine's own count gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError
from tests.support.cells import kept
from tests.support.oracle import ADAM, CLIP, Case, Result, collect, difference, join, settings, train

TIERS = ("gpu", "cpu", "nvme")
FULL, SHORT = (4, 4, 4), (4, 3, 4)
UNCHECKED = {"enabled": True, "check_grad_overflow": False}
WEIGHTS, NORMS = 1e-6, 1e-5


class Broken(RuntimeError):
    """Raised by a model in the middle of a backward."""


def nothing(engine: Engine) -> None:
    """Do nothing between a micro-batch's forward and its backward."""


def run_groups(
    engine: Engine, case: Case, rank: int, groups: Sequence[int], between: Callable[[Engine], None] = nothing
) -> Result:
    """Drive an engine as accelerate does: the flag before each backward, `step()` once a group."""
    result, micro = Result(), itertools.count()
    for size in groups:
        for at in range(size):
            (loss,) = case.losses(engine, rank, next(micro))
            between(engine)
            engine.set_gradient_accumulation_boundary(at == size - 1)
            engine.backward(loss)
        engine.step()
        engine.store.check()
        assert engine.was_step_applied()
        result.norms.append(engine.get_global_grad_norm())
    collect(engine, result)
    return result


def flagged(
    case: Case, config: dict[str, Any], rank: int, groups: Sequence[int],
    between: Callable[[Engine], None] = nothing,
) -> Result:  # fmt: skip
    """Train by `run_groups`, and check what is counted."""
    model = case.model()
    engine, *_ = infinity.initialize(model=model, config=config, model_parameters=case.groups(model))
    with engine:
        result = run_groups(engine, case, rank, groups, between)
        counted = (engine.global_steps, engine.micro_steps, engine.global_samples)
        assert counted == (len(groups), sum(groups), 2 * engine.world_size * sum(groups))
    return result


def plain(case: Case, world: int, groups: Sequence[int], *, divisor: int, clip: float) -> Result:
    """The same groups in plain torch, with every loss divided by `divisor`."""
    model, result = case.model(), Result()
    optimizer = torch.optim.AdamW(case.groups(model), **ADAM, fused=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    micro = itertools.count()
    for size in groups:
        for number in itertools.islice(micro, size):
            for rank in range(world):
                (loss,) = case.losses(model, rank, number)
                (loss / (divisor * world)).backward()
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    result.master = {name: param.detach().clone() for name, param in model.named_parameters()}
    return result


def compare(rank: int, world: int, folder: str, rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with each row: against the engine's own count, bit by bit, and against plain torch."""
    join(world)
    wrong = []
    for row in rows:
        config = settings(folder, accumulation=4, **row)
        counted = train(Case(), config, rank=rank, steps=len(FULL))
        full = flagged(Case(), config, rank, FULL)
        if full.digest != counted.digest:
            wrong.append(f"{row}: not the bits of the engine's own count")
        if "bf16" in row:
            continue
        for groups, found in ((FULL, full), (SHORT, flagged(Case(), config, rank, SHORT))):
            expected = plain(Case(), world, groups, divisor=4, clip=row.get("clip", 0.0))
            weights, norms, _ = difference(found, expected)
            if weights > WEIGHTS or norms > NORMS:
                wrong.append(f"{row}, {groups}: weights {weights:.1e}, norms {norms:.1e} from plain torch")
    return wrong


def rows_of(stages: Sequence[int], tiers: Sequence[str]) -> list[dict[str, Any]]:
    """Rows by stage and tier, every other one with clipping."""
    return [
        {"stage": stage, "param": tier if stage == 3 else "gpu", "optimizer": tier, "clip": (stage + at) % 2 * CLIP}
        for stage in stages
        for at, tier in enumerate(tiers)
    ]


# Begins its steps inside backward.
EARLY = {"param": "nvme", "optimizer": "nvme", "bf16": UNCHECKED, "zero": {"sub_group_size": 640}}


@pytest.mark.parametrize("world", kept([1, 2], [1]))
def test_groups_that_the_program_ends_train_as_those_that_the_engine_counts(rank_pools, tmp_path, world):
    rows = [*rows_of((0, 1), ("cpu",)), *rows_of((2,), ("nvme",)), *rows_of((3,), ("gpu", "nvme")), EARLY]
    assert rank_pools[world].run(compare, str(tmp_path / "nvme"), rows, timeout=200) == [[]] * world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "world", "tiers"),
    kept([*itertools.product((0, 1, 2, 3), (1, 2), [TIERS]), (3, 2, ("nvme",))], [(3, 2, ("nvme",))]), ids=str,
)
def test_every_stage_and_tier_does(rank_pools, tmp_path, stage, world, tiers):
    rows = rows_of((stage,), tiers)
    assert rank_pools[world].run(compare, str(tmp_path / "nvme"), rows, timeout=200) == [[]] * world


PLACES = (2, "gpu"), (2, "nvme"), (3, "cpu"), (3, "gpu"), (3, "nvme")


def summed_once(rank: int, world: int, folder: str, few: bool) -> list[str]:
    """What is wrong where gradients are summed over ranks once a step, against stage 1, which always does."""
    join(world)
    wrong = []
    for dtype, clip, places in (
        ("fp32", 0.0, PLACES[::2] if few else PLACES), ("bf16", CLIP, PLACES[1::2] if few else PLACES),
    ):  # fmt: skip

        def run(dtype: str = dtype, clip: float = clip, **how: Any) -> tuple[str, int]:
            counts: list[int] = []

            def look(engine: Engine) -> None:
                assert engine.groups.watchdog is not None
                counts.append(engine.groups.watchdog.log.counts[engine.groups.reduction.channel])

            config = settings(folder, dtype=dtype, clip=clip, accumulation=3, **how)
            return train(Case(), config, rank=rank, steps=2, look=look).digest, counts[0]

        expected = run(stage=1)
        each = run(stage=3)
        for stage, tier in places:
            param = tier if stage == 3 else "gpu"
            found = run(stage=stage, param=param, optimizer=tier, parallel={"reduce": "step"})
            if found != expected:
                wrong.append(f"{dtype}, stage {stage} on {tier}: {found}, at stage 1 {expected}")
        if each == expected or each[1] < 2 * expected[1]:
            wrong.append(f"{dtype}: {each} after each micro-batch, {expected} at stage 1: not another order of sums")
    return wrong


@pytest.mark.parametrize("few", kept([True, False], [True]))
def test_gradients_that_are_summed_once_a_step_have_the_bits_of_stage_1(rank_pools, tmp_path, few):
    assert rank_pools[2].run(summed_once, str(tmp_path / "nvme"), few, timeout=200) == [[]] * 2


def test_evaluation_between_forward_backward_and_step_changes_nothing(tmp_path):
    def evaluate(engine: Engine) -> None:
        engine.eval()
        with torch.no_grad():
            for _ in Case().losses(engine, 0, 100):
                pass
        engine.train()

    for row in ({"param": "nvme", "optimizer": "nvme"}, EARLY):
        config = settings(tmp_path, accumulation=4, **row)
        assert flagged(Case(), config, 0, SHORT, evaluate).digest == flagged(Case(), config, 0, SHORT).digest


def test_the_flag_may_be_set_before_forward_and_holds_until_it_is_set_again(tmp_path):
    """As DeepSpeed's own documentation does it."""
    case, config = Case(), settings(tmp_path, accumulation=4, **EARLY)
    model = case.model()
    engine, *_ = infinity.initialize(model=model, config=config, model_parameters=case.groups(model))
    result, micro = Result(), itertools.count()
    with engine:
        for size in SHORT:
            engine.set_gradient_accumulation_boundary(False)
            for at in range(size):
                if at == size - 1:
                    engine.set_gradient_accumulation_boundary(True)
                (loss,) = case.losses(engine, 0, next(micro))
                engine.backward(loss)
                assert engine.is_gradient_accumulation_boundary() == (at == size - 1)
            engine.step()
        collect(engine, result)
    assert result.digest == flagged(case, config, 0, SHORT).digest


def test_steps_that_are_called_after_every_backward_act_where_the_flag_says(tmp_path):
    case, config = Case(), settings(tmp_path, accumulation=4)
    model = case.model()
    engine, *_ = infinity.initialize(model=model, config=config, model_parameters=case.groups(model))
    result, micro = Result(), itertools.count()
    with engine:
        for size in SHORT:
            for at in range(size):
                (loss,) = case.losses(engine, 0, next(micro))
                engine.set_gradient_accumulation_boundary(at == size - 1)
                engine.backward(loss)
                engine.step()
                assert engine.was_step_applied() == (at == size - 1)
        collect(engine, result)
        counted = (engine.global_steps, engine.micro_steps, engine.global_samples)
        assert counted == (len(SHORT), sum(SHORT), 2 * sum(SHORT))
    assert result.digest == flagged(case, config, 0, SHORT).digest


def test_a_step_that_the_engine_has_begun_to_count_ends_where_the_flag_says(tmp_path):
    """Two micro-batches with `step()` after each, then two by the flag: one step of four."""
    case, config = Case(), settings(tmp_path, accumulation=4)
    model = case.model()
    engine, *_ = infinity.initialize(model=model, config=config, model_parameters=case.groups(model))
    result = Result()
    with engine:
        for micro in range(4):
            (loss,) = case.losses(engine, 0, micro)
            if micro >= 2:
                engine.set_gradient_accumulation_boundary(micro == 3)
            engine.backward(loss)
            if micro != 2:
                engine.step()
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (1, 4, 8)
        collect(engine, result)
    assert result.digest == train(case, config, steps=1).digest


def test_gradients_that_come_after_a_last_backward_are_not_lost(tmp_path):
    """The program has said that a backward was the last, which began the step, and then says that it was not."""
    case, config = Case(), settings(tmp_path, accumulation=2, **EARLY)
    digests, begun = [], []
    for last in (False, True):
        model = case.model()
        engine, *_ = infinity.initialize(model=model, config=config, model_parameters=case.groups(model))
        result = Result()
        with engine:
            for micro in range(6):
                (loss,) = case.losses(engine, 0, micro)
                # The second backward of a step is said not to be the last one, and is; then the first is, and is not.
                engine.set_gradient_accumulation_boundary((micro % 2 == 0) == last)
                engine.backward(loss)
                begun.append(engine._runtime.step._backward.early is not None)
                # All that can begin early has been stepped.
                engine.synchronize()
                if micro % 2:
                    engine.set_gradient_accumulation_boundary(True)
                    engine.step()
            collect(engine, result)
        digests.append(result.digest)
    assert digests[0] == digests[1] and any(begun[6:])


def test_a_backward_that_raises_in_the_middle_leaves_the_group_that_a_program_begins_anew(tmp_path):
    case = Case()
    for row in ({"param": "nvme", "optimizer": "nvme"}, EARLY):
        config = settings(tmp_path, accumulation=4, **row)
        model = case.model()
        engine, *_ = infinity.initialize(model=model, config=config, model_parameters=case.groups(model))
        with engine:
            for micro in range(3):
                (loss,) = case.losses(engine, 0, 50 + micro)
                engine.set_gradient_accumulation_boundary(micro == 2)
                if micro == 2:
                    loss.register_hook(_fail)
                    with pytest.raises(Broken):
                        engine.backward(loss)
                else:
                    engine.backward(loss)
            engine.zero_grad()
            # What was thrown away is no part of the steps that follow.
            result = run_groups(engine, case, 0, SHORT)
            assert (engine.micro_steps, engine.global_samples) == (sum(SHORT), 2 * sum(SHORT))
        assert result.digest == flagged(case, config, 0, SHORT).digest


def _fail(grad: Tensor) -> None:
    raise Broken("no backward")


def test_a_load_forgets_the_group_at_hand(tmp_path):
    case, config = Case(), settings(tmp_path / "nvme", accumulation=4)
    model = case.model()
    engine, *_ = infinity.initialize(model=model, config=config, model_parameters=case.groups(model))
    with engine:
        engine.save_checkpoint(tmp_path / "saved")
        for micro in range(2):
            (loss,) = case.losses(engine, 0, 50 + micro)
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(loss)
        engine.load_checkpoint(tmp_path / "saved")
        result = run_groups(engine, case, 0, FULL)
        assert (engine.micro_steps, engine.global_samples) == (sum(FULL), 2 * sum(FULL))
    assert result.digest == flagged(case, config, 0, FULL).digest


def test_backward_returns_the_loss_as_it_is_accumulated(tmp_path):
    case = Case()
    for dtype, accumulation in (("fp32", 4), ("fp16", 4), ("fp32", 1)):
        model = case.model()
        config = settings(tmp_path, accumulation=accumulation, dtype=dtype)
        engine, *_ = infinity.initialize(model=model, config=config, model_parameters=case.groups(model))
        with engine:
            (loss,) = case.losses(engine, 0, 0)
            assert torch.equal(engine.backward(loss, retain_graph=True), loss / accumulation)
            assert torch.equal(engine.backward(loss, scale_wrt_gas=False), loss)


def test_losses_that_the_program_has_divided_add_up_to_the_loss_of_the_step(tmp_path):
    """As transformers does it: scale_wrt_gas=False, and a short last group divides by its own size."""
    case = Case()
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "run"}
    config = settings(tmp_path, accumulation=4, csv_monitor=monitor)
    model, said, micro = case.model(), [], itertools.count()
    engine, *_ = infinity.initialize(model=model, config=config, model_parameters=case.groups(model))
    with engine:
        for size in SHORT:
            values = []
            for at in range(size):
                (loss,) = case.losses(engine, 0, next(micro))
                values.append(loss.item())
                engine.set_gradient_accumulation_boundary(at == size - 1)
                engine.backward(loss / size, scale_wrt_gas=False)
            engine.step()
            said.append(sum(values) / size)
    (file,) = (tmp_path / "csv" / "run").glob("*train_loss*")
    written = [float(line.split(",")[1]) for line in file.read_text().splitlines()[1:]]
    assert written == pytest.approx(said, rel=1e-5)


def test_a_program_that_does_not_manage_cannot_say_the_boundary(tmp_path):
    case = Case()
    for options, value in (({"managed_gradient_accumulation": False}, True), ({}, None)):
        model = case.model()
        config = settings(tmp_path, accumulation=4, **options)
        engine, *_ = infinity.initialize(model=model, config=config, model_parameters=case.groups(model))
        with engine, pytest.raises(ConfigError, match="set_gradient_accumulation_boundary"):
            engine.set_gradient_accumulation_boundary(value)


def test_arguments_of_the_scheduler_reach_it_and_the_program_may_take_it_away(tmp_path):
    seen: list[int] = []

    class Schedule:
        def step(self, amount: int = 1) -> None:
            seen.append(amount)

        def state_dict(self) -> dict[str, Any]:
            return {}

    case = Case()
    model = case.model()
    engine, *_ = infinity.initialize(
        model=model, config=settings(tmp_path), model_parameters=case.groups(model), lr_scheduler=Schedule()
    )
    with engine:
        for given in ({"amount": 3}, None, {"amount": 4}):
            (loss,) = case.losses(engine, 0, 0)
            engine.backward(loss)
            engine.step(given)
        engine.lr_scheduler = None
        (loss,) = case.losses(engine, 0, 0)
        engine.backward(loss)
        engine.step()
    assert seen == [3, 1, 4]
