"""The models and data of the benchmarks: the same values for every contender, different data for every rank."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch
from torch import Tensor, nn

from support.machine import accelerator

# 134 M parameters, embedding and head untied.
LLAMA = {"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "layers": 12, "heads": 12}
# 374 M parameters: of more layers, so that less of it is embedding and head.
DEEP = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "layers": 24, "heads": 16}
# The same shape in small, for smoke runs.
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "layers": 3, "heads": 4}
# 33 M parameters, of which little is embedding and head, so that two stages of equally many blocks take equally long.
STAGED = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "layers": 8, "heads": 8}
MODELS = {"llama": LLAMA, "deep": DEEP, "tiny": TINY, "staged": STAGED}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Parameters of one of `Blocks`' units.
BLOCK_NUMEL = 1 << 24


class _Constant(torch.autograd.Function):
    """Identity whose backward hands a gradient to the weight at the cost of writing it once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pattern: Tensor) -> Tensor:
        ctx.shape, ctx.pattern = weight.shape, pattern
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.pattern.expand(ctx.shape), None


class _Wait(torch.autograd.Function):
    """Identity that waits as a program waits for its accelerator: twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class _Block(nn.Module):
    def __init__(self, numel: int, wait: float) -> None:
        super().__init__()
        self._wait = wait
        self.weight = nn.Parameter(torch.empty(numel // 4096, 4096))
        nn.init.normal_(self.weight, std=0.02)
        self.register_buffer("pattern", torch.randn(4096) * 1e-3, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = _Constant.apply(x, self.weight, self.pattern.to(self.weight.dtype))
        return _Wait.apply(x, self._wait) if self._wait else x


class Blocks(nn.Module):
    """`numel` parameters whose forward and backward cost next to nothing, so that the optimizer is what is timed.

    wait: seconds of a forward and backward in which the program only waits, in equal parts of all blocks.
    """

    def __init__(self, numel: int, wait: float = 0.0) -> None:
        super().__init__()
        count = max(1, round(numel / BLOCK_NUMEL))
        self.layers = nn.ModuleList(_Block(numel // count // 4096 * 4096, wait / count / 3) for _ in range(count))
        self.scale = nn.Parameter(torch.ones(4096))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def build(options: dict[str, Any]) -> nn.Module:
    """The model that `options["model"]` names, in fp32: a key of MODELS, or "blocks" of `options["numel"]`."""
    torch.manual_seed(0)
    if options["model"] == "blocks":
        return Blocks(options["numel"], options.get("wait", 0.0))
    # The import of transformers takes seconds, which a run without its models need not wait for.
    model = importlib.import_module("support.llama").build(MODELS[options["model"]], options["positions"])
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def batch(options: dict[str, Any], rank: int, step: int) -> dict[str, Tensor]:
    """What the model is called with at one step of one rank, on the device that computes."""
    device = accelerator() or torch.device("cpu")
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1) + step)
    if options["model"] == "blocks":
        return {"x": torch.randn(1, 4096, generator=generator).to(device, DTYPES[options["dtype"]])}
    shape = (options["batch"], options["positions"])
    ids = torch.randint(MODELS[options["model"]]["vocab_size"], shape, generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returns."""
    return output if isinstance(output, Tensor) else output.loss
