"""Activations of transformers by closed forms: what one micro-batch's forward and backward need beside parameters and
their gradients.

Each form lists what torch's autograd keeps of a block as transformers writes it, storage by storage (a tensor that two
operations keep counts once); Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022), count the same way for Megatron's blocks. On top comes the busiest of two moments: the loss, whose fp32 logits
lie there three times, or the backward of one block. Where a model is at hand, `infinity.measure_activations` measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinity.errors import ConfigError
from infinity.plan.activation import Activations
from infinity.plan.types import DTYPE_NBYTES

__all__ = ["Activations", "activations"]

# At the loss: log-probabilities, their gradient, and that of the logits, all in fp32.
_LOSS_COPIES = 3
# What transformers' GPT-2 takes where its config.json names none.
_GPT2_DROPOUT = 0.1


@dataclass(frozen=True, slots=True)
class _Pass:
    """What is run: tokens and bytes of an element, and how attention and dropout are computed."""

    batch: int
    sequence: int
    width: int
    attention: str
    accelerator: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def scores(self, heads: int) -> int:
        """Elements of one matrix of attention scores, of all heads."""
        return self.batch * heads * self.sequence * self.sequence

    def noise_nbytes(self, numel: int, probability: float) -> int:
        """What dropout keeps: a flag an element on an accelerator, a factor in the tensor's dtype on the CPU."""
        return numel * (1 if self.accelerator else self.width) if probability else 0


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes that a repeated block keeps by part, those of its input, and what its backward adds at its busiest."""

    parts: Mapping[str, int]
    input_nbytes: int
    backward_nbytes: int


def activations(
    values: Mapping[str, Any], *, batch: int, sequence: int, compute_dtype: str, checkpointing: bool = False,
    every: int = 1, attention: str = "sdpa", accelerator: bool = False,
) -> Activations:  # fmt: skip
    """Bytes of a micro-batch of `batch` sequences for the causal language model of a config.json.

    values: the keys of config.json: Llama's family (also Mistral, Qwen, Mixtral) or "gpt2". compute_dtype: "fp32",
    "bf16" or "fp16". checkpointing: every `every`-th block keeps its input only and is computed again in backward.
    attention: "sdpa" or "eager". accelerator: whether it runs on one. The program is taken to keep the loss of a
    forward, not its logits. ConfigError where a size is missing.
    """
    run = _Pass(batch, sequence, DTYPE_NBYTES[compute_dtype], attention, accelerator)
    gpt2 = values.get("model_type") == "gpt2"
    block = _gpt2_block(values, run) if gpt2 else _llama_block(values, run)
    layers = _size(values, "n_layer" if gpt2 else "num_hidden_layers")
    logits = run.tokens * _size(values, "vocab_size") * DTYPE_NBYTES["fp32"]
    ending = run.tokens * _size(values, "n_embd" if gpt2 else "hidden_size")
    again_count = -(-layers // every) if checkpointing else 0
    whole = layers - again_count
    kept = {f"{name} of {whole} blocks": nbytes * whole for name, nbytes in block.parts.items() if whole}
    if again_count:
        kept[f"inputs of {again_count} blocks"] = block.input_nbytes * again_count
    # The last norm keeps its input, and what the head takes; Llama's the normalized values, too.
    last = {"last norm": ending * (2 * run.width if gpt2 else _norm_nbytes(run))}
    again = sum(block.parts.values()) if checkpointing else 0
    moments = (
        {**kept, **last, "logits and loss": _LOSS_COPIES * logits},
        # What lies behind the last block is gone by then.
        {**kept, "one block, computed again" if again else "backward of a block": again + block.backward_nbytes},
    )
    parts = max(moments, key=lambda moment: sum(moment.values()))
    form = f"closed form of {'GPT-2' if gpt2 else 'Llama'}'s blocks, {attention} attention"
    return Activations(
        nbytes=sum(parts.values()), parts=parts, saved_nbytes=sum(kept.values()) + sum(last.values()) + logits,
        source=f"{form}, {'blocks computed again' if checkpointing else 'nothing computed again'}",
        inputs=again_count, input_nbytes=block.input_nbytes,
    )  # fmt: skip


def _llama_block(values: Mapping[str, Any], run: _Pass) -> _Block:
    """RMSNorm, attention with rotary positions, RMSNorm, gated feed-forward or experts."""
    hidden, heads = _size(values, "hidden_size"), _size(values, "num_attention_heads")
    head = values.get("head_dim") or hidden // heads
    queries, keys = heads * head, (values.get("num_key_value_heads") or heads) * head
    tokens, width = run.tokens, run.width
    parts = {
        "norms": 2 * tokens * hidden * _norm_nbytes(run),
        # Queries, keys, values and what comes out. Written out, each query head has keys and values of its own.
        "attention": tokens * 2 * (queries + (queries if run.attention == "eager" else keys)) * width
        + _scores_nbytes(run, heads, 0.0),
    }
    if values.get("model_type") in ("qwen3", "qwen3_moe"):
        # Norms of queries and keys, a head at a time: the input in fp32, and what was normalized.
        parts["attention"] += tokens * (queries + keys) * (DTYPE_NBYTES["fp32"] + width)
    experts = values.get("num_local_experts") or values.get("num_experts") or 0
    if experts:
        chosen = int(values.get("num_experts_per_tok") or 2)
        inner = int(values.get("moe_intermediate_size") or values.get("intermediate_size") or 0)
        parts["experts"] = tokens * (chosen * (2 * hidden + 4 * inner) * width + 3 * experts * DTYPE_NBYTES["fp32"])
        inner *= chosen
    else:
        inner = _size(values, "intermediate_size")
        # In and out of the activation function, the other branch, and their product.
        parts["feed-forward"] = tokens * 4 * inner * width
    # Two gradients of the feed-forward's width, and two of the residual stream; or, behind it, two of the scores.
    behind = _scores_backward_nbytes(run, heads) - parts.get("feed-forward", 0) - parts.get("experts", 0)
    return _Block(parts, tokens * hidden * width, max(tokens * (2 * inner + 2 * hidden) * width, behind))


def _gpt2_block(values: Mapping[str, Any], run: _Pass) -> _Block:
    """LayerNorm, attention with biases, LayerNorm, feed-forward with GELU, dropout behind both."""
    hidden, heads = _size(values, "n_embd"), int(values.get("n_head") or 12)
    inner = int(values.get("n_inner") or 4 * hidden)
    tokens, width = run.tokens, run.width
    noise = run.noise_nbytes(tokens * hidden, float(values.get("resid_pdrop", _GPT2_DROPOUT)))
    function = values.get("activation_function") or "gelu_new"
    dropout = float(values.get("attn_pdrop", _GPT2_DROPOUT))
    # torch has no fused attention with dropout on the CPU: it computes in fp32 there.
    inputs_width = DTYPE_NBYTES["fp32"] if dropout and run.attention == "sdpa" and not run.accelerator else width
    parts = {
        "norms": 2 * tokens * 2 * hidden * width,
        # Queries, keys, values, and what comes out.
        "attention": tokens * hidden * (3 * inputs_width + width) + _scores_nbytes(run, heads, dropout),
        # transformers writes this GELU out: its input, tanh, one more than that, half the input, and the product.
        "feed-forward": tokens * (5 if function == "gelu_new" else 2) * inner * width,
        "dropout": 2 * noise,
    }  # fmt: skip
    behind = _scores_backward_nbytes(run, heads) - parts["feed-forward"]
    return _Block(parts, tokens * hidden * width, max(tokens * 2 * inner * width, behind))


def _norm_nbytes(run: _Pass) -> int:
    """Bytes an element that an RMSNorm keeps: its input in fp32, the normalized values and what comes out."""
    return DTYPE_NBYTES["fp32"] + 2 * run.width


def _scores_nbytes(run: _Pass, heads: int, dropout: float) -> int:
    """What attention keeps beside queries, keys, values and output."""
    statistics = run.tokens * heads * DTYPE_NBYTES["fp32"]
    if run.attention == "eager":
        # Softmax in fp32, its copy in the dtype of the values where that is another, and dropout's two.
        copies = DTYPE_NBYTES["fp32"] + (run.width if run.width != DTYPE_NBYTES["fp32"] else 0)
        copies += run.width if dropout else 0
        return run.scores(heads) * copies + run.noise_nbytes(run.scores(heads), dropout)
    if dropout and not run.accelerator:
        # Probabilities, the noise, their product.
        return run.scores(heads) * 3 * DTYPE_NBYTES["fp32"]
    return statistics


def _scores_backward_nbytes(run: _Pass, heads: int) -> int:
    """Gradients of attention scores at once in backward, where they are written out: before and behind softmax."""
    return 2 * run.scores(heads) * DTYPE_NBYTES["fp32"] if run.attention == "eager" else 0


def _size(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"the model's {name} is {value!r}: activations need it as a positive whole number")
    return value
