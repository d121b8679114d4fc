"""The names of a module's tensors: parameters, the further names of tied ones, and the buffers of a state dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor, nn

from infinity.errors import CheckpointError
from infinity.memory.partition import DTYPES


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter, by identity."""
    return {id(param): name for name, param in module.named_parameters()}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of parameters and buffers that several modules share, each with the first."""
    every = list(chain(module.named_parameters(remove_duplicate=False), _persistent(module)))
    first = {id(tensor): name for name, tensor in reversed(every)}
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict has, by their first names in it."""
    return _each_once(_persistent(module))


def checkpoint_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint keeps, by name; CheckpointError for a dtype that it cannot keep."""
    # The module may leave out of its state dict what it would keep by itself.
    kept = module.state_dict(keep_vars=True).keys()
    found = _each_once(each for each in module.named_buffers(remove_duplicate=False) if each[0] in kept)
    for name, buffer in found.items():
        if buffer.dtype not in DTYPES.values():
            raise CheckpointError(
                name, f"a buffer of dtype {buffer.dtype} cannot be kept in a checkpoint",
                "Register it with persistent=False, or keep its real and imaginary parts",
            )  # fmt: skip
    return found


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every name of a buffer in the state dict."""
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _each_once(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())
