"""The names of a module's tensors: parameters, the further names of tied ones, and the buffers of a state dict."""

from __future__ import annotations

from torch import Tensor, nn

from infinity.errors import CheckpointError
from infinity.memory.partition import DTYPES


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter, by identity."""
    return {id(param): name for name, param in module.named_parameters()}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, each with the first."""
    first = parameter_names(module)
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(param)] for name, param in every if first[id(param)] != name}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict has, by name."""
    left_out = {
        f"{path}.{name}" if path else name
        for path, inner in module.named_modules()
        for name in inner._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name not in left_out}


def checkpoint_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint keeps, by name; CheckpointError for a dtype that it cannot keep."""
    # The module may leave out of its state dict what it would keep by itself.
    kept = module.state_dict(keep_vars=True).keys()
    found = {name: buffer for name, buffer in module.named_buffers() if name in kept}
    for name, buffer in found.items():
        if buffer.dtype not in DTYPES.values():
            raise CheckpointError(
                name, f"a buffer of dtype {buffer.dtype} cannot be kept in a checkpoint",
                "Register it with persistent=False, or keep its real and imaginary parts",
            )  # fmt: skip
    return found
