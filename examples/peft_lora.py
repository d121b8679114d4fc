"""LoRA with peft and transformers' Trainer: the frozen model lies in CPU memory or on a drive, adapters are trained.

    infinity run --as-deepspeed examples/peft_lora.py --model path/to/model --data text.txt
    infinity run --as-deepspeed examples/peft_lora.py --tiny                     a tiny model, without a download

Nothing in this file names infinity. The adapters are saved as peft saves them: `PeftModel.from_pretrained` loads them,
and `merge_and_unload` adds them to the model's weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl_sft import SENTENCES, ds_config, make_tiny


class Windows(torch.utils.data.Dataset):
    """Windows of consecutive tokens of a text."""

    def __init__(self, ids: torch.Tensor, length: int) -> None:
        self.rows = ids[: len(ids) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index].clone()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local folder, or a name on the Hub")
    parser.add_argument("--tiny", action="store_true", help="make a tiny model instead, and train it on nine sentences")
    parser.add_argument("--data", help="a text file to train on")
    parser.add_argument("--length", type=int, default=16, help="tokens in a window")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--drive", help="folder on an NVMe drive for weights and states (default: CPU memory)")
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bf16")
    parser.add_argument("--out", type=Path, default=Path("runs/peft_lora"))
    # The launcher passes it; torch and transformers read the environment.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if bool(args.model) == args.tiny:
        parser.error("pass either --model or --tiny")
    return args


def main() -> None:
    args = parse()
    # Before the model: `from_pretrained` looks whether there is a configuration for stage 3.
    config = TrainingArguments(
        output_dir=str(args.out), deepspeed=ds_config(args.drive), max_steps=args.steps, learning_rate=args.lr,
        per_device_train_batch_size=2, bf16=not args.fp32, logging_steps=5, report_to=[], save_strategy="no",
    )  # fmt: skip
    folder = make_tiny(args.out / "tiny") if args.tiny else args.model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = Path(args.data).read_text() if args.data else " ".join(SENTENCES * 20)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    model.print_trainable_parameters()
    trainer = Trainer(model=model, args=config, train_dataset=Windows(ids, args.length))
    trainer.train()
    trainer.save_model(str(args.out / "adapters"))


if __name__ == "__main__":
    main()
