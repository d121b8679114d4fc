"""transformers' Trainer as it is: nothing here names infinity. Parameters and optimizer states lie on NVMe.

    python examples/make_small_model.py small
    infinity run --as-deepspeed examples/hf_trainer.py --model small --output_dir runs/trainer --bf16 \\
        --deepspeed examples/configs/trainer_nvme.json --max_steps 40 --logging_steps 10

Every option of TrainingArguments works (--resume_from_checkpoint, --gradient_accumulation_steps, --eval_strategy ...).
`nvme_path` in the file is a folder on the drive. Trainer asks for an accelerator: without one it leaves --deepspeed
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from texts import Windows, load_text
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


@dataclass
class ScriptArguments:
    """What this script asks for beside Trainer's own options."""

    model: str = field(metadata={"help": "folder or name of a causal language model"})
    data: str | None = field(default=None, metadata={"help": "text file (default: Python's documentation)"})
    positions: int = field(default=64, metadata={"help": "tokens of a sequence"})


def main() -> None:
    """Train, evaluate, and save the tuned model."""
    # The arguments come before the model: they hold the file that `from_pretrained` reads to build it on its tiers.
    script, training = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    model = AutoModelForCausalLM.from_pretrained(script.model)
    windows = Windows(tokenizer(load_text(script.data), return_tensors="pt")["input_ids"][0], script.positions)
    held_out = max(1, len(windows) // 20)
    texts = [windows[index] for index in range(len(windows))]
    trainer = Trainer(
        model=model, args=training, train_dataset=texts[:-held_out], eval_dataset=texts[-held_out:],
        processing_class=tokenizer, data_collator=default_data_collator,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"held-out loss {metrics['eval_loss']:.3f}; saved in {training.output_dir}")


if __name__ == "__main__":
    main()
