"""Fine-tuning of a LLaMA with DeepSpeed's own functions, in the way that books and courses teach it.

    python examples/make_small_model.py small
    infinity run --as-deepspeed examples/deepspeed_llama.py --model small --offload --zero_stage 3

Nothing here names infinity: parameter groups without weight decay for norms and biases, the optimizer for the place
where the states are, a cosine schedule, a configuration made by a function, `deepspeed.comm` for what ranks say to each
other.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from texts import Windows, load_text
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler, set_seed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or name of a LLaMA")
    parser.add_argument("--data", help="text file (default: Python's documentation)")
    parser.add_argument("--output_dir", default="runs/llama")
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--num_warmup_steps", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--zero_stage", type=int, default=3)
    parser.add_argument("--offload", action="store_true", help="parameters and states in CPU memory")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--enable_tensorboard", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


def get_train_ds_config(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration, as a dictionary."""
    device = "cpu" if args.offload else "none"
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": args.zero_stage,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        args.dtype: {"enabled": True, **({"loss_scale_window": 100} if args.dtype == "fp16" else {})},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "release_inference_cache": False,
            "pin_parameters": True, "tp_gather_partition_size": 8,
        },  # fmt: skip
        "tensorboard": {
            "enabled": args.enable_tensorboard, "output_path": f"{args.output_dir}/tensorboard", "job_name": "llama",
        },  # fmt: skip
    }


def get_optimizer_grouped_parameters(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weights that decay, and norms and biases that do not."""
    no_decay = ("bias", "norm.weight", "layernorm.weight")
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for name, param in named if not name.endswith(no_decay)], "weight_decay": weight_decay},
        {"params": [param for name, param in named if name.endswith(no_decay)], "weight_decay": 0.0},
    ]


def evaluate(engine: Any, loader: DataLoader, device: torch.device) -> float:
    """The mean loss of all ranks."""
    engine.eval()
    total = torch.zeros(2, device=device)
    with torch.no_grad():
        for batch in loader:
            total += torch.tensor([engine(**to_device(batch, device)).loss.item(), 1.0], device=device)
    dist.all_reduce(total)
    engine.train()
    return float(total[0] / total[1])


def to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def main() -> None:
    """Train, evaluate and save."""
    args = parse()
    if args.local_rank == -1:
        device = torch.device(get_accelerator().device_name())
    else:
        device = torch.device(get_accelerator().device_name(args.local_rank))
        deepspeed.init_distributed()
    set_seed(1234)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model.config.use_cache = False
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    windows = Windows(tokenizer(load_text(args.data), return_tensors="pt")["input_ids"][0], args.positions)
    texts = [windows[index] for index in range(len(windows))]
    train, held_out = texts[:-8], texts[-8:]
    sampler = RandomSampler(train) if args.local_rank == -1 else DistributedSampler(train)
    train_loader = DataLoader(train, sampler=sampler, batch_size=args.per_device_train_batch_size)
    eval_loader = DataLoader(held_out, batch_size=4)

    AdamOptimizer = DeepSpeedCPUAdam if args.offload else FusedAdam
    optimizer = AdamOptimizer(
        get_optimizer_grouped_parameters(model, args.weight_decay), lr=args.learning_rate, betas=(0.9, 0.95)
    )
    schedule = get_scheduler(
        "cosine", optimizer=optimizer, num_warmup_steps=args.num_warmup_steps, num_training_steps=args.max_steps
    )
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, config=get_train_ds_config(args), lr_scheduler=schedule,
        dist_init_required=True,
    )  # fmt: skip

    before = evaluate(engine, eval_loader, device)
    while engine.global_steps < args.max_steps:
        for batch in train_loader:
            loss = engine(**to_device(batch, device), use_cache=False).loss
            engine.backward(loss)
            engine.step()
            if engine.global_steps == args.max_steps:
                break
    after = evaluate(engine, eval_loader, device)
    if dist.get_rank() == 0:
        print(f"perplexity {math.exp(before):.1f} -> {math.exp(after):.1f}; rate {schedule.get_last_lr()[0]:.1e}")
    engine.save_16bit_model(args.output_dir)


if __name__ == "__main__":
    main()
