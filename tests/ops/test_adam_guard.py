"""A gradient that is not finite leaves its element alone; the error of a weight is that of torch's own roundings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from infinity.ops import adam, reference
from infinity.ops.adam import adam_step, join, split
from infinity.ops.rules import AdamHyper, Piece

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORAGES = ("plain", "split", "master_half", "master_bfloat")
_PATHS = ("fallback", *adam.simds())


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    adam.set_simd(None)
    adam.set_threads(None)


def _step(path: str, piece: Piece, *, step: int = 3, grad_scale: float = 1.0) -> int:
    if path != "fallback":
        adam.set_simd(path)
    return adam_step([piece], step=step, grad_scale=grad_scale, native=path != "fallback")


def _piece(storage: str, grad: Tensor, *, adamw: bool = True) -> Piece:
    generator = torch.Generator().manual_seed(grad.numel())
    weight, exp_avg = (torch.randn(grad.numel(), generator=generator) for _ in range(2))
    exp_avg_sq = torch.rand(grad.numel(), generator=generator)
    hyper = AdamHyper(3e-3, 0.9, 0.95, 1e-8, 0.1, adamw=adamw)
    if storage == "plain":
        return Piece(weight, grad, exp_avg, exp_avg_sq, hyper=hyper)
    if storage == "split":
        param, remainder = split(weight, native=False)
        return Piece(param, grad, exp_avg, exp_avg_sq, remainder=remainder, hyper=hyper)
    # No rounded copy of the master: whoever rounds it again is found out.
    param = torch.randn(grad.numel(), generator=generator)
    low = param.half() if storage == "master_half" else reference.round_ties_away(param)
    return Piece(low, grad, exp_avg, exp_avg_sq, master=weight, hyper=hyper)


def _states(piece: Piece) -> list[Tensor]:
    """The bits of all that a step writes."""
    tensors = (piece.param, piece.exp_avg, piece.exp_avg_sq, piece.remainder, piece.master)
    return [t.view(torch.int32 if t.element_size() == 4 else torch.int16) for t in tensors if t is not None]


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize("storage", _STORAGES)
def test_an_element_without_a_finite_gradient_keeps_every_bit(storage: str, path: str) -> None:
    generator = torch.Generator().manual_seed(6)
    for dtype, adamw, share in itertools.product(_DTYPES, (True, False), (0.0, 0.001, 0.3, 1.0)):
        clean = torch.randn(5003, generator=generator).to(dtype)
        bad = torch.rand(5003, generator=generator) < share
        kinds = torch.tensor([float("inf"), -float("inf"), float("nan"), -float("nan")], dtype=dtype)
        grad = torch.where(bad, kinds[torch.randint(4, (5003,), generator=generator)], clean)
        piece, finite = _piece(storage, grad, adamw=adamw), _piece(storage, clean, adamw=adamw)
        before = [state.clone() for state in _states(piece)]
        assert _step(path, piece) == int(bad.sum())
        assert _step("fallback", finite) == 0
        for state, old, expected in zip(_states(piece), before, _states(finite), strict=True):
            assert state.equal(torch.where(bad, old, expected)), (dtype, adamw, share)


@pytest.mark.parametrize("path", _PATHS)
def test_a_gradient_that_scaling_makes_infinite_counts(path: str) -> None:
    grad = torch.full((100,), 1e30)
    grad[::7] = 1.0
    piece = _piece("plain", grad)
    before = piece.param.clone()
    assert _step(path, piece, grad_scale=1e30) == int((grad == 1e30).sum())
    assert piece.param.equal(torch.where(grad == 1.0, piece.param, before))
    assert bool((piece.param != before)[::7].all())


@pytest.mark.skipif(not adam.simds(), reason="no native library here")
def test_the_count_is_over_all_pieces_and_threads() -> None:
    for threads in (1, 2, 3):
        adam.set_threads(threads)
        grads = [torch.randn(numel) for numel in (200_000, 0, 31, 100_000)]
        for grad in grads:
            grad[::5] = float("nan")
        expected = sum(int(grad.isnan().sum()) for grad in grads)
        assert adam_step([_piece("plain", grad) for grad in grads], step=1, grad_scale=1.0, native=True) == expected


HYPERS = [
    AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.05, adamw=True),
    AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, adamw=True),
    AdamHyper(1e-3, 0.9, 0.999, 1e-8, 0.0, adamw=True),
    AdamHyper(1e-4, 0.9, 0.999, 1e-8, 0.01, adamw=True),
    AdamHyper(1e-1, 0.9, 0.999, 1e-8, 0.1, adamw=True),
    # torch moves a moment from the nearer end.
    AdamHyper(1e-2, 0.3, 0.9, 1e-6, 0.05, adamw=True),
    AdamHyper(1e-2, 0.0, 0.9, 1e-6, 0.05, adamw=True),
    AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.05, adamw=False),
    AdamHyper(1e-3, 0.9, 0.999, 1e-8, 0.0, adamw=False),
]
# Elements that are whole vectors of torch's everywhere; others it steps with other roundings.
NUMEL = 5120


def _torchs(kind: type[torch.optim.Optimizer], start: Tensor, hyper: AdamHyper, **how: bool) -> torch.optim.Optimizer:
    weight = start.clone().requires_grad_()
    return kind([weight], hyper.lr, (hyper.beta1, hyper.beta2), hyper.eps, hyper.weight_decay, **how)  # type: ignore[call-arg]


def _weight(optimizer: torch.optim.Optimizer) -> Tensor:
    return optimizer.param_groups[0]["params"][0]


@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize("seed", range(3))
def test_weights_and_moments_are_those_of_torchs_fused_optimizer_bit_by_bit(hyper: AdamHyper, seed: int) -> None:
    """So no weight errs more than torch's against torch in fp64: by construction, and looked at after 100 steps."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(NUMEL, generator=generator) * (1.0, 0.02, 30.0)[seed]
    kind = torch.optim.AdamW if hyper.adamw else torch.optim.Adam
    fused, exact = _torchs(kind, start, hyper, fused=True), _torchs(kind, start.double(), hyper)
    plain = Piece(start.clone(), start, torch.zeros(NUMEL), torch.zeros(NUMEL), hyper=hyper)
    param, remainder = split(start)
    halved = Piece(param, start, torch.zeros(NUMEL), torch.zeros(NUMEL), remainder=remainder, hyper=hyper)
    for step in range(1, 101):
        grad = torch.randn(NUMEL, generator=generator) * 10.0 ** (step % 5 - 3)
        for optimizer in (fused, exact):
            _weight(optimizer).grad = grad.to(_weight(optimizer).dtype)
            optimizer.step()
        plain.grad = halved.grad = grad
        adam_step([plain, halved], step=step, grad_scale=1.0)
    assert join(halved.param, remainder).equal(plain.param)
    theirs, oracle = _weight(fused).detach(), _weight(exact).detach()
    ours_off, theirs_off = (plain.param - oracle).abs(), (theirs - oracle).abs()
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        state = fused.state[_weight(fused)]
        assert plain.param.equal(theirs)
        assert plain.exp_avg.equal(state["exp_avg"]) and plain.exp_avg_sq.equal(state["exp_avg_sq"])
        assert bool((ours_off <= theirs_off).all())
    # Elsewhere torch rounds in other places, as often.
    assert float(ours_off.square().mean()) <= 1.2 * float(theirs_off.square().mean())


def test_the_last_elements_differ_from_torchs_by_a_rounding_of_theirs() -> None:
    """What is less than a vector torch steps without fused operations; ours have the same bits wherever they stand."""
    hyper, numel = HYPERS[0], 16 * 40 + 7
    start = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    fused = _torchs(torch.optim.AdamW, start, hyper, fused=True)
    piece = Piece(start.clone(), start, torch.zeros(numel), torch.zeros(numel), hyper=hyper)
    for step in range(1, 11):
        piece.grad = _weight(fused).grad = torch.randn(numel)
        fused.step()
        adam_step([piece], step=step, grad_scale=1.0)
    torch.testing.assert_close(piece.param, _weight(fused).detach(), rtol=3e-7, atol=1e-7)
    torch.testing.assert_close(piece.exp_avg_sq, fused.state[_weight(fused)]["exp_avg_sq"], rtol=1e-6, atol=0.0)
