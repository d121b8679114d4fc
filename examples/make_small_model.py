"""Make a small language model with a tokenizer in a folder, as a download would be: for trying `finetune_hf.py`.

    python examples/make_small_model.py small
    python examples/make_small_model.py small --data my.txt --hidden 256 --layers 6

The tokenizer (byte-level BPE) is trained on the spot, on the documentation that comes with every Python or on `--data`;
the Llama model over it has random weights.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"


def load_text(path: str | None) -> str:
    """A file, or the documentation topics in the standard library."""
    if path:
        return Path(path).read_text()
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def train_tokenizer(text: str, size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `size` tokens: any text can be written in it."""
    trainer = ByteLevelBPETokenizer()
    lines = text.splitlines(keepends=True)
    trainer.train_from_iterator(lines, vocab_size=size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=trainer._tokenizer, eos_token=END, bos_token=END, pad_token=END)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--data", help="text file to train the tokenizer on instead of Python's documentation")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Write the folder."""
    args = parse(argv)
    tokenizer = train_tokenizer(load_text(args.data), args.vocabulary)
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=args.hidden * 8 // 3 // 32 * 32,
            num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.heads,
            max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    numel = sum(param.numel() for param in model.parameters())
    print(f"{numel / 1e6:.1f} M parameters and a tokenizer of {len(tokenizer)} tokens in {args.folder}")


if __name__ == "__main__":
    main()
