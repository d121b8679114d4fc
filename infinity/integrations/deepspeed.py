"""DeepSpeed's names for reading and setting a parameter's states; thin over `infinity.state`.

The "full" ones gather from or scatter to all ranks and are collective; the "local" ones are this rank's elements, flat.
Where a frozen parameter has no such state, reading gives None.
"""

from __future__ import annotations

from torch import Tensor, nn

from infinity.zero.states import ParameterState


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """`infinity.state(param).master`."""
    return ParameterState(param).master


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """`infinity.state(param).master = value`."""
    ParameterState(param).master = value


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """`infinity.state(param).grad`."""
    state = ParameterState(param)
    return state.grad if state.trainable else None


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """`infinity.state(param).grad = value`."""
    ParameterState(param).grad = value


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """`infinity.state(param).exp_avg`, or what else the optimizer keeps, by torch's name."""
    state = ParameterState(param)
    return state.full(optim_state_key) if state.trainable else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """`infinity.state(param).exp_avg = value`, or what else the optimizer keeps."""
    ParameterState(param).set_full(optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """This rank's elements of the master weight."""
    return ParameterState(param).local("master")


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's elements of the master weight."""
    ParameterState(param).set_local("master", value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of the gradient; collective at stages 0 and 1, which reduce it for this."""
    state = ParameterState(param)
    return state.local("grad") if state.trainable else None


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's elements of the gradient; collective at stages 0 and 1."""
    ParameterState(param).set_local("grad", value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's elements of a moment."""
    state = ParameterState(param)
    return state.local(optim_state_key) if state.trainable else None


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's elements of a moment."""
    ParameterState(param).set_local(optim_state_key, value)
