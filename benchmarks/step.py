"""Claim: an optimizer step from NVMe takes what the drive needs to move its bytes, and moves no more than it must.

    python benchmarks/step.py [--numel 50000000] [--dtype bf16] [--folder DIR] [--deepspeed-python PATH]

The model is made of weights whose forward and backward cost next to nothing. Two measurements in one process by tier:
the step alone (everything in flight is waited for before and after it), and whole training steps running freely. Bytes
are the kernel's (/proc/self/io), rates are fio's mixed pattern on the same drive between the contenders of the same
run: 1 MiB, depth 32, half reads. In that pattern reads and writes run at once, so two bounds are printed:

    sum     bytes read / read rate + bytes written / write rate: the claim, step <= 1.10 x this
    max     the longer of the two terms: what a drive that serves both directions at once would allow

500 M parameters are what the claim is about: --numel 500000000 needs about 8 GB of memory and 8 GB on the drive.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from support import compare
from support.machine import describe, fio_rates, median
from support.models import BLOCK_NUMEL
from support.table import Table, claim

CONTENDERS = ["infinity:memory", "infinity:cpu", "infinity:states", "infinity:nvme"]
RIVALS = ["deepspeed:states", "deepspeed:nvme"]
STEP_LIMIT, RIVAL_LIMIT = 1.10, 1.5
# Bytes a parameter: of the step alone read, and written; of a whole training step in all.
STEP_BYTES_LIMIT = 12.2
WHOLE_BYTES_LIMIT = {"infinity:nvme": 26.5, "infinity:states": 22.5}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=3 * BLOCK_NUMEL)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--only", help="contenders, comma-separated, instead of all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--fio-gib", type=float, default=2)
    parser.add_argument("--deepspeed-python", help="Python of an environment with deepspeed and its built operators")
    given = parser.parse_args()
    given.ranks = 1
    contenders = given.only.split(",") if given.only else CONTENDERS + (RIVALS if given.deepspeed_python else [])
    print(describe())
    values: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in contenders}
    rates: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        options = {
            "dtype": given.dtype, "model": "blocks", "numel": given.numel, "batch": 1, "positions": 1, "folder": folder,
            "warmup": given.warmup, "steps": given.steps, "settle": True, "zero": {"sub_group_size": BLOCK_NUMEL},
        }  # fmt: skip
        for _ in range(given.rounds):
            for name in contenders:
                values[name].append(compare.measure(name, options, given))
                rate = fio_rates(folder, gib=given.fio_gib, seconds=max(1, round(4 * given.fio_gib)))
                rates += [rate] if rate is not None else []
    read, write = (median(rate[kind] for rate in rates) for kind in ("read", "write"))
    numel = next(value[0][0]["numel"] for value in values.values() if "numel" in value[0][0])
    print(
        f"{numel / 1e6:.0f} M parameters, {given.dtype}, AdamW, clipping at 1; "
        f"fio mixed: {read / 1e9:.2f} GB/s read and {write / 1e9:.2f} GB/s written at once (median of {len(rates)})"
    )
    report(values, numel, read, write)


def report(values: dict[str, list[list[dict[str, Any]]]], numel: int, read_rate: float, write_rate: float) -> None:
    """The step alone, whole steps, and the claims."""
    print("the step alone (seconds, ns and bytes a parameter, bounds by fio's rates), and whole training steps (free)")
    table = Table(
        "s:.2f", "ns:.2f", "read:.2f", "written:.2f", "sum s:.2f", "ratio:.2f", "max s:.2f", "ratio:.2f", "free s:.2f",
        "read:.2f", "written:.2f", "in all:.2f",
    )  # fmt: skip
    step = {}
    for name, rounds in values.items():
        step[name] = seconds = compare.step_seconds(rounds, 1)
        alone = [moved[1] for (one,) in rounds for moved in one["moved"]]
        read, written = (median(moved[kind] for moved in alone) for kind in (0, 1))
        moves = read + written > 0.1 * numel
        total, longest = read / read_rate + written / write_rate, max(read / read_rate, written / write_rate)
        bounds = (total, seconds / total, longest, seconds / longest) if moves else (None,) * 4
        free = [[one["free"]] for (one,) in rounds]
        whole = compare.moved_a_parameter(free, numel)
        figures = (seconds, seconds / numel * 1e9, read / numel, written / numel)
        table.row(name, *figures, *bounds, compare.step_seconds(free), *whole, sum(whole))
        if moves and name.startswith("infinity"):
            claim(f"step / sum <= {STEP_LIMIT}", seconds / total <= STEP_LIMIT)
            most = max(read, written) / numel
            claim(f"the step reads and writes <= {STEP_BYTES_LIMIT} a parameter", most <= STEP_BYTES_LIMIT)
            limit = WHOLE_BYTES_LIMIT.get(name)
            if limit is not None:
                claim(f"a training step moves <= {limit} a parameter", sum(whole) <= limit)
    for tier in ("states", "nvme"):
        ours, rival = f"infinity:{tier}", f"deepspeed:{tier}"
        if ours in step and rival in step:
            ratio = step[rival] / step[ours]
            claim(f"{rival} / {ours}: {ratio:.2f}x, claim >= {RIVAL_LIMIT}", ratio >= RIVAL_LIMIT)



if __name__ == "__main__":
    main()
