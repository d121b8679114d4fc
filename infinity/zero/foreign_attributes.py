"""What programs written for DeepSpeed read from a parameter and from an optimizer, while they believe it is there.

A program that sees `ds_id` on a parameter imports deepspeed. So the attributes exist only where the conventions ask for
them (`infinity.config.Conventions.parameter_attributes`); an engine's own code reads none of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import partial

from torch import nn

from infinity.zero.parameter import ZeroParamStatus

_ids = itertools.count()


def publish(param: nn.Parameter, *, parts: int) -> None:
    """Give a parameter `ds_id`, `ds_numel`, `ds_shape`, `ds_status`, `partition_numel()`, `ds_active_sub_modules`.

    parts: how many ranks share it. A second call keeps the id. `infinity.zero.parameter.forget` takes them away.
    """
    param.__dict__.update(
        ds_id=param.__dict__["ds_id"] if "ds_id" in param.__dict__ else next(_ids), ds_numel=param.numel(),
        ds_shape=param.shape, partition_numel=partial(math.ceil, param.numel() / parts), ds_active_sub_modules=set(),
        # While the parameter is released, its class says otherwise.
        ds_status=ZeroParamStatus.AVAILABLE,
    )  # fmt: skip


def publish_model(model: nn.Module, *, parts: int) -> None:
    """Publish every parameter of a model, and give its modules `ds_external_parameters()`."""
    for param in model.parameters():
        publish(param, parts=parts)
    for module in model.modules():
        module.__dict__["ds_external_parameters"] = _no_external_parameters


def _no_external_parameters() -> Iterable[tuple[str, nn.Parameter]]:
    """Every parameter is gathered where its data is used, so no module has to name those of others."""
    return ()


class ParameterOffload:
    """What DeepSpeed's optimizer keeps of its hooks, for programs that take them off around `generate`.

    Such a program (TRL) gathers all parameters, removes `forward_hooks` and `backward_hooks`, and registers the module
    again afterwards. The engine's hooks stay: within a block that holds all parameters they gather nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Nothing that could be removed. The program assigns empty lists of its own.
        self.forward_hooks: list[object] = []
        self.backward_hooks: list[object] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: the hooks are still there."""
