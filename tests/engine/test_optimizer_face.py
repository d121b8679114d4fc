"""What a program writes to `param_groups` and `optimizer.state` is obeyed as torch obeys it, or refused by name."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError, StateError

Params = list[nn.Parameter]
Write = Callable[[Any, Params], object]
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
}
BATCHES = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(1))


def shaped(states: Any) -> str:
    return next(key for key in states if isinstance(states[key], Tensor) and states[key].numel() > 1)


def a_state(optimizer: Any, params: Params) -> Tensor:
    return optimizer.state[params[2]][shaped(optimizer.state[params[2]])]


def moved(optimizer: Any, _: Params) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))


def swapped(optimizer: Any, _: Params) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def added(optimizer: Any, _: Params) -> None:
    optimizer.add_param_group({"params": [optimizer.param_groups[1]["params"].pop()], "lr": 1e-3})


def added_again(optimizer: Any, _: Params) -> None:
    optimizer.add_param_group({**optimizer.param_groups.pop(), "lr": 5e-3})


def scaled_all(optimizer: Any, params: Params) -> None:
    torch._foreach_mul_([optimizer.state[param][shaped(optimizer.state[param])] for param in params], 0.5)


def replaced(optimizer: Any, params: Params) -> None:
    states = optimizer.state[params[2]]
    states[shaped(states)] = torch.full_like(states[shaped(states)], 0.01)


def saved_and_loaded(optimizer: Any, _: Params) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    optimizer.state.clear()
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))


def counted_anew(optimizer: Any, params: Params) -> None:
    for param in params:
        if "step" in optimizer.state[param]:
            optimizer.state[param]["step"].zero_().add_(1)


WRITES: dict[str, Write] = {
    "moved": moved, "swapped": swapped, "added": added, "added again": added_again,
    "a group deleted": lambda optimizer, _: optimizer.param_groups.pop(1),
    "a group emptied": lambda optimizer, _: optimizer.param_groups[0]["params"].clear(),
    "all groups cleared": lambda optimizer, _: optimizer.param_groups.clear(),
    "maximized": lambda optimizer, _: optimizer.param_groups[1].update(maximize=True),
    "states cleared": lambda optimizer, _: optimizer.state.clear(),
    "a state deleted": lambda optimizer, params: optimizer.state.pop(params[2]),
    "states assigned": lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict)),
    "zeroed in place": lambda optimizer, params: a_state(optimizer, params).zero_(),
    "a row in place": lambda optimizer, params: a_state(optimizer, params)[1].mul_(3),
    "scaled all": scaled_all, "replaced": replaced, "saved and loaded": saved_and_loaded, "counted anew": counted_anew,
}  # fmt: skip


def model_of() -> tuple[nn.Module, Params]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, list(model.parameters())


def groups_of(params: Params) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 3e-2}]


def plain(kind: str, write: Write) -> list[Tensor]:
    model, params = model_of()
    optimizer = MAKE[kind](groups_of(params))
    for index, batch in enumerate(BATCHES):
        if index == 2:
            write(optimizer, params)
        model(batch).square().sum().backward()
        optimizer.step()
        model.zero_grad()
    return [param.detach().clone() for param in params]


def config_of(device: str, folder: Path) -> dict[str, Any]:
    home = {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {})}
    return {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "log_level": "error",
        "zero_optimization": {
            "stage": 3, "offload_param": home, "offload_optimizer": home, "stage3_param_persistence_threshold": 0,
        },
    }  # fmt: skip


def trained(engine: Any, batch: Tensor) -> None:
    engine.backward(engine(batch).square().sum())
    engine.step()


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_obeyed_as_torch_does(write: str, tmp_path: Path) -> None:
    # The engine's optimizer, and the program's own, whose groups and states are the same.
    for kind, device, own in (("AdamW", "nvme", False), ("SGD", "nvme", False), ("RMSprop", "cpu", True)):
        model, params = model_of()
        given = MAKE[kind](groups_of(params))
        engine, optimizer, *_ = infinity.initialize(model, config_of(device, tmp_path), optimizer=given)
        with engine:
            for index, batch in enumerate(BATCHES):
                if index == 2:
                    WRITES[write](given if own else optimizer, params)
                trained(engine, batch)
            found = [infinity.state(param).master for param in params]
        pairs = zip(found, plain(kind, WRITES[write]), strict=True)
        assert max(float((mine - theirs).abs().max()) for mine, theirs in pairs) <= 2e-6, kind


def test_states_are_those_that_the_tiers_hold(tmp_path: Path) -> None:
    model, params = model_of()
    engine, optimizer, *_ = infinity.initialize(model, config_of("nvme", tmp_path), optimizer=MAKE["AdamW"](params))
    with engine:
        assert len(optimizer.state) == 0 == len(optimizer.state[params[0]])
        trained(engine, BATCHES[0])
        states = optimizer.state[params[0]]
        assert {*optimizer.state} == {*params}
        assert {*states} == {"step", "exp_avg", "exp_avg_sq"}
        old = states["exp_avg"]
        assert torch.equal(old, infinity.state(params[0]).exp_avg)
        old.fill_(0.5)
        assert infinity.state(params[0]).exp_avg.eq(0.5).all()
        with pytest.raises(ValueError, match="read-only"):
            old.numpy()[0] = 1.0
        trained(engine, BATCHES[1])
        with pytest.raises(StateError, match="exp_avg was read before the latest step"):
            old.zero_()


REFUSED: dict[str, tuple[str, Write, type[Exception], str]] = {
    "of no model": (
        "AdamW", lambda optimizer, _: optimizer.param_groups[0].update(params=[nn.Parameter(torch.ones(7))]),
        ConfigError, r"param_groups\[0\] has a parameter of shape \(7,\) that is not in the engine's model",
    ),
    "twice": (
        "AdamW", lambda optimizer, params: optimizer.param_groups[1]["params"].append(params[0]), ConfigError,
        r"0.weight is in param_groups\[0\] and in param_groups\[1\]",
    ),
    "in no group from the start": (
        "AdamW", lambda optimizer, params: optimizer.add_param_group({"params": [params[4]]}), ConfigError,
        "4.weight, which was in no group when the engine was made",
    ),
    "a group without a rate": (
        "AdamW", lambda optimizer, _: optimizer.param_groups.append({"params": []}), ConfigError,
        r"param_groups\[2\] has not what AdamW steps with \(KeyError: 'lr'\)",
    ),
    "amsgrad": (
        "AdamW", lambda optimizer, _: optimizer.param_groups[1].update(amsgrad=True), ConfigError,
        "amsgrad was not set when the engine was made",
    ),
    "no momentum": (
        "SGD", lambda optimizer, _: optimizer.param_groups[1].update(momentum=0.0), ConfigError,
        "momentum was set when the engine was made",
    ),
    "centered": (
        "RMSprop", lambda optimizer, _: optimizer.param_groups[1].update(centered=True), ConfigError,
        "RMSprop keeps square_avg, grad_avg of an element, with those of another or of before square_avg",
    ),
    "another state": (
        "AdamW", lambda optimizer, params: optimizer.state[params[0]].update(mine=torch.ones(1)), ConfigError,
        "0.weight has no mine: its optimizer keeps step, exp_avg, exp_avg_sq",
    ),
    "a part of the states": (
        "AdamW", lambda optimizer, params: optimizer.state.update({params[0]: {"step": 1}}), ConfigError,
        "what was assigned to 0.weight lacks exp_avg, exp_avg_sq",
    ),
    "one state deleted": (
        "AdamW", lambda optimizer, params: optimizer.state[params[0]].pop("exp_avg"), StateError,
        "0.weight keeps all of its states or none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("write", REFUSED)
def test_what_cannot_be_obeyed_is_refused_and_training_goes_on(write: str, tmp_path: Path) -> None:
    kind, wrong, error, words = REFUSED[write]
    model, params = model_of()
    given = MAKE[kind]([{"params": params[:2]}, {"params": params[2:4]}])
    engine, optimizer, *_ = infinity.initialize(model, config_of("nvme", tmp_path), optimizer=given)
    with engine:
        trained(engine, BATCHES[0])
        before = [{key: copy.copy(value) for key, value in group.items()} for group in optimizer.param_groups]
        engine.backward(engine(BATCHES[1]).square().sum())
        with pytest.raises(error, match=words):
            wrong(optimizer, params)
            engine.step()
        optimizer.param_groups = before
        engine.step()
        assert engine.global_steps == 2
