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
from infinity.plan.activation_bytes import Activations, BlockActivations
from infinity.plan.allocator import PROCESS
from infinity.plan.types import DTYPE_NBYTES
from infinity.zero.activation_checkpoint import Checkpointing
from infinity.zero.activation_measurement import measure_activations

# Tokens of a sequence if the configuration does not say: few, so that no run is refused for a length it may not use.
SEQUENCE_MAX = 128
_LIBRARIES = ("transformers.", "peft.")
_NAMES = ("hidden_size", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch: its sequences, tokens of each (None: not configured), dtype by name ("bf16"), and the paths of the
    blocks that our own checkpointing recomputes.

    tensor: ranks that divide each layer; divides_head: and the words of the loss. stages: the paths of all blocks, for
    a model in stages.
    """

    batch: int
    sequence: int | None
    compute_dtype: str
    blocks: Sequence[str] = ()
    keep_ops: Sequence[str] = ()
    tensor: int = 1
    divides_head: bool = False
    stages: Sequence[str] = ()


def forecast(model: nn.Module, work: MicroBatch, *, measure: bool) -> Activations | None:
    """Return the activations of a transformers causal language model, plain or wrapped by peft; None for other models.
    `inputs` counts the blocks that our own checkpointing recomputes.

    measure: run the model on fake tensors. If False, or if the model cannot run on fakes, its configuration's sizes are
    used.
    """
    config = getattr(model, "config", None)
    sizes = [getattr(config, name, None) for name in _NAMES]
    if not _is_known(model) or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    longest = getattr(config, "max_position_embeddings", None)
    sequence = work.sequence or min(longest if isinstance(longest, int) and longest > 0 else SEQUENCE_MAX, SEQUENCE_MAX)
    shape = f"{work.batch} x {sequence:,} tokens"
    again = len(work.blocks) or (int(config.num_hidden_layers) if _recomputes(model) else 0)  # type: ignore[union-attr]
    sized = _Sizes.of(config, work, work.batch * sequence).activations(work, again)
    if measure:
        # A pass that depends on values (a mixture of experts) cannot be measured.
        with suppress(ConfigError):
            found = _measured(model, work, sequence)
            if work.tensor > 1:
                # Measured is the whole model: a rank has as much less as the sizes say.
                whole = _Sizes.of(config, replace(work, tensor=1), work.batch * sequence).activations(work, again)
                found = _times(found, sized.nbytes / whole.nbytes)
            return replace(
                found, source=f"{shape}, measured", inputs=sized.inputs, input_nbytes=sized.input_nbytes,
                blocks=_divided(found, sized.blocks),
            )  # fmt: skip
    return replace(sized, source=f"{shape}, by the model's sizes")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A language model's sizes in bytes, of the tokens of one micro-batch on one rank."""

    layers: int
    block: int
    # What its linear layers hold between the parts of a split backward, and the largest temporaries of its backward.
    deferred: int
    working: int
    input: int
    logits: int
    head_deferred: int

    @classmethod
    def of(cls, config: object, work: MicroBatch, tokens: int) -> _Sizes:
        """From the model's configuration: norms in fp32, what attention's and the MLP's products take and give, and the
        largest temporary of a block's backward. A tensor axis divides heads, the MLP's width and the words.
        """
        hidden, layers, vocabulary = (int(getattr(config, name)) for name in _NAMES)
        inner = getattr(config, "intermediate_size", None)
        inner = (inner if isinstance(inner, int) else 4 * hidden) // work.tensor
        heads = hidden // work.tensor
        words = vocabulary // (work.tensor if work.divides_head else 1)
        width = DTYPE_NBYTES[work.compute_dtype]
        return cls(
            layers=layers, block=tokens * (width * (8 * hidden + 4 * heads + 4 * inner) + 8 * hidden),
            deferred=tokens * width * (4 * hidden + 4 * heads + 3 * inner),
            working=tokens * width * 2 * (inner + hidden), input=tokens * hidden * width,
            logits=tokens * words * DTYPE_NBYTES["fp32"],
            head_deferred=tokens * width * (hidden + words),
        )  # fmt: skip

    def activations(self, work: MicroBatch, recomputed: int) -> Activations:
        """Those of the whole model, of which so many blocks are computed again."""
        again = min(recomputed, self.layers)
        kept = (self.layers - again) * self.block + again * self.input + (self.block if again else 0)
        # Logits in fp32: log-probabilities, their gradient and the logits' own.
        loss = 3 * self.logits
        return Activations(
            nbytes=kept + loss, parts={"blocks": kept, "logits and loss": loss}, source="", inputs=len(work.blocks),
            input_nbytes=self.input, pooled_nbytes=kept + PROCESS.pooled_nbytes([self.logits] * 3),
            blocks=self._by_block(work, again) if work.stages else None,
        )  # fmt: skip

    def _by_block(self, work: MicroBatch, again: int) -> BlockActivations:
        own = frozenset(work.blocks)
        flags = tuple(path in own if own else again > 0 for path in work.stages)
        return BlockActivations(
            saved=tuple(self.input if each else self.block for each in flags), deferred=(self.deferred,) * len(flags),
            saves_input=flags, recomputed=flags,
            working=tuple(self.block if each else self.working for each in flags), boundary_nbytes=self.input,
            head_nbytes=self.logits, loss_nbytes=3 * self.logits, head_deferred=self.head_deferred,
        )  # fmt: skip


def _times(found: Activations, share: float) -> Activations:
    """The activations in the same proportions."""
    pooled = None if found.pooled_nbytes is None else int(found.pooled_nbytes * share)
    parts = {name: int(nbytes * share) for name, nbytes in found.parts.items()}
    return replace(
        found, nbytes=int(found.nbytes * share), saved_nbytes=int(found.saved_nbytes * share), pooled_nbytes=pooled,
        parts=parts,
    )  # fmt: skip


def _divided(found: Activations, sized: BlockActivations | None) -> BlockActivations | None:
    """Measured activations by block: in equal parts but for inputs of recomputed blocks, with the loss by its size."""
    if sized is None:
        return None
    head = min(sized.head_nbytes, found.saved_nbytes)
    inputs = sum(saved for saved, again in zip(sized.saved, sized.recomputed, strict=True) if again)
    kept = max(len(sized.saved) - sum(sized.recomputed), 1)
    each = max(found.saved_nbytes - head - inputs, 0) // kept
    # What is measured beyond the loss's moment is the backward of a block.
    beyond = found.nbytes - (found.saved_nbytes - head)
    working = beyond if beyond > sized.loss_nbytes else 0
    return replace(
        sized, head_nbytes=head,
        saved=tuple(saved if again else each for saved, again in zip(sized.saved, sized.recomputed, strict=True)),
        working=tuple(max(each, working) for each in sized.working),
    )  # fmt: skip


def _is_known(model: nn.Module) -> bool:
    return any(kind.__module__.startswith(_LIBRARIES) for kind in type(model).__mro__)


def _recomputes(model: nn.Module) -> bool:
    """Return whether transformers' own checkpointing is on."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


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
