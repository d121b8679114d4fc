"""Where the elements of each tensor lie in a ZeRO checkpoint's files.

Stages 1 and 2 keep the parameters of a group as one flat vector, which the ranks cut into equal parts; the last part is
stored without its padding. Stage 3 cuts each parameter into equal parts, and keeps a rank's parts of a sub-group as one
flat vector. The masters are such vectors, and so are the moments. `param_shapes` of the model's file names the
parameters in their order.

A universal checkpoint, as DeepSpeed's `ds_to_universal` makes it: one folder a parameter, with a file a state.

    TAG/mp_rank_00_model_states.pt (stage 3: zero_pp_rank_*)   shapes, buffers, frozen parameters, counters
    TAG/zero/optimizer_state.pt                                parameter groups, loss scale; stage 3: the steps
    TAG/zero/PARAMETER/{fp32,exp_avg,exp_avg_sq,step}.pt
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.base.untrusted import shortened
from infinity.checkpoint.deepspeed.torch_file import TorchFile, TorchTensor
from infinity.checkpoint.format import BUFFER, MASTER, PARAM, REMAINDER, TensorInfo, inside
from infinity.errors import CheckpointError
from infinity.memory.partition import DTYPES
from infinity.plan.spec import dtype_name
from infinity.plan.types import FLOATING_DTYPES

_ADVICE = "Load another checkpoint, or copy this one again from where it is whole"
# A file of the model at stage 3 begins so.
IN_PARTS = "zero_pp_rank_"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{2,6})_model_states\.pt")
_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt")
_EXPERTS = re.compile(r"(?:layer_\d+_)?expert_\d+_.*|expp_rank_.*")
_LAYERS = re.compile(r"layer_\d+.*model_states\.pt")
_KIND = re.compile(r"[a-z0-9_]{1,64}")
_NAME_LENGTH_MAX = 4096
_FLOATS = {DTYPES[name] for name in FLOATING_DTYPES}


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Elements [start, start + numel) of a tensor of the model: those of `stored` from `at` on."""

    start: int
    numel: int
    stored: TorchTensor
    at: int


@dataclass
class Layout:
    """The tensors, and the pieces of each kind of each of them, in order. steps: optimizer steps of each parameter."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    pieces: dict[tuple[str, str], list[StoredRange]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def add(self, file: TorchFile, name: str, shape: tuple[int, ...], kinds: Mapping[str, list[StoredRange]]) -> None:
        """Add a trained parameter; CheckpointError about `file` unless each kind has every element once."""
        numel = math.prod(shape)
        for kind, pieces in kinds.items():
            if kind != PARAM and (_KIND.fullmatch(kind) is None or kind in (MASTER, REMAINDER, BUFFER)):
                raise file.error(f"a state of the optimizer is called {shortened(kind)}")
            kept = [piece for piece in pieces if piece.numel]
            end = 0
            for piece in kept:
                whole = piece.start == end and 0 <= piece.at <= piece.stored.numel - piece.numel
                if not whole or piece.stored.dtype not in _FLOATS:
                    where = piece.stored.file
                    raise where.error(f"elements from {end:,} on of {name} ({kind}) are missing, or are no floats")
                end += piece.numel
            if end != numel:
                raise file.error(f"{name} ({kind}) has {numel:,} elements, and {end:,} are there")
            self.pieces[name, kind] = kept
        self._add_info(file, name, TensorInfo(shape, "fp32", trainable=True, kinds=tuple(kinds)))

    def add_stored(self, file: TorchFile, name: str, shape: tuple[int, ...], parts: Sequence[Any], kind: str) -> None:
        """Add a buffer or a frozen parameter from its parts, which lie one behind the other; the last may be padded."""
        numel, width = math.prod(shape), -(-math.prod(shape) // max(len(parts), 1))
        pieces = []
        for at, part in enumerate(parts):
            own = max(0, min(width, numel - at * width))
            if not isinstance(part, TorchTensor) or part.numel < own or part.dtype != parts[0].dtype:
                raise file.error(f"{shortened(name)} is stored as {_described(part)}, and {own:,} elements are needed")
            pieces.append(StoredRange(at * width, own, part, 0))
        try:
            dtype = dtype_name(pieces[0].stored.dtype)
        except (IndexError, KeyError, ValueError) as error:
            raise file.error(f"{shortened(name)} is stored in a dtype that no checkpoint keeps") from error
        self.pieces[name, kind] = [piece for piece in pieces if piece.numel]
        self._add_info(file, name, TensorInfo(shape, dtype, trainable=False, kinds=(kind,)))

    def _add_info(self, file: TorchFile, name: str, info: TensorInfo) -> None:
        if name in self.tensors:
            raise file.error(f"it has {name} twice")
        self.tensors[name] = info

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of each kind."""
        found: dict[str, int] = {}
        for (_, kind), pieces in self.pieces.items():
            for piece in pieces:
                found[kind] = found.get(kind, 0) + piece.numel * piece.stored.dtype.itemsize
        return found


@dataclass(frozen=True)
class RankFiles:
    """The names of a checkpoint's files by rank: of the model (one alone at stages 1 and 2) and of the optimizer."""

    model: list[str]
    states: list[str]

    @classmethod
    def of(cls, folder: Path, names: Sequence[str]) -> RankFiles:
        """Sort a folder's files. CheckpointError where a rank's is missing, or the model itself is divided."""
        for pattern, what in ((_EXPERTS, "experts of a mixture"), (_LAYERS, "layers of a pipeline")):
            found = next((name for name in sorted(names) if pattern.fullmatch(name)), None)
            if found is not None:
                raise CheckpointError(
                    folder / found, f"it holds {what} of DeepSpeed, which is not read",
                    "Load the model's weights from a folder that save_pretrained() made",
                )  # fmt: skip
        by_rank: list[dict[int, str]] = [{}, {}]
        for name in sorted(names):
            for pattern, files in zip((_MODEL, _STATES), by_rank, strict=True):
                if (match := pattern.fullmatch(name)) is None:
                    continue
                if int(match[2]) != 0:
                    raise CheckpointError(
                        folder / name, "the model is divided among several ranks (tensor or pipeline parallelism)",
                        "Load it with as many ranks in DeepSpeed, and save its weights with save_pretrained()",
                    )  # fmt: skip
                rank = int(match[1] or 0)
                if rank in files:
                    raise CheckpointError(folder / name, f"{files[rank]} is the same rank's", _ADVICE)
                files[rank] = name
        for files, what in zip(by_rank, ("model", "optim"), strict=True):
            absent = next((rank for rank in range(len(files)) if rank not in files), None)
            if absent is not None:
                raise CheckpointError(
                    folder, f"the file *rank_{absent}_mp_rank_00_{what}_states.pt is missing: there are {len(files)}, "
                    f"up to rank {max(files)}", _ADVICE,
                )  # fmt: skip
        model, states = ([files[rank] for rank in sorted(files)] for files in by_rank)
        if not model:
            raise CheckpointError(folder, "it has no file *mp_rank_00_model_states.pt", _ADVICE)
        return cls(model, states)


def is_deepspeed(names: Sequence[str]) -> bool:
    """Return whether a folder with these files is a checkpoint of DeepSpeed."""
    return any(_MODEL.fullmatch(name) or _STATES.fullmatch(name) for name in names)


def open_files(folder: Path, names: Sequence[str]) -> list[TorchFile]:
    """Return files of a checkpoint's folder; CheckpointError where one leads out of it or is damaged."""
    return [TorchFile(inside(folder, name)) for name in names]


def as_dict(file: TorchFile, value: Any, what: str) -> dict[Any, Any]:
    """Return a value of `file` if it is a dictionary."""
    return _of(file, dict, value, what)


def as_list(file: TorchFile, value: Any, what: str) -> list[Any]:
    """Return a value of `file` if it is a list."""
    return _of(file, list, value, what)


def tensor_name(file: TorchFile, name: Any) -> str:
    """Return the name of a tensor; CheckpointError for one that cannot be."""
    try:
        if isinstance(name, str) and 0 < len(name) <= _NAME_LENGTH_MAX and name.encode():
            return name
    except UnicodeEncodeError:
        pass
    raise file.error(f"{shortened(name)} is no name of a tensor")


def shape_of(file: TorchFile, name: str, shape: Any) -> tuple[int, ...]:
    """Return a shape that the file says a tensor has."""
    dims = tuple(shape) if isinstance(shape, tuple | list) else (None,)
    if any(type(dim) is not int or dim < 0 for dim in dims) or len(dims) > 64:
        raise file.error(f"{name} has the shape {shortened(shape)}")
    if math.prod(max(dim, 1) for dim in dims) >= 2**60:
        raise file.error(f"{name} has the shape {shortened(shape)}, which no memory holds")
    return dims


def param_shapes(file: TorchFile) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the trained parameters, by group (stage 3: by sub-group) and in order."""
    value = as_dict(file, file.value, "its value")
    groups = as_list(file, value.get("param_shapes"), "param_shapes")
    return [
        {
            tensor_name(file, name): shape_of(file, name, shape)
            for name, shape in as_dict(file, group, "a group of param_shapes").items()
        }
        for group in groups
    ]


def add_untrained(layout: Layout, files: Sequence[TorchFile]) -> None:
    """Add the buffers and the frozen parameters, which lie in the model's files: in parts at stage 3."""
    first, in_parts = files[0], files[0].path.name.startswith(IN_PARTS)
    value = as_dict(first, first.value, "its value")
    module = as_dict(first, value.get("module"), "module")
    buffers = as_list(first, value.get("buffer_names") or [], "buffer_names")
    shared = as_dict(first, value.get("shared_params") or {}, "shared_params")
    fragments = [as_dict(file, file.value, "its value").get("frozen_param_fragments") for file in files]
    shapes = value.get("frozen_param_shapes")
    for name, stored in module.items():
        tensor_name(first, name)
        if name in buffers and isinstance(stored, TorchTensor):
            layout.add_stored(first, name, stored.shape, [stored], BUFFER)
        elif not in_parts and name not in layout.tensors and name not in shared and isinstance(stored, TorchTensor):
            layout.add_stored(first, name, stored.shape, [stored], PARAM)
    if not in_parts or shapes is None:
        return
    parts = [as_dict(file, part, "frozen_param_fragments") for file, part in zip(files, fragments, strict=True)]
    for name, shape in as_dict(first, shapes, "frozen_param_shapes").items():
        tensor_name(first, name)
        layout.add_stored(first, name, shape_of(first, name, shape), [part.get(name) for part in parts], PARAM)


def add_zero12(layout: Layout, model: TorchFile, files: Sequence[TorchFile]) -> None:
    """Add the trained parameters of stages 1 and 2, with their moments and steps."""
    first, inner = files[0], [optimizer_state(file) for file in files]
    shapes = param_shapes(model)
    masters = _lists(files, inner, "single_partition_of_fp32_groups")
    _check_groups(files, masters, shapes)
    (paddings,) = _lists([first], inner, "group_paddings")
    # Older versions do not align parameters.
    gaps = as_list(first, inner[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes], "gaps")
    for number, group in enumerate(shapes):
        flats = {PARAM: [_flat(file, each, number) for file, each in zip(files, masters, strict=True)]}
        states = [_base_state(file, each, number) for file, each in zip(files, inner, strict=True)]
        moments, step = _moments(files, states)
        flats.update(moments)
        part = flats[PARAM][0].numel + _count(first, paddings, number)
        behind = as_list(first, _item(first, gaps, number), "gaps")
        at = 0
        for place, (name, shape) in enumerate(group.items()):
            numel = math.prod(shape)
            layout.add(model, name, shape, {kind: list(_cut(flat, at, numel, part)) for kind, flat in flats.items()})
            if step is not None:
                layout.steps[name] = step
            at += numel + _count(first, behind, place)
        # The vector is padded to a multiple of twice the number of ranks.
        if not 0 <= part * len(files) - at < 2 * len(files):
            raise first.error(
                f"group {number} has {part * len(files):,} elements in {len(files)} files, and its parameters {at:,}"
            )


def add_zero3(layout: Layout, model: TorchFile, files: Sequence[TorchFile]) -> None:
    """Add the trained parameters of stage 3, with their moments and steps."""
    inner = [optimizer_state(file) for file in files]
    masters = _lists(files, inner, "fp32_flat_groups")
    optimizers = [
        as_dict(file, each.get("optimizer_state_dict"), "optimizer_state_dict")
        for file, each in zip(files, inner, strict=True)
    ]
    shapes = param_shapes(model)
    _check_groups(files, masters, shapes)
    for number, group in enumerate(shapes):
        flats = {PARAM: [_flat(file, each, number) for file, each in zip(files, masters, strict=True)]}
        states = [state_of(file, each, number) for file, each in zip(files, optimizers, strict=True)]
        moments, step = _moments(files, states)
        flats.update(moments)
        at = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            width = -(-numel // len(files))
            kinds = {
                kind: [
                    StoredRange(rank * width, max(0, min(width, numel - rank * width)), stored, at)
                    for rank, stored in enumerate(flat)
                ]
                for kind, flat in flats.items()
            }
            layout.add(model, name, shape, kinds)
            if step is not None:
                layout.steps[name] = step
            at += width
        for file, stored in zip(files, flats[PARAM], strict=True):
            if stored.numel != at:
                raise file.error(f"sub-group {number} has {stored.numel:,} elements, and its parameters {at:,}")


def step_count(file: TorchFile, value: Any) -> int:
    """Return a step count, which is a number or a tensor of one element."""
    number = value.number() if isinstance(value, TorchTensor) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number or not 0 <= number < 2**53:
        raise file.error(f"its step count is {shortened(value)}")
    return int(number)


def optimizer_state(file: TorchFile) -> dict[Any, Any]:
    """Return what a file of the optimizer holds of it."""
    value = as_dict(file, file.value, "its value")
    return as_dict(file, value.get("optimizer_state_dict"), "optimizer_state_dict")


def _base_state(file: TorchFile, inner: Mapping[Any, Any], number: int) -> dict[Any, Any]:
    """Return the optimizer's state of a group, in either of DeepSpeed's forms."""
    base = inner.get("base_optimizer_state")
    if not isinstance(base, list):
        return state_of(file, as_dict(file, base, "base_optimizer_state"), number)
    state = as_dict(file, _item(file, base, number), "base_optimizer_state")
    return {"step": inner.get("base_optimizer_state_step"), **state} if state else {}


def state_of(file: TorchFile, optimizer: Mapping[Any, Any], number: int) -> dict[Any, Any]:
    """Return a torch optimizer's state of vector `number`; its group keeps the step where the state does not."""
    state = as_dict(file, as_dict(file, optimizer.get("state"), "state").get(number, {}), "a state")
    for group in as_list(file, optimizer.get("param_groups") or [], "param_groups"):
        found = as_dict(file, group, "a parameter group")
        if state and "step" not in state and number in as_list(file, found.get("params"), "params"):
            return {**state, "step": found.get("step")}
    return state


def _moments(
    files: Sequence[TorchFile], states: Sequence[Mapping[Any, Any]]
) -> tuple[dict[str, list[TorchTensor]], int | None]:
    """Return the moments of a flat vector by kind and rank, and its steps; None where the optimizer has not stepped."""
    names = sorted(
        key for key, value in states[0].items()
        if isinstance(key, str) and key != "step" and isinstance(value, TorchTensor) and len(value.shape) == 1
    )  # fmt: skip
    moments: dict[str, list[TorchTensor]] = {}
    steps = set()
    for file, state in zip(files, states, strict=True):
        if bool(state) != bool(states[0]):
            raise file.error(f"it and {files[0].path.name} do not both hold the optimizer's states")
        if state and state.get("step") is None:
            raise file.error("it holds moments of the optimizer without its step count")
        if state:
            steps.add(step_count(file, state["step"]))
        for name in names:
            if name == PARAM:
                raise file.error(f"a state of the optimizer is called {name}")
            stored = state.get(name)
            if not isinstance(stored, TorchTensor):
                raise file.error(f"it lacks {name}, which {files[0].path.name} has")
            moments.setdefault(name, []).append(stored)
    if len(steps) > 1:
        raise files[0].error(f"its ranks have made {sorted(steps)} steps: they were not saved together")
    return moments, steps.pop() if steps else None


def _cut(flat: Sequence[TorchTensor], at: int, numel: int, part: int) -> Iterator[StoredRange]:
    """Yield where elements [at, at + numel) of a vector lie, of which each rank has `part`."""
    for rank, stored in enumerate(flat):
        begin, end = max(at, rank * part), min(at + numel, (rank + 1) * part)
        if begin < end:
            yield StoredRange(begin - at, end - begin, stored, begin - rank * part)


def _check_groups(files: Sequence[TorchFile], masters: Sequence[Sequence[Any]], shapes: Sequence[Any]) -> None:
    """CheckpointError unless each file has a vector of masters for each group of parameters."""
    for file, groups in zip(files, masters, strict=True):
        if len(groups) != len(shapes):
            raise file.error(f"it has {len(groups)} groups of parameters, and the model's file {len(shapes)}")


def _lists(files: Sequence[TorchFile], inner: Sequence[Mapping[Any, Any]], key: str) -> list[list[Any]]:
    return [as_list(file, each.get(key), key) for file, each in zip(files, inner, strict=False)]


def _flat(file: TorchFile, groups: Sequence[Any], number: int) -> TorchTensor:
    stored = _item(file, groups, number)
    if not isinstance(stored, TorchTensor) or len(stored.shape) != 1:
        raise file.error(f"the masters of group {number} are {_described(stored)}")
    return stored


def _item(file: TorchFile, values: Sequence[Any], number: int) -> Any:
    if number >= len(values):
        raise file.error(f"a list of it has {len(values)} entries, and the model's file needs more")
    return values[number]


def _count(file: TorchFile, values: Sequence[Any], number: int) -> int:
    count = _item(file, values, number)
    if type(count) is not int or not 0 <= count < 2**60:
        raise file.error(f"a padding is {shortened(count)}")
    return count


def _of(file: TorchFile, kind: type[Any], value: Any, what: str) -> Any:
    if not isinstance(value, kind):
        raise file.error(f"{what} is {_described(value)} where DeepSpeed writes a {kind.__name__}")
    return value


def _described(value: Any) -> str:
    if isinstance(value, TorchTensor):
        return f"a tensor of the shape {list(value.shape)}"
    return "missing" if value is None else f"a {type(value).__name__}"


FOLDER = "zero"
_GLOBAL = "optimizer_state.pt"
_MASTERS, _STEP = "fp32", "step"
_CONVERT_AGAIN = "Convert the checkpoint again, or load the one that it was made of"


def optimizer_file(folder: Path) -> TorchFile:
    """Return the file of what all parameters share."""
    return TorchFile(inside(_states_folder(folder), _GLOBAL))


def add_universal(layout: Layout, folder: Path, model: TorchFile) -> None:
    """Add the trained parameters of a universal checkpoint, with their moments and steps."""
    states = _states_folder(folder)
    shared = optimizer_file(folder)
    optimizer = as_dict(shared, shared.value, "its value").get("optimizer_state_dict")
    for number, group in enumerate(param_shapes(model)):
        for name, shape in group.items():
            own = _parameter_folder(states, name)
            names = sorted(each[:-3] for each in os.listdir(own) if each.endswith(".pt"))
            moments = [each for each in names if each not in (_MASTERS, _STEP, PARAM)]
            kinds = {PARAM: [_piece(inside(own, f"{_MASTERS}.pt"), name, shape)]}
            kinds.update({kind: [_piece(inside(own, f"{kind}.pt"), name, shape)] for kind in moments})
            layout.add(model, name, shape, kinds)
            if _STEP in names:
                file = TorchFile(inside(own, f"{_STEP}.pt"))
                layout.steps[name] = step_count(file, file.value)
            elif moments:
                # Stage 3 keeps them for a whole sub-group.
                layout.steps[name] = _shared_step(shared, optimizer, number)


def _shared_step(shared: TorchFile, optimizer: Any, number: int) -> int:
    state: Mapping[Any, Any] = {}
    if optimizer is not None:
        state = state_of(shared, as_dict(shared, optimizer, "optimizer_state_dict"), number)
    if state.get("step") is None:
        raise shared.error(f"there are moments of the optimizer, and no step.pt, and no step of group {number} here")
    return step_count(shared, state["step"])


def _states_folder(folder: Path) -> Path:
    states = folder / FOLDER
    if states.is_symlink() or not states.is_dir():
        raise CheckpointError(states, "it is no folder of this checkpoint", _CONVERT_AGAIN)
    return states


def _parameter_folder(states: Path, name: str) -> Path:
    """Return a parameter's folder, which its name must not lead out of the checkpoint."""
    if "/" in name or "\0" in name or name in (".", ".."):
        what = f"a parameter is called {shortened(name)}, which is no folder's name"
        raise CheckpointError(states, what, _CONVERT_AGAIN)
    own = states / name
    if own.is_symlink() or not own.is_dir():
        raise CheckpointError(own, "it is missing, or a link", _CONVERT_AGAIN)
    return own


def _piece(path: Path, name: str, shape: tuple[int, ...]) -> StoredRange:
    file = TorchFile(path)
    stored = file.value.get("param") if isinstance(file.value, dict) else file.value
    numel = math.prod(shape)
    if not isinstance(stored, TorchTensor) or stored.shape not in (shape, (numel,)):
        said = f"a tensor of the shape {list(stored.shape)}" if isinstance(stored, TorchTensor) else "no tensor"
        raise file.error(f"it holds {said}, and {name} has the shape {list(shape)}")
    return StoredRange(0, numel, stored, 0)
