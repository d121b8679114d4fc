"""Moments in 8 bits: maps, codes and steps have the bits of bitsandbytes' on a processor, on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from infinity.ops import adam
from infinity.ops.adam import adam_step
from infinity.ops.codes import code_maps, decoded, encoded
from infinity.ops.rules import CodedAdamHyper, Piece
from tests.support.bnb import exact_root
from tests.support.cells import covered

pytest.importorskip("bitsandbytes")
from bitsandbytes import functional
from bitsandbytes.backends.cpu import ops as theirs

CPU = torch.device("cpu")
ISAS = ["reference", *adam.simds()]


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    adam.set_simd(None)


@pytest.mark.parametrize("which", [0, 1])
def test_codes_and_their_values_are_theirs(which: int) -> None:
    values = functional.create_dynamic_map(signed=not which)
    assert torch.equal(code_maps(CPU)[which].values, values)
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        moments = torch.randn(20 * 256 + 77, generator=generator) * 10.0 ** (seed - 35)
        moments[256:512] = 0.0
        moments[600:1000] *= 1e-6
        moments = moments.square() if which else moments
        codes, scales = torch.ops.bitsandbytes.quantize_blockwise(moments, values, 256)
        ours = encoded(moments, which)
        assert torch.equal(ours[0], codes) and torch.equal(ours[1], scales)
        back = torch.ops.bitsandbytes.dequantize_blockwise(codes, scales, values, 256, torch.float32)
        assert torch.equal(decoded(*ours, which).view(torch.int32), back.view(torch.int32))


def test_what_is_no_number_gets_a_code_everywhere() -> None:
    moments = torch.tensor([1.0, float("nan"), -2.0, float("-inf")])
    codes, scales = encoded(moments, 0)
    assert codes.tolist() == [code_maps(CPU)[0].cells[32768], 0, code_maps(CPU)[0].cells[32768], 0]
    assert scales.tolist() == [float("inf")]


def gradients(numel: int, dtype: torch.dtype) -> list[Tensor]:
    """With a block of zeros, and a block whose elements have another magnitude in some steps."""
    generator = torch.Generator().manual_seed(numel)
    made = []
    for step in range(50):
        grad = torch.randn(numel, generator=generator) * 1e-3
        grad[256:512] = 0.0
        if step % 3 == 0:
            grad[600:800] *= 1e-5
        made.append(grad.to(dtype))
    return made


def pieces(numel: int, coded: bool) -> list[Tensor]:
    """Weights, moments and their scales before the first step."""
    weight = 0.02 * torch.randn(numel, generator=torch.Generator().manual_seed(7))
    moment = torch.zeros(numel, dtype=torch.uint8 if coded else torch.float32)
    scales = [torch.zeros(-(-numel // 256)) for _ in range(2 if coded else 0)]
    return [weight, moment, moment.clone(), *scales]


def their_steps(numel: int, coded: bool, decay: float, scale: float, dtype: torch.dtype) -> list[Tensor]:
    weight, first, second, *scales = held = pieces(numel, coded)
    maps = [functional.create_dynamic_map(signed=signed) for signed in (True, False)]
    with exact_root():
        for step, grad in enumerate(gradients(numel, dtype), start=1):
            if coded:
                theirs._optimizer_update_8bit_blockwise_cpu(
                    "adam", grad, weight, first, second, 0.9, 0.999, 0.0, 0.0, 1e-8, step, 1e-3, *maps, *scales, decay,
                    scale,
                )  # fmt: skip
            else:
                theirs._optimizer_update_32bit_cpu(
                    "adam", grad, weight, first, second, None, 0.0, 0.0, 0.9, 0.999, 0.0, 0.0, 1e-8, decay, step, 1e-3,
                    scale,
                )  # fmt: skip
    return held


@pytest.mark.parametrize(
    *covered(
        numel=[1000, 4096, 8192 + 77, 3 * 32768 + 300], coded=[True, False], decay=[0.0, 0.01], scale=[1.0, 0.37],
        dtype=[torch.float32, torch.bfloat16],
    )
)  # fmt: skip
def test_fifty_steps_are_theirs(numel: int, coded: bool, decay: float, scale: float, dtype: torch.dtype) -> None:
    expected = their_steps(numel, coded, decay, scale, dtype)
    hyper = CodedAdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=decay, coded=coded)
    for isa in ISAS:
        adam.set_simd(None if isa == "reference" else isa)
        weight, first, second, *scales = held = pieces(numel, coded)
        kept = (scales[0], scales[1]) if coded else None
        for step, grad in enumerate(gradients(numel, dtype), start=1):
            piece = Piece(weight, grad, first, second, scales=kept, hyper=hyper)
            adam_step([piece], step=step, grad_scale=scale, native=isa != "reference")
        for ours, other in zip(held, expected, strict=True):
            assert torch.equal(ours.view(torch.uint8), other.view(torch.uint8)), isa


def test_a_block_with_a_gradient_that_is_not_finite_keeps_every_bit() -> None:
    hyper = CodedAdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
    grad = gradients(700, torch.float32)[1]
    bad = grad.clone()
    bad[300], bad[310], bad[699] = float("inf"), float("nan"), float("nan")
    for isa in ISAS:
        adam.set_simd(None if isa == "reference" else isa)
        found = []
        for given in (grad, bad):
            weight, first, second, *scales = held = pieces(700, coded=True)
            for step, each in enumerate((grad, given), start=1):
                piece = Piece(weight, each, first, second, scales=(scales[0], scales[1]), hyper=hyper)
                left_out = adam_step([piece], step=step, grad_scale=1.0, native=isa != "reference")
            found.append(held)
        assert left_out == 3
        once = pieces(700, coded=True)
        piece = Piece(*once[:1], grad, *once[1:3], scales=(once[3], once[4]), hyper=hyper)
        adam_step([piece], step=1, grad_scale=1.0)
        for ours, whole, before in zip(found[1], found[0], once, strict=True):
            at = 256 if ours.numel() == 700 else 1
            assert torch.equal(ours[:at], whole[:at]) and torch.equal(ours[at:], before[at:])


def test_scales_belong_to_moments_in_8_bits() -> None:
    coded, plain = (CodedAdamHyper(1e-3, 0.9, 0.999, 1e-8, 0.0, coded=coded) for coded in (True, False))
    weight, first, second, *scales = pieces(300, coded=True)
    with pytest.raises(ValueError, match="CODED_ADAMW has two"):
        adam_step([Piece(weight, weight.clone(), first, second, hyper=coded)], step=1, grad_scale=1.0)
    with pytest.raises(ValueError, match=r"scales has 1 elements, expected 2"):
        short = (scales[0], scales[1][:1])
        adam_step([Piece(weight, weight.clone(), first, second, scales=short, hyper=coded)], step=1, grad_scale=1.0)
    both = (scales[0], scales[1])
    with pytest.raises(ValueError, match=r"exp_avg is torch.uint8"):
        adam_step([Piece(weight, weight.clone(), first, second, scales=both, hyper=plain)], step=1, grad_scale=1.0)
