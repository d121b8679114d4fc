"""The model as the plan sees it: parameters, and the units in which they are gathered.

`describe(module)` walks any `nn.Module` (also on the meta device) by duck typing, so that this file needs no torch; the
estimator builds the same `ModuleNode` tree from hyper-parameters. `find_units` then cuts the tree without a wrap policy:
repeated blocks first, then recursion until a unit is under its size bound. A data-dependent module (a mixture of
experts) is never cut, so that no rank waits for a gather that another rank never starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_DTYPE_NAMES = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int64": "int64", "int32": "int32",
    "int16": "int16", "int8": "int8", "uint8": "uint8", "bool": "bool", "float8_e4m3fn": "fp8_e4m3fn",
    "float8_e5m2": "fp8_e5m2",
}  # fmt: skip
_FLOATING = ("fp64", "fp32", "bf16", "fp16")
# Class names of modules whose forward chooses parameters by the data.
_DATA_DEPENDENT = re.compile(r"(moe|mixtureofexperts|experts?)(block|layer|mlp|mixer)?$", re.IGNORECASE)


def dtype_name(dtype: object) -> str:
    """The plan's name for a torch dtype (or for its string)."""
    return _DTYPE_NAMES[str(dtype).removeprefix("torch.")]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter. `group` is its optimizer parameter group, -1 for a frozen one; `tied` are its other names."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0
    tied: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def trainable(self) -> bool:
        return self.group >= 0


@dataclass(slots=True)
class ModuleNode:
    """One module of the tree: its own parameters (by attribute name) and its children."""

    path: str
    class_name: str
    params: dict[str, ParamSpec] = field(default_factory=dict)
    children: dict[str, ModuleNode] = field(default_factory=dict)

    def walk(self) -> Iterator[ModuleNode]:
        """This node and every one below it, parents first."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def all_params(self) -> dict[str, ParamSpec]:
        """Every parameter below, by canonical name: a tied one once."""
        return {spec.name: spec for node in self.walk() for spec in node.params.values()}

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.all_params().values())


@dataclass(frozen=True, slots=True)
class UnitRules:
    """What bounds a unit, in elements, and which modules are never cut."""

    unit_numel_max: int = 250_000_000
    merge_numel_max: int = 100_000
    block_classes: tuple[str, ...] = ()
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()

    def is_leaf(self, node: ModuleNode) -> bool:
        """Whether `node` must stay one unit because its forward chooses parameters by the data."""
        return (
            node.class_name in self.leaf_classes
            or node.path in self.leaf_names
            or node.path.endswith(self.leaf_suffixes or ("\0",))
            or _DATA_DEPENDENT.search(node.class_name) is not None
        )


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Parameters gathered by one collective: all of one dtype, all trainable or all frozen.

    `modules` are the module paths whose forward needs the unit: where hooks stand.
    """

    name: str
    modules: tuple[str, ...]
    dtype: str
    trainable: bool
    params: tuple[ParamSpec, ...]

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.params)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All units of a model, and `uses`: unit indices in the order in which a forward pass begins to need them.

    The order is the module tree's, as far as a tree can tell; a unit needed by several modules (tied weights) occurs
    once for each. What really happens is recorded in the first step.
    """

    units: tuple[UnitSpec, ...]
    uses: tuple[int, ...] = ()

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        return tuple(spec for unit in self.units for spec in unit.params)

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)


def describe(module: Any, *, compute_dtype: str, groups: dict[int, int] | None = None) -> ModuleNode:
    """The `ModuleNode` tree of an `nn.Module`.

    `compute_dtype` ("fp32", "bf16", "fp16") is what floating-point parameters are trained in. `groups` maps `id(param)`
    to its optimizer parameter group; without it every parameter that requires a gradient is in group 0.
    """
    names: dict[int, list[str]] = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        for attribute, param in submodule._parameters.items():
            if param is not None:
                names.setdefault(id(param), []).append(f"{path}.{attribute}" if path else attribute)
    specs: dict[int, ParamSpec] = {}

    def spec_of(param: Any) -> ParamSpec:
        if id(param) not in specs:
            first, *others = names[id(param)]
            dtype = dtype_name(param.dtype)
            group = (0 if param.requires_grad else -1) if groups is None else groups.get(id(param), -1)
            specs[id(param)] = ParamSpec(
                name=first, shape=tuple(param.shape), dtype=compute_dtype if dtype in _FLOATING else dtype,
                group=group if param.requires_grad else -1, tied=tuple(others),
            )  # fmt: skip
        return specs[id(param)]

    nodes: dict[int, ModuleNode] = {}

    def node_of(current: Any, path: str) -> ModuleNode:
        node = ModuleNode(path=path, class_name=type(current).__name__)
        nodes[id(current)] = node
        node.params = {name: spec_of(param) for name, param in current._parameters.items() if param is not None}
        for name, child in current._modules.items():
            # A module that stands in the tree twice is one module: it is hooked once, by its first path.
            if child is not None and id(child) not in nodes:
                node.children[name] = node_of(child, f"{path}.{name}" if path else name)
        return node

    return node_of(module, "")


def find_units(root: ModuleNode, rules: UnitRules) -> ModelSpec:
    """Cut the tree into units.

    1. A data-dependent module is one unit. 2. Members of a repeated sequence (two or more children of one class) are
    units while under `unit_numel_max`, else they are cut further. 3. Other modules are cut until they are under the
    bound. 4. What is left over and below `merge_numel_max` (final norms, biases of the root) joins one unit of the root.
    """
    owners: dict[str, ModuleNode] = {}
    blocks: set[str] = set()

    def own(node: ModuleNode, specs: Iterator[ParamSpec] | list[ParamSpec]) -> None:
        for spec in specs:
            owners.setdefault(spec.name, node)

    def visit(node: ModuleNode, repeated: bool) -> None:
        if not node.all_params():
            return
        if rules.is_leaf(node) or (
            node.numel <= rules.unit_numel_max
            and (repeated or node.class_name in rules.block_classes or not _has_blocks(node, rules))
        ):
            blocks.update([node.path] if repeated or rules.is_leaf(node) else [])
            own(node, list(node.all_params().values()))
            return
        own(node, list(node.params.values()))
        classes = [child.class_name for child in node.children.values() if child.all_params()]
        for child in node.children.values():
            visit(child, repeated=classes.count(child.class_name) > 1 or child.class_name in rules.block_classes)

    visit(root, repeated=False)
    return _assemble(root, owners, blocks, rules)


def _has_blocks(node: ModuleNode, rules: UnitRules) -> bool:
    """Whether a repeated sequence, a named block class or a data-dependent module stands anywhere below `node`."""
    for inner in node.walk():
        classes = [child.class_name for child in inner.children.values() if child.all_params()]
        if len(classes) != len(set(classes)):
            return True
        if any(child.class_name in rules.block_classes or rules.is_leaf(child) for child in inner.children.values()):
            return True
    return False


def _assemble(root: ModuleNode, owners: dict[str, ModuleNode], blocks: set[str], rules: UnitRules) -> ModelSpec:
    """Group parameters by (owner, trainable, dtype); merge small left-overs into the root; find who needs each unit."""
    specs = root.all_params()
    owned_numel: dict[str, int] = {}
    for name, node in owners.items():
        owned_numel[node.path] = owned_numel.get(node.path, 0) + specs[name].numel

    def home_of(node: ModuleNode) -> str:
        small = node.path not in blocks and owned_numel[node.path] <= rules.merge_numel_max
        return root.path if small else node.path

    groups: dict[tuple[str, bool, str], list[ParamSpec]] = {}
    for name, spec in specs.items():
        groups.setdefault((home_of(owners[name]), spec.trainable, spec.dtype), []).append(spec)

    order = {node.path: index for index, node in enumerate(root.walk())}
    holders: dict[str, list[str]] = {}
    for node in root.walk():
        for spec in node.params.values():
            holders.setdefault(spec.name, []).append(node.path)

    units = []
    for (path, trainable, dtype), members in sorted(groups.items(), key=lambda item: (order[item[0][0]], not item[0][1])):
        # Parameters of one optimizer group lie next to each other, so that the optimizer sees few long pieces.
        members = sorted(members, key=lambda spec: spec.group)
        outside = [
            holder
            for spec in members
            for holder in holders[spec.name]
            if path != root.path and holder != path and not holder.startswith(path + ".")
        ]
        suffix = "" if trainable else " (frozen)"
        units.append(
            UnitSpec(
                name=(path or "(root)") + suffix, modules=(path, *dict.fromkeys(outside)), dtype=dtype,
                trainable=trainable, params=tuple(members),
            )  # fmt: skip
        )
    begins = sorted((order[module], index) for index, unit in enumerate(units) for module in unit.modules)
    return ModelSpec(units=tuple(units), uses=tuple(index for _, index in begins))
