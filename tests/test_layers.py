"""The layer table of the architecture: who may import whom, held by a walk over the syntax trees.

Each rule is a function from a tree of sources to violations, so that a planted violation shows that the rule bites.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.support.syntax import parsed, statements

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("infinity", "estimators", "examples")

# The packages from the lowest up; those of a line do not know each other. A module may import its own package and all
# that lie below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("infinity.errors",),
    ("infinity.log", "infinity.base"),
    ("infinity.config",),
    ("infinity.plan",),
    ("infinity.ops", "infinity.distributed"),
    ("infinity.memory",),
    ("infinity.optim",),
    ("infinity.step",),
    ("infinity.zero",),
    ("infinity.parallel", "infinity.tiling", "infinity.checkpoint", "infinity.observability"),
    ("infinity.engine",),
    ("infinity.cli", "estimators"),
    ("infinity.integrations",),
    ("infinity.deepspeed",),
    ("infinity.__main__",),
)
# What meets nowhere although its place would allow it, and why.
APART = {
    # ZeRO moves gradients to the step, and never sees what the step makes of them.
    ("infinity.zero", "infinity.optim"),
    # A forecast starts no engine.
    *(("estimators", f"infinity.{name}") for name in (
        "ops", "distributed", "memory", "optim", "step", "zero", "parallel", "tiling", "checkpoint", "observability",
        "engine",
    )),
}  # fmt: skip
# Its names are loaded when they are first used; programs see no other.
FRONT = "infinity"
TORCH_FREE = ("infinity.base", "infinity.plan", "infinity.config", "infinity.errors", "estimators")
CUDA_NAMED_IN = ("infinity.memory.tiers.device", "infinity.ops")
ENVIRONMENT_READ_IN = (
    "infinity.config.load", "infinity.distributed.groups", "infinity.ops.build",
    # Passes it on to what it starts.
    "infinity.cli.run",
)  # fmt: skip
# Back ends are opened and used by the store's package, files on drives by it, checkpoints and what measures drives.
MOVERS = {
    # What a killed run has left is read without a store.
    "infinity.memory.tiers.nvme": ("infinity.memory", "infinity.checkpoint.records"),
    "infinity.memory.tiers.registry": ("infinity.memory",),
    "infinity.memory.tiers.striping": ("infinity.memory",),
    "infinity.ops.aio": ("infinity.memory", "infinity.checkpoint", "infinity.cli", "infinity.ops"),
}
# Keys are resolved by `config`; where a device is left open the plan decides it, from the budgets, and liger's kernels
# where the model is known. `ops.aio` has an "auto" of its own, the back end that works.
AUTO_READ_IN = ("infinity.config", "infinity.plan.inputs", "infinity.engine.liger", "infinity.ops.aio")
DISTRIBUTED_FREE = ("infinity.memory",)
# A step steps partitions, and knows no module of a model.
MODULE_FREE = ("infinity.step",)


# Packages whose `__getattr__` may load public names from the top when they are first used.
LAZY = {
    "infinity": "infinity.engine.initialize", "infinity.zero": "infinity.engine.initialize",
    "infinity.engine": "infinity.engine.engine",
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is a module, or `module.name` where a name is taken from a module."""

    module: str
    target: str
    line: int
    relative: bool
    nested: bool
    lazy: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: imports {self.target}"


@dataclass(frozen=True)
class Sources:
    """Parsed modules by dotted name."""

    trees: dict[str, ast.Module]

    @classmethod
    def read(cls, root: Path) -> Sources:
        files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))]
        return cls({_dotted(file.relative_to(root)): parsed(file) for file in files})

    @classmethod
    def of(cls, **texts: str) -> Sources:
        """From texts: `infinity__plan__x="import torch"`."""
        return cls({name.replace("__", "."): ast.parse(text) for name, text in texts.items()})

    @cached_property
    def nodes(self) -> dict[str, list[ast.AST]]:
        """Every node of each tree, found once for all rules."""
        return {module: [*ast.walk(tree)] for module, tree in self.trees.items()}

    @cached_property
    def imports(self) -> list[Import]:
        return [*self._imports()]

    def _imports(self) -> Iterator[Import]:
        for module, tree in self.trees.items():
            functions = [node for node in statements(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            nested = {id(inner): outer.name for outer in functions for inner in statements(outer)}
            for node in statements(tree):
                if isinstance(node, ast.Import):
                    targets, relative = [alias.name for alias in node.names], False
                elif isinstance(node, ast.ImportFrom):
                    targets = [f"{node.module}.{alias.name}" for alias in node.names]
                    relative = node.level > 0
                else:
                    continue
                for target in targets:
                    lazy = nested.get(id(node)) == "__getattr__" and _within(target, (LAZY.get(module, "-"),))
                    yield Import(module, target, node.lineno, relative, id(node) in nested, lazy)


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package(module: str) -> str:
    top, *rest = module.split(".")
    return f"{top}.{rest[0]}" if top == FRONT and rest else top


LEVELS = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def _within(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def layer_violations(sources: Sources) -> list[str]:
    """Imports that do not go down, and packages that the list does not have."""
    found = []
    for item in sources.imports:
        importer, target = _package(item.module), _package(item.target)
        if target not in LEVELS and target.startswith(FRONT):
            target = FRONT
        if item.target.split(".")[0] not in FOLDERS:
            if importer not in LEVELS and importer not in (FRONT, "examples"):
                found.append(f"{item.module}: {importer} is in no layer")
        elif importer == "examples":
            # `import infinity` and `from infinity import Name`, never a submodule.
            if target != FRONT or (item.target in sources.trees and item.target != FRONT):
                found.append(str(item))
        elif importer not in LEVELS and importer != FRONT:
            found.append(f"{item.module}: {importer} is in no layer")
        elif not item.lazy and importer not in (target, FRONT) and (
            LEVELS.get(target, len(LEVELS)) >= LEVELS[importer] or (importer, target) in APART
        ):
            found.append(str(item))
    return found


def relative_violations(sources: Sources) -> list[str]:
    """Imports that are not absolute."""
    return [str(item) for item in sources.imports if item.relative]


def nested_violations(sources: Sources) -> list[str]:
    """Imports inside functions, but for lazy names of packages and optional builds in ops."""
    return [
        str(item)
        for item in sources.imports
        if item.nested and not item.lazy and not _within(item.module, ("infinity.ops",))
    ]


def cycle_violations(sources: Sources) -> list[str]:
    """Cycles among modules, each as a path that ends where it began. Names that are loaded on use do not count."""
    edges: dict[str, set[str]] = {module: set() for module in sources.trees}
    for item in sources.imports:
        if item.lazy or item.module == "infinity":
            continue
        parent = item.target.rpartition(".")[0]
        reached = item.target if item.target in sources.trees else parent
        if reached in sources.trees and reached != "infinity":
            edges[item.module].add(reached)
    done: set[str] = set()
    found = []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for following in sorted(edges[module]):
                visit(following, [*path, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return found


def torch_violations(sources: Sources) -> list[str]:
    """torch where it must not be, torch.distributed in memory, and modules in a step."""
    found = [
        str(item)
        for item in sources.imports
        if _within(item.module, TORCH_FREE) and _within(item.target, ("torch", "transformers"))
    ]
    found += [
        str(item)
        for item in sources.imports
        if (_within(item.module, DISTRIBUTED_FREE) and _within(item.target, ("torch.distributed",)))
        or (_within(item.module, MODULE_FREE) and _within(item.target, ("torch.nn",)))
    ]
    return found


def _attributes(sources: Sources, allowed: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    """Uses of dotted names such as `torch.cuda`, as an attribute or by an import, outside the allowed modules."""
    found, last = [], {name.rpartition(".")[2] for name in forbidden}
    for module, nodes in sources.nodes.items():
        if _within(module, allowed):
            continue
        named = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr in last)
        uses = [node for node in named if ast.unparse(node) in forbidden]
        found += [f"{module}:{node.lineno}: names {ast.unparse(node)}" for node in uses]
    found += [
        str(item)
        for item in sources.imports
        if not _within(item.module, allowed) and _within(item.target, forbidden)
    ]
    return found


def cuda_violations(sources: Sources) -> list[str]:
    """torch.cuda named where a device is none of the module's business."""
    return _attributes(sources, CUDA_NAMED_IN, ("torch.cuda",))


def environment_violations(sources: Sources) -> list[str]:
    """Environment variables read outside the three modules that may."""
    return _attributes(sources, ENVIRONMENT_READ_IN, ("os.environ", "os.environb", "os.getenv", "os.putenv"))


@dataclass(frozen=True)
class Kept:
    """An attribute of a class that holds a parameter of one of its methods, or is a field of its constructor."""

    module: str
    owner: str
    name: str
    annotation: str
    # Whether the constructor is given it.
    made: bool

    def __str__(self) -> str:
        return f"{self.module}: {self.owner}.{self.name}: {self.annotation}"


def _kept(sources: Sources) -> Iterator[Kept]:
    for module, tree in sources.trees.items():
        for owner in (node for node in statements(tree) if isinstance(node, ast.ClassDef)):
            for node in owner.body:
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in (words := ast.unparse(node.annotation)):
                    yield Kept(module, owner.name, ast.unparse(node.target), words, True)
                elif isinstance(node, ast.FunctionDef):
                    every = (*node.args.args, *node.args.kwonlyargs)
                    given = {each.arg: ast.unparse(each.annotation) for each in every if each.annotation}
                    made = node.name == "__init__"
                    yield from (Kept(module, owner.name, *pair, made) for pair in _held(node, given))


def _held(method: ast.FunctionDef, given: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The attributes that a method sets to one of its parameters, and what that is."""
    for node in statements(method):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=True) if several else [(target, node.value)]
            for place, value in pairs:
                if isinstance(value, ast.BoolOp):
                    value = value.values[0]
                mine = isinstance(place, ast.Attribute) and ast.unparse(place.value) == "self"
                if mine and isinstance(value, ast.Name) and value.id in given:
                    yield place.attr, given[value.id]


# Classes that are given functions by another package, and why they may keep them.
GIVEN = {
    # The user's own.
    "infinity.parallel.layers.FunctionLayer", "infinity.parallel.layers.PipelineModule",
    "infinity.integrations.deepspeed.timers.ThroughputTimer",
}  # fmt: skip


def callback_violations(sources: Sources) -> list[str]:
    """Functions that a class keeps although another package has given them: calls that climb. So are objects that only
    higher packages can have made, whose Protocol the class names.
    """
    makers: dict[str, set[str]] = {}
    for module, nodes in sources.nodes.items():
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                makers.setdefault(called, set()).add(_package(module))
    found, above = [], _only_above(sources)
    for kept in _kept(sources):
        given = not kept.made or makers.get(kept.owner, set()) - {_package(kept.module)}
        if "Callable[" in kept.annotation and given and f"{kept.module}.{kept.owner}" not in GIVEN:
            found.append(str(kept))
        found += [f"{kept}, which only higher packages have" for name in above if name in kept.annotation.split(" | ")]
    return found


def _only_above(sources: Sources) -> list[str]:
    """Protocols that no class of their own package or of a lower one has all methods of."""
    classes = [
        (_package(module), node)
        for module, tree in sources.trees.items() for node in statements(tree) if isinstance(node, ast.ClassDef)
    ]  # fmt: skip
    methods = {
        id(node): {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}
        for _, node in classes
    }
    is_protocol = {id(node): any("Protocol" in ast.unparse(base) for base in node.bases) for _, node in classes}
    return [
        node.name
        for package, node in classes
        if is_protocol[id(node)] and methods[id(node)] and not any(
            methods[id(node)] <= methods[id(other)] and LEVELS.get(where, 0) <= LEVELS.get(package, 0)
            for where, other in classes if not is_protocol[id(other)]
        )
    ]  # fmt: skip


def mover_violations(sources: Sources) -> list[str]:
    """Whatever else moves bytes between tiers than the store's package."""
    return [
        str(item)
        for item in sources.imports
        for back_end, movers in MOVERS.items()
        if _within(item.target, (back_end,)) and not _within(item.module, movers)
    ]


FORWARDS = "infinity.zero.forwards"


def forward_violations(sources: Sources) -> list[str]:
    """Assignments to a module's `forward` outside the one file that makes them."""
    found = []
    for module, nodes in sources.nodes.items():
        for node in nodes if module != FORWARDS and module.startswith("infinity") else ():
            store = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            if (isinstance(node, ast.Attribute) and node.attr == "forward" and store) or (
                isinstance(node, ast.Subscript) and store and ast.unparse(node.slice) in ("'forward'",)
            ):
                found.append(f"{module}:{node.lineno}: assigns forward")
    return found


# The file that alone changes it.
STATES = {"State": "infinity.memory.partition", "StepState": "infinity.step.optimizer_step"}


def state_violations(sources: Sources) -> list[str]:
    """Changes of a partition's or a step's state outside the class that it belongs to: one method there makes them,
    beside the constructor.
    """
    found = []
    for module, nodes in sources.nodes.items():
        for node in (each for each in nodes if isinstance(each, ast.Assign)):
            if any(isinstance(target, ast.Attribute) and target.attr == "state" for target in node.targets):
                named = {ast.unparse(part.value) for part in ast.walk(node.value) if isinstance(part, ast.Attribute)}
                found += [
                    f"{module}:{node.lineno}: changes a {name}" for name in named & STATES.keys()
                    if module != STATES[name]
                ]  # fmt: skip
    for name, module in STATES.items():
        changes = [
            node for node in sources.nodes.get(module, [])
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == "self.state" for target in node.targets)
        ]  # fmt: skip
        if len(changes) > 2:
            found.append(f"{module}: {len(changes)} places change a {name}")
    return found


def auto_violations(sources: Sources) -> list[str]:
    """Comparisons with "auto" outside the modules that say what it comes to."""
    return [
        f"{module}:{node.lineno}: compares with 'auto'"
        for module, nodes in sources.nodes.items()
        if module.startswith("infinity") and not _within(module, AUTO_READ_IN)
        for node in nodes
        if isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Constant) and part.value == "auto" for part in (node.left, *node.comparators))
    ]


RULES: tuple[Callable[[Sources], list[str]], ...] = (
    layer_violations, relative_violations, nested_violations, cycle_violations, torch_violations, cuda_violations,
    environment_violations, callback_violations, mover_violations, forward_violations,
    state_violations, auto_violations,
)  # fmt: skip


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources.read(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_sources_obey(rule, sources):
    assert len(sources.trees) > 20
    assert rule(sources) == []


PLANTED = {
    "config imports plan": (layer_violations, {"infinity__config__x": "from infinity.plan import types"}),
    "zero sees the rules": (layer_violations, {"infinity__zero__x": "from infinity.optim.lr import Schedule"}),
    "siblings meet": (layer_violations, {"infinity__ops__x": "from infinity.distributed.links import Links"}),
    "ops imports memory": (layer_violations, {"infinity__ops__x": "import infinity.memory.store"}),
    "plan imports the engine": (layer_violations, {"infinity__plan__x": "import infinity.engine"}),
    "a type-checking import counts": (
        layer_violations,
        {
            "infinity__distributed__x": (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import infinity.memory.store"
            )
        },
    ),
    "zero loads another name from the top": (
        layer_violations,
        {"infinity__zero": "def __getattr__(name):\n    from infinity.engine import engine"},
    ),
    "lazy, but not in a package": (
        nested_violations,
        {"infinity__zero__x": "def __getattr__(name):\n    from infinity.engine import initialize"},
    ),
    "through the package": (layer_violations, {"infinity__plan__x": "from infinity import engine"}),
    "an unknown package": (layer_violations, {"infinity__magic__x": "import os"}),
    "a module at the top": (layer_violations, {"infinity__magic": "import os"}),
    "the engine imports estimators": (layer_violations, {"infinity__engine__x": "import estimators.cli"}),
    "the plan imports the simulator": (
        layer_violations,
        {"infinity__plan__x": "from estimators.phases import Phase"},
    ),
    "zero imports tiling": (layer_violations, {"infinity__zero__x": "import infinity.tiling.losses"}),
    "the engine imports integrations": (layer_violations, {"infinity__engine__x": "import infinity.integrations"}),
    "memory draws a timeline": (
        layer_violations,
        {"infinity__memory__x": "from infinity.observability.timeline import Timeline"},
    ),
    "a trace looks up": (
        layer_violations,
        {"infinity__base__trace": "from infinity.observability import timeline"},
    ),
    "estimators import memory": (layer_violations, {"estimators__x": "from infinity.memory.ledger import Ledger"}),
    "an example looks inside": (layer_violations, {"examples__x": "from infinity.zero.unit import Unit"}),
    "an example imports a package": (layer_violations, {"examples__x": "from infinity import plan"}),
    "relative": (relative_violations, {"infinity__plan__x": "from . import types"}),
    "relative, two up": (relative_violations, {"infinity__plan__x": "from ..config import schema"}),
    "in a function": (nested_violations, {"infinity__zero__x": "def f():\n    import json"}),
    "in a method": (nested_violations, {"infinity__engine__x": "class A:\n    def f(self):\n        import os"}),
    "in an example": (nested_violations, {"examples__x": "def f():\n    import json"}),
    "a cycle of two": (
        cycle_violations,
        {"infinity__plan__a": "import infinity.plan.b", "infinity__plan__b": "from infinity.plan.a import x"},
    ),
    "a cycle through a package": (
        cycle_violations,
        {"infinity__plan": "from infinity.plan.a import x", "infinity__plan__a": "from infinity.plan import y"},
    ),
    "a cycle of three": (
        cycle_violations,
        {
            "infinity__zero__a": "from infinity.zero import b", "infinity__zero__b": "import infinity.zero.c",
            "infinity__zero__c": "import infinity.zero.a",
        },
    ),
    "torch in plan": (torch_violations, {"infinity__plan__x": "from torch import nn"}),
    "torch at the base": (torch_violations, {"infinity__base__x": "import torch"}),
    "torch in config": (torch_violations, {"infinity__config__x": "import torch.nn.functional as F"}),
    "torch in estimators": (torch_violations, {"estimators__x": "import torch"}),
    "memory speaks to other ranks": (torch_violations, {"infinity__memory__x": "import torch.distributed as dist"}),
    "a step knows a module": (torch_violations, {"infinity__step__x": "from torch import nn"}),
    "a function from above": (
        callback_violations,
        {
            "infinity__memory__x": "class A:\n    def __init__(self, do: Callable[[], int]):\n        self._do = do",
            "infinity__zero__x": "from infinity.memory.x import A\nA(lambda: 1)",
        },
    ),
    "a function from above in a field": (
        callback_violations,
        {"infinity__memory__x": "class A:\n    do: Callable[[], int]", "infinity__engine__x": "x.A(do)"},
    ),
    "a function that comes later": (
        callback_violations,
        {"infinity__zero__x": "class A:\n    def ask(self, do: Callable[[], int]):\n        self._do = do"},
    ),
    "an object from above": (
        callback_violations,
        {
            "infinity__memory__x": (
                "class P(Protocol):\n    def do(self): ...\n"
                "class A:\n    def __init__(self, it: P | None):\n        self._it = it"
            ),
            "infinity__zero__x": "class Q:\n    def do(self): ...",
        },
    ),
    "zero opens a drive": (mover_violations, {"infinity__zero__x": "from infinity.memory.tiers.nvme import NvmeTier"}),
    "the engine has a queue": (mover_violations, {"infinity__engine__x": "from infinity.ops.aio import Queue"}),
    "a second place for forward": (forward_violations, {"infinity__engine__x": "module.forward = f"}),
    "forward by its name": (forward_violations, {"infinity__tiling__x": "module.__dict__['forward'] = f"}),
    "forward is taken out": (forward_violations, {"infinity__parallel__x": "del module.forward"}),
    "a state from outside": (
        state_violations,
        {"infinity__memory__x": "class A:\n    def f(self):\n        part.state = State.ABSENT"},
    ),
    "a third place for a state": (
        state_violations,
        {"infinity__step__optimizer_step": "class A:\n    def f(self):\n" + "        self.state = to\n" * 3},
    ),
    "auto in memory": (auto_violations, {"infinity__memory__x": "if device == 'auto': pass"}),
    "cuda by attribute": (cuda_violations, {"infinity__zero__x": "import torch\ntorch.cuda.synchronize()"}),
    "cuda by import": (cuda_violations, {"infinity__memory__store": "from torch.cuda import Stream"}),
    "cuda by name": (cuda_violations, {"infinity__engine__x": "from torch import cuda"}),
    "environ": (environment_violations, {"infinity__engine__x": "import os\nos.environ['RANK']"}),
    "getenv": (environment_violations, {"infinity__plan__x": "import os\nos.getenv('RANK')"}),
    "environ by import": (environment_violations, {"infinity__log": "from os import environ"}),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_found(case):
    rule, texts = PLANTED[case]
    assert rule(Sources.of(**texts))


CLEAN = {
    "itself": {"infinity__plan__a": "from infinity.plan.b import x", "infinity__plan__b": "import math"},
    "downwards": {"infinity__zero__a": "from infinity.memory.store import TieredStore\nimport torch"},
    "what is traced": {"infinity__memory__x": "from infinity.base import trace\ntrace.span"},
    "cuda where it belongs": {"infinity__memory__tiers__device": "import torch\ntorch.cuda.synchronize()"},
    "environment where it belongs": {"infinity__distributed__groups": "import os\nos.environ['RANK']"},
    "lazy public names": {"infinity__zero": "def __getattr__(name):\n    from infinity.engine import initialize"},
    "a function of one's own package": {
        "infinity__memory__x": "class A:\n    def __init__(self, do: Callable[[], int]):\n        self._do = do",
        "infinity__memory__y": "from infinity.memory.x import A\nA(lambda: 1)",
    },
    "an optional build": {"infinity__ops__build": "def f():\n    import ninja"},
    "public names": {"examples__a": "import infinity\nfrom infinity import Init"},
}


@pytest.mark.parametrize("case", CLEAN)
def test_what_is_allowed_is_not_reported(case):
    assert [found for rule in RULES for found in rule(Sources.of(**CLEAN[case]))] == []


def test_a_violation_planted_in_a_copy_of_the_sources_is_found(sources):
    text = (ROOT / "infinity" / "plan" / "layout.py").read_text()
    planted = ast.parse(text + "\nfrom infinity.plan.plan import Plan\nimport torch\n")
    broken = Sources({**sources.trees, "infinity.plan.layout": planted})
    assert any("infinity.plan.layout" in cycle for cycle in cycle_violations(broken))
    assert torch_violations(broken)
    assert layer_violations(broken) == layer_violations(sources)


def test_what_must_be_free_of_torch_does_not_load_it_by_a_detour(sources):
    modules = [name for name in sources.trees if _within(name, TORCH_FREE) and not name.endswith("__main__")]
    assert all(any(_within(name, (package,)) for name in modules) for package in TORCH_FREE)
    script = "import sys\nassert not {'torch', 'transformers'} & set(sys.modules)\n"
    script += "".join(f"import {name}\nassert 'torch' not in sys.modules, '{name}'\n" for name in modules)
    script += "assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=60)
