"""DeepSpeed's functions that read and set a parameter's states, as thin wrappers of `infinity.state`.

"full" functions gather from or scatter to all ranks and are collective. "local" functions read or set this rank's
elements as a flat fp32 tensor on the CPU. A getter returns None if the parameter is frozen and has no such state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from infinity.zero.states import ParameterState


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """Return the master weight in the parameter's shape, fp32 on the CPU. Collective."""
    return ParameterState(param).master


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the master weight; `value` has the parameter's shape. Collective."""
    ParameterState(param).set_full("master", value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient in the parameter's shape, fp32 on the CPU. Collective."""
    state = ParameterState(param)
    return state.grad if state.trainable else None


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the gradient; `value` has the parameter's shape. Collective."""
    ParameterState(param).set_full("grad", value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return the state with torch's name `optim_state_key`, such as "exp_avg", in the parameter's shape. Collective."""
    state = ParameterState(param)
    return state.full(optim_state_key) if state.trainable else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set the state with torch's name `optim_state_key`; `value` has the parameter's shape. Collective."""
    ParameterState(param).set_full(optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """Return this rank's elements of the master weight."""
    return ParameterState(param).local("master")


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's elements of the master weight."""
    ParameterState(param).set_local("master", value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the gradient. Collective at stages 0 and 1, where the call reduces it."""
    state = ParameterState(param)
    return state.local("grad") if state.trainable else None


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's elements of the gradient. Collective at stages 0 and 1."""
    ParameterState(param).set_local("grad", value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's elements of the state with torch's name `optim_state_key`."""
    state = ParameterState(param)
    return state.local(optim_state_key) if state.trainable else None


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's elements of the state with torch's name `optim_state_key`."""
    ParameterState(param).set_local(optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Set each parameter's gradient to what `update_func(gradient, parameter)` makes of it. Collective."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))
