"""Loss and MLPs a few tokens at a time are the plain ones, with one gather a call and without the full logits."""

from __future__ import annotations

import copy
import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import infinity
from infinity.errors import ConfigError, StateError
from tests.support.hub import hf_model, lora
from tests.support.oracle import join, settings

WORDS = 9000


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))])
        return result


def close(found: Tensor | None, expected: Tensor | None, within: float) -> bool:
    assert found is not None
    assert expected is not None
    return float((found - expected).detach().abs().max()) <= within * float(expected.detach().abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "reduction", "shift"),
    [(torch.float32, "mean", False), (torch.float32, "sum", True), (torch.bfloat16, "mean", True)],
)
def test_the_loss_and_its_gradients_are_the_plain_ones(dtype, reduction, shift, bias):
    torch.manual_seed(0)
    head = nn.Linear(24, WORDS, bias=bias).to(dtype)
    hidden = torch.randn(2, 70, 24, dtype=dtype, requires_grad=True)
    labels = torch.randint(WORDS, (2, 70))
    labels[0, :30] = -100
    logits = head(hidden).float()
    pairs = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    expected = F.cross_entropy(pairs[0].flatten(0, 1), pairs[1].flatten(), reduction=reduction)
    expected.backward()
    params = [hidden, *head.parameters()]
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    with Largest() as largest:
        found = infinity.tiled_cross_entropy(hidden, head, labels, shift=shift, reduction=reduction, tile_tokens=32)
        found.backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    # Of 16-bit gradients the last bit may differ.
    within = 2e-6 if dtype is torch.float32 else 2**-8
    assert all(close(param.grad, grad, within) for param, grad in zip(params, grads, strict=True))
    # Nothing was as large as the logits, or as a third of them.
    assert largest.numel <= max(head.weight.numel(), 32 * 4096)
    assert largest.numel < 2 * 70 * WORDS / 3
    # The head's gradient is autograd's alone: held here too, it would be copied.
    assert found.grad_fn.next_functions[0][0].call.weight.grad is None


def test_the_loss_without_a_token_that_counts_and_with_a_divisor():
    head, hidden = nn.Linear(8, 10), torch.randn(5, 8, requires_grad=True)
    nothing = torch.full((5,), -100)
    loss = infinity.tiled_cross_entropy(hidden, head, nothing)
    assert loss.isnan()
    loss.backward()
    # As torch's: a batch of nothing but padding adds nothing.
    assert all(not param.grad.any() for param in (hidden, head.weight, head.bias))  # type: ignore[union-attr]
    for shape in ((2, 0), (2, 1), (0, 3)):
        empty = torch.zeros(shape, dtype=torch.long)
        assert infinity.tiled_cross_entropy(torch.randn(*shape, 8), head, empty, shift=True).isnan()
    assert float(infinity.tiled_cross_entropy(hidden, head, nothing, reduction="sum").detach()) == 0
    labels = torch.arange(5)
    whole = infinity.tiled_cross_entropy(hidden, head, labels, reduction="sum")
    assert torch.equal(infinity.tiled_cross_entropy(hidden, head, labels, divisor=torch.tensor(4)), whole / 4)
    with torch.no_grad():
        assert torch.equal(infinity.tiled_cross_entropy(hidden, head, labels, reduction="sum"), whole)
    with pytest.raises(IndexError, match="10 outputs"):
        infinity.tiled_cross_entropy(hidden, head, labels + 8)
    with pytest.raises(ValueError, match="labels have shape"):
        infinity.tiled_cross_entropy(hidden, head, labels[:3])
    with pytest.raises(TypeError, match=r"torch\.nn\.Linear"):
        infinity.tiled_cross_entropy(hidden, nn.Identity(), labels)  # type: ignore[arg-type]


class Dropping(nn.Module):
    """An MLP with dropout, whose mask must be the same when a tile is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.5, self.training))


def test_an_mlp_of_tiles_is_the_plain_one_with_less_kept():
    torch.manual_seed(0)
    mlp = Dropping().eval()
    x = torch.randn(3, 50, 16, requires_grad=True)
    expected = mlp(x)
    expected.square().mean().backward()
    grads = [x.grad, *(param.grad for param in mlp.parameters())]
    x.grad = None
    mlp.zero_grad()
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = infinity.tiled_mlp(mlp, x, tile_tokens=16)
    assert max(kept, default=0) <= x.numel(), "of what is inside nothing is kept"
    found.square().mean().backward()
    assert close(found, expected, 1e-6)
    found_grads = [x.grad, *(param.grad for param in mlp.parameters())]
    assert all(close(mine, other, 1e-6) for mine, other in zip(found_grads, grads, strict=True))
    # With dropout: the gradient is that of the masks which forward drew.
    mlp.train()
    leaf = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    double = copy.deepcopy(mlp).double()

    def run(inputs: Tensor) -> Tensor:
        torch.manual_seed(5)
        return infinity.tiled_mlp(double, inputs, tile_tokens=16).sum()

    (grad,) = torch.autograd.grad(run(leaf), leaf)
    step = torch.zeros_like(leaf)
    step[40, 3] = 1e-6
    difference = (run(leaf + step) - run(leaf - step)).detach()
    assert float(difference) / 2e-6 == pytest.approx(float(grad[40, 3]), rel=1e-5)


@pytest.mark.parametrize("draws", [False, True])
def test_only_tiles_that_draw_keep_a_random_state(draws: bool) -> None:
    def states() -> int:
        numel = torch.get_rng_state().numel()
        return sum(type(each) is Tensor and each.dtype is torch.uint8 and each.numel() == numel
                   for each in gc.get_objects())  # fmt: skip

    mlp, before = Dropping().train(draws), states()
    found = infinity.tiled_mlp(mlp, torch.randn(64, 16, requires_grad=True), tile_tokens=8)
    assert states() - before == (8 if draws else 0)
    found.sum().backward()
    assert states() == before


class Gated(nn.Module):
    """An MLP of three matrices of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GatedModel(nn.Module):
    """Three of them by tiles of 8 tokens, or whole."""

    def __init__(self, tile: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(16, 16)
        self.mlps = nn.ModuleList(Gated() for _ in range(3))
        self.tile = tile

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for mlp in self.mlps:
            x = x + (infinity.tiled_mlp(mlp, x, tile_tokens=8) if self.tile else mlp(x))
        return x.square().mean()


def unequal(rank: int, world: int, folder: str, live: int) -> tuple[int, dict[str, Tensor], int]:
    """Units, weights and mismatches after steps in which one rank has one tile of tokens and the other five."""
    join(world)
    config = settings(folder, param="cpu", optimizer="cpu", zero={"stage3_max_live_parameters": live})
    engine, *_ = infinity.initialize(model=GatedModel(world > 1), config=config)
    with engine:
        for step in range(5):
            for part in [rank] if world > 1 else [0, 1]:
                x = torch.randn(
                    6 + 30 * ((part + step) % 2), 16, generator=torch.Generator().manual_seed(2 * step + part)
                )
                engine.backward(engine(x) / (1 if world > 1 else 2))
            engine.step()
        return len(engine.units), engine.state_dict(), engine.coordinator.mismatches


@pytest.mark.parametrize(("live", "units"), [(1000, 10), (10**6, 4)])
def test_ranks_may_have_different_numbers_of_tokens(rank_pools: Any, tmp_path: Path, live: int, units: int) -> None:
    """An MLP that is one unit, and one of which each matrix is."""
    expected = unequal(0, 1, str(tmp_path), live)[1]
    first, second = rank_pools[2].run(unequal, str(tmp_path), live)
    assert (first[0], second[0]) == (units, units)
    assert all(close(first[1][name], value, 1e-4) for name, value in expected.items())
    # One at most, at the first step: tiles of tokens are no events of the trace.
    assert first[2] == second[2] <= 1


def test_a_head_that_is_switched_on_later_is_refused(tmp_path: Path) -> None:
    model = hf_model("llama")
    model.lm_head.requires_grad_(False)
    infinity.tile_sequence(model, tile_tokens=8)
    engine, *_ = infinity.initialize(model=model, config=settings(tmp_path, param="cpu", optimizer="cpu"))
    with engine, pytest.raises(StateError, match=r"lm_head\.weight did not require a gradient"):
        model.lm_head.requires_grad_(True)
        ids = torch.arange(20)[None]
        engine.backward(engine(input_ids=ids, labels=ids).loss)


def train(kind: str, folder: str, *, tile: bool, **options: Any) -> tuple[list[float], dict[str, Tensor], int, Any]:
    """Losses, weights, gathers of the head in a step, keys of the output."""
    model = hf_model(kind)
    if tile:
        assert infinity.tile_sequence(model, tile_tokens=8) is model
    engine, *_ = infinity.initialize(model=model, config=settings(folder, **options))
    with engine:
        losses: list[float] = []
        gathers = 0
        heads = ("lm_head", "transformer.wte")
        unit = next(unit for unit in engine.units if {*heads} & {*unit.layout.modules})
        fill = unit._fill

        def counted(wait: bool) -> Any:
            nonlocal gathers
            gathers += 1
            return fill(wait)

        unit._fill = counted  # type: ignore[method-assign]
        words = model.config.vocab_size
        for step in range(3):
            gathers = 0
            generator = torch.Generator().manual_seed(step + 10 * engine.global_rank)
            ids = torch.randint(words, (2, 20), generator=generator)
            labels = ids.clone()
            labels[0, :6] = -100
            output = engine(input_ids=ids, labels=labels)
            engine.backward(output.loss)
            engine.step()
            losses.append(float(output.loss.detach()))
        weights = engine.state_dict()
        engine.eval()
        with torch.no_grad():
            assert engine(input_ids=ids).logits.shape == (2, 20, words)
        return losses, weights, gathers, [*output.keys()]


def compare(rank: int, world: int, folder: str, rows: list[tuple[str, dict[str, Any]]]) -> None:
    join(world)
    for kind, options in rows:
        losses, weights, gathers, keys = train(kind, folder, tile=False, **options)
        for tiles in ({}, {"zero": {"tile_parameters": 500}}):
            found = train(kind, folder, tile=True, **{**options, **tiles})
            assert found[0] == pytest.approx(losses, rel=1e-6)
            assert all(float((found[1][name] - value).abs().max()) <= 1e-6 for name, value in weights.items())
            assert "logits" in keys
            assert "logits" not in found[3]
            # Once in forward, once in backward, however many tiles the tokens are.
            assert tiles or found[2] <= gathers


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (2, 2)])
def test_a_transformers_model_trains_alike_by_one_call(rank_pools: Any, tmp_path: Path, world: int, stage: int) -> None:
    rows = [("llama", {"stage": stage, "param": "cpu", "optimizer": "cpu"})]
    if world == 1:
        rows += [("gpt2", {"stage": stage, "param": "nvme", "optimizer": "nvme"})]
    rank_pools[world].run(compare, str(tmp_path / "nvme"), rows)


def test_a_copy_of_a_tiled_model_is_its_own(tmp_path: Path) -> None:
    model = infinity.tile_sequence(hf_model("llama"), tile_tokens=8)
    twin = copy.deepcopy(model)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    chance = math.log(96)
    assert float(twin(input_ids=ids, labels=ids).loss.detach()) == pytest.approx(chance, rel=1e-6)
    assert float(model(input_ids=ids, labels=ids).loss.detach()) != pytest.approx(chance, rel=1e-4)
    plain = model(input_ids=ids, labels=ids, logits_to_keep=20)
    assert plain.logits.shape == (1, 20, 96)
    assert float(plain.loss.detach()) == pytest.approx(float(model(input_ids=ids, labels=ids).loss.detach()), rel=1e-6)


def test_the_loss_alone_is_tiled_where_the_mlps_are_to_stay() -> None:
    model = infinity.tile_sequence(hf_model("llama"), tile_tokens=8, mlps=False)
    assert all("forward" not in module.__dict__ for module in model.modules() if module is not model.lm_head)
    ids = torch.arange(20)[None]
    output = model(input_ids=ids, labels=ids)
    assert "logits" not in output
    plain = hf_model("llama")
    assert float(output.loss.detach()) == pytest.approx(float(plain(input_ids=ids, labels=ids).loss.detach()), rel=1e-6)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
@pytest.mark.parametrize("first", ["peft", "tiles"])
def test_a_model_that_peft_wraps_is_tiled_before_or_after(task: str | None, first: str) -> None:
    ids = torch.arange(20)[None]
    expected = float(hf_model("llama")(input_ids=ids, labels=ids).loss.detach())
    model = hf_model("llama")
    if first == "tiles":
        infinity.tile_sequence(model, tile_tokens=8)
    model = lora(model, task_type=task)
    if first == "peft":
        assert infinity.tile_sequence(model, tile_tokens=8) is model
    output = model(input_ids=ids, labels=ids)
    assert "logits" not in output
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.matrix
def test_a_tiled_loss_is_measured_on_shapes_alone() -> None:
    model = hf_model("llama")
    ids = torch.zeros(2, 300, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    whole = infinity.measure_activations(model, batch)
    tiled = infinity.measure_activations(infinity.tile_sequence(model, tile_tokens=8), batch)
    assert tiled.nbytes < whole.nbytes


def test_models_that_cannot_be_tiled_are_refused():
    with pytest.raises(ConfigError, match="tile_sequence needs a transformers model"):
        infinity.tile_sequence(nn.Linear(2, 2))

    model = hf_model("llama")
    usual = type(model).loss_function.fget(model)  # type: ignore[attr-defined]
    assert callable(usual)
    infinity.tile_sequence(model)
    given = model.loss_function
    model.loss_function = lambda logits, labels, **others: given(logits / 2, labels, **others)
    ids = torch.arange(20)[None]
    with pytest.raises(StateError, match="changes its logits"):
        model(input_ids=ids, labels=ids)
