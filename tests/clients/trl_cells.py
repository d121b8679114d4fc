"""Runs of TRL's trainers, unchanged, in one process a rank; prints what each one saw as a line of JSON.

    infinity run --as-deepspeed --no_local_rank --nproc 2 -m tests.support.clients_without_cuda \\
        -m tests.clients.trl_cells CELLS

CELLS is a JSON list of objects with the fields of `Cell`. A cell without a stage is plain TRL, by DDP with several
ranks. Model, tokenizer and data are made here: nothing is downloaded.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import datasets
import torch
import torch.distributed as dist
import transformers
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.distributed import DistributedBackend
from trl.models.utils import unwrap_model_for_generation

WORDS = [f"w{number}" for number in range(60)]
datasets.disable_progress_bars()


@dataclass
class Cell:
    """One run. stage: None for plain TRL. offload: of parameters and states. by_path: whether the trainer loads the
    model, or is given it. width: of the model. sequence: ranks that share each. arguments: of the trainer's
    configuration. keys: of DeepSpeed's file.
    """

    trainer: str
    stage: int | None = None
    offload: str = "none"
    lora: bool = False
    by_path: bool = False
    width: int = 32
    sequence: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one that knows 60 words."""
    known = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(start: int, step: int, count: int) -> str:
    """Return words that follow a pattern."""
    return " ".join(WORDS[(start + step * number) % len(WORDS)] for number in range(count))


def make_model(folder: Path, width: int) -> None:
    """Write a model and its tokenizer, the same weights in every run."""
    transformers.set_seed(11)
    config = LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager", pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()


def rows(trainer: str) -> datasets.Dataset:
    """Return the examples that a trainer takes."""
    if trainer == "sft":
        found = [{"text": text(number, 1 + number % 4, 12)} for number in range(32)]
    elif trainer == "dpo":
        found = [
            {"prompt": text(number, 1, 4) + " ", "chosen": text(number + 4, 1, 5), "rejected": text(number, 3, 5)}
            for number in range(32)
        ]
    else:
        found = [{"prompt": text(number, 1 + number % 4, 4)} for number in range(32)]
    return datasets.Dataset.from_list(found)


def even_words(completions: list[str], **others: Any) -> list[float]:
    """Reward completions for words with an even number."""
    return [float(sum(int(word[1:]) % 2 == 0 for word in each.split() if word[0] == "w")) for each in completions]


def ds_config(cell: Cell, folder: Path) -> dict[str, Any]:
    """Return the configuration as a TRL user has it."""
    zero: dict[str, Any] = {"stage": cell.stage}
    if cell.offload != "none":
        place = {"device": cell.offload, "nvme_path": str(folder)}
        zero["offload_optimizer"] = place
        if cell.stage == 3:
            zero["offload_param"] = place
    if cell.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "zero_optimization": zero, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, **cell.keys,
    }  # fmt: skip


class Seen(transformers.TrainerCallback):
    """Keeps what the trainer logs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.rows.append(dict(logs))

    def column(self, name: str) -> list[float]:
        """Return one value of every step."""
        return [row[name] for row in self.rows if name in row]


def make_trainer(cell: Cell, folder: Path, seen: Seen) -> Any:
    """Return the trainer of a cell, as a user writes it."""
    model = str(folder / "model")
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "out"), "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 5, "bf16": False,
        "dataloader_pin_memory": False, **cell.arguments,
    }  # fmt: skip
    if cell.stage is not None:
        arguments["deepspeed"] = ds_config(cell, folder)
    else:
        arguments["use_cpu"] = True
    if cell.sequence > 1:
        arguments["parallelism_config"] = ParallelismConfig(sp_size=cell.sequence)
    common: dict[str, Any] = {
        "train_dataset": rows(cell.trainer), "processing_class": tokenizer(), "callbacks": [seen],
        "peft_config": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        if cell.lora else None,
    }  # fmt: skip
    if cell.trainer == "sft":
        args = SFTConfig(**{"max_length": 32, **arguments})
        return SFTTrainer(model=model if cell.by_path else load(folder), args=args, **common)
    if cell.trainer == "dpo":
        args = DPOConfig(max_length=32, **arguments)
        return DPOTrainer(model=model if cell.by_path else load(folder), args=args, **common)
    args = GRPOConfig(max_completion_length=6, num_generations=2, beta=0.1, **arguments)
    return GRPOTrainer(model=model if cell.by_path else load(folder), args=args, reward_funcs=even_words, **common)


def load(folder: Path) -> LlamaForCausalLM:
    """Return the model that `make_model` wrote."""
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def greedy(model: Any) -> list[list[int]]:
    """Return what a model makes of two prompts, taking the likeliest token each time."""
    model.eval()
    prompts = tokenizer()([text(3, 1, 4), text(8, 2, 4)], return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        made = model.generate(**prompts, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    model.train()
    return made.tolist()


def logits(model: Any) -> torch.Tensor:
    """Return a model's answer to one prompt."""
    model.eval()
    with torch.no_grad():
        return model(tokenizer()(text(3, 1, 6), return_tensors="pt")["input_ids"]).logits.float()


def saved(cell: Cell, folder: Path, trainer: Any) -> dict[str, Any]:
    """Save the model as users do, load it without DeepSpeed, and compare it with the one that was trained."""
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as whole:
        found: dict[str, Any] = {"greedy": greedy(whole)}
    trained = trainer.model_wrapped if cell.stage is not None else trainer.model
    mine = logits(trained)
    there = folder / "saved"
    trainer.save_model(str(there))
    if dist.is_initialized():
        dist.barrier()
    unset_hf_deepspeed_config()
    if cell.lora:
        loaded = PeftModel.from_pretrained(load(folder), there)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32)
    found["saved_differs"] = (logits(loaded) - mine).abs().max().item()
    found["loaded_greedy"] = greedy(loaded)
    found["weights"] = {
        name: round(value.double().norm().item(), 5)
        for name, value in loaded.named_parameters()
        if "lora_" in name or not cell.lora
    }
    if cell.lora:
        found["merged_in_place"] = merged_in_place(cell, trainer)
        merged = loaded.merge_and_unload()
        found["merged_differs"] = (logits(merged) - mine).abs().max().item()
    return found


def merged_in_place(cell: Cell, trainer: Any) -> dict[str, float]:
    """Merge the adapters as TRL does before it sends weights to another program; return norms of what it would send."""
    backend = DistributedBackend(trainer.accelerator)
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    with backend.gather_params(list(model.parameters())):
        model.merge_adapter()
        found = {
            name: round(value.double().norm().item(), 5)
            for name, value in model.named_parameters()
            if "base_layer" in name
        }
        model.unmerge_adapter()
    return found


def held(engine: Any) -> dict[str, Any]:
    """Return the bytes that a reference engine holds between two forwards, and its model's parameters on this rank."""
    whole = sum(param.numel() for param in engine.module.parameters())
    return {"now": engine.memory().now, "parameters": whole, "ranks": engine.world_size}


def offloaded(engine: Any) -> list[int]:
    """Move all states to the drive, as between two phases, and back; return bytes in memory before and meanwhile."""
    before = in_memory(engine)
    engine.offload_states(device="nvme")
    meanwhile = in_memory(engine)
    engine.reload_states()
    return [before, meanwhile]


def in_memory(engine: Any) -> int:
    """Return an engine's bytes that are not on a drive."""
    now = engine.memory().now
    return sum(now["gpu"].values()) + sum(now["cpu"].values())


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    """Run one cell and return what it saw."""
    # A configuration with `deepspeed` leaves both for the next trainer in the process.
    AcceleratorState._reset_state(True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    unset_hf_deepspeed_config()
    make_model(folder / "model", cell.width)
    seen = Seen()
    trainer = make_trainer(cell, folder, seen)
    trainer.train()
    found = {
        "trainer": cell.trainer,
        "losses": seen.column("loss"),
        "norms": seen.column("grad_norm"),
        "rewards": seen.column("reward") or seen.column("rewards/margins"),
        "engine": type(trainer.model_wrapped).__module__,
    }
    reference = getattr(trainer, "ref_model", None)
    if cell.stage is not None and reference is not None:
        found["reference"] = held(reference)
    if cell.trainer == "grpo" and cell.offload == "cpu":
        found["offloaded"] = offloaded(trainer.model_wrapped)
    found.update(saved(cell, folder, trainer))
    if cell.stage is not None:
        trainer.model_wrapped.close()
        if reference is not None:
            reference.close()
    return found


def main() -> None:
    """Run all cells."""
    shared = os.environ.get("CELLS_FOLDER")
    base = Path(shared or tempfile.gettempdir()) / f"cells-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    rank = int(os.environ.get("RANK", 0))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        # Before the trainers do it: rank 0 writes the model for all.
        dist.init_process_group("gloo")
    cells = json.loads(sys.argv[1])
    for number, given in enumerate(cells):
        folder = base / str(number)
        try:
            found = run(Cell(**given), folder)
        except Exception:
            # With several ranks the others wait for this one: the launcher ends them.
            if dist.is_initialized() and dist.get_world_size() > 1:
                raise
            found = {"error": traceback.format_exc()}
        gc.collect()
        if rank == 0:
            print(json.dumps({"cell": given, **found}), flush=True)
        if dist.is_initialized():
            dist.barrier()
    if rank == 0:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
