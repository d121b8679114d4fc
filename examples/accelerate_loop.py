"""A training loop with Hugging Face's accelerate as it is: nothing here names infinity.

    python examples/make_small_model.py small
    infinity run --as-deepspeed examples/accelerate_loop.py --model small --deepspeed examples/configs/trainer_nvme.json

After two thirds of the steps the whole state is saved in --state; `--resume` goes on from there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, skip_first_batches
from accelerate.utils import set_seed
from texts import Windows, load_text
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or name of a causal language model")
    parser.add_argument("--deepspeed", required=True, help="configuration (JSON)")
    parser.add_argument("--data", help="text file (default: Python's documentation)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank and micro-batch")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--state", default="runs/accelerate")
    parser.add_argument("--resume", action="store_true")
    # DeepSpeed's launcher, and infinity in its place, pass it.
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args()


def main() -> None:
    """Train, save, and print the losses."""
    args = parse()
    set_seed(0)
    config = json.loads(Path(args.deepspeed).read_text())
    config |= {"gradient_accumulation_steps": args.accumulation, "gradient_clipping": 1.0, "bf16": {"enabled": True}}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(load_text(args.data), return_tensors="pt")["input_ids"][0]
    loader = DataLoader(Windows(ids, args.positions), batch_size=args.batch, shuffle=True)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # accelerate steps the schedule once a rank.
    schedule = get_cosine_schedule_with_warmup(
        optimizer, 3 * accelerator.num_processes, args.steps * accelerator.num_processes
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    step = 0
    if args.resume:
        accelerator.load_state(args.state)
        step = 2 * args.steps // 3
        loader = skip_first_batches(loader, step * args.accumulation)
    while step < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % 5 == 0:
                accelerator.print(f"step {step}: loss {accelerator.gather(loss.detach()[None]).mean().item():.4f}")
            if step == 2 * args.steps // 3:
                accelerator.save_state(args.state)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
