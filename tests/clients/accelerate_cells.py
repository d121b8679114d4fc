"""A training loop of accelerate's documentation, in one process a rank; prints each run as a line of JSON.

    infinity run --as-deepspeed --nproc 2 -m tests.support.clients_without_cuda -m tests.clients.accelerate_cells CELLS

CELLS is a JSON list of objects with the fields of `Cell`; a cell without a stage is accelerate's DDP.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch.utils.data import DataLoader

from tests.clients.trainer_cells import Cell as TrainerCell
from tests.clients.trainer_cells import Texts, build, ds_config, forget

STEPS = 4


@dataclass
class Cell:
    """One run.

    dummy: whether the file names optimizer and schedule; plain accelerate has the same schedule from torch. saves:
    whether it saves its state after two steps, goes on, and then does the rest again from there. rows: of the data;
    with 4 micro-batches a step, 22 leave 3 for the last one. tensor: ranks of a tensor axis, which have one batch of as
    many times the samples; plugin: whether accelerate's own ParallelismConfig asks for it.
    """

    stage: int | None = None
    offload: str = "none"
    accumulation: int = 1
    dummy: bool = False
    saves: bool = False
    rows: int = 64
    tensor: int = 1
    plugin: bool = False


def plugin_of(cell: Cell, folder: str) -> DeepSpeedPlugin | None:
    """Return the plugin as a program makes it, from a file's keys."""
    if cell.stage is None:
        return None
    config = ds_config(TrainerCell(stage=cell.stage, offload=cell.offload, in_file=cell.dummy), folder)
    config |= {"gradient_accumulation_steps": cell.accumulation, "gradient_clipping": 1.0, "bf16": {"enabled": False}}
    if not cell.plugin:
        config["parallel"] = {"tensor": cell.tensor}
    if cell.dummy:
        config["optimizer"]["params"] = {"lr": "auto", "weight_decay": "auto"}
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                       "warmup_type": "linear"},
        }  # fmt: skip
    return DeepSpeedPlugin(hf_ds_config=config)


def run(cell: Cell, folder: str) -> dict[str, Any]:
    """Train as accelerate's documentation shows it."""
    forget()
    set_seed(7)
    plugin = plugin_of(cell, folder)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, cpu=plugin is None, gradient_accumulation_steps=cell.accumulation,
        step_scheduler_with_optimizer=True,
        parallelism_config=ParallelismConfig(tp_size=cell.tensor) if cell.plugin else None,
    )  # fmt: skip
    model = build(TrainerCell())
    loader = DataLoader(Texts(cell.rows), batch_size=2 * cell.tensor, shuffle=False)
    ranks = accelerator.num_processes
    if cell.dummy and plugin is not None:
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler: Any = DummyScheduler(optimizer, warmup_num_steps=3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        # accelerate steps a schedule once a rank, so the curve is stretched; DeepSpeed's warm-up begins a step later.
        late = ranks if cell.dummy else 0
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, max(0, step - late) / (3 * ranks))
        )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "again": [], "engine": type(model).__module__}

    def steps(first: int, last: int, losses: list[float]) -> None:
        norm, done = None, 0
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if first < done <= last or (done == first and not accelerator.sync_gradients):
                losses.append(float(accelerator.gather(loss.detach()[None]).mean()))
            if accelerator.sync_gradients and norm is not None and first < done <= last and losses is found["losses"]:
                found["norms"].append(float(norm))
                found["rates"].append(float(optimizer.param_groups[0]["lr"]))
            if done == 2 and accelerator.sync_gradients and cell.saves and losses is found["losses"]:
                accelerator.save_state(f"{folder}/state")
            if done == last:
                break

    steps(0, STEPS, found["losses"])
    found["sum"] = digest(accelerator, model)
    if cell.saves:
        accelerator.load_state(f"{folder}/state")
        # The loader begins again, so the batches of the first two steps are passed over.
        loader = accelerator.skip_first_batches(loader, 2 * cell.accumulation)
        steps(0, STEPS - 2, found["again"])
        found["sum_again"] = digest(accelerator, model)
    if hasattr(model, "close"):
        model.close()
    return found


def digest(accelerator: Accelerator, model: torch.nn.Module) -> list[float] | None:
    """Return numbers that tell the weights apart, on rank 0."""
    state = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return None
    return [float(value.double().square().sum()) for _, value in sorted(state.items())]


def main() -> None:
    """Run all cells."""
    for given in json.loads(sys.argv[1]):
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            if dist.is_initialized():
                dist.broadcast_object_list(shared)
            try:
                found = run(Cell(**given), shared[0])
            except Exception:
                found = {"error": traceback.format_exc()}
            if dist.is_initialized():
                dist.barrier()
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
