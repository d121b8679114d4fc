"""Activations, measured: what a module's forward and backward need beside parameters and their gradients.

Two ways. One pass on fake tensors, which have shapes and no memory: every operation runs on shapes alone, so a model of
any size, on the meta device too, is measured in seconds on any machine. It runs on a copy of the modules, so that
nothing that a forward writes stays behind: buffers, attributes, counters, random numbers. A storage counts from the
operation that creates it until its last tensor is freed. Parameters, buffers and inputs do not count. Gradients of
parameters do not count either, because the plan counts them separately. Memory that a kernel allocates and frees inside
one operation is not measured.

Where a forward cannot run on shapes (routing of a mixture of experts), `LiveBytes` counts what the real one makes and
keeps.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.errors import ConfigError
from infinity.plan.activation_bytes import Activations, BlockActivations
from infinity.plan.allocator import PROCESS
from infinity.zero.activation_checkpoint import Checkpointing
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
    holds_output: bool = False,
) -> Activations:  # fmt: skip
    """As `measure_activations`, of any call.

    model: may belong to an engine, whose hooks and whose replaced forwards the copy does not have. recomputed: paths of
    the blocks that our own checkpointing computes again, and keep_ops what it keeps of them; `inputs` counts them.
    blocks: paths of the blocks between which a pipeline may cut, for the same figures by block. training: as it is
    trained, also where the model evaluates now. holds_output: as a program does that keeps the output until backward is
    over.
    """
    try:
        one = _Pass(model, dtype, recomputed=recomputed, blocks=blocks, holds_output=holds_output)
        if training:
            one.model.train()
        with _random_state(), closing(Checkpointing(one.model, recomputed, keep_ops=keep_ops)):
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
        self._watched[key] = weakref.ref(storage, self._gone(key, number))
        self._created(number, nbytes)

    def _gone(self, key: int, number: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            found = self._live.get(key)
            if found is not None and found[0] == number:
                del self._live[key], self._watched[key]
                self._created(number, -found[1])

        return gone


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

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the pass."""
        args, kwargs = tree_map_only(Tensor, self._input, (tuple(args), dict(kwargs)))
        for param in self._params:
            param.register_hook(self._is_gradient)
        self._watch_modules()
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
            leaves = [at for at, (after, _) in enumerate(node.next_functions) if _accumulates(after)]
            if leaves:
                node.register_hook(self._contributed(leaves))
            stack += [after for after, _ in node.next_functions]

    def _contributed(self, leaves: list[int]) -> Callable[..., None]:
        def contributed(grad_inputs: tuple[Tensor | None, ...], _: Any) -> None:
            for at in leaves:
                if (grad := grad_inputs[at]) is not None:
                    self._is_gradient(grad)

        return contributed

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
            module.register_forward_pre_hook(self._enter(path, type(module).__name__, at.get(path)), with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, path: str, name: str, own: int | None) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            block = own if own is not None else (self._modules[-1][1] if self._modules else -1)
            if path in self._recomputed or own is not None:
                given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
                self._inputs[path] = max((value.nbytes for value in given if value.is_floating_point()), default=0)
            self._modules.append((name, block))

        return enter

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
        self._begun: list[Counter[int]] = []
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
        if nbytes > 0:
            if self._begun:
                self._begun[-1][nbytes] += 1
            self._limit(self.nbytes)

    def _begin(self, *_: Any) -> None:
        self._begun.append(Counter())

    def _end(self, *_: Any) -> None:
        if self._begun:
            made = self._begun.pop()
            # Backward of its widest operation has a gradient that comes in and one that goes out.
            made.update({max(made): 2} if made else {})
            self._moments.append((self._made, made))


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


def _accumulates(node: Any) -> bool:
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


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
