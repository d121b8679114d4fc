"""Claim: the optimizer step on CPU runs at memory bandwidth, and is no slower than torch's fused AdamW.

    python benchmarks/adam.py [--numel 16000000] [--rounds 15] [--threads N]

Alternates the contenders in one run and prints the median time per parameter and the bandwidth, as a ratio to a plain
read-modify-write loop in C over the same bytes of fp32 AdamW (28 a parameter).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from infinity.ops import adam
from infinity.ops.adam import AdamHyper, Piece, adam_step, split

# Reads four arrays and writes three, as fp32 AdamW does, with next to no arithmetic.
_LOOP = r"""
#include <thread>
#include <vector>
#include <cstddef>
static void part(float* a, float* b, float* c, const float* g, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) { a[i] += g[i]; b[i] += g[i]; c[i] += g[i]; }
}
extern "C" void loop(float* a, float* b, float* c, const float* g, size_t numel, int threads) {
    std::vector<std::thread> team;
    for (int t = 1; t < threads; ++t)
        team.emplace_back(part, a, b, c, g, numel * t / threads, numel * (t + 1) / threads);
    part(a, b, c, g, 0, numel / threads);
    for (auto& thread : team) thread.join();
}
"""
_HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, adamw=True)


def _plain_loop(numel: int, threads: int) -> Callable[[], None]:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise SystemExit("the plain loop needs g++ or clang++")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loop.cpp", Path(folder) / "loop.so"
        source.write_text(_LOOP)
        flags = "-O3 -march=native -shared -fPIC -pthread".split()
        subprocess.run([compiler, *flags, source, "-o", library], check=True)
        loop = ctypes.CDLL(str(library)).loop
    arrays = [torch.zeros(numel) for _ in range(4)]
    pointers = [ctypes.c_void_p(array.data_ptr()) for array in arrays]

    # The default binds the arrays to the function.
    def run(_arrays: list[torch.Tensor] = arrays) -> None:
        loop(*pointers, ctypes.c_size_t(numel), ctypes.c_int(threads))

    return run


def _fused(numel: int) -> Callable[[], None]:
    param = torch.randn(numel).requires_grad_()
    param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.01, fused=True)
    return lambda: optimizer.step()


def _ours(numel: int, grad_dtype: torch.dtype, halved: bool, pieces: int = 1) -> Callable[[], None]:
    weight, remainder = torch.randn(numel), None
    if halved:
        weight, remainder = split(weight)
    tensors = weight, torch.randn(numel).to(grad_dtype), torch.zeros(numel), torch.zeros(numel)
    cuts = [tensor.chunk(pieces) for tensor in tensors]
    remainders = remainder.chunk(pieces) if remainder is not None else [None] * pieces
    group = [
        Piece(param, grad, exp_avg, exp_avg_sq, remainder=rest, hyper=_HYPER)
        for param, grad, exp_avg, exp_avg_sq, rest in zip(*cuts, remainders, strict=True)
    ]
    return lambda: adam_step(group, step=10, grad_scale=1.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=16_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    numel, threads = options.numel, options.threads
    torch.set_num_threads(threads)
    adam.set_threads(threads)
    weights = torch.randn(numel).bfloat16()
    contenders: dict[str, tuple[int, Callable[[], object]]] = {
        "plain C loop, 28 bytes a parameter": (28, _plain_loop(numel, threads)),
        "torch fused AdamW, fp32": (28, _fused(numel)),
        "infinity AdamW, fp32": (28, _ours(numel, torch.float32, halved=False)),
        "infinity AdamW, fp32, 500 pieces": (28, _ours(numel, torch.float32, halved=False, pieces=500)),
        "infinity AdamW, split bf16, bf16 grad": (26, _ours(numel, torch.bfloat16, halved=True)),
        "infinity grad_stats, bf16": (2, lambda: adam.grad_stats([weights])),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(options.rounds + 2):
        for name, (_, run) in contenders.items():
            started = time.perf_counter()
            run()
            # The first rounds touch memory and start threads.
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - started)
    print(f"{numel} parameters, {threads} threads, {adam.simd()}, torch {torch.__version__}, {options.rounds} rounds")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    loop_bandwidth = 28 * numel / next(iter(medians.values()))
    for name, median in medians.items():
        bandwidth = contenders[name][0] * numel / median
        print(
            f"{name:40s} {median / numel * 1e9:6.3f} ns a parameter  best {min(seconds[name]) / numel * 1e9:6.3f}"
            f"  {bandwidth / 1e9:6.1f} GB/s  {bandwidth / loop_bandwidth:5.2f} of the loop"
        )
    fused, ours = medians["torch fused AdamW, fp32"], medians["infinity AdamW, fp32"]
    print(f"torch fused / infinity, fp32: {fused / ours:.2f}")


if __name__ == "__main__":
    main()
