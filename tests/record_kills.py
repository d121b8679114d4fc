"""Does a run that is killed go on? Real `kill -9` at seeded moments, the same command again, one hash.

    python -m tests.record_kills [--kills 200] [--only NAME ...] [--json FILE]

A setting trains once without a kill and once with several. Each start has the same command, and goes on by
`engine.resume()`. What it says must hold: not more than one step is lost behind the last `step()` that has returned;
every step has the loss that it has without kills, so that the samples of a lost step come again and no others; and the
weights, moments and buffers of the end are the same. With two ranks one is killed, or both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity

STEPS = 160
_HIDDEN = 64


@dataclass(frozen=True)
class Setting:
    """One run. memory: of parameters, or of states, that are not on NVMe. less: bytes that a start has less of than the
    one before.
    """

    name: str
    ranks: int = 1
    precision: str = "bf16"
    accumulation: int = 1
    clip: float = 1.0
    params: str = "nvme"
    states: str = "nvme"
    gradients: str = "cpu"
    persistence: int = 0
    workers: int = 0
    every_step: str = "process"
    speculates: bool = False
    changes: bool = False
    optimizer: str = "AdamW"
    hugging_face: bool = False
    less: int = 0


SETTINGS = (
    Setting("all on NVMe"),
    Setting("parameters in memory", params="cpu", persistence=1000),
    Setting("states in memory", states="cpu", precision="fp32"),
    Setting("gradients on NVMe, accumulated", gradients="nvme", accumulation=2),
    Setting("fp16 and its scale", precision="fp16", params="cpu"),
    Setting("begun in backward", clip=0.0, gradients="nvme"),
    Setting("guessed norm", speculates=True, clip=0.3),
    Setting("flushed", every_step="power"),
    Setting("a loader's workers", workers=2),
    Setting("changed between steps", changes=True, params="cpu"),
    Setting("torch's NAdam", optimizer="NAdam", precision="fp32"),
    Setting("less memory at each start", less=32 << 10, params="auto", states="auto"),
    Setting("Llama of Hugging Face", hugging_face=True),
    Setting("two ranks", ranks=2),
    Setting("two ranks, parameters in memory", ranks=2, params="cpu", persistence=1000, gradients="nvme"),
    Setting("two ranks, changed between steps", ranks=2, changes=True),
)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_HIDDEN)
        self.wide = nn.Linear(_HIDDEN, 4 * _HIDDEN)
        self.narrow = nn.Linear(4 * _HIDDEN, _HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


class _Model(nn.Module):
    """Has what a record keeps besides parameters: buffers, and random numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, _HIDDEN)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.normed = nn.BatchNorm1d(_HIDDEN)
        self.dropout = nn.Dropout(0.1)
        self.leave = nn.Linear(_HIDDEN, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.enter(x.to(self.enter.weight.dtype))
        for block in self.blocks:
            h = block(h)
        loss: Tensor = ((self.leave(self.dropout(self.normed(h))) - y) ** 2).mean()
        return loss


def _made(setting: Setting) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    if not setting.hugging_face:
        return _Model(), [(torch.randn(16), torch.randn(1)) for _ in range(64)]
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
        max_position_embeddings=32,
    )  # fmt: skip
    ids = [torch.randint(128, (16,)) for _ in range(64)]
    return LlamaForCausalLM(shape), [{"input_ids": each, "labels": each} for each in ids]


def _config(setting: Setting, folder: Path) -> dict[str, Any]:
    nvme = str(folder / "nvme")
    zero: dict[str, Any] = {
        "stage": 3, "stage3_param_persistence_threshold": setting.persistence, "sub_group_size": 20_000,
        "offload_param": {"device": setting.params, "nvme_path": nvme},
        "offload_optimizer": {"device": setting.states, "nvme_path": nvme},
    }  # fmt: skip
    if setting.gradients == "nvme":
        zero["offload_gradients"] = {"device": "nvme"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": setting.clip, "zero_optimization": zero, "dataloader_num_workers": setting.workers,
        "optimizer": {"type": setting.optimizer, "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "checkpoint": {"path": str(folder / "checkpoints"), "every_step": setting.every_step},
    }  # fmt: skip
    if setting.precision != "fp32":
        config[setting.precision] = {"enabled": True}
    if not setting.clip:
        config["check_grad_overflow"] = False
    if setting.speculates:
        config["speculative_step"] = True
    return config


def _have_less(setting: Setting, starts: int) -> None:
    """Let the process see less free memory than the start before."""
    from infinity.engine import preflight
    from infinity.memory import drives

    free = (54 << 20) - starts * setting.less
    drives.free_cpu_nbytes = lambda: free  # type: ignore[assignment]
    preflight.baseline_nbytes = lambda model: 0  # type: ignore[assignment]


def child(setting: Setting, folder: Path, starts: int, kill_after: float) -> None:
    """One start: go on, train to the end, print each step and the hash. Killed some seconds after it has gone on."""
    if setting.less:
        _have_less(setting, starts)
    model, data = _made(setting)
    engine, _, _, _ = infinity.initialize(model=model, config=_config(setting, folder), training_data=data)
    engine.resume()
    _say("went on", engine.global_steps)
    if kill_after:
        threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
    while engine.global_steps < STEPS:
        if setting.changes and engine.global_steps % 3 == 1:
            # To the same values, however often.
            chosen = engine.module.get_parameter(names[engine.global_steps % len(names)])
            with infinity.modify(chosen):
                chosen.data.clamp_(-0.05, 0.05)
            if engine.global_steps % 2:
                state = infinity.state(chosen)
                state.exp_avg = torch.zeros_like(state.exp_avg)
        loss = engine.train_batch()
        _say("step", engine.global_steps, float(loss).hex())
    digest = hashlib.sha256()
    for param in engine.module.parameters():
        state = infinity.state(param)
        for values in (state.master, state.exp_avg, state.exp_avg_sq):
            digest.update(values.numpy().tobytes())
    for buffer in engine.module.buffers():
        digest.update(buffer.float().numpy().tobytes())
    _say("hash", digest.hexdigest()[:16])
    engine.close()


def _say(*words: object) -> None:
    # One write, so that a kill leaves no half a line that looks whole.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def _start(setting: Setting, folder: Path, starts: int, kills: Sequence[float]) -> tuple[bool, list[list[str]], str]:
    """Start all ranks once; return whether they came to the end, the lines of each, and what went wrong."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(setting.ranks):
        axes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": setting.ranks, "LOCAL_WORLD_SIZE": setting.ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if setting.ranks > 1:
            environment |= {name: str(value) for name, value in axes.items()}
        command = [sys.executable, "-m", "tests.record_kills", "--child", setting.name, str(folder), str(starts),
                   str(kills[rank])]  # fmt: skip
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    ended = []
    for each in ranks:
        try:
            ended.append(each.communicate(timeout=120))
        except subprocess.TimeoutExpired:
            each.kill()
            ended.append(each.communicate())
    # Whoever is killed behind its hash, which comes before close(), was at its end.
    done = all("hash" in out for out, _ in ended)
    return done, [out.splitlines() for out, _ in ended], "\n".join(errors[-3000:] for _, errors in ended)


@dataclass
class Outcome:
    """How a setting ended. kills: that came in time. lost: steps that were made again. wrong: what did not hold."""

    name: str
    kills: int = 0
    starts: int = 0
    lost: int = 0
    seconds: float = 0.0
    hash: str = ""
    wrong: str = ""


def run(setting: Setting, kills: int, seed: int) -> Outcome:
    """Train without kills, then with some."""
    began, drawn = time.monotonic(), random.Random(f"{setting.name}{seed}")
    outcome = Outcome(setting.name)
    root = Path(tempfile.mkdtemp(prefix="record-kills-"))
    try:
        done, lines, errors = _start(setting, root / "whole", 0, [0.0] * setting.ranks)
        if not done:
            outcome.wrong = f"without kills: {errors}"
            return outcome
        expected = [dict(_steps(each)) for each in lines]
        outcome.hash = lines[0][-1]
        _with_kills(setting, root / "killed", kills, drawn, expected, outcome)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _with_kills(
    setting: Setting, folder: Path, kills: int, drawn: random.Random, expected: Sequence[Mapping[int, str]],
    outcome: Outcome,
) -> None:  # fmt: skip
    last = 0
    while True:
        # Within the few seconds that all steps take, and again and again in the first ones.
        moments = [drawn.uniform(0.0, 0.6) if outcome.kills < kills else 0.0] * setting.ranks
        if setting.ranks > 1 and outcome.kills < kills and drawn.random() < 0.5:
            moments[drawn.randrange(setting.ranks)] = 0.0
        done, lines, errors = _start(setting, folder, outcome.starts, moments)
        outcome.starts += 1
        outcome.kills += any(moments) and not done
        for rank, each in enumerate(lines):
            at = next((int(line.split()[2]) for line in each if line.startswith("went on")), None)
            if at is None:
                outcome.wrong = f"start {outcome.starts}, rank {rank}, did not go on: {errors}"
                return
            if at < last - 1:
                outcome.wrong = f"start {outcome.starts} went on from step {at}, and step {last} had returned"
                return
            outcome.lost += rank == 0 and at < last
            unlike = [step for step, loss in _steps(each) if expected[rank][step] != loss]
            if unlike:
                outcome.wrong = f"start {outcome.starts}, rank {rank}: another loss in step {unlike[0]}"
                return
        last = max([last, *(step for each in lines for step, _ in _steps(each))])
        if done:
            if lines[0][-1] != outcome.hash:
                outcome.wrong = f"{lines[0][-1]} instead of {outcome.hash}"
            return
        if outcome.starts > 10 * kills + 10:
            outcome.wrong = f"it never comes to the end: {errors}"
            return


def _steps(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    for line in lines:
        words = line.split()
        if words[0] == "step" and len(words) == 3:
            yield int(words[1]), words[2]


def main() -> None:
    """Run all settings, two at a time, print and record how each ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    named = {setting.name: setting for setting in SETTINGS}
    if given.child:
        name, folder, starts, kill_after = given.child
        child(named[name], Path(folder), int(starts), float(kill_after))
        return
    chosen = [named[name] for name in given.only] or [*SETTINGS]
    each = -(-given.kills // len(chosen))
    outcomes = []
    with ThreadPoolExecutor(2) as pool:
        for outcome in pool.map(lambda setting: run(setting, each, given.seed), chosen):
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.kills} kills, {outcome.lost} steps made again, {outcome.hash}, "
                  f"{outcome.seconds:.0f} s {outcome.wrong or 'right'}", flush=True)  # fmt: skip
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    print(f"{sum(outcome.kills for outcome in outcomes)} kills, {wrong} of {len(outcomes)} settings wrong")
    if given.json:
        found = {"date": date.today().isoformat(), "command": "python -m tests.record_kills", "steps": STEPS,
                 "settings": [asdict(outcome) for outcome in outcomes]}  # fmt: skip
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
