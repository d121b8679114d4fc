"""One family, trained by an engine with everything on NVMe and by plain torch; how far apart the weights are.

A compiler that fuses operators rounds otherwise than torch does eagerly. So a compiled engine is compared with plain
torch that compiles the same modules with the same back end, and that with plain torch that runs eagerly.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from infinity.zero.forwards import Replaced
from tests.support.oracle import settings
from tests.zoo.families import FAMILIES, batch, build

STEPS = 3
NOT_COMPILED = "none"
# Greatest difference of an fp32 weight after `STEPS` steps, each of which moves a weight by up to the rate of 2e-3.
ERROR_MAX = 1e-5
# The engine's hooks give every layer the encoder's output as a tensor of its own, so that autograd adds up one layer's
# keys and values before it adds another layer's; plain torch adds one after the other.
BY_LAYER = "the gradient of the encoder's output is summed layer by layer; plain torch that does so has equal bits"


def run(rank: int, world: int, name: str, compiler: str = NOT_COMPILED, steps: int = STEPS) -> dict[str, Any]:
    """Train on this rank's data; rank 0 compares. compiler: a backend of torch.compile for the engine, or none."""
    torch.set_num_threads(1)
    # Families share code of transformers, which torch compiles for few classes only.
    torch._dynamo.reset()
    began = time.monotonic()
    found, regions = train(name, rank, compiler, steps)
    seconds = time.monotonic() - began
    if rank > 0:
        return {}
    plain = partial(_plain, name, world, steps)
    expected = plain(compiler, regions)
    assert found.keys() == expected.keys()
    error, worst = _most(found, expected)
    start = {key: param.detach() for key, param in build(name).named_parameters()}
    row = {
        "numel": sum(value.numel() for value in expected.values()),
        "error": error,
        "bits": _equal(found, expected),
        # A model that does not learn agrees with anything.
        "moved": _most(start, expected)[0],
        "seconds": round(seconds, 2),
        "why": "",
    }
    if compiler != NOT_COMPILED:
        row["rounding"] = _most(expected, plain())[0]
    if not row["bits"]:
        by_layer = FAMILIES[name].has_decoder and _equal(found, plain(compiler, regions, by_layer=True))
        row["why"] = BY_LAYER if by_layer else f"not known; most in {worst}"
    return row


def train(
    name: str, rank: int, compiler: str = NOT_COMPILED, steps: int = STEPS, seed: Callable[[int], int] = int
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights after an engine's steps, and the paths of the modules it has compiled. seed: of what a step draws."""
    model = build(name)
    with tempfile.TemporaryDirectory() as drive:
        engine, *_ = infinity.initialize(model=model, config=settings(drive, param="nvme", optimizer="nvme"))
        if compiler != NOT_COMPILED:
            engine.compile(backend=compiler)
        regions = [path for path, module in model.named_modules() if isinstance(module.forward, Replaced)]
        with engine:
            for step in range(steps):
                engine.backward(_loss(engine, name, rank, step, seed(step)))
                engine.step()
            return {key: infinity.state(param).master for key, param in model.named_parameters()}, regions


def _plain(
    name: str, world: int, steps: int, compiler: str = NOT_COMPILED, regions: Sequence[str] = (), *,
    by_layer: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """All ranks' data in one process; the gradient is averaged over ranks, as DistributedDataParallel does. regions:
    what `compiler` compiles. by_layer: what a decoder layer adds to the gradient of the encoder's output is summed
    before that of other layers is added.
    """
    model = build(name)
    torch._dynamo.reset()
    for path in regions:
        module = model.get_submodule(path)
        # Torch takes sizes that differ between modules of one class for ones that vary, and inductor fails at some.
        module.forward = torch.compile(module.forward, backend=compiler, dynamic=False)  # type: ignore[method-assign]
    for path, module in model.named_modules() if by_layer else ():
        if "decoder" in path and path.rpartition(".")[2].isdigit():
            module.register_forward_pre_hook(_apart_from_others, with_kwargs=True)
    section = settings("unused")["optimizer"]["params"]
    optimizer = torch.optim.AdamW(model.parameters(), **section, fused=True)
    for step in range(steps):
        for rank in range(world):
            (_loss(model, name, rank, step, step) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: param.detach() for key, param in model.named_parameters()}


def _apart_from_others(_: nn.Module, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    def own(value: Any) -> Any:
        return value.view_as(value) if isinstance(value, Tensor) else value

    return tuple(map(own, values)), {key: own(value) for key, value in named.items()}


def _loss(call: nn.Module, name: str, rank: int, step: int, seed: int) -> Tensor:
    # What is drawn in a forward (LayerDrop).
    torch.manual_seed(seed)
    return call(**batch(name, rank, step)).loss


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[key], value) for key, value in expected.items())


def _most(values: dict[str, Tensor], others: dict[str, Tensor]) -> tuple[float, str]:
    """The greatest difference, and the weight that has it."""
    return max((_apart(values[key], other), key) for key, other in others.items())


def _apart(value: Tensor, other: Tensor) -> float:
    assert value.shape == other.shape
    # A NaN is far from everything.
    return float((value - other).abs().max().nan_to_num(math.inf)) if value.numel() else 0.0
