"""A micro-batch's activations: known before they are allocated, or refused on all ranks while nothing is lost.

A plan is made before any batch is seen. What shows one at the start (`memory.activations.sequence_length`, training
data where memory is short) is measured there. Otherwise the first forward is: on fake tensors before it begins where
memory is short, else by counting what autograd saves while it runs, which ends where that passes the limit. A batch
with a larger tensor than all before is looked at again.

Activations are what a module's forward and backward need beside parameters and their gradients. There are two ways to
measure them. One pass on fake tensors, which have shapes and no memory: every operation runs on shapes alone, so a
model of any size, on the meta device too, is measured in seconds on any machine. It runs on a copy of the modules, so
that nothing that a forward writes stays behind: buffers, attributes, counters, random numbers. A storage counts from
the operation that creates it until its last tensor is freed. Parameters, buffers and inputs do not count. Gradients of
parameters do not count either, because the plan counts them separately. Memory that a kernel allocates and frees inside
one operation is not measured.

Where a forward cannot run on shapes (routing of a mixture of experts), `LiveBytes` counts what the real one makes and
keeps.

At the end is what a training process takes beside its plan, forecast before anything is allocated.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.base.sizes import Share, format_bytes
from infinity.config import ResolvedConfig
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.consistency import Veto, Vetoed
from infinity.engine import micro_batches
from infinity.errors import CapacityError, ConfigError
from infinity.memory.ledger import Ledger
from infinity.memory.partition import DTYPES
from infinity.memory.tiers.device import Device
from infinity.parallel.sequence import SequenceAxis, ShapesOnly
from infinity.plan.activations import Activations, BlockActivations, OffloadedCheckpoints
from infinity.plan.capacity import PROCESS, Capacity
from infinity.plan.capacity_report import less_activations
from infinity.plan.inputs import ANONYMOUS_OVERHEAD_NBYTES, PlanInputs, Reserve
from infinity.plan.pipeline import make_tables
from infinity.plan.plan import Plan
from infinity.plan.spec import dtype_name
from infinity.plan.stages import PipelinePlace, StageCut
from infinity.plan.types import Tier
from infinity.tiling import sequences
from infinity.zero.activation_checkpoint import Checkpointing
from infinity.zero.compiled import CompiledModules
from infinity.zero.coordinator import Coordinator
from infinity.zero.deferred_init import init_of
from infinity.zero.parameter import is_released

_OUTSIDE = "(outside any module)"
# Whose hooks take part in a forward: a loss in tiles, inputs of recomputed blocks that require a gradient.
_COMPUTING = ("infinity.tiling.", "peft.", "transformers.")


def measure_activations(
    model: nn.Module, batch: Mapping[str, Any], *, dtype: torch.dtype | None = None
) -> Activations:  # fmt: skip
    """Measure one micro-batch: `model(**batch)`, then backward of its loss, in the model's current mode.

    model: real or on the meta device; it is not changed. batch: keyword arguments; their tensors may be on the meta
    device too. dtype: of floating-point parameters, if it differs from the model's. The loss is the output, its
    `.loss`, or its first element; an output that is no scalar gets a gradient for each of its tensors.

    `parts` are bytes kept for backward, by the class of the module that made them. Raises ConfigError if the model
    cannot be copied, or if its forward depends on values (routing of a mixture of experts, `.item()`), which fake
    tensors do not have; for the architectures that it knows, `estimators.activations` has closed forms.
    """
    return measure_call(model, (), batch, dtype=dtype)


def measure_call(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, dtype: torch.dtype | None = None,
    recomputed: Sequence[str] = (), keep_ops: Sequence[str] = (), blocks: Sequence[str] = (), training: bool = False,
    holds_output: bool = False, parts: int = 1,
) -> Activations:  # fmt: skip
    """As `measure_activations`, of any call.

    model: may belong to an engine, whose hooks and whose replaced forwards the copy does not have. recomputed: paths of
    the blocks that our own checkpointing computes again, and keep_ops what it keeps of them; `inputs` counts them.
    blocks: paths of the blocks between which a pipeline may cut, for the same figures by block. training: as it is
    trained, also where the model evaluates now. holds_output: as a program does that keeps the output until backward is
    over. parts: ranks that share each sequence; the call is with one rank's part, and with its `position_ids`.
    """
    try:
        one = _Pass(model, dtype, recomputed=recomputed, blocks=blocks, holds_output=holds_output)
        if training:
            one.model.train()
        shared = SequenceAxis(one.model, ShapesOnly("sequence", size=parts))
        checkpointing = Checkpointing(one.model, recomputed, keep_ops=keep_ops)
        with _random_state(), closing(shared), closing(checkpointing):
            one.run(args, kwargs)
    except Exception as error:
        # Whatever the program's forward raises on values that are not there.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"the activations of {type(model).__name__} cannot be measured on shapes alone: {reason}. "
            "Use the closed forms of estimators.activations, or measure a pass that does not depend on values"
        ) from error
    return one.found()


@contextmanager
def _random_state() -> Iterator[None]:
    """A forward may draw numbers: those of the program go on as if it had not."""
    state = random.getstate()
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        random.setstate(state)


class _Tracker(TorchDispatchMode):
    """Tracks every storage that an operation creates, until its last tensor is freed."""

    def __init__(self) -> None:
        super().__init__()
        # Storages that live: number of the creation, in the order of creations, bytes, and the module that made it.
        self._live: dict[int, tuple[int, int, tuple[str, int]]] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._made = 0
        # The modules that are running, by class, with the block of each, or -1.
        self._modules: list[tuple[str, int]] = []

    def _created(self, number: int, nbytes: int) -> None:
        """A storage was created, or freed (negative)."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            # What no operation has made: weights, buffers, the batch.
            if not self._knows(storage):
                self._watched[id(storage)] = weakref.ref(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if not self._knows(storage):
                self._see(storage)
        self._ran(func, (args, kwargs), result)
        return result

    def _ran(self, func: Any, given: Any, result: Any) -> None:
        """An operation is over."""

    def _knows(self, storage: torch.UntypedStorage) -> bool:
        found = self._watched.get(id(storage))
        return found is not None and found() is storage

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        number, self._made = self._made, self._made + 1
        self._live[key] = (number, nbytes, self._modules[-1] if self._modules else (_OUTSIDE, -1))
        self._watched[key] = weakref.ref(storage, partial(self._gone, key, number))
        self._created(number, nbytes)

    def _gone(self, key: int, number: int, _: Any) -> None:
        found = self._live.get(key)
        if found is not None and found[0] == number:
            del self._live[key], self._watched[key]
            self._created(number, -found[1])


class _Taken:
    """What living pieces take of the process's memory at most: small ones that are freed stay with its allocator."""

    def __init__(self) -> None:
        self._now = [0, 0]
        self._most = [0, 0]

    def add(self, nbytes: int, count: int = 1) -> None:
        """So many pieces more live, or fewer (negative)."""
        for at, part in enumerate(PROCESS.parts(nbytes)):
            self._now[at] += part * count
            self._most[at] = max(self._most[at], self._now[at])

    @property
    def most(self) -> int:
        return sum(self._most)


class _Pass(_Tracker):
    """One forward and backward of a copy of a model on fake tensors; tracks every storage that is created."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None, *, recomputed: Sequence[str], blocks: Sequence[str],
        holds_output: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self._holds_output = holds_output
        # Not entered as a context: operations without fake arguments are computed, so masks have values.
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        memo: dict[int, Any] = {id(buffer): _fake(buffer, self._fakes) for buffer in model.buffers()}
        memo |= {id(param): _fake(param, self._fakes, dtype) for param in model.parameters()}
        self._params = [fake for fake in memo.values() if fake.requires_grad]
        self.model = copy.deepcopy(model, memo)
        # What was created (positive) and freed: number and bytes, and where forward ended.
        self._events: list[tuple[int, int]] = []
        # Numbers of the storages that were gradients of parameters.
        self._gradients: set[int] = set()
        # What lives between forward and backward.
        self._kept: list[tuple[int, int, tuple[str, int]]] = []
        self._recomputed, self._blocks = frozenset(recomputed), tuple(blocks)
        self._inputs: dict[str, int] = {}
        # By block, of linear layers: bytes of inputs and outputs.
        self._linear: Counter[int] = Counter()
        self._watch_modules()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the pass."""
        args, kwargs = tree_map_only(Tensor, self._input, (tuple(args), dict(kwargs)))
        for param in self._params:
            param.register_hook(self._is_gradient)
        with self:
            output = self.model(*args, **kwargs)
            tensors, grads = _to_differentiate(output)
            if not self._holds_output:
                del output
            self._kept = [*self._live.values()]
            self._watch_contributions(tensors)
            if tensors:
                torch.autograd.backward(tensors, grads)

    def found(self) -> Activations:
        """What the pass took."""
        now = peak = 0
        taken = _Taken()
        for number, nbytes in self._events:
            if number not in self._gradients:
                now += nbytes
                peak = max(peak, now)
                taken.add(abs(nbytes), 1 if nbytes > 0 else -1)
        kept: Counter[str] = Counter()
        for number, nbytes, (name, _) in self._kept:
            kept[name] += nbytes if number not in self._gradients else 0
        saved = kept.total()
        parts = {name: nbytes for name, nbytes in kept.most_common() if nbytes}
        return Activations(
            nbytes=peak, saved_nbytes=saved, source="measured shapes of one pass",
            parts={**parts, "temporaries": peak - saved} if peak > saved else parts,
            gaps_nbytes=max(taken.most - peak, 0),
            inputs=len(self._recomputed), input_nbytes=max(self._inputs.values(), default=0),
            blocks=self._by_block(saved, peak) if self._blocks else None,
        )  # fmt: skip

    def _by_block(self, saved: int, peak: int) -> BlockActivations:
        """The same by block. What is measured beyond the end of forward is the loss's, or a block's backward where
        blocks are computed again.
        """
        each: Counter[int] = Counter()
        for _, nbytes, (_, block) in self._kept:
            each[block] += nbytes
        at, beyond = range(len(self._blocks)), peak - saved
        flags, head = tuple(path in self._recomputed for path in self._blocks), saved - sum(each[block] for block in at)
        again = [head + beyond if flag else 0 for flag in flags]
        return BlockActivations(
            saved=tuple(each[block] for block in at), deferred=tuple(self._linear[block] for block in at),
            saves_input=flags, recomputed=flags,
            working=tuple(max(each[block], again[block]) for block in at),
            boundary_nbytes=max(self._inputs.values(), default=0), head_nbytes=head, loss_nbytes=head + beyond,
            head_deferred=self._linear[-1],
        )  # fmt: skip

    def _created(self, number: int, nbytes: int) -> None:
        self._events.append((number, nbytes))

    def _input(self, tensor: Tensor) -> Tensor:
        """Return a fake of a floating-point input; other inputs keep their values (zeros for meta tensors)."""
        if tensor.is_floating_point():
            return _fake(tensor, self._fakes)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor

    def _is_gradient(self, grad: Tensor) -> None:
        found = self._live.get(id(grad.untyped_storage()))
        if found is not None:
            self._gradients.add(found[0])

    def _watch_contributions(self, tensors: Sequence[Tensor]) -> None:
        """Mark the parts of tied weights' gradients, which autograd adds before the parameter's own hook runs."""
        seen, stack = set(), [tensor.grad_fn for tensor in tensors]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaves = [
                at for at, (after, _) in enumerate(node.next_functions)
                if after is not None and after.name() == "torch::autograd::AccumulateGrad"
            ]  # fmt: skip
            if leaves:
                node.register_hook(partial(self._contributed, leaves))
            stack += [after for after, _ in node.next_functions]

    def _contributed(self, leaves: list[int], grad_inputs: tuple[Tensor | None, ...], _: Any) -> None:
        for at in leaves:
            if (grad := grad_inputs[at]) is not None:
                self._is_gradient(grad)

    def _watch_modules(self) -> None:
        """Track which module is running, and in which block. Of the copy's other hooks those stay that are a part of
        what the model computes; the rest are the engine's, or tell the program what its model computes.
        """
        at = {path: index for index, path in enumerate(self._blocks)}
        for path, module in self.model.named_modules():
            for hooks in (
                module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
            ):
                told = [key for key, hook in hooks.items() if not str(hook.__module__).startswith(_COMPUTING)]
                for key in told:
                    del hooks[key]
            module.register_forward_pre_hook(partial(self._enter, path, at.get(path)), with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(
        self, path: str, own: int | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        block = own if own is not None else (self._modules[-1][1] if self._modules else -1)
        if path in self._recomputed or own is not None:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            self._inputs[path] = max((value.nbytes for value in given if value.is_floating_point()), default=0)
        self._modules.append((type(module).__name__, block))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _, block = self._modules.pop() if self._modules else ("", -1)
        if isinstance(module, nn.Linear) and args and isinstance(output, Tensor):
            self._linear[block] += args[0].nbytes + output.nbytes


class LiveBytes(_Tracker):
    """What a forward holds while it runs, and what its backward will: in place of a pass on shapes where none can be.

    Backward goes through the operations from the last to the first. At each of them lives what the operations up to it
    have made and autograd keeps, with the gradients of what this one took and gave; at a block that is computed again,
    what its forward made in place of those.

    limit: called with the bytes of the storages that live, whenever they have grown; it may raise. recomputed: paths of
    the blocks that backward computes again; each keeps its input alone, and its backward has what its forward made.
    """

    def __init__(self, model: nn.Module, recomputed: Sequence[str], limit: Callable[[int], None]) -> None:
        super().__init__()
        self._limit = limit
        self._blocks = [*map(model.get_submodule, recomputed), *filter(_recomputes_itself, model.modules())]
        self._begun: list[_Recomputed] = []
        self.nbytes = 0
        # Moments of backward: how many storages were made until then, and the sizes of what lives beside them.
        self._moments: list[tuple[int, Counter[int]]] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in the block."""
        handles = [block.register_forward_pre_hook(self._begin) for block in self._blocks]
        handles += [block.register_forward_hook(self._end, always_call=True) for block in self._blocks]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: functions that the program has compiled stay compiled while it counts."""
        return True

    def _see(self, storage: torch.UntypedStorage) -> None:
        # What a compiler traces has no memory.
        if storage.device.type != "meta":
            super()._see(storage)

    def _ran(self, func: Any, given: Any, result: Any) -> None:
        if func.is_view or not any(each.requires_grad for each in _tensors(given)):
            return
        beside = Counter(each.nbytes for each in _tensors(result) if each.is_floating_point())
        # A sum hands the gradient that it gets on as it is.
        if func.overloadpacket is not torch.ops.aten.add:
            beside.update(each.nbytes for each in _tensors(given) if each.requires_grad and not each.is_leaf)
        self._moments.append((self._made, beside))

    def found(self, source: str) -> Activations:
        """What lives at the end of forward, and at the busiest moment of backward."""
        kept = sorted(self._live.values())
        saved = sum(nbytes for _, nbytes, _ in kept)
        most = at = now = 0
        taken = _Taken()
        for made, beside in self._moments:
            while at < len(kept) and kept[at][0] < made:
                now += kept[at][1]
                taken.add(kept[at][1])
                at += 1
            most = max(most, now + sum(nbytes * count for nbytes, count in beside.items()))
            for sign in (1, -1):
                for nbytes, count in beside.items():
                    taken.add(nbytes, sign * count)
        most = max(most, saved)
        parts = {"saved": saved, "temporaries": most - saved}
        return Activations(most, parts, source, saved_nbytes=saved, gaps_nbytes=max(taken.most - most, 0))

    def _created(self, number: int, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._begun:
            self._begun[-1].created(number, nbytes)
        if nbytes > 0:
            self._limit(self.nbytes)

    def _begin(self, *_: Any) -> None:
        self._begun.append(_Recomputed(recorded=torch.is_grad_enabled()))

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._begun:
            given = max((each.nbytes for each in _tensors(output) if each.is_floating_point()), default=0)
            self._moments.append((self._made, self._begun.pop().again(given)))


@dataclass(slots=True)
class _Recomputed:
    """A block whose forward runs, and which backward will run again.

    recorded: whether autograd records it. made: sizes of what it has made and backward makes again. Of what tiles and
    functions of autograd make in it, backward has what they leave, and what is there at a time.
    """

    recorded: bool
    made: Counter[int] = field(default_factory=Counter)
    # Of tiles and functions: sizes of what lives, by number, and of what lived at the busiest moment.
    within: dict[int, int] = field(default_factory=dict)
    busiest: Counter[int] = field(default_factory=Counter)
    now: int = 0
    most: int = 0

    def created(self, number: int, nbytes: int) -> None:
        """A storage was created, or freed (negative)."""
        if nbytes > 0:
            self.made[nbytes] += 1
            if self.recorded and (sequences.tiles_running or not torch.is_grad_enabled()):
                self.within[number] = nbytes
                self.now += nbytes
        elif self.within.pop(number, 0):
            self.made[-nbytes] -= 1
            self.now += nbytes
        if self.now > self.most:
            self.most, self.busiest = self.now, Counter(self.within.values())

    def again(self, output_nbytes: int) -> Counter[int]:
        """Return the sizes of what its backward has. output_nbytes: of the tensor that it hands on."""
        found = +self.made + (self.busiest - Counter(self.within.values()))
        # Backward of its widest operation has a gradient that comes in and one that goes out, beside that of the
        # block's output, which also goes around the operation.
        found.update({max(found): 2} if found else {})
        found.update({output_nbytes: 1})
        return found


def _recomputes_itself(module: nn.Module) -> bool:
    """Whether it is a block for which transformers' own checkpointing is on."""
    flags = [getattr(each, "gradient_checkpointing", False) is True for each in module.modules()]
    return flags[0] and not any(flags[1:])


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Those of the tensors in `values` that have one: sparse and nested tensors have none of their own."""
    for each in tree_leaves(values):
        if isinstance(each, Tensor) and each.layout is torch.strided:
            with suppress(NotImplementedError, RuntimeError):
                yield each.untyped_storage()


def _to_differentiate(output: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """The tensors that backward begins at, with their gradients (None: a scalar's)."""
    loss = _loss(output)
    if loss is not None and loss.numel() == 1:
        return ([loss], [None]) if loss.requires_grad else ([], [])
    tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    return tensors, [torch.ones_like(each) for each in tensors]


def _fake(tensor: Tensor, fakes: FakeTensorMode, dtype: torch.dtype | None = None) -> Tensor:
    """Return a fake of the same shape, in `dtype` or the tensor's own, on the CPU if the tensor is meta."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with fakes:
        if isinstance(tensor, nn.Parameter) and is_released(tensor):
            # It has no strides while its values are elsewhere.
            fake = torch.empty(tensor.shape, dtype=dtype, device=device)
        else:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad)


def _loss(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    return loss if isinstance(loss, Tensor) else None


def set_aside(
    config: ResolvedConfig, model: nn.Module, device: Device, free: Capacity, *, taken_nbytes: int,
    found: Activations | None = None, unknown_nbytes: int = 0,
) -> Reserve:  # fmt: skip
    """Return what this process takes beside its plan.

    free: what is free for this rank. taken_nbytes: in memory before the engine. found: a micro-batch's activations,
    where one is known. unknown_nbytes: to set aside for them where none is, and the configuration says nothing.
    """
    stated = config.sections.memory.activations.max_bytes
    init = init_of(list(model.parameters()))
    floating = [param.dtype for param in model.parameters() if param.is_floating_point()]
    held_max = init.held_nbytes_max if init is not None else None
    if init is None and all(param.device.type != "cpu" for param in model.parameters()):
        held_max = 0
    reserve = Reserve(
        taken_nbytes=taken_nbytes, overhead_nbytes=ANONYMOUS_OVERHEAD_NBYTES, activation_nbytes=unknown_nbytes,
        product_nbytes=0 if device.is_accelerator else _product_nbytes(model, config.compute_dtype),
        gaps_nbytes=int(device.allocator.free_gaps * (free.device or 0)),
        model_dtype=dtype_name(floating[0]) if floating else "fp32", model_nbytes_max=held_max,
    )  # fmt: skip
    if stated is not None:
        nbytes = stated.of(free.device or 0) if isinstance(stated, Share) else stated
        return replace(reserve, activation_nbytes=nbytes, activations="memory.activations.max_bytes")
    return reserve if found is None else with_activations(reserve, found, config, device, free)


def with_activations(
    reserve: Reserve, found: Activations, config: ResolvedConfig, device: Device, free: Capacity
) -> Reserve:  # fmt: skip
    """The same with a micro-batch's activations, which checkpoints on another tier leave."""
    elsewhere, tier = 0, Tier.named(config.checkpoint_tier)
    if not tier.on_device:
        elsewhere = OffloadedCheckpoints(tier, found.inputs, found.input_nbytes).freed_nbytes
    return replace(
        reserve, activation_nbytes=found.nbytes - elsewhere, activations=found.source,
        checkpoint_nbytes=elsewhere if tier is Tier.CPU else 0,
        gaps_nbytes=reserve.gaps_nbytes if device.own_memory else found.gaps_nbytes,
    )  # fmt: skip


def _product_nbytes(model: nn.Module, dtype: str) -> int:
    """What the largest gradient of a weight takes beside itself on a CPU without instructions for its 16 bits: there
    torch has the whole product in fp32 first.
    """
    has = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}.get(dtype)
    if has is None or getattr(torch.ops.mkldnn, has)():
        return 0
    weights = (
        param for module in model.modules() if not isinstance(module, nn.Embedding)
        for param in module.parameters(recurse=False) if param.requires_grad and param.ndim > 1
    )  # fmt: skip
    # Of the experts that lie in one tensor, one at a time.
    shapes = (weight.shape[-2:] if weight.ndim == 3 else weight.shape for weight in weights)
    return max((4 * math.prod(shape) for shape in shapes), default=0)


def place_of(cut: StageCut | None, config: ResolvedConfig, index: int) -> PipelinePlace | None:
    """Return the place of a rank on the pipeline axis; None without a cut. ConfigError for an impossible schedule."""
    if cut is None:
        return None
    parallel = config.sections.parallel
    tables = make_tables(parallel.schedule, config.pipeline, config.accumulation, parallel.virtual_stages)
    return PipelinePlace(cut, tables, index)


def deferred_nbytes(model: nn.Module) -> int:
    """Return the bytes of values in memory that no parameter shows; they go, too."""
    init = init_of(list(model.parameters()))
    return 0 if init is None else init.released_nbytes


# Positional and keyword arguments of a model.
Call = tuple[Sequence[Any], Mapping[str, Any]]
Shapes = tuple[tuple[int, ...], ...]


def stated_batch(config: ResolvedConfig, model: nn.Module) -> dict[str, Tensor] | None:
    """Return a micro-batch of the configured length, for a model that takes `input_ids`; None without either. Of ranks
    that share each sequence, the first one's part.
    """
    length = config.sections.memory.activations.sequence_length
    takes = inspect.signature(model.forward).parameters
    if length is None or "input_ids" not in takes:
        return None
    tokens = torch.zeros(config.micro_batch, -(-length // config.sequence), dtype=torch.long, device="cpu")
    found = {name: tokens for name in ("input_ids", "labels") if name in takes}
    if config.sequence > 1 and "position_ids" in takes:
        found["position_ids"] = torch.arange(tokens.shape[1], device="cpu").expand(config.micro_batch, -1)
    return found


def on_shapes(
    config: ResolvedConfig, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: Device, *,
    recomputed: Sequence[str], blocks: Sequence[str] = (), training: bool = False,
) -> Activations | None:  # fmt: skip
    """Measure a call on fake tensors, in the precision of the run; None where the model cannot run on them.

    training: as it is trained, also where the model evaluates now.
    """
    if config.sections.sparse_attention is not None:
        # Which blocks are computed depends on positions and padding; the model's own masks may be larger than memory.
        return None
    if config.casts_inputs:
        args = micro_batches.half(tuple(args))
    with micro_batches.autocast(config.sections.torch_autocast, device.torch), torch.enable_grad():
        try:
            found = measure_call(
                model, args, kwargs, dtype=DTYPES[config.compute_dtype], recomputed=recomputed, blocks=blocks,
                keep_ops=config.sections.activation_checkpointing.keep_ops, training=training,
                holds_output=not blocks, parts=config.sequence,
            )  # fmt: skip
        except ConfigError:
            return None
    return replace(found, source=f"{_in_words(shapes_of(args, kwargs))}, measured")


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """The shapes of a call's tensors, in order."""
    return tuple(tuple(each.shape) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))


class SharedCapacityError(CapacityError):
    """A CapacityError that all ranks raise, so that none of them waits for another."""


class FirstBatch:
    """Looks at the first micro-batch of a run, and at each that is larger than those before."""

    def __init__(
        self, inputs: PlanInputs, plan: Plan, model: nn.Module, coordinator: Coordinator, compiled: CompiledModules,
        group: AxisGroup, device: Device, ledger: Ledger,
    ) -> None:  # fmt: skip
        self._inputs, self._plan, self._model, self._compiled = inputs, plan, model, compiled
        self._coordinator, self._device, self._ledger = coordinator, device, ledger
        # All ranks come to the first forward, and to each gather in it.
        self._group = group if plan.policy.collective_forward and group.size > 1 else None
        self._first = True
        # Why this rank objects. Never raised itself: its traceback would keep what the forward has made.
        self._objection: CapacityError | None = None
        # The largest batches that were looked at; one that `initialize` has measured is known.
        tokens = stated_batch(inputs.config, model) if inputs.reserve.activations.endswith("measured") else None
        self._seen = [] if tokens is None else [shapes_of((), tokens)]
        free, reserve = inputs.free, inputs.reserve
        ledger.forecast(ledger.predicted_nbytes, reserve.activation_nbytes, reserve.activations)
        gaps = int(device.allocator.free_gaps * (free.device or 0))
        beside = free.left({Tier.CPU: reserve.overhead_nbytes, Tier.GPU: reserve.product_nbytes + gaps})
        self._room = None if free.device is None else beside.room(Tier.GPU, plan.nbytes_by_tier())
        # On fake tensors a whole model runs.
        self._whole = inputs.axis.size == 1 and inputs.cut is None
        self._tight = self._room is not None and self._room < (free.device or 0) // 4

    @contextmanager
    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Around a forward. CapacityError if the activations of its batch do not fit; in the first forward all ranks
        raise it if one of them has no room.
        """
        shapes = shapes_of(args, kwargs)
        if not torch.is_grad_enabled() or any(_covers(seen, shapes) for seen in self._seen):
            yield
            return
        veto = Veto(self._group, "room for activations") if self._first and self._group is not None else None
        self._objection = None
        try:
            with self._measuring(args, kwargs, shapes, veto):
                yield
        except Vetoed as heard:
            refusal = self._objection or self._refused(Activations(int(heard.said), {}, "on another rank"))
            raise SharedCapacityError(str(refusal)) from None
        self._first = False
        self._seen = [seen for seen in self._seen if not _covers(shapes, seen)] + [shapes]

    @contextmanager
    def _measuring(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Shapes, veto: Veto | None
    ) -> Iterator[None]:
        """Measure a forward on shapes before it runs, or count while it does."""
        # The operations of a compiled module cannot be seen.
        counts = not self._compiled.active
        found = None
        if self._whole and (self._tight or not counts):
            inputs = self._inputs
            found = on_shapes(
                inputs.config, self._model, args, kwargs, self._device, recomputed=inputs.checkpointed
            )
        if found is not None or not counts:
            if found is not None:
                self._judge(found, veto)
            yield
        else:
            live = LiveBytes(self._model, self._inputs.checkpointed, partial(self._limit, shapes, veto))
            with live.counting(), self._coordinator.heeding(veto):
                yield
            self._judge(live.found(f"{_in_words(shapes)}, counted"), veto)

    def _limit(self, shapes: Shapes, veto: Veto | None, nbytes: int) -> None:
        if self._room is not None and nbytes > self._room:
            self._object(Activations(nbytes, {}, f"{_in_words(shapes)}, before the end of forward"), veto)

    def _object(self, found: Activations, veto: Veto | None) -> None:
        """CapacityError for what has no room: at once, or with a veto where the ranks ask each other next."""
        if self._objection is not None or self._room is None or sum(self._taken(found)) <= self._room:
            return
        refusal = self._refused(found)
        if veto is None:
            raise refusal
        veto.object(found.nbytes)
        self._objection = refusal

    def _judge(self, found: Activations, veto: Veto | None) -> None:
        self._object(found, veto)
        if veto is not None:
            veto.ask("the forecast")
        reserve = self._with(found)
        predicted = reserve.peak_nbytes(self._plan)
        if predicted >= self._ledger.predicted_nbytes:
            self._ledger.forecast(predicted, reserve.activation_nbytes, reserve.activations)

    def _with(self, found: Activations) -> Any:
        inputs = self._inputs
        return with_activations(inputs.reserve, found, inputs.config, self._device, inputs.free)

    def _taken(self, found: Activations) -> tuple[int, int]:
        """What the activations take, and what the heap of a process loses in gaps between them."""
        reserve = self._with(found)
        return reserve.activation_nbytes, 0 if self._device.own_memory else reserve.gaps_nbytes

    def _refused(self, found: Activations) -> CapacityError:
        free, held = self._inputs.free, self._plan.nbytes_by_tier()
        nbytes, gaps = self._taken(found)
        beside = f" and {format_bytes(gaps)} of gaps in the heap" if gaps else ""
        return CapacityError(
            f"the activations of this micro-batch take {format_bytes(nbytes)} ({found.source}){beside}, "
            f"but {format_bytes(self._room or 0)} of {format_bytes(free.device or 0)} are left for "
            f"them beside the plan's {format_bytes(held[Tier.GPU])}. Weights and states are as they were: go on with a "
            f"smaller batch, or initialize again with less: {less_activations(self._inputs)}"
        )


def _covers(seen: Shapes, shapes: Shapes) -> bool:
    """Whether a call with `shapes` takes no more than one that was seen."""
    return len(seen) == len(shapes) and all(
        len(mine) == len(other) and all(each <= most for each, most in zip(other, mine, strict=True))
        for mine, other in zip(seen, shapes, strict=True)
    )


def _in_words(shapes: Shapes) -> str:
    """The first tensor's shape: "8 x 128"."""
    largest = max(shapes, key=len, default=())
    return " x ".join(f"{each:,}" for each in largest) or "no tensors"
