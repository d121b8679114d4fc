"""What goes on beside the program changes no result, and says so when it cannot."""

from __future__ import annotations

import copy
import itertools
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import StateError
from infinity.ops import adam
from infinity.plan.layout import SubGroup
from infinity.plan.types import Key, Kind
from infinity.step import optimizer_step
from infinity.step.update import SubGroupUpdater
from tests.support.cells import covered
from tests.support.late_copies import copies_are_late
from tests.support.models import token_batch
from tests.support.oracle import CLIP, STEPS, Case, SmallModel, SplitBackward, join, settings, train

UNCHECKED = {"enabled": True, "check_grad_overflow": False}
# By precision: what has a step begin in backward, and what has it wait for all gradients.
EARLY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"bf16": UNCHECKED}, {"bf16": {"enabled": True}}),
    "fp32": ({"check_grad_overflow": False}, {"check_grad_overflow": True}),
}
ON_NVME = {"param": "nvme", "optimizer": "nvme"}


class Skipping(Case):
    """A block is left out for every third batch: its parameters have no gradient then."""

    def model(self) -> SmallModel:
        torch.manual_seed(0)
        return _SkippingModel()


class _SkippingModel(SmallModel):
    calls = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        blocks = self.blocks
        self.calls += 1
        if self.calls % 3 == 0:
            self.blocks = blocks[:1]
        try:
            return super().forward(input_ids, labels)
        finally:
            self.blocks = blocks


CASES = {"all used": Case, "some left out": Skipping}


def digests(rank: int, world: int, folder: str, case: str, rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """(digest, sub-groups that were stepped before their backward was over) of each row."""
    join(world)
    return [run(rank, folder, CASES[case](), row) for row in rows]


def run(rank: int, folder: str, case: Case, row: dict[str, Any]) -> tuple[str, int]:
    early: list[int] = []

    def backward(engine: Any, loss: Tensor) -> None:
        engine.backward(loss)
        step = engine._runtime.step._backward.early
        early.append(len(step.begun) if step is not None else 0)

    result = train(case, settings(folder, **row), rank=rank, backward=backward)
    return result.digest, sum(early)


@pytest.mark.slow
@pytest.mark.parametrize(*covered(dtype=list(EARLY), case=list(CASES), world=[1, 2]))
def test_a_step_inside_backward_has_the_same_bits(rank_pools, tmp_path, dtype, case, world):
    begun_early, waiting = EARLY[dtype]
    # As many sub-groups on each rank: few enough to stay in memory never begin early.
    row = {**ON_NVME, **begun_early, "zero": {"sub_group_size": 1280 // world}}
    rows = [row, {**row, "accumulation": 2}]
    rows += [{**each, "overlap": False} for each in rows] + [{**each, **waiting} for each in rows]
    for found in rank_pools[world].run(digests, str(tmp_path / "nvme"), case, rows, timeout=100):
        (one, two), plain, checked = found[:2], found[2:4], found[4:]
        assert [digest for digest, _ in plain] == [digest for digest, _ in checked] == [one[0], two[0]]
        # Without overlap, and where all are checked first, none begins early.
        assert min(one[1], two[1]) > 2 * STEPS
        assert not any(early for _, early in (*plain, *checked))


@pytest.mark.parametrize("resident", [False, True])
def test_a_step_that_waits_for_the_norm_reads_its_first_states_during_backward(tmp_path, resident):
    """Unless the step before has left something in memory that it can begin with."""
    asked: list[list[int]] = []
    reads: list[SubGroup] = []
    plain = optimizer_step.prefetch

    def prefetch(store: Any, by: Any, group: SubGroup, *, complete: bool = True) -> bool:
        # Before the step there is nothing that it has reserved.
        if by is None:
            reads.append(group)
        assert complete == (by is not None), "gradients that are still to come are not read"
        return plain(store, by, group, complete=complete)

    def backward(engine: Any, loss: Tensor) -> None:
        # Nothing is being written: there is room.
        engine.synchronize()
        engine.store.settle()
        reads.clear()
        engine.backward(loss)
        asked.append([engine._runtime.step._parts.hidden.index(group) for group in reads])
        states = [Key(Kind.STATES, group.index) for group in reads]
        assert all(map(engine.store.in_memory, states))

    row = {**ON_NVME, "clip": CLIP, "zero": {"sub_group_size": 640}}
    asks = patch.object(optimizer_step, "in_memory", lambda *_: resident)
    with patch.object(optimizer_step, "prefetch", prefetch), asks:
        found = train(Case(), settings(tmp_path, **row), backward=backward)
    assert asked == [[] if resident else [0, 1, 2, 3]] * STEPS
    assert found.digest == train(Case(), settings(tmp_path, **row, overlap=False)).digest


def test_a_second_backward_after_its_step_has_begun_takes_the_step_anew(tmp_path):
    """A program that calls backward several times a step has none begun early after two such steps."""
    row = {**ON_NVME, "bf16": UNCHECKED, "zero": {"sub_group_size": 640}}
    begun: list[bool] = []

    def backward(engine: Any, loss: Tensor) -> None:
        engine.backward(loss)
        begun.append(engine._runtime.step._backward.early is not None)

    expected = train(SplitBackward(), settings(tmp_path, **row, overlap=False))
    assert train(SplitBackward(), settings(tmp_path, **row), backward=backward).digest == expected.digest
    assert begun[0] and not any(begun[-4:])


def test_a_step_inside_backward_writes_what_the_device_has_read(tmp_path, monkeypatch):
    """The host may not have noticed that the copy out of a unit's partition is over; its gradients say so."""
    row = {**ON_NVME, "bf16": UNCHECKED, "zero": {"sub_group_size": 1280}}
    expected, _ = run(0, str(tmp_path), Case(), row)
    copies_are_late(monkeypatch)
    digest, early = run(0, str(tmp_path), Case(), row)
    assert digest == expected and early > 2 * STEPS


class Broken(Case):
    """A model whose first layer may have no room in backward: then those behind it have been stepped."""

    def __init__(self) -> None:
        self.refusal: list[Exception] = []

    def model(self) -> nn.Module:
        model = super().model()

        def refuse(grad: Tensor) -> None:
            if self.refusal:
                raise self.refusal.pop()

        def hooked(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(refuse)

        model.blocks[0].register_forward_hook(hooked)
        return model


def early_engine(case: Case, folder: Path) -> Any:
    row = settings(folder, **ON_NVME, bf16=UNCHECKED, zero={"sub_group_size": 1280})
    return infinity.initialize(model=case.model(), config=row)[0]


def step(engine: Any, index: int) -> None:
    engine.backward(engine(**token_batch(0, index, positions=8)))
    engine.step()


def masters(engine: Any) -> list[Tensor]:
    return [infinity.state(param).master for param in engine.module.parameters()]


def set_rate(engine: Any, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def nothing(engine: Any, case: Broken, folder: Path) -> Any:
    """The guess is right."""


def edit_rate(engine: Any, case: Broken, folder: Path) -> Any:
    set_rate(engine, 0.5)


def assign_gradient(engine: Any, case: Broken, folder: Path) -> Any:
    state = infinity.state(engine.module.head.weight)
    state.grad = state.grad * 3


def evaluate(engine: Any, case: Broken, folder: Path) -> Any:
    with torch.no_grad():
        return engine(**token_batch(1, 0, positions=8))


def read(engine: Any, case: Broken, folder: Path) -> Any:
    with infinity.read(engine.module):
        return [param.detach().clone() for param in engine.module.parameters()]


def read_states(engine: Any, case: Broken, folder: Path) -> Any:
    return [*masters(engine), *engine.state_dict().values()]


def second_forward(engine: Any, case: Broken, folder: Path) -> Any:
    return engine(**token_batch(2, 0, positions=8)).detach()


def throw_away(engine: Any, case: Broken, folder: Path) -> Any:
    engine.zero_grad()
    engine.backward(engine(**token_batch(3, 0, positions=8)))


def another_backward(engine: Any, case: Broken, folder: Path) -> Any:
    engine.backward(engine(**token_batch(4, 0, positions=8)))


def fail_in_backward(engine: Any, case: Broken, folder: Path) -> Any:
    case.refusal = [torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.raises(torch.OutOfMemoryError):
        engine.backward(engine(**token_batch(5, 0, positions=8)))
    engine.zero_grad()
    engine.backward(engine(**token_batch(6, 0, positions=8)))


def export(engine: Any, case: Broken, folder: Path) -> Any:
    engine.save_16bit_model(folder / "export", "model.safetensors")
    return [(folder / "export" / "model.safetensors").read_bytes()]


def load(engine: Any, case: Broken, folder: Path) -> Any:
    """What has begun is given up."""
    engine.load_checkpoint(folder / "out")
    engine.backward(engine(**token_batch(7, 0, positions=8)))


BETWEEN = [nothing, edit_rate, assign_gradient, evaluate, read, read_states, second_forward, throw_away,
           another_backward, fail_in_backward, export, load]  # fmt: skip


# What a step in backward takes for granted: with clipping, that nothing is clipped.
_CLIPPED = {"dtype": "bf16", "clip": 1e3, "speculative_step": True}
GUESSES: list[dict[str, Any]] = [{"bf16": UNCHECKED}, _CLIPPED, {**_CLIPPED, "offload_gradients": {"device": "nvme"}}]


def between(folder: Path, act: Any, guess: dict[str, Any], *, overlap: bool) -> tuple[list[Tensor], Any, bool]:
    """What `act` sees between the last backward and step(), in the second step of three; the masters in the end."""
    case = Broken()
    guess = {**guess}
    gradients = {name: guess.pop(name) for name in ("offload_gradients",) if name in guess}
    row = settings(
        folder / "swap", **ON_NVME, **guess, zero={"sub_group_size": 1280, **gradients}, overlap=overlap
    )  # fmt: skip
    with infinity.initialize(model=case.model(), config=row)[0] as engine:
        step(engine, 0)
        engine.save_checkpoint(folder / "out")
        engine.backward(engine(**token_batch(0, 1, positions=8)))
        early = engine._runtime.step._backward.early is not None and len(engine._runtime.step._backward.early.begun) > 2
        if early:
            # All that could be seen too early is on the drive.
            engine._runtime.step.synchronize()
            engine.store.settle()
        seen = act(engine, case, folder)
        engine.store.check()
        engine.step()
        step(engine, 2)
        engine.save_checkpoint(folder / "end")
        engine.load_checkpoint(folder / "end")
        step(engine, 3)
        engine.store.check()
        return masters(engine), seen, early


@pytest.mark.parametrize("guess", GUESSES, ids=["nothing to guess", "clipped", "clipped, gradients on the drive"])
@pytest.mark.parametrize("act", BETWEEN)
def test_until_step_nothing_shows_that_it_has_begun(tmp_path: Path, act: Any, guess: dict[str, Any]) -> None:
    """Whatever the program does before step(): it sees the weights of before, and what it changes counts."""
    expected, seen_then, none = between(tmp_path / "plain", act, guess, overlap=False)
    found, seen, early = between(tmp_path / "early", act, guess, overlap=True)
    assert early and not none
    assert all(map(torch.equal, found, expected))
    if isinstance(seen, list):
        assert all((one == other) if isinstance(one, bytes) else torch.equal(one, other)
                   for one, other in zip(seen, seen_then, strict=True))  # fmt: skip
    else:
        assert seen is seen_then is None or torch.equal(seen, seen_then)


def test_a_backward_that_fails_before_its_step_has_begun_loses_nothing(tmp_path):
    case = Broken()
    with early_engine(case, tmp_path / "swap") as engine:
        set_rate(engine, 1.0)
        with pytest.raises(KeyError), patch.object(engine._runtime.step, "landed", side_effect=KeyError):
            step(engine, 0)
        engine.zero_grad()
        set_rate(engine, 0.0)
        before = masters(engine)
        step(engine, 0)
        assert all(map(torch.equal, masters(engine), before)), "the hyper-parameters are the new ones"


@pytest.mark.parametrize("unchecked", [{"bf16": UNCHECKED}, {"bf16": {"enabled": True}, "check_grad_overflow": False},
                                       {"check_grad_overflow": False}], ids=str)  # fmt: skip
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_an_unchecked_step_leaves_out_what_is_not_finite(tmp_path, tier, unchecked):
    """With check_grad_overflow false a step is taken, but for the elements whose gradients are not finite."""

    class Poisoned(Case):
        def losses(self, call, rank, micro):
            for loss in super().losses(call, rank, micro):
                # The bias of the fixed layer's neighbour: one parameter of one element has no finite gradient.
                with infinity.read(call.module.temperature):
                    poison = call.module.temperature * torch.tensor(float("inf"), dtype=call.module.temperature.dtype)
                yield loss + (poison.float().sum() if micro == 1 else 0.0)

    def look(engine: Any) -> None:
        assert engine.skipped_steps == 0 and engine.was_step_applied()

    row = {"param": tier, "optimizer": tier, **unchecked}
    result = train(Poisoned(), settings(tmp_path, **row), steps=3, look=look)
    assert all(torch.isfinite(value).all() for value in (*result.master.values(), *result.exp_avg.values()))


def test_step_returns_while_the_drive_is_still_at_work(tmp_path, monkeypatch):
    """The step of what the program cannot see goes on behind it; a gather of what is not stepped yet waits."""
    may_step, entered = threading.Event(), threading.Event()
    behind: list[bool] = []
    plain = adam.adam_step

    def slow(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            behind.append(may_step.wait(timeout=20))
        return plain(*args, **kwargs)

    monkeypatch.setattr("infinity.optim.update_rules.adam_step", slow)

    class Watched(Case):
        def after_step(self, call, step, access):
            assert entered.wait(timeout=20), "the thread steps"
            hidden = [unit for unit in call.units if not unit.placed.whole and unit.layout.trainable]
            assert any(call.store.access.reserved(unit.key) for unit in hidden)
            assert not may_step.is_set(), "step() has returned before its sub-groups were stepped"
            may_step.set()
            # Reads wait for their sub-group: what they see is the new value.
            return []

    expected = train(Case(), settings(tmp_path, **ON_NVME, clip=CLIP, overlap=False), steps=1)
    result = train(Watched(), settings(tmp_path, **ON_NVME, clip=CLIP), steps=1)
    assert result.digest == expected.digest and behind and all(behind)


def test_whole_parameters_are_up_to_date_when_step_returns(tmp_path):
    """What the program can look at without a gather is stepped on return."""

    class Peeking(Case):
        def after_step(self, call, step, access):
            whole = [unit for unit in call.units if unit.placed.whole and unit.layout.trainable]
            assert whole and len(whole) < len(call.units)
            params = [param for unit in whole for param in unit.params]
            seen = [param.detach().float().clone() for param in params]
            masters = [access.get(param, "master") for param in params]
            return [value for pair in zip(seen, masters, strict=True) for value in pair]

    row = {**ON_NVME, "zero": {"stage3_param_persistence_threshold": 1500, "sub_group_size": 640}}
    result = train(Peeking(), settings(tmp_path, **row), steps=3)
    for seen, master in zip(result.seen[::2], result.seen[1::2], strict=True):
        assert torch.equal(seen, master)


# Parameters are whole on the device, and the step goes on behind the program.
WHOLE = {"param": "gpu", "optimizer": "nvme", "zero": {"sub_group_size": 640}}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is not set, the thread that steps behind the program waits before each update, 20 s at most."""
    may_step, plain = threading.Event(), adam.adam_step

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert may_step.wait(20)
        return plain(*args, **kwargs)

    monkeypatch.setattr("infinity.optim.update_rules.adam_step", slow)
    return may_step


def use_forward(engine: Any) -> list[Tensor]:
    with torch.no_grad():
        return [engine(**token_batch(1, 0, positions=8))]


def use_values(engine: Any) -> list[Tensor]:
    return [param.data.clone() for param in engine.module.parameters()]


def use_state_dict(engine: Any) -> list[Tensor]:
    return [value.clone() for value in engine.module.state_dict().values()]


def use_copy(engine: Any) -> list[Tensor]:
    return [*copy.deepcopy(engine.module).parameters()]


def use_after_close(engine: Any) -> list[Tensor]:
    engine.close()
    return [*engine.module.parameters()]


def use_after_error(engine: Any) -> list[Tensor]:
    with pytest.raises(KeyError), engine:
        raise KeyError("the program's own")
    return [*engine.module.parameters()]


@pytest.mark.parametrize(
    "use", [use_forward, use_values, use_state_dict, use_copy, use_after_close, use_after_error]
)
def test_whole_parameters_have_their_step_at_their_next_use(tmp_path: Path, held: threading.Event, use: Any) -> None:
    """step() returns before they are stepped; whatever looks at one waits for it."""
    case = Case()
    engine, *_ = infinity.initialize(model=case.model(), config=settings(tmp_path / "plain", **WHOLE, overlap=False))
    with patch("infinity.optim.update_rules.adam_step", adam.adam_step):
        step(engine, 0)
        expected = use(engine)
        engine.close()
    engine, *_ = infinity.initialize(model=case.model(), config=settings(tmp_path / "behind", **WHOLE))
    step(engine, 0)
    trained = [unit for unit in engine.units if unit.layout.trainable]
    assert trained and all(unit.placed.whole and not unit.visible for unit in trained)
    assert engine.module.head.weight.shape and "partitioned" in repr(engine.module.head.weight)
    threading.Timer(0.2, held.set).start()
    found = use(engine)
    assert held.is_set() and all(map(torch.equal, found, expected))
    engine.close()
    assert {type(param) for param in engine.module.parameters()} == {nn.Parameter}


def test_a_forward_begins_before_whole_parameters_are_stepped(tmp_path: Path, held: threading.Event) -> None:
    """Each unit is waited for where a module uses it."""
    engine, *_ = infinity.initialize(model=Case().model(), config=settings(tmp_path, **WHOLE))
    with engine:
        step(engine, 0)
        timer = threading.Timer(5, held.set)
        timer.start()
        engine._runtime.coordinator.begin_pass("eval")
        assert not held.is_set() and not any(unit.visible for unit in engine.units if unit.layout.trainable)
        timer.cancel()
        held.set()


def test_whole_parameters_that_wait_for_their_next_use_are_offloaded_too(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(model=Case().model(), config=settings(tmp_path, **WHOLE))
    with engine:
        for index in range(2):
            step(engine, index)
            assert not any(unit.visible for unit in engine.units if unit.layout.trainable)
            engine.offload_states(device="nvme")
            assert not any(unit.buffer.has_bytes for unit in engine.units)
            engine.store.check()
        found = engine.state_dict()
    engine, *_ = infinity.initialize(model=Case().model(), config=settings(tmp_path, **WHOLE))
    with engine:
        for index in range(2):
            step(engine, index)
        expected = engine.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("case", CASES)
def test_whole_parameters_that_no_forward_uses_are_stepped_again(tmp_path: Path, case: str) -> None:
    """With accumulation, and where a layer is left out between two steps."""
    for more in ({}, {"accumulation": 2, "bf16": {"enabled": True}}):
        expected = train(CASES[case](), settings(tmp_path / "plain", **WHOLE, **more, overlap=False))
        found = train(CASES[case](), settings(tmp_path / "behind", **WHOLE, **more))
        assert found.digest == expected.digest


def test_a_failed_step_of_whole_parameters_is_raised_where_they_are_used(tmp_path, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("no numbers for the step")

    engine, *_ = infinity.initialize(model=Case().model(), config=settings(tmp_path, **WHOLE))
    monkeypatch.setattr("infinity.optim.update_rules.adam_step", fail)
    step(engine, 0)
    with pytest.raises(ArithmeticError, match="for the step"):
        engine.module.head.weight.sum()
    engine.close()
    with pytest.raises(StateError, match=r"embedding\.weight was left on its tier when the engine was closed"):
        engine.module.head.weight.sum()


def test_a_step_that_fails_before_it_goes_behind_leaves_nobody_waiting(tmp_path, monkeypatch):
    """The visible part raises; what comes then says that the step was cut short, and waits for no step that is off."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("no numbers for the step")

    class Failing(Case):
        def before_step(self, call, micro, access):
            monkeypatch.setattr("infinity.optim.update_rules.adam_step", fail)
            with pytest.raises(ArithmeticError, match="for the step"):
                call.step()
            with pytest.raises(StateError, match="step 1 was cut short, with some of the weights stepped"):
                list(self.losses(call, 0, micro))
            raise KeyError("seen")

    row = {**ON_NVME, "zero": {"stage3_param_persistence_threshold": 1500, "sub_group_size": 640}}
    with pytest.raises(KeyError, match="seen"):
        train(Failing(), settings(tmp_path, **row), steps=1)


def test_a_step_that_lags_behind_backward_takes_first_what_the_next_forward_needs_first(tmp_path, monkeypatch):
    """Gradients of the first layers arrive last: in the order of arrival the next forward would wait for all."""
    order: list[int] = []
    backward_over, update = threading.Event(), SubGroupUpdater.update

    def late(self: SubGroupUpdater, group: SubGroup, *arguments: Any) -> None:
        assert backward_over.wait(30)
        order.append(group.index)
        update(self, group, *arguments)

    def backward(engine: Any, loss: Tensor) -> None:
        rank.update({index: at for at, index in enumerate(engine.plan.step_order)})
        engine.backward(loss)
        begun.extend(engine._runtime.step._backward.early.begun)
        backward_over.set()

    rank: dict[int, int] = {}
    begun: list[int] = []
    monkeypatch.setattr(SubGroupUpdater, "update", late)
    row = {**ON_NVME, "bf16": UNCHECKED, "zero": {"sub_group_size": 256}}
    train(Case(), settings(tmp_path, **row), steps=1, backward=backward)
    # What was in memory or asked for when another became ready keeps its turn.
    hidden = [rank[index] for index in order if index in begun]
    late_ones = sum(a > b for a, b in itertools.pairwise(hidden))
    assert len(hidden) > 20 and late_ones <= 4
