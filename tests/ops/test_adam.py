"""Adam gives one result: on every instruction set, on any number of threads, natively or in its Python fallback."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from infinity.errors import ExtensionError
from infinity.ops import adam, reference
from infinity.ops.adam import adam_step, grad_stats, join, split
from infinity.ops.rules import AdamHyper, Piece
from tests.support.pieces import make_piece

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORAGES = ("plain", "split", "master_half", "master_bfloat")
# Zeros, denormals of fp32 and fp16, halfway cases of bf16 and fp16, the largest and what rounds to infinity.
_EDGES = [0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 6e-8, 2.9802322e-8, 1.00390625, -1.01171875, 1.00048828125,
          65504.0, 65519.0, 65520.0, -1e30, 3.3895314e38, 3.3961775e38, 3.4028235e38, float("inf")]  # fmt: skip
_HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, adamw=True)

native = pytest.mark.skipif(not adam.simds(), reason="no native library here")


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    adam.set_simd(None)
    adam.set_threads(None)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def _same(left: Tensor, right: Tensor) -> bool:
    equal = _bits(left) == _bits(right)
    if left.is_floating_point():
        equal |= left.isnan() & right.isnan()
    return bool(equal.all())


def _values(numel: int, generator: torch.Generator, spread: float = 5.0) -> Tensor:
    values = torch.randn(numel, generator=generator) * torch.exp(spread * torch.randn(numel, generator=generator))
    edges = torch.tensor(_EDGES)[:numel]
    places = torch.randperm(numel, generator=generator)[: edges.numel()]
    values[places] = edges
    return values


def _piece(numel: int, storage: str, grad_dtype: torch.dtype, hyper: AdamHyper = _HYPER, seed: int = 0) -> Piece:
    generator = torch.Generator().manual_seed(seed)
    weight, grad = _values(numel, generator), _values(numel, generator, 3.0).to(grad_dtype)
    moments = _values(numel, generator), _values(numel, generator).abs()
    if storage == "plain":
        return Piece(weight, grad, *moments, hyper=hyper)
    if storage == "split":
        param, remainder = split(weight, native=False)
        return Piece(param, grad, *moments, remainder=remainder, hyper=hyper)
    param = weight.half() if storage == "master_half" else reference.round_ties_away(weight)
    return Piece(param, grad, *moments, master=weight, hyper=hyper)


def _state(piece: Piece) -> list[Tensor]:
    tensors = (piece.param, piece.exp_avg, piece.exp_avg_sq, piece.remainder, piece.master)
    return [tensor for tensor in tensors if tensor is not None]


@native
@pytest.mark.parametrize("storage", _STORAGES)
@pytest.mark.parametrize("grad_dtype", _DTYPES)
def test_every_path_gives_the_bits_of_the_fallback(storage: str, grad_dtype: torch.dtype) -> None:
    for adamw, bias_correction, scale in itertools.product((True, False), (True, False), (1.0, 0.37)):
        hyper = AdamHyper(3e-3, 0.9, 0.95, 1e-8, 0.1, adamw=adamw, bias_correction=bias_correction)
        fallback = _piece(9_003, storage, grad_dtype, hyper)
        for step in (1, 2):
            nonfinite = adam_step([fallback], step=step, grad_scale=scale, native=False)
        # The edges hold one infinity, and more that are beyond fp16.
        assert nonfinite == int((fallback.grad.float() * scale).isfinite().logical_not().sum()) > 0
        for simd in adam.simds():
            adam.set_simd(simd)
            piece = _piece(9_003, storage, grad_dtype, hyper)
            for step in (1, 2):
                count = adam_step([piece], step=step, grad_scale=scale, native=True)
                assert count == nonfinite
            assert all(map(_same, _state(piece), _state(fallback))), (simd, hyper, scale)


@native
@pytest.mark.parametrize("storage", _STORAGES)
@pytest.mark.parametrize("simd", adam.simds())
def test_an_element_does_not_depend_on_its_place(storage: str, simd: str) -> None:
    adam.set_simd(simd)
    for numel, shift in itertools.product((0, 1, 15, 16, 17, 33, 4095), (0, 1, 3)):
        # Views into larger tensors: neither aligned, nor may what surrounds them change.
        whole = _piece(numel + shift + 5, storage, torch.float16)
        before = [tensor.clone() for tensor in _state(whole)]
        at = slice(shift, shift + numel)
        cut = [None if t is None else t[at] for t in (whole.remainder, whole.master)]
        tensors = [t[at] for t in (whole.param, whole.grad, whole.exp_avg, whole.exp_avg_sq)]
        fallback = Piece(*[t.clone() for t in tensors], *[None if t is None else t.clone() for t in cut], hyper=_HYPER)
        adam_step([Piece(*tensors, *cut, hyper=_HYPER)], step=5, grad_scale=1.0, native=True)
        adam_step([fallback], step=5, grad_scale=1.0, native=False)
        for changed, old, expected in zip(_state(whole), before, _state(fallback), strict=True):
            assert _same(changed[at], expected), (numel, shift)
            assert _same(changed[:shift], old[:shift]) and _same(changed[at.stop :], old[at.stop :])


@native
def test_threads_and_pieces_change_nothing() -> None:
    sizes = (0, 100_001, 7, 32_768, 65_537)
    hypers = [AdamHyper(10.0**-index, 0.9, 0.99, 1e-6, 0.01, adamw=index % 2 == 0) for index in range(5)]
    results = []
    for threads in (1, 2, 3):
        adam.set_threads(threads)
        pieces = [_piece(n, _STORAGES[i % 4], _DTYPES[i % 3], hypers[i], seed=i) for i, n in enumerate(sizes)]
        adam_step(pieces, step=7, grad_scale=0.5, native=True)
        results.append([*itertools.chain(*map(_state, pieces)), *[p.grad for p in pieces]])
        results[-1].append(torch.tensor([s.sum_of_squares for s in grad_stats([p.grad for p in pieces])]))
    for other in results[1:]:
        assert all(map(_same, results[0][:-1], other[:-1]))
        assert results[0][-1].equal(other[-1])


@native
def test_flushed_denormals_of_the_caller_change_nothing() -> None:
    expected, piece = _piece(50_000, "plain", torch.float32), _piece(50_000, "plain", torch.float32)
    adam_step([expected], step=1, grad_scale=1.0, native=True)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        adam_step([piece], step=1, grad_scale=1.0, native=True)
    finally:
        torch.set_flush_denormal(False)
    assert all(map(_same, _state(piece), _state(expected)))


def _wide_floats() -> Tensor:
    """All bf16 patterns, each with the remainders that matter and random ones."""
    generator = torch.Generator().manual_seed(2)
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    low = torch.cat(
        [torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]), torch.randint(1 << 16, (4,), generator=generator)]
    )
    patterns = (high[:, None] + low[None, :]).flatten()
    return torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("use_native", [pytest.param(True, marks=native), False])
def test_split_loses_no_bit_of_any_float(use_native: bool) -> None:
    values = _wide_floats()
    param, remainder = split(values, native=use_native)
    # Of a NaN only that it is one, which the bf16 part says, too.
    one_nan = torch.where(values.isnan(), math.nan, values)
    assert _bits(join(param, remainder, native=use_native)).equal(_bits(one_nan))
    assert param.isnan().equal(values.isnan())
    # The bf16 part is the nearest, ties away from zero: no bf16 is nearer.
    finite = values.isfinite() & param.isfinite()
    ulp_half = torch.ldexp(
        torch.tensor(1.0, dtype=torch.float64), torch.frexp(values.double())[1].double().clamp_min(-125) - 9
    )
    distance = (values.double() - param.double()).abs()
    assert bool((distance <= ulp_half)[finite].all())
    ties = finite & (_bits(values) & 0xFFFF == 0x8000)
    assert bool((param.double().abs() > values.double().abs())[ties].all())


@pytest.mark.parametrize("simd", [None, *adam.simds()])
@pytest.mark.parametrize("storage", ["split", "master_bfloat"])
def test_a_weight_that_is_a_gpus_nan_stays_one(storage: str, simd: str | None) -> None:
    adam.set_simd(simd)
    piece = make_piece(70, storage, torch.float32)
    master = join(piece.param, piece.remainder) if piece.remainder is not None else piece.master
    master.view(torch.int32)[::3] = 0x7FFFFFFF
    piece.grad.fill_(0.5)
    if piece.remainder is not None:
        # Its bits cut in two, rounded: the bf16 half of a checkpoint may say -0.
        piece.param.view(torch.int16)[::3], piece.remainder[::3] = -0x8000, -1
    adam.adam_step([piece], step=1, grad_scale=1.0, native=simd is not None)
    assert bool(piece.param[::3].isnan().all())


@native
@pytest.mark.parametrize("simd", adam.simds())
def test_split_and_join_agree_with_their_fallbacks(simd: str) -> None:
    adam.set_simd(simd)
    values = _wide_floats()
    parts, fallbacks = split(values, native=True), split(values, native=False)
    assert all(map(torch.equal, map(_bits, parts), map(_bits, fallbacks)))
    assert _bits(join(*parts, native=True)).equal(_bits(join(*parts, native=False)))


@pytest.mark.parametrize("simd", [None, *adam.simds()])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_grad_stats_counts_and_sums_the_same_everywhere(simd: str | None, dtype: torch.dtype) -> None:
    adam.set_simd(simd)
    generator = torch.Generator().manual_seed(3)
    for numel in (0, 1, 15, 16, 17, 4095, 4096, 4097, 100_003, 300_000):
        tensor = torch.randn(numel, generator=generator).to(dtype)
        bad = min(numel, 5)
        tensor[torch.randperm(numel, generator=generator)[:bad]] = torch.tensor(
            [float("nan"), float("inf"), -float("inf"), -float("nan"), float("inf")], dtype=dtype
        )[:bad]
        (stats,) = grad_stats([tensor], native=simd is not None)
        assert stats.nonfinite_count == bad
        assert stats.sum_of_squares == reference.grad_stats(tensor)[0]
        expected = tensor.double().nan_to_num(0, 0, 0).square().sum().item()
        assert stats.sum_of_squares == pytest.approx(expected, rel=1e-13)


def test_fma_rounds_once() -> None:
    generator = torch.Generator().manual_seed(4)
    a, b, c = (_values(20_000, generator) for _ in range(3))
    # Sums that nearly cancel, and ties that a second rounding would break the wrong way.
    c[:8_000] = -(a * b)[:8_000] * (1 + torch.randn(8_000, generator=generator) * 1e-7)
    a[-2:], b[-2:], c[-2:] = 1 + 2.0**-12, 1 - 2.0**-12, torch.tensor([2.0**-60, -(2.0**-60)])
    result = reference.fma(a, b, c)
    around = (torch.nextafter(result, torch.full_like(result, end)) for end in (-torch.inf, torch.inf))
    for x, y, z, got, *others in zip(*(each.tolist() for each in (a, b, c, result, *around)), strict=True):
        if not all(abs(value) < 1e18 for value in (x, y, z)):
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        assert all(abs(exact - Fraction(got)) <= abs(exact - Fraction(other)) for other in others)


def test_accumulate_adds_in_fp32() -> None:
    generator = torch.Generator().manual_seed(5)
    for dst_dtype, src_dtype, scale in itertools.product(_DTYPES, _DTYPES, (1.0, 0.5, 0.3)):
        dst, src = torch.randn(10_001, generator=generator).to(dst_dtype), torch.randn(10_001).to(src_dtype)
        expected = (dst.float() + src.float() * scale).to(dst_dtype)
        adam.accumulate(dst, src, scale)
        assert _same(dst, expected)


def _broken(change: Callable[[Piece], None]) -> Piece:
    piece = _piece(16, "split", torch.float32)
    change(piece)
    return piece


@pytest.mark.parametrize(("change", "words"), [
    (lambda p: setattr(p, "grad", p.grad[:15]), r"pieces\[1\].grad has 15 elements, expected 16"),
    (lambda p: setattr(p, "grad", p.grad.double()), "torch.float64, expected"),
    (lambda p: setattr(p, "exp_avg", torch.zeros(32)[::2]), "exp_avg is not contiguous"),
    (lambda p: setattr(p, "exp_avg_sq", p.exp_avg_sq.to("meta")), "exp_avg_sq is on meta"),
    (lambda p: setattr(p, "remainder", None), "needs a remainder or a master"),
    (lambda p: setattr(p, "master", torch.zeros(16)), "exclude each other"),
    (lambda p: setattr(p, "param", p.param.half()), "param is torch.float16, expected torch.bfloat16"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(
    change: Callable[[Piece], None], words: str
) -> None:
    good = _piece(16, "plain", torch.float32)
    before = good.param.clone()
    with pytest.raises(ValueError, match=words):
        adam_step([good, _broken(change)], step=1, grad_scale=1.0)
    assert good.param.equal(before)
    with pytest.raises(ValueError, match="counts from 1"):
        adam_step([good], step=0, grad_scale=1.0)


@native
def test_threads_start_late_and_are_given_back() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    adam.shutdown_threads()
    adam.set_threads(3)
    baseline = count()
    adam_step([_piece(100, "plain", torch.float32)], step=1, grad_scale=1.0, native=True)
    assert count() == baseline
    large = _piece(200_000, "plain", torch.float32)
    baseline = count()
    adam_step([large], step=1, grad_scale=1.0, native=True)
    assert count() == baseline + 2
    adam.shutdown_threads()
    assert count() == baseline


@native
def test_a_forked_child_steps_too() -> None:
    adam.set_threads(2)
    piece, fallback = _piece(100_000, "plain", torch.float32), _piece(100_000, "plain", torch.float32)
    adam_step([piece], step=1, grad_scale=1.0, native=True)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Only our own threads: torch's do not survive a fork.
        adam_step([fallback], step=1, grad_scale=1.0, native=True)
        os.write(write_end, fallback.param.numpy().tobytes()[:1024])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == piece.param.numpy().tobytes()[:1024]
    assert os.waitpid(child, 0)[1] == 0


@native
def test_calls_from_several_threads_are_served_in_turn() -> None:
    adam.set_threads(2)
    pieces = [_piece(70_000, "split", torch.bfloat16, seed=seed) for seed in range(4)]
    expected = [_piece(70_000, "split", torch.bfloat16, seed=seed) for seed in range(4)]
    adam_step(expected, step=1, grad_scale=1.0, native=True)
    callers = [threading.Thread(target=adam_step, args=([p],), kwargs={"step": 1, "grad_scale": 1.0}) for p in pieces]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for piece, other in zip(pieces, expected, strict=True):
        assert all(map(_same, _state(piece), _state(other)))


def test_what_is_in_use_is_reported() -> None:
    assert adam.simd() in ("reference", *adam.simds())
    with pytest.raises(ValueError, match="does not run here"):
        adam.set_simd("altivec")
    with pytest.raises(ValueError, match="at least 1 thread"):
        adam.set_threads(0)
    if not adam.simds():
        with pytest.raises(ExtensionError):
            adam_step([], step=1, grad_scale=1.0, native=True)
