"""The state of a run besides its tensors: counters, loss scale, scheduler, hyper-parameters, random states, data
position.

All of it is JSON. State that belongs to a parameter is kept under the parameter's name.

A program's values as JSON, and back: client state, schedulers, hyper-parameters, random states.

JSON has no tuples, bytes, infinities or keys other than strings. Each of these becomes an object with one key that
begins with "$". Tensors and numpy arrays become references, by their path; their bytes go into a safetensors file. An
argparse.Namespace becomes the dictionary of its values, and stays one.
"""

from __future__ import annotations

import argparse
import base64
import math
import random
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infinity.base.untrusted import shortened
from infinity.checkpoint.pieces import parameter_names
from infinity.errors import CheckpointError, InfinityError
from infinity.log import logger
from infinity.memory.partition import DTYPES
from infinity.memory.tiers.device import Device
from infinity.step.optimizer_step import OptimizerStep

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class NotSerializable(ValueError):
    """A value that cannot be encoded; the message names its path and its type."""


class NotDecodable(ValueError):
    """JSON that `encode` never returns."""


def encode(value: Any, tensors: dict[str, Tensor] | None = None, path: str = "") -> Any:
    """Return a value as JSON, and put tensors and arrays of more than one element into `tensors`, by path.

    NotSerializable for a value that would have to be pickled, and for an array where `tensors` is None.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        # A member of an IntEnum must not become a plain number.
        if value is None or type(value) in (bool, int, str):
            return value
        raise _unspeakable(value, path)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor | np.ndarray):
        return _encode_array(value, tensors, path)
    if isinstance(value, list | tuple):
        items = [encode(item, tensors, f"{path}[{at}]") for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if isinstance(value, argparse.Namespace):
        return _encode_mapping(vars(value), tensors, path)
    raise _unspeakable(value, path)


def decode(value: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Return the value that `encode` was given, with its `tensors` by path. NotDecodable for any other JSON."""
    try:
        return _decode(value, tensors or {})
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise NotDecodable(f"a value is encoded in an unknown way ({type(error).__name__}: {error})") from error


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        match key:
            case "$float":
                return _NOT_FINITE[inner]
            case "$bytes":
                return base64.b64decode(inner, validate=True)
            case "$tuple":
                return tuple(_decode(item, tensors) for item in _of(list, inner))
            case "$pairs":
                return {_decode(name, tensors): _decode(item, tensors) for name, item in _of(list, inner)}
            case "$counter":
                return Counter({_decode(name, tensors): _of(int, count) for name, count in _of(list, inner)})
            case "$scalar":
                dtype, shape, number = _of(list, inner)
                return torch.tensor(_decode(number, {}), dtype=DTYPES[dtype], device="cpu").view(_of(list, shape))
            case "$tensor":
                return tensors[inner]
            case "$array":
                return tensors[inner].numpy()
    return {name: _decode(item, tensors) for name, item in value.items()}


def _of(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} is written")
    return value


def _encode_array(value: Tensor | np.ndarray[Any, Any], tensors: dict[str, Tensor] | None, path: str) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().cpu()
        if tensors is None and flat.numel() == 1 and flat.dtype in _NAMES:
            return {"$scalar": [_NAMES[flat.dtype], list(flat.shape), encode(flat.item())]}
    else:
        try:
            flat = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError) as error:
            raise _unspeakable(value, path) from error
    if tensors is None or flat.layout is not torch.strided:
        raise _unspeakable(value, path)
    name, count = path, 1
    # Two values may share a path: {"a": {"b": ...}, "a.b": ...}.
    while name in tensors:
        count += 1
        name = f"{path} ({count})"
    tensors[name] = flat.contiguous()
    return {"$tensor" if isinstance(value, Tensor) else "$array": name}


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor] | None, path: str) -> Any:
    if type(value) is Counter:
        return {"$counter": [[encode(key, None, path), count] for key, count in value.items()]}
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if plain:
        return {key: encode(item, tensors, f"{path}.{key}" if path else key) for key, item in value.items()}
    return {
        "$pairs": [[encode(key, None, path), encode(item, tensors, f"{path}[{key!r}]")] for key, item in value.items()]
    }


def _unspeakable(value: Any, path: str) -> NotSerializable:
    kind = type(value)
    return NotSerializable(
        f"{path or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which could only be pickled: keep numbers, "
        "texts, lists, tuples, dictionaries, tensors and numpy arrays there"
    )


# The kind that a checkpoint of an engine without an optimizer names.
NO_OPTIMIZER = "none"

# A mapping or a program's options, or a function that a save calls for them.
ClientState = Mapping[str, Any] | Namespace | Callable[[], Mapping[str, Any] | Namespace] | None


@dataclass
class Counters:
    """How far a run has come: optimizer steps (skipped ones included), micro-batches, samples of all ranks, and steps
    that were skipped.
    """

    global_steps: int = 0
    micro_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0

    def count_micro_steps(self, count: int) -> None:
        """Count micro-batches."""
        self.micro_steps += count

    def count_step(self, samples: int, *, skipped: bool) -> None:
        """Count an optimizer step with as many samples on all ranks."""
        self.global_steps += 1
        self.global_samples += samples
        self.skipped_steps += skipped

    def restore(self, saved: Mapping[str, Any], accumulation: int) -> None:
        """Take a checkpoint's counters. accumulation: calls of `step()` that make an optimizer step here."""
        self.global_steps = int(saved["global_steps"])
        self.global_samples = int(saved["global_samples"])
        self.skipped_steps = int(saved["skipped_steps"])
        # No gradients are in a checkpoint, so the next micro-batch begins a step, however many made one there.
        self.micro_steps = self.global_steps * accumulation


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run that have state besides its tensors.

    optimizer: a torch optimizer with the name of its rule in `kind`. optimizer, scheduler, loader: None where there is
    none.
    """

    module: nn.Module
    counters: Counters
    optimizer: Any
    step: OptimizerStep
    scheduler: Any = None
    loader: Any = None

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def to_json(self, *, path: object) -> dict[str, Any]:
        """Return the part of the manifest that is the same on all ranks. CheckpointError about `path` for a value that
        JSON cannot carry.
        """
        names = parameter_names(self.module)
        scheduler, loader = self.scheduler, self.loader
        try:
            return {
                "counters": asdict(self.counters),
                "precision": encode(self.step.state_dict(), path="precision"),
                "scheduler": None if scheduler is None else {
                    "type": type(scheduler).__name__,
                    "state": encode(scheduler.state_dict(), path="scheduler"),
                },
                "optimizer": {
                    "kind": NO_OPTIMIZER if self.optimizer is None else self.optimizer.kind,
                    "groups": [
                        {
                            "params": [names[id(param)] for param in group["params"]],
                            "hyper": {
                                key: encode(value, path=f"param_groups[{at}].{key}")
                                for key, value in group.items()
                                if key != "params"
                            },
                        }
                        for at, group in enumerate(self._groups)
                    ],
                    "steps": dict(self.step.steps),
                },
                "loader": None if loader is None else encode(loader.state_dict(), path="loader"),
            }  # fmt: skip
        except NotSerializable as error:
            raise CheckpointError(path, str(error), "Save without it") from error

    def parameter_scalars(self) -> dict[str, Any]:
        """Return as JSON what the optimizer keeps of a parameter in one value, by the parameter's name."""
        return {name: encode(values) for name, values in self.step.parameter_scalars().items()}

    def check(
        self, state: Mapping[str, Any], singles: Sequence[Mapping[str, Any]], *, optimizer: bool, scheduler: bool,
        path: object,
    ) -> None:  # fmt: skip
        """CheckpointError where `state` is of another optimizer or scheduler than this run's, or cannot be read.

        state: as `to_json` returned it. singles: `parameter_scalars` of every rank. optimizer, scheduler: whether their
        parts are wanted.
        """
        optimizer = optimizer and self.optimizer is not None
        saved, own = state["optimizer"]["kind"], self.optimizer.kind if self.optimizer is not None else NO_OPTIMIZER
        alike = {"Adam", "AdamW"}
        # None: the optimizer had not stepped, and nothing says which it was.
        if optimizer and saved is not None and saved != own and not {saved, own} <= alike:
            raise CheckpointError(
                path, f"it holds the optimizer states of {saved}, and this engine steps with {own}",
                "Give initialize() the same optimizer, or pass load_optimizer_states=False to load the weights only",
            )  # fmt: skip
        if scheduler and self.scheduler is not None and state["scheduler"] is not None:
            saved, own = state["scheduler"]["type"], type(self.scheduler).__name__
            # DeepSpeed writes down no name.
            if saved is not None and saved != own:
                raise CheckpointError(
                    path, f"it holds the state of a {saved}, and this engine's scheduler is a {own}",
                    "Give initialize() the same scheduler, or pass load_lr_scheduler_states=False",
                )  # fmt: skip
            with _reading(path, "the scheduler"):
                mine, theirs = self.scheduler.state_dict(), decode(state["scheduler"]["state"])
                check_alike(mine, theirs)
                if saved is None and mine and not mine.keys() & theirs.keys():
                    raise ValueError(f"it has {', '.join(sorted(theirs)[:5]) or 'nothing'}, and {own} has other values")
        if optimizer:
            with _reading(path, "the precision"):
                check_alike(self.step.state_dict(), decode(state["precision"]), complete=True)
            own_hyper = {key: value for group in self._groups for key, value in group.items() if key != "params"}
            with _reading(path, "the optimizer"):
                for group in state["optimizer"]["groups"]:
                    check_alike(own_hyper, decode(group["hyper"]))
                for each in singles:
                    decode(each)
        if self.loader is not None and state["loader"] is not None:
            with _reading(path, "the data loader"):
                check_alike(self.loader.state_dict(), decode(state["loader"]), complete=True)

    def restore(
        self, state: Mapping[str, Any], singles: Sequence[Mapping[str, Any]], source_of: Mapping[str, str | None], *,
        optimizer: bool, scheduler: bool, accumulation: int, path: object,
    ) -> None:  # fmt: skip
        """Take back a state that `check` has seen. CheckpointError where a part of the run refuses its state.

        source_of: the checkpoint's name of each of the model's parameters, None for one that it has not. accumulation:
        calls of `step()` that make an optimizer step here.
        """
        self.counters.restore(state["counters"], accumulation)
        saved, optimizer = state["optimizer"], optimizer and self.optimizer is not None
        if optimizer:
            with _reading(path, "the precision"):
                self.step.load_state_dict(decode(state["precision"]))
            steps = self.step.steps
            steps.update({name: saved["steps"].get(source_of[name] or "", 0) for name in steps})
            merged = {name: values for each in singles for name, values in each.items()}
            self.step.load_parameter_scalars(
                {name: decode(merged[source]) for name in steps if (source := source_of[name]) in merged}
            )
        if scheduler and self.scheduler is not None and state["scheduler"] is not None:
            with _reading(path, "the scheduler"):
                self.scheduler.load_state_dict(decode(state["scheduler"]["state"]))
            rates: list[Any] = getattr(self.scheduler, "get_last_lr", list)()
            for group, lr in zip(self._groups, rates, strict=False):
                group["lr"] = lr
        if optimizer:
            # After the scheduler: the program may have overridden what that has set.
            self._restore_groups(saved["groups"], source_of)
        if self.loader is not None and state["loader"] is not None:
            with _reading(path, "the data loader"):
                self.loader.load_state_dict(decode(state["loader"]))

    def _restore_groups(self, saved: Sequence[Mapping[str, Any]], source_of: Mapping[str, str | None]) -> None:
        """Give hyper-parameters to the group that has the same parameters, or a part of them."""
        names = parameter_names(self.module)
        group_of = {name: at for at, group in enumerate(saved) for name in group["params"]}
        for at, group in enumerate(self._groups):
            found = {group_of.get(source_of.get(names[id(param)]) or "") for param in group["params"]}
            found -= {None}
            if len(found) == 1:
                (number,) = found
                assert number is not None
                group.update({key: decode(value) for key, value in saved[number]["hyper"].items()})
            elif found:
                logger.warning(
                    "parameter group %d has parameters of %d groups of the checkpoint: its hyper-parameters stay as "
                    "initialize() was given them", at, len(found),
                )  # fmt: skip


def encode_client_state(value: Any, tensors: dict[str, torch.Tensor], *, path: object) -> Any:
    """Return a program's client state as JSON, and put its tensors into `tensors`; CheckpointError for a value that
    would have to be pickled.
    """
    plain = vars(value) if isinstance(value, Namespace) else dict(value or {})
    try:
        return encode(plain, tensors, "client_state")
    except NotSerializable as error:
        raise CheckpointError(path, str(error), "Leave it out of client_state") from error


@contextmanager
def _reading(path: object, whose: str) -> Iterator[None]:
    """Turn any error of the block into a CheckpointError: `whose`, a part of the run, refuses its state."""
    try:
        yield
    except InfinityError:
        raise
    except Exception as error:
        raise CheckpointError(
            path, f"its state of {whose} is none that can be taken back ({type(error).__name__}: {error})",
            "Load another checkpoint, or load_module_only=True for the weights alone",
        ) from error  # fmt: skip


def check_alike(own: Any, saved: Any, *, complete: bool = False) -> None:
    """Raise ValueError where a value that was read has another type than the one that it replaces. complete: also where
    a key is missing.
    """
    try:
        # As a save writes it: numpy's scalars become numbers.
        own = decode(encode(own))
    except NotSerializable:
        return
    _compare(own, saved, "it", complete=complete)


def _compare(own: Any, saved: Any, place: str, *, complete: bool) -> None:
    if own is None or saved is None:
        return
    if _is_number(own) and _is_number(saved):
        if isinstance(saved, int) and abs(saved) >= 2**63:
            raise ValueError(f"{place} is {saved}, which has no place in 64 bits")
    elif isinstance(own, dict) and isinstance(saved, dict):
        if complete and (missing := own.keys() - saved.keys()):
            raise ValueError(f"{place} has no {min(missing)}")
        for key in own.keys() & saved.keys():
            _compare(own[key], saved[key], f"{place}.{key}", complete=complete)
    elif isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        if len(own) == len(saved):
            for at, (mine, theirs) in enumerate(zip(own, saved, strict=True)):
                _compare(mine, theirs, f"{place}[{at}]", complete=complete)
        elif isinstance(own, tuple):
            raise ValueError(f"{place} is {shortened(saved)}, in the place of {shortened(own)}")
    elif type(own) is not type(saved):
        raise ValueError(f"{place} is {shortened(saved)}, in the place of {shortened(own)}")


def _is_number(value: Any) -> bool:
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return one or (isinstance(value, int | float) and not isinstance(value, bool))


def random_state(device: Device) -> dict[str, Any]:
    """Return the states of this rank's random-number generators as JSON."""
    kind, keys, *rest = np.random.get_state()
    state = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (kind, np.asarray(keys).tobytes(), *rest),
        "python": random.getstate(),
        "device": None if (own := device.random_state()) is None else own.numpy().tobytes(),
    }
    return {name: encode(value) for name, value in state.items()}


def restore_random(state: Mapping[str, Any], device: Device) -> None:
    """Set this rank's random-number generators."""
    torch.set_rng_state(_bytes(decode(state["torch"])))
    kind, keys, *rest = decode(state["numpy"])
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    random.setstate(decode(state["python"]))
    own = decode(state["device"])
    if own is not None:
        device.set_random_state(_bytes(own))


def check_random(state: Mapping[str, Any], device: Device, *, path: object) -> None:
    """Raise CheckpointError unless this rank's random-number generators accept the state; leave them unchanged."""
    own = random_state(device)
    try:
        with _reading(path, "the random-number generators"):
            restore_random(state, device)
    finally:
        restore_random(own, device)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
