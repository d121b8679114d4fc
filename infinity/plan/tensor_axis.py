"""The tensor axis as a value: what becomes of each parameter, and what each module does at run time. No torch.

A model's own plan names a style for modules and parameters. From the styles follow, for every parameter, its shard or
that it is replicated; for every module with a part in it, its `Role`; and the regions: modules (an attention, an MLP)
between whose input and output ranks hold different parts.

From a model's tensor-parallel plan, which names a style for modules and parameters, to a `TensorAxis`. No torch.

Patterns and styles are those of transformers: "layers.*.self_attn.q_proj": "colwise", where `*` stands for a number.
Each style fixes the shard of the module's parameters and what the module does beside its own forward. A rowwise module
sums what the colwise modules before it began: together they are a cut, and the module around a cut is a region, whose
input is copied once for all of them.

The tensor axis of a model: its own tensor-parallel plan and its numbers of heads, read from the model.

A model is read by duck typing, as `module_tree` does it, so that this file needs no torch.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from infinity.config.section import dotted
from infinity.errors import ConfigError
from infinity.plan.shards import Replica, Shard
from infinity.plan.spec import ModuleNode, ParamSpec, repeated_blocks


class Role(Enum):
    """What a module does beside its own forward."""

    # Its outputs are this rank's columns. Its input is the region's, or, outside of regions, is copied.
    COLWISE = "colwise"
    # The same, and all ranks' columns are gathered behind it.
    COLWISE_GATHER = "colwise_gather_output"
    # Its inputs are this rank's columns; outputs are summed over ranks, and a bias is added to the sum.
    ROWWISE = "rowwise"
    # The same, of inputs that every rank has whole: each takes its columns of them.
    ROWWISE_SPLIT = "rowwise_split_input"
    # A lookup in this rank's rows: zero for the others' words, summed over ranks.
    EMBEDDING = "embedding_rowwise"
    # Packed experts: inputs are copied, outputs summed.
    EXPERTS = "moe_tp_experts"


@dataclass(frozen=True, slots=True)
class Region:
    """A module whose differentiable inputs are copied once (their gradients are summed over ranks).

    divided: ranks compute different things inside, so that each has random numbers of its own there.
    """

    path: str
    divided: bool = True


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """What the tensor axis makes of a model.

    params: by canonical name (the first one, of a tied parameter): its shard, if it has one, and its replica. Every
    parameter of the model is in it where `size` > 1. roles: by path. head: the module of which the outputs are this
    rank's words, where the loss may be computed without gathering them. blocks: the first and the last block between
    which activations are cut along the sequence; None without `sequence`. remarks: sentences for the log, on what stays
    whole against the model's plan.
    """

    size: int = 1
    params: Mapping[str, tuple[Shard | None, Replica]] = field(default_factory=lambda: MappingProxyType({}))
    roles: Mapping[str, Role] = field(default_factory=lambda: MappingProxyType({}))
    regions: tuple[Region, ...] = ()
    head: str | None = None
    blocks: tuple[str, str] | None = None
    remarks: tuple[str, ...] = field(default=(), compare=False)

    @property
    def sequence(self) -> bool:
        """Whether activations between regions are cut along the sequence."""
        return self.blocks is not None

    def divide(self, root: ModuleNode) -> ModuleNode:
        """The tree of what this axis leaves to a rank; `root` where it has one."""
        return root if self.size == 1 else root.with_params(self._divided)

    def _divided(self, spec: ParamSpec) -> ParamSpec:
        shard, replica = self.params[spec.name]
        shape = spec.shape if shard is None else shard.local_shape(spec.shape)
        return replace(spec, shape=shape, shard=shard, replica=replica)


_ROLES = {
    "colwise": Role.COLWISE, "colwise_gather_output": Role.COLWISE_GATHER, "packed_colwise": Role.COLWISE,
    "rowwise": Role.ROWWISE, "rowwise_split_input": Role.ROWWISE_SPLIT, "embedding_rowwise": Role.EMBEDDING,
    "moe_tp_experts": Role.EXPERTS,
}  # fmt: skip
_SUMMED = "replicated_with_grad_allreduce"
# Every rank has and computes the whole module: no style, for `parallel.plan` to say so.
_WHOLE = "replicate"
STYLES = (*_ROLES, _SUMMED, _WHOLE)
# What to write in the place of styles that transformers has and this engine has not.
_INSTEAD = {
    "packed_rowwise": "'rowwise' for a weight that is not packed, or 'replicate'",
    "sequence_parallel": "'replicate', and parallel.sequence = true to cut activations along the sequence",
    "mla_kv_a_proj": "'replicate' for every module of the attention",
    "all_reduce": "'rowwise' (its outputs are summed) for the layer before it",
    "moe_identity_expert": "'replicate' for the experts and everything in them",
    "embedding_colwise": "'embedding_rowwise'",
    "colwise_rep": "'colwise_gather_output'",
    "rowwise_rep": "'rowwise_split_input'",
    "local_params": "'replicate' for every module of the attention",
    "ep_dispatch_experts": "'moe_tp_experts'",
    "grouped_gemm": "'packed_colwise' and 'rowwise'",
}
# The style that takes part in a cut, the one that ends it, and whether ranks have different parts between them.
_CUTS = ((Role.COLWISE, Role.ROWWISE, True), (Role.COLWISE_GATHER, Role.ROWWISE_SPLIT, False))
# The dimension of a linear weight that each role cuts.
_DIMS = {Role.COLWISE: 0, Role.COLWISE_GATHER: 0, Role.ROWWISE: 1, Role.ROWWISE_SPLIT: 1}
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_NONE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Cut:
    """Colwise modules and the rowwise ones that sum what they began, below the nearest module that has both."""

    node: ModuleNode
    rowwise: tuple[str, ...]
    divided: bool
    # There is another cut below.
    nested: bool


@dataclass(slots=True)
class _Draft:
    """What is known of the axis while it is planned."""

    root: ModuleNode
    size: int
    blocks: tuple[str, ...]
    # Paths that the plan leaves whole by name.
    whole: tuple[str, ...]
    params: dict[str, tuple[Shard | None, Replica]] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    # (what it is, number) of all that the size must divide.
    numbers: list[tuple[str, int]] = field(default_factory=list)
    # Where each parameter's shard was decided.
    by: dict[str, str] = field(default_factory=dict)

    def give(self, path: str, spec: ParamSpec, shard: Shard | None, replica: Replica) -> None:
        """A parameter's shard or replica, as the module at `path` has it; one parameter has one."""
        known = self.params.setdefault(spec.name, (shard, replica))
        first = self.by.setdefault(spec.name, path)
        if known != (shard, replica):
            raise ConfigError(
                f"{first} and {path} share one weight, {spec.name}, and their styles cut it differently; give both "
                f"'colwise_gather_output' and 'embedding_rowwise', or both 'replicate', in parallel.plan"
            )

    def cut(self, path: str, attribute: str, spec: ParamSpec, dim: int, blocks: int = 1) -> None:
        """Cut a parameter along `dim`, which holds `blocks` equal blocks."""
        width = spec.shape[dim]
        named = f"{path}.{attribute} has {width:,} {'columns' if dim == len(spec.shape) - 1 and dim else 'rows'}"
        if blocks > 1:
            if width % blocks:
                raise ConfigError(f"{named}, which are not {blocks} equal blocks: 'packed_colwise' cannot cut it")
            named += f", {blocks} blocks of {width // blocks:,}"
        self.numbers.append((named, width // blocks))
        if width // blocks % self.size == 0:
            self.give(path, spec, Shard(dim, (width // blocks,) * blocks, self.size), Replica.NONE)

    def inside_blocks(self, path: str) -> bool:
        """Whether a module is a repeated block or in one."""
        return any(_within(path, block) for block in self.blocks)


def plan_tensor_axis(
    root: ModuleNode, styles: Mapping[str, str], *, size: int, sequence: bool = False,
    heads: Mapping[str, int] = _NONE, given: Collection[str] = (),
) -> TensorAxis:  # fmt: skip
    """Plan what a tensor axis of `size` ranks makes of a model.

    root: the whole model's tree. styles: pattern -> style, the model's own and the configuration's. heads: numbers of
    the attention's heads by their names in the model's configuration, which the size must divide. given: the patterns
    that the configuration wrote, each of which must match something. ConfigError for what cannot be cut.
    """
    if size == 1:
        return TensorAxis()
    found = _match(root, styles, given)
    if not found:
        raise ConfigError(_no_plan(root, styles, size))
    whole = tuple(path for path, style in found.items() if style == _WHOLE)
    draft = _Draft(root, size, repeated_blocks(root), whole)
    found = {path: style for path, style in found.items() if style != _WHOLE}
    vocabulary = _vocabulary(draft, found)
    remarks = _plan_vocabulary(draft, vocabulary, found)
    for node in root.walk():
        if node.path not in vocabulary:
            _plan_module(draft, node, found)
    divided = _plan_regions(draft, found, heads)
    if divided is None:
        remarks.append(f"the plan of {root.class_name} cuts nothing in its blocks: every rank computes them whole")
        divided = {}
    blocks = _plan_sequence(draft, divided) if sequence else None
    for name in root.all_params():
        draft.params.setdefault(name, (None, Replica.SAME))
    words = [path for path in vocabulary if draft.roles.get(path) is Role.COLWISE_GATHER]
    return TensorAxis(
        size=size,
        params=MappingProxyType(draft.params),
        roles=MappingProxyType(draft.roles),
        regions=tuple(Region(node.path, divided[node.path]) for node in root.walk() if node.path in divided),
        head=words[0] if len(words) == 1 else None,
        blocks=blocks,
        remarks=tuple(remarks),
    )  # fmt: skip


def _no_plan(root: ModuleNode, styles: Mapping[str, str], size: int) -> str:
    first = next(iter(styles), "")
    had = f"its plan, {first!r} first, names nothing in it" if styles else "it brings no tensor-parallel plan"
    return (
        f"{root.class_name} cannot be cut over parallel.tensor = {size} ranks: {had}. Name its linear layers in "
        'parallel.plan, as in {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}, or set '
        "parallel.tensor = 1"
    )


def _plan_regions(
    draft: _Draft, found: Mapping[str, str], heads: Mapping[str, int]
) -> dict[str, bool] | None:  # fmt: skip
    """The regions: path -> whether ranks compute different things inside. None where nothing at all is cut.

    ConfigError for what does not make whole cuts, or cannot be shared equally.
    """
    cuts = [*_find_cuts(draft)]
    attentions = [
        cut.node.path
        for cut in cuts
        if cut.divided and _ATTENTION.search(f"{cut.node.path.rpartition('.')[2]} {cut.node.class_name}")
    ]
    counts = [(f"{name} of {path} is {count:,}", count) for path in attentions for name, count in heads.items()]
    _check_numbers([*counts, *draft.numbers], draft.size)
    for cut in cuts:
        _check_styled(draft, cut)
    _check_summed(found, [cut.node.path for cut in cuts if cut.divided])
    experts = [path for path, role in draft.roles.items() if role is Role.EXPERTS]
    if not cuts and not experts:
        return None
    return {cut.node.path: cut.divided for cut in cuts if _is_region(draft, cut)} | dict.fromkeys(experts, True)


def _match(root: ModuleNode, styles: Mapping[str, str], given: Collection[str]) -> dict[str, str]:
    """The style of each module and parameter (by path) that a pattern names; the pattern with fewest `*` counts.

    A style that is not served is refused where it is given, or names something in this model.
    """
    ordered = sorted(styles, key=lambda pattern: pattern.count("*"))
    matchers = [(re.compile(re.escape(pattern).replace(r"\*", r"\d+")), pattern) for pattern in ordered]
    names = [path for node in root.walk() for path in (node.path, *(dotted(node.path, name) for name in node.params))]
    found: dict[str, str] = {}
    used = set()
    for name in names:
        matching = [pattern for regex, pattern in matchers if regex.fullmatch(name)]
        used.update(matching)
        if matching:
            found[name] = styles[matching[0]]
            _check_style(name, found[name])
    for pattern in given:
        _check_style(pattern, styles[pattern])
        if pattern not in used:
            known = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name): None for name in names if name}
            near = difflib.get_close_matches(pattern, known, n=1, cutoff=0) if known else []
            raise ConfigError(
                f"parallel.plan: {pattern!r} matches no module and no parameter of {root.class_name}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    return found


def _check_style(name: str, style: str) -> None:
    if style in STYLES:
        return
    near = difflib.get_close_matches(str(style), STYLES, n=1)
    instead = _INSTEAD.get(style) or (f"{near[0]!r}" if near else f"one of {', '.join(STYLES)}")
    raise ConfigError(
        f"{name}: the tensor-parallel style {style!r} is not supported. Set {instead} in parallel.plan, or "
        "parallel.tensor = 1"
    )


def _plan_module(draft: _Draft, node: ModuleNode, found: Mapping[str, str]) -> None:
    """Shards and role of one module, by its style and those of its parameters."""
    style = found.get(node.path)
    role = _ROLES.get(style or "")
    if role is Role.EXPERTS:
        _plan_experts(draft, node, found)
        return
    for name in node.params:
        if (path := dotted(node.path, name)) in found and found[path] != _SUMMED:
            raise ConfigError(
                f"{path}: {found[path]!r} cuts a parameter of {node.class_name}, whose forward would use the part as "
                "the whole; only experts ('moe_tp_experts' on their module) have styles by parameter. Give the style "
                f"to a linear layer, or 'replicate' to {path}, in parallel.plan"
            )
        if path in found:
            draft.give(node.path, node.params[name], None, Replica.PARTIAL)
    if style == _SUMMED:
        for spec in node.all_params().values():
            draft.give(node.path, spec, None, Replica.PARTIAL)
    if role is None or style is None:
        return
    draft.roles[node.path] = role
    weight = node.params.get("weight")
    if role is Role.EMBEDDING:
        if not node.class_name.endswith("Embedding") or weight is None:
            raise ConfigError(_not_linear(node, style))
        draft.cut(node.path, "weight", weight, 0)
        return
    if not node.class_name.endswith("Linear") or weight is None or len(weight.shape) != 2:
        raise ConfigError(_not_linear(node, style))
    dim = _DIMS[role]
    packed = 2 if style == "packed_colwise" else 1
    draft.cut(node.path, "weight", weight, dim, packed)
    if (bias := node.params.get("bias")) is None:
        return
    if dim == 0:
        draft.cut(node.path, "bias", bias, 0, packed)
    else:
        # It is added after the sum, alike on all ranks.
        draft.give(node.path, bias, None, Replica.SAME)


def _not_linear(node: ModuleNode, style: str) -> str:
    kind = "an embedding" if style == "embedding_rowwise" else "a linear layer"
    if node.class_name == "Conv1D":
        why = "a Conv1D, which holds its weight transposed and its queries, keys and values in one"
    elif node.class_name.endswith(("Linear", "Embedding")) and "weight" not in node.params:
        why = f"a {node.class_name} without a weight of its own (an adapter?)"
    else:
        why = f"a {node.class_name}"
    return (
        f"{node.path}: {style!r} cuts {kind}, and this is {why}. Give it 'replicate' in parallel.plan, or set "
        "parallel.tensor = 1"
    )


def _plan_experts(draft: _Draft, node: ModuleNode, found: Mapping[str, str]) -> None:
    """Experts as (expert, rows, columns) parameters: each rank has its part of every expert."""
    draft.roles[node.path] = Role.EXPERTS
    if not node.params or any(child.all_params() for child in node.children.values()):
        raise ConfigError(
            f"{node.path}: 'moe_tp_experts' cuts experts whose parameters lie in the module itself, as (expert, rows, "
            f"columns); {node.class_name} holds modules. Give 'colwise' and 'rowwise' to the linear layers of each "
            "expert, or 'replicate' to all, in parallel.plan"
        )
    for name, spec in node.params.items():
        path = dotted(node.path, name)
        style = found.get(path)
        if len(spec.shape) != 3 or style not in ("colwise", "packed_colwise", "rowwise"):
            raise ConfigError(
                f"{path}, of shape {spec.shape}, has {f'the style {style!r}' if style else 'no style'} in experts that "
                "are summed over ranks: 'moe_tp_experts' needs parameters of three dimensions, each 'packed_colwise', "
                f"'colwise' or 'rowwise'. Give 'replicate' to {node.path} and everything in it in parallel.plan, or "
                "set parallel.tensor = 1"
            )
        draft.cut(node.path, name, spec, 2 if style == "rowwise" else 1, 2 if style == "packed_colwise" else 1)


def _vocabulary(draft: _Draft, found: Mapping[str, str]) -> dict[str, ModuleNode]:
    """The modules that hold words, by path: embeddings of a style, heads as long as one, and what is tied to them.

    A tied head and its embedding are one parameter: where one has a style, both do.
    """
    nodes = [node for node in draft.root.walk() if "weight" in node.params and not draft.inside_blocks(node.path)]
    lookups = [node for node in nodes if node.class_name.endswith("Embedding")]
    words = {node.params["weight"].shape[0] for node in lookups}
    styled = [
        node
        for node in nodes
        if (node in lookups and found.get(node.path) == "embedding_rowwise")
        or (
            node.class_name.endswith("Linear")
            and found.get(node.path) == "colwise_gather_output"
            and node.params["weight"].shape[0] in words
        )
    ]
    names = {node.params["weight"].name for node in styled}
    return {node.path: node for node in nodes if node.params["weight"].name in names}


def _plan_vocabulary(draft: _Draft, modules: Mapping[str, ModuleNode], found: Mapping[str, str]) -> list[str]:
    """Cut embeddings and heads by words; return a remark on those that stay whole because the size does not divide."""
    whole = []
    for path, node in modules.items():
        style = found.get(path)
        role = Role.EMBEDDING if node.class_name.endswith("Embedding") else Role.COLWISE_GATHER
        kind = node.class_name.endswith(("Embedding", "Linear"))
        if not kind or (style is not None and _ROLES.get(style) is not role):
            raise ConfigError(
                f"{path}, a {node.class_name}, has the style {style!r} and its weight is cut by words: it needs "
                f"{'embedding_rowwise' if role is Role.EMBEDDING else 'colwise_gather_output'!r} in parallel.plan"
            )
        if node.params["weight"].shape[0] % draft.size:
            whole.append(node)
            continue
        draft.roles[path] = role
        for spec in node.params.values():
            # Not among the numbers that the size must divide: a vocabulary may stay whole.
            draft.give(path, spec, Shard(0, (spec.shape[0],), draft.size), Replica.NONE)
    rows = {node.params["weight"].shape[0]: None for node in whole}
    return [
        f"a vocabulary of {count:,} cannot be divided by {draft.size}: "
        f"{' and '.join(node.path for node in whole if node.params['weight'].shape[0] == count)} stay whole on every "
        f"rank ({count + -count % draft.size:,} words could be divided)"
        for count in rows
    ]


def _find_cuts(draft: _Draft) -> Iterator[_Cut]:
    """The cuts, from the inside out; ConfigError for columns that no rowwise module sums, and for sums of none."""
    cuts: list[_Cut] = []

    def visit(node: ModuleNode) -> tuple[dict[Role, list[str]], bool]:
        open_paths: dict[Role, list[str]] = {role: [] for role in _DIMS}
        has_cut = False
        for child in node.children.values():
            below, cut_below = visit(child)
            has_cut = has_cut or cut_below
            for role, paths in below.items():
                open_paths[role] += paths
        if (own := draft.roles.get(node.path)) in open_paths:
            open_paths[own].append(node.path)
        if node.is_container:
            return open_paths, has_cut
        nested = has_cut
        for begin, end, divided in _CUTS:
            if open_paths[begin] and open_paths[end]:
                cuts.append(_Cut(node, tuple(open_paths[end]), divided, nested))
                open_paths[begin], open_paths[end] = [], []
                has_cut = True
        if node.path in draft.blocks or node is draft.root:
            _check_open(open_paths)
            open_paths = {role: [] for role in _DIMS}
        return open_paths, has_cut

    visit(draft.root)
    seen = [cut.node.path for cut in cuts]
    # A module of both kinds of cut is none's region.
    yield from (
        _Cut(cut.node, cut.rowwise, cut.divided, cut.nested or seen.count(cut.node.path) > 1) for cut in cuts
    )


def _check_open(paths: Mapping[Role, list[str]]) -> None:
    """ConfigError where a cut is not whole."""
    if paths[Role.COLWISE]:
        raise ConfigError(
            f"{paths[Role.COLWISE][0]} leaves each rank its own columns, and no 'rowwise' module takes them: give "
            "'rowwise' to the layer behind it, or 'colwise_gather_output' to this one, in parallel.plan"
        )
    if paths[Role.ROWWISE]:
        raise ConfigError(
            f"{paths[Role.ROWWISE][0]} expects each rank's own columns, and no 'colwise' module makes them: give "
            "'colwise' to the layer before it, or 'rowwise_split_input' to this one, in parallel.plan"
        )


def _is_region(draft: _Draft, cut: _Cut) -> bool:
    """Whether the input of the module around a cut may be copied once for all in it.

    Not where something in it sees the input otherwise: a layer of no style would have parts of its gradient, and
    columns behind a sum would have no copy. Each colwise module then copies its own input.
    """
    styled = all(name in draft.params for name in cut.node.all_params())
    return styled and len(cut.rowwise) == 1 and not cut.nested and cut.node is not draft.root


def _check_styled(draft: _Draft, cut: _Cut) -> None:
    """ConfigError for a parameter around a divided cut of which the plan says nothing.

    Before the cut its gradients would be whole, within it parts: a tree does not tell.
    """
    for node in cut.node.walk() if cut.divided else ():
        for name, spec in node.params.items():
            path = dotted(node.path, name)
            said = any(_within(path, whole) for whole in draft.whole)
            if spec.name not in draft.params and not said:
                named = path if node.children else node.path
                raise ConfigError(
                    f"{path} lies around {cut.rowwise[0]}, which sums over ranks, and has no style. Give "
                    f"{named!r} {_SUMMED!r} in parallel.plan if it works on a rank's own columns, or 'replicate' "
                    "if on what all ranks have alike"
                )


def _check_numbers(numbers: Sequence[tuple[str, int]], size: int) -> None:
    """ConfigError for the first number that the size does not divide, with the nearest sizes that divide them all."""
    uneven = [named for named, number in numbers if number % size]
    if not uneven:
        return
    common = math.gcd(*(number for _, number in numbers))
    sizes = [each for each in range(1, common + 1) if common % each == 0]
    near = [max((each for each in sizes if each < size), default=1)]
    near += [each for each in sizes if each > size][:1]
    works = " or ".join(map(str, near))
    raise ConfigError(
        f"{uneven[0]}, which {size} ranks cannot share equally: set parallel.tensor = {works}, or give 'replicate' to "
        "the modules concerned in parallel.plan"
    )


def _check_summed(found: Mapping[str, str], divided: Collection[str]) -> None:
    """ConfigError for gradients that would be summed where all ranks have the same."""
    for path, style in found.items():
        if style == _SUMMED and not any(_within(path, region) for region in divided):
            raise ConfigError(
                f"{path}: {_SUMMED!r} sums gradients that ranks have parts of, and no 'colwise' and 'rowwise' modules "
                "around it divide its inputs: remove the style, or give 'replicate', in parallel.plan"
            )


def _plan_sequence(draft: _Draft, regions: Mapping[str, bool]) -> tuple[str, str]:
    """The blocks between which activations are cut along the sequence; their parameters see a part of it each."""
    experts = [path for path, role in draft.roles.items() if role is Role.EXPERTS]
    if experts:
        raise ConfigError(
            f"parallel.sequence is not supported with experts ({experts[0]}): they choose by the token, and ranks "
            "would have different tokens. Set parallel.sequence = false"
        )
    blocks = _longest_sequence(draft)
    if not blocks:
        raise ConfigError(
            f"parallel.sequence cuts activations between repeated blocks, and {draft.root.class_name} has none. Set "
            "parallel.sequence = false"
        )
    for path, role in draft.roles.items():
        apart = not any(_within(path, region) for region in regions)
        if role in _DIMS and apart and any(_within(path, block.path) for block in blocks):
            raise ConfigError(
                f"parallel.sequence gathers the input of a module around one cut, and that of {path} holds other "
                "layers, or more than one sum. Set parallel.sequence = false"
            )
    for block in blocks:
        for node in block.walk():
            inside = any(_within(node.path, region) for region in regions)
            for name, spec in node.params.items():
                added = name == "bias" and draft.roles.get(node.path) in (Role.ROWWISE, Role.ROWWISE_SPLIT)
                if spec.name not in draft.params and not inside and len(spec.shape) > 1:
                    raise ConfigError(
                        f"parallel.sequence cuts what {node.path or block.path} sees along the sequence, and it is cut "
                        "by no style: it may need the whole sequence. Give it and the layers beside it styles in "
                        "parallel.plan, or set parallel.sequence = false"
                    )
                if (spec.name not in draft.params and not inside) or added:
                    draft.params[spec.name] = (None, Replica.PARTIAL)
    return blocks[0].path, blocks[-1].path


def _longest_sequence(draft: _Draft) -> list[ModuleNode]:
    """The blocks of the longest list; where no list has two, the members of the first that has a cut module."""
    members = [[child for child in node.children.values() if child.path in draft.blocks] for node in draft.root.walk()]
    longest = max(members, key=len)
    if longest:
        return longest
    lists = [[*node.children.values()] for node in draft.root.walk() if node.is_container]
    cut = [nodes for nodes in lists if any(_within(path, node.path) for node in nodes for path in draft.roles)]
    return cut[0] if cut else []


def _within(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(ancestor + ".")


HEADS = ("num_attention_heads", "num_key_value_heads")


def tensor_axis_of(
    model: Any, root: ModuleNode, *, size: int, sequence: bool = False, given: Mapping[str, str] | None = None
) -> TensorAxis:
    """Plan a tensor axis of `size` ranks from a model's own plan and `parallel.plan`.

    root: the whole model's tree (`module_tree`). sequence: `parallel.sequence`. given: `parallel.plan`. Reads names and
    shapes only: the model may be on the meta device. ConfigError for what cannot be cut.
    """
    if size == 1:
        return TensorAxis()
    written = written_styles(root, given, getattr(model, "base_model_prefix", ""))
    axis = plan_tensor_axis(
        root, {**_own_styles(model), **written}, size=size, sequence=sequence, heads=heads_of(model), given=written
    )
    _check_regions(model, axis)
    return axis


def styles_of(model: Any, root: ModuleNode, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return pattern -> style: the model's own plan, overlaid by the configuration's `parallel.plan`.

    The plan of transformers' models has heads, embeddings and experts merged in; where a module wraps such models, the
    patterns of each begin with its path.
    """
    return {**_own_styles(model), **written_styles(root, given, getattr(model, "base_model_prefix", ""))}


def written_styles(root: ModuleNode, given: Mapping[str, str] | None, prefix: object) -> dict[str, str]:
    """Return the patterns of `parallel.plan` as the names of a tree begin: with the base model's path (`prefix`), where
    a pattern leaves it out, as the plan in a model's configuration does.
    """
    if not given or not isinstance(prefix, str) or not prefix:
        return dict(given or {})
    names = [name for node in root.walk() for name in (node.path, *(dotted(node.path, param) for param in node.params))]

    def matches(pattern: str) -> bool:
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        return any(regex.fullmatch(name) for name in names)

    longer = {pattern: f"{prefix}.{pattern}" for pattern in given}
    return {
        longer[pattern] if not matches(pattern) and matches(longer[pattern]) else pattern: style
        for pattern, style in given.items()
    }


def heads_of(model: Any) -> dict[str, int]:
    """Return the numbers of attention heads by their names in the model's configuration (its text model's, if it has
    several); of numbers that differ by layer, the largest that divides all.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        for source in (getattr(config, "text_config", None), config):
            layers = getattr(source, "per_layer_config", None) or [source]
            counts = {name: [getattr(layer, name, None) for layer in layers] for name in HEADS}
            known = {name: [n for n in values if isinstance(n, int)] for name, values in counts.items()}
            if any(known.values()):
                return {name: math.gcd(*values) for name, values in known.items() if values}
    return {}


def _own_styles(model: Any) -> dict[str, str]:
    return {dotted(path, pattern): style for path, plan in _plans(model, "") for pattern, style in plan.items()}


def _plans(module: Any, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (path, plan) of the outermost modules that have a plan."""
    # A wrapper that hands on every attribute would show the plan without its own path.
    own = isinstance(getattr(type(module), "tp_plan", None), property)
    plan = getattr(module, "tp_plan", None) if own else None
    if plan:
        yield path, dict(plan)
        return
    for name, child in module.named_children():
        yield from _plans(child, dotted(path, name))


def _check_regions(model: Any, axis: TensorAxis) -> None:
    """ConfigError for a region that is given a residual: its gradient is whole, and would be summed with the parts."""
    for region in axis.regions:
        module = model.get_submodule(region.path)
        if "residual" in inspect.signature(type(module).forward).parameters:
            raise ConfigError(
                f"{region.path} ({type(module).__name__}) adds a residual in its own forward, so that its input cannot "
                "be copied once for its 'colwise' modules. Give 'replicate' to them and to the 'rowwise' one in "
                "parallel.plan, or set parallel.tensor = 1"
            )
