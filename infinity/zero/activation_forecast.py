"""Forecast of the activations of a micro-batch before the first one, for models whose shapes determine it.

The sequence length is known only from a batch. The forecast assumes the configured number of tokens
(`memory.activations.sequence_length`), or 128. A transformers model is measured on fake tensors, which takes about a
second for each billion parameters; if memory is plentiful, the sizes in its configuration are enough. There is no
forecast for other models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.memory.partition import DTYPES
from infinity.plan.activation_bytes import Activations
from infinity.plan.allocator import PROCESS
from infinity.plan.types import DTYPE_NBYTES
from infinity.zero.activation_checkpoint import Checkpointing
from infinity.zero.activation_measurement import measure_activations

# Tokens of a sequence if the configuration does not say: few, so that no run is refused for a length it may not use.
SEQUENCE_MAX = 128
_LIBRARIES = ("transformers.", "peft.")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch: its sequences, tokens of each (None: not configured), dtype by name ("bf16"), and the paths of the
    blocks that our own checkpointing recomputes.
    """

    batch: int
    sequence: int | None
    compute_dtype: str
    blocks: Sequence[str] = ()
    keep_ops: Sequence[str] = ()


def forecast(model: nn.Module, work: MicroBatch, *, measure: bool) -> Activations | None:
    """Return the activations of a transformers causal language model, plain or wrapped by peft; None for other models.
    `inputs` counts the blocks that our own checkpointing recomputes.

    measure: run the model on fake tensors. If False, or if the model cannot run on fakes, its configuration's sizes are
    used.
    """
    config = getattr(model, "config", None)
    sizes = [getattr(config, name, None) for name in ("hidden_size", "num_hidden_layers", "vocab_size")]
    if not _is_known(model) or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    hidden, layers, vocabulary = map(int, sizes)  # type: ignore[arg-type]
    longest = getattr(config, "max_position_embeddings", None)
    sequence = work.sequence or min(longest if isinstance(longest, int) and longest > 0 else SEQUENCE_MAX, SEQUENCE_MAX)
    tokens = work.batch * sequence
    shape = f"{work.batch} x {sequence:,} tokens"
    input_nbytes = tokens * hidden * DTYPE_NBYTES[work.compute_dtype]
    if measure:
        # A pass that depends on values (a mixture of experts) cannot be measured.
        with suppress(ConfigError):
            found = _measured(model, work, sequence)
            return replace(found, source=f"{shape}, measured", inputs=len(work.blocks), input_nbytes=input_nbytes)
    inner = getattr(config, "intermediate_size", None)
    block = _block_nbytes(hidden, inner if isinstance(inner, int) else 4 * hidden, work.compute_dtype) * tokens
    again = min(len(work.blocks), layers) or (layers if _recomputes(model) else 0)
    kept = (layers - again) * block + again * input_nbytes + (block if again else 0)
    # Logits in fp32: log-probabilities, their gradient and the logits' own.
    loss = 3 * tokens * vocabulary * DTYPE_NBYTES["fp32"]
    return Activations(
        nbytes=kept + loss, parts={"blocks": kept, "logits and loss": loss}, source=f"{shape}, by the model's sizes",
        inputs=len(work.blocks), input_nbytes=input_nbytes,
        pooled_nbytes=kept + PROCESS.pooled_nbytes([loss // 3] * 3),
    )  # fmt: skip


def _is_known(model: nn.Module) -> bool:
    return any(kind.__module__.startswith(_LIBRARIES) for kind in type(model).__mro__)


def _recomputes(model: nn.Module) -> bool:
    """Return whether transformers' own checkpointing is on."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _block_nbytes(hidden: int, inner: int, dtype: str) -> int:
    """Bytes that a block keeps of a token, about: norms in fp32, what attention's and the MLP's products take and give,
    and the largest temporary of its backward.
    """
    return DTYPE_NBYTES[dtype] * (12 * hidden + 4 * inner) + 8 * hidden


def _measured(model: nn.Module, work: MicroBatch, sequence: int) -> Activations:
    tokens = torch.zeros(work.batch, sequence, dtype=torch.long, device="cpu")
    checkpointing = Checkpointing(model, work.blocks, keep_ops=work.keep_ops)
    with closing(checkpointing), _training(model):
        return measure_activations(model, {"input_ids": tokens, "labels": tokens}, dtype=DTYPES[work.compute_dtype])


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """As it is trained: `from_pretrained` hands out models that evaluate, which neither drop nor compute again."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
