"""Seconds of a training step by hand and through Trainer, by turns: a process of benchmarks/clients.py."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

import infinity

BATCH, LENGTH = 8, 256
RATE = 1e-4


def build() -> LlamaForCausalLM:
    """Return a model of 29 M parameters."""
    set_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=12,
                    num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=LENGTH)  # fmt: skip
    )


def config(tier: str, folder: str) -> dict[str, Any]:
    """Return the file of both."""
    place = {"device": tier, **({"nvme_path": folder} if tier == "nvme" else {})}
    return {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }  # fmt: skip


def texts(steps: int) -> list[dict[str, torch.Tensor]]:
    """Return the sequences of all steps."""
    draws = torch.Generator().manual_seed(2)
    rows = torch.randint(0, 8192, (steps * BATCH, LENGTH), generator=draws)
    return [{"input_ids": row, "labels": row} for row in rows]


class Clock(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.ends.append(time.perf_counter())


def by_trainer(tier: str, folder: str, steps: int) -> float:
    """Return the median seconds of a step through Trainer."""
    AcceleratorState._reset_state(True)
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE, report_to=[],
        logging_steps=steps, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        lr_scheduler_type="linear", deepspeed=config(tier, folder), use_cache=False,
    )  # fmt: skip
    clock = Clock()
    trainer = Trainer(model=build(), args=arguments, train_dataset=texts(steps), callbacks=[clock])
    trainer.train()
    trainer.model_wrapped.close()
    return _median(clock.ends)


def by_hand(tier: str, folder: str, steps: int) -> float:
    """Return the median seconds of a step of a plain loop."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    engine, _, loader, _ = infinity.initialize(
        model=model, config={**config(tier, folder), "steps_per_print": "inf"}, optimizer=optimizer,
        lr_scheduler=schedule, training_data=texts(steps),
    )  # fmt: skip
    ends = []
    with engine:
        assert loader is not None
        for batch in loader:
            engine.backward(engine(**batch, use_cache=False).loss)
            engine.step()
            ends.append(time.perf_counter())
    return _median(ends)


def _median(ends: list[float]) -> float:
    """The first two steps find their order and fill their pools."""
    return statistics.median(after - before for before, after in itertools.pairwise(ends[1:]))


if __name__ == "__main__":
    pairs, count, place, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    by_hand(place, where, 3)
    print(json.dumps([(by_hand(place, where, count), by_trainer(place, where, count)) for _ in range(pairs)]))
