"""A save behind the program holds the state of its moment, on every tier and rank, and fails on all ranks or none."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint import files
from infinity.checkpoint.format import broken, complete, find
from infinity.distributed.mailbox import StoreMailbox
from infinity.errors import CheckpointError, TransferError
from infinity.memory.transaction import AccessControl
from tests.support.checkpoints import assert_same, contents
from tests.support.models import mlp, tiny_llama, token_batch

STEPS = 5
SAVED = (2, 4)
NVME, CPU, NONE = "nvme", "cpu", "none"


def config(stage: int, param: str, optimizer: str, folder: Path, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Two samples a rank; small sub-groups, so that there are many."""
    zero: dict[str, Any] = {"stage": stage, "sub_group_size": 4000, "stage3_param_persistence_threshold": 100}
    for name, device in (("offload_param", param), ("offload_optimizer", optimizer)):
        if device != NONE:
            zero[name] = {"device": device, "nvme_path": str(folder)}
    return {
        "train_batch_size": 2 * ranks, "bf16": {"enabled": True}, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **more,
    }  # fmt: skip


def train(
    settings: dict[str, Any], folder: Path, rank: int = 0, *, asynchronous: bool, frozen: bool = False
) -> list[float]:
    """Losses of a run that saves after some of its steps, at once or behind."""
    model = tiny_llama()
    if frozen:
        model.embedding.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
    losses = []
    with infinity.initialize(model, settings)[0] as engine:
        for step in range(1, STEPS + 1):
            loss = engine(**token_batch(rank, step))
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
            if step in SAVED:
                engine.save_checkpoint(folder, client_state={"step": step}, asynchronous=asynchronous)
        engine.finish_saving()
    return losses


# (stage, parameters, optimizer, whether steps begin within backward)
CELLS = [
    (0, NONE, NONE, False), (1, NONE, CPU, False), (2, NONE, NVME, False), (3, CPU, CPU, False),
    (3, NVME, NVME, False), (3, NVME, NVME, True), (3, NONE, NVME, True),
]  # fmt: skip


def both_ways(rank: int, world: int, folder: str, cells: list[Any]) -> None:
    for number, (stage, param, optimizer, early) in enumerate(cells):
        more: dict[str, Any] = {"gradient_clipping": 0} if early else {}
        # Hardly ever at work unless somebody waits: most of what is saved is saved by what would change it.
        more["checkpoint"] = {"bandwidth_share": 0.02}
        settings = config(stage, param, optimizer, Path(folder), world, **more)
        if early:
            settings["bf16"]["check_grad_overflow"] = False
        at = Path(folder) / str(number)
        losses = [
            train(settings, at / name, rank, asynchronous=name == "behind", frozen=number % 2 == 0)
            for name in ("at once", "behind")
        ]
        assert losses[0] == losses[1]
        if rank == 0:
            for step in SAVED:
                assert_same(*(contents(at / name, f"global_step{step}") for name in ("at once", "behind")))
            assert not broken(at / "behind")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_save_behind_the_program_holds_the_state_of_its_moment(tmp_path, cell):
    both_ways(0, 1, str(tmp_path), [cell])


def test_a_save_behind_two_ranks_holds_the_state_of_its_moment(tmp_path, two_ranks):
    two_ranks.run(both_ways, str(tmp_path), [CELLS[2], CELLS[4]])


def test_what_the_program_changes_itself_waits_for_the_save(tmp_path):
    """modify(), a state that is set, and buffers, which are copied at once."""
    model = mlp()
    model.register_buffer("seen", torch.zeros(3))
    settings = config(2, NONE, CPU, tmp_path, checkpoint={"bandwidth_share": 0.02})
    with infinity.initialize(model, settings)[0] as engine:
        weight = engine.module.enter.weight
        engine.save_checkpoint(tmp_path, "at once", asynchronous=False)
        engine.save_checkpoint(tmp_path, "behind", asynchronous=True)
        engine.module.seen.add_(1)
        with infinity.modify(weight):
            weight.fill_(7)
        infinity.state(engine.module.leave.weight).exp_avg = torch.ones(32, 64)
        engine.finish_saving()
        assert_same(contents(tmp_path, "at once"), contents(tmp_path, "behind"))
        assert (weight == 7).all()


def test_a_second_save_and_the_end_wait_for_the_first(tmp_path, caplog):
    with infinity.initialize(mlp(), config(1, NONE, NONE, tmp_path, checkpoint={"async": True}))[0] as engine:
        with held_back(), caplog.at_level(logging.INFO, "infinity"):
            engine.save_checkpoint(tmp_path, "first")
            release_soon()
            engine.save_checkpoint(tmp_path, "second")
        assert "waiting for the save of" in caplog.text and "first" in caplog.text
    assert [path.name for path, _ in complete(tmp_path)] == ["second", "first"]


def test_an_error_inside_the_block_gives_the_save_up_and_leaves_what_was_there(tmp_path):
    engine = infinity.initialize(mlp(), config(1, NONE, NONE, tmp_path, checkpoint={"async": True}))[0]
    with pytest.raises(RuntimeError, match="mine"), engine, held_back():
        engine.save_checkpoint(tmp_path, "whole")
        release_soon()
        engine.finish_saving()
        _gate.clear()
        engine.save_checkpoint(tmp_path, "given up")
        release_soon()
        raise RuntimeError("mine")
    assert [path.name for path, _ in complete(tmp_path)] == ["whole"] and not broken(tmp_path)
    assert find(tmp_path).name == "whole"


def test_a_full_drive_is_told_by_the_next_verb_and_training_goes_on(tmp_path, monkeypatch):
    with infinity.initialize(tiny_llama(), config(3, CPU, CPU, tmp_path, checkpoint={"async": True}))[0] as engine:
        step(engine, 1)
        engine.save_checkpoint(tmp_path, "good")
        engine.finish_saving()
        before = contents(tmp_path, "good")
        full(monkeypatch)
        engine.save_checkpoint(tmp_path, "bad")
        engine._checkpoints.background._thread.join()
        with pytest.raises(TransferError, match="No space left"):
            step(engine, 2)
        monkeypatch.undo()
        step(engine, 2)
        assert not broken(tmp_path) and find(tmp_path).name == "good"
        assert_same(before, contents(tmp_path))
        engine.save_checkpoint(tmp_path, "again")
    assert find(tmp_path).name == "again"


def test_who_interrupts_a_wait_finds_the_save_under_way(tmp_path, monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with infinity.initialize(mlp(), config(1, NONE, NONE, tmp_path, checkpoint={"async": True}))[0] as engine:
        with held_back():
            engine.save_checkpoint(tmp_path, "first")
            with monkeypatch.context() as patched:
                patched.setattr(engine._checkpoints.background._thread, "join", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.finish_saving()
            assert engine._checkpoints.background.under_way
            release_soon()
            engine.finish_saving()
        assert not engine._checkpoints.background.under_way
    assert find(tmp_path).name == "first"


def test_a_save_gives_signs_of_life_while_it_writes(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(StoreMailbox, "alive", lambda board: told.append("alive"))
    monkeypatch.setattr(StoreMailbox, "post", lambda board, name, text: board._own.__setitem__(name, text))
    with infinity.initialize(mlp(), config(1, NONE, NONE, tmp_path, checkpoint={"async": True}))[0] as engine:
        engine.save_checkpoint(tmp_path)
        engine.finish_saving()
        assert len(told) >= len(engine.plan.partitions) // 2


def test_a_failure_on_one_rank_is_raised_on_all_at_the_same_step(tmp_path, two_ranks):
    assert two_ranks.run(fail_on_one_rank, str(tmp_path)) == [("CheckpointError", 2), ("TransferError", 2)]
    assert [path.name for path, _ in complete(tmp_path)] == ["good", "again"][::-1] and not broken(tmp_path)


def fail_on_one_rank(rank: int, world: int, folder: str) -> tuple[str, int]:
    settings = config(3, CPU, CPU, Path(folder), world, checkpoint={"async": True})
    with infinity.initialize(tiny_llama(), settings)[0] as engine, pytest.MonkeyPatch.context() as patch:
        step(engine, 1, rank)
        engine.save_checkpoint(folder, "good")
        engine.finish_saving()
        if rank == 1:
            full(patch)
        engine.save_checkpoint(folder, "bad")
        engine._checkpoints.background._thread.join()
        with pytest.raises((CheckpointError, TransferError), match="No space left") as caught:
            step(engine, 2, rank)
        raised = caught.type.__name__, engine.global_steps
        patch.undo()
        step(engine, 3, rank)
        engine.save_checkpoint(folder, "again")
    return raised


def step(engine: infinity.Engine, number: int, rank: int = 0) -> None:
    """One step of training."""
    engine.backward(engine(**token_batch(rank, number)))
    engine.step()


def full(patch: pytest.MonkeyPatch) -> None:
    """From now on the drive has no room for files of checkpoints."""

    def create(path: Path, nbytes: int) -> None:
        raise TransferError(
            "write", path=str(path), offset=0, nbytes=nbytes, errno=errno.ENOSPC, reason="No space left on device"
        )

    patch.setattr(files.File, "create", create)


_gate = threading.Event()


class held_back:
    """While the block runs, a save behind the program begins nothing before the gate opens."""

    def __enter__(self) -> None:
        _gate.clear()
        self._next: Callable[..., Any] = AccessControl.next_to_save

        def wait(access: AccessControl, *arguments: Any) -> Any:
            _gate.wait(10)
            return self._next(access, *arguments)

        AccessControl.next_to_save = wait  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        AccessControl.next_to_save = self._next  # type: ignore[method-assign]


def release_soon() -> None:
    """Open the gate a little later."""
    threading.Timer(0.1, _gate.set).start()
