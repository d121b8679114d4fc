"""Claim: the time of a step is known before the run: median error at most 15 %, every error at most 30 %.

    python benchmarks/predict.py [--folder DIR] [--profile FILE] [--only NAME,NAME] [--seconds 60]

`infinity bench` measures the machine (or --profile names what it has written), each step is predicted from the model's
numbers and the configuration alone, and then measured: a Llama of 134 M parameters, 4 steps to warm up (prefetch is
timed in the third and fourth) and 3 that count, in a process of its own. The sign of an error is that of the
prediction: +10 % means that the step was shorter than predicted.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from support import compare, with_infinity
from support.machine import describe, median
from support.models import MODELS
from support.table import Table, claim

from estimators.estimate import Machine, estimate
from estimators.step_time import StepTime
from infinity.cli import bench
from infinity.plan.hardware import HardwareProfile, load_profile, save_profile

MEDIAN_LIMIT, WORST_LIMIT = 0.15, 0.30
# Name -> what differs from 4 x 256 tokens, clipped: where states and parameters are, dtype, batch, clipping.
CASES: dict[str, dict[str, Any]] = {
    "fp32-cpu": {"contender": "infinity:cpu", "dtype": "fp32"},
    "fp32-states": {"contender": "infinity:states", "dtype": "fp32"},
    "fp32-nvme": {"contender": "infinity:nvme", "dtype": "fp32"},
    "bf16-cpu": {"contender": "infinity:cpu", "dtype": "bf16"},
    "bf16-states": {"contender": "infinity:states", "dtype": "bf16"},
    "bf16-nvme": {"contender": "infinity:nvme", "dtype": "bf16"},
    "bf16-nvme-unclipped": {"contender": "infinity:nvme", "dtype": "bf16", "clip": 0.0, "checked": False},
    "bf16-nvme-8x256": {"contender": "infinity:nvme", "dtype": "bf16", "batch": 8},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--profile", help="what `infinity bench` has written; default: it is run now")
    parser.add_argument("--keep", help="where the profile that is made now is kept")
    parser.add_argument("--seconds", type=float, default=60, help="of `infinity bench`")
    parser.add_argument("--only", help="cases, comma-separated, instead of all")
    parser.add_argument("--model", choices=("llama", "tiny"), default="llama")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4)
    given = parser.parse_args()
    given.ranks = 1
    print(describe())
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.profile:
            profile = load_profile(given.profile)
        else:
            profile = bench.measure([folder], seconds=given.seconds)
            if given.keep:
                save_profile(profile, given.keep)
        print(bench.show(profile))
        table = Table("predicted s:.3f", "measured s:.3f", "error:+.1%", name_width=24)
        errors = []
        for name in given.only.split(",") if given.only else CASES:
            options = {
                "model": given.model, "positions": 256, "batch": 4, "warmup": given.warmup, "steps": given.steps,
                "folder": folder, **CASES[name],
            }  # fmt: skip
            expected = foretell(options, profile)
            measured = compare.step_seconds([compare.measure(options["contender"], options, given)])
            errors.append(abs(expected.seconds / measured - 1))
            note = f"bound by {expected.bound_by.value}"
            table.row(name, expected.seconds, measured, expected.seconds / measured - 1, note=note)
    worst = max(errors)
    claim(f"median error {median(errors):.1%} <= {MEDIAN_LIMIT:.0%}", median(errors) <= MEDIAN_LIMIT)
    claim(f"every error <= {WORST_LIMIT:.0%}, the worst is {worst:.1%}", worst <= WORST_LIMIT)


def foretell(options: dict[str, Any], profile: HardwareProfile) -> StepTime:
    """The step of a case, from the model's numbers and the configuration."""
    shape = MODELS[options["model"]]
    model = {
        "model_type": "llama", "vocab_size": shape["vocab_size"], "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"], "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"], "num_key_value_heads": shape["heads"], "tie_word_embeddings": False,
    }  # fmt: skip
    return estimate(
        model, with_infinity.configuration(options), batch=options["batch"], sequence=options["positions"],
        machine=Machine(accelerator=False), profile=profile,
    ).time  # fmt: skip


if __name__ == "__main__":
    main()
