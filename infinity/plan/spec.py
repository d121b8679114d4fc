"""The model as the plan sees it: parameters, and the units in which they are gathered.

`module_tree(module)` walks any `nn.Module` (also on the meta device) by duck typing, so that this file needs no torch;
the estimator builds the same `ModuleNode` tree from hyper-parameters. `find_units` then cuts the tree without a wrap
policy: repeated blocks first, then recursion until a unit is under its size bound. A data-dependent module (a mixture
of experts) is never cut, so that no rank waits for a gather that another rank never starts. A weight that alone is
beyond what may be gathered becomes several units, its tiles: see `infinity.plan.spec`.

Tiles: a weight too large to gather is cut along its rows, and used a tile at a time.

Rows are the first dimension, so that a tile is one range of the tensor in memory order. Each tile is a unit of its own:
gathered, used, reduced and stored as any other. Only weights that linear layers and embeddings use are cut, because
those use each row on its own: outputs of a linear layer come one behind the other, and a lookup needs the rows that it
names. So does a batched product of a stack of matrices, of which a row is a matrix: Llama-4's experts, every one of
which is used in each forward.

Experts: where the packed experts of a mixture are too large to gather together, each few of them are a unit, which has
their part of every packed weight. Data decides which of these units a forward uses: see `infinity.zero.experts`.

Which modules are computed again in backward: the blocks that a model repeats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infinity.config.resolve import ResolvedConfig
from infinity.errors import ConfigError
from infinity.plan.prefetch import UnitAccess
from infinity.plan.request import RuleSpec
from infinity.plan.shards import Replica, Shard
from infinity.plan.types import FLOATING_DTYPES, TORCH_NAMES, align_up

# Of a loss in tiles, tokens of a tile and words of a block of the vocabulary: 16 MiB of logits in fp32.
TILE_TOKENS = 1024
TILE_WORDS = 4096
# Of modules with packed experts: the weights of three dimensions of which the first counts experts.
_PACKED = ("gate_up_proj", "up_proj", "down_proj")
# Fewer elements are not worth a transfer: experts of less are cut several at a time.
_EXPERTS_NUMEL_MIN = 1 << 19
# A model has about so many units of experts at most, where there is room for several in one: each takes time to plan.
_EXPERT_UNITS_MAX = 1 << 12
# Class names of modules whose attribute `weight` may be cut, and of those whose stacks of matrices may.
_CUT = ("Linear", "Embedding")
_MULTIPLIES_STACKS = ("Llama4TextExperts",)


def cut_rows(shape: tuple[int, ...], numel_max: int, block: int = 1) -> Iterator[tuple[int, int]]:
    """(first element, elements) of tiles of whole rows: near-equal ones, each of at most `numel_max` elements or of one
    row, and more where only that makes them begin with a block of elements.
    """
    rows, width = shape[0], math.prod(shape[1:])
    count = -(-rows // max(numel_max // max(width, 1), 1))
    each = align_up(-(-rows // count), block // math.gcd(width, block))
    for row in range(0, rows, each):
        yield row * width, min(each, rows - row) * width


_DTYPE_NAMES = {theirs: name for name, theirs in TORCH_NAMES.items()}
# Class names of modules whose forward chooses parameters by the data.
_DATA_DEPENDENT = re.compile(r"(moe|mixtureofexperts|experts?)(block|layer|mlp|mixer)?$", re.IGNORECASE)
# Class names of what such a module chooses from: several of one class below a module make that module data-dependent.
_EXPERT = re.compile(r"expert(block|layer|mlp|mixer)?$", re.IGNORECASE)
# Containers have no forward: a hook on one would never run, so no unit is hooked to them.
_CONTAINERS = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
# What a unit's name says of it on ranks of a tensor axis.
_REPLICATED = {Replica.NONE: "", Replica.SAME: " (replicated)", Replica.PARTIAL: " (replicated, summed)"}
# A weight is cut into more tiles than this only where these are larger: less saves no memory that counts.
_TILES_MAX = 256
_TILE_NUMEL_TINY = 1 << 16
# Attribute of a module that the program wants as one unit: see `infinity.zero.parameter`.
LEAF_MARK = "_infinity_leaf"


def dtype_name(dtype: object) -> str:
    """The plan's name for a torch dtype (or for its string); ConfigError for one that a plan cannot hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPE_NAMES:
        raise ConfigError(f"parameters of dtype {name} are not supported; there are {', '.join(_DTYPE_NAMES)}")
    return _DTYPE_NAMES[name]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter. `group` is its optimizer parameter group, -1 for a frozen one; `tied` are its other names.

    Of a tile, `start` is its first element in the parameter and `tile_numel` its size; `shape` is the parameter's.
    Where a tensor axis cuts the parameter by `shard`, all of these are the shard's. `replica`: what is not cut. `rule`:
    the number of the update rule that steps it. `split`: the rows of each matrix that it is stepped as; one, if empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0
    tied: tuple[str, ...] = ()
    start: int = 0
    tile_numel: int | None = None
    shard: Shard | None = None
    replica: Replica = Replica.NONE
    rule: int = 0
    split: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape) if self.tile_numel is None else self.tile_numel

    @property
    def trainable(self) -> bool:
        return self.group >= 0

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The parameter's shape before a tensor axis cuts it."""
        return self.shape if self.shard is None else self.shard.whole_shape(self.shape)


@dataclass(slots=True)
class ModuleNode:
    """One module of the tree: its own parameters (by attribute name) and its children.

    `shared`: it stands in the model more than once; in the tree it has its first path only. `leaf`: the program wants
    it as one unit. `packed`: it has the experts of a mixture, and its forward is a function of transformers' interface
    for such.
    """

    path: str
    class_name: str
    params: dict[str, ParamSpec] = field(default_factory=dict)
    children: dict[str, ModuleNode] = field(default_factory=dict)
    shared: bool = False
    leaf: bool = False
    # Whether its forward is a function of transformers' experts interface.
    packed: bool = False
    # Whether its forward multiplies by all matrices of each weight that is a stack of such.
    stacked: bool = False

    def mark_leaf(self) -> None:
        """The program wants the module as one unit."""
        self.leaf = True

    def share(self) -> None:
        """The module stands in the model once more."""
        self.shared = True

    def walk(self) -> Iterator[ModuleNode]:
        """This node and every one below it, parents first."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending += reversed(node.children.values())

    @property
    def is_lookup(self) -> bool:
        """Whether its forward takes rows of its only weight: its backward does not need it."""
        return self.class_name == "Embedding" and list(self.params) == ["weight"] and not self.children

    @property
    def is_container(self) -> bool:
        """Whether it only holds others and has no forward of its own."""
        return self.class_name in _CONTAINERS

    def called(self) -> Iterator[ModuleNode]:
        """The nearest nodes below that have a forward: children, through containers."""
        for child in self.children.values():
            if child.is_container:
                yield from child.called()
            else:
                yield child

    def all_params(self) -> dict[str, ParamSpec]:
        """Every parameter below, by canonical name: a tied one once."""
        return {spec.name: spec for node in self.walk() for spec in node.params.values()}

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.all_params().values())

    def frozen(self) -> ModuleNode:
        """The same tree without a parameter to train."""
        return self.with_params(lambda spec: replace(spec, group=-1))

    def with_params(self, change: Callable[[ParamSpec], ParamSpec]) -> ModuleNode:
        """The same tree with other parameters."""
        params = {name: change(spec) for name, spec in self.params.items()}
        children = {name: child.with_params(change) for name, child in self.children.items()}
        return replace(self, params=params, children=children)


@dataclass(frozen=True, slots=True)
class UnitRules:
    """What bounds a unit, in elements, and which modules are never cut."""

    unit_numel_max: int = 250_000_000
    merge_numel_max: int = 100_000
    block_classes: tuple[str, ...] = ()
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()
    # Weights of more elements than the first are cut into tiles of at most the second.
    whole_numel_max: int = 2**63 - 1
    tile_numel_max: int = 2**63 - 1
    # The optimizer's rules: a unit is stepped by one of them.
    updates: tuple[RuleSpec, ...] = (RuleSpec(),)

    def is_leaf(self, node: ModuleNode) -> bool:
        """Whether `node` must stay one unit because its forward chooses parameters by the data."""
        if node.is_container:
            # The module that calls its members is the leaf.
            return False
        lists = [child for child in node.children.values() if child.is_container]
        experts = [child.class_name for child in node.called() if _EXPERT.search(child.class_name)]
        named = any(
            each.leaf
            or each.class_name in self.leaf_classes
            or each.path in self.leaf_names
            or each.path.endswith(self.leaf_suffixes or ("\0",))
            for each in (node, *lists)
        )
        return (
            named
            or _DATA_DEPENDENT.search(node.class_name) is not None
            or len(experts) != len(set(experts))
        )


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Parameters gathered by one collective: all of one dtype, all trainable or all frozen, all stepped by one update
    rule, all cut by the tensor axis or all replicated alike.

    `modules` are the module paths whose forward needs the unit: where hooks stand.
    """

    name: str
    modules: tuple[str, ...]
    dtype: str
    trainable: bool
    params: tuple[ParamSpec, ...]
    replica: Replica = Replica.NONE
    rule: int = 0
    # Whether data decides if a forward uses it: some experts of a mixture.
    routed: bool = False

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.params)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All units of a model, and `uses`: unit indices in the order in which a forward pass begins to need them.

    The order is the module tree's, as far as a tree can tell; a unit needed by several modules (tied weights) occurs
    once for each. What really happens is recorded in the first step. `lookups`: positions in `uses` of modules whose
    backward does not need the weights.
    """

    units: tuple[UnitSpec, ...]
    uses: tuple[int, ...] = ()
    lookups: frozenset[int] = frozenset()
    # The paths of the modules in which the uses begin; of a rank's part of a pipeline none.
    points: tuple[str, ...] = ()
    # The uses of a whole step of a pipeline, in which micro-batches overlap: see `infinity.plan.stages`.
    step: tuple[UnitAccess, ...] | None = None

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        return tuple(spec for unit in self.units for spec in unit.params)

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)


def module_tree(module: Any, *, compute_dtype: str, groups: dict[int, int] | None = None) -> ModuleNode:
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
                name=first, shape=tuple(param.shape), dtype=compute_dtype if dtype in FLOATING_DTYPES else dtype,
                group=group if param.requires_grad else -1, tied=tuple(others),
            )  # fmt: skip
        return specs[id(param)]

    nodes: dict[int, ModuleNode] = {}

    def node_of(current: Any, path: str, adapted: str = "") -> ModuleNode:
        params = {name: spec_of(param) for name, param in current._parameters.items() if param is not None}
        class_name = type(current).__name__
        packed = is_packed(current) and adapted != "whole"
        stacked = class_name in _MULTIPLIES_STACKS and not adapted
        node = nodes[id(current)] = ModuleNode(path, class_name, params, packed=packed, stacked=stacked)
        # Adapters of a parameter compute with all of it, where peft does not give their factors.
        wraps = hasattr(current, "parameter_name") and "base_layer" in current._modules
        if wraps and adapted != "whole":
            adapted = "by factors" if hasattr(current, "get_delta_factors") else "whole"
        if current.__dict__.get(LEAF_MARK, False):
            node.mark_leaf()
        for name, child in current._modules.items():
            if child is None:
                continue
            if id(child) in nodes:
                # A module that stands in the tree twice is one module: it is hooked once, by its first path.
                nodes[id(child)].share()
            else:
                node.children[name] = node_of(child, f"{path}.{name}" if path else name, adapted)
        return node

    return node_of(module, "")


def is_packed(module: Any) -> bool:
    """Whether a module's forward is a function of transformers' experts interface, on packed weights that it has."""
    dispatched = hasattr(getattr(type(module).forward, "__wrapped__", None), "__code__")
    named = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "num_experts")
    return dispatched and named and "down_proj" in module._parameters


def hidden_matrices(root: ModuleNode, heads: Collection[str] = (), *, stacks: bool = True) -> frozenset[str]:
    """Names of the weights that Muon is for, unless the program says which: trained ones of two dimensions that belong
    to no embedding and to no output head, and the packed weights of experts, which are stacks of such. heads: names of
    the head's parameters, where a model says what that is; a weight of an embedding's shape that stands in no list of
    modules is taken for one, too. stacks: False where a tensor axis may cut these.
    """
    found: set[str] = set()
    others: set[str] = set(heads)
    nodes = [*root.walk()]
    tables = {spec.whole_shape for node in nodes if _is_table(node) for spec in node.params.values()}
    for node in nodes:
        listed = any(part.isdigit() for part in node.path.split("."))
        for attribute, spec in node.params.items():
            path = f"{node.path}.{attribute}".lower()
            apart = _is_table(node) or "embed" in path or "lm_head" in path
            head = spec.whole_shape in tables and not listed
            stacked = stacks and node.packed and attribute in _PACKED and len(spec.shape) == 3
            fits = len(spec.shape) == 2 or stacked
            (others if apart or head or not fits or not spec.trainable else found).add(spec.name)
    return frozenset(found - others)


def _is_table(node: ModuleNode) -> bool:
    return node.class_name.startswith("Embedding")


def find_units(root: ModuleNode, rules: UnitRules) -> ModelSpec:
    """Cut the tree into units.

    1. A data-dependent module is one unit. 2. Members of a repeated sequence (two or more children of one class) are
    units while under `unit_numel_max`, else they are cut further. 3. Other modules are cut until they are under the
    bound. 4. What is left over and below `merge_numel_max` (final norms, biases of the root) joins one unit of the
    root, as long as that stays under the bound. A list of modules has no forward: its members are cut as its owner's.
    Weights in tiles are left out of all that, and each tile is a unit.
    """
    owners: dict[str, ModuleNode] = {}
    blocks: set[str] = set()
    experts = _experts(root, rules)
    packed = {spec.name for specs, _ in experts.values() for spec in specs}
    tiled = _tiled(root, rules) | packed
    below = _params_below(root)

    def own(node: ModuleNode, specs: Iterable[ParamSpec]) -> None:
        for spec in specs:
            if spec.name not in tiled:
                owners.setdefault(spec.name, node)

    def numel_of(node: ModuleNode) -> int:
        return sum(spec.numel for name, spec in below[id(node)].items() if name not in tiled)

    def visit(node: ModuleNode, caller: ModuleNode, repeated: bool) -> None:
        if not below[id(node)]:
            return
        is_leaf = rules.is_leaf(node)
        fits = numel_of(node) <= rules.unit_numel_max and not node.is_container
        if is_leaf or (fits and (repeated or not _has_blocks(node, rules, below))):
            blocks.update([node.path] if repeated or is_leaf else [])
            own(node, below[id(node)].values())
            return
        caller = caller if node.is_container else node
        own(caller, node.params.values())
        classes = [child.class_name for child in node.children.values() if below[id(child)]]
        for child in node.children.values():
            visit(child, caller, classes.count(child.class_name) > 1 or child.class_name in rules.block_classes)

    visit(root, root, repeated=root.class_name in rules.block_classes)
    return _assemble(root, owners, blocks, rules, experts)


def _params_below(root: ModuleNode) -> dict[int, dict[str, ParamSpec]]:
    """`all_params` of every node by its `id`."""
    found: dict[int, dict[str, ParamSpec]] = {}
    for node in reversed([*root.walk()]):
        found[id(node)] = {spec.name: spec for spec in node.params.values()}
        for child in node.children.values():
            found[id(node)] |= found[id(child)]
    return found


def _has_blocks(node: ModuleNode, rules: UnitRules, below: Mapping[int, Mapping[str, ParamSpec]]) -> bool:
    """Whether a repeated sequence, a named block class or a data-dependent module stands anywhere below `node`."""
    for inner in node.walk():
        classes = [child.class_name for child in inner.children.values() if below[id(child)]]
        if len(classes) != len(set(classes)):
            return True
        if any(child.class_name in rules.block_classes or rules.is_leaf(child) for child in inner.children.values()):
            return True
    return False


def _assemble(
    root: ModuleNode, owners: dict[str, ModuleNode], blocks: set[str], rules: UnitRules,
    experts: Mapping[str, tuple[Sequence[ParamSpec], int]],
) -> ModelSpec:  # fmt: skip
    """Group parameters by (owner, trainable, dtype, replica, rule); merge small left-overs into the root; find the
    modules that need each unit.
    """
    specs = root.all_params()
    homes = _homes(root, specs, owners, blocks, rules)
    groups: dict[tuple[str, bool, str, Replica, int], list[ParamSpec]] = {}
    tiled = {name: spec for name, spec in specs.items() if name not in owners}
    for name, spec in specs.items():
        if name in tiled:
            continue
        rule = spec.rule if spec.trainable else 0
        key = (homes[owners[name].path], spec.trainable, spec.dtype, spec.replica, rule)
        groups.setdefault(key, []).append(spec)
    nodes = [*root.walk()]
    order = {node.path: index for index, node in enumerate(nodes)}
    hooked = _hooked(root, rules)
    units = []
    in_order = sorted(groups.items(), key=lambda item: (order[item[0][0]], not item[0][1]))
    for (path, trainable, dtype, replica, rule), members in in_order:
        # Parameters of one optimizer group lie next to each other, so that the optimizer sees few long pieces.
        members = sorted(members, key=lambda spec: spec.group)
        # The root's forward contains every other; a shared module is also called from outside the unit's own.
        outside = [
            point
            for spec in members
            for point, shared in hooked[spec.name]
            if path != root.path and point != path and (shared or not point.startswith(path + "."))
        ]
        stepped = f" ({rules.updates[rule].name})" if len(rules.updates) > 1 else ""
        suffix = _REPLICATED[replica] + (stepped if trainable else " (frozen)")
        units.append(
            UnitSpec(
                name=(path or "(root)") + suffix,
                modules=(path, *dict.fromkeys(outside)),
                dtype=dtype,
                trainable=trainable,
                params=tuple(members),
                replica=replica,
                rule=rule,
            )  # fmt: skip
        )
    packed = {spec.name for specs, _ in experts.values() for spec in specs}
    units += [unit for path, (specs, each) in experts.items() for unit in _units_of_experts(path, specs, each, hooked)]
    units = _with_tiles(units, [spec for name, spec in tiled.items() if name not in packed], hooked, order, rules)
    begins = sorted((order[module], index) for index, unit in enumerate(units) for module in unit.modules)
    lookups = frozenset(position for position, (node, _) in enumerate(begins) if nodes[node].is_lookup)
    return ModelSpec(
        units=tuple(units), uses=tuple(index for _, index in begins), lookups=lookups,
        points=tuple(nodes[node].path for node, _ in begins),
    )  # fmt: skip


def _tiled(root: ModuleNode, rules: UnitRules) -> frozenset[str]:
    """Names of the parameters that are cut into tiles: large ones all of whose holders use them row by row."""
    large = {
        name for name, spec in root.all_params().items() if spec.numel > rules.whole_numel_max and spec.shape[0] > 1
    }
    pending = [(root, False)] if large else []
    while pending:
        node, leaf = pending.pop()
        leaf = leaf or rules.is_leaf(node)
        for attribute, spec in node.params.items():
            whole = spec.trainable and rules.updates[spec.rule].matrices
            by_row = node.class_name in _CUT and attribute == "weight" and len(spec.shape) == 2 and not leaf
            if whole or not (by_row or (node.stacked and len(spec.shape) == 3)):
                large.discard(spec.name)
        pending += [(child, leaf) for child in node.children.values()]
    return frozenset(large)


def _with_tiles(
    units: list[UnitSpec], specs: Iterable[ParamSpec], hooked: dict[str, list[tuple[str, bool]]],
    order: dict[str, int], rules: UnitRules,
) -> list[UnitSpec]:  # fmt: skip
    """The units with one more for each tile, behind those of the module that holds it first."""
    made = []
    for spec in specs:
        modules = tuple(dict.fromkeys(point for point, _ in hooked[spec.name]))
        numel_max = max(rules.tile_numel_max, min(_TILE_NUMEL_TINY, math.prod(spec.shape) // _TILES_MAX))
        pieces = list(cut_rows(spec.shape, numel_max, rules.updates[spec.rule].block if spec.trainable else 1))
        for index, (start, numel) in enumerate(pieces):
            name = f"{spec.name}, tile {index + 1} of {len(pieces)}" + ("" if spec.trainable else " (frozen)")
            piece = replace(spec, start=start, tile_numel=numel)
            made.append(UnitSpec(name, modules, spec.dtype, spec.trainable, (piece,), spec.replica, spec.rule))
    # Sorting keeps the order of units that begin in one module.
    routed = any(unit.routed for unit in units)
    return sorted([*units, *made], key=lambda unit: order[unit.modules[0]]) if made or routed else units


def _experts(root: ModuleNode, rules: UnitRules) -> dict[str, tuple[list[ParamSpec], int]]:
    """By path of a module, the packed weights of its experts, where these are too large to gather together, and how
    many experts are a unit.
    """
    large: dict[str, list[ParamSpec]] = {}
    for node in root.walk() if rules.whole_numel_max < 2**62 else ():
        specs = [node.params[name] for name in _PACKED if name in node.params]
        # One kind of unit, which no other module needs, cut along another dimension if at all.
        kinds = {(spec.shape[0], len(spec.shape), spec.dtype, spec.group < 0, spec.rule) for spec in specs}
        alone = not any(spec.tied or (spec.shard is not None and spec.shard.dim == 0) for spec in specs)
        if not node.packed or node.shared or len(kinds) != 1 or len(specs[0].shape) != 3 or not alone:
            continue
        if sum(spec.numel for spec in specs) > rules.whole_numel_max:
            large[node.path] = specs
    least = -(-sum(specs[0].shape[0] for specs in large.values()) // _EXPERT_UNITS_MAX)
    found = {path: (specs, _experts_of_unit(specs, rules, least)) for path, specs in large.items()}
    return {path: (specs, each) for path, (specs, each) in found.items() if each < specs[0].shape[0]}


def _experts_of_unit(specs: Sequence[ParamSpec], rules: UnitRules, least: int) -> int:
    """How many experts with these packed weights are a unit: as many as a transfer is worth, and `least`, as far as a
    tile has room for them.
    """
    inner = [math.prod(spec.shape[1:]) for spec in specs]
    wanted = min(max(-(-_EXPERTS_NUMEL_MIN // sum(inner)), least), max(rules.tile_numel_max // sum(inner), 1))
    # No block of elements of any of the weights is cut.
    block = rules.updates[specs[0].rule].block if specs[0].trainable else 1
    return align_up(wanted, math.lcm(*(block // math.gcd(each, block) for each in inner)))


def _units_of_experts(
    path: str, specs: Sequence[ParamSpec], each: int, hooked: dict[str, list[tuple[str, bool]]]
) -> Iterator[UnitSpec]:
    """The units of a module's experts, `each` of them in one."""
    count, first = specs[0].shape[0], specs[0]
    modules = tuple(dict.fromkeys(point for spec in specs for point, _ in hooked[spec.name]))
    inner = [math.prod(spec.shape[1:]) for spec in specs]
    for begin in range(0, count, each):
        end = min(begin + each, count)
        # `replace` is slow, and there may be tens of thousands.
        pieces = tuple(
            ParamSpec(
                spec.name, spec.shape, spec.dtype, spec.group, spec.tied, begin * numel, (end - begin) * numel,
                spec.shard, spec.replica, spec.rule, spec.split,
            )
            for spec, numel in zip(specs, inner, strict=True)
        )  # fmt: skip
        which = f"expert {begin + 1}" if end == begin + 1 else f"experts {begin + 1} to {end}"
        name = f"{path}, {which} of {count}" + ("" if first.trainable else " (frozen)")
        yield UnitSpec(name, modules, first.dtype, first.trainable, pieces, first.replica, first.rule, routed=True)


def _homes(
    root: ModuleNode, specs: dict[str, ParamSpec], owners: dict[str, ModuleNode], blocks: set[str], rules: UnitRules
) -> dict[str, str]:
    """Owner's path -> path of the unit: its own, or the root's for small left-overs, while the root's is not full."""
    numel: dict[str, int] = {}
    for name, node in owners.items():
        numel[node.path] = numel.get(node.path, 0) + specs[name].numel
    homes = {}
    root_numel = numel.get(root.path, 0)
    for path, owned in numel.items():
        small = path not in blocks and owned <= rules.merge_numel_max
        joins = path != root.path and small and root_numel + owned <= rules.unit_numel_max
        root_numel += owned if joins else 0
        homes[path] = root.path if joins else path
    return homes


def _hooked(root: ModuleNode, rules: UnitRules) -> dict[str, list[tuple[str, bool]]]:
    """By parameter name, the modules whose forward needs it: (path where a hook can stand, whether it is shared).

    That is a holder itself, the caller of a container, or the data-dependent module that a holder is a part of.
    """
    hooked: dict[str, list[tuple[str, bool]]] = {}

    def visit(node: ModuleNode, caller: str, leaf: bool, shared: bool) -> None:
        shared = shared or node.shared
        if not leaf:
            leaf = rules.is_leaf(node)
            caller = caller if node.is_container else node.path
            if shared and not node.is_container:
                for name in node.all_params():
                    hooked.setdefault(name, []).append((caller, True))
        for spec in node.params.values():
            hooked.setdefault(spec.name, []).append((caller, False))
        for child in node.children.values():
            visit(child, caller, leaf, shared and node.is_container)

    visit(root, root.path, leaf=False, shared=False)
    return hooked


def repeated_blocks(root: ModuleNode, *, classes: Collection[str] = (), every: int = 1) -> tuple[str, ...]:
    """Paths of every `every`-th repeated block, the first one included, in the order of the tree.

    A block is one of several modules of one class that stand side by side, or of a class that the model names as its
    block (`classes`); it has modules of its own, or is a member of a list. What is repeated inside a block is part of
    it, unless the model names that (an encoder and a decoder of one class). A module without parameters is none: there
    is nothing to keep it apart from a function.
    """
    found: list[str] = []

    def visit(node: ModuleNode) -> None:
        members = [child for child in node.children.values() if child.all_params()]
        names = [child.class_name for child in members]
        for child in members:
            repeated = names.count(child.class_name) > 1 and (node.is_container or bool(child.children))
            named = child.class_name in classes
            repeated = repeated and not any(below.class_name in classes for below in child.walk())
            if not child.is_container and (named or repeated):
                found.append(child.path)
            else:
                visit(child)

    visit(root)
    return tuple(found[::every])


def checkpointed_blocks(config: ResolvedConfig, node: ModuleNode, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Paths of the blocks that the configuration has computed again in backward. classes: the model's own blocks."""
    every = config.sections.activation_checkpointing.every
    return repeated_blocks(node, classes=classes, every=every) if every else ()
