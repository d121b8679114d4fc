"""Models and loops that do what models and loops do: each a `Case` that the oracle and an engine both train."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import vector_batch
from tests.support.oracle import Access, Case

WIDTH = 16
# Modules of this class are gathered whole at stage 3, whatever they call inside.
LEAF = {"leaf_module": {"classes": ["Chooser"]}}


class Layer(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Layers between two matrices; `route` says how they are called."""

    def __init__(self, route: Callable[..., Tensor], layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.route = route

    def forward(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        return F.mse_loss(self.leave(self.route(self, self.enter(x), **options)), y)


def in_order(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


class Routed(Case):
    """A stack whose layers are called by `route(model, x, rank=..., micro=...)` where it asks for them."""

    def __init__(self, route: Callable[..., Tensor] = in_order, *names: str, layers: int = 3) -> None:
        self._route = route
        self._names = names
        self._layers = layers

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Stack(self._route, self._layers)

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        options = {"rank": rank, "micro": micro}
        yield call(**vector_batch(rank, micro, width=WIDTH), **{name: options[name] for name in self._names})


def first_rank_uses_more(model: Stack, x: Tensor, rank: int) -> Tensor:
    """Layer 1 has a gradient on rank 0 only, layer 2 on the others only."""
    return model.layers[2](model.layers[0](x)) if rank else model.layers[1](model.layers[0](x))


def alternating(model: Stack, x: Tensor, micro: int) -> Tensor:
    """Another way through the model at each micro-step; layer 2 rests for three of four."""
    order = [(0, 1), (1, 0), (0, 2, 1), (1,)][micro % 4]
    for index in order:
        x = model.layers[index](x)
    return x


def last_unused(model: Stack, x: Tensor) -> Tensor:
    return model.layers[1](model.layers[0](x))


def first_three_times(model: Stack, x: Tensor) -> Tensor:
    return model.layers[0](model.layers[1](model.layers[0](model.layers[0](x))))


def partly_without_grad(model: Stack, x: Tensor) -> Tensor:
    """Layer 0 runs under no_grad in one branch and with gradients in the other; the input requires one of its own."""
    with torch.no_grad():
        fixed = model.layers[1](model.layers[0](x))
    leaf = fixed.clone().requires_grad_()
    return model.layers[2](leaf) + model.layers[0](x.detach().requires_grad_())


def checkpointed(model: Stack, x: Tensor, *, reentrant: bool) -> Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def checkpointed_together(model: Stack, x: Tensor, *, reentrant: bool) -> Tensor:
    """Two layers in one region, and one region within another."""
    first, second, third = model.layers

    def pair(x: Tensor) -> Tensor:
        return second(first(x))

    def nested(x: Tensor) -> Tensor:
        return third(checkpoint(pair, x, use_reentrant=reentrant))

    x = checkpoint(pair, x, use_reentrant=reentrant)
    return checkpoint(nested, x, use_reentrant=reentrant)


class Chooser(nn.Module):
    """Experts chosen by data: a rank may use one that no other rank uses. One unit at stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.experts[chosen](x)


class ChosenByRank(Case):
    """Expert 0 or 1 by rank and micro-step; expert 2 never."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
                self.chooser = Chooser()

            def forward(self, x: Tensor, y: Tensor, chosen: int) -> Tensor:
                return F.mse_loss(self.leave(self.chooser(self.enter(x), chosen)), y)

        return Model()

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        yield call(**vector_batch(rank, micro, width=WIDTH), chosen=(rank + micro // 3) % 2)


class TwoForwards(Routed):
    """Two forwards, then one backward of the sum of their losses."""

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        first, second = (vector_batch(rank, 100 * part + micro, width=WIDTH) for part in (1, 2))
        yield (call(**first) + call(**second)) / 2


class InterleavedBackward(Routed):
    """Two forwards, then a backward for each, the first one's first."""

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        yield from [call(**vector_batch(rank, 100 * part + micro, width=WIDTH)) / 2 for part in (1, 2)]


@dataclass
class Record:
    """What passes between modules, as a dataclass."""

    x: Tensor
    note: str = "kept"


Pair = namedtuple("Pair", ["x", "extra"])

SHAPES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (x, None), lambda value: value[0]),
    "list": (lambda x: [x, x.sum().detach()], lambda value: value[0]),
    "dict": (lambda x: {"x": x, "n": 1}, lambda value: value["x"]),
    "dataclass": (Record, lambda value: value.x),
    "namedtuple": (lambda x: Pair(x, {"inner": [x.detach()]}), lambda value: value.x),
    "nested": (lambda x: {"a": [(Record(x), 3)]}, lambda value: value["a"][0][0].x),
}


class Structured(Case):
    """Every layer takes and returns a structure, and so does the model."""

    def __init__(self, shape: str) -> None:
        self._wrap, self._unwrap = SHAPES[shape]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        wrap, unwrap = self._wrap, self._unwrap

        class Wrapped(Layer):
            def forward(self, value: Any) -> Any:
                return wrap(super().forward(unwrap(value)))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.enter = nn.Linear(WIDTH, WIDTH)
                self.layers = nn.ModuleList(Wrapped() for _ in range(3))

            def forward(self, batch: Any, y: Tensor) -> Any:
                value = wrap(self.enter(unwrap(batch)))
                for layer in self.layers:
                    value = layer(value)
                return wrap(F.mse_loss(unwrap(value), y))

        return Model()

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        batch = vector_batch(rank, micro, width=WIDTH)
        yield self._unwrap(call(self._wrap(batch["x"]), y=batch["y"]))


class Evaluated(Routed):
    """Evaluation between steps, in another order of layers and with another number of forwards each time."""

    def after_step(self, call: nn.Module, step: int, access: Access) -> list[Tensor]:
        call.eval()
        with torch.no_grad():
            seen = [call(**vector_batch(9, part, width=WIDTH)) for part in range(step % 3)]
        call.train()
        return seen


class EvaluatedElsewise(Evaluated):
    """In eval mode the model takes another way."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Stack(lambda model, x: in_order(model, x) if model.training else last_unused(model, x))


class Looked(Routed):
    """The program reads weights, moments and gradients while training."""

    def before_step(self, call: nn.Module, micro: int, access: Access) -> list[Tensor]:
        params = access.params(call)
        return [access.get(params[name], "grad") for name in ("layers.1.up.weight", "leave.bias")]

    def after_step(self, call: nn.Module, step: int, access: Access) -> list[Tensor]:
        params = access.params(call)
        seen = [access.get(params["layers.0.down.weight"], what) for what in ("master", "exp_avg", "exp_avg_sq")]
        with access.read([params["enter.weight"], params["leave.bias"]]):
            return [*seen, params["enter.weight"].detach().clone(), params["leave.bias"].detach().clone()]


class Changed(Routed):
    """The program changes weights and moments while training."""

    def after_step(self, call: nn.Module, step: int, access: Access) -> list[Tensor]:
        params = access.params(call)
        if step == 1:
            with access.modify([params["layers.0.up.weight"], params["leave.weight"]]):
                params["layers.0.up.weight"].mul_(0.5)
                params["leave.weight"].data[3] = 0.25
        if step == 2:
            for what in ("exp_avg", "exp_avg_sq"):
                access.set(params["layers.1.down.weight"], what, access.get(params["layers.1.down.weight"], what) * 0.5)
        if step == 3:
            access.set(params["enter.weight"], "master", access.get(params["enter.weight"], "master") + 0.01)
        return []


class Alone(Routed):
    """A matrix without a bias, a unit of one parameter, is called on every rank and has a gradient on the first only;
    another one is used twice.
    """

    def __init__(self) -> None:
        super().__init__(first_rank_learns, "rank")

    def model(self) -> nn.Module:
        model = super().model()
        model.alone, model.twice = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        return model


def first_rank_learns(model: Any, x: Tensor, rank: int) -> Tensor:
    aside = model.alone(x)
    return in_order(model, model.twice(x + (aside.detach() if rank else aside))) + model.twice(x)


def _with(route: Callable[..., Tensor], *, reentrant: bool) -> Callable[..., Tensor]:
    return lambda model, x: route(model, x, reentrant=reentrant)


# Functions that make a case: cases hold functions that do not travel between processes, their names do.
CASES: dict[str, Callable[[], Case]] = {
    "everything awkward": Case,
    "a layer on one rank only": lambda: Routed(first_rank_uses_more, "rank"),
    "experts chosen by rank": ChosenByRank,
    "another order each step": lambda: Routed(alternating, "micro"),
    "a layer never used": lambda: Routed(last_unused),
    "weights alone in their unit": Alone,
    "a layer used three times": lambda: Routed(first_three_times),
    "two forwards, one backward": TwoForwards,
    "two forwards, two backwards": InterleavedBackward,
    "no_grad in part": lambda: Routed(partly_without_grad),
    **{f"{shape} in and out": lambda shape=shape: Structured(shape) for shape in SHAPES},
    "evaluation between steps": Evaluated,
    "evaluation goes another way": EvaluatedElsewise,
    "read in training": Looked,
    "changed in training": Changed,
    **{
        f"{name}, {'reentrant' if reentrant else 'not reentrant'}": lambda route=route, reentrant=reentrant: Routed(
            _with(route, reentrant=reentrant)
        )
        for name, route in (("checkpointed", checkpointed), ("checkpointed together", checkpointed_together))
        for reentrant in (True, False)
    },
}
