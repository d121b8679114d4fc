"""Supervised fine-tuning with TRL, unchanged TRL code; weights and optimizer states live in CPU memory or on a drive.

    infinity run --as-deepspeed examples/trl_sft.py --model path/to/model --data texts.jsonl
    infinity run --as-deepspeed examples/trl_sft.py --tiny                       a tiny model, without a download
    infinity run --as-deepspeed --nproc 2 examples/trl_sft.py --model path/to/model

The data is a JSON-lines file whose rows have "text", "messages", or "prompt" and "completion", as TRL reads them.
Nothing in this file names infinity: `deepspeed=` is the argument that Trainer has for DeepSpeed's configuration.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

SENTENCES = [f"the {animal} sat on the {thing}" for animal in ("cat", "dog", "bird") for thing in ("mat", "box", "log")]


def ds_config(drive: str | None) -> dict[str, Any]:
    """Return DeepSpeed's configuration: ZeRO stage 3, everything in CPU memory, or on a drive."""
    place = {"device": "nvme", "nvme_path": drive} if drive else {"device": "cpu"}
    return {
        "zero_optimization": {
            "stage": 3, "offload_param": place, "offload_optimizer": place,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        # Trainer fills these in from its own arguments.
        "bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }  # fmt: skip


def make_tiny(folder: Path) -> str:
    """Write a model of a few thousand parameters with its tokenizer, and return the folder."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    known = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(known), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local folder, or a name on the Hub")
    parser.add_argument("--tiny", action="store_true", help="make a tiny model instead, and train it on nine sentences")
    parser.add_argument("--data", help="JSON lines to train on")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--drive", help="folder on an NVMe drive for weights and states (default: CPU memory)")
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bf16")
    parser.add_argument("--out", type=Path, default=Path("runs/trl_sft"))
    # The launcher passes it; torch and transformers read the environment.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if bool(args.model) == args.tiny:
        parser.error("pass either --model or --tiny")
    return args


def load_data(path: str | None) -> datasets.Dataset:
    """Return the rows of a file, or the nine sentences many times over."""
    if path:
        return datasets.load_dataset("json", data_files=path, split="train")
    return datasets.Dataset.from_list([{"text": sentence} for sentence in SENTENCES * 20])


def main() -> None:
    args = parse()
    config = SFTConfig(
        output_dir=str(args.out), deepspeed=ds_config(args.drive), max_steps=args.steps, learning_rate=args.lr,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_length=512, bf16=not args.fp32,
        logging_steps=5, report_to=[], save_strategy="no",
    )  # fmt: skip
    # The configuration exists before the model does, so the weights go to their tiers while they are loaded.
    trainer = SFTTrainer(
        model=make_tiny(args.out / "tiny") if args.tiny else args.model, args=config, train_dataset=load_data(args.data)
    )
    trainer.train()
    trainer.save_model(str(args.out / "model"))


if __name__ == "__main__":
    main()
