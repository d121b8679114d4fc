"""Weight gradients that are computed after the backward have the bits of those that are computed in it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from infinity.errors import StateError
from infinity.parallel.deferred_weights import DeferredWeights
from infinity.plan.pipeline import ActionKind, make_tables
from infinity.zero import parameter
from tests.parallel.divided import axis_of, batch, divide, make
from tests.parallel.groups import open_tensor_group
from tests.support.cells import covered
from tests.support.hub import lora

Grads = dict[str, Tensor | None]
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, intermediate_size=48, num_key_value_heads=2, mlp_bias=True),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON, intermediate_size=48, attention_dropout=0.1),
    "mixtral": lambda: transformers.MixtralConfig(
        **COMMON, intermediate_size=48, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
    ),
    "gemma2": lambda: transformers.Gemma2Config(**COMMON, intermediate_size=48, num_key_value_heads=2, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(**COMMON),
}
# Parameters of which W computes the gradients, without those that I computes entirely.
PRODUCTS = {"llama": 21, "gpt_neox": 17, "mixtral": 9, "gemma2": 15, "gpt2": 1}
DTYPES = [torch.float32, torch.bfloat16]


def build(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(MODELS[kind]()).to(dtype).train()


def loss_of(model: Any, index: int = 0) -> Tensor:
    """The loss of one of several micro-batches; dropout has its own numbers in each."""
    torch.manual_seed(100 + index)
    words = torch.randint(3, 64, (2, 9))
    return model(input_ids=words, labels=words).loss


def collect(model: nn.Module) -> Grads:
    """Take the gradients away, as an engine does."""
    found = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def ordinary(model: nn.Module, loss: Callable[[], Tensor]) -> Grads:
    loss().backward()
    return collect(model)


def run_input(deferred: DeferredWeights, model: nn.Module, loss: Callable[[], Tensor], key: Any = 0) -> None:
    """The forward and I."""
    with deferred.collecting(key):
        result = loss()
    with deferred.backward_input(key, model.parameters()):
        result.backward()


def split(model: nn.Module, loss: Callable[[], Tensor]) -> Grads:
    deferred = DeferredWeights(model)
    run_input(deferred, model, loss)
    assert all(param.grad is None for param in model.parameters())
    for _ in deferred.weights(0):
        pass
    deferred.remove()
    return collect(model)


def assert_same(found: Grads, expected: Grads) -> None:
    """The same parameters have gradients, of the same bits."""
    assert [name for name in expected if (found[name] is None) != (expected[name] is None)] == []
    given = {name: grad for name, grad in expected.items() if grad is not None}
    assert given and [name for name, grad in given.items() if not torch.equal(bits(found[name]), bits(grad))] == []


def bits(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.contiguous().view({torch.float32: torch.int32, torch.bfloat16: torch.int16}[grad.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_models_are_those_of_an_undivided_backward(kind, dtype):
    model = build(kind, dtype)
    deferred = DeferredWeights(model)
    for index in range(3):
        expected = ordinary(model, lambda: loss_of(model, index))  # noqa: B023
        run_input(deferred, model, lambda: loss_of(model, index))  # noqa: B023
        assert all(param.grad is None for param in model.parameters())
        waiting, done = deferred.params(0), [*deferred.weights(0)]
        assert len(done) == len(waiting) and set(done) == set(waiting)
        assert deferred.nbytes == 0
        assert_same(collect(model), expected)


@pytest.mark.parametrize("kind", MODELS)
def test_linear_layers_are_deferred(kind):
    model = build(kind)
    deferred = DeferredWeights(model)
    run_input(deferred, model, lambda: loss_of(model))
    assert len(deferred._micro_batches[0].uses()) == PRODUCTS[kind]


@pytest.mark.parametrize(*covered(rank=(0, 1, 3), kind=list(MODELS), dtype=DTYPES))
def test_micro_batches_in_flight_do_not_mix(kind, dtype, rank):
    model = build(kind, dtype)
    expected = [ordinary(model, lambda: loss_of(model, index)) for index in range(8)]  # noqa: B023
    deferred, losses, seen = DeferredWeights(model), {}, []
    for _, action, index in make_tables("zero_bubble", 4, 8)[rank]:
        if action is ActionKind.FORWARD:
            with deferred.collecting(index):
                losses[index] = loss_of(model, index)
        elif action is ActionKind.BACKWARD_INPUT:
            with deferred.backward_input(index, model.parameters()):
                losses.pop(index).backward()
        else:
            for _ in deferred.weights(index):
                pass
            assert_same(collect(model), expected[index])
            seen.append(index)
    assert seen == [*range(8)] and deferred.nbytes == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_micro_batches_that_are_not_collected_accumulate_as_usual(dtype):
    model = build("gemma2", dtype)
    for index in range(4):
        loss_of(model, index).backward()
    expected = collect(model)
    deferred, losses = DeferredWeights(model), {}
    for step in "F0 F1 I0 I1 W0 F2 I2 W1 F3 W2 I3 W3".split():
        index = int(step[1])
        if step[0] == "F":
            with deferred.collecting(index):
                losses[index] = loss_of(model, index)
        elif step[0] == "I":
            with deferred.backward_input(index, model.parameters()):
                losses[index].backward()
        else:
            assert len([*deferred.weights(index)]) == len([*model.parameters()])
    assert_same(collect(model), expected)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func) in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter[str]]:
    """Count how often the blocks compute, and all matrix products."""
    counts: Counter[str] = Counter()
    handles = [
        layer.input_layernorm.register_forward_hook(lambda *_, at=at: counts.update([f"block {at}"]))
        for at, layer in enumerate(model.model.layers)
    ]
    with Products() as products:
        yield counts
    counts["products"] = products.count
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recomputed_block_is_computed_twice_in_a_step(dtype):
    model = build("llama", dtype)
    plain = ordinary(model, lambda: loss_of(model))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with counted(model) as expected:
        assert_same(ordinary(model, lambda: loss_of(model)), plain)
    deferred = DeferredWeights(model)
    with counted(model) as found:
        run_input(deferred, model, lambda: loss_of(model))
        assert found == {"block 0": 2, "block 1": 2}
        for _ in deferred.weights(0):
            pass
    assert_same(collect(model), plain)
    # As many products: recomputation ends where it does without us, in front of the last one of a block.
    assert found == expected


def test_reentrant_recomputation_defers_too():
    model = build("llama")
    expected = ordinary(model, lambda: loss_of(model))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    deferred = DeferredWeights(model)
    run_input(deferred, model, lambda: loss_of(model))
    assert len(deferred._micro_batches[0].uses()) == PRODUCTS["llama"]
    assert len([*deferred.weights(0)]) == len(expected)
    assert_same(collect(model), expected)


def test_micro_batches_in_flight_recompute_under_their_own_key():
    model = build("mixtral")
    expected = [ordinary(model, lambda: loss_of(model, index)) for index in range(2)]  # noqa: B023
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        deferred, losses = DeferredWeights(model), []
        for index in range(2):
            with deferred.collecting(index):
                losses.append(loss_of(model, index))
        for index in range(2):
            with deferred.backward_input(index, model.parameters()):
                losses[index].backward()
        for index in (1, 0):
            assert len([*deferred.weights(index)]) > PRODUCTS["mixtral"]
            # Reentrant, router logits have no gradients in transformers' own backward.
            if not reentrant:
                assert_same(collect(model), expected[index])
        deferred.remove()
        model.zero_grad()


def test_an_input_that_lies_elsewhere_until_backward_is_fetched_once():
    model, packed = build("llama"), Counter[str]()
    expected = ordinary(model, lambda: loss_of(model))

    def pack(tensor: Tensor) -> Tensor:
        packed["in"] += 1
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        packed["out"] += 1
        return tensor

    deferred = DeferredWeights(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), deferred.collecting(0):
        loss = loss_of(model)
    with deferred.backward_input(0, model.parameters()):
        loss.backward()
    fetched = packed["out"]
    assert fetched <= packed["in"]
    for _ in deferred.weights(0):
        pass
    assert packed["out"] == fetched
    assert_same(collect(model), expected)


# One layer.

# What a program makes of a contiguous tensor for a layer of 96 inputs.
SHAPES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "[rows, in]": ((70, 96), lambda x: x),
    "[rows, in], transposed": ((96, 70), lambda x: x.t()),
    "[rows, in], columns of more": ((70, 100), lambda x: x[:, :96]),
    "[rows, in], expanded": ((1, 96), lambda x: x.expand(70, 96)),
    "[1, in]": ((1, 96), lambda x: x),
    "[0, in]": ((0, 96), lambda x: x),
    "[batch, rows, in]": ((3, 35, 96), lambda x: x),
    "[batch, rows, in], transposed": ((35, 3, 96), lambda x: x.transpose(0, 1)),
    "[batch, rows, in], some rows": ((3, 36, 96), lambda x: x[:, :-1]),
    "[batch, rows, in], columns of more": ((3, 35, 100), lambda x: x[..., :96]),
    "[batch, rows, in], expanded": ((1, 35, 96), lambda x: x.expand(3, 35, 96)),
    "[batch, 0, in]": ((3, 0, 96), lambda x: x),
    "[a, b, rows, in]": ((2, 3, 11, 96), lambda x: x),
    "[a, b, rows, in], transposed": ((2, 11, 3, 96), lambda x: x.transpose(1, 2)),
    "[in]": ((96,), lambda x: x),
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda y: (y.float() ** 2).sum(),
    "expanded": lambda y: y.sum(),
    "transposed": lambda y: (y.transpose(0, -1).contiguous().float() ** 3).sum(),
    "columns": lambda y: (y[..., 5:90] * y[..., 5:90].flip(-1)).sum() + y[..., :7].square().sum(),
    "in place": lambda y: F.relu(y.add_(1.0).mul_(3.0), inplace=True).sum(),
}


class Alone(nn.Module):
    """A layer whose input needs a gradient, too."""

    def __init__(self, layer: nn.Module, shape: str, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        size, self.view = SHAPES[shape]
        self.layer, self.x, self.loss = layer, nn.Parameter(torch.randn(size)), loss

    def forward(self) -> Tensor:
        return self.loss(self.layer(self.view(self.x * 1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_one_layer_do_not_depend_on_shapes_and_strides(shape, loss, dtype):
    for bias in (True, False):
        torch.manual_seed(3)
        model = Alone(nn.Linear(96, 96, bias=bias), shape, LOSSES[loss]).to(dtype)
        assert_same(split(model, model), ordinary(model, model))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_weight_of_one_layer_is_deferred(shape):
    model = Alone(nn.Linear(96, 96), shape, LOSSES["contiguous"])
    deferred = DeferredWeights(model)
    run_input(deferred, model, model)
    assert (model.layer.weight in deferred._micro_batches[0].uses()) == (shape != "[in]")
    for _ in deferred.weights(0):
        pass


def test_a_view_of_a_parameter_is_not_held():
    model = Alone(nn.Linear(96, 96), "[rows, in]", LOSSES["contiguous"])
    for given in (lambda: model.x, lambda: model.x[3:]):
        expected = ordinary(model, lambda: model.layer(given()).square().sum())  # noqa: B023
        deferred = DeferredWeights(model)
        run_input(deferred, model, lambda: model.layer(given()).square().sum())  # noqa: B023
        assert not deferred._micro_batches[0].products
        assert len([*deferred.weights(0)]) == 3
        assert_same(collect(model), expected)
        deferred.remove()


@pytest.mark.parametrize("trained", [("weight",), ("bias",), ("weight", "bias"), ()])
def test_frozen_parameters_get_no_gradient(trained):
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 8))
    for name, param in model[1].named_parameters():
        param.requires_grad_(name in trained)
    x = torch.randn(5, 8)
    assert_same(split(model, lambda: model(x).square().sum()), ordinary(model, lambda: model(x).square().sum()))


class Shared(nn.Module):
    """An embedding, a layer that is called four times, and a head with the embedding's weight that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(40, 24), nn.Linear(24, 24), nn.Linear(24, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        for _ in range(3):
            hidden = torch.tanh(self.layer(hidden)) + hidden
        early, late = self.head(hidden), self.head(self.layer(hidden))
        losses = [F.cross_entropy(logits.flatten(0, 1), ids.flatten()) for logits in (early, late)]
        return losses[0] + 3 * losses[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_uses_of_one_weight_are_added_in_the_order_of_autograd(dtype):
    torch.manual_seed(5)
    model, ids = Shared().to(dtype), torch.randint(0, 40, (4, 50))
    expected = ordinary(model, lambda: model(ids))
    assert_same(split(model, lambda: model(ids)), expected)
    assert_same(split(model, lambda: checkpoint(model, ids, use_reentrant=False)), expected)


def test_a_hook_on_the_output_changes_the_gradient_of_the_weight_too():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 4, 8)

    def loss() -> Tensor:
        hidden = model[1](model[0](x))
        hidden.register_hook(lambda grad: grad * 2)
        return hidden.square().sum()

    assert_same(split(model, loss), ordinary(model, loss))


def test_an_output_without_a_gradient_gives_none():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)

    def loss() -> Tensor:
        hidden = model[0](x)
        model[1](hidden)
        return model[2](hidden).sum()

    expected = ordinary(model, loss)
    assert expected["1.weight"] is None
    assert_same(split(model, loss), expected)


def test_a_weight_with_gradient_hooks_gets_its_gradient_in_backward():
    model, x, seen = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8), []
    model[1].weight.register_hook(lambda grad: grad * 3)
    model[1].bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))

    def loss() -> Tensor:
        return model(x).square().sum()

    assert_same(split(model, loss), ordinary(model, loss))
    assert len(seen) == 2 and torch.equal(*seen)


def test_autocast_is_not_deferred():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().sum()

    assert_same(split(model, loss), ordinary(model, loss))


class Scaled(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input * 2, weight=self.weight, bias=self.bias) + F.linear(input, torch.eye(8))


def test_a_forward_of_the_layers_own_is_kept_and_deferred():
    model, x = nn.Sequential(nn.Linear(8, 8), Scaled(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)

    def own(input: Tensor) -> Tensor:
        return F.linear(input, model[2].weight) + model[2].bias

    model[2].forward = own
    deferred = DeferredWeights(model)
    run_input(deferred, model, lambda: model(x).square().sum())
    # The first layer's input needs no gradient; the last one adds its bias itself.
    assert [*deferred._micro_batches[0].uses()] == [model[2].weight, model[1].weight, model[1].bias]
    assert len([*deferred.weights(0)]) == 6
    found = collect(model)
    deferred.remove()
    assert model[2].forward is own and "forward" not in model[1].__dict__
    assert_same(found, ordinary(model, lambda: model(x).square().sum()))


def test_adapters_are_deferred():
    torch.manual_seed(1)
    settings: dict[str, Any] = {"modules_to_save": ["lm_head"], "lora_dropout": 0.1}
    model = lora(build("llama"), target_modules=["q_proj", "v_proj"], **settings)
    model.base_model.model.get_input_embeddings().weight.requires_grad_(True)
    expected = ordinary(model, lambda: loss_of(model))
    deferred = DeferredWeights(model)
    run_input(deferred, model, lambda: loss_of(model))
    trained = [param for param in model.parameters() if param.requires_grad]
    assert len(deferred._micro_batches[0].uses()) == len(trained) - 1 == 9
    assert len([*deferred.weights(0)]) == len(trained)
    assert_same(collect(model), expected)


def compare_divided(rank: int, world: int) -> dict[str, int]:
    """On the tensor axis: how many weights were deferred, by model; gradients are compared here."""
    group, found = open_tensor_group(rank, world), {}
    for kind in ("llama", "gemma2"):
        for reentrant in (None, False):
            model = make(kind)
            divide(model, axis_of(model, world), group)
            if reentrant is not None:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            expected = ordinary(model, lambda: model(**batch()).loss)  # noqa: B023
            deferred = DeferredWeights(model)
            run_input(deferred, model, lambda: model(**batch()).loss)  # noqa: B023
            found[f"{kind} {reentrant}"] = len(deferred._micro_batches[0].uses())
            for _ in deferred.weights(0):
                pass
            assert_same(collect(model), expected)
    return found


def test_layers_of_the_tensor_axis_are_deferred(rank_pools):
    # Llama has biases here; those of row-wise layers are added behind the sum.
    expected = {"llama None": 25, "llama False": 25, "gemma2 None": 15, "gemma2 False": 15}
    assert rank_pools[2].run(compare_divided) == [expected, expected]


# What lies between I and W.


class Owner:
    """An owner of released parameters that has no data for them."""

    gathers_on_use = True

    def materialize(self, params: list[nn.Parameter], use: str) -> None:
        raise AssertionError(f"{use} touches a released weight")


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_weights_are_not_touched_after_the_backward(kind):
    model = build(kind)
    expected = ordinary(model, lambda: loss_of(model))
    for gone in ("nan", "resized", "released"):
        deferred, changed = DeferredWeights(model), {}
        run_input(deferred, model, lambda: loss_of(model))
        for name, param in model.named_parameters():
            changed[name] = param.data.clone()
            if gone == "nan":
                param.data.fill_(float("nan"))
            elif gone == "resized":
                param.untyped_storage().resize_(0)
            else:
                parameter.attach(param, Owner(), name)
                parameter.release(param, parameter.placeholder(param.shape, param.dtype, param.device))
        assert len([*deferred.weights(0)]) == len(changed)
        for name, param in model.named_parameters():
            if gone == "released":
                parameter.restore(param, changed[name])
                parameter.forget(param)
            else:
                param.untyped_storage().resize_(changed[name].nbytes)
                param.data.copy_(changed[name])
        assert_same(collect(model), expected)
        deferred.remove()


def test_inputs_and_gradients_of_outputs_are_all_that_is_held():
    model = build("llama")
    inputs: dict[int, int] = {}
    outputs = 0

    def count(layer: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal outputs
        storage = args[0].untyped_storage()
        inputs[storage.data_ptr()] = storage.nbytes()
        outputs += output.nbytes

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    deferred = DeferredWeights(model)
    before = tensors_alive()
    with deferred.collecting(0):
        loss = loss_of(model)
    for handle in handles:
        handle.remove()
    with deferred.backward_input(0, model.parameters()):
        loss.backward()
    del loss
    left = sum(param.nbytes for name, param in model.named_parameters() if "norm" in name or "embed" in name)
    # Gradients of all rows and of each input once; what passes on a gradient unchanged shares its memory.
    assert 0.7 * (sum(inputs.values()) + outputs) < deferred.nbytes - left <= sum(inputs.values()) + outputs
    held = {key: nbytes for key, nbytes in tensors_alive().items() if key not in before}
    assert sum(held.values()) == deferred.nbytes
    sizes = [deferred.nbytes]
    for param in deferred.weights(0):
        param.grad = None
        sizes.append(deferred.nbytes)
    # It is freed as W goes on.
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 10 and sizes[-1] == 0
    assert [key for key in tensors_alive() if key not in before] == []


def tensors_alive() -> dict[int, int]:
    """Bytes of the storages of tensors that Python knows."""
    gc.collect()
    # Parameters of other tests' closed engines refuse to be read, and have no bytes.
    with torch._C.DisableTorchFunctionSubclass():
        storages = [each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def test_a_graph_is_freed_with_its_loss():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    deferred, gone = DeferredWeights(model), []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.watch = Watch()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Watch:
        def __del__(self) -> None:
            gone.append(True)

    run_input(deferred, model, lambda: model(Watched.apply(x)).sum())
    assert gone and deferred.nbytes > 0


def test_gradients_are_yielded_when_they_are_complete():
    model = build("gemma2")
    expected = ordinary(model, lambda: loss_of(model))
    deferred, found = DeferredWeights(model), dict.fromkeys(expected)
    run_input(deferred, model, lambda: loss_of(model))
    names = {param: name for name, param in model.named_parameters()}
    for param in deferred.weights(0):
        found[names[param]], held = param.grad.clone(), weakref.ref(param.grad)
        param.grad = None
        # W does not hold it while it computes the next one.
        assert held() is None
    assert all(param.grad is None for param in model.parameters())
    assert_same(found, expected)


# Failures.


def test_an_error_in_backward_leaves_nothing_behind():
    model = build("llama")
    expected = ordinary(model, lambda: loss_of(model))
    deferred = DeferredWeights(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    earlier = {param: param.grad for param in model.parameters()}

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("in backward")

    def break_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    hook = model.model.layers[0].register_forward_hook(break_backward)
    with deferred.collecting(0):
        loss = loss_of(model)
    hook.remove()
    with pytest.raises(ArithmeticError), deferred.backward_input(0, model.parameters()):
        loss.backward()
    assert all(param.grad is earlier[param] and bool((param.grad == 1).all()) for param in model.parameters())
    deferred.abandon()
    assert deferred.nbytes == 0 and not deferred.collects
    model.zero_grad()
    run_input(deferred, model, lambda: loss_of(model))
    assert len([*deferred.weights(0)]) == len(expected)
    assert_same(collect(model), expected)


def test_abandon_forgets_every_micro_batch():
    model = build("llama")
    deferred = DeferredWeights(model)
    run_input(deferred, model, lambda: loss_of(model), key="a")
    with deferred.collecting("b"):
        late = loss_of(model)
    deferred.abandon()
    late.backward()
    assert deferred.nbytes == 0
    with pytest.raises(StateError, match="before its backward_input"):
        next(deferred.weights("a"))


def test_a_forward_that_fails_does_not_go_on_collecting():
    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    deferred = DeferredWeights(model)
    with pytest.raises(RuntimeError), deferred.collecting(0):
        model(torch.randn(4, 7))
    model(x).sum().backward()
    assert model.weight.grad is not None and deferred.nbytes == 0


def test_actions_out_of_order_are_refused():
    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    deferred = DeferredWeights(model)
    with pytest.raises(StateError, match="no forward of it has run"), deferred.backward_input(0, model.parameters()):
        pass
    with deferred.collecting(0):
        loss = model(x).sum()
    with pytest.raises(StateError, match="before its backward_input"):
        next(deferred.weights(0))
    with deferred.backward_input(0, model.parameters()):
        loss.backward()
    with pytest.raises(StateError, match="still queued"), deferred.collecting(0):
        pass
    assert len([*deferred.weights(0)]) == 2
    with pytest.raises(StateError, match="before its backward_input"):
        next(deferred.weights(0))


def test_a_change_of_what_is_held_is_told():
    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    deferred = DeferredWeights(model)
    run_input(deferred, model, lambda: model(x).square().sum())
    x.data.add_(1)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(StateError, match="changed or freed"):
        next(deferred.weights(0))


def test_a_double_backward_is_refused():
    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    deferred = DeferredWeights(model)
    with deferred.collecting(0):
        loss = model(x).square().sum()
    with pytest.raises(StateError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_evaluation_and_copies_are_those_of_the_layers():
    model = build("llama")
    deferred = DeferredWeights(model)
    words = torch.randint(3, 64, (2, 9))
    with torch.no_grad(), deferred.collecting(0):
        inside = model(words).logits
    copied = copy.deepcopy(model)
    deferred.remove()
    deferred.remove()
    assert "forward" not in model.lm_head.__dict__
    with torch.no_grad():
        assert torch.equal(inside, model(words).logits)
        copied.lm_head.weight.zero_()
        assert not copied(words).logits.any()
        assert torch.equal(inside, model(words).logits)
