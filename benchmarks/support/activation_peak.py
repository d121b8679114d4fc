"""Task: what one forward and backward of a model takes of torch's own allocator, beside two estimates of it.

The profiler sees every allocation, those inside kernels too. Gradients of parameters are told by their sizes, which no
other tensor of the shapes chosen has, and left out; they are freed as they arrive, as an engine does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from estimators.activations import activations
from infinity import measure_activations
from support.llama import build_named
from support.models import DTYPES


def run(options: dict[str, Any]) -> dict[str, Any]:
    """`model` ("llama" or "gpt2"), `shape`, `batch`, `sequence`, `dtype`, `checkpointing`, `attention`. In bytes."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    with torch.device("meta"):
        # A forward on shapes knows nothing of the values.
        shapes = _prepared(options)
    ids = torch.randint(options["shape"]["vocab_size"], (options["batch"], options["sequence"]))
    batch = {"input_ids": ids, "labels": ids}
    began = time.perf_counter()
    measured = measure_activations(shapes, batch)
    seconds = time.perf_counter() - began
    closed = activations(
        {**shapes.config.to_dict(), **options["shape"]}, batch=options["batch"], sequence=options["sequence"],
        compute_dtype=options["dtype"], checkpointing=options["checkpointing"], attention=options["attention"],
    )  # fmt: skip
    del shapes
    return {
        "peak": peak_nbytes(_prepared(options), batch), "shapes": measured.nbytes, "closed": closed.nbytes,
        "seconds": seconds,
    }  # fmt: skip


def peak_nbytes(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """Bytes at the busiest moment of one training pass, parameters and their gradients left out."""
    # Small gradients are noise, and their sizes are other tensors', too.
    gradients = {param.nbytes for param in model.parameters() if param.nbytes >= 1 << 18}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(**batch).loss.backward()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if abs(event.nbytes()) not in gradients:
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def _prepared(options: dict[str, Any]) -> nn.Module:
    model = build_named(options["model"], options["shape"], options["attention"]).to(DTYPES[options["dtype"]])
    if options["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
