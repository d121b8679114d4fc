"""Claim: a record behind each step costs 2 % of a step's time at most ("process"), 3 % or what flushes cost ("power").

    python benchmarks/every_step.py [--width 512] [--layers 8] [--rounds 5] [--folder DIR] [--json FILE]

A Llama in fp32 with everything on NVMe and no states kept in memory between steps, 1 x 256 tokens; each of `off`,
`process` and `power` in a process of its own, by turns; medians over rounds of the median step, and of ratios within a
round. Beside it the time of `initialize` and `resume` on what a process that ends without close() has left.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from support.machine import describe, median
from support.table import Table

MODES = ("off", "process", "power")


def child(mode: str, folder: str, width: int, layers: int, steps: int) -> None:
    """Train some steps; print the seconds of each, of `initialize` and of `resume`, and the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import infinity

    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=8,
        vocab_size=8000, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    numel = sum(param.numel() for param in model.parameters())
    device = {"device": "nvme", "nvme_path": f"{folder}/nvme"}
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 2_000_000, "offload_param": device,
            "offload_optimizer": device,
        },
        "checkpoint": {"path": f"{folder}/checkpoints", "every_step": mode},
    }  # fmt: skip
    began = time.perf_counter()
    engine = infinity.initialize(model=model, config=config)[0]
    made = time.perf_counter()
    went_on = engine.resume()[0] is not None
    resumed = time.perf_counter()
    assert went_on == (not steps), "a start without steps goes on, and the others begin"
    ids = torch.randint(8000, (1, 256))
    seconds = []
    for _ in range(steps):
        at = time.perf_counter()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        seconds.append(time.perf_counter() - at)
    engine.synchronize()
    print(json.dumps([median(seconds[2:] or [0.0]), made - began, resumed - made, numel, len(engine.plan.kept())]))
    if mode == "off":
        engine.close()


def start(mode: str, folder: Path, given: argparse.Namespace, steps: int) -> list[float]:
    """Run a child; return what it prints."""
    command = [sys.executable, __file__, "--child", mode, str(folder), "--steps", str(steps), "--width",
               str(given.width), "--layers", str(given.layers)]  # fmt: skip
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return list(json.loads(found.splitlines()[-1]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--json", type=Path, help="file to record in")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.child, given.width, given.layers, given.steps)
        return
    print(describe())
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    begun: dict[str, list[float]] = {"initialize": [], "resume": []}
    numel = 0.0
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        for _ in range(given.rounds):
            for mode in MODES:
                folder = Path(place) / mode
                step, _, _, numel, kept = start(mode, folder, given, given.steps)
                assert not kept, "states stay in memory, which records do without"
                found[mode].append(step)
                if mode == "process":
                    _, made, resumed, _, _ = start(mode, folder, given, 0)
                    begun["initialize"].append(made)
                    begun["resume"].append(resumed)
                shutil.rmtree(folder)
    times = {mode: median(each) for mode, each in found.items()}
    ratios = {
        mode: median(one / other for one, other in zip(found[mode], found["off"], strict=True)) for mode in MODES[1:]
    }
    table = Table(*(f"{mode}:.2f" for mode in MODES), "process/off:.3f", "power/off:.3f", "resume:.4f")
    table.row(f"{numel / 1e6:.0f} M", *times.values(), *ratios.values(), median(begun["resume"]))
    if given.json is not None:
        rows = [
            {"what": f"{mode} / off", "figures": [round(ratio, 3)], "limit": f"<= {limit}"}
            for (mode, ratio), limit in zip(ratios.items(), (1.02, 1.03), strict=True)
        ] + [{"what": f"{name}, s", "figures": [round(median(each), 4)]} for name, each in begun.items()]
        given.json.write_text(
            json.dumps({
                "topic": "A record behind each step",
                "claim": "A record costs 2 % of a step's time at most, a flush of each step 3 %.",
                "command": "python benchmarks/every_step.py --json benchmarks/results/every_step.json",
                "machine": describe(), "date": f"{date.today()}",
                "how": f"Llama of {numel / 1e6:.0f} M parameters, fp32, AdamW, everything on NVMe, 1 x 256 tokens. "
                f"Medians of {given.rounds} rounds by turns. resume: on what a process without close() has left.",
                "rows": rows,
            }, indent=1) + "\n"
        )  # fmt: skip


if __name__ == "__main__":
    main()
