"""Train a Llama-style language model on bytes of English text, with its state on the tiers that a configuration names.

    python examples/train_lm.py                                  parameters and optimizer states on NVMe
    python examples/train_lm.py --config my.json --data my.txt
    python examples/train_lm.py --hf path/to/config.json         an unmodified transformers model
    torchrun --nproc-per-node 2 examples/train_lm.py --config examples/configs/two_ranks.json

Without `--data` the text is the documentation that comes with every Python (`pydoc_data.topics`). The loss is in nats
per byte: a model that knows nothing has ln 256 = 5.55. The run folder receives the losses, the memory by tier and a
picture of both.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import pydoc_data.topics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

import infinity

HERE = Path(__file__).resolve().parent
VOCABULARY = 256


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-5)


def rotate(x: Tensor) -> Tensor:  # [batch, heads, positions, head_dim]
    """Rotary position embedding: pairs of features turn by an angle that grows with the position."""
    positions, head_dim = x.shape[-2:]
    rates = 10_000 ** (-torch.arange(0, head_dim, 2, device=x.device) / head_dim)
    angles = torch.outer(torch.arange(positions, device=x.device), rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = 32 * math.ceil(dim * 8 / 3 / 32)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.feed_forward_norm = RMSNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class ByteLM(nn.Module):
    """A Llama-style model over bytes. Returns the mean loss in nats per byte."""

    def __init__(self, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.apply(_initialize)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class Windows(Dataset):
    """Windows of consecutive bytes, as a causal language model takes them: input and labels are the same."""

    def __init__(self, text: bytes, positions: int) -> None:
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.positions = positions

    def __len__(self) -> int:
        return len(self.ids) // self.positions

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.ids[index * self.positions : (index + 1) * self.positions]
        return {"input_ids": window, "labels": window}


def load_text(path: str | None) -> bytes:
    """The bytes of a file, or of the documentation topics in the standard library."""
    if path:
        return Path(path).read_bytes()
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def load_config(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration file, with the command line's values in it."""
    config = json.loads(Path(args.config).read_text())
    if args.batch:
        config["train_micro_batch_size_per_gpu"] = args.batch
        config.pop("train_batch_size", None)
    if args.nvme_path:
        for section in ("offload_param", "offload_optimizer"):
            offload = config.get("zero_optimization", {}).get(section) or {}
            if offload.get("device") in ("nvme", "auto"):
                offload["nvme_path"] = args.nvme_path
    # The length of a window, so that activations are known at the start.
    config.setdefault("memory", {}).setdefault("activations", {}).setdefault("sequence_length", args.seq)
    return config


def build_model(args: argparse.Namespace) -> nn.Module:
    """The example's own model, or an unmodified transformers one from its configuration file."""
    if not args.hf:
        return ByteLM(args.dim, args.layers, args.heads)
    model_config = AutoConfig.from_pretrained(args.hf)
    if model_config.vocab_size < VOCABULARY:
        raise SystemExit(f"{args.hf}: vocab_size is {model_config.vocab_size}, but bytes need {VOCABULARY}")
    model_config.use_cache = False
    return AutoModelForCausalLM.from_config(model_config)


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returns: transformers returns it with other things."""
    return output if isinstance(output, Tensor) else output.loss


def held_out_loss(engine: Any, batches: list[dict[str, Tensor]]) -> float:
    """Mean loss over batches that are never trained on."""
    engine.eval()
    with torch.no_grad():
        losses = [loss_of(engine(**batch)).item() for batch in batches]
    engine.train()
    return sum(losses) / len(losses)


def cycle(loader: Any) -> Iterator[dict[str, Tensor]]:
    """Batches without end, one pass over the data after the other, each in an order of its own."""
    while True:
        yield from loader


def tier_nbytes(engine: Any) -> dict[str, int]:
    """Bytes that this rank's engine holds now, by tier."""
    return {tier: sum(kinds.values()) for tier, kinds in engine.memory().now.items()}


def offload_files(engine: Any) -> list[dict[str, Any]]:
    """Files under the engine's NVMe paths: their bytes on the drive, and whether O_DIRECT moves them."""
    files = {file for path in engine.config.nvme_path or () for file in Path(path).rglob("*") if file.is_file()}
    return [
        {"path": str(file), "nbytes": file.stat().st_blocks * 512, "direct": opened_direct(file)}
        for file in sorted(files)
    ]


def opened_direct(file: Path) -> bool:
    """Whether this process has `file` open past the page cache, as the kernel sees it."""
    flags = [
        int((Path("/proc/self/fdinfo") / link.name).read_text().split("flags:")[1].split()[0], 8)
        for link in Path("/proc/self/fd").iterdir()
        if link.exists() and link.resolve() == file.resolve()
    ]
    return any(flag & os.O_DIRECT for flag in flags)


def train(engine: Any, loader: Any, args: argparse.Namespace, quiet: bool) -> list[float]:
    """`args.steps` optimizer steps; returns this rank's loss at each."""
    losses = []
    batches = cycle(loader)
    accumulation = engine.gradient_accumulation_steps()
    tokens = engine.train_batch_size() * args.seq
    progress = tqdm(range(args.steps), unit="step", disable=quiet, mininterval=0.5)
    for _ in progress:
        began = time.perf_counter()
        loss_sum = 0.0
        for batch in itertools.islice(batches, accumulation):
            loss = loss_of(engine(**batch))
            engine.backward(loss)
            engine.step()
            loss_sum += loss.item()
        losses.append(loss_sum / accumulation)
        speed = tokens / (time.perf_counter() - began)
        names = {"gpu": "gpu" if engine.device.type == "cuda" else f"device ({engine.device.type})"}
        tiers = " ".join(f"{names.get(tier, tier)} {nbytes / 1e6:.0f}" for tier, nbytes in tier_nbytes(engine).items())
        progress.set_postfix_str(f"loss {losses[-1]:.3f} nats/byte, {speed:,.0f} tokens/s, MB on {tiers}")
    return losses


def draw(path: Path, losses: list[float], held_out: tuple[float, float], memory: dict[str, dict[str, int]]) -> None:
    """The loss curve, and beside it the memory by tier and kind at its peak, in the colours of all of our pictures."""
    palette = infinity.palette
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses, color=palette.CURVE, label="training batches")
    left.plot([0, len(losses)], held_out, "o", color=palette.COMPARED, clip_on=False, label="held out")
    chance = math.log(VOCABULARY)
    left.axhline(chance, color=palette.FAINT, linestyle="--", linewidth=1, label="knowing nothing: ln 256")
    left.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title="Loss", ylim=(0, None))
    left.legend(frameon=False)
    tiers = list(memory)
    names = [palette.TIERS[tier] for tier in tiers]
    kinds = [kind for kind in palette.KINDS if any(kind in held for held in memory.values())]
    base = [0.0] * len(tiers)
    for kind in kinds:
        look = palette.KINDS[kind]
        sizes = [memory[tier].get(kind, 0) / 1e6 for tier in tiers]
        right.bar(names, sizes, bottom=base, label=look.label, color=look.colour, edgecolor=palette.PAPER)
        base = [below + size for below, size in zip(base, sizes, strict=True)]
    for at, total in enumerate(base):
        right.annotate(f"{total:,.0f}", (at, total), ha="center", va="bottom")
    right.set(ylabel="MB held by rank 0, each kind at its peak", title="Memory by tier")
    right.margins(y=0.1)
    if kinds:
        # The topmost of a stack stands at the top of the legend, which has a place of its own.
        right.legend(frameon=False, reverse=True, loc="upper left", bbox_to_anchor=(1, 1))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(HERE / "configs" / "demo.json"), help="configuration (JSON)")
    parser.add_argument("--data", help="text file to train on instead of Python's documentation")
    parser.add_argument("--hf", metavar="CONFIG", help="train the transformers model of this config.json instead")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq", type=int, default=128, help="bytes in a window")
    parser.add_argument("--batch", type=int, help="micro-batch per rank, instead of the configuration's")
    parser.add_argument("--dim", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", action="store_true", help="build the model under infinity.Init, unit by unit")
    parser.add_argument("--nvme-path", help="folder for the NVMe tier, instead of the configuration's")
    parser.add_argument("--run-dir", help="folder for results (default: runs/<time>)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train, and report what happened."""
    args = parse(argv)
    torch.manual_seed(args.seed)
    config = load_config(args)
    text = load_text(args.data)
    # The last twentieth is held out: neighbours of a window would give it away.
    cut = len(text) * 19 // 20
    training, held_out = Windows(text[:cut], args.seq), Windows(text[cut:], args.seq)
    if not training or not held_out:
        raise SystemExit(f"the text has {len(text)} bytes: too short for windows of {args.seq}")
    with infinity.Init(config=config) if args.init else contextlib.nullcontext():
        model = build_model(args)
    engine, _, loader, _ = infinity.initialize(model=model, config=config, training_data=training)
    held_out_batches = [
        {name: tensor.to(engine.device) for name, tensor in batch.items()}
        for batch in itertools.islice(DataLoader(held_out, batch_size=16), 4)
    ]
    with engine:
        first = engine.global_rank == 0
        if first:
            tqdm.write(engine.plan.explain())
        before = held_out_loss(engine, held_out_batches)
        began = time.perf_counter()
        losses = train(engine, loader, args, quiet=not first)
        seconds = time.perf_counter() - began
        files = offload_files(engine)
        memory = engine.memory()
        after = held_out_loss(engine, held_out_batches)
    if first:
        report(args, losses=losses, held_out=(before, after), memory=memory, files=files, seconds=seconds)


def report(
    args: argparse.Namespace, *, losses: list[float], held_out: tuple[float, float], memory: Any,
    files: list[dict[str, Any]], seconds: float,
) -> None:  # fmt: skip
    """Write the run folder and print the summary."""
    folder = Path(args.run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)
    before, after = held_out
    record = {
        "arguments": vars(args), "losses": losses, "held_out_before": before, "held_out_after": after,
        "seconds": seconds, "memory_peak": memory.peak, "nvme_files": files,
    }  # fmt: skip
    (folder / "loss.json").write_text(json.dumps(record, indent=2))
    draw(folder / "loss_and_memory.png", losses, held_out, memory.peak)
    print(memory)
    for file in files:
        how = "O_DIRECT" if file["direct"] else "the page cache"
        print(f"while training, {file['path']} held {file['nbytes'] / 1e6:,.1f} MB, moved by {how}")
    print(
        f"held-out loss {before:.3f} -> {after:.3f} nats per byte ({after - before:+.3f}) after {args.steps} steps in "
        f"{seconds:.0f} s; results in {folder}{os.sep}"
    )


if __name__ == "__main__":
    main()
