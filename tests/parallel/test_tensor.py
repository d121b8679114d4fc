"""A model divided over the ranks of a tensor group computes what the undivided one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError
from infinity.parallel.tensor import VOCABULARY
from tests.parallel.divided import (
    MODELS,
    axis_of,
    batch,
    divide,
    gradients,
    make,
    part,
    with_sequence,
    worst_error,
)  # fmt: skip
from tests.parallel.groups import open_tensor_group
from tests.support.cells import kept

Errors = dict[str, tuple[float, float, str]]


def run(model: Any, checkpointing: bool | None, **more: Any) -> float:
    """Loss and gradients of one batch. checkpointing: reentrant, not so, or none."""
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    loss = model(**{**batch(), **more}).loss
    loss.backward()
    return float(loss.detach())


def compare(rank: int, world: int, kinds: list[str], sequence: bool) -> Errors:
    """Relative errors of the loss and of the worst gradient, by case."""
    group = open_tensor_group(rank, world)
    found = {}
    for kind in kinds:
        # A router's loss is of all tokens.
        more = {"output_router_logits": not sequence} if kind == "mixtral" else {}
        for checkpointing in (None, False, True):
            # The undivided one recomputes, too: reentrant, transformers' router logits have no gradients.
            plain, model = make(kind, **more), make(kind, **more)
            expected = run(plain, checkpointing)
            axis = axis_of(model, world, sequence=sequence and kind != "mixtral")
            if sequence and kind == "mixtral":
                axis = with_sequence(axis, "model.layers.0", "model.layers.1")
            assert axis.sequence == sequence and axis.head == "lm_head"
            divide(model, axis, group)
            loss = run(model, checkpointing)
            worst = worst_error(gradients(model, axis), gradients(plain), axis, rank)
            found[f"{kind}, reentrant {checkpointing}"] = abs(loss / expected - 1), *worst
    return found


def check(answers: list[Errors]) -> None:
    for found in answers:
        assert {name: errors for name, errors in found.items() if errors[0] > 1e-6 or errors[1] > 1e-5} == {}


@pytest.mark.parametrize("sequence", [False, True])
def test_loss_and_gradients_are_those_of_the_undivided_model(rank_pools, sequence):
    check(rank_pools[2].run(compare, list(MODELS), sequence))


@pytest.mark.slow
@pytest.mark.parametrize("sequence", kept([False, True], [True]))
def test_loss_and_gradients_are_the_same_on_four_ranks(rank_pools, sequence):
    check(rank_pools[4].run(compare, list(MODELS), sequence))


def precision(rank: int, world: int, sequence: bool) -> tuple[float, float]:
    """The errors of all gradients against float64, divided and undivided, in bf16."""
    group = open_tensor_group(rank, world)
    plain, model = make("llama").bfloat16(), make("llama").bfloat16()
    # The same bf16 weights; tables of positions in full.
    exact = make("llama").bfloat16().double()
    for each in (exact, plain):
        run(each, None, attention_mask=None)
    axis = axis_of(model, world, sequence=sequence)
    divide(model, axis, group)
    run(model, None, attention_mask=None)
    true, mine = gradients(exact), {"divided": gradients(model, axis), "plain": gradients(plain)}
    squares = {"divided": 0.0, "plain": 0.0}
    for name, grad in true.items():
        shard = axis.params[name][0]
        squares["divided"] += float((mine["divided"][name] - part(grad, shard, rank)).square().sum())
        squares["plain"] += float((part(mine["plain"][name], shard, rank) - part(grad, shard, rank)).square().sum())
    return squares["divided"] ** 0.5, squares["plain"] ** 0.5


@pytest.mark.parametrize("sequence", [False, True])
def test_bf16_is_as_exact_as_the_undivided_model(rank_pools, sequence):
    for divided, plain in rank_pools[2].run(precision, sequence):
        assert 0 < divided <= 1.5 * plain


def evaluation(rank: int, world: int) -> list[Any]:
    """Logits and words that an evaluated model gives, divided and not; then what is left of the division."""
    group = open_tensor_group(rank, world)
    plain, model = make("gemma2").eval(), make("gemma2").eval()
    applied = divide(model, axis_of(model, world, sequence=True), group)
    words = {name: values for name, values in batch(7).items() if name != "labels"}
    with torch.no_grad():
        expected, found = plain(**words).logits, model(**words).logits
        labelled = abs(float(plain(**batch(7)).loss) - float(model(**batch(7)).loss))
        told = [each.generate(**words, max_new_tokens=5, do_sample=False).tolist() for each in (plain, model)]
    model.train()
    gathered = model(**batch() | {"labels": None}).logits.shape[-1]
    local = model(**batch()).logits.shape[-1]
    try:
        model(**batch(7))
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    applied.remove()
    applied.remove()
    left = [path for path, each in model.named_modules() if {"forward", VOCABULARY, "_loss_function"} & set(vars(each))]
    return [float((expected - found).abs().max()), labelled, told[0] == told[1], gathered, local, refusal, left]


def test_an_evaluated_model_gives_whole_logits_and_a_removed_division_leaves_nothing(rank_pools):
    for error, labelled, same_words, gathered, local, refusal, left in rank_pools[2].run(evaluation):
        assert error < 1e-5 and labelled < 1e-5 and same_words
        assert (gathered, local, left) == (64, 32, [])
        assert "7 tokens" in refusal and "multiple of 2" in refusal and "8" in refusal


def tiled(rank: int, world: int) -> Errors:
    """A model whose loss and MLPs go by tiles, divided."""
    group = open_tensor_group(rank, world)
    plain, model = make("llama"), make("llama")
    expected = run(plain, None)
    infinity.tile_sequence(model, tile_tokens=4)
    axis = axis_of(model, world)
    divide(model, axis, group)
    loss = run(model, None)
    worst = worst_error(gradients(model, axis), gradients(plain), axis, rank)
    found = {"tile_sequence": (abs(loss / expected - 1), *worst)}
    # Without labels the head gives logits, of which a program computes a loss of its own.
    model.zero_grad(), plain.zero_grad()
    losses = [each(input_ids=batch()["input_ids"]).logits.square().mean() for each in (plain, model)]
    for loss in losses:
        loss.backward()
    worst = worst_error(gradients(model, axis), gradients(plain), axis, rank)
    found["without labels"] = abs(float(losses[1].detach()) / float(losses[0].detach()) - 1), *worst
    # A program's own call with the head.
    model.zero_grad(), plain.zero_grad()
    torch.manual_seed(2)
    hidden = [torch.randn(2, 8, 32).requires_grad_() for _ in range(1)]
    hidden.append(hidden[0].detach().clone().requires_grad_())
    labels = batch()["labels"]
    totals = []
    for each, given in zip((plain, model), hidden, strict=True):
        totals.append(infinity.tiled_cross_entropy(given, each.lm_head, labels, tile_tokens=4))
        totals[-1].backward()
    error = float((hidden[0].grad - hidden[1].grad).abs().max() / hidden[0].grad.abs().max())
    found["tiled_cross_entropy"] = abs(float(totals[1].detach()) / float(totals[0].detach()) - 1), error, "hidden"
    return found


def test_a_loss_by_tiles_is_combined_over_the_vocabulary(rank_pools):
    check(rank_pools[2].run(tiled))


def refusals(rank: int, world: int) -> list[str]:
    group = open_tensor_group(rank, world)
    found = []

    def attempt(model: nn.Module, sequence: bool) -> None:
        axis = axis_of(model, world, sequence=sequence)
        with pytest.raises(ConfigError) as error:
            divide(model, axis, group)
        found.append(str(error.value))

    attempt(infinity.tile_sequence(make("llama")), True)
    model = make("llama")
    model.model.embed_tokens.max_norm = 1.0
    attempt(model, False)
    return found


def test_what_cannot_be_divided_is_refused(rank_pools):
    for by_tiles, embedding in rank_pools[2].run(refusals):
        assert "model.layers.0.mlp" in by_tiles and "tile_sequence(mlps=False)" in by_tiles
        assert "model.embed_tokens" in embedding and "max_norm" in embedding
