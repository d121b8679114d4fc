"""Optimizer states of an element beside its master weight, by type of optimizer: fp32 values with torch's names."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.config.optimizer import Adagrad, Adam, Adamax, AnyOptimizer, Lion, Nadam, Rmsprop, Sgd
from infinity.errors import ConfigError
from infinity.plan.types import ADAM_MOMENTS, Kind

# For states of optimizers that this module does not know.
_NAMELESS = (Kind.STATE_1, Kind.STATE_2, Kind.STATE_3, Kind.STATE_4)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What a plan has to know of an optimizer."""

    # States of an element beside its master weight.
    moments: tuple[Kind, ...] = ADAM_MOMENTS
    # Whether it leaves elements alone whose gradient is not finite, so that a step may begin before all are known.
    guarded: bool = True
    # Whether there is one.
    trains: bool = True


# Of a model that is only run: every parameter is frozen, whatever it says of itself.
NO_OPTIMIZER = OptimizerSpec((), trains=False)


def optimizer_spec(section: AnyOptimizer | None) -> OptimizerSpec:
    """The optimizer that a configuration names, or NO_OPTIMIZER. Those that torch runs are not guarded."""
    match section:
        case None:
            return NO_OPTIMIZER
        case Adam():
            return OptimizerSpec()
        case Nadam():
            return OptimizerSpec(guarded=False)
        case Lion():
            return OptimizerSpec((Kind.EXP_AVG,))
        case Adagrad():
            return OptimizerSpec((Kind.SUM,))
        case Sgd(params=params):
            return OptimizerSpec((Kind.MOMENTUM_BUFFER,) if params.momentum else (), guarded=bool(params.momentum))
        case Rmsprop(params=params):
            buffer = (Kind.MOMENTUM_BUFFER,) if params.momentum else ()
            mean = (Kind.GRAD_AVG,) if params.centered else ()
            return OptimizerSpec((Kind.SQUARE_AVG, *buffer, *mean), guarded=False)
        case Adamax():
            return OptimizerSpec((Kind.EXP_AVG, Kind.EXP_INF), guarded=False)


def kinds_of(names: tuple[str, ...]) -> tuple[Kind, ...]:
    """The kinds under which states of these names are kept; ConfigError where there are too many to keep."""
    known = {kind.value: kind for kind in Kind if kind not in (Kind.PARAM, Kind.GRAD, Kind.REMAINDER, Kind.MASTER)}
    unknown = [name for name in names if name not in known]
    if len(unknown) > len(_NAMELESS):
        raise ConfigError(
            f"the optimizer keeps {len(names)} states an element ({', '.join(names)}); at most {len(_NAMELESS)} beside "
            "the known ones can be kept"
        )
    nameless = dict(zip(unknown, _NAMELESS, strict=False))
    return tuple(nameless.get(name) or known[name] for name in names)
