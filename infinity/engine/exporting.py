"""`engine.export`: a Hugging Face folder from a model on its tiers, in bounded memory.

No tensor is put together anywhere: every rank writes the ranges that lie in its own partitions, from whatever tier,
straight to their places in the files. So the folder must be one that all ranks see. What one rank meets, all raise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from infinity.checkpoint.describe import describe_model, persistent_buffers, sources_of
from infinity.checkpoint.description import SHARD_NBYTES, TensorSource, copy_files, float_dtype
from infinity.checkpoint.ranks import run_on_all_ranks
from infinity.checkpoint.weight_writer import (
    Shard,
    WeightWriter,
    as_bytes,
    beside,
    check_complete,
    publish_folder,
    write_texts,
)
from infinity.config.units import parse_bytes
from infinity.engine.runtime import Runtime
from infinity.errors import ConfigError, StateError
from infinity.log import PhaseProgress
from infinity.memory.master_weights import load_masters
from infinity.plan.layout import UnitLayout, slices_of
from infinity.plan.types import Key, Kind
from infinity.zero.unit import Unit

# Elements that are converted at a time.
_BLOCK_NUMEL = 4 << 20


def export_folder(
    parts: Runtime, folder: str | Path, *, dtype: str = "bf16", max_shard_size: int | str = SHARD_NBYTES,
    one_file: bool = False, tokenizer: Any = None, stem: str = "model", frozen: bool = True,
) -> Path:  # fmt: skip
    """See `Engine.export`. stem: name of the weights' file. frozen: with parameters that are not trained."""
    parts.hooks.check_tree()
    target, chosen = Path(folder), float_dtype(dtype)
    description, sources = describe_model(parts.module), sources_of(parts.module)
    if not frozen:
        trained = {slot.name for unit in parts.units if unit.layout.trainable for slot in unit.layout.slots}
        sources = [source for source in sources if source.name in trained]
    nbytes_max = None if one_file else parse_bytes(max_shard_size)
    shards = description.shards(sources, chosen, stem=stem, nbytes_max=nbytes_max)
    first = parts.groups.ranks.rank == 0
    # The folder that rank 0 has made, while it is beside its place.
    hidden: list[Path] = []

    def prepare() -> str:
        # What the latest step does behind the program comes first.
        parts.stepper.finish()
        if not first:
            return ""
        if target.exists() and not target.is_dir():
            raise ConfigError(f"export: {target} is a file; name a folder")
        made = beside(target)
        hidden.append(made)
        made.mkdir(parents=True)
        write_texts(made, description.companions(shards, chosen, stem=stem))
        if tokenizer is not None:
            tokenizer.save_pretrained(made)
        copy_files(description.origin, made)
        WeightWriter(made, shards, create=True).close()
        return made.name

    try:
        names = run_on_all_ranks(parts.groups, "beginning of an export", prepare, path=target)
        made = target.resolve().parent / names[0]
        done = run_on_all_ranks(
            parts.groups, "files of an export", lambda: _write(parts, sources, shards, made), path=target
        )

        def finish() -> None:
            if first:
                check_complete(sum(done), shards, target)
                publish_folder(made, target)

        run_on_all_ranks(parts.groups, "end of an export", finish, path=target)
    finally:
        for folder in hidden:
            shutil.rmtree(folder, ignore_errors=True)
    return target


def export_16bit(parts: Runtime, folder: str | os.PathLike[str], filename: str, *, frozen: bool) -> None:
    """See `Engine.save_16bit_model`."""
    stem = Path(filename).stem
    dtype = "fp16" if parts.config.compute_dtype == "fp16" else "bf16"
    stem = "model" if stem == "pytorch_model" else stem
    export_folder(parts, os.fspath(folder), dtype=dtype, stem=stem, frozen=frozen)


def _write(parts: Runtime, sources: Sequence[TensorSource], shards: Sequence[Shard], made: Path) -> int:
    """Write this rank's ranges; returns the bytes."""
    ranks = parts.groups.ranks
    if not made.is_dir():
        raise StateError(
            f"the folder that rank 0 has made in {made.parent} is not seen by rank {ranks.rank}: every rank writes its "
            "own part of an export, so name a folder on a drive that all nodes share"
        )
    with WeightWriter(made, shards, create=False) as writer:
        wanted = writer.dtypes
        total = sum(entry.nbytes for shard in shards for entry, _ in shard.entries)
        progress = PhaseProgress(f"export to {made.parent}", total // parts.groups.data.size)
        for name, start, values in _elements(parts, wanted):
            raw = as_bytes(values, wanted[name], name)
            writer.write(name, start, raw)
            progress.advance(len(raw))
        if ranks.rank == 0:
            for name, buffer in persistent_buffers(parts.module).items():
                if name in wanted:
                    writer.write(name, 0, as_bytes(buffer.detach().cpu().reshape(-1), wanted[name], name))
        writer.sync()
        return writer.written_nbytes


def _elements(parts: Runtime, wanted: Mapping[str, str]) -> Iterator[tuple[str, int, Tensor]]:
    """(tensor, first element, values [n] on the CPU) of all parameters' elements that this rank writes."""
    for unit in parts.units:
        layout: UnitLayout = unit.layout
        dtypes = {wanted[slot.name] for slot in layout.slots if slot.name in wanted}
        if not dtypes:
            continue
        first, start, stop = _own_range(parts, unit)
        # 16 bits are in the parameters themselves: no optimizer state is read for them.
        masters = layout.trainable and dtypes == {"F32"} and layout.dtype != "fp32"
        for at, values in (_masters if masters else _values)(parts, unit, start, stop):
            for piece in layout.overlaps(first + at, first + at + values.numel()):
                if piece.slot.name in wanted:
                    own = values[piece.range_start : piece.range_start + piece.numel]
                    yield piece.slot.name, piece.tensor_start, own


def _own_range(parts: Runtime, unit: Unit) -> tuple[int, int, int]:
    """Where this rank's partition begins in the unit, and the part of it that this rank writes: [start, stop)."""
    numel = unit.layout.partition_numel(unit.placed.parts)
    if unit.placed.parts > 1:
        return unit.rank_in_parts * numel, 0, numel
    # Every rank has everything: each writes a share.
    group = parts.groups.data
    return 0, numel * group.index // group.size, numel * (group.index + 1) // group.size


def _values(parts: Runtime, unit: Unit, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    with parts.store.read(unit.key) as (partition,):
        whole = partition.view(Kind.PARAM)
        for at in range(start, stop, _BLOCK_NUMEL):
            yield at, whole[at : min(at + _BLOCK_NUMEL, stop)].detach().cpu()


def _masters(parts: Runtime, unit: Unit, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    for group, piece, at in slices_of(parts.plan.sub_groups, unit.layout.index):
        low, high = max(start, piece.start), min(stop, piece.start + piece.numel)
        if low >= high:
            continue
        with parts.store.read(unit.key, Key(Kind.STATES, group.index)) as (partition, states):
            whole = partition.view(Kind.PARAM)
            for begin in range(low, high, _BLOCK_NUMEL):
                end = min(begin + _BLOCK_NUMEL, high)
                yield begin, load_masters(whole[begin:end], states, at + begin - piece.start)
