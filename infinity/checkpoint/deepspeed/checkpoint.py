"""One checkpoint of DeepSpeed's: `read_deepspeed(folder)`, and a source of its values for a load or an export."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.checkpoint.deepspeed.layout import (
    IN_PARTS,
    Layout,
    RankFiles,
    add_untrained,
    add_zero3,
    add_zero12,
    as_dict,
    is_deepspeed,
    open_files,
    optimizer_state,
    param_shapes,
    tensor_name,
)
from infinity.checkpoint.deepspeed.run_state import client_state_of, counters_of, engine_state, kind_of
from infinity.checkpoint.deepspeed.torch_file import TorchFile
from infinity.checkpoint.deepspeed.universal import FOLDER, add_universal, optimizer_file
from infinity.checkpoint.format import BUFFER, PARAM, FileExtent, ShardRanges, TensorInfo, is_tag, latest_tag
from infinity.checkpoint.pieces import TensorSpan
from infinity.config.untrusted import read_metadata, reason, shortened
from infinity.errors import CheckpointError
from infinity.memory.pages import page_aligned
from infinity.memory.partition import DTYPES
from infinity.ops.checksum import checksum

_LATEST_UNIVERSAL = "latest_universal"
# In the place of an optimizer's name, where there are weights alone: ZeRO was off, or its files were not copied.
_NO_STATES = "no optimizer (it has no file zero_pp_rank_*_optim_states.pt)"


@dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """What a folder holds. tied: further names of tensors. engine: the state of the run. facts: for people.
    files: all that were read.

    identity: differs where two ranks see different files.
    """

    folder: Path
    layout: Layout
    tied: Mapping[str, str]
    engine: Mapping[str, Any]
    client_state: Mapping[str, Any]
    facts: Mapping[str, Any]
    identity: str
    files: Sequence[TorchFile]

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all tensors in the files: what `verify_deepspeed` reads."""
        return sum(record.nbytes for file in self.files for record in file.storages)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by name, and the kinds that are kept of each."""
        return self.layout.tensors


class DeepSpeedSource:
    """See `infinity.checkpoint.restore.ValueSource`. It returns views of memory that it reuses."""

    def __init__(self, layout: Layout) -> None:
        self.tensors = layout.tensors
        self._pieces = layout.pieces
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")

    def values(self, name: str, kind: str, start: int, numel: int) -> Tensor:
        """Return elements of one kind; valid until the next call."""
        info = self.tensors[name]
        dtype = DTYPES[info.dtype] if kind in (PARAM, BUFFER) else torch.float32
        if self._room.numel() < numel * dtype.itemsize:
            self._room = page_aligned(numel * dtype.itemsize)
        values = self._room[: numel * dtype.itemsize].view(dtype)
        self._read(name, kind, start, values)
        return values

    def masters(self, name: str, start: int, numel: int) -> Tensor:
        """See `ValueSource`."""
        values = self.values(name, BUFFER if BUFFER in self.tensors[name].kinds else PARAM, start, numel)
        return values.float() if values.is_floating_point() else values

    def read(self, name: str, kind: str, start: int, numel: int, out: Tensor) -> None:
        """See `ValueSource`."""
        dtype = DTYPES[self.tensors[name].dtype] if kind in (PARAM, BUFFER) else torch.float32
        self._read(name, kind, start, out.view(dtype))

    def read_shard(self, name: str, kind: str, shard: ShardRanges, start: int, numel: int, out: Tensor) -> bool:
        """Return False: tensors are whole."""
        return False

    def extent_of(self, piece: TensorSpan) -> FileExtent | None:
        """Return None: there are no extents."""
        return None

    def read_bytes(self, extent: FileExtent, begin: int, target: Tensor) -> None:
        """Never called, because there are no extents."""
        raise NotImplementedError

    def _read(self, name: str, kind: str, start: int, target: Tensor) -> None:
        stop = start + target.numel()
        for piece in self._pieces[name, kind]:
            begin, end = max(start, piece.start), min(stop, piece.start + piece.numel)
            if begin < end:
                piece.stored.read(piece.at + begin - piece.start, target[begin - start : end - start])


def find_deepspeed(directory: Path | str, tag: str | None = None) -> Path | None:
    """Return the folder of a tag's checkpoint of DeepSpeed, by default that of DIR/latest (or DIR/latest_universal)."""
    folder = Path(directory)
    tag = (latest_tag(folder) or _latest_universal(folder)) if tag is None else tag
    if tag is None or not is_tag(tag):
        return None
    return folder / tag if holds_deepspeed(folder / tag) else None


def holds_deepspeed(folder: Path) -> bool:
    """Return whether a folder itself is a checkpoint of DeepSpeed."""
    try:
        return is_deepspeed(os.listdir(folder))
    except OSError:
        return False


def read_deepspeed(folder: Path) -> DeepSpeedCheckpoint:
    """Look at a checkpoint without reading its tensors' elements.

    Raises:
        CheckpointError: a file is missing, damaged, contradicts another, or holds what is not read.
    """
    files = RankFiles.of(folder, os.listdir(folder))
    models, states = open_files(folder, files.model), open_files(folder, files.states)
    universal = (folder / FOLDER).exists() and not states
    layout = Layout()
    model, optimizer = models[0], models[0]
    inner: dict[Any, Any] = {}
    stage: Any = 0
    if universal:
        optimizer = optimizer_file(folder)
        inner = as_dict(optimizer, optimizer.value, "its value")
        stage = inner.get("zero_stage")
        in_parts = model.path.name.startswith(IN_PARTS)
        if type(stage) is not int or not 1 <= stage <= 3 or in_parts != (stage == 3):
            raise optimizer.error(f"its ZeRO stage is {shortened(stage)}, beside {model.path.name}")
        if in_parts and inner.get("partition_count") != len(models):
            ranks = shortened(inner.get("partition_count"))
            raise optimizer.error(f"{ranks} ranks saved it, and {len(models)} files *_model_states.pt exist")
        add_universal(layout, folder, model)
    elif states:
        _refuse_copies(states)
        optimizer, inner = states[0], optimizer_state(states[0])
        stage = _checked_stage(models, states)
        (add_zero3 if stage == 3 else add_zero12)(layout, model, states)
    elif files.model[0].startswith(IN_PARTS):
        raise model.error(f"it is of ZeRO stage 3, and {folder} has no files zero_pp_rank_*_optim_states.pt")
    trained = bool(layout.tensors)
    add_untrained(layout, models)
    moments = sorted({kind for _, kind in layout.pieces} - {PARAM, BUFFER})
    kind = kind_of(model, moments) if trained else _NO_STATES
    _check_steps(optimizer, layout, counters_of(model))
    names = [list(group) for group in param_shapes(model)] if trained else []
    value = as_dict(model, model.value, "its value")
    version = value.get("ds_version")
    read = {file.path: file for file in (*models, *states, optimizer)}
    read.update((piece.stored.file.path, piece.stored.file) for pieces in layout.pieces.values() for piece in pieces)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(read)}
    return DeepSpeedCheckpoint(
        folder, layout, _tied(model, layout), engine_state(model, optimizer, inner, names, layout.steps, kind),
        client_state_of(model),
        {
            "version": version if isinstance(version, str) else "unknown", "stage": stage, "universal": universal,
            "ranks": max(len(states), len(models)), "files": sizes,
        },
        f"{folder.name} {checksum(repr(sorted(sizes.items())).encode()):08x}", [read[path] for path in sorted(read)],
    )  # fmt: skip


def verify_deepspeed(checkpoint: DeepSpeedCheckpoint, share: int = 0, shares: int = 1) -> Iterator[int]:
    """Read the tensors of all files, or one of several shares of them, and yield the bytes of each block.

    Raises:
        CheckpointError: bytes are not those that were written, by the CRC-32 that torch.save keeps of them.
        TransferError: a file cannot be read.
    """
    records = [(file, record) for file in checkpoint.files for record in file.storages]
    for file, record in records[share::shares]:
        yield from file.verify(record)


def _refuse_copies(states: Sequence[TorchFile]) -> None:
    """CheckpointError where a rank's states are those of another rank."""
    seen: dict[Any, TorchFile] = {}
    for file in states:
        found = frozenset((record.name, record.nbytes, record.crc32) for record in file.storages)
        first = seen.setdefault(found, file)
        # Parts of zeros are alike.
        if first is not file and not all(record.crc32 is None or file.is_uniform(record) for record in file.storages):
            raise file.error(f"it holds the tensors of {first.path.name}, another rank's: one is a copy of the other")


def _checked_stage(models: Sequence[TorchFile], states: Sequence[TorchFile]) -> int:
    """Return the ZeRO stage, in which all files agree, and for which they are as many as they say."""
    first = states[0]
    stage = optimizer_state(first).get("zero_stage")
    if type(stage) is not int or stage not in (1, 2, 3):
        raise first.error(f"its ZeRO stage is {shortened(stage)}; 1, 2 and 3 are read")
    for file in states:
        inner = optimizer_state(file)
        if inner.get("zero_stage") != stage:
            other = shortened(inner.get("zero_stage"))
            raise file.error(f"it is of ZeRO stage {other}, and {first.path.name} of stage {stage}")
        counts = inner.get("partition_count")
        for count in counts if isinstance(counts, list) else [counts]:
            if count != len(states):
                raise file.error(f"{shortened(count)} ranks saved it, and {len(states)} files *_optim_states.pt exist")
    if len(models) != (len(states) if stage == 3 else 1):
        raise models[-1].error(f"there are {len(models)} files of the model and {len(states)} of the optimizer")
    steps = [counters_of(file)["global_steps"] for file in models]
    if len(set(steps)) > 1:
        raise models[0].error(f"the ranks' files are of steps {sorted(set(steps))}: they were not saved together")
    return stage


def _check_steps(file: TorchFile, layout: Layout, counters: Mapping[str, int]) -> None:
    """CheckpointError where the optimizer has stepped and its states are missing, or those of some parameters."""
    stepped = counters["global_steps"] - counters["skipped_steps"]
    trained = [name for name, info in layout.tensors.items() if info.trainable]
    kinds = {name: layout.tensors[name].kinds for name in trained}
    unlike = next((name for name in trained if set(kinds[name]) != set(kinds[trained[0]])), None)
    if unlike is not None:
        raise file.error(
            f"it has {', '.join(kinds[trained[0]])} of {trained[0]}, and {', '.join(kinds[unlike])} of {unlike}"
        )
    lacking = [name for name in trained if name not in layout.steps]
    if stepped > 0 and lacking:
        raise file.error(f"the run has made {stepped} steps, and it has no moments and no step count of {lacking[0]}")


def _tied(model: TorchFile, layout: Layout) -> dict[str, str]:
    shared = as_dict(model, as_dict(model, model.value, "its value").get("shared_params") or {}, "shared_params")
    found = {tensor_name(model, alias): tensor_name(model, name) for alias, name in shared.items()}
    return {alias: name for alias, name in found.items() if name in layout.tensors and alias not in layout.tensors}


def _latest_universal(folder: Path) -> str | None:
    try:
        return read_metadata(folder / _LATEST_UNIVERSAL, 4096).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            folder / _LATEST_UNIVERSAL, f"it cannot be read ({reason(error)})", "Pass a tag"
        ) from error
