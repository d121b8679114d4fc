"""Small checkpoints that DeepSpeed itself writes, and what it knows of them: the fixtures of its reader's tests.

    DS_BUILD_OPS=0 pip install torch==2.13.0 safetensors deepspeed==0.19.8        (an environment of its own)
    DS_ACCELERATOR=cpu python -m tests.data.make_deepspeed_checkpoints tests/data/deepspeed_checkpoints

For each cell: FOLDER/CELL/latest, FOLDER/CELL/global_step4 as saved, `expected.safetensors` (masters and moments by
parameter, frozen weights, buffers) and `expected.json` (counters, rates, loss scale, the losses of the steps after it).
Two cells are converted by DeepSpeed's `ds_to_universal`. Nothing here imports infinity.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file

from tests.support.deepspeed_model import SAVED_STEPS, STEPS, Tied, batch, config, groups

# By name: stage, precision, ranks, and keys of `zero_optimization`.
CELLS = {
    "zero1-bf16": (1, "bf16", 2, {}),
    "zero2-bf16": (2, "bf16", 2, {}),
    "zero3-bf16": (3, "bf16", 2, {}),
    "zero3-bf16-one": (3, "bf16", 1, {}),
    # Sub-groups of some parameters each.
    "zero3-fp32": (3, "fp32", 2, {"sub_group_size": 60}),
    # Each parameter begins at a multiple of 16 bytes.
    "zero2-fp32": (2, "fp32", 2, {"parameter_alignment": True}),
    # Parameters in another order. (Without the alignment DeepSpeed's own functions exchange their names then.)
    "zero2-fp16": (2, "fp16", 2, {"round_robin_gradients": True, "parameter_alignment": True}),
}
UNIVERSAL = ("zero2-bf16", "zero3-bf16")
CLIENT = {"epoch": 3, "best": 0.25, "note": "after four steps", "seen": [1, (2, 3)], "mask": torch.arange(5)}


def train(folder: Path, cell: str) -> None:
    """Train, save, and go on: one cell on this rank."""
    stage, dtype, world, more = CELLS[cell]
    rank = dist.get_rank()
    section = config(stage, dtype, world)
    section["optimizer"]["params"]["torch_adam"] = True
    # Otherwise stage 3 replaces torch's linear layers in this process, for the cells after it, too.
    section["zero_optimization"].update({"memory_efficient_linear": False, **more})
    model = Tied()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=section)
    losses = []
    for step in range(STEPS):
        if step == SAVED_STEPS:
            engine.save_checkpoint(str(folder / cell), client_state=CLIENT)
            expected, states = describe(engine), states_of(engine)
        loss = engine(batch(rank, world, step))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float() / world
        dist.all_reduce(mean)
        losses.append(float(mean))
    expected["losses"] = losses[SAVED_STEPS:]
    if rank == 0:
        save_file(states, folder / cell / "expected.safetensors")
        (folder / cell / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    dist.barrier()


def describe(engine: Any) -> dict[str, Any]:
    """What DeepSpeed says of its run."""
    inner = engine.optimizer.optimizer
    steps = {int(state["step"]) for state in inner.state.values() if "step" in state}
    assert len(steps) == 1
    return {
        "versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "world": dist.get_world_size(), "steps": steps.pop(), "global_steps": engine.global_steps,
        "global_samples": engine.global_samples, "skipped_steps": engine.skipped_steps,
        "lr": engine.get_lr(), "last_batch_iteration": engine.lr_scheduler.last_batch_iteration,
        "weight_decay": [group["weight_decay"] for group in engine.optimizer.param_groups],
        "loss_scale": float(engine.optimizer.loss_scale),
    }  # fmt: skip


def states_of(engine: Any) -> dict[str, torch.Tensor]:
    """Every value in full, as DeepSpeed's own functions return it. Collective."""
    found = {}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # It links the states after the first group's step, when the second group has none.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[f"{name}.master"] = safe_get_full_fp32_param(param).clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{kind}"] = safe_get_full_optimizer_state(param, kind).clone()
        else:
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                found[f"{name}.frozen"] = param.detach().clone()
    for name, buffer in engine.module.named_buffers():
        found[f"{name}.buffer"] = buffer.clone()
    return {name: value.contiguous() for name, value in found.items()}


def train_all(folder: Path) -> None:
    """All cells of as many ranks on this rank, one after the other."""
    torch.set_num_threads(1)
    # DeepSpeed asks the processor for instructions that torch does without.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo", verbose=False)
    for cell, (_, _, world, _) in CELLS.items():
        if world == dist.get_world_size():
            train(folder, cell)


def make(folder: Path) -> None:
    """Write all cells, and convert some."""
    shutil.rmtree(folder, ignore_errors=True)
    for world in sorted({world for _, _, world, _ in CELLS.values()}):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world)]
        subprocess.run([*launch, "-m", "tests.data.make_deepspeed_checkpoints", str(folder), "rank"], check=True)
    for cell in CELLS:
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / cell / script).unlink()
    for cell in UNIVERSAL:
        target, name = folder / f"{cell}-universal", f"global_step{SAVED_STEPS}"
        target.mkdir()
        arguments = ["--input_folder", str(folder / cell / name), "--output_folder", str(target / name)]
        convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        subprocess.run([*convert, "--num_extract_workers", "1", "--num_merge_workers", "1", *arguments], check=True)
        for each in ("expected.safetensors", "expected.json"):
            shutil.copyfile(folder / cell / each, target / each)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    train_all(folder) if len(sys.argv) == 3 else make(folder)
