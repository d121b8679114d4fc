"""A universal checkpoint, as DeepSpeed's `ds_to_universal` makes it: one folder a parameter, with a file a state.

    TAG/mp_rank_00_model_states.pt (stage 3: zero_pp_rank_*)   shapes, buffers, frozen parameters, counters
    TAG/zero/optimizer_state.pt                                parameter groups, loss scale; stage 3: the steps
    TAG/zero/PARAMETER/{fp32,exp_avg,exp_avg_sq,step}.pt
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.checkpoint.deepspeed.layout import (
    Layout,
    StoredRange,
    as_dict,
    param_shapes,
    state_of,
    step_count,
)
from infinity.checkpoint.deepspeed.torch_file import TorchFile, TorchTensor
from infinity.checkpoint.file_names import inside
from infinity.checkpoint.format import PARAM
from infinity.config.untrusted import shortened
from infinity.errors import CheckpointError

FOLDER = "zero"
_GLOBAL = "optimizer_state.pt"
_MASTERS, _STEP = "fp32", "step"
_ADVICE = "Convert the checkpoint again, or load the one that it was made of"


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
        raise CheckpointError(states, "it is no folder of this checkpoint", _ADVICE)
    return states


def _parameter_folder(states: Path, name: str) -> Path:
    """Return a parameter's folder, which its name must not lead out of the checkpoint."""
    if "/" in name or "\0" in name or name in (".", ".."):
        raise CheckpointError(states, f"a parameter is called {shortened(name)}, which is no folder's name", _ADVICE)
    own = states / name
    if own.is_symlink() or not own.is_dir():
        raise CheckpointError(own, "it is missing, or a link", _ADVICE)
    return own


def _piece(path: Path, name: str, shape: tuple[int, ...]) -> StoredRange:
    file = TorchFile(path)
    stored = file.value.get("param") if isinstance(file.value, dict) else file.value
    numel = math.prod(shape)
    if not isinstance(stored, TorchTensor) or stored.shape not in (shape, (numel,)):
        said = f"a tensor of the shape {list(stored.shape)}" if isinstance(stored, TorchTensor) else "no tensor"
        raise file.error(f"it holds {said}, and {name} has the shape {list(shape)}")
    return StoredRange(0, numel, stored, 0)
