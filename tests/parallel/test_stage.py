"""A model that runs one stage at a time computes what the uncut one does, with none of the other stages' weights."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, StateError
from infinity.parallel.stage import StagedModel
from infinity.plan.stages import StageCut, StageEnd
from tests.parallel.staged import KINDS, Stage, batch, cut, differences, leaves, make, run, run_back
from tests.support.cells import turns

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(*turns(kind=[*KINDS, "ctrl", "openai-gpt"], dtype=[*DTYPES]))
def test_stages_give_the_loss_and_gradients_of_the_uncut_model(kind, dtype):
    model = make(kind, DTYPES[dtype])
    where, answers = cut(model)
    stages = [Stage(model, [stage], where, answers) for stage in range(3)]
    for inputs in (batch(16), batch(9, seed=1)):
        expected = model(**inputs).loss
        expected.backward()
        output, passed = run(stages, inputs)
        assert torch.equal(output.loss, expected)
        run_back(passed, output.loss)
    assert differences(stages, model) == []


@pytest.mark.parametrize("kind", ["llama tied", "bloom", "mixtral", "opt narrow"])
def test_two_chunks_share_one_model(kind):
    model = make(kind)
    where, answers = cut(model, (1, 2, 1, 1))
    ranks = [Stage(model, own, where, answers) for own in ([0, 2], [1, 3])]
    batches = [batch(16), batch(11, seed=1), batch(16, seed=2)]
    losses = [model(**inputs).loss for inputs in batches]
    for loss in losses:
        loss.backward()
    # All forwards, then all backwards.
    ran = [run(ranks, inputs) for inputs in batches]
    assert all(torch.equal(output.loss, loss) for (output, _), loss in zip(ran, losses, strict=True))
    for output, passed in ran:
        run_back(passed, output.loss)
    assert differences(ranks, model) == []


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_gives_the_logits_of_the_uncut_model(kind):
    model = make(kind).eval()
    where, answers = cut(model)
    assert not model.training
    stages = [Stage(model, [stage], where, answers) for stage in range(3)]
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    with torch.no_grad():
        output, _ = run(stages, inputs)
        assert torch.equal(output.logits, model(**inputs).logits)
    assert output.loss is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bloom", "mixtral"])
def test_blocks_may_be_computed_again_in_backward(kind, reentrant):
    model = make(kind)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    where, answers = cut(model)
    assert all(block.gradient_checkpointing for block in map(model.get_submodule, where.blocks))
    stages = [Stage(model, [stage], where, answers) for stage in range(3)]
    model(**batch()).loss.backward()
    output, passed = run(stages, batch())
    run_back(passed, output.loss)
    assert differences(stages, model) == []


def test_one_stage_is_the_model():
    model = make("llama")
    where, answers = cut(model, (5,))
    stage = Stage(model, [0], where, answers)
    output, passed = run([stage], batch())
    run_back(passed, output.loss)
    model(**batch()).loss.backward()
    assert differences([stage], model) == []


class Block(nn.Module):
    """Counts what it is called with; may fail, and answer with a tuple."""

    kind = "plain"

    def __init__(self, answers: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.answers = answers
        self.fails = False

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Any:
        if self.fails:
            raise RuntimeError("a block fails")
        hidden = hidden + self.inner(hidden).tanh() * scale
        return (hidden, *[None] * (self.answers - 1)) if self.answers else hidden


class Model(nn.Module):
    """Calls its blocks in a way of its own; `calls` are their indices."""

    def __init__(self, calls: tuple[int, ...] = (0, 1, 2, 3), answers: int = 0, way: str = "position") -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList(Block(answers) for _ in range(4))
        self.head = nn.Linear(4, 8)
        self.calls, self.way = calls, way
        self.seen: list[Any] = []

    def forward(self, words: Tensor, use_cache: bool = True) -> Tensor:
        hidden = self.norm(self.embed(words))
        for index in self.calls:
            block = self.blocks[index]
            self.seen.append((block.kind, isinstance(block, Block), len(block.inner.weight)))
            if self.way == "keyword":
                answer = block(scale=0.5, hidden=hidden)
            else:
                # Between the blocks, too, a model may compute.
                answer = block(hidden * 2 if self.way == "between" else hidden, 0.5)
            hidden = answer[0] if isinstance(answer, tuple) else answer
        return self.head(hidden).sum()


PATHS = tuple(f"blocks.{index}" for index in range(4))
CUT = StageCut(PATHS, (2, 1, 1), ("head",))
WORDS = torch.tensor([[1, 2, 3]])


def stages_of(model: Model, **more: Any) -> list[Stage]:
    return [Stage(model, [stage], CUT, dict.fromkeys(PATHS, more.get("answers", 0))) for stage in range(3)]


@pytest.mark.parametrize("way", ["position", "keyword", "between"])
@pytest.mark.parametrize("answers", [0, 1, 3])
def test_a_model_may_call_its_blocks_in_its_own_way(way, answers):
    model = Model(answers=answers, way=way)
    stages = stages_of(model, answers=answers)
    output, passed = run(stages, {"words": WORDS})
    expected = model(WORDS)
    assert torch.equal(output, expected)
    run_back(passed, output)
    expected.backward()
    assert differences(stages, model) == []
    # To the model, a stand-in is the block.
    assert all(set(stage.model.seen) == {("plain", True, 4)} for stage in stages)


def test_several_tensors_may_cross_a_boundary():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            hidden, mask = pair
            return hidden + self.inner(hidden) * mask, mask

    class Pairs(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Pair() for _ in range(4))

        def forward(self, words: Tensor) -> Tensor:
            pair = self.norm(self.embed(words)), (words > 1).unsqueeze(-1)
            for block in self.blocks:
                pair = block(pair)
            return self.head(pair[0]).sum()

    model = Pairs()
    stages = stages_of(model)
    output, passed = run(stages, {"words": WORDS})
    assert [len(answer) for _, answer in passed[:-1]] == [2, 2]
    run_back([(received and received[:1], answer if stage == 2 else answer[:1])
              for stage, (received, answer) in enumerate(passed)], output)  # fmt: skip
    model(WORDS).backward()
    assert differences(stages, model) == []


def test_modules_are_in_their_places_after_a_forward_and_after_a_failure():
    model = Model()
    modules, state = dict(model.named_modules()), list(model.state_dict())
    during: list[list[str]] = []
    model.blocks[1].inner.register_forward_pre_hook(
        lambda *_: during.append([name for name, _ in model.named_parameters()])
    )
    staged = StagedModel(model, CUT, own=[0, 1, 2], dtype=torch.float32)
    (sent,) = staged.forward(0, None, (WORDS,), {})
    staged.forward(1, (sent,), (WORDS,), {})
    model.blocks[0].fails = model.blocks[3].fails = True
    with pytest.raises(RuntimeError, match="a block fails"):
        staged.forward(0, None, (WORDS,), {})
    with pytest.raises(RuntimeError, match="a block fails"):
        staged.forward(2, (sent,), (WORDS,), {})
    assert dict(model.named_modules()) == modules
    assert list(model.state_dict()) == state
    # Names are the same while a stage runs.
    assert during == [[name for name, _ in model.named_parameters()]]
    model.blocks[0].fails = False
    (again,) = staged.forward(0, None, (WORDS,), {})
    assert torch.equal(again, sent)
    staged.remove()
    staged.remove()
    assert dict(model.named_modules()) == modules
    with pytest.raises(StateError, match="removed"):
        staged.forward(0, None, (WORDS,), {})


def test_hooks_that_are_always_called_see_the_stage_end_and_those_of_blocks_the_received_tensor():
    model = make("llama")
    where, answers = cut(model)
    stage = Stage(model, [1], where, answers)
    told: list[tuple[str, Any, bool]] = []
    entered: list[Tensor] = []

    def tell(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            told.append((name, output is None, isinstance(sys.exc_info()[1], StageEnd)))

        return hook

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(args[0])

    names = ["", "model", "model.embed_tokens", *where.blocks, f"{where.blocks[2]}.mlp", "model.norm"]
    for name in names:
        stage.model.get_submodule(name).register_forward_hook(tell(name), always_call=True)
    received = (torch.randn(2, 16, 32, requires_grad=True),)
    stage.forward(1, received, batch())
    # Registered behind the first forward, and in front of all others.
    stage.model.get_submodule(where.blocks[2]).register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    told.clear()
    (sent,) = stage.forward(1, received, batch())
    inner = [(f"{where.blocks[2]}.mlp", False, False), (where.blocks[2], False, False)]
    assert told == [*inner, ("model", True, True), ("", True, True)]
    assert entered[0] is received[0]
    assert sys.exc_info() == (None, None, None)
    assert sent.requires_grad


def test_embeddings_of_other_stages_are_zeros_that_the_model_may_write_to():
    model = make("llama", torch.bfloat16)
    where, answers = cut(model)
    stage = Stage(model, [2], where, answers)
    seen: list[Tensor] = []
    stage.model.model.rotary_emb.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    stage.forward(2, (torch.randn(2, 16, 32).bfloat16(),), batch())
    (zeros,) = seen
    assert zeros.shape == (2, 16, 32)
    assert zeros.dtype == torch.bfloat16
    assert not zeros.any()
    assert not zeros.requires_grad
    zeros += 1


def test_a_stage_leaves_nothing_behind():
    model = make("llama")
    where, answers = cut(model)
    stage = Stage(model, [1], where, answers)
    kept: list[weakref.ref[Tensor]] = []
    stage.model.get_submodule(f"{where.blocks[2]}.mlp").register_forward_hook(
        lambda module, args, output: kept.append(weakref.ref(output))
    )
    received = leaves((torch.randn(2, 16, 32),))
    gone = weakref.ref(received[0])
    sent = stage.forward(1, received, batch())
    del sent, received
    # Without the garbage collector: the exception that ended the forward holds no frames.
    assert kept[0]() is None
    assert gone() is None


@pytest.mark.parametrize("given", [None, True])
def test_no_cache_is_filled_unless_the_caller_wants_it(given):
    model = make("llama")
    where, answers = cut(model)
    staged = StagedModel(model, where, own=[2], dtype=torch.float32, answers=answers)
    inputs = {**batch(), **({} if given is None else {"use_cache": given})}
    cache = staged.forward(2, (torch.randn(2, 16, 32),), (), inputs).get("cache")
    assert (cache is not None) == bool(given)
    plain = Model()
    seen: list[bool] = []
    plain.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["use_cache"]), with_kwargs=True)
    StagedModel(plain, CUT, own=[0], dtype=torch.float32).forward(0, None, (WORDS,), {})
    assert seen == [False]


@pytest.mark.parametrize("calls", [(1, 2, 3), (1, 0, 2, 3), (0, 0, 1, 2, 3)])
def test_inside_a_stage_a_model_calls_blocks_as_it_likes(calls):
    model = Model(calls)
    stages = stages_of(model)
    output, passed = run(stages, {"words": WORDS})
    expected = model(WORDS)
    assert torch.equal(output, expected)
    run_back(passed, output)
    expected.backward()
    assert differences(stages, model) == []


@pytest.mark.parametrize("calls", [(0, 2, 1, 3), (0, 1, 3, 2), (0, 1, 3), (0, 1, 2), (0, 1, 2, 2, 3), (0, 1), ()])
def test_a_model_that_calls_blocks_of_stages_in_another_order_is_refused(calls):
    model = Model(calls)
    staged = StagedModel(model, CUT, own=[0, 1, 2], dtype=torch.float32)
    hidden = (torch.randn(1, 3, 4),)
    with pytest.raises(StateError, match="blocks"):
        for stage in range(3):
            staged.forward(stage, hidden if stage else None, (WORDS,), {})
    assert all(type(block) is Block for block in model.blocks)


def test_what_crosses_a_boundary_is_tensors():
    class Odd(Model):
        def forward(self, words: Tensor) -> Any:
            hidden = {"hidden": self.embed(words)}
            for block in self.blocks:
                hidden = block(hidden) if self.way == "mapping" else block()
            return hidden

    for way, message in (("mapping", "dict"), ("nothing", "without its first argument")):
        model = Odd(way=way)
        model.blocks[0] = model.blocks[1] = nn.Identity()
        model.blocks[0].forward = model.blocks[1].forward = lambda hidden=None: hidden
        with pytest.raises(ConfigError, match=message):
            StagedModel(model, CUT, own=[0], dtype=torch.float32).forward(0, None, (WORDS,), {})


def test_a_stage_wants_what_the_stage_before_sent():
    staged = StagedModel(Model(), CUT, own=[0, 2], dtype=torch.float32)
    for stage, received in ((0, (torch.zeros(1),)), (2, None), (1, (torch.zeros(1),))):
        with pytest.raises(StateError, match=f"stage {stage}"):
            staged.forward(stage, received, (WORDS,), {})
