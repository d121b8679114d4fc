"""Runs of transformers' Trainer, unchanged, in one process a rank; prints each one's losses as a line of JSON.

    infinity run --as-deepspeed --nproc 2 -m tests.support.clients_without_cuda -m tests.clients.trainer_cells CELLS

CELLS is a JSON list of objects with the fields of `Cell`, or a file that holds one; a cell without a stage is plain
Trainer, by DDP.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

LENGTH = 16
VOCABULARY = 96


@dataclass
class Cell:
    """One run.

    stage: None for plain Trainer. offload: of parameters at stage 3, of states at all. in_file: whether the file names
    the optimizer, or Trainer makes it. arguments: of TrainingArguments. keys: of the file. folder: where it saves, and
    which is kept; None for one that is removed. resume: name of the checkpoint there to go on from. acts: what to do in
    order: "train", "evaluate", "predict", "save" (and read what was saved), "engine" (another Trainer with the same
    model). rows: of the data. sequence: ranks that share each sequence. uneven: samples have positions, and labels that
    begin later in some; Trainer takes the mean over micro-batches, as it does along a sequence axis. order: of the
    data's rows; None for Trainer's own.
    """

    stage: int | None = None
    offload: str = "none"
    in_file: bool = False
    tied: bool = False
    folder: str | None = None
    resume: str | None = None
    acts: tuple[str, ...] = ("train",)
    rows: int = 64
    sequence: int = 1
    uneven: bool = False
    order: list[int] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)


class Texts(torch.utils.data.Dataset):
    """Sequences of numbers with a pattern, the same in every process."""

    def __init__(self, count: int = 64, seed: int = 3, *, uneven: bool = False) -> None:
        draws = torch.Generator().manual_seed(seed)
        start = torch.randint(0, VOCABULARY, (count, 1), generator=draws)
        step = torch.randint(1, 5, (count, 1), generator=draws)
        self.rows = (start + step * torch.arange(LENGTH)) % VOCABULARY
        self.uneven = uneven

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {"input_ids": self.rows[index], "labels": self.rows[index].clone()}
        if self.uneven:
            row["position_ids"] = torch.arange(LENGTH)
            row["labels"][: 5 * (index % 4)] = -100
        return row


class Ordered(Trainer):
    """Trainer with an order of rows that is given."""

    order: list[int] | None = None

    def _get_train_sampler(self, *given: Any) -> Any:
        return self.order or super()._get_train_sampler(*given)


def build(cell: Cell) -> LlamaForCausalLM:
    """Return the model, the same weights in every run."""
    set_seed(11)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=cell.tied, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def ds_config(cell: Cell, folder: str) -> dict[str, Any]:
    """Return the configuration as a Trainer user has it."""
    zero: dict[str, Any] = {"stage": cell.stage}
    if cell.offload != "none":
        place = {"device": cell.offload, **({"nvme_path": folder} if cell.offload == "nvme" else {})}
        zero["offload_optimizer"] = place
        if cell.stage == 3:
            zero["offload_param"] = place
    if cell.stage == 3:
        zero.update(
            stage3_prefetch_bucket_size="auto", stage3_param_persistence_threshold="auto", reduce_bucket_size="auto",
            stage3_gather_16bit_weights_on_model_save=True,
        )  # fmt: skip
    config: dict[str, Any] = {
        "zero_optimization": zero, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "wall_clock_breakdown": False, **cell.keys,
    }  # fmt: skip
    if cell.in_file:
        config["optimizer"] = {
            "type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        }  # fmt: skip
    return config


class Seen(TrainerCallback):
    """Keeps what Trainer logs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.rows.append(dict(logs))


def train(cell: Cell, folder: str) -> dict[str, Any]:
    """Run one cell and return its losses, norms and rates."""
    forget()
    # Texts are the same, so are their batches: plain Trainer and DDP draw them in the same order.
    arguments: dict[str, Any] = {
        "output_dir": folder, "max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 5,
        "dataloader_pin_memory": False, "lr_scheduler_type": "linear", "warmup_steps": 2, "max_grad_norm": 1.0,
        **sequence_axis(cell.sequence), **cell.arguments,
    }  # fmt: skip
    if cell.stage is not None:
        arguments["deepspeed"] = ds_config(cell, folder)
    else:
        arguments["use_cpu"] = True
    # Trainer's user makes the arguments first: they hold what `from_pretrained` reads.
    given = TrainingArguments(**arguments)
    seen = Seen()
    model = build(cell)
    found: dict[str, Any] = {"acts": []}

    def trainer_of() -> Trainer:
        made = Ordered(
            model=model, args=given, train_dataset=Texts(cell.rows, uneven=cell.uneven), eval_dataset=Texts(16, 4),
            callbacks=[seen],
        )  # fmt: skip
        made.order = cell.order
        if cell.uneven:
            made.model_accepts_loss_kwargs = False
        return made

    trainer = trainer_of()
    for act in cell.acts:
        if act == "train":
            trainer.train(resume_from_checkpoint=os.path.join(folder, cell.resume) if cell.resume else None)
        elif act == "evaluate":
            found["acts"].append(trainer.evaluate()["eval_loss"])
        elif act == "predict":
            found["acts"].append(trainer.predict(Texts(16, 4)).metrics["test_loss"])
        elif act == "save":
            trainer.save_model(os.path.join(folder, "saved"))
            if dist.is_initialized():
                dist.barrier()
            found["acts"].append(loss_of(os.path.join(folder, "saved")))
        elif act == "engine":
            AcceleratorState._reset_state(True)
            trainer = trainer_of()
    found |= {
        "losses": [row["loss"] for row in seen.rows if "loss" in row],
        "rates": [row["learning_rate"] for row in seen.rows if "learning_rate" in row],
        "norms": [row["grad_norm"] for row in seen.rows if "grad_norm" in row],
        "evals": [row["eval_loss"] for row in seen.rows if "eval_loss" in row],
        "best": trainer.state.best_model_checkpoint and os.path.basename(trainer.state.best_model_checkpoint),
        "engine": type(trainer.model_wrapped).__module__,
    }
    if hasattr(trainer.model_wrapped, "close"):
        trainer.model_wrapped.close()
    return found


def sequence_axis(size: int) -> dict[str, Any]:
    """Return the argument by which so many ranks share each sequence; none for one."""
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    rest = int(os.environ.get("WORLD_SIZE", "1")) // size
    axes = ParallelismConfig(sp_size=size, dp_shard_size=rest, sp_handler=handler)
    return {"parallelism_config": axes} if size > 1 else {}


def forget() -> None:
    """Forget the run before: accelerate and transformers keep it in the process and in its environment."""
    AcceleratorState._reset_state(True)
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def loss_of(folder: str) -> float:
    """Return the loss of a saved model, read as plain transformers does."""
    unset_hf_deepspeed_config()
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    texts = Texts(16, 4)
    with torch.no_grad():
        return float(model(input_ids=texts.rows, labels=texts.rows).loss)


def main() -> None:
    """Run all cells."""
    text = sys.argv[1] if sys.argv[1].startswith("[") else Path(sys.argv[1]).read_text()
    for index, given in enumerate(json.loads(text)):
        cell = Cell(**given)
        # The same on every rank: rank 0 saves, and all read.
        folder = cell.folder or os.path.join(os.environ["CLIENT_FOLDER"], str(index))
        os.makedirs(folder, exist_ok=True)
        try:
            found = train(cell, folder)
        except Exception:
            found = {"error": traceback.format_exc()}
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
