"""Claim: the optimizer step on CPU runs at memory bandwidth, and beats torch's fused AdamW and DeepSpeedCPUAdam.

    python benchmarks/adam.py [--numel 50000000] [--rounds 9] [--threads N] [--deepspeed-python PATH]
    python benchmarks/adam.py --omp     what OMP_NUM_THREADS=1 in the environment costs
    python benchmarks/adam.py --busy    what a busy neighbour on one of the cores costs

Alternates the contenders in one run and prints medians. `loop` is a plain C loop (-O3 -march=native, as many threads)
over the very arrays that the step below it works on: the same number and kinds of streams, next to no arithmetic.
`step` is the update alone; `whole` adds what a training step needs around it: norm, unscale, clip, non-finite check and
the write-back of 16-bit parameters. The rivals do the same with their own best public means; DeepSpeed in a process of
its own, whose Python is given by --deepspeed-python. All work on the same pages in turn, some 20 bytes a parameter: on
some machines the pages that an array happens to have make more difference than who steps it.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from support.arrays import Arrays
from torch import Tensor

from infinity.ops import adam
from infinity.ops.adam import adam_step, grad_stats, split
from infinity.ops.rules import AdamHyper, Piece

_LOOPS = r"""
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>
template <class Part> static void on_threads(size_t numel, int threads, Part part) {
    std::vector<std::thread> team;
    for (int t = 1; t < threads; ++t) team.emplace_back(part, numel * t / threads, numel * (t + 1) / threads);
    part(0, numel / threads);
    for (auto& thread : team) thread.join();
}
static void fp32_part(float* __restrict p, float* __restrict m, float* __restrict v, const float* __restrict g,
                      float none, size_t numel) {
    for (size_t i = 0; i < numel; ++i) { p[i] += none * g[i]; m[i] += none * g[i]; v[i] += none * g[i]; }
}
extern "C" void fp32(float* p, float* m, float* v, const float* g, float none, size_t numel, int threads) {
    on_threads(numel, threads, [=](size_t i, size_t end) { fp32_part(p + i, m + i, v + i, g + i, none, end - i); });
}
static void split_part(uint16_t* __restrict p, uint16_t* __restrict r, float* __restrict m, float* __restrict v,
                       const uint16_t* __restrict g, float none, uint16_t mask, size_t numel) {
    for (size_t i = 0; i < numel; ++i) { p[i] ^= g[i] & mask; r[i] ^= g[i] & mask; m[i] += none; v[i] += none; }
}
extern "C" void split(uint16_t* p, uint16_t* r, float* m, float* v, const uint16_t* g, float none, size_t numel,
                      int threads) {
    on_threads(numel, threads, [=](size_t i, size_t end) {
        split_part(p + i, r + i, m + i, v + i, g + i, none, none != 0, end - i);
    });
}
extern "C" uint32_t read(const uint32_t* g, size_t words, int threads) {
    std::atomic<uint32_t> total{0};
    on_threads(words, threads, [g, &total](size_t i, size_t end) {
        uint32_t sum = 0;
        for (; i < end; ++i) sum += g[i];
        total += sum;
    });
    return total;
}
"""
# Runs in the environment of the rival: answers each line of its input, a contender's name, with the seconds of one run.
_DEEPSPEED = r"""
import sys, time, torch
sys.stdout, answers = sys.stderr, sys.stdout
from deepspeed.ops.adam import DeepSpeedCPUAdam
kind, numel, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, sys.argv[5])
from support.arrays import Arrays
torch.set_num_threads(threads)
arrays = Arrays(numel, descriptor=int(sys.argv[4]))
param = torch.nn.Parameter(arrays.weight)
param.grad = arrays.grad
low_grad, low_param = (arrays.low_grad, arrays.low_param) if kind == "split" else (None, None)
optimizer = DeepSpeedCPUAdam([param], lr=1e-3, weight_decay=0.01, adamw_mode=True)
optimizer.state[param] = {"step": 0, "exp_avg": arrays.exp_avg, "exp_avg_sq": arrays.exp_avg_sq}
def step():
    optimizer.step()
    if low_param is not None: low_param.copy_(param.detach())
def whole():
    if low_grad is not None: param.grad.copy_(low_grad)
    norm = torch.linalg.vector_norm(param.grad).item()
    if norm != norm or norm in (float("inf"), -float("inf")): return
    param.grad.mul_(1.0 if norm < 1e9 else 1e9 / norm)
    step()
runs = {"step": step, "whole": whole}
for line in sys.stdin:
    started = time.perf_counter()
    runs[line.strip()]()
    print(time.perf_counter() - started, file=answers, flush=True)
"""
_HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, adamw=True)
_CLIP = 1e9
_PAUSE_SECONDS = 0.05
# name -> (bytes moved a parameter, or 0 where that is the rival's affair; one timed run in seconds)
Contenders = dict[str, tuple[int, Callable[[], float]]]


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return timed


def _pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def _compile_loops() -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise SystemExit("the plain loops need g++ or clang++")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loops.cpp", Path(folder) / "loops.so"
        source.write_text(_LOOPS)
        flags = "-O3 -march=native -shared -fPIC -pthread".split()
        subprocess.run([compiler, *flags, source, "-o", library], check=True)
        return ctypes.CDLL(str(library))


def _whole(pieces: list[Piece], grad: Tensor) -> None:
    (stats,) = grad_stats([grad])
    norm = math.sqrt(stats.sum_of_squares)
    if stats.nonfinite_count == 0:
        adam_step(pieces, step=10, grad_scale=min(1.0, _CLIP / norm))


def _ours(kind: str, arrays: Arrays, threads: int, loops: ctypes.CDLL) -> Contenders:
    """The plain loops and infinity."""
    numel, weight, grad, remainder = arrays.numel, arrays.weight, arrays.grad, None
    exp_avg, exp_avg_sq = arrays.exp_avg, arrays.exp_avg_sq
    count, team, none = ctypes.c_size_t(numel), ctypes.c_int(threads), ctypes.c_float(0.0)
    if kind == "split":
        weight, remainder, grad = arrays.low_param, arrays.remainder, arrays.low_grad
        nbytes, grad_nbytes = 26, 2
        streams = _pointers(weight, remainder, exp_avg, exp_avg_sq, grad)
    else:
        nbytes, grad_nbytes = 28, 4
        streams = _pointers(weight, exp_avg, exp_avg_sq, grad)
    loop = loops.split if kind == "split" else loops.fp32

    def pieces(count: int) -> list[Piece]:
        cuts = [tensor.chunk(count) for tensor in (weight, grad, exp_avg, exp_avg_sq)]
        rests = remainder.chunk(count) if remainder is not None else [None] * count
        return [Piece(*cut, remainder=rest, hyper=_HYPER) for *cut, rest in zip(*cuts, rests, strict=True)]

    one, many = pieces(1), pieces(500)
    words = ctypes.c_size_t(numel * grad_nbytes // 4)
    return {
        "loop": (nbytes, _timed(lambda: loop(*streams, none, count, team))),
        "infinity step": (nbytes, _timed(lambda: adam_step(one, step=10, grad_scale=1.0))),
        "infinity step, 500 pieces": (nbytes, _timed(lambda: adam_step(many, step=10, grad_scale=1.0))),
        "infinity whole": (nbytes + grad_nbytes, _timed(lambda: _whole(one, grad))),
        "loop that reads gradients": (grad_nbytes, _timed(lambda: loops.read(*_pointers(grad), words, team))),
        "infinity norm": (grad_nbytes, _timed(lambda: grad_stats([grad]))),
    }


def _torch(kind: str, arrays: Arrays) -> Contenders:
    param = torch.nn.Parameter(arrays.weight)
    param.grad = arrays.grad
    low_grad, low_param = (arrays.low_grad, arrays.low_param) if kind == "split" else (None, None)
    optimizer = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.01, fused=True)
    optimizer.state[param] = {
        "step": torch.tensor(9.0), "exp_avg": arrays.exp_avg, "exp_avg_sq": arrays.exp_avg_sq
    }  # fmt: skip

    def step() -> None:
        optimizer.step()
        if low_param is not None:
            low_param.copy_(param.detach())

    def whole() -> None:
        if low_grad is not None and param.grad is not None:
            param.grad.copy_(low_grad)
        # One multiplication clips and unscales; the norm tells of what is not finite.
        torch.nn.utils.clip_grad_norm_([param], _CLIP, foreach=True, error_if_nonfinite=True)
        step()

    return {"torch fused step": (0, _timed(step)), "torch fused whole": (0, _timed(whole))}


@contextmanager
def _served(command: list[str], *descriptors: int, **environment: str) -> Iterator[Callable[[str], float]]:
    """A process that answers each contender's name with the seconds of one run."""
    env = {**os.environ, **environment}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, pass_fds=descriptors
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None

        def ask(name: str) -> float:
            print(name, file=process.stdin, flush=True)
            return float(process.stdout.readline())

        try:
            yield ask
        finally:
            process.stdin.close()


def _serve(numel: int) -> None:
    """The other side of `_served`: infinity's fp32 step."""
    tensors = [torch.randn(numel), torch.randn(numel), torch.zeros(numel), torch.zeros(numel)]
    run = _timed(lambda: adam_step([Piece(*tensors, hyper=_HYPER)], step=10, grad_scale=1.0))
    for _ in sys.stdin:
        print(run(), flush=True)


def _alternate(contenders: Contenders, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(rounds + 2):
        for name, (_, run) in contenders.items():
            # Threads of the contender before spin for some milliseconds.
            time.sleep(_PAUSE_SECONDS)
            elapsed = run()
            # The first rounds touch memory and start threads.
            if repeat >= 2:
                seconds[name].append(elapsed)
    return seconds


def _compare(kind: str, options: argparse.Namespace, loops: ctypes.CDLL) -> None:
    numel, threads = options.numel, options.threads
    with ExitStack() as stack:
        arrays = Arrays(numel)
        arrays.fill()
        contenders = _ours(kind, arrays, threads, loops) | _torch(kind, arrays)
        if options.deepspeed_python:
            numbers, support = [str(numel), str(threads), str(arrays.descriptor)], str(Path(__file__).parent)
            command = [options.deepspeed_python, "-c", _DEEPSPEED, kind, *numbers, support]
            ask = stack.enter_context(_served(command, arrays.descriptor))
            contenders |= {f"DeepSpeedCPUAdam {work}": (0, lambda work=work: ask(work)) for work in ("step", "whole")}
        seconds = _alternate(contenders, options.rounds)
    titles = {"fp32": "fp32 weights and gradients", "split": "bf16 split master, bf16 gradients"}
    print(f"{titles[kind]}: {numel} parameters, {threads} threads, {options.rounds} rounds")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        nbytes, loop = contenders[name][0], medians["loop"]
        line = f"  {name:26s} {median / numel * 1e9:6.3f} ns a parameter, best {min(seconds[name]) / numel * 1e9:6.3f}"
        if nbytes:
            rate, limit = nbytes / median, contenders["loop"][0] / loop
            line += f" {rate * numel / 1e9:6.1f} GB/s, {rate / limit:5.2f} of the loop"
        print(line)
    print(f"  a piece costs a call {_piece_seconds(kind) * 1e6:.2f} us")
    print(f"  infinity norm / loop that reads: {medians['loop that reads gradients'] / medians['infinity norm']:.2f}")
    for rival in ("torch fused", "DeepSpeedCPUAdam"):
        if f"{rival} whole" in medians:
            ratios = [medians[f"{rival} {work}"] / medians[f"infinity {work}"] for work in ("step", "whole")]
            print(f"  {rival} / infinity: step {ratios[0]:.2f}, whole {ratios[1]:.2f}")


def _piece_seconds(kind: str, count: int = 500) -> float:
    """What one more piece costs a call: pieces too small to be anything but overhead."""
    pieces = []
    for _ in range(count):
        weight, remainder = torch.randn(32), None
        if kind == "split":
            weight, remainder = split(weight)
        pieces.append(
            Piece(weight, torch.randn(32), torch.zeros(32), torch.zeros(32), remainder=remainder, hyper=_HYPER)
        )
    run = _timed(lambda: adam_step(pieces, step=10, grad_scale=1.0))
    return statistics.median(run() for _ in range(100)) / count


def _omp(options: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--serve", "--numel", str(options.numel)]
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    os.environ.clear()
    os.environ.update(free)
    with _served(command) as without, _served(command, OMP_NUM_THREADS="1") as one:
        runs = {"not set": (28, lambda: without("")), "OMP_NUM_THREADS=1": (28, lambda: one(""))}
        seconds = _alternate(runs, options.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"  {name:26s} {median / options.numel * 1e9:6.3f} ns a parameter")
    print(f"  OMP_NUM_THREADS=1 / not set: {medians['OMP_NUM_THREADS=1'] / medians['not set']:.3f}")


def _busy(options: argparse.Namespace) -> None:
    """A step beside a process that spins on the last core; the bound is what the remaining time on it gives."""
    tensors = [torch.randn(options.numel), torch.randn(options.numel)] + [torch.zeros(options.numel) for _ in range(2)]
    run = _timed(lambda: adam_step([Piece(*tensors, hyper=_HYPER)], step=10, grad_scale=1.0))
    core = max(os.sched_getaffinity(0))

    def beside() -> float:
        program = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
        spin = subprocess.Popen([sys.executable, "-c", program])
        try:
            time.sleep(0.3)
            return run()
        finally:
            spin.kill()
            spin.wait()

    seconds = _alternate({"alone": (28, run), "beside a busy process": (28, beside)}, options.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"  {name:26s} {median / options.numel * 1e9:6.3f} ns a parameter")
    print(f"  beside / alone: {medians['beside a busy process'] / medians['alone']:.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--deepspeed-python")
    parser.add_argument("--kind", choices=("fp32", "split"))
    for mode in ("--omp", "--busy", "--serve"):
        parser.add_argument(mode, action="store_true")
    options = parser.parse_args()
    if options.serve:
        return _serve(options.numel)
    torch.set_num_threads(options.threads)
    adam.set_threads(options.threads)
    print(f"{adam.simd()}, torch {torch.__version__}")
    if options.omp:
        return _omp(options)
    if options.busy:
        return _busy(options)
    loops = _compile_loops()
    for kind in (options.kind,) if options.kind else ("fp32", "split"):
        _compare(kind, options, loops)
    return None


if __name__ == "__main__":
    main()
