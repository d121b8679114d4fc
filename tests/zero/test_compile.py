"""Compiled models train to what they train to in plain torch: weights are gathered and released outside of what is
compiled. All back ends and cases: `python -m tests.compile_matrix`.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.zero.compiled import CompiledModules
from tests.compile_matrix import CASES, Row, apart, batch, config_of, plain, train
from tests.support.cells import kept
from tests.support.models import tiny_llama, token_batch
from tests.support.oracle import join, settings

# The compiler looks at gradients of what is no leaf, and hides the warning only where warnings are not errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

BY_NAME = {case.name: case for case in CASES}
# The backward of a compiled function reads the weights; what is compiled eagerly only records that it is.
AT_STAGE_3 = (
    ("engine.compile()", "aot_eager", 2), ("engine.module.compile()", "eager", 2),
    ("model.compile() before", "eager", 2),
    ("block.compile() before", "aot_eager", 1), ("block.compile() after", "eager", 1),
    ("torch.compile(model)", "eager", 2), ("torch.compile(block) in the list", "aot_eager", 1),
    ("torch.compile(submodule of a block)", "aot_eager", 1), ("a compiled forward around blocks", "eager", 2),
    ("a compiled function around blocks", "aot_eager", 1), ("units smaller than blocks", "aot_eager", 1),
    # Two that break at the borrowed weight, and one once the blocks are known to need it.
    ("blocks that reach outside themselves", "aot_eager", 3), ("tied and frozen, engine.compile()", "aot_eager", 2),
    ("our checkpointing, engine.compile()", "aot_eager", 2), ("checkpoints on the CPU", "eager", 2),
    ("tiles, blocks", "aot_eager", 1), ("fullgraph model", "aot_eager", 2), ("a compiled loss", "aot_eager", 1),
    ("lengths that vary", "eager", 4), ("mlp, engine.compile()", "aot_eager", 0),
)  # fmt: skip
# One of each kind: whole models and blocks, before and after, around blocks, in tiles, checkpointed, of many lengths.
NAMES = (
    "engine.compile()", "model.compile() before", "block.compile() after", "torch.compile(block) in the list",
    "a compiled function around blocks", "units smaller than blocks", "blocks that reach outside themselves",
    "our checkpointing, engine.compile()", "tiles, blocks", "a compiled loss", "lengths that vary",
)  # fmt: skip
SHORT = [each for each in AT_STAGE_3 if each[0] in NAMES]


@pytest.fixture(autouse=True)
def _compiles_anew() -> Iterator[None]:
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@functools.cache
def eager(make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """What plain torch trains a model to. Neither of these back ends changes a bit of it."""
    return plain(next(case for case in CASES if case.make is make and not case.varies), None)


@pytest.mark.parametrize(("name", "backend", "graphs"), kept(AT_STAGE_3, SHORT))
def test_a_compiled_model_trains_as_in_plain_torch(tmp_path: Path, name: str, backend: str, graphs: int) -> None:
    case, row = BY_NAME[name], Row(name, backend, 3, "nvme")
    values = train(case, config_of(case, tmp_path, 3, "nvme"), backend, row)
    assert apart(values, plain(case, None) if case.varies else eager(case.make)) < 1e-6
    # Alike blocks share a graph, and what is gathered anew is no reason to compile again.
    assert (row.graphs, row.again) == (graphs, 0)


def _on_two_ranks(rank: int, world: int, folder: str) -> list[tuple[int, float]]:
    """(graphs, difference from a run that is not compiled) for stages 1 and 3."""
    join(world)
    found = []
    for stage, backend in ((1, "eager"), (3, "aot_eager")):
        weights = []
        for compiled in (False, True):
            config = settings(folder, stage=stage, param="nvme", optimizer="nvme", accumulation=2)
            engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
            with engine:
                torch._dynamo.utils.counters.clear()
                if compiled:
                    engine.compile(backend=backend)
                for micro in range(4):
                    engine.backward(engine(**token_batch(rank, micro)))
                    engine.step()
                weights.append(engine.state_dict())
        found.append((torch._dynamo.utils.counters["stats"]["unique_graphs"], apart(*weights) if rank == 0 else 0.0))
    return found


def test_two_ranks_train_as_without_a_compiler(rank_pools: Any, tmp_path: Path) -> None:
    for found in rank_pools[2].run(_on_two_ranks, str(tmp_path)):
        # Below stage 2 gradients stay until the step, and all of the model is one graph.
        assert [graphs for graphs, _ in found] == [1, 2]
        assert max(difference for _, difference in found) < 1e-6


def _engine(folder: Path, model: nn.Module | None = None, **zero: Any) -> Engine:
    zero = {"stage3_max_live_parameters": 100_000, **zero}
    config = settings(folder, param="cpu", zero=zero, log_level="info")
    engine, *_ = infinity.initialize(model=tiny_llama() if model is None else model, config=config)
    logging.getLogger("infinity").propagate = True
    return engine


class Stages(nn.Module):
    """More stages than torch compiles one code for, each wider and of fewer positions than the last."""

    class Stage(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(width, 32), nn.Linear(32, width + 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.relu(self.inner(x[:, ::2])))

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(self.Stage(width) for width in range(1, 11))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


def doubled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator whose code all classes share that it decorates."""

    @functools.wraps(forward)
    def call(self: nn.Module, x: Tensor, factor: float = 2.0) -> Tensor:
        return factor * forward(self, x)

    return call


def kind_of_block(number: int) -> type[nn.Module]:
    """Every one a class of its own, with weights of the same shapes."""

    @doubled
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) + number

    def init(self: Any) -> None:
        nn.Module.__init__(self)
        self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    return type(f"Block{number}", (nn.Module,), {"__init__": init, "forward": forward})


def test_classes_that_share_code_are_compiled_one_by_one(tmp_path: Path) -> None:
    model = nn.Sequential(*(kind_of_block(number)() for number in range(10)), nn.Linear(32, 1))
    inputs = torch.linspace(-1, 1, 128).view(4, 32)
    expected = model(inputs).detach()
    config = settings(tmp_path, param="cpu", zero={"stage3_max_live_parameters": 5000})
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        engine.compile(backend="eager", fullgraph=True)
        found = engine(inputs)
        assert torch.equal(found, expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 10


@pytest.mark.parametrize("how", ["engine", "block", "checkpointed"])
def test_blocks_of_other_sizes_are_compiled_for_their_own(tmp_path: Path, how: str) -> None:
    shapes: list[list[Any]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        shapes.append([tuple(value.shape) if isinstance(value, Tensor) else value for value in inputs])
        return graph.forward

    model = Stages()
    top = {"activation_checkpointing": {"every": 1}} if how == "checkpointed" else {}
    config = settings(tmp_path, param="cpu", **top)
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        for part in model.stages if how == "block" else [engine.module]:
            part.compile(backend=backend, fullgraph=True)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 1024, 1)))
            engine.step()
    # One graph a stage, each with all sizes known, and none again in the second step.
    assert len(shapes) == 10
    assert all((2, 1024 >> place, place + 1) in given for place, given in enumerate(shapes)), shapes


def test_names_are_the_models_own(tmp_path: Path) -> None:
    model = tiny_llama()
    names = list(model.state_dict())
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    with _engine(tmp_path, torch.compile(model, backend="eager")) as engine:  # type: ignore[arg-type]
        assert engine.module is model
        assert list(engine.state_dict()) == names == [name for name, _ in engine.module.named_parameters()]


def test_a_closed_engine_leaves_a_model_that_torch_compiles(tmp_path: Path) -> None:
    counted: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counted.append(len(inputs))
        return graph

    model, call = tiny_llama(), token_batch(0, 0)
    with _engine(tmp_path, model) as engine:
        model.compile(backend=backend)
        with infinity.read(model):
            alone = copy.deepcopy(model)
            expected = model(**call)
        assert len(counted) == 2
        assert torch.equal(alone(**call), expected)
        assert len(counted) == 2
        weights = engine.state_dict()
    again = tiny_llama()
    for param, other in zip(model.parameters(), again.parameters(), strict=True):
        param.__class__, param.data = nn.Parameter, other.data
    model.load_state_dict(weights)
    assert torch.equal(model(**call), expected)
    # As one graph, now that nothing is gathered.
    assert len(counted) == 3
    assert not any("forward" in module.__dict__ or "compile" in module.__dict__ for module in model.modules())


def test_the_latest_call_of_compile_counts_and_what_is_switched_off_stays_off(tmp_path: Path) -> None:
    seen: list[str] = []

    def backend(name: str) -> Callable[..., Any]:
        return lambda graph, inputs: seen.append(name) or graph

    model = tiny_llama()
    model.blocks[2] = torch.compiler.disable(model.blocks[2])
    with _engine(tmp_path, model) as engine:
        engine.compile(backend=backend("first"))
        engine.compile(backend=backend("second"))
        engine.module.blocks[0].compile(backend=backend("block"))
        engine.module.norm.compile(backend=backend("norm"))
        engine.backward(engine(**token_batch(0, 0)))
    assert seen == ["block", "second", "norm"]


def test_an_engine_given_to_torch_compile_trains_eagerly_and_says_so(tmp_path: Path, caplog: Any) -> None:
    case = BY_NAME["engine.compile()"]
    with _engine(tmp_path) as engine:

        @torch.compile(backend="eager")
        def step(micro: int) -> None:
            engine.backward(engine(**batch(case, micro)))
            engine.step()

        for micro in range(5):
            step(micro)
        values = {name: infinity.state(param).master for name, param in engine.module.named_parameters()}
        assert apart(values, eager(case.make)) < 1e-6
        assert "Call engine.compile(...)" in caplog.text
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call engine\.compile\(\) instead"):
            torch.compile(engine, backend="eager", fullgraph=True)(**batch(case, 0))


def test_a_function_over_blocks_cannot_be_one_graph_and_says_why(tmp_path: Path) -> None:
    case = BY_NAME["a compiled function around blocks"]
    given = case.before(case.make(), backend="eager", fullgraph=True)
    with (
        _engine(tmp_path, given) as engine,
        pytest.raises(torch._dynamo.exc.Unsupported, match="infinity gathers and releases weights here"),
    ):
        engine(**batch(case, 0))


def test_what_is_compiled_in_parts_is_said_once(tmp_path: Path, caplog: Any) -> None:
    with _engine(tmp_path) as engine, caplog.at_level("INFO", "infinity"):
        engine.compile(backend="eager")
    (said,) = [record.getMessage() for record in caplog.records if "in parts" in record.getMessage()]
    assert "4 modules (blocks.0, blocks.1, blocks.2, ...)" in said


def test_a_compiled_backward_is_refused(tmp_path: Path) -> None:
    with _engine(tmp_path) as engine:
        loss = engine(**token_batch(0, 0))
        with (
            torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(ConfigError, match=r"compiled autograd.*engine\.compile\(\)"),
        ):
            engine.backward(loss)
        engine.backward(loss)


def test_deepspeeds_arguments_are_taken_or_refused(tmp_path: Path) -> None:
    with _engine(tmp_path) as engine:
        engine.compile(backend="eager", compile_kwargs={"dynamic": False})
        for refused in ({"schedule": [(0, [])]}, {"compiled_autograd_enabled": True}):
            with pytest.raises(ConfigError, match=f"{next(iter(refused))}=.*not supported"):
                engine.compile(backend="eager", **refused)


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}])
def test_cuda_graphs_are_refused_where_weights_move(tmp_path: Path, options: dict[str, Any]) -> None:
    with _engine(tmp_path) as engine:
        modules = CompiledModules(engine.module, engine._runtime.attached.hooks, engine.plan, accelerator=True)
        with pytest.raises(ConfigError, match=r"TinyLlama is compiled with CUDA graphs.*stage to 2"):
            modules.compile(engine.module, **options)
        modules.compile(engine.module, mode="max-autotune-no-cudagraphs")


def test_a_compiler_that_is_not_known_is_refused_and_the_model_left_as_it_was(tmp_path: Path) -> None:
    model = tiny_llama()
    model.compile(backend="eager")
    model.blocks[0]._compiled_call_impl = lambda x: x
    with pytest.raises(ConfigError, match=r"blocks\.0 was compiled in a way.*engine\.compile"):
        _engine(tmp_path, model)
    assert model._compiled_call_impl is not None
    assert model._compiled_call_impl._torchdynamo_orig_callable == model._call_impl  # type: ignore[attr-defined]


def test_a_compiler_that_is_switched_off_is_none(tmp_path: Path) -> None:
    model = tiny_llama()
    model.compile(disable=True)
    with _engine(tmp_path, model) as engine:
        engine.module.blocks[0].compile(disable=True)
        engine.backward(engine(**token_batch(0, 0)))
    assert not torch._dynamo.utils.counters["frames"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    kept(
        ["engine.compile()", "our checkpointing, blocks", "tied and frozen, blocks"], ["our checkpointing, blocks"]
    ),
)
def test_inductor_trains_as_in_plain_torch(tmp_path: Path, name: str) -> None:
    case = BY_NAME[name]
    values = train(case, config_of(case, tmp_path, 3, "nvme"), "inductor")
    assert apart(values, plain(case, "inductor")) < 1e-6
