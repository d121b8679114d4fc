"""Claim: one rank trains on 131,072 tokens with full attention, and on 1,048,576 with a window of 1,024, in a quarter
of plain torch's memory, which does not grow with layers.

    python -m tests.long_sequences [--only full,window,layers] [--steps 2] [--folder DIR] [--out FILE]

Llamas of five layers (with a window: Mistral's class) in fp32, 128 wide with one head of 64, on bytes of real text:
everything on NVMe, the inputs of recomputed blocks as well, attention by the section sparse_attention, MLPs and loss in
tiles. Each case is a process of its own in a control group with the memory of `LIMITS_GIB`; what counts is anonymous
memory (tests.memory_cases). Plain torch's is what its graph keeps of an eighth of the length, times eight, with
attention that keeps nothing of its own: less than what it would take.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import cpuinfo
import torch
from torch import Tensor

from tests.memory_cases import Watched
from tests.support.memory_limit import limited

ROOT = Path(__file__).parent.parent
WINDOW, TILE = 1024, 4096
LAYERS = 5
# Tokens, and whether attention has a window.
CASES = {"full": (131_072, False), "window": (1_048_576, True)}
LIMITS_GIB = {"full": 1.95, "window": 12.5}
# Of plain torch's memory.
SHARE = 4


def text(tokens: int) -> Tensor:
    """Return bytes of this project's pages and sources, [1, tokens]."""
    files = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("infinity/**/*.py"), *ROOT.glob("tests/**/*.py")])
    found = bytearray()
    for file in files:
        found += file.read_bytes()
        if len(found) >= tokens:
            return torch.frombuffer(found, dtype=torch.uint8)[:tokens].long()[None]
    raise ValueError(f"{ROOT} has {len(found)} bytes of text, and {tokens} are asked for")


def make(tokens: int, window: bool, layers: int) -> Any:
    """Return the model, the same weights in every run."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes = {
        "vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": layers,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": tokens,
    }  # fmt: skip
    torch.manual_seed(0)
    if window:
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=WINDOW))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def configuration(folder: str) -> dict[str, Any]:
    """Return the one of a run on NVMe alone."""
    drive = {"device": "nvme", "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 1, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
        "activation_checkpointing": {"every": 1, "offload": drive},
        "sparse_attention": {"mode": "dense", "block": 128},
    }  # fmt: skip


def train(tokens: int, window: bool, layers: int, steps: int, folder: str) -> dict[str, Any]:
    """Train on the engine. The program of a case."""
    import infinity

    model = make(tokens, window, layers)
    config = configuration(folder)
    infinity.tile_sequence(model, tile_tokens=TILE)
    engine, *_ = infinity.initialize(model=model, config=config)
    losses, seconds = [], []
    ids = text(tokens)
    for _ in range(steps):
        begin = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        seconds.append(round(time.perf_counter() - begin, 1))
        losses.append(float(loss.detach()))
    moved = engine.memory().peak["nvme"]
    found = {"losses": losses, "seconds": seconds, "threads": torch.get_num_threads(),
             "predicted": engine.memory().predicted, "nvme": sum(moved.values())}  # fmt: skip
    engine.close()
    return found


def kept_nbytes(tokens: int, layers: int) -> int:
    """Return the bytes that plain torch's graph keeps of a forward, without weights, each storage once."""
    model, ids = make(tokens, False, layers), text(tokens)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    return sum(kept.values())


def run(what: str, limit_gib: float | None, *words: object) -> dict[str, Any]:
    """Run one of the programs above in a process of its own, watched."""
    program = [sys.executable, "-m", "tests.long_sequences", "program", what, json.dumps(words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    limit = None if limit_gib is None else int(limit_gib * 2**30)
    with limited(limit) as (enter, how):
        child = subprocess.Popen(program, env=env, stdout=subprocess.PIPE, text=True, preexec_fn=enter, cwd=ROOT)
        watched = Watched(child.pid)
        said, _ = child.communicate()
        watched.stop()
    found = json.loads(said.splitlines()[-1]) if child.returncode == 0 else {"returncode": child.returncode}
    numbers = [word for word in words if not isinstance(word, str)]
    return {"what": what, "words": numbers, **found, "peak": watched.nbytes, "limit": limit, "how": how}


def cases(only: Sequence[str], steps: int, folder: str | None) -> list[dict[str, Any]]:
    """Run them; each row with its verdict."""
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as drive:
        for name in only:
            if name == "layers":
                few, many = (run("train", None, 65_536, True, layers, 1, drive) for layers in (4, 16))
                rows += [{**row, "case": name} for row in (few, many)]
                # Weights and their plan grow with layers. Of what a sequence takes, the heap's gaps do by a little.
                grown, foreseen = (many[name] - few[name] for name in ("peak", "predicted"))
                hidden = (16 - 4) * 4 * 128 * 65_536
                rows[-1]["ok"] = grown - foreseen <= 0.25 * hidden
                continue
            tokens, window = CASES[name]
            row = {**run("train", LIMITS_GIB[name], tokens, window, LAYERS, steps, drive), "case": name}
            row["plain"] = 8 * run("kept", None, tokens // 8, LAYERS)["nbytes"]
            losses = row.get("losses", [])
            row["ok"] = (
                len(losses) == steps and losses[-1] < losses[0] and row["peak"] <= row["predicted"]
                and row["plain"] >= SHARE * row["limit"]
            )  # fmt: skip
            rows.append(row)
    return rows


def main() -> int:
    """Run the cases, print them, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="full,window,layers")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--folder", help="a folder on the drive")
    parser.add_argument("--out", type=Path, help="where the JSON goes; rows of other cases in it stay")
    given = parser.parse_args()
    free = shutil.disk_usage(given.folder or tempfile.gettempdir()).free
    if free < 10**10:
        print(f"left out: the drive has {free / 1e9:.0f} GB free, it needs 10")
        return 0
    rows = cases(given.only.split(","), given.steps, given.folder)
    for row in rows:
        print(json.dumps(row), flush=True)
    if given.out is not None:
        if given.out.exists():
            ran = {row["case"] for row in rows}
            rows = [row for row in json.loads(given.out.read_text())["rows"] if row["case"] not in ran] + rows
        report = {
            "command": f"python -m tests.long_sequences --steps {given.steps}",
            "date": date.today().isoformat(), "torch": torch.__version__,
            "processor": cpuinfo.get_cpu_info().get("brand_raw"), "rows": rows,
        }  # fmt: skip
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["program"]:
        what, words = sys.argv[2], json.loads(sys.argv[3])
        found = {"nbytes": kept_nbytes(*words)} if what == "kept" else train(*words)
        print(json.dumps(found), flush=True)
    else:
        sys.exit(main())
