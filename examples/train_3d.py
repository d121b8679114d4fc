"""Train an unmodified Llama over three axes: pipeline x data x tensor, at stage 3 with its state on NVMe.

    infinity run --nproc 8 examples/train_3d.py                  2 stages x 2 data ranks x 2 tensor ranks
    infinity run --nproc 4 examples/train_3d.py --tensor 1       2 stages x 2 data ranks
    infinity run --nproc 2 examples/train_3d.py --tensor 1 --schedule 1f1b

The text is the documentation that comes with every Python, as bytes; the loss is in nats per byte, and a model that
knows nothing has ln 256 = 5.55. One step is recorded: the page in the run folder shows the forwards and backwards of
every micro-batch on all stages, and the drive.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

HERE = Path(__file__).resolve().parent


class Windows(Dataset):
    """Windows of consecutive bytes, as a causal language model takes them."""

    def __init__(self, text: bytes, positions: int) -> None:
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.positions = positions

    def __len__(self) -> int:
        return len(self.ids) // self.positions

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.ids[index * self.positions : (index + 1) * self.positions]
        return {"input_ids": window, "labels": window}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(HERE / "configs" / "three_axes.json"), help="configuration (JSON)")
    parser.add_argument("--pipeline", type=int, help="stages, instead of the configuration's")
    parser.add_argument("--tensor", type=int, help="ranks that divide each layer, instead of the configuration's")
    parser.add_argument("--schedule", help="order of micro-batches, instead of the configuration's")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq", type=int, default=128, help="bytes in a window")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--nvme-path", help="folder for the NVMe tier, instead of the configuration's")
    parser.add_argument("--run-dir", default="runs/3d", help="folder for the losses and the timeline")
    return parser.parse_args(argv)


def load_config(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration file, with the command line's values in it."""
    config = json.loads(Path(args.config).read_text())
    for name in ("pipeline", "tensor", "schedule"):
        if getattr(args, name) is not None:
            config["parallel"][name] = getattr(args, name)
    for name in ("offload_param", "offload_optimizer") if args.nvme_path else ():
        config["zero_optimization"][name]["nvme_path"] = args.nvme_path
    return config


def main(argv: list[str] | None = None) -> None:
    """Train, and record the last step."""
    args = parse(argv)
    torch.manual_seed(0)
    topics = pydoc_data.topics.topics
    data = Windows("\n".join(topics[name] for name in sorted(topics)).encode(), args.seq)
    heads = max(args.hidden // 64, 4)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=args.hidden, intermediate_size=args.hidden * 3, num_hidden_layers=args.layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=args.seq, bos_token_id=0,
            eos_token_id=0,
        )
    )  # fmt: skip
    engine, *_ = infinity.initialize(model=model, config=load_config(args), training_data=data)
    with engine:
        first, losses = engine.global_rank == 0, []
        page = Path(args.run_dir) / "timeline.html"
        tokens = engine.train_batch_size() * args.seq
        for step in range(args.steps):
            began = time.perf_counter()
            with engine.timeline(page) if step == args.steps - 1 else contextlib.nullcontext():
                loss = engine.train_batch()
            losses.append(float(loss))
            if first:
                speed = tokens / (time.perf_counter() - began)
                print(f"step {step + 1}: {losses[-1]:.3f} nats a byte, {speed:,.0f} tokens/s", flush=True)
        tag = engine.save_checkpoint(Path(args.run_dir) / "checkpoint")
        if first:
            page.with_name("losses.json").write_text(json.dumps(losses) + "\n")
            print(f"saved as {tag}; the last step in {page}")


if __name__ == "__main__":
    main()
