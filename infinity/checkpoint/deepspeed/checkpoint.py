"""One checkpoint of DeepSpeed's: `read_deepspeed(folder)`, and a source of its values for a load or an export.

The state of DeepSpeed's run besides its tensors, as `infinity.checkpoint.run_state` keeps it; and the client state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.base.untrusted import NESTING_MAX, read_metadata, reason, shortened
from infinity.checkpoint.deepspeed.layout import (
    FOLDER,
    IN_PARTS,
    Layout,
    RankFiles,
    add_universal,
    add_untrained,
    add_zero3,
    add_zero12,
    as_dict,
    as_list,
    is_deepspeed,
    open_files,
    optimizer_file,
    optimizer_state,
    param_shapes,
    tensor_name,
)
from infinity.checkpoint.deepspeed.torch_file import PickledObject, TorchFile, TorchTensor, Unloaded
from infinity.checkpoint.format import BUFFER, PARAM, FileExtent, ShardRanges, TensorInfo, is_tag, latest_tag
from infinity.checkpoint.pieces import TensorSpan
from infinity.checkpoint.run_state import NotSerializable, encode
from infinity.errors import CheckpointError
from infinity.log import logger
from infinity.memory.partition import DTYPES
from infinity.memory.resizable_buffer import page_aligned
from infinity.ops.crc32c import checksum

# What DeepSpeed itself writes beside a program's client state.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts", "ds_autoep_layers", "autoep_layers",
}  # fmt: skip
_HYPER = {
    "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay", "initial_lr", "alpha", "rho",
}  # fmt: skip
# The optimizer by its moments: DeepSpeed writes down no name, unless its configuration has one.
_BY_MOMENTS = {
    ("exp_avg", "exp_avg_sq"): "AdamW", ("exp_avg",): "Lion", ("sum",): "Adagrad", ("momentum_buffer",): "SGD",
}  # fmt: skip
_ADAMS = {"adam", "adamw"}
_COUNT_END = 2**63
# Values of a client state, and bytes of its tensors.
_VALUES_MAX = 1_000_000
_TENSORS_NBYTES_MAX = 1 << 30
# Classes that a warning names.
_NAMED_MAX = 10


def counters_of(file: TorchFile) -> dict[str, int]:
    """Return how far the run has come."""
    value = as_dict(file, file.value, "its value")
    found = {name: value.get(name, 0) for name in ("global_steps", "global_samples", "skipped_steps")}
    for name, count in found.items():
        if type(count) is not int or not 0 <= count < _COUNT_END:
            raise file.error(f"{name} is {shortened(count)}")
    return {**found, "micro_steps": 0}


def engine_state(
    model: TorchFile, optimizer: TorchFile, inner: Mapping[Any, Any], names: Sequence[Sequence[str]],
    steps: Mapping[str, int], kind: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the state of the run as `infinity.checkpoint.run_state.Run` keeps it.

    inner: the optimizer's part of `optimizer`. names: the parameters of each of its vectors. kind: see `kind_of`.
    """
    value = as_dict(model, model.value, "its value")
    counters = counters_of(model)
    if steps and max(steps.values()) > counters["global_steps"]:
        raise optimizer.error(f"it has made {max(steps.values())} steps, the model's file {counters['global_steps']}")
    scheduler = value.get("lr_scheduler")
    return {
        "counters": counters,
        # What `engine.step` keeps of the loss scale, and of steps that are skipped in a row.
        "precision": {
            "loss_scale": _loss_scale(optimizer, inner), "skips": {"in_a_row": 0, "settled": any(steps.values())},
        },
        "scheduler": None if scheduler is None else {
            "type": None, "state": _encoded(model, scheduler, "lr_scheduler"),
        },
        "optimizer": {"kind": kind, "groups": _groups(optimizer, inner, names), "steps": dict(steps)},
        "loader": None,
    }  # fmt: skip


def kind_of(model: TorchFile, moments: Sequence[str]) -> str | None:
    """Return the optimizer's name as infinity's are called; None where it has no moments yet."""
    if not moments:
        return None
    config = as_dict(model, model.value, "its value").get("ds_config")
    section = config.get("optimizer") if isinstance(config, dict) else None
    named = section.get("type") if isinstance(section, dict) else None
    guessed = _BY_MOMENTS.get(tuple(sorted(moments)))
    if isinstance(named, str) and (guessed is None or named.lower() != guessed.lower()):
        return "AdamW" if named.lower() in _ADAMS and guessed == "AdamW" else named
    return guessed or f"an optimizer with {', '.join(moments)}"


def client_state_of(file: TorchFile) -> dict[str, Any]:
    """Return what the program had saved with the checkpoint, with an `Unloaded` for each object of a class of its own.
    One warning names them.
    """
    value = as_dict(file, file.value, "its value")
    found, names = {}, set()
    for key, each in value.items():
        if key not in _OWN:
            plain = _Plain(file)
            found[str(key)] = plain.of(each)
            names |= plain.unloaded
    if names:
        listed = [shortened(name, 200) for name in sorted(names)]
        more = f" and {len(listed) - _NAMED_MAX} more" if len(listed) > _NAMED_MAX else ""
        logger.warning(
            "%s: client_state has values of classes that a pickle would import, and nothing in a checkpoint is "
            "executed: %s%s. Each comes back as Unloaded(name), with what had been saved of it in `arguments`, `state` "
            "and `items`",
            file.path, ", ".join(listed[:_NAMED_MAX]), more,
        )  # fmt: skip
    return found


class _Plain:
    """Turns values of a pickle into plain ones: tensors that are read, dictionaries for objects."""

    def __init__(self, file: TorchFile) -> None:
        self._file = file
        self._count = 0
        self._nbytes = 0
        # Names of classes that were not loaded, and what stands for the objects of the pickle: they may form circles.
        self.unloaded: set[str] = set()
        self._made: dict[int, Unloaded] = {}

    def of(self, value: Any, depth: int = 0) -> Any:
        self._count += 1
        if depth > NESTING_MAX or self._count > _VALUES_MAX:
            raise self._file.error(f"it has more than {_VALUES_MAX:,} values, or too deeply nested ones")
        if isinstance(value, TorchTensor):
            self._nbytes += value.numel * value.dtype.itemsize
            if self._nbytes > _TENSORS_NBYTES_MAX:
                raise self._file.error(f"its client state has more than {_TENSORS_NBYTES_MAX:,} bytes of tensors")
            return value.whole()
        if isinstance(value, dict):
            return {
                self.of(key, depth + 1) if isinstance(key, Unloaded) else key: self.of(each, depth + 1)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(self.of(each, depth + 1) for each in value)
        if isinstance(value, PickledObject):
            return {key: self.of(each, depth + 1) for key, each in value.attributes.items()}
        if isinstance(value, Unloaded):
            if id(value) not in self._made:
                self.unloaded.add(value.name)
                made = self._made[id(value)] = Unloaded(value.name)
                made.fill(*(self.of(each, depth + 1) for each in (value.arguments, value.state, value.items)))
            return self._made[id(value)]
        if value is None or isinstance(value, bool | int | float | str | bytes | np.ndarray | np.dtype):
            return value
        return str(value)


def _loss_scale(file: TorchFile, inner: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Return fp16's loss scale; None in another precision, whose scale is 1."""
    scaler = inner.get("loss_scaler")
    if not isinstance(scaler, PickledObject):
        return None
    found = scaler.attributes
    scale = _number(file, found.get("cur_scale"), "the loss scale")
    if not 0 < scale < math.inf:
        raise file.error(f"the loss scale is {scale}")
    if scaler.name != "DynamicLossScaler":
        return None if scale == 1.0 else {"scale": scale, "patience": 1, "good_steps": 0}
    last, current = (int(_number(file, found.get(key), key)) for key in ("last_overflow_iter", "cur_iter"))
    patience = int(_number(file, found.get("cur_hysteresis"), "cur_hysteresis"))
    if not -1 <= last < max(current, 0) + 1 or not 0 <= patience < _COUNT_END:
        raise file.error("the state of its loss scale contradicts itself")
    return {"scale": scale, "patience": max(patience, 1), "good_steps": max(current - last - 1, 0)}


def _groups(file: TorchFile, inner: Mapping[Any, Any], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the parameter groups with their names and hyper-parameters. inner: of any stage."""
    optimizer = inner.get("optimizer_state_dict") or inner.get("base_optimizer_state") or {}
    groups = inner.get("param_groups") or (optimizer.get("param_groups") if isinstance(optimizer, dict) else None)
    found = []
    for group in as_list(file, groups or [], "param_groups"):
        own = as_dict(file, group, "a parameter group")
        places = [at for at in as_list(file, own.get("params"), "params") if type(at) is int and 0 <= at < len(names)]
        hyper = {key: _encoded(file, each, key) for key, each in own.items() if key in _HYPER}
        found.append({"params": [name for at in places for name in names[at]], "hyper": hyper})
    return found


def _encoded(file: TorchFile, value: Any, what: str) -> Any:
    try:
        return encode(_scalars(_Plain(file).of(value)), path=what)
    except NotSerializable as error:
        raise file.error(str(error)) from error


def _scalars(value: Any) -> Any:
    """Return a value with its tensors of one element as numbers."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, dict):
        return {key: _scalars(each) for key, each in value.items()}
    return type(value)(map(_scalars, value)) if isinstance(value, list | tuple) else value


def _number(file: TorchFile, value: Any, what: str) -> float:
    number = value.number() if isinstance(value, TorchTensor) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 2**63:
        raise file.error(f"{what} is {shortened(value)}")
    return float(number)


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
    shared = as_dict(model, value.get("shared_params") or {}, "shared_params")
    aliases = {tensor_name(model, alias): tensor_name(model, name) for alias, name in shared.items()}
    tied = {alias: name for alias, name in aliases.items() if name in layout.tensors and alias not in layout.tensors}
    return DeepSpeedCheckpoint(
        folder, layout, tied, engine_state(model, optimizer, inner, names, layout.steps, kind),
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


def _latest_universal(folder: Path) -> str | None:
    try:
        return read_metadata(folder / _LATEST_UNIVERSAL, 4096).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            folder / _LATEST_UNIVERSAL, f"it cannot be read ({reason(error)})", "Pass a tag"
        ) from error
