"""Every rule gives one result, on every instruction set and in Python, and it is torch's (or the paper's)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from infinity.ops import adam
from infinity.ops.adam import adam_step
from infinity.ops.rules import AdagradHyper, AdamHyper, Hyper, LionHyper, MomentumHyper, Piece, Rule
from tests.support.pieces import DTYPES, HYPERS, STORAGES, make_piece, same, states

ISAS = adam.simds() or ["reference"]


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    adam.set_simd(None)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", sorted(HYPERS))
def test_every_instruction_set_gives_the_fallbacks_bits(isa: str, rule: str) -> None:
    if isa != "reference":
        adam.set_simd(isa)
    made = [make_piece(997, storage, dtype, HYPERS[rule], shift=1) for storage in STORAGES for dtype in DTYPES]
    fallbacks = copy.deepcopy(made)
    for step, bound in ((1, math.inf), (2, 0.5)):
        left_out = adam_step(made, step=step, grad_scale=0.37, grad_bound=bound)
        assert left_out == adam_step(fallbacks, step=step, grad_scale=0.37, grad_bound=bound, native=False) > 0
    for piece, fallback in zip(made, fallbacks, strict=True):
        assert all(map(same, states(piece), states(fallback)))


def _paper_lion(weight: Tensor, grads: list[Tensor], hyper: LionHyper) -> Tensor:
    m = torch.zeros_like(weight)
    for grad in grads:
        update = (hyper.beta1 * m + (1 - hyper.beta1) * grad).sign()
        m = hyper.beta2 * m + (1 - hyper.beta2) * grad
        weight = weight - hyper.lr * (update + hyper.weight_decay * weight)
    return weight


def _torch(weight: Tensor, grads: list[Tensor], make: type[torch.optim.Optimizer], **params: float) -> Tensor:
    param = torch.nn.Parameter(weight.clone())
    optimizer = make([param], **params)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def _ours(weight: Tensor, grads: list[Tensor], hyper: Hyper) -> Tensor:
    ours, moments = weight.clone(), [torch.zeros_like(weight) for _ in range(2 if hyper.rule is Rule.ADAMW else 1)]
    for step, grad in enumerate(grads, start=1):
        adam_step([Piece(ours, grad, *moments, hyper=hyper)], step=step, grad_scale=1.0)
    return ours


@pytest.mark.parametrize("case", ["adamw", "lion", "adagrad", "momentum", "nesterov"])
def test_ten_steps_are_those_of_torch_or_of_the_paper(case: str) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = 0.1 * torch.randn(2000, generator=generator)
    grads = [torch.randn(2000, generator=generator) for _ in range(10)]
    if case == "lion":
        lion = LionHyper(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)
        ours, theirs = _ours(weight, grads, lion), _paper_lion(weight.double(), [g.double() for g in grads], lion)
    elif case == "adamw":
        rest = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.05}
        hyper = AdamHyper(beta1=0.9, beta2=0.95, adamw=True, **rest)
        ours = _ours(weight, grads, hyper)
        theirs = _torch(weight, grads, torch.optim.AdamW, betas=(0.9, 0.95), **rest)
    elif case == "adagrad":
        params = {"lr": 1e-2, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.05}
        ours = _ours(weight, grads, AdagradHyper(**params))
        theirs = _torch(weight, grads, torch.optim.Adagrad, **params)
    else:
        rest = {"dampening": 0.2, "nesterov": False} if case == "momentum" else {"dampening": 0.0, "nesterov": True}
        params = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.05, **rest}
        ours = _ours(weight, grads, MomentumHyper(**params))
        theirs = _torch(weight, grads, torch.optim.SGD, **params)
    assert (ours - theirs).abs().max() <= 1e-6


@pytest.mark.parametrize("rule", sorted(HYPERS))
def test_a_bound_is_torchs_clip_by_value(rule: str) -> None:
    bounded, clipped = (make_piece(997, "plain", torch.float32, HYPERS[rule]) for _ in range(2))
    left_out = adam_step([bounded], step=1, grad_scale=0.5, grad_bound=0.25)
    scaled = torch.nn.Parameter(clipped.grad)
    finite = clipped.grad.isfinite()
    scaled.grad = torch.where(finite, clipped.grad * 0.5, torch.nan)
    assert ((scaled.grad.abs() > 0.25) & finite).any()
    torch.nn.utils.clip_grad_value_([scaled], 0.25)
    clipped.grad.copy_(scaled.grad)
    assert adam_step([clipped], step=1, grad_scale=1.0) == left_out > 0, "what is not finite is still left out"
    assert all(map(same, states(bounded), states(clipped)))


def test_a_piece_with_the_wrong_number_of_states_is_refused_before_anything_is_written() -> None:
    good = make_piece(64, "plain", torch.float32, HYPERS["lion"])
    before = good.param.clone()
    wrong = Piece(good.param, good.grad, good.exp_avg, good.exp_avg.clone(), hyper=good.hyper)
    with pytest.raises(ValueError, match=r"pieces\[1\].exp_avg_sq: LION keeps one state"):
        adam_step([good, wrong], step=1, grad_scale=1.0)
    bare = Piece(good.param, good.grad, good.exp_avg, hyper=HYPERS["adam"])
    with pytest.raises(ValueError, match="ADAM keeps two states"):
        adam_step([bare], step=1, grad_scale=1.0)
    assert torch.equal(good.param, before)
