"""Claim: offloading costs no more than what cannot be hidden, and memory stays at the plan.

    python benchmarks/train.py [--ranks 1|2] [--dtype fp32|bf16] [--rounds 3] [--folder DIR]

Whole training steps of a Llama of 134 M parameters by configuration: stage 3 in memory, all on CPU, all on NVMe with
and without overlap. Prints tokens/s, peak memory against the plan, and for NVMe what a step is made of: compute (the
run in memory), I/O (bytes by the kernel's count over fio's rates on the same drive), their maximum and sum, the
measured step.

Activations are what torch itself needs beyond weights, gradients and moments, measured in a run that keeps its
gradients allocated. They are not in the plan, so peak - baseline - activations is compared to the planned bytes.
"""

from __future__ import annotations

from typing import Any

from support import compare
from support.machine import MIB, describe, fio_rates
from support.table import Table, claim

# Keeps gradients allocated, so that its peak less what it holds is activations alone.
YARDSTICK = "torch:held"
CONTENDERS = ["infinity:memory", "infinity:cpu", "infinity:nvme", "infinity:nvme-serial"]
OVERLAP_LIMIT = 1.15
EXCESS_LIMIT = 0.05

Rounds = list[list[dict[str, Any]]]


def main() -> None:
    """Measure and print."""
    given = compare.arguments(__doc__).parse_args()
    contenders = given.only.split(",") if given.only else CONTENDERS
    print(describe())
    with compare.task_options(given) as options:
        print(compare.headline(options, given))
        values = compare.alternate([YARDSTICK, *contenders], options, given)
        whole = given.model == "llama"
        rates = fio_rates(options["folder"], gib=2 if whole else 1 / 16, seconds=8 if whole else 1)
        yardstick = values.pop(YARDSTICK)
        _print_speed(values, options, given.ranks)
        _print_memory(values, yardstick)
    if "infinity:memory" in values and rates is not None:
        for name in ("infinity:nvme", "infinity:nvme-serial"):
            if name in values:
                _print_parts(name, values[name], compare.step_seconds(values["infinity:memory"]), rates)
    compare.check_losses({YARDSTICK: yardstick, **values}, 5e-2 if given.dtype == "bf16" else 1e-3)


def _print_speed(values: dict[str, Rounds], options: dict[str, Any], ranks: int) -> None:
    table = Table("tokens/s:.0f", "step s:.2f", "optimizer s:.2f", "read B/param:.2f", "written B/param:.2f")
    for name, rounds in values.items():
        moved = compare.moved_a_parameter(rounds, rounds[0][0]["numel"])
        speed = compare.tokens_a_second(rounds, options, ranks)
        table.row(name, speed, compare.step_seconds(rounds), compare.step_seconds(rounds, 1), *moved)


def _print_memory(values: dict[str, Rounds], yardstick: Rounds) -> None:
    """Peak of a rank against its plan. The largest gradient is in both the yardstick's peak and in our plan."""
    held, largest = yardstick[0][0]["held"], yardstick[0][0]["largest"]
    activations = compare.above_baseline(yardstick) - held - largest
    print(f"activations: {activations / MIB:.0f} MiB a rank (torch that keeps its gradients: peak less what it holds)")
    table = Table("peak above baseline:.0f", "planned in memory:.0f", "on NVMe:.0f", "beyond plan:.0f", "share:+.1%")
    for name, rounds in values.items():
        planned = {tier: sum(kinds.values()) for tier, kinds in rounds[0][0]["planned"].items()}
        resident = planned["gpu"] + planned["cpu"]
        peak = compare.above_baseline(rounds)
        beyond = peak - activations - resident
        verdict = "holds" if beyond <= EXCESS_LIMIT * resident else "NO"
        table.row(
            name, peak / MIB, resident / MIB, planned["nvme"] / MIB, beyond / MIB, beyond / resident,
            note=f"claim <= {EXCESS_LIMIT:.0%}: {verdict}",
        )  # fmt: skip


def _print_parts(name: str, rounds: Rounds, compute: float, rates: dict[str, float]) -> None:
    """Step time against compute and I/O; the unhideable part is what I/O takes beyond compute."""
    read, written = compare.moved_a_parameter(rounds, 1)
    terms = read / rates["read"], written / rates["write"]
    transfer, step = sum(terms), compare.step_seconds(rounds)
    longest = max(compute, transfer)
    beyond, unhideable = step - compute, longest - compute
    print(
        f"{name}: compute {compute:.2f} s; I/O {transfer:.2f} s ({terms[0]:.2f} read + {terms[1]:.2f} written at fio's "
        f"mixed {rates['read'] / 1e9:.2f} and {rates['write'] / 1e9:.2f} GB/s); max {longest:.2f}, "
        f"sum {compute + transfer:.2f}, measured {step:.2f}, which is {step / longest:.2f} of max"
    )
    claim(
        f"beyond compute {beyond:.2f} s <= {OVERLAP_LIMIT} x unhideable {unhideable:.2f} s (max - compute)",
        beyond <= OVERLAP_LIMIT * unhideable,
    )


if __name__ == "__main__":
    main()
