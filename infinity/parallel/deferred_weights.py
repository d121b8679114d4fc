"""Split backward: the gradients of linear layers' weights are computed later than those of their inputs.

I (`backward_input`) is an ordinary autograd backward, in which each `nn.Linear` computes the gradient of its input and
queues its input and the gradient of its output. W (`weights`) multiplies what was queued. It needs no weights, no graph
and no module hooks, so a pipeline runs it whenever the rank would wait otherwise.

The gradients have the bits of an undivided backward. Autograd itself computes outputs and gradients of inputs, with a
weight cut off from the graph; W calls the operators by which autograd computes gradients of weights, on operands of the
same strides, and adds several uses of one weight in the order in which backward reached them. A gradient that I leaves
on a parameter is set aside until W, so that it does not mix with that of another micro-batch.

[Note: what is saved] An identity function in front of the layer saves its input for backward. So hooks on saved tensors
see the input as usual: recomputation (torch.utils.checkpoint) computes a block once, in I, stops as early as without
this module, and W gets tensors. A hook on the layer's gradient function gives the gradient of its output to that
identity, whose backward runs next.

Everything else computes its gradients in I, which is right and only less deferred: GPT-2's `Conv1D`, experts in stacked
weights, weights in tiles, a weight with gradient hooks, an input that needs no gradient, autocast. One limit: where a
weight has several deferred uses and others that run between them in backward, the others are added last.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from infinity.errors import StateError


class DeferredWeights:
    """The linear layers of one model, and what their weights' gradients are still to be computed from.

    Layers defer inside `collecting` only. Construct it behind all else that sets a `forward` on linear layers (the
    tensor axis). A key names one micro-batch in one stage. Nothing may write into tensors that a layer has read, or
    into gradients that came into the stage, until its W has run. Not thread-safe; the backward of I may run on threads
    of autograd.
    """

    def __init__(self, model: nn.Module) -> None:
        self._micro_batches: dict[Hashable, _MicroBatch] = {}
        # That of the forward or backward under way.
        self._current: _MicroBatch | None = None
        self._layers = [_DeferredForward(module, self) for module in model.modules() if isinstance(module, nn.Linear)]

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Run the forward of a micro-batch in the block.

        Raises:
            StateError: the former micro-batch of this key still waits for its W.
        """
        former = self._micro_batches.get(key)
        if former is not None and former.ready:
            raise StateError(
                f"a forward begins for {key}, and the weight gradients of the former one are still queued: iterate "
                "over weights(key) to its end, or call abandon()"
            )
        self._micro_batches[key] = _MicroBatch()
        with self._during(key):
            yield

    @contextmanager
    def backward_input(self, key: Hashable, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Run I, the backward of a micro-batch, in the block. Behind it, the gradients of `params` (all that the stage
        trains) are as they were before it; what I left on them waits for W. If the block raises, that is dropped.
        """
        micro_batch = self._micro_batches.get(key)
        if micro_batch is None or micro_batch.ready:
            raise StateError(f"a backward begins for {key}, whose forward has not run inside collecting()")
        params = [param for param in params if param.requires_grad]
        before = [_take_gradient(param) for param in params]
        try:
            with self._during(key):
                yield
        except BaseException:
            self._micro_batches.pop(key, None)
            raise
        else:
            found = ((param, _take_gradient(param)) for param in params)
            micro_batch.left = {param: grad for param, grad in found if grad is not None}
            micro_batch.ready = True
        finally:
            for param, grad in zip(params, before, strict=True):
                param.grad = grad

    def weights(self, key: Hashable) -> Iterator[nn.Parameter]:
        """Run W: yield each parameter once the micro-batch's gradient is complete and has been added to `param.grad`.

        Must be iterated to its end. Parameters of which I has computed the whole gradient come first, then weights and
        biases in the order of backward, so that a caller may take gradients away as they come.

        Raises:
            StateError: I has not run.
        """
        if key not in self._micro_batches or not self._micro_batches[key].ready:
            raise StateError(f"weight gradients of {key} are asked for before its backward_input has run")
        micro_batch = self._micro_batches.pop(key)
        uses = micro_batch.uses()
        for param in [param for param in micro_batch.left if param not in uses]:
            _add_gradient(param, micro_batch.left.pop(param))
            yield param
        sums: dict[nn.Parameter, Tensor] = {}
        while micro_batch.products:
            # Functions of their own, because a generator's variables would keep gradients alive that the caller takes.
            yield from micro_batch.multiply_next(uses, sums)

    def params(self, key: Hashable) -> list[nn.Parameter]:
        """Return the parameters that `weights(key)` will yield; [] before I."""
        micro_batch = self._micro_batches.get(key)
        return [*dict.fromkeys((*micro_batch.left, *micro_batch.uses()))] if micro_batch and micro_batch.ready else []

    @property
    def nbytes(self) -> int:
        """The bytes of all memory that is held between I and W, each storage once."""
        held = [tensor for each in self._micro_batches.values() for tensor in each.tensors()]
        return sum({each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in held)}.values())

    def abandon(self) -> None:
        """Forget everything that waits for I or W: the step has failed. A backward that still runs queues nothing."""
        self._micro_batches.clear()

    def remove(self) -> None:
        """Give the layers their own forward back; idempotent."""
        self.abandon()
        while self._layers:
            self._layers.pop().restore()

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `torch.nn.functional.linear`, and defer the gradients of weight and bias where that is possible."""
        if self._current is None or not _defers(input, weight):
            return linear(input, weight, bias)
        if input.dim() == 2 or input.is_contiguous():
            return _deferred(self._current, input, weight, bias)
        # linear() folds other inputs in a way that depends on whether the weight needs a gradient, and adds the bias
        # in an operation of its own.
        output = _deferred(self._current, input.flatten(0, -2), weight, None)
        output = torch._unsafe_view(output, (*input.shape[:-1], weight.shape[0]))
        return output if bias is None else output.add_(bias)

    @property
    def collects(self) -> bool:
        """Whether a micro-batch's forward or backward is under way."""
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
    """What waits for the W of one micro-batch; `ready` once its I has run."""

    products: deque[_Product] = field(default_factory=deque)
    # What I left on parameters.
    left: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    ready: bool = False

    def uses(self) -> Counter[nn.Parameter]:
        """How many products each parameter's gradient is the sum of, in the order of backward."""
        return Counter(param for each in self.products for param in (each.weight, each.bias) if param is not None)

    def multiply_next(self, uses: Counter[nn.Parameter], sums: dict[nn.Parameter, Tensor]) -> list[nn.Parameter]:
        """Compute the next product, add it to the `sums` of earlier ones, and return the parameters whose last of
        `uses` it is, which have their gradient now.
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
                "freed between backward and the computation of the weight's gradient"
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
    output: Any = linear(_SavedInput.apply(use, x), weight.detach(), bias.detach() if later else bias)
    # The hook is on the product itself: a view behind it is left out of the graph if the program changes the output in
    # place, and hooks on tensors run before it, because they may change the gradient.
    product = output.grad_fn if x.dim() == 2 else output.grad_fn.next_functions[0][0]
    product.register_prehook(use)
    return output


def _defers(x: Tensor, weight: Tensor) -> bool:
    """Whether the gradient of the weight is that of a plain matrix product in the layer's own dtype."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and x.requires_grad
        and _is_plain(weight)
        and type(x) is Tensor
        # Not a view of a parameter, which may have no data when W runs.
        and (x._base is None or type(x._base) is Tensor)
        and x.dim() > 1
        and x.dtype is weight.dtype
        # Autograd multiplies in the other order where a weight lies transposed in memory.
        and weight.is_contiguous()
        and not torch.is_autocast_enabled(x.device.type)
    )


def _is_plain(param: Tensor) -> bool:
    """Whether it is a parameter of torch's own class, without hooks that are to see its gradient."""
    return type(param) is nn.Parameter and not param._backward_hooks and not param._post_accumulate_grad_hooks


def _take_gradient(param: nn.Parameter) -> Tensor | None:
    grad, param.grad = param.grad, None
    return grad


def _add_gradient(param: nn.Parameter, grad: Tensor) -> None:
    """Add a micro-batch's gradient to `param.grad`, as autograd does."""
    if param.grad is None:
        param.grad = grad
    else:
        param.grad += grad


class _DeferredForward:
    """A linear layer's `forward` that defers. A deep copy of the module gets its class's own."""

    def __init__(self, module: nn.Linear, deferred: DeferredWeights) -> None:
        self._module = module
        self._deferred = deferred
        # The tensor axis, or a library, may have set one on the instance.
        self._own: Callable[..., Any] | None = module.__dict__.get("forward")
        self._forward: Callable[..., Any] = module.forward
        plain = self._own is None and type(module).forward is nn.Linear.forward
        self._mode = None if plain else _OwnLinear(module, deferred)
        self.__wrapped__ = self._forward
        module.forward = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._deferred.collects:
            return self._forward(*args, **kwargs)
        if self._mode is None:
            return self._linear(*args, **kwargs)
        with self._mode:
            return self._forward(*args, **kwargs)

    def _linear(self, input: Tensor) -> Tensor:
        return self._deferred.linear(input, self._module.weight, self._module.bias)

    def restore(self) -> None:
        """Restore the module's own `forward`, unless it was replaced again."""
        if self._module.__dict__.get("forward") is not self:
            return
        if self._own is None:
            del self._module.forward
        else:
            self._module.forward = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo[id(self._module)]
        return MethodType(type(module).forward, module)


class _OwnLinear(TorchFunctionMode):
    """Defers what a layer's own forward computes by `torch.nn.functional.linear` with the layer's weight."""

    def __init__(self, module: nn.Linear, deferred: DeferredWeights) -> None:
        super().__init__()
        self._module = module
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is linear and (args[1] if len(args) > 1 else kwargs.get("weight")) is self._module.weight:
            return self._deferred.linear(*args, **kwargs)
        return func(*args, **kwargs)
