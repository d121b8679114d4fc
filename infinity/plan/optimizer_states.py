"""What each type of optimizer keeps of an element beside its master weight: fp32 values, by torch's names."""

from __future__ import annotations

from infinity.config.optimizer import Adagrad, Adam, Adamax, AnyOptimizer, Lion, Nadam, Rmsprop, Sgd
from infinity.errors import ConfigError
from infinity.plan.types import ADAM_MOMENTS, Kind

# For states of optimizers that nobody has named here.
_NAMELESS = (Kind.STATE_1, Kind.STATE_2, Kind.STATE_3, Kind.STATE_4)


def moments_of(section: AnyOptimizer | None) -> tuple[Kind, ...]:
    """The states of the optimizer that a configuration names; Adam's where it names none."""
    match section:
        case None | Adam() | Nadam():
            return ADAM_MOMENTS
        case Lion():
            return (Kind.EXP_AVG,)
        case Adagrad():
            return (Kind.SUM,)
        case Sgd(params=params):
            return (Kind.MOMENTUM_BUFFER,) if params.momentum else ()
        case Rmsprop(params=params):
            buffer = (Kind.MOMENTUM_BUFFER,) if params.momentum else ()
            return (Kind.SQUARE_AVG, *buffer, *((Kind.GRAD_AVG,) if params.centered else ()))
        case Adamax():
            return (Kind.EXP_AVG, Kind.EXP_INF)


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
