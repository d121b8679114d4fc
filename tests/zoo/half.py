"""One family in bf16: an engine with everything on NVMe beside plain bf16 weights over fp32 masters, step by step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import infinity
from tests.support.oracle import settings
from tests.zoo.families import batch, build


@dataclass(frozen=True)
class FirstDifference:
    """Where an engine leaves plain torch: `step`, and what came first in it. If that is weights, with masters that are
    still equal: the masters of those that differ.
    """

    step: int
    what: str
    masters: Tensor | None = None


def away_from_zero(master: Tensor) -> Tensor:
    """The nearest bf16, of two equally near ones the greater: as the engine's split master rounds."""
    return ((master.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32).bfloat16()


def to_even(master: Tensor) -> Tensor:
    """As torch rounds."""
    return master.bfloat16()


def first_difference(name: str, steps: int, rounding: Callable[[Tensor], Tensor]) -> FirstDifference | None:
    """Where an engine's run first differs from plain torch's; None if it does not, to the last bit."""
    torch.set_num_threads(1)
    plain = build(name)
    masters = {key: param.detach().clone() for key, param in plain.named_parameters()}
    params = dict(plain.named_parameters())
    section = settings("unused")["optimizer"]["params"]
    optimizer = torch.optim.AdamW(masters.values(), **section, fused=True)
    for key, param in params.items():
        # Buffers stay as they are, in the engine as well.
        param.data = rounding(masters[key])
    model = build(name)
    with tempfile.TemporaryDirectory() as drive:
        config = settings(drive, param="nvme", optimizer="nvme", dtype="bf16")
        with infinity.initialize(model=model, config=config)[0] as engine:
            for step in range(steps):
                inputs = {key: _cast(value) for key, value in batch(name, 0, step).items()}
                losses = []
                for call in (plain, engine):
                    torch.manual_seed(step)
                    losses.append(call(**inputs).loss)
                if not torch.equal(*(loss.detach().float() for loss in losses)):
                    return FirstDifference(step, "loss")
                losses[0].backward()
                engine.backward(losses[1])
                for key, param in model.named_parameters():
                    grad = params[key].grad
                    if grad is not None and not torch.equal(infinity.state(param).grad, grad.float()):
                        return FirstDifference(step, f"gradient of {key}")
                engine.step()
                for key, param in params.items():
                    masters[key].grad = None if param.grad is None else param.grad.float()
                    param.grad = None
                optimizer.step()
                found = _after_step(step, model, params, masters, rounding)
                if found is not None:
                    return found
    return None


def _after_step(
    step: int, model: torch.nn.Module, params: dict[str, Any], masters: dict[str, Tensor], rounding: Any
) -> FirstDifference | None:
    apart = []
    for key, param in model.named_parameters():
        if param.requires_grad and not torch.equal(infinity.state(param).master, masters[key]):
            return FirstDifference(step, f"master of {key}")
        with infinity.read(param), torch.no_grad():
            params[key].copy_(rounding(masters[key]))
            apart.append(masters[key][param != params[key]])
    differing = torch.cat(apart)
    return FirstDifference(step, "weights", differing) if differing.numel() else None


def _cast(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
