"""A model cut into stages: which blocks each runs, which units each needs, and what of that a rank has.

The model's repeated blocks are divided in their order. What runs in front of the first block belongs to the first
stage, what runs behind the last block to the last. Units are found in the whole model first, so that they do not depend
on the number of stages; one that several stages need (tied weights, small left-overs of the root) lies on each of them,
and their gradients are added up once a step. No torch: the estimator makes the same cut.

How many layers each stage of a model in layers gets: the division that a `partition_method` names.

Layers stay in their order, no stage is empty, and the most expensive stage costs as little as can be. No torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import inf

from infinity.errors import ConfigError, listed
from infinity.plan.pipeline import Action, Tables, make_tables, unit_uses
from infinity.plan.prefetch import UnitAccess
from infinity.plan.spec import ModelSpec, ModuleNode, UnitSpec, repeated_blocks

# A class of models whose layers are blocks, whatever they are; and where it has them.
_LAYERED, _LAYERS = "PipelineModule", "layers"
# Part of the names of modules that stand behind the blocks and run in front of them.
_ROTARY = "rotary"


class StageEnd(Exception):
    """Ends the forward of a stage behind its last block; no error. `outputs`: what crosses the boundary."""

    def __init__(self, outputs: tuple[object, ...]) -> None:
        super().__init__("the stage's last block has run")
        self.outputs = outputs


@dataclass(frozen=True, slots=True)
class StageCut:
    """Which blocks of a model each stage runs.

    blocks: paths of all blocks, in the order in which the model calls them. counts: how many of them each stage runs.
    after: paths of the modules outside of the blocks that run behind the last one; those on the way from the root to
    the blocks run around all of them, and all others outside in front of the first.
    """

    blocks: tuple[str, ...]
    counts: tuple[int, ...]
    after: tuple[str, ...] = ()
    # For blocks that answer with a tuple or a list its length: what stands in for one answers likewise.
    answers: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first block of each stage, and behind these the number of blocks."""
        return tuple(accumulate(self.counts, initial=0))

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.counts) - 1

    def blocks_of(self, stage: int) -> tuple[str, ...]:
        """The paths of a stage's blocks."""
        begin, end = self.bounds[stage : stage + 2]
        return self.blocks[begin:end]

    def stages_at(self, path: str) -> range:
        """The stages that run the module at `path`: one, or all where it contains blocks."""
        owners = _owners(self.blocks, self.counts)
        for prefix in _prefixes(path):
            if prefix in owners:
                return range(owners[prefix], owners[prefix] + 1)
            if prefix in self.after:
                return range(self.last, self.last + 1)
        inside = f"{path}." if path else ""
        around = any(block.startswith(inside) for block in self.blocks)
        return range(self.last + 1) if around else range(1)


@lru_cache(maxsize=64)
def _owners(blocks: tuple[str, ...], counts: tuple[int, ...]) -> Mapping[str, int]:
    """The stage of each block."""
    stages = (stage for stage, count in enumerate(counts) for _ in range(count))
    return dict(zip(blocks, stages, strict=True))


def _prefixes(path: str) -> Iterator[str]:
    """The paths of a module and of those that contain it, but the root's."""
    parts = path.split(".") if path else []
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])


def find_blocks(root: ModuleNode, classes: Collection[str] = ()) -> tuple[str, ...]:
    """The paths of the blocks that stages are made of: the longest sequence of repeated ones side by side.

    classes: names of the classes that the model calls its blocks. Empty where the model repeats nothing.
    """
    if root.class_name == _LAYERED and _LAYERS in root.children:
        return tuple(child.path for child in root.children[_LAYERS].children.values())
    found = repeated_blocks(root, classes=classes)
    sides = Counter(path.rpartition(".")[0] for path in found)
    if not sides:
        return ()
    numels = {node.path: node.numel for node in root.walk()}
    longest = max(sides, key=lambda side: (sides[side], numels[side]))
    return tuple(path for path in found if path.rpartition(".")[0] == longest)


def modules_after(root: ModuleNode, blocks: Sequence[str]) -> frozenset[str]:
    """The modules outside of the blocks that run behind them, as far as a tree can tell.

    Those that stand behind the blocks in the tree, but for tables of rotary positions, which models compute in front;
    and of those that stand in front, the ones whose name says that they come last (the `final_layer_norm` of OPT).
    """
    way = {"", *_prefixes(blocks[0])}
    after: list[str] = []

    def visit(node: ModuleNode) -> None:
        passed = False
        for name, child in node.children.items():
            if child.path in way:
                passed = True
                if child.path not in blocks:
                    visit(child)
            elif child.path not in blocks and ((passed and _ROTARY not in name) or name.startswith("final")):
                after.append(child.path)

    visit(root)
    return frozenset(after)


def balance(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Divide blocks into `stages` contiguous parts, none empty, so that the slowest is as fast as can be, and the
    others are as equal as that allows.

    costs: of each block, in any unit; `first` and `last` come to the first and the last stage.
    """
    if len(costs) < stages:
        raise ValueError(f"{len(costs)} blocks cannot be divided among {stages} stages")
    sums = [0.0, *accumulate(costs)]

    def cost(begin: int, end: int, stage: int) -> float:
        return sums[end] - sums[begin] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    def divide(add: Callable[[float, float], float], most: float) -> tuple[float, tuple[int, ...]]:
        """The division whose costs, put together by `add`, are least, and none of which is above `most`."""
        # By the blocks that the stages so far have: their cost, and how many each has.
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage in range(stages):
            ends = range(stage + 1, len(costs) - stages + stage + 2)
            found = {
                end: min(
                    (add(sofar, each), (*counts, end - begin))
                    for begin, (sofar, counts) in best.items()
                    if begin < end and (each := cost(begin, end, stage)) <= most
                )
                for end in ends
                if any(begin < end and cost(begin, end, stage) <= most for begin in best)
            }
            best = found
        return best[len(costs)]

    slowest, _ = divide(max, inf)
    return divide(lambda sofar, each: sofar + each * each, slowest)[1]


def cut_model(
    root: ModuleNode, blocks: Sequence[str], stages: int, *, after: Collection[str] | None = None,
    counts: Sequence[int] | None = None,
) -> StageCut:  # fmt: skip
    """Cut a model into `stages` stages: as `counts` says, else balanced by the elements that computation goes through.

    after: the modules behind the blocks, where a pass has recorded them; by default what the tree tells. ConfigError
    where there are fewer blocks than stages, or `counts` has other sums.
    """
    if len(blocks) < stages:
        what = f"{len(blocks)} blocks" if blocks else "no blocks that it repeats"
        raise ConfigError(
            f"parallel.pipeline x parallel.virtual_stages is {stages} but {root.class_name} has {what}: "
            + (f"use at most {len(blocks)} stages" if len(blocks) > 1 else "use data or tensor parallelism")
        )
    after = modules_after(root, blocks) if after is None else after
    if counts is None:
        nodes = {node.path: node for node in root.walk()}
        costs = [_computed_numel(nodes[path]) for path in blocks]
        first = sum(
            _computed_numel(nodes[path]) for path in _outside(root, blocks) if path and path not in after
        )  # fmt: skip
        last = sum(_computed_numel(nodes[path]) for path in after)
        counts = balance(costs, stages, first=first, last=last)
    if len(counts) != stages or sum(counts) != len(blocks) or min(counts) < 1:
        raise ConfigError(
            f"parallel.stages is {list(counts)}: it needs {stages} numbers of at least 1 (parallel.pipeline x "
            f"parallel.virtual_stages) whose sum is the {len(blocks)} blocks of {root.class_name}"
        )
    return StageCut(tuple(blocks), tuple(counts), tuple(sorted(after)))


def _computed_numel(node: ModuleNode) -> float:
    """Elements that a token's computation goes through: a lookup takes one row."""
    return float(sum(spec.numel for inner in node.walk() if not inner.is_lookup for spec in inner.params.values()))


def _outside(root: ModuleNode, blocks: Sequence[str]) -> Iterator[str]:
    """The outermost modules that contain no block and are none."""
    way = {"", *_prefixes(blocks[0])} - set(blocks)

    def visit(node: ModuleNode) -> Iterator[str]:
        for child in node.children.values():
            if child.path in way:
                yield from visit(child)
            elif child.path not in blocks:
                yield child.path

    return visit(root)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What the ranks of all stages agree on.

    units: of the whole model. stages: those that need each of them. uses: how often a forward of each stage uses a
    unit.
    """

    cut: StageCut
    pp: int
    schedule: str
    micro_batches: int
    tables: Tables
    stages: tuple[tuple[int, ...], ...]
    units: tuple[UnitSpec, ...]
    uses: tuple[int, ...] = ()

    @property
    def virtual(self) -> int:
        """Stages of a rank."""
        return len(self.cut.counts) // self.pp

    def place_of(self, path: str) -> int:
        """The pipeline index of the rank that runs the module at `path`; of several, the first one's."""
        return self.cut.stages_at(path)[0] % self.pp

    def holders(self, unit: int) -> tuple[int, ...]:
        """The pipeline indices of the ranks that have a unit of the model, in order."""
        return tuple(sorted({stage % self.pp for stage in self.stages[unit]}))


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """A place on the pipeline axis: which stages lie there follows from the cut, and what they do from the tables."""

    cut: StageCut
    tables: Tables
    index: int

    @property
    def stages(self) -> range:
        """The stages at this place."""
        return range(self.index, len(self.cut.counts), len(self.tables))

    @property
    def actions(self) -> tuple[Action, ...]:
        """The table of this place."""
        return self.tables[self.index]


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """What a rank at place `index` of the pipeline axis has of a split model."""

    split: SplitPlan
    index: int

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this rank runs."""
        return tuple(range(self.index, len(self.split.cut.counts), self.split.pp))

    @property
    def place(self) -> PipelinePlace:
        """Where this is on the axis."""
        return PipelinePlace(self.split.cut, self.split.tables, self.index)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in the whole model of this rank's units, in the order of its plan."""
        return tuple(unit for unit in range(len(self.split.stages)) if self.index in self.split.holders(unit))

    @property
    def shared(self) -> tuple[int, ...]:
        """The units of this rank's plan that other ranks of the axis have, too."""
        return tuple(at for at, unit in enumerate(self.numbers) if len(self.split.holders(unit)) > 1)

    @property
    def at_ends(self) -> tuple[int, ...]:
        """Those of the shared units that only the first and the last rank of a longer axis have."""
        return tuple(at for at in self.shared if len(self.split.holders(self.numbers[at])) < self.split.pp)

    def units_of(self, stage: int) -> tuple[int, ...]:
        """The units of this rank's plan that one of its stages needs."""
        return tuple(at for at, unit in enumerate(self.numbers) if stage in self.split.stages[unit])

    @property
    def decided(self) -> PipelinePart:
        """The same without what only a run knows of the model: how its blocks answer."""
        return replace(self, split=replace(self.split, cut=replace(self.split.cut, answers=())))

    def tells(self, at: int) -> bool:
        """Whether this rank speaks for a unit of its plan, as the first of those that have it."""
        return self.split.holders(self.numbers[at])[0] == self.index


def split_model(spec: ModelSpec, cut: StageCut, *, pp: int, schedule: str, micro_batches: int) -> SplitPlan:
    """Say which stages need each unit. spec: of the whole model. ConfigError for a schedule that has no table, and for
    weights that some of the ranks between the first and the last share.
    """
    stages = tuple(
        tuple(sorted({
            stage for param in unit.params for name in (param.name, *param.tied)
            for stage in cut.stages_at(name.rpartition(".")[0])
        }))
        for unit in spec.units
    )  # fmt: skip
    for unit, needed in zip(spec.units, stages, strict=True):
        if {stage % pp for stage in needed} not in ({needed[0] % pp}, {0, pp - 1}, {*range(pp)}):
            raise ConfigError(
                f"{unit.params[0].name} is used in stages {', '.join(map(str, needed))} of the pipeline, but what "
                "several stages use must be used in the first and the last, or in all: move the blocks that share it "
                "into one stage with parallel.stages"
            )
    used: Counter[int] = Counter()
    for use, point in zip(spec.uses, spec.points, strict=True):
        used.update(stage for stage in cut.stages_at(point) if stage in stages[use])
    return SplitPlan(
        cut=cut, pp=pp, schedule=schedule, micro_batches=micro_batches,
        tables=make_tables(schedule, pp, micro_batches, len(cut.counts) // pp), stages=stages,
        units=tuple(spec.units), uses=tuple(used[stage] for stage in range(len(cut.counts))),
    )  # fmt: skip


def part_of(spec: ModelSpec, part: PipelinePart) -> ModelSpec:
    """What is left of a whole model's specification to a rank: its units, and how a step uses them."""
    at = {unit: index for index, unit in enumerate(part.numbers)}
    cut = part.split.cut
    places = [cut.stages_at(point) for point in spec.points]
    uses: list[int] = []
    lookups: set[int] = set()
    by_stage: dict[int, list[int]] = {}
    looked_up: dict[int, set[int]] = {}
    for stage in part.stages:
        mine, unneeded = by_stage.setdefault(stage, []), looked_up.setdefault(stage, set())
        for position, (unit, stages) in enumerate(zip(spec.uses, places, strict=True)):
            if stage in stages and stage in part.split.stages[unit]:
                if position in spec.lookups:
                    unneeded.add(len(mine))
                    lookups.add(len(uses) + len(mine))
                mine.append(at[unit])
        uses += mine
    step = unit_uses(part.split.tables[part.index], by_stage, looked_up)
    units = tuple(spec.units[unit] for unit in part.numbers)
    return replace(spec, units=units, uses=tuple(uses), lookups=frozenset(lookups), points=(), step=step)


def step_uses(spec: ModelSpec) -> tuple[UnitAccess, ...]:
    """The uses of units in a step, or without a pipeline in a forward and its backward."""
    if spec.step is not None:
        return spec.step
    forward = [UnitAccess(unit) for unit in spec.uses]
    backward = [UnitAccess(unit, position not in spec.lookups) for position, unit in enumerate(spec.uses)]
    return (*forward, *reversed(backward))


METHODS = ("parameters", "uniform", "type:REGEX")
_TYPE = "type:"


def counts_by_method(
    method: str, numels: Sequence[int], class_names: Sequence[str], stages: int
) -> tuple[int, ...]:  # fmt: skip
    """Return how many layers each of `stages` stages gets.

    method: what a layer costs. "parameters": its elements; "uniform": one; "type:REGEX": one if the expression is found
    in the name of its class in any case of letters, else nothing. numels, class_names: of each layer, in order.

    Among the divisions with the least maximum, costs are as equal as can be. ConfigError for another method, for an
    expression that no layer matches, and for fewer layers than stages.
    """
    if len(class_names) < stages:
        raise ConfigError(
            f"{len(class_names)} layers cannot be divided among {stages} stages, of which none may be empty: set "
            f"parallel.pipeline x parallel.virtual_stages to at most {len(class_names)}, or make more layers"
        )
    return balance(_costs(method, numels, class_names), stages)


def _costs(method: str, numels: Sequence[int], class_names: Sequence[str]) -> list[float]:
    named = method.lower()
    if named == "uniform":
        return [1.0] * len(class_names)
    if named == "parameters":
        return [float(numel) for numel in numels]
    if not named.startswith(_TYPE):
        raise ConfigError(f"partition_method is {method!r}; the methods are {', '.join(METHODS)}")
    # The expression itself keeps its case: in classes such as \D and \d it means different things.
    expression = method[len(_TYPE) :]
    try:
        pattern = re.compile(expression, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"partition_method {method!r} is no regular expression: {error}") from None
    costs = [float(pattern.search(name) is not None) for name in class_names]
    if not any(costs):
        raise ConfigError(
            f"partition_method {method!r} matches no layer; the layers' classes are "
            f"{listed(list(dict.fromkeys(class_names)), 8)}"
        )
    return costs
