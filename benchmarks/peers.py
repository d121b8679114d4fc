"""Claim: whole training steps are as fast as torch's own, and at least twice as fast as DeepSpeed's at half its memory.

    python benchmarks/peers.py [--ranks 1|2] [--dtype fp32|bf16] [--batch N] [--rounds 3] [--only A,B]
                               [--buffers N] [--checkpointing] [--unclipped] [--deepspeed-python PATH]
                               [--tokens 256,512,2048] [--json FILE]

A Llama of 134 M parameters, the same weights and data for all, AdamW, clipping at 1.0. Every contender and round is a
process (one a rank) of its own; rounds alternate; medians. The first one named is what ratios refer to. With bf16 the
reference is a bf16 model with fp32 master weights and moments (torch:plain), since that is the work that is done by the
others; torch:pure keeps everything in bf16 and is shown beside it. --buffers: sub-groups of states that infinity keeps
in memory at most, where they live on NVMe; --checkpointing: all compute activations again. Ratios depend on the tokens
of a step, because all do the same computation: --tokens measures one number of tokens a rank and step after the other,
and --json adds a row with its conditions to a file for each of them and each contender.

DeepSpeed runs in an environment of its own: `--deepspeed-python` names its interpreter, with cpu_adam and async_io
built there (TORCH_EXTENSIONS_DIR says where torch looks for them).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support import compare
from support.machine import MIB, describe
from support.table import Table, claim

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
    parser = compare.arguments(__doc__)
    parser.add_argument("--tokens", help="tokens of a rank and step, comma-separated, in place of --batch")
    parser.add_argument("--json", type=Path, help="file that rows are added to")
    given = parser.parse_args()
    contenders = CONTENDERS[given.ranks] + (RIVALS if given.deepspeed_python else [])
    if given.dtype == "bf16" and given.ranks == 1:
        contenders.insert(1, "torch:pure")
    if given.only:
        contenders = given.only.split(",")
    print(describe())
    for tokens in given.tokens.split(",") if given.tokens else [None]:
        if tokens is not None:
            given.batch = given.ranks * max(1, int(tokens) // given.positions)
        with compare.task_options(given) as options:
            print(compare.headline(options, given))
            values = compare.alternate(contenders, options, given)
            report(values, options, given.ranks)
        compare.check_losses(values, TOLERANCE[given.dtype])
        if given.json is not None:
            add_rows(given.json, values, options, given.ranks)


def add_rows(file: Path, values: dict[str, list[list[dict[str, Any]]]], options: dict[str, Any], ranks: int) -> None:
    """Add a row a contender: speed and memory against the first one, with all conditions of the cell."""
    speed = {name: compare.tokens_a_second(rounds, options, ranks) for name, rounds in values.items()}
    peak = {name: compare.peak_nbytes(rounds) for name, rounds in values.items()}
    reference, rounds = next(iter(values.items()))
    conditions = {
        "tokens": options["batch"] * options["positions"], "ranks": ranks, "dtype": options["dtype"],
        "clip": options.get("clip", 1.0), "numel": rounds[0][0]["numel"], "buffers": options["buffers"],
        "checkpointing": options["checkpointing"], "rounds": len(rounds), "machine": describe(),
    }  # fmt: skip
    rows = json.loads(file.read_text()) if file.exists() else []
    for name in values:
        device = compare.device_peak_nbytes(values[name])
        rows.append(
            {
                **conditions, "contender": name, "reference": reference, "tokens_a_second": round(speed[name], 1),
                "speed_ratio": round(speed[name] / speed[reference], 3), "peak_mib": round(peak[name] / MIB),
                "memory_ratio": round(peak[name] / peak[reference], 3),
                **({"device_mib": round(device / MIB)} if device > 0 else {}),
            }
        )  # fmt: skip
    file.write_text(json.dumps(rows, indent=1) + "\n")


def report(values: dict[str, list[list[dict[str, Any]]]], options: dict[str, Any], ranks: int) -> None:
    """A line a contender, then the claims whose two sides were measured."""
    speed = {name: compare.tokens_a_second(rounds, options, ranks) for name, rounds in values.items()}
    peak = {name: compare.peak_nbytes(rounds) for name, rounds in values.items()}
    reference = next(iter(values))
    table = Table(
        "tokens/s:.0f", "ratio:.2f", "step s:.2f", "optimizer s:.2f", "peak MiB:.0f", "ratio:.2f", "above baseline:.0f",
        "while built:.0f", "device MiB:.0f",
    )  # fmt: skip
    for name, rounds in values.items():
        table.row(
            name, speed[name], speed[name] / speed[reference], compare.step_seconds(rounds),
            compare.step_seconds(rounds, 1), peak[name] / MIB, peak[name] / peak[reference],
            compare.above_baseline(rounds) / MIB, max(value["built_peak"] for value in rounds[0]) / MIB,
            compare.device_peak_nbytes(rounds) / MIB,
        )  # fmt: skip
    for ours, other, least, most in CLAIMS:
        if ours in values and other in values:
            ratio, memory = speed[ours] / speed[other], peak[ours] / peak[other]
            claim(f"{ours} / {other}: {ratio:.2f}x tokens/s, claim >= {least}", ratio >= least)
            if most:
                claim(f"{ours} / {other}: {memory:.2f}x peak memory, claim <= {most}", memory <= most)
            else:
                print(f"  {ours} / {other}: {memory:.2f}x peak memory")


if __name__ == "__main__":
    main()
