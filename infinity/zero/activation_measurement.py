"""Measured shapes: what a module's forward and backward need, from one pass on fake tensors that have no memory.

Every operation runs on shapes alone, so a model of any size, on the meta device too, is measured in seconds on any
machine. A storage counts from the operation that creates it until its last tensor is freed. Parameters, buffers and
inputs do not count. Gradients of parameters do not count either, because the plan counts them separately: a first pass
records which storages they are.

Memory that a kernel allocates and frees inside one operation is not measured.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.errors import ConfigError
from infinity.plan.activation_bytes import Activations
from infinity.plan.allocator import PROCESS
from infinity.zero.parameter import is_released

_OUTSIDE = "(outside any module)"


def measure_activations(
    model: nn.Module, batch: Mapping[str, Any], *, dtype: torch.dtype | None = None
) -> Activations:  # fmt: skip
    """Measure one micro-batch: `model(**batch)`, then backward of its loss, in the model's current mode.

    model: real or on the meta device, not yet given to an engine; it is not changed. batch: keyword arguments; their
    tensors may be on the meta device too. dtype: of floating-point parameters, if it differs from the model's.
    The loss is the output, its `.loss`, or its first element.

    `parts` are bytes kept for backward, by the class of the module that made them. Raises ConfigError if the forward
    depends on values (routing of a mixture of experts, `.item()`), which fake tensors do not have; for the
    architectures that it knows, `estimators.activations` has closed forms.
    """
    gradients = _Pass(model, batch, dtype).run(frozenset()).gradients
    found = _Pass(model, batch, dtype).run(frozenset(gradients))
    parts = {name: nbytes for name, nbytes in found.kept.most_common() if nbytes}
    beyond = found.peak_nbytes - sum(parts.values())
    return Activations(
        nbytes=found.peak_nbytes, saved_nbytes=sum(parts.values()), source="measured shapes of one pass",
        parts={**parts, "temporaries": beyond} if beyond > 0 else parts, pooled_nbytes=found.pooled_peak_nbytes,
    )  # fmt: skip


class _Pass(TorchDispatchMode):
    """One forward and backward on fake tensors; tracks every storage that is created."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype | None) -> None:
        super().__init__()
        self._model = model
        self._batch = batch
        self._dtype = dtype
        self._ignored: frozenset[int] = frozenset()
        # Storages that live: number of the creation, in the order of creations, bytes, and class of the module.
        self._live: dict[int, tuple[int, int, str]] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._made = 0
        self._modules: list[str] = []
        self.now_nbytes = 0
        self.peak_nbytes = 0
        # The same of pieces that the process's allocator would keep.
        self.pooled_nbytes = 0
        self.pooled_peak_nbytes = 0
        # Numbers of the storages that were gradients of parameters.
        self.gradients: set[int] = set()
        # Bytes between forward and backward, by class of module.
        self.kept: Counter[str] = Counter()

    def run(self, ignored: frozenset[int]) -> _Pass:
        """Run the pass; storages with the numbers in `ignored` do not count."""
        self._ignored = ignored
        # Not entered as a context: operations without fake arguments are computed, so masks have values.
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        values = {name: _fake(buffer, fakes) for name, buffer in self._model.named_buffers()}
        values |= {name: _fake(param, fakes, self._dtype) for name, param in self._model.named_parameters()}
        batch = tree_map_only(Tensor, lambda tensor: _input(tensor, fakes), dict(self._batch))
        for tensor in (*values.values(), *tree_leaves(batch)):
            if isinstance(tensor, Tensor):
                self._watched[id(tensor.untyped_storage())] = weakref.ref(tensor.untyped_storage())
        params = [value for value in values.values() if value.requires_grad]
        for param in params:
            param.register_hook(self._is_gradient)
        handles = self._hooks()
        swapped = {f"model.{name}": value for name, value in values.items()}
        try:
            with self:
                functional_call(_Trained(self._model, self._between), swapped, (batch,), tie_weights=True)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"the activations of {type(self._model).__name__} cannot be measured on shapes alone: {reason}. "
                "Use the closed forms of estimators.activations, or measure a pass that does not depend on values"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _between(self, loss: Tensor) -> None:
        """Record what is kept between forward and backward."""
        for number, nbytes, name in self._live.values():
            if number not in self._ignored:
                self.kept[name] += nbytes
        self._watch_contributions(loss)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._watched and self._watched[key]() is storage:
            return
        number, self._made = self._made, self._made + 1
        nbytes = storage.nbytes()
        self._live[key] = (number, nbytes, self._modules[-1] if self._modules else _OUTSIDE)
        self._watched[key] = weakref.ref(storage, self._gone(key, number))
        if number not in self._ignored:
            self._book(nbytes)

    def _gone(self, key: int, number: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            found = self._live.get(key)
            if found is not None and found[0] == number:
                del self._live[key], self._watched[key]
                if number not in self._ignored:
                    self._book(-found[1])

        return gone

    def _book(self, nbytes: int) -> None:
        self.now_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes)
        if abs(nbytes) < PROCESS.pooled_nbytes_max:
            self.pooled_nbytes += nbytes
            self.pooled_peak_nbytes = max(self.pooled_peak_nbytes, self.pooled_nbytes)

    def _is_gradient(self, grad: Tensor) -> None:
        found = self._live.get(id(grad.untyped_storage()))
        if found is not None:
            self.gradients.add(found[0])

    def _watch_contributions(self, loss: Tensor) -> None:
        """Mark the parts of tied weights' gradients, which autograd adds before the parameter's own hook runs."""
        seen, stack = set(), [loss.grad_fn]
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

    def _hooks(self) -> list[Any]:
        """Track which module is running."""
        handles = []
        for module in self._model.modules():
            name = type(module).__name__
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name)))
            handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        return handles

    def _leave(self) -> None:
        if self._modules:
            self._modules.pop()


class _Trained(nn.Module):
    """One pass as a module: the fake parameters stay in place during backward, which may recompute forward."""

    def __init__(self, model: nn.Module, between: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.model = model
        self._between = between

    def forward(self, batch: Mapping[str, Any]) -> None:
        loss = _loss(self.model(**batch))
        self._between(loss)
        loss.backward()


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


def _input(tensor: Tensor, fakes: FakeTensorMode) -> Tensor:
    """Return a fake of a floating-point input; other inputs keep their values (zeros for meta tensors)."""
    if tensor.is_floating_point():
        return _fake(tensor, fakes)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor


def _loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = output["loss"] if isinstance(output, dict) else output[0]
    return loss
