"""Claim: offloading costs no more than what cannot be hidden, and memory stays at the plan.

    python benchmarks/train.py [--ranks 1|2] [--dtype fp32|bf16] [--rounds 3] [--folder DIR]

Whole training steps of a Llama of 134 M parameters by configuration: stage 3 in memory, all on CPU, all on NVMe with
and without overlap. Prints tokens/s, peak memory against the plan, and for NVMe what a step is made of: compute (the
run in CPU memory, which gathers as the one on NVMe does), I/O (bytes by the kernel's count over what fio moves both
ways at once on the same drive), their maximum and sum, the measured step. Where the norm, or a check of all gradients,
is needed first, the optimizer step begins when backward is over: then nothing hides what backward and, behind it, the
step's transfers take beyond the computation. And bytes that move beside a computation slow it down, whoever moves them:
the run in memory is measured once more beside fio, and what a byte costs it there is unhideable, too.

Activations are what torch itself needs beyond weights, gradients and moments, measured in a run that keeps its
gradients allocated. They are not in the plan, so peak - baseline - activations is compared to the planned bytes.
"""

from __future__ import annotations

from typing import Any

from support import compare
from support.machine import MIB, describe, fio_rates, has_fio, median
from support.table import Table, claim

# Keeps gradients allocated, so that its peak less what it holds is activations alone.
YARDSTICK = "torch:held"
CONTENDERS = ["infinity:memory", "infinity:cpu", "infinity:nvme", "infinity:nvme-serial"]
# It gathers and steps as the run on NVMe does.
COMPUTATION = "infinity:cpu"
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
        # A drive's rate drifts: before, and after.
        before = _drive_rate(options)
        beside = [COMPUTATION + compare.BESIDE_FIO] if has_fio() and COMPUTATION in contenders else []
        values = compare.alternate([YARDSTICK, *contenders, *beside], options, given)
        after = _drive_rate(options)
        yardstick = values.pop(YARDSTICK)
        slowed = values.pop(COMPUTATION + compare.BESIDE_FIO, None)
        _print_speed(values, options, given.ranks)
        _print_memory(values, yardstick)
    in_memory = values.get(COMPUTATION) or values.get("infinity:memory")
    if in_memory is not None and before is not None and after is not None:
        # Nothing has to be known about all gradients: the step begins inside backward.
        chained = not given.unclipped
        for name in ("infinity:nvme", "infinity:nvme-serial"):
            if name in values:
                _print_parts(name, values[name], in_memory, slowed, (before, after), chained=chained)
    # Of several ranks the yardstick trains each on its own data.
    same = values if given.ranks > 1 else {YARDSTICK: yardstick, **values}
    compare.check_losses(same, 5e-2 if given.dtype == "bf16" else 1e-3)


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


def _drive_rate(options: dict[str, Any]) -> float | None:
    """Bytes a second, read and written together in fio's mixed pattern; None without fio."""
    gib = compare.fio_gib(options)
    rates = fio_rates(options["folder"], gib=gib, seconds=max(1, round(4 * gib)))
    return None if rates is None else sum(rates.values())


def _print_parts(
    name: str, rounds: Rounds, in_memory: Rounds, slowed: Rounds | None, rates: tuple[float, float], *, chained: bool
) -> None:
    """Step time against computation and I/O, against what has to come one after the other (`chained`), and against
    computation `slowed` by fio beside it. `rates`: the drive's before and after, in bytes a second.
    """
    rate = sum(rates) / 2
    compute, step = compare.step_seconds(in_memory), compare.step_seconds(rounds)
    nbytes = sum(compare.moved_a_parameter(rounds, 1))
    transfer = nbytes / rate
    longest = max(compute, transfer)
    print(
        f"{name}: compute {compute:.2f} s; I/O {transfer:.2f} s at fio's {rate / 1e9:.2f} GB/s "
        f"(before {rates[0] / 1e9:.2f}, after {rates[1] / 1e9:.2f}); "
        f"max {longest:.2f}, sum {compute + transfer:.2f}, measured {step:.2f}, which is {step / longest:.2f} of max"
    )
    _claim_hidden(step - compute, longest - compute, "max - compute")
    if chained:
        backward = compare.backward_seconds(in_memory)
        behind = median(sum(value["step_nbytes"] for value in ranks) for ranks in rounds) / rate
        print(f"  backward {backward:.2f} s, then the step's transfers {behind:.2f} s: {backward + behind:.2f} s")
        longest = max(longest, backward + behind)
        _claim_hidden(step - compute, longest - compute, "that - compute")
    if slowed is not None:
        beside, traffic = compare.step_seconds(slowed), median(ranks[0]["fio_rate"] for ranks in slowed)
        cost = max(0.0, beside - compute) / (beside * traffic)
        print(
            f"  computation beside fio {beside:.2f} s at {traffic / 1e9:.2f} GB/s: {cost * 1e9:.3f} s a GB, "
            f"{cost * nbytes:.2f} s for {nbytes / 1e9:.2f} GB"
        )
        longest = max(longest, compute + cost * nbytes)
        _claim_hidden(step - compute, longest - compute, "with that - compute")


def _claim_hidden(beyond: float, unhideable: float, what: str) -> None:
    claim(
        f"beyond compute {beyond:.2f} s <= {OVERLAP_LIMIT} x unhideable {unhideable:.2f} s ({what})",
        beyond <= OVERLAP_LIMIT * unhideable,
    )


if __name__ == "__main__":
    main()
