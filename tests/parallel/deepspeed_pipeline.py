"""A program written for DeepSpeed's pipelines: a small language model in layers. `infinity.deepspeed` is `deepspeed`.

    infinity run --nproc 2 tests/parallel/deepspeed_pipeline.py --pipeline-parallel-size 2 --stage 3 --offload nvme

It prints the losses of its steps and of evaluation as JSON, in hexadecimal digits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from infinity.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.utils.data import Dataset

import infinity.deepspeed as deepspeed

WORDS, WIDTH, LENGTH, SAMPLES = 64, 32, 12, 256


class Texts(Dataset):
    """Sentences in which each word follows from the one before."""

    def __init__(self) -> None:
        starts = torch.randint(WORDS, (SAMPLES, 1), generator=torch.Generator().manual_seed(1))
        self.texts = (starts * 3 ** torch.arange(LENGTH + 1) + torch.arange(LENGTH + 1)) % WORDS

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.texts[index, :-1], self.texts[index, 1:]


class EmbeddingPipe(nn.Embedding):
    """Words and their mask, which goes through all blocks."""

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        later = torch.ones(words.shape[1], words.shape[1]).triu(1)
        return super().forward(words), later.bool()


class BlockPipe(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = inputs
        normed = self.before(hidden)
        hidden = hidden + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return hidden + self.outer(F.gelu(self.inner(self.behind(hidden)))), mask


def logits_of(embedding: nn.Embedding, hidden: Tensor) -> Tensor:
    """The embedding as the head."""
    return F.linear(hidden, embedding.weight)


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the words behind."""
    return F.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def layers_of(args: argparse.Namespace) -> list[Any]:
    """The model's layers."""
    embedding: list[Any] = [LayerSpec(EmbeddingPipe, WORDS, WIDTH)]
    head: list[Any] = [LayerSpec(nn.Linear, WIDTH, WORDS, bias=False)]
    if args.tied:
        embedding = [TiedLayerSpec("embed", EmbeddingPipe, WORDS, WIDTH)]
        head = [TiedLayerSpec("embed", EmbeddingPipe, WORDS, WIDTH, forward_fn=logits_of)]
    blocks = [LayerSpec(BlockPipe, WIDTH) for _ in range(args.layers)]
    return [*embedding, *blocks, lambda inputs: inputs[0], LayerSpec(nn.LayerNorm, WIDTH), *head]


def config_of(args: argparse.Namespace, drive: str) -> dict[str, Any]:
    """The configuration of DeepSpeed's keys."""
    zero: dict[str, Any] = {"stage": args.stage, "stage3_param_persistence_threshold": 0}
    if args.offload != "none":
        place = {"device": args.offload, **({"nvme_path": drive} if args.offload == "nvme" else {})}
        zero["offload_optimizer"] = place
        if args.stage == 3:
            zero["offload_param"] = place
    return {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": args.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-6}},
        "gradient_clipping": 1.0, "bf16": {"enabled": args.bf16}, "zero_optimization": zero, "steps_per_print": 2000,
        "parallel": {"schedule": args.schedule, "virtual_stages": args.virtual_stages} if args.schedule else {},
    }  # fmt: skip


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("-s", "--steps", type=int, default=4)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--offload", choices=("none", "cpu", "nvme"), default="none")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--partition-method", default="parameters")
    parser.add_argument("--interval", type=int, default=0)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--schedule", default="")
    parser.add_argument("--virtual-stages", type=int, default=1)
    return parser.parse_args(words)


def train(words: Sequence[str] | None = None, drive: str | None = None) -> dict[str, Any]:
    """Train as the command line says; return the losses and the rank."""
    args = arguments(words)
    deepspeed.init_distributed()
    torch.manual_seed(7)
    net = PipelineModule(
        layers=layers_of(args), loss_fn=loss_of, num_stages=args.pipeline_parallel_size,
        partition_method=args.partition_method, activation_checkpoint_interval=args.interval,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        engine, _, _, _ = deepspeed.initialize(
            args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad],
            training_data=Texts(), config=config_of(args, drive or folder),
        )  # fmt: skip
        with engine:
            assert isinstance(engine, deepspeed.PipelineEngine)
            losses = [engine.train_batch().item() for _ in range(args.steps)]
            held_out = engine.eval_batch(islice(engine.training_dataloader, args.micro_batches))
            told = {"losses": [loss.hex() for loss in losses], "held out": float(held_out).hex()}
            return {**told, "rank": engine.global_rank}


if __name__ == "__main__":
    found = train()
    if found.pop("rank") == 0:
        print(json.dumps(found))
