"""Split backward: gradients of linear layers' weights are computed later than gradients of their inputs.

I (`backward_input`) is an ordinary autograd backward in which each `nn.Linear` computes only the gradient of its input;
it queues that input and the gradient of its output. W (`weights`) multiplies what was queued. W needs no weights, no
graph and no module hooks, so a pipeline runs it where the rank would wait otherwise.

Gradients have the bits of an undivided backward. Autograd itself computes outputs and gradients of inputs, with the
weight detached. W calls the operators by which autograd computes gradients of weights, on operands with the same
strides, and adds several uses of one weight in the order in which backward reached them. Gradients that I leaves on
parameters are set aside until W, so that those of different micro-batches do not mix.

[Note: what is saved] An identity function in front of each layer saves the layer's input for backward. Hooks on saved
tensors therefore see the input as usual: torch.utils.checkpoint recomputes a block once, in I, stops as early as it
does without this module, and W finds tensors. A hook on the layer's matrix product passes the gradient of its output to
that identity, whose backward runs next.

All other gradients are computed in I, which is correct and only defers less: of GPT-2's `Conv1D`, of experts in stacked
weights, of weights in tiles or with gradient hooks, of layers whose input needs no gradient, and under autocast. One
case may differ in the last bit: a weight with several deferred uses and another use between them in backward, whose
gradient W adds last.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from infinity.errors import StateError
from infinity.zero.forwards import Replaced

# Classes of autograd's nodes for matrix products, by which it records F.linear.
_PRODUCTS = ("MmBackward0", "AddmmBackward0")


class DeferredWeights:
    """The linear layers of one model, and the queues of micro-batches between I and W.

    It replaces the layers' `forward`, so construct it after the tensor axis has set its own. Layers defer inside
    `collecting` only. A key names one micro-batch in one stage.

    Queued tensors are held, not copied: a tensor that a layer has read (a received activation), or a gradient that came
    into the stage, must not be written to before W. Not thread-safe; autograd may run I's backward on its own threads.
    """

    def __init__(self, model: nn.Module) -> None:
        self._micro_batches: dict[Hashable, _MicroBatch] = {}
        # The one whose forward or backward runs now.
        self._current: _MicroBatch | None = None
        self._layers = [_DeferredForward(module, self) for module in model.modules() if isinstance(module, nn.Linear)]

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Open a block for the forward of a micro-batch.

        Raises:
            StateError: an earlier micro-batch of this key still waits for its W.
        """
        former = self._micro_batches.get(key)
        if former is not None and former.ready:
            raise StateError(
                f"a forward of {key} begins while weight gradients of an earlier one are still queued: iterate over "
                "weights(key) to its end, or call abandon()"
            )
        self._micro_batches[key] = _MicroBatch()
        with self._during(key):
            yield

    @contextmanager
    def backward_input(self, key: Hashable, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Open a block for I, the backward of a micro-batch.

        params: all parameters that the stage trains. After the block their gradients are those of before it; what the
        block left on them waits for W. If the block raises, the micro-batch is dropped.

        Raises:
            StateError: no forward of this key waits for its backward.
        """
        micro_batch = self._micro_batches.get(key)
        if micro_batch is None or micro_batch.ready:
            raise StateError(f"a backward of {key} begins, but no forward of it has run inside collecting()")
        params = [param for param in dict.fromkeys(params) if param.requires_grad]
        before = [_take_gradient(param) for param in params]
        try:
            with self._during(key):
                yield
        except BaseException:
            self._micro_batches.pop(key, None)
            raise
        else:
            micro_batch.end_input({param: _take_gradient(param) for param in params})
        finally:
            for param, grad in zip(params, before, strict=True):
                param.grad = grad

    def weights(self, key: Hashable) -> Iterator[nn.Parameter]:
        """Run W, and yield each parameter once its gradient is complete and has been added to `param.grad`.

        A generator: W runs as the caller iterates, and must be iterated to its end. Parameters whose gradients I has
        computed come first, then weights and biases in the order of backward. The caller may take each gradient away
        before the next one is computed.

        Raises:
            StateError: I has not run.
        """
        micro_batch = self._micro_batches.get(key)
        if micro_batch is None or not micro_batch.ready:
            raise StateError(f"weight gradients of {key} were requested before its backward_input() block has ended")
        try:
            yield from micro_batch.compute()
        finally:
            if self._micro_batches.get(key) is micro_batch:
                del self._micro_batches[key]

    def params(self, key: Hashable) -> list[nn.Parameter]:
        """Return the parameters that `weights(key)` will yield, in any order; [] before I and during W."""
        micro_batch = self._micro_batches.get(key)
        return [*dict.fromkeys((*micro_batch.left, *micro_batch.uses()))] if micro_batch and micro_batch.ready else []

    @property
    def nbytes(self) -> int:
        """Bytes of memory held between I and W; counts each storage once, whole."""
        return _nbytes(tensor for each in self._micro_batches.values() for tensor in each.tensors())

    def nbytes_of(self, key: Hashable) -> int:
        """Return the bytes of the memory that is held for one micro-batch, each storage once."""
        micro_batch = self._micro_batches.get(key)
        return 0 if micro_batch is None else _nbytes(micro_batch.tensors())

    def abandon(self) -> None:
        """Drop all micro-batches, after a step has failed. Backwards of earlier forwards queue nothing any more."""
        self._micro_batches.clear()

    def remove(self) -> None:
        """Drop all micro-batches and restore the layers' own forwards; idempotent."""
        self.abandon()
        while self._layers:
            self._layers.pop().restore()

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `F.linear` of the arguments; defer the gradients of weight and bias where that is possible."""
        if self._current is None or not _defers(input, weight):
            return F.linear(input, weight, bias)
        if input.dim() == 2 or input.is_contiguous():
            return _deferred(self._current, input, weight, bias)
        # Of other inputs, F.linear copies the rows into a matrix only if the weight needs a gradient, and it adds the
        # bias separately.
        output = _deferred(self._current, input.flatten(0, -2), weight, None)
        output = torch.ops.aten._unsafe_view(output, (*input.shape[:-1], weight.shape[0]))
        return output if bias is None else output.add_(bias)

    @property
    def collects(self) -> bool:
        """Whether a block for a forward or a backward is open."""
        return self._current is not None

    @contextmanager
    def _during(self, key: Hashable) -> Iterator[None]:
        outer, self._current = self._current, self._micro_batches[key]
        try:
            yield
        finally:
            self._current = outer


@dataclass(slots=True)
class _MicroBatch:
    """What waits for the W of one micro-batch; `ready` between I and W."""

    products: deque[_Product] = field(default_factory=deque)
    # What I left on parameters.
    left: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    ready: bool = False

    def uses(self) -> Counter[nn.Parameter]:
        """Return how many products each parameter's gradient is the sum of, in the order of backward."""
        return Counter(param for each in self.products for param in (each.weight, each.bias) if param is not None)

    def end_input(self, left: dict[nn.Parameter, Tensor | None]) -> None:
        """I is over; it has left these gradients on parameters."""
        self.left = {param: grad for param, grad in left.items() if grad is not None}
        self.ready = True

    def compute(self) -> Iterator[nn.Parameter]:
        """Add the gradients to those on parameters, and yield each parameter when its own is complete."""
        self.ready = False
        uses = self.uses()
        for param in [param for param in self.left if param not in uses]:
            _add_gradient(param, self.left.pop(param))
            yield param
        sums: dict[nn.Parameter, Tensor] = {}
        while self.products:
            # A function of its own, because a generator's variables would keep gradients alive that the caller takes.
            yield from self._multiply_next(uses, sums)

    def _multiply_next(self, uses: Counter[nn.Parameter], sums: dict[nn.Parameter, Tensor]) -> list[nn.Parameter]:
        """Compute the gradients of the next use and add them to `sums`, the gradients of earlier uses. Count down
        `uses`, and return the parameters that have no further use: their gradients are on them.
        """
        complete = []
        for param, grad in self.products.popleft().gradients():
            sums[param] = sums[param].add_(grad) if param in sums else grad
            uses[param] -= 1
            if not uses[param]:
                if param in self.left:
                    sums[param].add_(self.left.pop(param))
                _add_gradient(param, sums.pop(param))
                complete.append(param)
        return complete

    def tensors(self) -> Iterator[Tensor]:
        for each in self.products:
            yield from (each.x, each.grad)
        yield from self.left.values()


class _Product:
    """One use of a layer whose backward has run: x [..., in] and the gradient of its output [rows, out]."""

    __slots__ = ("bias", "grad", "state", "weight", "x")

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, grad: Tensor) -> None:
        # Detached: it would keep the graph in front of it alive.
        self.weight, self.bias, self.x, self.grad = weight, bias, x.detach(), grad
        self.state = self._state()

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the gradients of weight and bias, computed as autograd does."""
        if self.state != self._state():
            raise StateError(
                f"the input {tuple(self.x.shape)} of a linear layer, or the gradient of its output, was changed or "
                "freed after backward and before its weight's gradient was computed: keep both as they are until then"
            )
        found = [(self.weight, self.grad.t().mm(self.x.flatten(0, -2)))]
        if self.bias is not None:
            found.append((self.bias, self.grad.sum_to_size(self.bias.shape)))
        return found

    def _state(self) -> tuple[int, int, int]:
        # A released weight, of which x might be a view, has no bytes.
        return self.x._version, self.grad._version, self.x.untyped_storage().nbytes()


class _Use:
    """One use of a layer whose forward has run. Called with the gradient of its output in backward."""

    __slots__ = ("bias", "grad", "micro_batch", "weight")

    def __init__(self, micro_batch: _MicroBatch, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.micro_batch, self.weight, self.bias = micro_batch, weight, bias
        self.grad: Tensor | None = None

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        self.grad = grads[0]

    def queue(self, x: Tensor) -> None:
        """Let W compute the gradients of weight and bias. `x`: the layer's input."""
        assert self.grad is not None
        self.micro_batch.products.append(_Product(self.weight, self.bias, x, self.grad))
        self.grad = None


class _SavedInput(torch.autograd.Function):
    """Identity that saves a layer's input. See [Note: what is saved]."""

    @staticmethod
    def forward(ctx: Any, use: _Use, x: Tensor) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        if torch.is_grad_enabled():
            raise StateError(
                "a double backward (create_graph=True) goes through a linear layer whose weight gradient is deferred: "
                "use a parallel.schedule other than zero_bubble"
            )
        if grad is not None:
            (x,) = ctx.saved_tensors
            ctx.use.queue(x)
        return None, grad


def _deferred(micro_batch: _MicroBatch, x: Tensor, weight: Any, bias: Any) -> Tensor:
    later = bias is not None and bias.requires_grad and _is_plain(bias)
    use = _Use(micro_batch, weight, bias if later else None)
    output: Any = F.linear(_SavedInput.apply(use, x), weight.detach(), bias.detach() if later else bias)
    # On the node of the product itself. If the program changes the output in place, autograd bypasses the node of a
    # view that follows the product. A hook on the output would run before the program's, which may change the gradient.
    product = output.grad_fn if x.dim() == 2 else output.grad_fn.next_functions[0][0]
    if type(product).__name__ not in _PRODUCTS:
        # A device with a linear operator of its own.
        return F.linear(x, weight, bias)
    product.register_prehook(use)
    return output


def _defers(x: Tensor, weight: Tensor) -> bool:
    """Return whether the weight's gradient is a plain matrix product of queued tensors, in the layer's own dtype."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and x.requires_grad
        and _is_plain(weight)
        and type(x) is Tensor
        # A view of a parameter may have no data when W runs.
        and (x._base is None or type(x._base) is Tensor)
        and x.dim() > 1
        and x.dtype is weight.dtype
        # Autograd multiplies in the other order where a weight lies transposed in memory.
        and weight.is_contiguous()
        and not torch.is_autocast_enabled(x.device.type)
    )


def _is_plain(param: Tensor) -> bool:
    """Return whether this is a parameter of torch's own class without hooks on its gradient."""
    return type(param) is nn.Parameter and not param._backward_hooks and not param._post_accumulate_grad_hooks


def _nbytes(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _take_gradient(param: nn.Parameter) -> Tensor | None:
    grad, param.grad = param.grad, None
    return grad


def _add_gradient(param: nn.Parameter, grad: Tensor) -> None:
    """Add a micro-batch's gradient to `param.grad`, as autograd does."""
    if param.grad is None:
        param.grad = grad
    else:
        param.grad += grad


class _DeferredForward(Replaced):
    """A linear layer's `forward` that defers."""

    compiles = False
    _module: nn.Linear

    def __init__(self, module: nn.Linear, deferred: DeferredWeights) -> None:
        super().__init__(module)
        self._deferred = deferred
        # The tensor axis, or a library, may have set one on the instance.
        plain = self._own is None and type(module).forward is nn.Linear.forward
        self._mode = None if plain else _OwnLinear(module, deferred)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._deferred.collects:
            return self._forward(*args, **kwargs)
        if self._mode is None:
            return self._linear(*args, **kwargs)
        with self._mode:
            return self._forward(*args, **kwargs)

    def _linear(self, input: Tensor) -> Tensor:
        return self._deferred.linear(input, self._module.weight, self._module.bias)


class _OwnLinear(TorchFunctionMode):
    """Defers what a layer's own forward computes by `torch.nn.functional.linear` with the layer's weight."""

    def __init__(self, module: nn.Linear, deferred: DeferredWeights) -> None:
        super().__init__()
        self._module = module
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and (args[1] if len(args) > 1 else kwargs.get("weight")) is self._module.weight:
            return self._deferred.linear(*args, **kwargs)
        return func(*args, **kwargs)
