"""The kernels of a CUDA device, as far as a machine without one can show.

Their text is compiled for the CPU, where a grid is a loop (tests/native/grid_on_host.h), and must give the bits of the
code for the CPU; and it is compiled by nvcc, whose PTX must hold nothing that rounds otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import logging
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from infinity.errors import ExtensionError
from infinity.ops import adam, build, kernels, reference
from infinity.ops.codes import code_maps
from tests.support import accelerator
from tests.support.accelerator.process import AcceleratedProcess
from tests.support.cells import covered
from tests.support.clock import usual_seconds
from tests.support.pieces import DTYPES, HYPERS, STORAGES, make_piece, on_device, same, states, table_of, values

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc" / "kernels").glob("*.cu"))
CPU = torch.device("cpu")

needs_compiler = pytest.mark.skipif(build._compiler("adam") is None, reason="needs a C++ compiler")
needs_nvcc = pytest.mark.skipif(
    build._compiler("kernels") is None, reason="needs nvcc, the compiler of the CUDA toolkit"
)


@pytest.fixture(scope="module")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels' text as C++."""
    compiler = build._compiler("adam")
    assert compiler is not None
    path = tmp_path_factory.mktemp("host") / "libkernels.so"
    flags = "-std=c++17 -O0 -fPIC -shared -ffp-contract=off -fno-strict-aliasing -Wall -Wextra -Werror -x c++ -include"
    shim = ROOT / "tests" / "native" / "grid_on_host.h"
    command = [*shlex.split(compiler), *flags.split(), str(shim), *map(str, SOURCES), "-o", str(path)]
    subprocess.run(command, check=True, timeout=100)
    return ctypes.CDLL(str(path))


@pytest.fixture
def on_host(host_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the door take the CPU for a device."""
    host_library.infinity_kernels_error.restype = ctypes.c_char_p
    host_library.infinity_kernels_cast_workspace.restype = ctypes.c_uint64
    monkeypatch.setattr(kernels, "_handle", lambda: host_library)
    monkeypatch.setattr(kernels, "available", lambda device: True)

    @contextlib.contextmanager
    def place(device: torch.device) -> Iterator[tuple[int, int]]:
        yield 0, 0

    monkeypatch.setattr(kernels, "_place", place)


@needs_compiler
@pytest.mark.parametrize(*covered(rule=list(HYPERS), storage=STORAGES, grad_dtype=DTYPES))
def test_every_rule_has_the_bits_of_the_cpu(on_host: None, rule: str, storage: str, grad_dtype: torch.dtype) -> None:
    # Several tiles with a rest, aligned and not; less than a tile.
    hyper = HYPERS[rule]
    for numel, shift, bound in itertools.product((5003, 37), (0, 1, 3), (math.inf, 0.25)):
        ours, native, fallback = (make_piece(numel, storage, grad_dtype, hyper, shift) for _ in range(3))
        for step in (1, 2):
            left_out = int(kernels.adam_step(*table_of([ours], step, 0.37, bound), CPU))
            assert left_out == adam.adam_step([native], step=step, grad_scale=0.37, grad_bound=bound) > 0
            assert left_out == adam.adam_step([fallback], step=step, grad_scale=0.37, grad_bound=bound, native=False)
        assert all(map(same, states(ours), states(native))), (numel, shift, bound)
        assert all(map(same, states(ours), states(fallback))), (numel, shift, bound)


@needs_compiler
def test_any_number_of_pieces_is_stepped_by_one_call(on_host: None) -> None:
    # More than one launch takes of rules with two states, of rules with one and of states in 8 bits; some empty, of
    # every storage and gradient.
    sizes = [(index * 517) % 2600 if index % 5 else 0 for index in range(250)]
    kinds = list(HYPERS.values())
    ours, others = (
        [make_piece(n, STORAGES[i % 4], DTYPES[i % 3], kinds[(i + i // 12) % len(kinds)], i % 2)
         for i, n in enumerate(sizes)]
        for _ in range(2)
    )  # fmt: skip
    left_out = kernels.adam_step(*table_of(ours, 7, 0.5), CPU)
    assert int(left_out) == adam.adam_step(others, step=7, grad_scale=0.5)
    for our, other in zip(ours, others, strict=True):
        assert all(map(same, states(our), states(other)))
    assert int(kernels.adam_step(*table_of([], 1, 1.0), CPU)) == 0


@needs_compiler
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_what_surrounds_a_piece_is_not_touched(on_host: None, rule: str) -> None:
    for storage, shift, numel in itertools.product(STORAGES, (1, 4), (1, 1023, 1024, 1025)):
        whole = make_piece(numel + shift + 5, storage, torch.bfloat16, HYPERS[rule])
        before = [tensor.clone() for tensor in states(whole)]
        at = slice(shift, shift + numel)
        cut = {
            field.name: None if getattr(whole, field.name) is None else getattr(whole, field.name)[at]
            for field in dataclasses.fields(whole)[:-1]
        }
        kernels.adam_step(*table_of([dataclasses.replace(whole, **cut)], 3, 1.0), CPU)
        for now, old in zip(states(whole), before, strict=True):
            assert same(now[:shift], old[:shift]) and same(now[at.stop :], old[at.stop :])


@pytest.mark.parametrize("rule", HYPERS)
def test_the_kernels_step_every_rule_on_a_device(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The meta device stands for one that the kernels run on.
    seen: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(kernels, "available", lambda device: True)
    monkeypatch.setattr(kernels, "adam_step", lambda table, count, device: seen.append((count, device)))
    piece = on_device(make_piece(8, "plain", torch.float32, HYPERS[rule]), torch.device("meta"))
    adam.adam_step([piece, piece], step=1, grad_scale=1.0)
    assert seen == [(2, torch.device("meta"))]


@pytest.mark.parametrize("rule", HYPERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_fallback_of_a_step_does_not_wait_for_its_device(rule: str, storage: str) -> None:
    # A tensor of the meta device has no values, so whatever would wait for one raises.
    piece = on_device(make_piece(600, storage, torch.bfloat16, HYPERS[rule]), torch.device("meta"))
    left_out = adam.adam_step([piece, piece], step=1, grad_scale=1.0)
    assert isinstance(left_out, Tensor) and left_out.is_meta and left_out.dtype is torch.int64


def test_the_blocks_of_a_norm_do_not_wait_for_their_device() -> None:
    blocks = reference.block_sums(torch.empty(600_000, dtype=torch.bfloat16, device="meta"))
    assert blocks.is_meta and blocks.shape == (1 + 147,)


def stops_of(run: Callable[[], object]) -> int:
    """Return how often the host waits for the simulated accelerator in `run`."""
    begin = len(accelerator.log())
    run()
    return sum(operation.kind == "host wait" for operation in accelerator.log()[begin:])


def check_steps_on_an_accelerator() -> None:
    device = torch.device("simulated", 0)
    # The maps of codes come to a device once.
    code_maps(device)
    for hyper in HYPERS.values():
        pieces = [make_piece(3000, storage, dtype, hyper) for storage in STORAGES for dtype in DTYPES]
        above = [on_device(piece, device) for piece in pieces]
        counts: list[int | Tensor] = []
        assert (
            stops_of(lambda above=above, counts=counts: counts.append(adam.adam_step(above, step=1, grad_scale=0.5)))
            == 0
        )
        assert int(counts[0]) == adam.adam_step(pieces, step=1, grad_scale=0.5) > 0
        for piece, other in zip(pieces, above, strict=True):
            assert all(map(same, [state.cpu() for state in states(other)], states(piece)))
    assert not accelerator.races()


def check_norms_on_an_accelerator() -> None:
    generator = torch.Generator().manual_seed(5)
    below = [values(numel, generator).to(DTYPES[numel % 3]) for numel in (0, 5, 4097, 300_000)]
    above = [each.to("simulated") for each in below]
    found: list[list[adam.GradStats]] = []
    assert stops_of(lambda: found.append(adam.grad_stats(above))) == 1
    assert found == [adam.grad_stats(below)]
    # The numbers go back up.
    stats: list[kernels.DeviceStats] = []
    assert stops_of(lambda: stats.append(kernels.grad_stats(above))) == 2
    assert list(zip(*map(Tensor.tolist, stats[0]), strict=True)) == [tuple(each) for each in found[0]]
    assert not accelerator.races()


def test_every_rule_steps_on_an_accelerator_without_kernels_and_the_host_does_not_wait(
    process: AcceleratedProcess,
) -> None:
    process.run(check_steps_on_an_accelerator)


def test_a_norm_on_an_accelerator_without_kernels_waits_once_for_all_tensors(process: AcceleratedProcess) -> None:
    process.run(check_norms_on_an_accelerator)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_has_the_bits_of_the_cpu(on_host: None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    # Below and above a block, a tile and the 32 blocks that are added at a time; off alignment; more than one launch.
    sizes = [0, 1, 15, 16, 17, 4095, 4096, 4097, 70_001, 150_000, *range(100, 170)]
    tensors = [values(numel + index % 3, generator).to(dtype)[index % 3 :] for index, numel in enumerate(sizes)]
    stats = kernels.grad_stats(tensors)
    expected = adam.grad_stats(tensors)
    assert stats.sum_of_squares.tolist() == [each.sum_of_squares for each in expected]
    assert stats.nonfinite_count.tolist() == [each.nonfinite_count for each in expected]
    assert max(stats.nonfinite_count.tolist()) >= 3


@needs_compiler
@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("target_dtype", DTYPES)
def test_a_cast_is_torchs_and_carries_its_norm(
    on_host: None, source_dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    sources = [values(numel, generator).to(source_dtype) for numel in (0, 5, 4096, 9001)]
    for scale, shift in itertools.product((1.0, 0.3), (0, 1)):
        targets = [torch.full((each.numel() + shift + 1,), 7.0, dtype=target_dtype) for each in sources]
        views = [target[shift:-1] for target in targets]
        stats = kernels.cast_stats(sources, views, scale)
        expected = [(each.float() * ctypes.c_float(scale).value).to(target_dtype) for each in sources]
        assert all(map(same, views, expected)), (scale, shift)
        assert all(bool((target[:shift] == 7).all()) and target[-1] == 7 for target in targets)
        assert list(zip(*map(Tensor.tolist, stats), strict=True)) == [tuple(s) for s in adam.grad_stats(expected)]


@needs_compiler
def test_a_cast_may_be_done_in_place(on_host: None) -> None:
    source = values(10_000, torch.Generator().manual_seed(3))
    expected = source * ctypes.c_float(0.7).value
    stats = kernels.cast_stats([source], [source], 0.7)
    assert same(source, expected)
    assert float(stats.sum_of_squares) == adam.grad_stats([expected])[0].sum_of_squares


def test_the_fallback_of_a_cast_gives_the_same() -> None:
    # On the CPU the door itself takes the fallback.
    source = values(5000, torch.Generator().manual_seed(4))
    target = torch.empty(5000, dtype=torch.bfloat16)
    stats = kernels.cast_stats([source, source], [target, source.clone()], 0.5)
    assert same(target, (source * 0.5).bfloat16())
    expected = adam.grad_stats([target, source * 0.5])
    assert list(zip(*map(Tensor.tolist, stats), strict=True)) == [tuple(each) for each in expected]
    assert kernels.grad_stats([]).sum_of_squares.numel() == 0
    assert kernels.kernels_report(CPU) == "Python fallback: cpu is no CUDA device"


def test_tensors_that_do_not_fit_are_refused() -> None:
    vector = torch.zeros(8)
    with pytest.raises(ValueError, match=r"targets\[0\] has 7 elements, its source 8"):
        kernels.cast_stats([vector], [torch.zeros(7)])
    with pytest.raises(ValueError, match=r"sources\[1\] is torch.int32"):
        kernels.grad_stats([vector, vector.int()])
    with pytest.raises(ValueError, match=r"sources\[0\] is not contiguous"):
        kernels.grad_stats([vector[::2]])
    with pytest.raises(ValueError, match=r"targets\[0\] is on meta"):
        kernels.cast_stats([vector], [vector.to("meta")])


@pytest.fixture(scope="module")
def ptx() -> list[str]:
    """What the flags of the build make of each source."""
    compiler = build._compiler("kernels")
    assert compiler is not None
    words = list(build._NVCC_FLAGS)
    while "-gencode" in words:
        at = words.index("-gencode")
        del words[at : at + 2]
    command = [*shlex.split(compiler), *words, "-arch=compute_80", "-ptx", "-o", "/dev/stdout"]
    return [
        subprocess.run([*command, str(file)], check=True, capture_output=True, text=True, timeout=200).stdout
        for file in SOURCES
    ]


# An instruction that rounds says so; what carries a type and is none of these does not round.
_ROUNDS = re.compile(
    r"^\s*(?:@%p\d+ )?((?:add|sub|mul|fma|mad|div|sqrt|rcp|rsqrt|ex2|cvt)\.[\w.]*f(?:16|32|64)[\w.]*)", re.M
)
_ROUNDED = re.compile(r"(?:add|sub|mul|fma|div|sqrt)\.rn\.f(?:32|64)|cvt\.rn\.f16\.f32")
# From a narrow type to a wide one, exactly; and what cuts off the part behind the point, as on the CPU.
_EXACT = ("cvt.f32.f16", "cvt.f64.f32", "cvt.rzi.u32.f32")


@needs_nvcc
def test_nothing_in_the_ptx_rounds_otherwise(ptx: list[str]) -> None:
    found = {word for text in ptx for word in _ROUNDS.findall(text)}
    assert {word for word in found if not _ROUNDED.fullmatch(word)} <= set(_EXACT)
    assert {"fma.rn.f32", "div.rn.f32", "sqrt.rn.f32", "mul.rn.f32", "sub.rn.f32", "add.rn.f64"} <= found
    for text in ptx:
        assert not re.search(r"\.approx|\.ftz|\.sat\b", text)


@needs_nvcc
def test_memory_moves_by_whole_vectors(ptx: list[str]) -> None:
    adam_text = ptx[[file.stem for file in SOURCES].index("adam")]
    # Of every variant (storage, gradient, form): the states, at the least, come and go by 128 bits.
    assert len(re.findall(r"ld\.global\.v4\.[fu]32", adam_text)) >= (2 + 2 + 1) * 12
    assert len(re.findall(r"st\.global\.v4\.[fu]32", adam_text)) >= (2 + 2 + 1) * 12
    # No thread keeps an array outside registers.
    assert not any(re.search(r"\.local\b", text) for text in ptx)


@pytest.mark.matrix
@needs_nvcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device: tests/test_gpu.py shows more")
def test_nvcc_builds_a_library_that_says_why_it_cannot_run_here(tmp_path: Path) -> None:
    sources = build._sources_beside("kernels")
    compiler = build._compiler("kernels")
    assert sources is not None and compiler is not None
    library = tmp_path / "libkernels.so"
    with usual_seconds(children=True) as taken:
        build._compile("kernels", sources, library, compiler)
    # Seconds of a core, of which nvcc alone takes 16 to 28, by the processor and by what else keeps it busy.
    assert taken.seconds < 40
    image = library.read_bytes()
    assert all(f"sm_{family}".encode() in image for family in (75, 80, 90))
    # In a process of its own: should a call crash, this one goes on.
    script = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.infinity_kernels_error.restype = ctypes.c_char_p
codes = [
    library.infinity_kernels_runs_on(0),
    library.infinity_kernels_adam_step(0, None, None, ctypes.c_uint64(0), None),
    library.infinity_kernels_cast(0, None, None, ctypes.c_uint64(0), None, None, None),
]
assert all(codes), codes
assert library.infinity_kernels_runtime_version() >= 12000 and library.infinity_kernels_driver_version() >= 0
print({library.infinity_kernels_error(code).decode() for code in codes})
"""
    reply = subprocess.run(
        [sys.executable, "-c", script, str(library)], capture_output=True, text=True, timeout=60, check=False
    )
    assert reply.returncode == 0, reply.stderr
    assert "CUDA driver" in reply.stdout or "no CUDA-capable device" in reply.stdout


def test_a_device_without_a_library_has_the_fallback_and_one_warning(monkeypatch, caplog) -> None:
    def refuse(name: str, sources: Path) -> Path:
        raise ExtensionError("no nvcc: install the CUDA toolkit, or name nvcc in NVCC")

    monkeypatch.setattr(build, "_cached", refuse)
    monkeypatch.setattr(logging.getLogger("infinity"), "propagate", True)
    for cached in (build._library, build._warn_once, kernels._reason):
        cached.cache_clear()
    with caplog.at_level(logging.WARNING, logger="infinity"):
        device = torch.device("cuda", 0)
        assert not kernels.available(device) and not kernels.available(device)
        assert kernels.kernels_report(device).startswith("Python fallback: ")
    (record,) = caplog.records
    assert "no nvcc" in record.getMessage() and "the same results" in record.getMessage()
    for cached in (build._library, build._warn_once, kernels._reason):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("code", "driver", "told"),
    [
        (35, 12040, "built with CUDA 13.2, and the driver runs CUDA 12.4 at most: update the driver, or build them with"
                    " an older toolkit, whose nvcc NVCC names or CUDA_HOME contains"),
        (222, 13000, "built with CUDA 13.2, and the driver runs CUDA 13.0 at most"),
        (35, 0, "No driver is installed"),
        (209, 13020, "compute capability 7.5 and later"),
    ],
)  # fmt: skip
def test_kernels_that_a_device_refuses_say_what_to_do(
    code: int, driver: int, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = SimpleNamespace(
        infinity_kernels_runs_on=lambda index: code,
        infinity_kernels_error=lambda code: b"the words of the driver",
        infinity_kernels_driver_version=lambda: driver,
        infinity_kernels_runtime_version=lambda: 13020,
    )
    monkeypatch.setattr(build, "load", lambda name: library)
    monkeypatch.setattr(kernels, "_handle", lambda: library)
    monkeypatch.setattr(logging.getLogger("infinity"), "propagate", True)
    kernels._reason.cache_clear()
    with caplog.at_level(logging.WARNING, logger="infinity"):
        assert not kernels.available(torch.device("cuda", 0))
    kernels._reason.cache_clear()
    (record,) = caplog.records
    assert told in record.getMessage() and f"the words of the driver (CUDA error {code})" in record.getMessage()
