"""A model is cut only where nothing but the first argument of the next block crosses, and says so before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from infinity.config import ResolveContext, load_config, resolve
from infinity.errors import ConfigError
from infinity.parallel.stage_check import Recorded, cut_into_stages, record_cut
from infinity.plan.spec import module_tree
from infinity.plan.stages import cut_model, find_blocks
from tests.parallel.staged import KINDS, Stage, batch, differences, make, run, run_back
from tests.support.clock import fewest_seconds

PATHS = tuple(f"blocks.{index}" for index in range(4))
WORDS = torch.tensor([[1, 2, 3]])


def record(model: nn.Module, inputs: Any = None, **more: Any) -> Recorded:
    blocks = find_blocks(module_tree(model, compute_dtype="fp32"))
    return record_cut(model, blocks, inputs or {"words": WORDS}, torch.bfloat16, **more)


AFTER = {
    "gpt2": {"transformer.ln_f", "lm_head"},
    "opt": {"model.decoder.final_layer_norm", "lm_head"},
    "opt narrow": {"model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"},
    "bloom": {"transformer.ln_f", "lm_head"},
    "gpt_neox": {"gpt_neox.final_layer_norm", "lm_head"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_records_what_runs_behind_the_blocks_and_how_they_answer(kind):
    recorded = record(make(kind), batch(8))
    assert set(recorded.after) == AFTER.get(kind, {"model.norm", "lm_head"})
    assert set(recorded.answers) == set(recorded.blocks)
    assert set(recorded.answers.values()) == {2 if kind == "bloom" else 0}
    assert recorded.unproven == ""


@pytest.mark.parametrize("kind", ["mixtral", "opt", "llama tied"])
def test_a_pass_changes_nothing_in_the_model(kind):
    model = make(kind).eval()
    model.gradient_checkpointing_enable()
    model.model.requires_grad_(False)
    params = {name: (param, param.data_ptr(), param.requires_grad) for name, param in model.named_parameters()}
    buffers = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    before = [{**module.__dict__} for module in model.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    numbers = torch.get_rng_state()
    record(model, batch(8))
    assert torch.equal(torch.get_rng_state(), numbers)
    assert [module.__dict__ for module in model.modules()] == before
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks
    for name, param in model.named_parameters():
        assert (param, param.data_ptr(), param.requires_grad) == params[name]
        assert param.grad is None
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == buffers


def test_a_model_of_any_size_is_proven_in_seconds_without_memory():
    config = transformers.LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    seconds = fewest_seconds(lambda: record(model, batch(8)), below=5)
    assert seconds < 5


def test_auxiliary_losses_of_routers_are_refused_by_name_within_seconds():
    model = make("mixtral", output_router_logits=True)
    refused: list[str] = []

    def refuse() -> None:
        with pytest.raises(ConfigError) as caught:
            record(model, batch(8))
        refused.append(str(caught.value))

    assert fewest_seconds(refuse, below=5) < 5
    assert "MixtralForCausalLM" in refused[0]
    assert "mlp.gate.weight" in refused[0]
    assert "output_router_logits=False" in refused[0]
    # Stages that the user has written are no way around a proof.
    with pytest.raises(ConfigError, match=r"mlp\.gate\.weight"):
        record(model, batch(8), stages=(2, 3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, other: Tensor | float = 0.0) -> Tensor:
        return hidden + self.inner(hidden).tanh() + other


class Model(nn.Module):
    """Blocks between an embedding and a head; subclasses do something that no stages allow."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words) + self.shift
        for index, block in enumerate(self.blocks):
            hidden = self.step(index, block, hidden)
        return self.loss(hidden)

    def step(self, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(hidden)

    def loss(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden + self.shift)).sum()


class Skips(Model):
    """What enters block 1 enters block 2, too."""

    def step(self, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        self.kept = hidden if index == 1 else self.__dict__.get("kept")
        return block(hidden, self.kept if index == 2 else 0.0)


class InBlock(Model):
    """What block 1 has computed enters the loss."""

    def forward(self, words: Tensor) -> Tensor:
        found: list[Tensor] = []
        handle = self.blocks[1].inner.register_forward_hook(lambda module, args, output: found.append(output))
        loss = super().forward(words)
        handle.remove()
        return loss + found[0].sum()


class Frozen(InBlock):
    """The same with values that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[:2].requires_grad_(False)


class Captured(Model):
    """What enters block 2, as a hook sees it there, enters the loss."""

    def forward(self, words: Tensor) -> Tensor:
        found: list[Tensor] = []
        handle = self.blocks[2].inner.register_forward_pre_hook(lambda module, args: found.append(args[0]))
        loss = super().forward(words)
        handle.remove()
        return loss + found[0].sum()


class EveryBlock(Model):
    """The embedding enters each block."""

    def forward(self, words: Tensor) -> Tensor:
        hidden = embedded = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden, embedded)
        return self.loss(hidden)


class Uncalled(Model):
    """The head takes the embedding's weight, and no module holds it a second time."""

    def loss(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(hidden), self.embed.weight).sum()


class Shared(Model):
    """One module works between all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Linear(4, 4)

    def step(self, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(self.mixer(hidden))


class Chooses(nn.Module):
    """Answers the order of its values, too, and takes that of another block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        order = hidden.argsort(-1) if order is None else order
        return hidden + self.inner(hidden).gather(-1, order), order


class Indices(Model):
    """Block 2 takes what block 1 has chosen; block 1 would choose anew where it is given nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chooses() for _ in range(4))
        self.order: Tensor | None = None

    def step(self, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        hidden, self.order = block(hidden, self.order if index == 2 else None)
        return hidden


class HandsThrough(Indices):
    """What the model gives to every block comes back from it, and is not looked at."""

    def step(self, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        if index == 0:
            self.order = torch.arange(4).expand(hidden.shape)
        hidden, _ = block(hidden, self.order)
        return hidden


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Indices, r"blocks\.2 depends on what blocks\.1 answers without gradients"),
        (Skips, r"blocks\.2 depends on (embed|blocks\.0)\."), (InBlock, r"its loss depends on blocks\.1\.inner\."),
        (Frozen, r"its loss depends on blocks\.1\.inner\."), (Captured, r"what enters blocks\.2"),
        (EveryBlock, r"blocks\.1 depends on embed\.weight"), (Uncalled, r"its loss depends on embed\.weight"),
        (Shared, r"blocks\.1 depends on mixer\.(weight|bias)"),
    ],
)  # fmt: skip
def test_what_takes_another_way_past_a_boundary_is_refused_by_name(model, named):
    with pytest.raises(ConfigError, match=named):
        record(model())


@pytest.mark.parametrize(
    ("model", "stages"),
    [(Skips, (3, 1)), (InBlock, (1, 3)), (Captured, (1, 1, 2)), (Shared, (4,)), (Indices, (1, 3))],
)
def test_stages_that_keep_a_side_path_together_are_proven(model, stages):
    assert record(model(), stages=stages).unproven == ""
    with pytest.raises(ConfigError, match="cannot be cut into stages"):
        record(model(), stages=(2, 2) if model is not Captured else (3, 1))


def test_what_a_block_only_hands_through_is_no_side_path():
    assert record(HandsThrough()).unproven == ""


class Head(nn.Module):
    """Uses its weight without a call of the module that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.unused = nn.Linear(4, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.inner.weight)


class Parts(nn.Module):
    """Looks words up in front of the blocks, and holds what works behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scale = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words)


class Tied(Model):
    """Tied weights, a head that calls nothing, a module whose parts work at both ends, a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()
        self.head = Head()
        self.tail = nn.Linear(4, 8, bias=False)
        self.blocks[3].inner.weight = self.blocks[0].inner.weight
        self.tail.weight = self.embed.weight

    def step(self, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(hidden) if index else block(hidden + self.parts(WORDS))

    def loss(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden + self.shift)
        return (self.head(hidden) + self.tail(hidden) + self.parts.scale(hidden)).sum()


def test_tied_weights_and_parameters_around_the_blocks_may_be_used_at_both_ends():
    model = Tied()
    recorded = record(model)
    assert set(recorded.after) == {"norm", "head", "tail", "parts.scale"}
    assert recorded.blocks == PATHS
    cut = cut_model(module_tree(model, compute_dtype="fp32"), recorded.blocks, 2, after=recorded.after)
    stages = [Stage(model, [stage], cut, recorded.answers) for stage in range(2)]
    output, passed = run(stages, {"words": WORDS})
    expected = model(WORDS)
    assert torch.equal(output, expected)
    run_back(passed, output)
    expected.backward()
    assert differences(stages, model) == []


class Reversed(Model):
    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return self.loss(hidden)


class Twice(Model):
    def step(self, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(block(hidden)) if index == 2 else block(hidden)


@pytest.mark.parametrize(("model", "called"), [(Reversed, r"blocks\.3, blocks\.2"), (Twice, r"blocks\.2, blocks\.2")])
def test_blocks_that_are_not_called_once_each_in_order_are_refused(model, called):
    with pytest.raises(ConfigError, match=f"once each, in their order .* calls .*{called}"):
        record(model())


class ByValue(Model):
    """Depends on values, in a way that no experts stand aside for."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at = at

    def step(self, index: int, block: nn.Module, hidden: Tensor) -> Any:
        if index == self.at and hidden.sum() > 0:
            hidden = hidden + 1
        return block(hidden)


@pytest.mark.parametrize("at", [0, 3])
def test_where_the_pass_cannot_run_only_stages_that_the_user_has_written_go_on(at):
    with pytest.raises(ConfigError, match=r"ByValue does not run on shapes alone.*parallel\.stages.*vouch"):
        record(ByValue(at))
    recorded = record(ByValue(at), stages=(1, 3))
    assert recorded.blocks == PATHS
    assert set(recorded.after) == {"norm", "head"}
    assert recorded.answers == dict.fromkeys(PATHS, 0)
    assert recorded.unproven


def test_blocks_that_have_not_run_answer_as_those_of_their_class():
    model = make("bloom")
    # The model asks for values between its second and its third block.
    forward = model.transformer.h[2].forward

    def by_value(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(hidden_states * int(hidden_states.sum() > 0), *args, **kwargs)

    model.transformer.h[2].forward = by_value
    recorded = record(model, batch(8), stages=(2, 3))
    assert recorded.unproven
    assert set(recorded.answers.values()) == {2}


def test_blocks_that_are_left_out_at_random_are_refused():
    with pytest.raises(ConfigError, match=r"model\.decoder\.layerdrop is 0\.1.*Set it to 0"):
        model = make("opt")
        model.model.decoder.layerdrop = 0.1
        record(model, batch(8))


def test_a_model_without_a_loss_or_without_blocks():
    model = make("llama")
    inputs = {name: value for name, value in batch(8).items() if name != "labels"}
    assert set(record(model, inputs).after) == {"model.norm", "lm_head"}
    with pytest.raises(ConfigError, match="repeats no blocks"):
        record(nn.Sequential(nn.Linear(2, 2)))


def test_stages_of_other_numbers_of_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"parallel\.stages is \[2, 1\]"):
        record(Model(), stages=(2, 1))


_SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
_TWO = {"vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "pad_token_id": 0}  # fmt: skip
_BOTH = r"has an encoder and a decoder and is no causal language model: .* use data or tensor parallelism"


@pytest.mark.parametrize(("model", "why"), [
    (lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**_TWO)), _BOTH),
    (lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**_TWO)), _BOTH),
    (lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**_SMALL)),
     r"called as a causal language model is with nothing, for it has no vocabulary: "),
], ids=["whisper", "bart", "vit"])  # fmt: skip
def test_what_is_no_causal_language_model_is_told_so(model, why):
    with torch.device("meta"):
        made = model()
    config = resolve(load_config({"parallel": {"pipeline": 2}}), ResolveContext(world_size=2))
    with pytest.raises(ConfigError, match=why):
        cut_into_stages(made, config, module_tree(made, compute_dtype="fp32"), tuple(made._no_split_modules))
