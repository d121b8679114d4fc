"""A Hugging Face folder from a checkpoint, without the model's code, process groups or an accelerator.

The checkpoint has recorded what the folder needs besides weights (`infinity.checkpoint.model_folder`). The files are
byte-identical to those that `engine.export` would have written at the moment of the save.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from infinity.base.untrusted import shortened
from infinity.checkpoint.deepspeed.checkpoint import DeepSpeedCheckpoint, DeepSpeedSource
from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import BUFFER, MANIFEST, PARAM, Manifest, TensorInfo, check_files, explained
from infinity.checkpoint.model_folder import SHARD_NBYTES, Description, TensorSource, copy_files, float_dtype
from infinity.checkpoint.restore import CheckpointSource
from infinity.checkpoint.weight_writer import (
    EXPORT_NUMEL,
    WeightWriter,
    as_bytes,
    check_complete,
    folder_beside,
    publish_folder,
    write_texts,
)
from infinity.errors import CheckpointError, InfinityError


def extract(
    folder: Path, saved: Manifest | DeepSpeedCheckpoint, target: Path, *, dtype: str = "bf16",
    nbytes_max: int | None = SHARD_NBYTES, origin: Path | None = None, frozen: bool = True,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Path:  # fmt: skip
    """Write a checkpoint's model into `target`; return it. CheckpointError where it lacks what an export needs.

    saved: the manifest of `folder`, or what `read_deepspeed` returned for it. nbytes_max: largest weight file; None for
    a single file. origin: the folder from which config.json (where the checkpoint has none) and tokenizer files are
    copied; without it none are copied, because the folder that the checkpoint names is not trusted. frozen: False
    leaves out parameters that were not trained. tell: called with (bytes done, all bytes).
    """
    chosen = float_dtype(dtype)
    # DeepSpeed writes down neither the model's class nor its configuration.
    description = description_of(folder, saved) if isinstance(saved, Manifest) else Description("", aliases=saved.tied)
    tensors = saved.tensors
    kept = {
        name: info
        for name, info in tensors.items()
        if frozen or info.trainable or (description.weights is not None and "model" not in description.weights)
    }
    sources = [TensorSource(name, info.dtype, info.shape, BUFFER in info.kinds) for name, info in kept.items()]
    shards = description.shards(sources, chosen, nbytes_max=nbytes_max)
    wanted = {entry.source for shard in shards for entry, _ in shard.entries}
    lacking = sorted(name for name in wanted if not tensors[name].kinds)
    if lacking:
        raise CheckpointError(
            folder, f"it was saved without frozen parameters, such as {lacking[0]}",
            "Export the trained ones alone (--trained-only), or from a checkpoint that has all",
        )  # fmt: skip
    try:
        with ExitStack() as stack:
            # Checked first: files are made as large as the checkpoint says.
            source = stack.enter_context(export_source(folder, saved, wanted))
            made = stack.enter_context(folder_beside(target))
            _copy(origin, made)
            write_texts(made, description.companions(shards, chosen))
            total = sum(entry.nbytes for shard in shards for entry, _ in shard.entries)
            with WeightWriter(made, shards, create=True) as writer:
                for name, dtype_stored in writer.dtypes.items():
                    for start, values in _values(source, name, kept[name], dtype_stored):
                        writer.write(name, start, as_bytes(values, dtype_stored, name))
                        tell(writer.written_nbytes, total)
                writer.sync()
                check_complete(writer.written_nbytes, shards, target)
            publish_folder(made, target)
    except OSError as error:
        if isinstance(error, InfinityError):
            raise
        raise CheckpointError(target, f"the system refused ({error})", "Mend that, or name another folder") from error
    return target


# What an export reads: elements of a tensor in their own dtype, or its masters in fp32.
ExportSource = CheckpointSource | DeepSpeedSource


@contextmanager
def export_source(folder: Path, saved: Manifest | DeepSpeedCheckpoint, wanted: Iterable[str]) -> Iterator[ExportSource]:
    """Open a checkpoint for the length of a block. CheckpointError where a file is damaged, or does not have every
    element of the tensors that are `wanted`.
    """
    if not isinstance(saved, Manifest):
        yield DeepSpeedSource(saved.layout)
        return
    with ExtentReader(folder, saved, check_files(folder, saved)) as reader:
        reader.check_covered({name: saved.tensors[name] for name in wanted})
        yield CheckpointSource(reader)


def description_of(folder: Path, manifest: Manifest) -> Description:
    """Return what an export has besides weights; CheckpointError where the manifest's description cannot be used."""
    try:
        description = Description.from_json(manifest.module.get("export"))
        sources = [TensorSource(name, info.dtype, info.shape) for name, info in manifest.tensors.items()]
        if misplaced := description.misplaced(sources):
            raise ValueError(f"{shortened(misplaced)} is no part of a tensor of the model")
    except ValueError as error:
        raise CheckpointError(
            folder / MANIFEST, f"what it says of exports (module.export) cannot be used: {explained(error)}",
            "Load the checkpoint into an engine, and call engine.export()",
        ) from error  # fmt: skip
    return description


def _copy(origin: Path | None, made: Path) -> None:
    """Copy files of the model's folder that the user names; the checkpoint's own are written over them afterwards."""
    if origin is None:
        return
    if not origin.is_dir():
        raise CheckpointError(origin, "there is no such folder", "Name the folder of the model's config.json")
    for name in ("config.json", "generation_config.json"):
        if (origin / name).is_file():
            shutil.copyfile(origin / name, made / name)
    copy_files(origin, made)


def _values(source: ExportSource, name: str, info: TensorInfo, dtype: str) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, values [n]) of a tensor: its masters for fp32, otherwise the values that forward uses."""
    numel = torch.Size(info.shape).numel()
    for start in range(0, numel, EXPORT_NUMEL):
        count = min(EXPORT_NUMEL, numel - start)
        if dtype == "fp32" and BUFFER not in info.kinds and info.trainable:
            yield start, source.masters(name, start, count)
            continue
        # The parameters hold 16-bit values themselves, so no file of states is opened.
        yield start, source.values(name, BUFFER if BUFFER in info.kinds else PARAM, start, count)


