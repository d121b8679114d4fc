"""Liger-Kernel's kernels on the CPU, by Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.support.liger_run FOLDER

Prints a JSON object: for each kernel the largest differences of its result and gradients from torch's, and for each
model and placement the losses of some steps and a digest of the trained weights; FOLDER stands for a drive.

The interpreter leaves out what only a compiled kernel gets. A number that is passed as a float stays a Python float,
where a compiled kernel gets an fp32 scalar, and functions of CUDA's libdevice have no body: `rsqrt` of the norms and
`tanh` of GeGLU are replaced by Triton's own operations. So the values of these two functions are not those of a GPU.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from torch import Tensor
from torch.nn import functional

import infinity
from infinity.engine import liger

STEPS = 3
PLACEMENTS = {
    "plain": (0, "none"), "stage 0": (0, "none"), "stage 3": (3, "none"), "cpu": (3, "cpu"), "nvme": (3, "nvme"),
}  # fmt: skip
CONFIGS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "gemma": (transformers.GemmaForCausalLM, transformers.GemmaConfig),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
}


def complete_the_interpreter() -> None:
    """Replace what the interpreter lacks; see above."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    convert = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = converted
    for name in ("rms_norm", "layer_norm"):
        importlib.import_module(f"liger_kernel.ops.{name}").rsqrt = lambda x: language.math.rsqrt(x)
    importlib.import_module("liger_kernel.ops.geglu").tanh = lambda x: 2 * language.sigmoid(2 * x) - 1


def differences(ours: Callable[..., Any], torchs: Callable[..., Any], *inputs: Tensor) -> list[float]:
    """Return the largest difference of each result, and of the gradient of each input."""
    found = []
    for function in (ours, torchs):
        # Some kernels write gradients over what they were given.
        leaves = [each.clone().requires_grad_() for each in inputs]
        results = function(*(leaf.clone() for leaf in leaves))
        results = results if isinstance(results, tuple) else (results,)
        generator = torch.Generator().manual_seed(1)
        loss = sum((each * torch.randn(each.shape, generator=generator)).sum() for each in results)
        found.append([each.detach().clone() for each in (*results, *torch.autograd.grad(loss, leaves))])
    return [float((left - right).abs().max()) for left, right in zip(*found, strict=True)]


def kernels() -> Iterator[tuple[str, list[float]]]:
    """Yield each kernel's name and differences."""
    ops: Any = importlib.import_module("liger_kernel.ops")
    layers: Any = importlib.import_module("liger_kernel.transformers")
    llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    yield "rms_norm", differences(
        lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6),
        lambda x, w: functional.rms_norm(x, (72,), w, 1e-6),
        values(2, 5, 72), values(72),
    )  # fmt: skip
    yield "layer_norm", differences(
        lambda x, w, b: ops.LigerLayerNormFunction.apply(x, w, b, 1e-6),
        lambda x, w, b: functional.layer_norm(x, (72,), w, b, 1e-6),
        values(2, 5, 72), values(72), values(72),
    )  # fmt: skip
    yield (
        "swiglu",
        differences(
            ops.LigerSiLUMulFunction.apply, lambda a, b: functional.silu(a) * b, values(2, 5, 96), values(2, 5, 96)
        ),
    )
    yield "geglu", differences(
        ops.LigerGELUMulFunction.apply, lambda a, b: functional.gelu(a, approximate="tanh") * b,
        values(2, 5, 96), values(2, 5, 96),
    )  # fmt: skip
    angles = values(1, 5, 8).repeat(1, 1, 2)
    yield "rope", differences(
        lambda q, k: layers.liger_rotary_pos_emb(q, k, angles.cos(), angles.sin()),
        lambda q, k: llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin()),
        values(2, 4, 5, 16), values(2, 2, 5, 16),
    )  # fmt: skip
    labels = torch.randint(0, 101, (7,), generator=generator)
    labels[2] = -100
    yield "cross_entropy", differences(
        lambda x: layers.LigerCrossEntropyLoss()(x, labels),
        lambda x: functional.cross_entropy(x, labels),
        values(7, 101),
    )  # fmt: skip
    yield "fused_linear_cross_entropy", differences(
        lambda x, w: layers.LigerFusedLinearCrossEntropyLoss()(w, x, labels),
        lambda x, w: functional.cross_entropy(x @ w.T, labels),
        values(7, 32), values(101, 32),
    )  # fmt: skip


def train(family: str, placement: str, folder: Path) -> tuple[list[float], str]:
    """Train a small model; return the losses and a digest of its weights."""
    kind, config = CONFIGS[family]
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    torch.manual_seed(0)
    model = kind(config(**sizes, tie_word_embeddings=family == "gemma", attn_implementation="eager"))
    if placement in ("cpu", "nvme"):
        model.gradient_checkpointing_enable()
    stage, device = PLACEMENTS[placement]
    tier = {"device": device, "nvme_path": str(folder)}
    engine, *_ = infinity.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "kernels": {"liger": placement != "plain"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {
                "stage": stage, "offload_optimizer": tier, "stage3_param_persistence_threshold": 0,
                **({"offload_param": tier} if stage == 3 else {}),
            },
        },
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    losses, digest = [], hashlib.sha256()
    with engine:
        for _ in range(STEPS):
            tokens = torch.randint(0, 101, (2, 9), generator=generator)
            output = engine(input_ids=tokens, labels=tokens)
            assert (output.logits is None) == (placement != "plain")
            engine.backward(output.loss)
            engine.step()
            losses.append(float(output.loss.detach()))
        with infinity.read(list(engine.module.parameters())):
            for param in engine.module.parameters():
                digest.update(param.detach().contiguous().view(torch.uint8).numpy())
    return losses, digest.hexdigest()


def main(folder: Path) -> None:
    complete_the_interpreter()
    # The CPU stands for the CUDA device.
    vars(liger)["_missing"] = lambda device: None
    report: dict[str, Any] = {"kernels": dict(kernels())}
    # Plain layers first: Liger-Kernel replaces names of the family for good.
    report["models"] = {family: {each: train(family, each, folder) for each in PLACEMENTS} for family in CONFIGS}
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
