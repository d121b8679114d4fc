"""The proof that a model can be cut into stages, from one forward on fake tensors that have no memory.

A stage hands on the first argument of the next stage's first block, and nothing else. In the pass, that tensor is
detached in front of every block, so that each block begins a graph of its own. If a later block, or the loss, still
reaches a parameter of an earlier one, values take another way past the boundary: an auxiliary loss of routers, a skip
connection. Such a model would train with wrong gradients and is refused. So is one whose block is called with a tensor
without gradients that an earlier block has answered, such as indices. Weights that are tied across blocks are known by
their names.

The pass also records which modules run in front of the blocks and which behind, and how blocks answer. It runs on
shapes alone: a model of any size, on the meta device too, takes a few seconds.

Where the pipeline axis cuts a model, decided and proven before anything is allocated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.config import ResolvedConfig
from infinity.errors import ConfigError, InfinityError, listed
from infinity.log import logger
from infinity.memory.partition import DTYPES
from infinity.parallel.layers import PipelineModule
from infinity.parallel.stage import FirstArgument, paths_around, position_of_use_cache
from infinity.plan.spec import ModuleNode, UnitRules, module_tree
from infinity.plan.stages import StageCut, cut_model, find_blocks
from infinity.zero.forwards import set_forward

# What a model that cannot be cut does instead.
INSTEAD = "use data or tensor parallelism instead of parallel.pipeline"
_LAYER_DROPS = ("layerdrop", "layer_drop")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a pass has shown of a model: see `StageCut` for `blocks` and `after`, `StagedModel` for `answers`.

    unproven: why nothing is proven; empty if the cut is.
    """

    blocks: tuple[str, ...]
    after: tuple[str, ...]
    answers: Mapping[str, int]
    unproven: str = ""


def record_cut(
    model: nn.Module, blocks: Sequence[str], batch: Mapping[str, Any], dtype: torch.dtype, *,
    stages: Sequence[int] | None = None,
) -> Recorded:  # fmt: skip
    """Run `model(**batch)` on fake tensors and prove that the model can be cut at its blocks.

    model: real or on the meta device, without an engine; it is not changed. blocks: their paths, in order. batch:
    keyword arguments of a micro-batch, with labels if the model computes its loss from them; a short one, because masks
    are computed. dtype: of parameters in the pass. stages: the blocks of each stage, where the user has written them
    (`parallel.stages`): only those boundaries are proven then, and if the pass cannot run, the tree says what runs
    behind the blocks.

    Experts, which a router chooses by values, stand aside. ConfigError if the model cannot be cut, naming the module;
    or if the pass cannot run and `stages` is None.
    """
    if not blocks:
        raise ConfigError(f"{type(model).__name__} repeats no blocks of which stages could be made: {INSTEAD}")
    _refuse_layer_drop(model, blocks)
    root = module_tree(model, compute_dtype="fp32")
    counts = stages or [1] * len(blocks)
    cut = cut_model(root, blocks, len(counts), counts=counts)
    failure = None
    for aside in dict.fromkeys((_data_dependent(root, blocks), ())):
        found = _Pass(model, blocks, dtype)
        try:
            found.run(batch, aside)
        except InfinityError:
            raise
        except Exception as error:
            failure = failure or error
        else:
            return found.prove(cut)
    reason = (str(failure) or type(failure).__name__).splitlines()[0]
    if stages is None:
        raise ConfigError(
            f"the forward of {type(model).__name__} does not run on shapes alone, called as a causal language model is "
            f"with {', '.join(batch) or 'nothing, for it has no vocabulary'}: {reason}. So nothing proves that it can "
            "be cut into stages. If its blocks hand on nothing but their first argument, write parallel.stages, "
            f"the blocks of each stage, and vouch for it; otherwise {INSTEAD}"
        ) from failure
    return Recorded(cut.blocks, cut.after, found.answers(), reason)


class _Pass:
    """One forward on fake tensors, with a graph of its own for each block."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], dtype: torch.dtype) -> None:
        self._model = model
        self._blocks = tuple(blocks)
        self._dtype = dtype
        self._around = paths_around(blocks)
        # Indices of blocks in the order of their calls; of these, how many have ended.
        self._called: list[int] = []
        self._ended = 0
        # By path, how many blocks had been called at the first call of a module outside of them.
        self._first_calls: dict[str, int] = {}
        # By block: what it was called with, and what stands in its place since.
        self._passed: dict[int, tuple[Tensor, ...]] = {}
        self._leaves: dict[int, int] = {}
        self._answers = _Answers()
        self._names: dict[int, list[str]] = {}
        self._tied: dict[str, list[str]] = {}
        self._kept: list[Tensor] = []
        self._loss: list[Tensor] = []

    def run(self, batch: Mapping[str, Any], aside: Sequence[str]) -> None:
        """Run the forward; the modules at `aside` only pass their first argument on."""
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        values: dict[str, Tensor] = {name: _fake(each, fakes) for name, each in self._model.named_buffers()}
        names = {id(each): name for name, each in self._model.named_parameters()}
        for name, param in self._model.named_parameters():
            # Frozen ones, too: their values may not take another way either.
            values[name] = _fake(param, fakes, self._dtype)
            values[name].requires_grad_(param.is_floating_point())
        for name, param in self._model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(values[names[id(param)]]), []).append(name)
        self._tied = {tied[0]: tied for tied in self._names.values()}
        self._kept = [*values.values()]
        inputs = tree_map_only(Tensor, lambda tensor: _input(tensor, fakes), dict(batch))
        if position_of_use_cache(self._model) is not None:
            inputs.setdefault("use_cache", False)
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_plainly_training(self._model))
            stack.enter_context(self._hooks())
            for path in aside:
                stack.enter_context(_standing_aside(self._model.get_submodule(path)))
            output = functional_call(self._model, values, kwargs=inputs, tie_weights=True)
        # The loss, or the first tensor of the output that has a gradient.
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        tensors = [each for each in tree_leaves(output if loss is None else loss) if isinstance(each, Tensor)]
        self._loss = [each for each in tensors if each.requires_grad][:1]

    def prove(self, cut: StageCut) -> Recorded:
        """Return what was recorded; ConfigError for a model that cannot be cut. cut: its stages."""
        if self._called != [*range(len(self._blocks))]:
            called = listed([self._blocks[index] for index in self._called], 8) or "none"
            raise ConfigError(
                f"stages need a model that calls its blocks once each, in their order ({listed(self._blocks, 3)}), but "
                f"{type(self._model).__name__} calls {called}: {INSTEAD}"
            )
        ends = [*(self._passed[index] for index in range(1, len(self._blocks))), self._loss]
        reached = [[*dict.fromkeys(self._reached(tensors))] for tensors in ends]
        after = self._after(reached)
        cut = replace(cut, after=after)
        places = [stage for stage, count in enumerate(cut.counts) for _ in range(count)]
        for index, (block, found) in enumerate(zip(self._blocks, reached, strict=True)):
            # A block's own parameters need no look.
            inside = f"{block}."
            others = [name for name in found if isinstance(name, int) or not name.startswith(inside)]
            held = {name: self._held(name, cut, places) for name in others}
            astray = [name for name in others if places[index] not in held[name]]
            if astray:
                # What the latest stage has is nearest, and a parameter tells more than a tensor that enters a block.
                name = max(astray, key=lambda name: (isinstance(name, str), max(held[name])))
                user = "its loss" if index + 1 == len(self._blocks) else block
                raise self._side_path(user, f"what enters {self._blocks[name]}" if isinstance(name, int) else name)
            for giver in sorted(self._answers.givers.get(index, ())):
                if places[giver] != places[index]:
                    what = f"what {self._blocks[giver]} answers without gradients (indices, a mask)"
                    raise self._side_path(block, what)
        return Recorded(self._blocks, after, self.answers())

    def answers(self) -> dict[str, int]:
        """By path, the length of the tuple or list with which a block answers; one that has not run, as its class."""
        modules = [self._model.get_submodule(path) for path in self._blocks]
        lengths = self._answers.lengths
        known = {type(modules[index]): length for index, length in lengths.items()}
        return {
            path: lengths.get(index, known.get(type(modules[index]), 0))
            for index, path in enumerate(self._blocks)
        }  # fmt: skip

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        handles: list[Any] = []
        indices = {self._model.get_submodule(path): index for index, path in enumerate(self._blocks)}
        inside = tuple(f"{path}." for path in self._blocks)
        for path, module in self._model.named_modules():
            if path not in self._around and not f"{path}.".startswith(inside):
                handles.append(module.register_forward_pre_hook(partial(self._note, path)))
        for block, index in indices.items():
            before = self._before(block, index)
            handles.append(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.append(block.register_forward_hook(partial(self._behind, index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, path: str, *_: Any) -> None:
        if self._ended == len(self._called):
            self._first_calls.setdefault(path, self._ended)

    def _before(self, block: nn.Module, index: int) -> Callable[..., Any]:
        argument = FirstArgument(block, self._blocks[index])

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._called and index == self._called[-1] + 1:
                self._answers.measure(index - 1, argument.of(args, kwargs))
            self._called.append(index)
            if index == 0:
                return None
            passed = argument.tensors(args, kwargs)
            self._passed.setdefault(index, passed)
            fresh = tuple(each.detach().requires_grad_(each.is_floating_point()) for each in passed)
            self._leaves.update({id(each): index for each in fresh})
            self._kept += fresh
            called = argument.replaced(args, kwargs, fresh)
            self._answers.hand(index, tree_leaves(called))
            return called

        return before

    def _behind(self, index: int, _: nn.Module, args: Any, answer: Any) -> Any:
        self._ended += 1
        return self._answers.add(index, answer)

    def _reached(self, tensors: Sequence[Tensor]) -> Iterator[str | int]:
        """Names of the parameters, and indices of the blocks whose first argument, that tensors are computed from; the
        nearest first.
        """
        seen = set()
        grown = [each for each in tensors if each.requires_grad]
        pending = deque(each.grad_fn or torch.autograd.graph.get_gradient_edge(each).node for each in grown)
        while pending:
            node: Any = pending.popleft()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                leaf = id(node.variable)
                yield from self._names.get(leaf, [])[:1]
                if leaf in self._leaves:
                    yield self._leaves[leaf]
            pending += [following for following, _ in node.next_functions]

    def _after(self, reached: Sequence[Collection[str | int]]) -> tuple[str, ...]:
        """The outermost modules that run behind the blocks. One that is never called, but whose parameters are used,
        belongs there if the loss alone reaches them.
        """
        earlier = {name for found in reached[:-1] for name in found}
        last = {name for name in reached[-1] if isinstance(name, str) and name not in earlier}
        after: list[str] = []

        def visit(path: str, module: nn.Module) -> None:
            for name, child in module.named_children():
                inner = f"{path}.{name}" if path else name
                if inner in self._blocks:
                    continue
                if inner in self._around or not self._is_behind(inner, child, last):
                    visit(inner, child)
                else:
                    after.append(inner)

        visit("", self._model)
        return tuple(sorted(after))

    def _is_behind(self, path: str, module: nn.Module, last: Collection[str]) -> bool:
        inside = [path, *(f"{path}.{name}" for name, _ in module.named_modules() if name)]
        calls = [self._first_calls[each] for each in inside if each in self._first_calls]
        if calls:
            return min(calls) == len(self._blocks)
        return any(f"{path}.{name}" in last for name, _ in module.named_parameters())

    def _held(self, name: str | int, cut: StageCut, places: Sequence[int]) -> set[int]:
        """The stages that have a parameter, under any of its names, or the tensor that enters a block."""
        if isinstance(name, int):
            return {places[name]}
        return {stage for each in self._tied[name] for stage in cut.stages_at(each.rpartition(".")[0])}

    def _side_path(self, user: str, what: str) -> ConfigError:
        return ConfigError(
            f"{type(self._model).__name__} cannot be cut into stages: {user} depends on {what} by another way than the "
            "first argument of the blocks between them (an auxiliary loss of routers, a skip connection), and no other "
            "value crosses a boundary. Turn that off (transformers' routers: output_router_logits=False), or let "
            f"parallel.stages put both into one stage, or {INSTEAD}"
        )


def _refuse_layer_drop(model: nn.Module, blocks: Sequence[str]) -> None:
    for path in sorted(paths_around(blocks), key=len, reverse=True):
        module = model.get_submodule(path)
        for name in _LAYER_DROPS:
            for where, holder in ((path, module), ("config", getattr(module, "config", None))):
                share = getattr(holder, name, None)
                if isinstance(share, float) and share > 0:
                    raise ConfigError(
                        f"{where}.{name} is {share}: LayerDrop leaves out blocks at random, so the model cannot be cut "
                        f"into stages. Set it to 0, or {INSTEAD}"
                    )


def _data_dependent(root: ModuleNode, blocks: Sequence[str]) -> tuple[str, ...]:
    """The paths of the innermost modules inside of blocks whose forward chooses parameters by the data."""
    rules = UnitRules()
    prefixes = tuple(f"{path}." for path in blocks)
    leaves = [node for node in root.walk() if node.path.startswith(prefixes) and rules.is_leaf(node)]
    return tuple(
        node.path for node in leaves if not any(inner is not node and rules.is_leaf(inner) for inner in node.walk())
    )


class _Answers:
    """What blocks answer: how long it is, and where its tensors without gradients go.

    lengths: by block, of a tuple or list whose first element the next block takes; 0 if it takes the answer itself.
    givers: by block, the blocks whose answers without gradients it was called with.
    """

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.givers: dict[int, set[int]] = {}
        self._latest: dict[int, Any] = {}
        # By the identity of a tensor without a gradient, the block that answered it, and the tensor.
        self._marked: dict[int, tuple[int, Tensor]] = {}

    def add(self, index: int, answer: Any) -> Any:
        """Return a block's answer, in which each tensor without a gradient is a new object. No graph tells where such
        a tensor (indices, a mask) comes from, so the object does.
        """

        def mark(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                return tensor
            marked = tensor.detach()
            self._marked[id(marked)] = index, marked
            return marked

        self._latest[index] = answer = tree_map_only(Tensor, mark, answer)
        return answer

    def measure(self, index: int, passed: Any) -> None:
        """Note the length of a block's answer. passed: the next block's first argument."""
        answer = self._latest.pop(index)
        self.lengths[index] = len(answer) if isinstance(answer, (tuple, list)) and passed is not answer else 0

    def hand(self, index: int, values: Sequence[Any]) -> None:
        """Note what a block is called with beside its first argument."""
        self.givers[index] = {self._marked[id(each)][0] for each in values if id(each) in self._marked}


class _Join(torch.autograd.Function):
    """The first of some tensors, in a graph with all of them."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        return first.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("the graph is only looked at")


@contextmanager
def _standing_aside(module: nn.Module) -> Iterator[None]:
    """Let a module answer its first tensor, as if computed from all its arguments and parameters."""
    former = module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        return _Join.apply(*tensors, *module.parameters())

    set_forward(module, forward)
    try:
        yield
    finally:
        set_forward(module, former)


@contextmanager
def _plainly_training(model: nn.Module) -> Iterator[None]:
    """Let a model be in training mode, without transformers' recomputation, which hides what is inside a block."""
    former = [(module, module.training, module.__dict__.get("gradient_checkpointing")) for module in model.modules()]
    model.train()
    for module, _, recomputes in former:
        if recomputes:
            module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, training, recomputes in former:
            module.training = training
            if recomputes:
                module.gradient_checkpointing = recomputes


def _fake(tensor: Tensor, fakes: FakeTensorMode, dtype: torch.dtype | None = None) -> Tensor:
    """Return a fake on the CPU of a tensor's shape, whose values may be elsewhere."""
    with fakes:
        kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        return torch.empty(tensor.shape, dtype=kept, device="cpu")


def _input(tensor: Tensor, fakes: FakeTensorMode) -> Tensor:
    """Return a fake of a floating-point input; others keep their values (zeros for meta tensors)."""
    if tensor.is_floating_point():
        return _fake(tensor, fakes)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor.cpu()


# Tokens of the sequence with which a cut is proven.
_TOKENS = 8


def cut_into_stages(
    model: nn.Module, config: ResolvedConfig, node: ModuleNode, classes: tuple[str, ...]
) -> StageCut | None:  # fmt: skip
    """Return which blocks each stage runs; None where the pipeline axis has one rank.

    node: the tree of what a tensor axis leaves of the model. classes: those that the model calls its blocks.
    ConfigError for a model that cannot be cut so, which a pass on fake tensors shows before anything is allocated.
    """
    if isinstance(model, PipelineModule) and model.num_stages not in (None, config.pipeline):
        raise ConfigError(
            f"PipelineModule(num_stages={model.num_stages}) and parallel.pipeline {config.pipeline} differ: set "
            f"parallel.pipeline (or pipeline.stages) to {model.num_stages}, or leave num_stages out"
        )
    if config.pipeline == 1:
        return None
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} has an encoder and a decoder and is no causal language model: the blocks of its "
            "decoder take what the encoder has computed beside their first argument, and nothing else crosses a "
            f"boundary of stages: {INSTEAD}"
        )
    parallel = config.sections.parallel
    stages, counts = config.pipeline * parallel.virtual_stages, parallel.stages or None
    if isinstance(model, PipelineModule):
        return cut_model(node, model.blocks, stages, counts=counts or model.stage_counts(stages))
    blocks = find_blocks(node, classes)
    cut = cut_model(node, blocks, stages, counts=counts)
    # A short micro-batch of a language model, of shapes alone.
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="cpu")
    has_vocabulary = isinstance(getattr(getattr(model, "config", None), "vocab_size", None), int)
    batch = {"input_ids": tokens, "labels": tokens} if has_vocabulary else {}
    found = record_cut(model, blocks, batch, DTYPES[config.compute_dtype], stages=counts)
    if found.unproven:
        logger.warning(
            "the cut into stages that parallel.stages asks for is not proven, because the model does not run on shapes "
            "alone (%s): what crosses a boundary beside the first argument of a block would be lost",
            found.unproven,
        )
    cut = cut_model(node, blocks, stages, after=found.after, counts=counts)
    return replace(cut, answers=tuple(sorted(found.answers.items())))
