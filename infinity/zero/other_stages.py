"""Parameters of a pipeline's other stages: they keep their names and shapes in the model, and have no values here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from infinity.errors import StateError
from infinity.zero import parameter


class OtherStage:
    """The owner of a parameter that ranks of other stages have."""

    # No operation brings it here.
    gathers_on_use = False

    def __init__(self, holders: Sequence[int]) -> None:
        """holders: the pipeline indices of those ranks."""
        self._holders = tuple(holders)

    def materialize(self, params: list[nn.Parameter], use: str) -> None:
        """Raise StateError: a program on this rank cannot use them."""
        places = " and ".join(f"pp {index}" for index in self._holders)
        raise StateError(
            f"{parameter.name_of(params[0])} belongs to another stage of the pipeline, on the ranks at {places}, and "
            f"{use} needs its data here: train with engine.train_batch(batches) and evaluate with "
            "engine.eval_batch(batches), which run all stages; engine.state_dict(), engine.export(folder) and "
            "infinity.state(param) put whole values together"
        )


def leave_to_others(param: nn.Parameter, name: str, holders: Sequence[int], stand_in: torch.Tensor) -> None:
    """Free a parameter's memory for good. stand_in: see `parameter.release`, of the shape that it has on its ranks."""
    if parameter.is_released(param):
        parameter.restore(param, stand_in)
    parameter.release(param, stand_in)
    parameter.attach(param, OtherStage(holders), name)


def is_elsewhere(param: nn.Parameter) -> bool:
    """Return whether ranks of other stages have a parameter, and this one has not."""
    return parameter.is_kept(param) and isinstance(parameter.owner_of(param), OtherStage)
