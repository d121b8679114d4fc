"""A signal in the middle of a verb: the verb is whole, not begun, or every verb refuses. `interrupt_matrix` runs more.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from operator import attrgetter

import pytest
import torch

import infinity
from infinity.errors import StateError
from tests.engine.interrupt_matrix import Late, make, reference, standing, trial, work
from tests.support.models import MLP


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_random_moments_leave_whole_steps_or_an_engine_that_refuses(tmp_path):
    chosen, found = random.Random(0), Counter[str]()
    for tier in ("cpu, stage 1", "nvme, in backward"):
        expected = reference(0, str(tmp_path), tier)
        for way in ("SIGINT", "timer"):
            found += Counter(trial(0, 1, str(tmp_path), tier, way, chosen, expected) for _ in range(7))
    assert {"whole", "refused"} <= found.keys(), found


@pytest.mark.parametrize("verb", ["forward", "backward", "step", "save"])
def test_an_interrupt_waits_until_the_verb_is_whole(tmp_path, verb, monkeypatch):
    """In the middle of each verb, once: the verb is whole. Twice: no verb does anything any more."""
    inside = {
        "forward": ("coordinator", "open_scope"), "backward": ("coordinator", "end_backward"),
        "step": ("step", "apply"), "save": ("attached.hooks", "check_tree"),
    }  # fmt: skip
    expected = reference(0, str(tmp_path), "device")[1]
    for times in (1, 2):
        engine = make(str(tmp_path), "device")
        part, name = inside[verb]
        part = attrgetter(part)(engine._runtime)
        original = getattr(part, name)

        def interrupted(*args, original=original, left=[signal.SIGINT] * times, **kwargs):
            while left:
                signal.raise_signal(left.pop())
            return original(*args, **kwargs)

        work(engine, 0, str(tmp_path))
        with engine, monkeypatch.context() as patched:
            patched.setattr(part, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                work(engine, 0, str(tmp_path)) if verb != "save" else engine.save_checkpoint(tmp_path, "interrupted")
            patched.undo()
            if times == 2:
                with pytest.raises(StateError, match=r"cut .*short in the middle.*engine\.resume\(\)"):
                    engine.zero_grad()
                continue
            engine.zero_grad()
            assert standing(engine) == expected[2 if verb == "step" else 1]
            work(engine, 0, str(tmp_path))
            assert standing(engine) == expected[engine.global_steps]


def test_a_timer_that_ends_the_modules_own_code_is_an_error_like_any_other(tmp_path):
    class Slow(MLP):
        def forward(self, x, y):
            signal.raise_signal(signal.SIGUSR1)
            return super().forward(x, y)

    def late(*_):
        raise Late

    before = signal.signal(signal.SIGUSR1, late)
    try:
        engine, *_ = infinity.initialize(model=Slow(), config={"train_batch_size": 1, "log_level": "error"})
        with engine:
            with pytest.raises(Late):
                engine(torch.zeros(2, 32), torch.zeros(2, 32))
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            engine.backward(engine(torch.zeros(2, 32), torch.zeros(2, 32)))
            engine.step()
            assert engine.was_step_applied()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_scheduler_that_raises_leaves_a_whole_step(tmp_path):
    with make(str(tmp_path), "device") as engine:
        work(engine, 0, str(tmp_path))
        engine.lr_scheduler.step = lambda **_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            work(engine, 0, str(tmp_path))
        del engine.lr_scheduler.step
        assert (engine.global_steps, engine.micro_steps, engine._accumulation.begun) == (2, 4, False)
        work(engine, 0, str(tmp_path))


def test_an_error_in_forward_loses_no_weight_that_is_brought_up_to_date(tmp_path):
    """Units behind the first one have begun to follow the step, and the forward that raises does not come to them."""

    class Failing(MLP):
        fails = False

        def forward(self, x, y):
            self.enter(x)
            return 1 / 0 if self.fails else super().forward(x, y)

    torch.manual_seed(0)
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_batch_size": 1, "log_level": "error", "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_optimizer": drive, "sub_group_size": 3000},
    }  # fmt: skip
    x = torch.ones(2, 32)
    for fails in (False, True):
        model = Failing()
        with infinity.initialize(model=model, config=config)[0] as engine:
            for step in range(3):
                if fails and step:
                    engine.synchronize()
                    model.fails = True
                    with pytest.raises(ZeroDivisionError):
                        engine(x, x)
                    model.fails = False
                    engine.store.check()
                engine.backward(engine(x, x))
                engine.step()
            found = [infinity.state(param).master.clone() for param in model.parameters()]
        if not fails:
            expected = found
            torch.manual_seed(0)
    assert all(map(torch.equal, expected, found))
