"""Fine-tune a transformers model from a local folder, whole or by LoRA, with its state on the tiers of a configuration.

    python examples/make_small_model.py small                    a folder to try it with
    python examples/finetune_hf.py small                         all weights, everything on NVMe
    python examples/finetune_hf.py small --lora                  adapters by peft; other weights stay as they are
    torchrun --nproc-per-node 2 examples/finetune_hf.py small --lora

The folder holds config.json, safetensors and a tokenizer, as `save_pretrained` or a download leaves it. Its weights go
straight to their tiers, so that it may be larger than the memory. The model is evaluated on held-out text before,
between and after; at the end it continues a prompt. The run folder receives `result.json` and the tuned weights (with
`--lora` the adapters) in `model`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pydoc_data.topics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import AutoTokenizer

import infinity

HERE = Path(__file__).resolve().parent


class Windows(Dataset):
    """Windows of consecutive tokens; input and labels are the same."""

    def __init__(self, ids: Tensor, positions: int) -> None:
        self.ids = ids
        self.positions = positions

    def __len__(self) -> int:
        return len(self.ids) // self.positions

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.ids[index * self.positions : (index + 1) * self.positions]
        return {"input_ids": window, "labels": window}


def load_text(path: str | None) -> str:
    """A file, or the documentation topics in the standard library."""
    if path:
        return Path(path).read_text()
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def load_config(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The configuration file with the command line's values in it, and where its learning rate comes from."""
    config = json.loads(Path(args.config or HERE / "configs" / "demo.json").read_text())
    params = config.setdefault("optimizer", {"type": "AdamW"}).setdefault("params", {})
    # A schedule may name the rate that it rises to, and then that one counts.
    schedule = (config.get("scheduler") or {}).get("params", {})
    peaks = [name for name in ("warmup_max_lr", "cycle_max_lr") if name in schedule]
    written = [value for value in (*map(schedule.get, peaks), params.get("lr")) if value not in (None, "auto")]
    if args.lr is not None:
        rate, source = args.lr, "--lr"
    elif args.config and written:
        rate, source = written[0], args.config
    else:
        rate, source = 1e-2 if args.lora else 1e-3, "this example's default"
    params["lr"] = rate
    schedule.update(dict.fromkeys(peaks, rate))
    if args.nvme_path:
        for section in ("offload_param", "offload_optimizer"):
            offload = config.get("zero_optimization", {}).get(section) or {}
            if offload.get("device") in ("nvme", "auto"):
                offload["nvme_path"] = args.nvme_path
    return config, source


def with_adapters(model: Any, rank: int) -> Any:
    """Small trained matrices beside every linear layer; everything else is frozen."""
    return peft.get_peft_model(
        model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def held_out_loss(engine: Any, batches: list[dict[str, Tensor]]) -> float:
    """Mean loss in nats per token over text that is never trained on. Every rank takes part."""
    engine.eval()
    with torch.no_grad():
        losses = [engine(**batch).loss.item() for batch in batches]
    engine.train()
    return sum(losses) / len(losses)


def cycle(loader: Any) -> Iterator[dict[str, Tensor]]:
    """Batches without end, one pass over the data after the other, each in an order of its own."""
    while True:
        yield from loader


def train(engine: Any, loader: Any, held_out: list[dict[str, Tensor]], args: argparse.Namespace) -> dict[str, Any]:
    """`args.steps` optimizer steps, with an evaluation before, every `args.eval_every` and after."""
    saved = args.run_dir / "checkpoints"
    _, seen = engine.resume(saved) if args.resume else (None, {})
    losses: list[float] = seen.get("losses", [])
    held_out_losses = dict(seen.get("held_out", ())) or {0: held_out_loss(engine, held_out)}
    batches = cycle(loader)
    steps = range(engine.global_steps + 1, args.steps + 1)
    progress = tqdm(steps, unit="step", disable=engine.global_rank > 0, mininterval=0.5)
    for step in progress:
        loss_sum = 0.0
        for batch in itertools.islice(batches, engine.gradient_accumulation_steps()):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            loss_sum += loss.item()
        losses.append(loss_sum / engine.gradient_accumulation_steps())
        if step % args.eval_every == 0 or step == args.steps:
            held_out_losses[step] = held_out_loss(engine, held_out)
        if args.save_every and step % args.save_every == 0:
            state = {"losses": losses, "held_out": list(held_out_losses.items())}
            engine.save_checkpoint(saved, client_state=state)
        progress.set_postfix_str(f"loss {losses[-1]:.3f}, held out {list(held_out_losses.values())[-1]:.3f} nats/token")
    return {"losses": losses, "held_out": held_out_losses}


def continue_text(engine: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """What the model makes of a prompt, taking the likeliest token each time. Every rank takes part."""
    engine.eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(engine.device)
    ids = engine.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    engine.train()
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config.json, safetensors and a tokenizer")
    parser.add_argument("--lora", action="store_true", help="train adapters (peft) instead of all weights")
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--config", help="configuration (JSON; default: examples/configs/demo.json)")
    parser.add_argument("--data", help="text file to train on instead of Python's documentation")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--seq", type=int, default=128, help="tokens in a window")
    parser.add_argument("--lr", type=float, help="learning rate (default: that of --config; 1e-3, with --lora 1e-2)")
    parser.add_argument("--prompt", default="The class of an object")
    parser.add_argument("--tokens", type=int, default=40, help="tokens to continue the prompt by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nvme-path", help="folder for the NVMe tier, instead of the configuration's")
    parser.add_argument("--run-dir", type=Path, help="folder for results (default: runs/<model>)")
    parser.add_argument("--save-every", type=int, default=0, help="steps between two checkpoints in the run folder")
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint there, if any")
    args = parser.parse_args(argv)
    args.run_dir = args.run_dir or Path("runs") / (Path(args.model).name + ("-lora" if args.lora else ""))
    return args


def main(argv: list[str] | None = None) -> None:
    """Fine-tune, and report what happened."""
    args = parse(argv)
    torch.manual_seed(args.seed)
    config, source = load_config(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = torch.tensor(tokenizer(load_text(args.data), return_attention_mask=False)["input_ids"])
    # The last twentieth is held out: neighbours of a window would give it away.
    cut = len(ids) * 19 // 20
    training, held_out = Windows(ids[:cut], args.seq), Windows(ids[cut:], args.seq)
    if not training or not held_out:
        raise SystemExit(f"the text has {len(ids)} tokens: too short for windows of {args.seq}")
    model = infinity.load_hf(args.model, config)
    if args.lora:
        model = with_adapters(model, args.lora_rank)
    engine, _, loader, _ = infinity.initialize(model=model, config=config, training_data=training)
    with engine:
        first = engine.global_rank == 0
        if first:
            tqdm.write(engine.plan.explain())
            tqdm.write(f"learning rate {config['optimizer']['params']['lr']}, from {source}")
        held_out_batches = [
            {name: tensor.to(engine.device) for name, tensor in batch.items()}
            for batch in itertools.islice(DataLoader(held_out, batch_size=16), 4)
        ]
        began = time.perf_counter()
        result = train(engine, loader, held_out_batches, args)
        result["seconds"] = time.perf_counter() - began
        result["text"] = continue_text(engine, tokenizer, args.prompt, args.tokens)
        result["memory_peak"] = engine.memory().peak
        engine.export(args.run_dir / "model", engine.config.compute_dtype, tokenizer=tokenizer)
    if first:
        report(args, model, result)


def report(args: argparse.Namespace, model: Any, result: Any) -> None:
    """Write what happened into the run folder and print the summary."""
    told = {"arguments": {name: str(value) for name, value in vars(args).items()}, **result}
    (args.run_dir / "result.json").write_text(json.dumps(told, indent=2))
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    total = sum(param.numel() for param in model.parameters())
    before, *_, after = result["held_out"].values()
    print(f"trained {trained:,} of {total:,} parameters in {result['seconds']:.0f} s")
    print(f"held-out loss {before:.3f} -> {after:.3f} nats per token after {args.steps} steps")
    print(f"continued: {result['text']!r}")
    print(f"results and {'adapters' if args.lora else 'weights'} in {args.run_dir}{os.sep}")


if __name__ == "__main__":
    main()
