"""`engine.export`: a Hugging Face folder from a model on its tiers, in bounded memory.

No rank assembles a tensor: every rank writes the ranges in its own partitions, from whatever tier, straight to their
places in the files. All ranks must therefore see the folder. An error on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.base.sizes import parse_bytes
from infinity.checkpoint.model_folder import SHARD_NBYTES, copy_files, describe_model, float_dtype, sources_of
from infinity.checkpoint.pieces import persistent_buffers, shard_ranges
from infinity.checkpoint.weight_writer import (
    EXPORT_NUMEL,
    WeightFile,
    WeightWriter,
    as_bytes,
    check_complete,
    folder_beside,
    publish_folder,
    write_texts,
)
from infinity.distributed.consistency import run_on_all_ranks
from infinity.engine.runtime import Runtime
from infinity.errors import ConfigError, StateError
from infinity.log import PhaseProgress
from infinity.memory.shard_copy import load_masters
from infinity.plan.layout import Slot, UnitLayout, states_of
from infinity.plan.plan import model_params, place_of_buffer
from infinity.plan.types import Kind
from infinity.zero.access import pass_along
from infinity.zero.unit import Unit


def export_folder(
    runtime: Runtime, target: Path, *, dtype: str = "bf16", max_shard_size: int | str = SHARD_NBYTES,
    one_file: bool = False, tokenizer: Any = None, stem: str = "model", frozen: bool = True,
) -> Path:  # fmt: skip
    """See `Engine.export`. stem: name of the weights' file. frozen: with parameters that are not trained."""
    runtime.attached.hooks.check_tree()
    chosen = float_dtype(dtype)
    shapes = runtime.whole_shapes
    description, sources = describe_model(runtime.module, shapes), sources_of(runtime.module, shapes)
    if not frozen:
        trained = {name for name, param in model_params(runtime.plan).items() if param.trainable}
        sources = [source for source in sources if source.name in trained]
    nbytes_max = None if one_file else parse_bytes(max_shard_size)
    shards = description.shards(sources, chosen, stem=stem, nbytes_max=nbytes_max)
    first = runtime.groups.ranks.rank == 0
    ask = partial(run_on_all_ranks, runtime.groups, path=target)

    def prepare() -> str:
        # The step that may go on beside the program comes first.
        runtime.step.synchronize()
        if not first:
            return ""
        if target.exists() and not target.is_dir():
            raise ConfigError(f"export: {target} is a file; name a folder")
        made = stack.enter_context(folder_beside(target))
        write_texts(made, description.companions(shards, chosen, stem=stem))
        if tokenizer is not None:
            tokenizer.save_pretrained(made)
        copy_files(description.origin, made)
        WeightWriter(made, shards, create=True).close()
        return made.name

    def finish() -> None:
        if first:
            check_complete(sum(done), shards, target)
            publish_folder(made, target)

    with ExitStack() as stack:
        made = target.resolve().parent / ask("beginning of an export", prepare)[0]
        done = ask("files of an export", lambda: _write(runtime, shards, made))
        ask("end of an export", finish)
    return target


def export_16bit(runtime: Runtime, folder: Path, filename: str, *, frozen: bool) -> None:
    """See `Engine.save_16bit_model`."""
    stem = Path(filename).stem
    dtype = "fp16" if runtime.config.compute_dtype == "fp16" else "bf16"
    stem = "model" if stem == "pytorch_model" else stem
    export_folder(runtime, folder, dtype=dtype, stem=stem, frozen=frozen)


def whole_buffers(runtime: Runtime, *, wanted: bool) -> dict[str, Tensor]:
    """Return the buffers of the module's state dict in CPU memory, each from the stage that runs its module; {} unless
    `wanted`, which may be on rank 0 only. Collective.
    """
    group, found = runtime.groups.pipeline, dict[str, Tensor]()
    for name, buffer in persistent_buffers(runtime.module).items() if runtime.stands_for_stage else ():
        place = place_of_buffer(runtime.plan, name)
        values = buffer.detach().cpu()
        if place > 0:
            # In memory of its own: this stage's copy stays as it is.
            values = torch.empty_like(values, memory_format=torch.contiguous_format).copy_(values)
            pass_along(values.view(-1), group, place, f"buffer {name}")
        found[name] = values
    return found if wanted else {}


def _write(runtime: Runtime, shards: Sequence[WeightFile], made: Path) -> int:
    """Write this rank's ranges; return the number of bytes."""
    groups = runtime.groups
    if not made.is_dir():
        raise StateError(
            f"the folder that rank 0 has made in {made.parent} is not seen by rank {groups.ranks.rank}: every rank "
            "writes its own part of an export, so name a folder on a drive that all nodes share"
        )
    with WeightWriter(made, shards, create=False) as writer:
        wanted = writer.dtypes
        total = sum(entry.nbytes for shard in shards for entry, _ in shard.entries)
        progress = PhaseProgress(f"export to {made.parent}", total // groups.world.size)
        for slot, start, values in _elements(runtime, wanted):
            raw = as_bytes(values, wanted[slot.name], slot.name)
            shard = shard_ranges(slot, groups.tensor.index)
            if shard is None:
                writer.write(slot.name, start, raw)
            else:
                writer.write_shard(slot.name, slot.whole_shape, shard, start, raw)
            progress.advance(len(raw))
        for name, buffer in persistent_buffers(runtime.module).items():
            if name in wanted and runtime.tells_buffer(name):
                writer.write(name, 0, as_bytes(buffer.detach().cpu().reshape(-1), wanted[name], name))
        writer.sync()
        return writer.written_nbytes


def _elements(runtime: Runtime, wanted: Mapping[str, str]) -> Iterator[tuple[Slot, int, Tensor]]:
    """Yield (slot, first element in its order, values [n] on the CPU) for all that this rank writes of parameters."""
    others = runtime.plan.told_elsewhere
    for unit in runtime.access.units:
        layout: UnitLayout = unit.layout
        if layout.index in others:
            continue
        # What is not cut is the same on all ranks of the tensor axis.
        first_of_axis = runtime.groups.tensor.index == 0
        mine = [slot for slot in layout.slots if first_of_axis or slot.shard is not None]
        dtypes = {wanted[slot.name] for slot in mine if slot.name in wanted}
        if not dtypes:
            continue
        first, start, stop = _own_range(runtime, unit)
        # The parameters hold 16-bit values themselves, so no optimizer state is read.
        masters = layout.trainable and dtypes == {"fp32"} and layout.dtype != "fp32"
        for at, values in (_masters if masters else _values)(runtime, unit, start, stop):
            for piece in layout.overlaps(first + at, first + at + values.numel()):
                if piece.slot.name in wanted and piece.slot in mine:
                    own = values[piece.range_start : piece.range_start + piece.numel]
                    yield piece.slot, piece.tensor_start, own


def _own_range(runtime: Runtime, unit: Unit) -> tuple[int, int, int]:
    """Return where this rank's partition begins in the unit, and the part of it that this rank writes: start, stop."""
    numel = unit.layout.partition_numel(unit.placed.parts)
    if unit.placed.parts > 1:
        return unit.rank_in_parts * numel, 0, numel
    # Every rank has the whole unit: each writes a share.
    group = runtime.groups.data
    return 0, numel * group.index // group.size, numel * (group.index + 1) // group.size


def _values(runtime: Runtime, unit: Unit, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    with runtime.store.read(unit.key) as (partition,):
        whole = partition.view(Kind.PARAM)
        for at in range(start, stop, EXPORT_NUMEL):
            yield at, whole[at : min(at + EXPORT_NUMEL, stop)].detach().cpu()


def _masters(runtime: Runtime, unit: Unit, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    for key, piece, at in states_of(runtime.plan.sub_groups, unit.layout.index):
        low, high = max(start, piece.start), min(stop, piece.start + piece.numel)
        if low >= high:
            continue
        with runtime.store.read(unit.key, key) as (partition, states):
            whole = partition.view(Kind.PARAM)
            for begin in range(low, high, EXPORT_NUMEL):
                end = min(begin + EXPORT_NUMEL, high)
                yield begin, load_masters(whole[begin:end], states, at + begin - piece.start)
