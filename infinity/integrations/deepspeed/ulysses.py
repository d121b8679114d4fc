"""`deepspeed.runtime.sequence_parallel`: how accelerate, Trainer and TRL ask for a sequence axis (`sp_size`).

    mpu = UlyssesSPAttentionHF.register_with_transformers(model, ..., sequence_parallel_size=2)
    engine, *_ = deepspeed.initialize(model=model, config=..., mpu=mpu)
    for part in UlyssesSPDataLoaderAdapter(loader, ...): ...

Registering opens the groups of neighbours that share each sequence, and tells nothing else to the model: `initialize`
makes the axis that `mpu` asks for, as the key sequence_parallel_size does. A loader of these programs gives each rank
batches of its own. The adapter has the ranks of a group take them one after another, each rank its part of them.

The program adds up the losses of a group's ranks itself, by an all-gather whose backward adds up what all of them send
back. So each rank's gradients are those of its part by the number of ranks, and their mean over all ranks is the whole
sequence's, as along the data axis.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.engine.launch import init_distributed
from infinity.errors import ConfigError
from infinity.parallel.sequence import axis_of, leading_of, next_labels


class SequenceRanks:
    """The `mpu` that registering returns: the ranks that share each sequence, which are neighbours."""

    def __init__(self) -> None:
        self._size = 1
        self._group: Any = None
        # Of the latest model that was registered itself, not by its name.
        self._model: weakref.ref[nn.Module] | None = None
        self._attention: str | None = None
        self._in_evaluation = False

    def initialize_sequence_parallel(self, sequence_parallel_size: int) -> None:
        """Open the groups, unless those of before are as large and open still. Collective.

        ConfigError for a size that does not divide the ranks.
        """
        init_distributed()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if sequence_parallel_size < 1 or ranks % sequence_parallel_size:
            raise ConfigError(
                f"sequence_parallel_size={sequence_parallel_size} does not divide the {ranks} ranks: set sp_size to a "
                f"divisor of {ranks}, or start other ranks"
            )
        if sequence_parallel_size == self._size and (self._size == 1 or self._group in _world.pg_group_ranks):
            return
        self._size = sequence_parallel_size
        for first in range(0, ranks, self._size):
            members = range(first, first + self._size)
            group = dist.new_group(list(members))
            self._group = group if rank in members else self._group

    def get_sequence_parallel_group(self) -> Any:
        """Return torch's group of them."""
        return self._group

    def get_sequence_parallel_world_size(self) -> int:
        """Return how many share each sequence."""
        return self._size

    def get_sequence_parallel_rank(self) -> int:
        """Return this rank's place among them, which is that of its part in the sequence."""
        return dist.get_rank() % self._size if self._size > 1 else 0

    def register(self, model: nn.Module | str, attention: str | None, *, in_evaluation: bool) -> None:
        """Note how a model is to run with them. attention: transformers' name of the function; None for its own."""
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else None
        self._attention, self._in_evaluation = attention, in_evaluation

    def configured(self, config: Config, model: nn.Module | None, mpu: Any) -> Config:
        """Return a configuration with the axis that is asked for by `initialize(mpu=mpu)`, and have the model compute
        attention by the function that was named; ConfigError where it is registered and `mpu` is left out.
        """
        if mpu is not self:
            if mpu is None and self._size > 1 and self._model is not None and self._model() is model:
                raise ConfigError(
                    f"the model was registered for {self._size} ranks that share each sequence: give initialize() the "
                    "mpu that register_with_transformers returned"
                )
            return config
        if config.sequence_parallel_size not in (1, self._size):
            raise ConfigError(
                f"sequence_parallel_size is {config.sequence_parallel_size} in the configuration, and the model was "
                f"registered for {self._size}: leave the key out, which mpu says already"
            )
        set_attention: Any = getattr(model, "set_attn_implementation", None)
        if set_attention is not None and self._attention is not None:
            set_attention(self._attention)
        return config.model_copy(update={"sequence_parallel_size": self._size})

    def made(self, engine: Engine) -> None:
        """Have the engine exchange in evaluation, too, if batches are cut there."""
        axis = axis_of(engine.module)
        if axis is not None:
            axis.divide_in_evaluation(self._in_evaluation)


mpu = SequenceRanks()


class UlyssesSPAttentionHF:
    """DeepSpeed's name of what registers a model."""

    @classmethod
    def register_with_transformers(
        cls, model_name_or_path: nn.Module | str, core_attn_implementation: str | None, sequence_parallel_size: int,
        micro_batch_size: int | None = None, seq_length: int | None = None, seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
    ) -> SequenceRanks:  # fmt: skip
        """Return the `mpu` with which `initialize` has a model of transformers share sequences. Collective.

        model_name_or_path: the model, or the name of one that is made later. core_attn_implementation: transformers'
        name of the attention function, "sdpa" and the like; None: the model's. disable_in_eval: in evaluation mode
        batches are whole and nothing is exchanged; False: they are cut there, too. micro_batch_size and seq_length_...:
        nothing here depends on them; a fixed seq_length that the ranks do not divide is a ConfigError.
        """
        if seq_length is not None and not seq_length_is_variable and seq_length % sequence_parallel_size:
            raise ConfigError(
                f"seq_length={seq_length} cannot be cut into {sequence_parallel_size} parts: pad batches to "
                f"{seq_length + -seq_length % sequence_parallel_size} tokens"
            )
        mpu.initialize_sequence_parallel(sequence_parallel_size)
        mpu.register(model_name_or_path, core_attn_implementation, in_evaluation=not disable_in_eval)
        return mpu


class UlyssesSPDataLoaderAdapter:
    """The batches of the loaders of a group's ranks, one after another, each rank its part of them.

    So it has `sp_world_size` times as many batches as its own loader. A batch is a mapping with "input_ids" and
    "position_ids" [batch, tokens]; tensors with these two sizes are cut along their tokens, and "shift_labels", of the
    next token each, take the place of "labels". Other names are those of the loader.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        """DeepSpeed's arguments; `sp_rank` follows from the group."""
        self.dl = dl
        self._group, self._size, self._device = sp_group, sp_world_size, device
        # Parts that are left out at the beginning of each epoch, fewer than the size.
        self._first = 0

    def __len__(self) -> int:
        return self._size * len(self.dl) - self._first

    def __getattr__(self, name: str) -> Any:
        if name == "dl":
            # While it is being copied or unpickled.
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        left_out = self._first
        batches = iter(self.dl)
        while (parts := self._exchanged(next(batches, None))) is not None:
            # accelerate steps behind a loader's last batch, and that is the last part of it.
            ends = getattr(self.dl, "end_of_dataloader", None)
            for place, part in enumerate(parts):
                if ends is not None:
                    vars(self.dl).update(end_of_dataloader=ends and place == len(parts) - 1)
                if left_out:
                    left_out -= 1
                    continue
                yield {
                    name: value.to(self._device) if isinstance(value, Tensor) else value for name, value in part.items()
                }

    def without_first(self, count: int, skip: Any) -> UlyssesSPDataLoaderAdapter:
        """Return one that leaves out the first `count` batches. skip: accelerate's function, for its own loader."""
        found, count = copy.copy(self), count + self._first
        dl = skip(self.dl, count // self._size) if count >= self._size else self.dl
        vars(found).update(dl=dl, _first=count % self._size)
        return found

    def _exchanged(self, batch: Any) -> list[dict[str, Any]] | None:
        """Return this rank's part of the batch of each rank; None behind the last ones. What is wrong with one rank's
        is an error on all.
        """
        mine: list[Any] = [None] * self._size
        if batch is not None:
            try:
                mine = _parts(batch, self._size)
            except ConfigError as error:
                mine = [error] * self._size
        found: list[Any] = []
        members = dist.get_process_group_ranks(self._group)
        for rank in members:
            # Behind the call, the part of this rank.
            received: list[Any] = [None]
            dist.scatter_object_list(received, mine if rank == dist.get_rank() else None, src=rank, group=self._group)
            found += received
        for part in found:
            if isinstance(part, ConfigError):
                raise part
        ended = [part is None for part in found]
        if any(ended) and not all(ended):
            raise ConfigError(
                f"the ranks of a sequence take turns with their batches, and rank {members[ended.index(False)]} has "
                "one more: give all ranks as many, with drop_last=True or accelerate's even_batches"
            )
        return None if any(ended) else found


def skipping(skip: Any) -> Any:
    """Return accelerate's `skip_first_batches` for adapters, too."""

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, UlyssesSPDataLoaderAdapter):
            return dataloader.without_first(num_batches, skip)
        return skip(dataloader, num_batches)

    vars(skip_first_batches)["__infinity__"] = True
    return skip_first_batches


def _parts(batch: Any, size: int) -> list[dict[str, Any]]:
    """A batch in as many parts; ConfigError for one that cannot be cut."""
    named = batch if isinstance(batch, Mapping) else {type(batch).__name__: None}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    leading = leading_of(tensors)
    if leading is None:
        raise ConfigError(
            "a batch that ranks of a sequence share is a mapping with input_ids of shape [batch, tokens], and the "
            f"loader gives {', '.join(named) or 'nothing'}"
        )
    rows, tokens = leading.shape[:2]
    if "position_ids" not in tensors:
        raise ConfigError(
            "the batches of the loader have no position_ids, which ranks of a sequence need, as each has other tokens: "
            "have the collator add them (torch.arange(tokens) for each sample; from 0 again for each packed one)"
        )
    if tokens % size:
        raise ConfigError(
            f"a batch of {tokens} tokens cannot be cut into {size} parts: have the collator pad to a multiple of "
            f"{size} (pad_to_multiple_of={size})"
        )
    found = dict(batch)
    if (labels := found.pop("labels", None)) is not None and "shift_labels" not in found:
        found["shift_labels"] = next_labels(labels)
    # As they travel: on the CPU, and nothing but the part.
    cut = {
        name: [part.detach().cpu().clone() for part in value.chunk(size, 1)]
        for name, value in found.items() if isinstance(value, Tensor) and value.shape[:2] == (rows, tokens)
    }  # fmt: skip
    return [
        {name: cut[name][place] if name in cut else value for name, value in found.items()} for place in range(size)
    ]
