"""Claim: nobody is killed. Three models under four limits of memory: each is fitted and stays below what was said, or
is refused, and then it would have exceeded the limit.

    python -m tests.memory_cases [--models small,middle,large] [--gib 1,2,3,4] [--steps 10] [--folder DIR] [--out FILE]
        [--whole]

Llamas in bf16, everything on NVMe, built under `infinity.Init`, clipped, default keys: only the length of sequences is
said. Each case is a process of its own in a control group; where none can be made, RLIMIT_DATA bounds it, and the
configuration has to say what is there, because preflight does not look at that limit. What counts is anonymous memory
(RssAnon of /proc/PID/status, every 20 ms; what is locked is part of it here), not the group's own figure, in which the
page cache counts.

- A fitted case trains, saves and loads; its peak is at most the prediction, and at least 0.90 of it.
- A refused case runs again with preflight taken out: it is killed, or exceeds the limit.

With --whole each fitted case must have the hash of a run without a limit. "huge" (2.1 B parameters) and "mixture"
(1.3 B, in experts) are for that: they take up to 60 and 40 GB of the drive, and are left out where it has less free.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import cpuinfo
import torch

from tests.support.memory_limit import leave, limited

ROOT = Path(__file__).parent.parent
SEQUENCE = 128
_COMMON = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 16000, "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8},
    "middle": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12},
    "large": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 15},
    "huge": {
        "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 20,
        "num_key_value_heads": 20,
    },
    # 1.3 B parameters, 0.6 B of them in the experts of each layer: 1.2 GB in bf16.
    "mixture": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 2, "num_local_experts": 16,
    },
}  # fmt: skip
# What a case of it has on the drive at most: the swap file, and a checkpoint.
DRIVE_NBYTES = {"huge": 62 * 10**9, "mixture": 40 * 10**9}
LEAST = 0.90


def train(model_name: str, folder: str, steps: int, flags: Sequence[str]) -> None:
    """Build, train, save, load; prints a JSON line. The program of a case.

    flags: "unchecked": with preflight taken out; "digest": with the hash of all states; "memory": with nothing on NVMe;
    "told:BYTES": with what memory there is in the configuration; "fp32": in that precision, with few tokens and
    gradients in bf16, for processors without bf16: their products of bf16 matrices take a hundred times as long, and
    memory of their own.
    """
    import infinity
    from infinity.errors import CapacityError

    if "unchecked" in flags:
        _without_preflight()
    length = 16 if "fp32" in flags else SEQUENCE
    told = [int(flag.removeprefix("told:")) for flag in flags if flag.startswith("told:")]
    gradients = {"data_types": {"grad_accum_dtype": "bf16"}} if "fp32" in flags else {}
    drive = {"device": "none"} if "memory" in flags else {"device": "nvme", "nvme_path": folder}
    # Experts a few at a time, with and without a limit.
    bounds = {"stage3_max_live_parameters": 100_000_000} if _is_mixture(model_name) else {}
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": "fp32" not in flags},
        "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, **gradients,
        "memory": {
            "activations": {"sequence_length": length},
            **({"cpu": {"max_bytes": told[0]}} if told else {}),
        },
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive, **bounds},
    }  # fmt: skip
    with infinity.Init(config=config):
        model = _model(model_name)
    try:
        engine, *_ = infinity.initialize(model=model, config=config)
    except CapacityError as refusal:
        print(json.dumps({"refused": str(refusal)}), flush=True)
        return
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, _COMMON["vocab_size"], (1, length), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    del loss
    if not {"unchecked", "memory"} & {*flags}:
        engine.save_checkpoint(f"{folder}/checkpoints", tag="last")
        engine.load_checkpoint(f"{folder}/checkpoints", tag="last")
    found: dict[str, Any] = {
        "numel": engine.plan.numel, "losses": losses, "predicted": engine.memory().predicted,
        "layouts": hashlib.sha256(repr(engine.plan.layouts).encode()).hexdigest(),
        "gathered": engine.plan.pools.gathered_nbytes, "nvme": sum(engine.memory().peak["nvme"].values()),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    if "digest" in flags:
        # What reads the states for a hash is this program's own memory, which no plan has.
        leave()
        print(json.dumps({**found, "sha256": _digest(model)}), flush=True)
    engine.close()


def _is_mixture(model: str) -> bool:
    return "num_local_experts" in MODELS[model]


def _model(name: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    torch.manual_seed(0)
    sizes = {**_COMMON, **MODELS[name]}
    return AutoModelForCausalLM.from_config(
        MixtralConfig(**sizes) if _is_mixture(name) else LlamaConfig(**sizes)
    )


def _digest(model: torch.nn.Module) -> str:
    import infinity

    found = hashlib.sha256()
    for param in model.parameters():
        state = infinity.state(param)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            found.update(getattr(state, kind).numpy())
    return found.hexdigest()


def _without_preflight() -> None:
    """Plans are made as asked for, and never refused."""
    from infinity.engine import preflight
    from infinity.memory.ledger import Ledger
    from infinity.plan import inputs

    inputs.fitted = lambda asked, chosen, plan_of, **_: plan_of(asked)
    preflight.refuse = lambda *_, **__: None
    Ledger.room = lambda *_: None  # type: ignore[method-assign,assignment]


def run_case(
    model: str, gib: float | None, folder: str, steps: int, *flags: str, timeout: float = 5400
) -> dict[str, Any]:  # fmt: skip
    """Run one case in a control group of `gib` GiB (None: without a limit) and watch it."""
    limit = None if gib is None else int(gib * 2**30)
    program = [sys.executable, "-m", "tests.memory_cases", "case", model, folder, str(steps), *flags]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if _is_mixture(model):
        # oneDNN keeps what it has compiled for a shape, and experts have another number of tokens each time: 20 MB a
        # step, up to 1,024 shapes. See docs/tiling.md.
        env |= {"LRU_CACHE_CAPACITY": "8", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
    with limited(limit) as (enter, how), tempfile.TemporaryFile("w+") as errors:
        if limit is not None and how == "RLIMIT_DATA":
            program.append(f"told:{limit * 3 // 4}")
        child = subprocess.Popen(
            program, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=enter, cwd=ROOT
        )
        peak, result = Watched(child.pid), {}
        alarm = threading.Timer(timeout, child.kill)
        alarm.start()
        assert child.stdout is not None
        try:
            for line in child.stdout:
                # With the first line the case itself is over.
                peak.stop()
                result = json.loads(line)
            child.wait()
        finally:
            alarm.cancel()
            child.kill()
            child.wait()
            peak.stop()
            child.stdout.close()
        errors.seek(0)
        stderr = errors.read()
    killed = child.returncode == -signal.SIGKILL
    return {
        **result, "peak": peak.nbytes, "limit": limit, "killed": killed, "rc": child.returncode, "how": how,
        "stderr": "" if child.returncode == 0 else stderr[-3000:],
    }  # fmt: skip


class Watched:
    """The most anonymous and locked memory of a process, sampled every 20 ms."""

    def __init__(self, pid: int) -> None:
        self.nbytes = 0
        self._path = Path(f"/proc/{pid}/status")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.02):
            # A counter of the kernel's: smaps_rollup walks all pages and keeps the process from mapping meanwhile. What
            # is locked is private and anonymous here: it is counted already. A process that has ended has no such line.
            try:
                _, found, rest = self._path.read_text().partition("RssAnon:")
            except OSError:
                continue
            if found:
                self.nbytes = max(self.nbytes, int(rest.split()[0]) * 1024)


def judge(model: str, gib: float, folder: str, steps: int, whole: str | None) -> dict[str, Any]:
    """One case with its verdict. whole: the hash of a run without a limit, which a fitted one must have."""
    found = run_case(model, gib, folder, steps, *(["digest"] if whole is not None else []))
    row = {"model": model, "gib": gib, **found}
    if "refused" in found:
        again = run_case(model, gib, folder, 2, "unchecked")
        row |= {"unchecked": {name: again[name] for name in ("peak", "killed", "rc")}}
        row["ok"] = again["killed"] or again["peak"] > again["limit"]
        return row
    share = found["peak"] / found["predicted"] if "predicted" in found else 0.0
    row |= {"share": share, "ok": found["rc"] == 0 and LEAST <= share <= 1.0 and found["peak"] <= found["limit"]}
    if whole is not None:
        row["ok"] = row["ok"] and found.get("sha256") == whole
    return row


def main(arguments: Sequence[str]) -> int:
    """Run the cases, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,middle,large")
    parser.add_argument("--gib", default="1,2,3,4")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", default=None, help="a folder on the drive")
    parser.add_argument("--out", default=None, help="where the JSON goes")
    parser.add_argument("--whole", action="store_true", help="compare with runs without a limit")
    given = parser.parse_args(arguments)
    rows = []
    for model in given.models.split(","):
        free = shutil.disk_usage(given.folder or tempfile.gettempdir()).free
        if free < (needed := DRIVE_NBYTES.get(model, 0)):
            print(f"{model} is left out: the drive has {free / 1e9:.0f} GB free, it needs {needed / 1e9:.0f}")
            continue
        for gib in map(float, given.gib.split(",")):
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                whole: str | None = None
                if given.whole or (model == "large" and gib == 4):
                    whole = run_case(model, None, folder, given.steps, "digest")["sha256"]
                begin = time.monotonic()
                row = judge(model, gib, folder, given.steps, whole)
            rows.append({**row, "seconds": round(time.monotonic() - begin, 1)})
            print(_in_words(row), flush=True)
    fitted = [row for row in rows if "predicted" in row]
    wrong = [f"{row['model']} at {row['gib']:g} GiB" for row in rows if not row["ok"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} as they should be, {len(fitted)} fitted; wrong: {wrong or 'none'}")
    if given.out is not None:
        kept = [{name: value for name, value in row.items() if name != "stderr" or not row["ok"]} for row in rows]
        options = f"--models {given.models} --gib {given.gib} --steps {given.steps}{' --whole' if given.whole else ''}"
        report = {
            "command": f"python -m tests.memory_cases {options}", "date": date.today().isoformat(),
            "torch": torch.__version__, "processor": cpuinfo.get_cpu_info().get("brand_raw"), "rows": kept,
        }  # fmt: skip
        Path(given.out).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


def _in_words(row: dict[str, Any]) -> str:
    verdict = "ok" if row["ok"] else "WRONG"
    head = f"{row['model']:<7}{row['gib']:>3g} GiB  {verdict:<6}"
    if "refused" in row:
        again = row["unchecked"]
        return f"{head}refused; without preflight {again['peak'] / 2**30:.2f} GiB, killed: {again['killed']}"
    if "predicted" not in row:
        return f"{head}rc {row['rc']}, killed: {row['killed']}, peak {row['peak'] / 2**30:.2f} GiB\n{row['stderr']}"
    same = ", hash of the run without a limit" if "sha256" in row and row["ok"] else ""
    return (
        f"{head}peak {row['peak'] / 2**30:.3f} of {row['predicted'] / 2**30:.3f} GiB predicted ({row['share']:.3f}), "
        f"{row['gathered'] / 1e6:.0f} MB gathered at once{same}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        name, drive, count, *flags = sys.argv[2:]
        train(name, drive, int(count), flags)
    else:
        sys.exit(main(sys.argv[1:]))
