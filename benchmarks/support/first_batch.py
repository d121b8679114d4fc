"""Task: train a small model for some steps; what the engine said that the process takes, before and with a batch.

The parent watches the process's anonymous memory: a thread in here would wait for the lock of
the interpreter.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.plan.types import Tier


def run(options: dict[str, Any]) -> dict[str, Any]:
    """`model`, `bf16`, `recompute`, `tier`, `folder`, `steps`. All figures are bytes."""
    import transformers  # noqa: F401

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    make, batch_of = MODELS[options["model"]]
    section = {"device": options["tier"], **({"nvme_path": options["folder"]} if options["tier"] == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1, "log_level": "info", "bf16": {"enabled": options["bf16"]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": section, "offload_optimizer": section},
        "activation_checkpointing": {"every": int(options["recompute"])},
    }
    model = make()
    engine, *_ = infinity.initialize(model=model, config=config)
    before = engine.memory().predicted
    torch.manual_seed(1 + int(os.environ["RANK"]))
    for _ in range(options["steps"]):
        batch = batch_of()
        batch = {k: v.to(engine.device) for k, v in batch.items()}
        if options["bf16"]:
            batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
        out = engine(**batch)
        loss = out if isinstance(out, Tensor) else out.loss
        engine.backward(loss)
        engine.step()
        del loss, out
    report = engine.memory()
    on_device = {}
    if engine.device.type != "cpu":
        on_device = {
            "device_planned": engine.plan.nbytes_by_tier()[Tier.GPU],
            "device_reserved": torch.accelerator.max_memory_reserved(engine.device),
            "device_allocated": torch.accelerator.max_memory_allocated(engine.device),
        }  # fmt: skip
    return {
        **on_device, "before": before, "predicted": report.predicted, "baseline": report.baseline,
        "numel": engine.plan.numel, "activations": report.activations_predicted, "source": report.activations_source,
    }  # fmt: skip


class Block(nn.Module):
    """A block of an own language model: causal attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w))
        return x + self.mlp(self.norm2(x))


class OwnLM(nn.Module):
    """A language model of no library: about 34 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16_000, 512)
        self.blocks = nn.ModuleList(Block(512, 8) for _ in range(6))
        self.head = nn.Linear(512, 16_000)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class UNet(nn.Module):
    """Three levels down and up with skip connections, batch norm."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        def two(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            )  # fmt: skip
        sizes = [width * 2**n for n in range(4)]
        self.down = nn.ModuleList(two(a, b) for a, b in itertools.pairwise([3, *sizes]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(sizes))
        self.join = nn.ModuleList(two(2 * a, a) for a in sizes[:-1])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        target, kept = x, []
        for at, down in enumerate(self.down):
            x = down(x if at == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for at in reversed(range(len(self.up))):
            x = self.join[at](torch.cat([kept[at], self.up[at](x)], 1))
        return F.mse_loss(self.head(x), target)


def _hf(name: str, head: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        model = getattr(transformers, head)(getattr(transformers, f"{name}Config")(**sizes))
        return model.train()

    return make


def _tokens(vocabulary: int, batch: int, length: int) -> Callable[[], dict[str, Tensor]]:
    def make() -> dict[str, Tensor]:
        ids = torch.randint(4, vocabulary, (batch, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def _images(batch: int, side: int, classes: int) -> Callable[[], dict[str, Tensor]]:
    def make() -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(classes, (batch,))}

    return make


_LLAMA = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8,
    "vocab_size": 8000, "max_position_embeddings": 4096, "use_cache": False,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "own LM": (OwnLM, lambda: {"ids": torch.randint(16_000, (8, 128))}),
    "ResNet-50": (_hf("ResNet", "ResNetForImageClassification", num_labels=1000), _images(8, 224, 1000)),
    "Llama": (_hf("Llama", "LlamaForCausalLM", **_LLAMA), _tokens(8000, 1, 2048)),
    "Whisper": (
        _hf("Whisper", "WhisperForConditionalGeneration", d_model=512, encoder_layers=6, decoder_layers=6,
            encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=1024, decoder_ffn_dim=1024,
            vocab_size=20_000, use_cache=False, decoder_start_token_id=1, pad_token_id=0),
        lambda: {"input_features": torch.randn(1, 80, 3000), "labels": torch.randint(4, 20_000, (1, 128))},
    ),
    "BERT": (
        _hf("Bert", "BertForMaskedLM", hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
            intermediate_size=2048),
        _tokens(30_000, 4, 256),
    ),
    "T5": (
        _hf("T5", "T5ForConditionalGeneration", d_model=512, d_ff=1024, num_layers=6, num_heads=8, vocab_size=16_000,
            decoder_start_token_id=0, use_cache=False),
        _tokens(16_000, 4, 256),
    ),
    "ViT": (
        _hf("ViT", "ViTForImageClassification", hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
            intermediate_size=2048, num_labels=1000),
        _images(8, 224, 1000),
    ),
    "Mixtral": (
        _hf("Mixtral", "MixtralForCausalLM", hidden_size=384, intermediate_size=768, num_hidden_layers=6,
            num_attention_heads=6, num_key_value_heads=2, vocab_size=8000, num_local_experts=4, use_cache=False),
        _tokens(8000, 2, 512),
    ),
    "U-Net": (UNet, lambda: {"x": torch.randn(4, 3, 128, 128)}),
}  # fmt: skip
