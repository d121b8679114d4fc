"""The state of DeepSpeed's run besides its tensors, as `infinity.checkpoint.state` keeps it; and the client state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from infinity.checkpoint.codec import NotSerializable, encode
from infinity.checkpoint.deepspeed.layout import as_dict, as_list
from infinity.checkpoint.deepspeed.pickles import PickledObject, Unloaded
from infinity.checkpoint.deepspeed.torch_file import TorchFile, TorchTensor
from infinity.config.untrusted import NESTING_MAX, shortened
from infinity.log import logger

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
    """Return the state of the run as `infinity.checkpoint.state.Run` keeps it.

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
            return {self._key(key, depth): self.of(each, depth + 1) for key, each in value.items()}
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

    def _key(self, key: Any, depth: int) -> Any:
        return self.of(key, depth + 1) if isinstance(key, Unloaded) else key


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
