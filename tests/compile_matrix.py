"""A program: every way to compile a model, trained for five steps by an engine and by plain torch.

    python -m tests.compile_matrix [--backends eager,aot_eager,inductor] [--stages 1,2,3] [--tiers cpu,nvme] [--json]
                                   [NAME ...]

Prints a row for each case: the greatest difference between weights of the engine and of plain torch compiled the same
way by the same back end, and between the engine and plain torch that runs eagerly; the graphs that were compiled, and
how often one was compiled again after the second step. What raises prints its error.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from tests.support.models import MLP, TinyLlama, mlp, tiny_llama, token_batch, vector_batch
from tests.support.oracle import ADAM, SmallModel, settings

STEPS = 5
Options = dict[str, Any]


class Checkpointed(TinyLlama):
    """Computes its blocks again in backward by itself."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[-1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


class Borrows(TinyLlama):
    """Computes its logits with the weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.head = None

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[-1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


class Paired(TinyLlama):
    """Runs its blocks through functions that a program puts in their places."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [*self.blocks]

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[-1]]
        for step in self.steps:
            x = step(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


class Scales(nn.Module):
    """A block that changes its input in place, and reads a weight that is another module's."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.mul_(0.5)) * self.others[0].weight.mean()


class Entangled(nn.Module):
    """Blocks that reach outside themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Scales(self.enter) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def llama() -> nn.Module:
    return tiny_llama()


def small() -> nn.Module:
    torch.manual_seed(0)
    return SmallModel()


def seeded(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    """A model of a class with the weights of seed 0."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    return make


def hub(name: str) -> Callable[[], nn.Module]:
    """A tiny transformers model."""

    def make() -> nn.Module:
        from tests.support.hub import hf_model

        return hf_model(name)

    return make


def recomputed() -> nn.Module:
    model: Any = hub("llama")()
    model.config.use_cache = False
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=partial(checkpoint, use_reentrant=False))
    return model


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The repeated blocks of any of these models."""
    for path in ("blocks", "layers", "model.layers", "transformer.h"):
        try:
            return model.get_submodule(path)  # type: ignore[return-value]
        except AttributeError:
            continue
    raise AssertionError("no blocks")


# How a program compiles: what it gives to `initialize` (or trains in plain torch), and what it does after.


def compile_model(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def compile_blocks(model: nn.Module, **options: Any) -> nn.Module:
    for block in blocks_of(model):
        block.compile(**options)
    return model


def wrap_model(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, **options)  # type: ignore[return-value]


def wrap_blocks(model: nn.Module, **options: Any) -> nn.Module:
    blocks = blocks_of(model)
    for index in range(len(blocks)):
        blocks[index] = torch.compile(blocks[index], **options)
    return model


def wrap_inner(model: nn.Module, **options: Any) -> nn.Module:
    """One linear layer deep inside each block, in its place."""
    for block in blocks_of(model):
        block.out = torch.compile(block.out, **options)
    return model


def wrap_fixed(model: nn.Module, **options: Any) -> nn.Module:
    model.fixed = torch.compile(model.fixed, **options)
    return model


def compile_inner(model: nn.Module, **options: Any) -> nn.Module:
    for block in blocks_of(model):
        block.norm1.compile(**options)
    return model


def compile_forward(model: nn.Module, **options: Any) -> nn.Module:
    """As a decorator does it: the region is a function that calls the blocks."""
    model.forward = torch.compile(model.forward, **options)  # type: ignore[method-assign]
    return model


def compile_both(model: nn.Module, **options: Any) -> nn.Module:
    compile_blocks(model, **options)
    return compile_model(model, **options)


def leave(model: nn.Module, **options: Any) -> nn.Module:
    return model


def compile_pair(model: nn.Module, **options: Any) -> nn.Module:
    """A function of the program's own that calls two blocks, which are compiled themselves."""
    blocks = blocks_of(model)
    first, second, *rest = blocks
    pair = torch.compile(lambda x: second(first(x)), **options)
    model.steps = [pair, *rest]  # type: ignore[assignment]
    return model


@dataclass(frozen=True)
class Case:
    """One way to compile. `before` runs on the model that is given to initialize, `after` on the engine; `plain` does
    the same to a model in plain torch. `refused` is what a refusal's text contains.
    """

    name: str
    make: Callable[[], nn.Module] = llama
    before: Callable[..., nn.Module] = leave
    after: Callable[..., Any] = leave
    plain: Callable[..., nn.Module] | None = None
    loss: Callable[..., Callable[[Tensor], Tensor]] | None = None
    options: Options = field(default_factory=dict)
    zero: Options = field(default_factory=dict)
    top: Options = field(default_factory=dict)
    accumulation: int = 1
    dtype: str = "fp32"
    # Calls with positions that vary from step to step.
    varies: bool = False
    evaluates: bool = False
    refused: str = ""


def engine_compile(engine: Any, **options: Any) -> None:
    engine.compile(**options)


def module_compile(engine: Any, **options: Any) -> None:
    engine.module.compile(**options)


def later_blocks(engine: Any, **options: Any) -> None:
    compile_blocks(engine.module, **options)


def compiled_loss(**options: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda value: (value * 2).exp().log() / 2, **options)


EVERY = {"activation_checkpointing": {"every": 1}}
TIER = {"activation_checkpointing": {"every": 1, "cpu_checkpointing": True}}
CASES = (
    Case("model.compile() before", before=compile_model),
    Case("engine.module.compile()", after=module_compile, plain=compile_model),
    Case("engine.compile()", after=engine_compile, plain=compile_model),
    Case("block.compile() before", before=compile_blocks),
    Case("block.compile() after", after=later_blocks, plain=compile_blocks),
    Case("torch.compile(model)", before=wrap_model),
    Case("torch.compile(block) in the list", before=wrap_blocks),
    Case("model and blocks", before=compile_both),
    Case("a compiled submodule of a block", before=compile_inner),
    Case("torch.compile(submodule of a block)", before=wrap_inner),
    Case("a compiled forward around blocks", before=compile_forward),
    Case("a compiled function around blocks", make=seeded(Paired), before=compile_pair),
    Case("units smaller than blocks", before=compile_model, zero={"stage3_max_live_parameters": 30_000}),
    Case("blocks that reach outside themselves", make=seeded(Entangled), before=compile_blocks),
    Case("a compiled loss", loss=compiled_loss),
    Case("mlp, engine.compile()", make=mlp, after=engine_compile, plain=compile_model),
    Case("mlp, model.compile() before", make=mlp, before=compile_model),
    Case("tied and frozen, engine.compile()", make=small, after=engine_compile, plain=compile_model),
    Case("tied and frozen, blocks", make=small, before=compile_blocks),
    Case("a borrowed weight", make=seeded(Borrows), after=engine_compile, plain=compile_model),
    Case("a borrowed weight, compiled forward", make=seeded(Borrows), before=compile_forward),
    Case("the model's checkpointing, blocks", make=seeded(Checkpointed), before=compile_blocks),
    Case("the model's checkpointing, engine.compile()", make=seeded(Checkpointed), after=engine_compile,
         plain=compile_model),
    Case("our checkpointing, blocks", before=compile_blocks, top=EVERY),
    Case("our checkpointing, engine.compile()", after=engine_compile, plain=compile_model, top=EVERY),
    Case("checkpoints on the CPU", after=engine_compile, plain=compile_model, top=TIER),
    Case("accumulation 2", after=engine_compile, plain=compile_model, accumulation=2),
    Case("bf16", before=compile_blocks, dtype="bf16"),
    Case("evaluation between", after=engine_compile, plain=compile_model, evaluates=True),
    Case("lengths that vary", after=engine_compile, plain=compile_model, varies=True),
    Case("tiles", after=engine_compile, plain=compile_model, zero={"tile_parameters": 1000}),
    Case("tiles, blocks", before=compile_blocks, zero={"tile_parameters": 1000}),
    Case("kept gathered", before=compile_model, zero={"stage3_param_persistence_threshold": 100_000}),
    Case("fullgraph blocks", before=compile_blocks, options={"fullgraph": True}),
    Case("fullgraph model", before=compile_model, options={"fullgraph": True}),
    Case("llama of transformers", make=hub("llama"), after=engine_compile, plain=compile_model),
    Case("llama, its checkpointing", make=recomputed, after=engine_compile, plain=compile_model),
    Case("a frozen operator, torch.compile(submodule)", make=small, before=wrap_fixed),
    Case("gpt2 of transformers", make=hub("gpt2"), after=engine_compile, plain=compile_model),
    Case("llama, blocks of transformers", make=hub("llama"), before=compile_blocks),
    Case("mixtral of transformers", make=hub("mixtral"), after=engine_compile, plain=compile_model),
)  # fmt: skip


@dataclass
class Row:
    """What one run of a case gave."""

    name: str
    backend: str
    stage: int
    tier: str
    of_same: float | None = None
    of_eager: float | None = None
    graphs: int = 0
    again: int = 0
    error: str = ""
    seconds: float = 0.0


def batch(case: Case, micro: int) -> dict[str, Tensor]:
    """Data of a micro-step."""
    if isinstance(case.make(), (MLP, Entangled)):
        return vector_batch(0, micro)
    return token_batch(0, micro, positions=8 + 4 * (micro % 3) if case.varies else 16)


def loss_of(case: Case, output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def plain(case: Case, backend: str | None) -> dict[str, Tensor]:
    """The weights after training in plain torch, compiled by `backend` or run eagerly."""
    torch._dynamo.reset()
    model = case.make()
    names = {id(param): name for name, param in model.named_parameters()}
    call = model
    transform: Callable[[Tensor], Tensor] = lambda value: value  # noqa: E731
    if backend is not None:
        call = (case.plain or case.before)(model, backend=backend, **case.options)
        transform = case.loss(backend=backend) if case.loss is not None else transform
    # In 16 bits: what is stepped stands beside what is computed with.
    trained = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().clone() for param in trained]
    if case.dtype == "bf16":
        model.bfloat16()
    optimizer = torch.optim.AdamW(masters, **ADAM, fused=True)
    for micro in range(STEPS * case.accumulation):
        if case.evaluates:
            with torch.no_grad():
                call(**batch(case, 1000 + micro))
        (transform(loss_of(case, call(**batch(case, micro)))) / case.accumulation).backward()
        if (micro + 1) % case.accumulation == 0:
            for param, master in zip(trained, masters, strict=True):
                master.grad = param.grad.float()
                param.grad = None
            optimizer.step()
            with torch.no_grad():
                for param, master in zip(trained, masters, strict=True):
                    param.copy_(master)
    frozen = {names[id(param)]: param.detach().float() for param in model.parameters()}
    return {**frozen, **{names[id(param)]: master for param, master in zip(trained, masters, strict=True)}}


def train(case: Case, config: dict[str, Any], backend: str, row: Row | None = None) -> dict[str, Tensor]:
    """The weights after training by an engine."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = case.make()
    given = case.before(model, backend=backend, **case.options)
    engine, *_ = infinity.initialize(model=given, config=config)
    transform: Callable[[Tensor], Tensor] = lambda value: value  # noqa: E731
    if case.loss is not None:
        transform = case.loss(backend=backend)
    with engine:
        case.after(engine, backend=backend, **case.options)
        settled = 0
        for micro in range(STEPS * case.accumulation):
            if case.evaluates:
                with torch.no_grad():
                    engine(**batch(case, 1000 + micro))
            engine.backward(transform(loss_of(case, engine(**batch(case, micro)))))
            engine.step()
            if micro == 1:
                settled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if row is not None:
            row.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            row.again = row.graphs - settled
        return {name: infinity.state(param).master for name, param in engine.module.named_parameters()}


def config_of(case: Case, folder: Path | str, stage: int, tier: str) -> dict[str, Any]:
    """The engine's configuration of a case."""
    return settings(
        folder, stage=stage, param=tier, optimizer=tier, dtype=case.dtype, accumulation=case.accumulation,
        zero={"stage3_max_live_parameters": 100_000, **case.zero}, **case.top,
    )  # fmt: skip


def apart(values: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The greatest difference between weights of the same names."""
    assert values.keys() == others.keys(), sorted(values.keys() ^ others.keys())
    return max(float((value - others[name]).abs().max()) for name, value in values.items() if value.numel())


def measure(case: Case, backend: str, stage: int, tier: str) -> Row:
    """One row of the table."""
    row = Row(case.name, backend, stage, tier)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            values = train(case, config_of(case, folder, stage, tier), backend, row)
            row.of_same, row.of_eager = apart(values, plain(case, backend)), apart(values, plain(case, None))
        except Exception as error:
            row.error = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    row.seconds = round(time.monotonic() - began, 1)
    return row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases whose name contains one of these; default: all")
    parser.add_argument("--backends", default="eager,aot_eager,inductor")
    parser.add_argument("--stages", default="1,2,3")
    parser.add_argument("--tiers", default="cpu,nvme")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    rows = []
    for case in CASES:
        if options.names and not any(name in case.name for name in options.names):
            continue
        for backend in options.backends.split(","):
            for stage in map(int, options.stages.split(",")):
                for tier in options.tiers.split(",") if stage == 3 else ["cpu"]:
                    rows.append(measure(case, backend, stage, tier))
                    if not options.json:
                        sys.stdout.write(line(rows[-1]) + "\n")
                        sys.stdout.flush()
    if options.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def line(row: Row) -> str:
    """A row as text."""
    figures = (
        row.error[:230] if row.error else
        f"same {row.of_same:.1e}  eager {row.of_eager:.1e}  graphs {row.graphs}, {row.again} after step 2"
    )  # fmt: skip
    return f"{row.name:44} {row.backend:9} {row.stage} {row.tier:5} {figures}  ({row.seconds} s)"


if __name__ == "__main__":
    main()
