"""Claim: whole training steps are as fast as torch's own, and at least twice as fast as DeepSpeed's at half its memory.

    python benchmarks/peers.py [--ranks 1|2] [--dtype fp32|bf16] [--rounds 3] [--deepspeed-python PATH] [--only A,B]

A Llama of 134 M parameters, the same weights and data for all, AdamW, clipping at 1.0. Every contender and round is a
process (one a rank) of its own; rounds alternate; medians. The first one named is what ratios refer to. With bf16 the
reference is a bf16 model with fp32 master weights and moments (torch:plain), since that is the work that is done by the
others; torch:pure keeps everything in bf16 and is shown beside it.

DeepSpeed runs in an environment of its own: `--deepspeed-python` names its interpreter, with cpu_adam and async_io built.
"""

from __future__ import annotations

from typing import Any

from support import compare
from support.machine import describe

CONTENDERS = {
    1: ["torch:plain", "infinity:memory", "infinity:cpu", "infinity:nvme"],
    2: ["torch:ddp", "torch:fsdp2", "torch:fsdp2-offload", "infinity:memory", "infinity:cpu", "infinity:nvme"],
}
RIVALS = ["deepspeed:memory", "deepspeed:cpu", "deepspeed:nvme"]
# Ours, the other, what must hold: tokens a second at least, peak memory at most, as ratios. 0: no claim.
CLAIMS = [
    ("infinity:memory", "torch:plain", 0.95, 0.0), ("infinity:memory", "torch:ddp", 0.9, 0.0),
    ("infinity:memory", "torch:fsdp2", 1.0, 0.0), ("infinity:nvme", "deepspeed:nvme", 2.0, 0.5),
]  # fmt: skip
# Rounding differs by the order of sums; in bf16 a step's rounding shows in the third digit.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


def main() -> None:
    """Measure and print."""
    given = compare.arguments(__doc__).parse_args()
    contenders = CONTENDERS[given.ranks] + (RIVALS if given.deepspeed_python else [])
    if given.dtype == "bf16" and given.ranks == 1:
        contenders.insert(1, "torch:pure")
    if given.only:
        contenders = given.only.split(",")
    print(describe())
    with compare.task_options(given) as options:
        print(
            f"{options['model']}, {given.dtype}, {given.ranks} rank(s), {options['batch']} x {options['positions']} tokens a "
            f"rank and step, clipping 1.0, {given.rounds} rounds of {given.warmup} + {given.steps} steps"
        )
        values = compare.alternate(contenders, options, given)
        report(values, options, given.ranks)
    compare.check_losses(values, TOLERANCE[given.dtype])


def report(values: dict[str, list[list[dict[str, Any]]]], options: dict[str, Any], ranks: int) -> None:
    """A line a contender, then the claims whose two sides were measured."""
    speed = {name: compare.tokens_a_second(rounds, options, ranks) for name, rounds in values.items()}
    peak = {name: compare.peak_nbytes(rounds) for name, rounds in values.items()}
    reference = next(iter(values))
    head = f"{'':24s}{'tokens/s':>9s}{'ratio':>7s}{'step s':>8s}{'optim s':>8s}{'peak MiB':>9s}{'ratio':>7s}{'above base':>11s}"
    print(f"{head}   peak while built")
    for name, rounds in values.items():
        built = max(value["built_peak"] for value in rounds[0])
        print(
            f"{name:24s}{speed[name]:9.0f}{speed[name] / speed[reference]:7.2f}{compare.step_seconds(rounds):8.2f}"
            f"{compare.step_seconds(rounds, 1):8.2f}{compare.mib(peak[name]):>9s}{peak[name] / peak[reference]:7.2f}"
            f"{compare.mib(compare.above_baseline(rounds)):>11s}{compare.mib(built):>19s}"
        )
    for ours, other, least, most in CLAIMS:
        if ours in values and other in values:
            ratio, memory = speed[ours] / speed[other], peak[ours] / peak[other]
            print(f"{ours} / {other}: {ratio:.2f}x tokens/s (claim >= {least}: {'holds' if ratio >= least else 'NO'})", end="")
            verdict = f" (claim <= {most}: {'holds' if memory <= most else 'NO'})" if most else ""
            print(f", {memory:.2f}x peak memory{verdict}")


if __name__ == "__main__":
    main()
