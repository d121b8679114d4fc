"""Models in use while an engine keeps their parameters: generate, resize, copies, averages, several in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity import log
from infinity.errors import ConfigError, StateError
from tests.support.cells import kept
from tests.support.hub import hf_model
from tests.zero.test_adapters import HYPER, tokens

CASES = [(0, "none"), (1, "nvme"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "nvme")]


def config(stage: int, tier: str, folder: str) -> dict[str, Any]:
    home = {"device": tier, "nvme_path": folder}
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if stage:
        zero["offload_optimizer"] = home
    if stage == 3:
        zero["offload_param"] = home
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "zero_optimization": zero,
    }


def prompt(rank: int) -> Tensor:
    return tokens(7, rank)[:, : 4 + 2 * rank]


def write(model: Any, rank: int) -> Tensor:
    """Greedy text; ranks differ in the prompt and in how many tokens they want."""
    ids = prompt(rank)
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3 + 5 * rank, do_sample=False,
        pad_token_id=0, eos_token_id=None, use_cache=True,
    )  # fmt: skip


def train_and_write(rank: int, world_size: int, stage: int, tier: str, folder: str) -> dict[str, Any]:
    """Generation, evaluation and a moving average between training steps."""
    model = hf_model("llama")
    engine, *_ = infinity.initialize(model=model, config=config(stage, tier, folder))
    with engine:
        average = {name: infinity.state(param).master for name, param in model.named_parameters()}
        texts, losses = [], []
        for step in range(2):
            batch = tokens(step, rank)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
            for name, param in model.named_parameters():
                average[name].lerp_(infinity.state(param).master, 0.1)
            engine.eval()
            with torch.no_grad():
                losses.append(engine(input_ids=tokens(9, rank), labels=tokens(9, rank)).loss)
            # On the engine, or on the module as a program that knows of no engine would.
            texts.append(write(engine if step else model, rank))
            engine.train()
        return {"texts": texts, "losses": losses, "average": average}


def plain_twin(world_size: int) -> list[dict[str, Any]]:
    """The same with plain torch in one process; what each rank would see."""
    model: Any = hf_model("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    average = {name: param.detach().clone() for name, param in model.named_parameters()}
    seen: list[dict[str, Any]] = [{"texts": [], "losses": [], "average": average} for _ in range(world_size)]
    for step in range(2):
        for rank in range(world_size):
            batch = tokens(step, rank)
            (model(input_ids=batch, labels=batch).loss / world_size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            average[name].lerp_(param.detach(), 0.1)
        model.eval()
        for rank in range(world_size):
            with torch.no_grad():
                seen[rank]["losses"].append(model(input_ids=tokens(9, rank), labels=tokens(9, rank)).loss)
            seen[rank]["texts"].append(write(model, rank))
        model.train()
    return seen


@pytest.mark.parametrize(("stage", "tier"), kept(CASES, [(1, "nvme"), (3, "cpu"), (3, "nvme")]))
@pytest.mark.parametrize("world_size", kept([1, 2], [2]))
def test_generate_evaluate_and_average_between_steps(
    world_size: int, stage: int, tier: str, tmp_path: Path, rank_pools: Any
) -> None:
    results = rank_pools[world_size].run(train_and_write, stage, tier, str(tmp_path))
    for ours, theirs in zip(results, plain_twin(world_size), strict=True):
        for text, expected in zip(ours["texts"], theirs["texts"], strict=True):
            assert torch.equal(text, expected)
        for loss, expected in zip(ours["losses"], theirs["losses"], strict=True):
            assert abs(float(loss) - float(expected)) <= 1e-5
        for name, value in theirs["average"].items():
            assert float((ours["average"][name] - value).abs().max()) <= 1e-6


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    engine, *_ = infinity.initialize(model=hf_model("llama"), config=config(3, "nvme", str(tmp_path)))
    with engine:
        yield engine


def step_once(engine: Any, vocabulary: int = 90) -> None:
    batch = tokens(0, 0).clamp(max=vocabulary)
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()


def test_embeddings_are_resized_before_initialize(tmp_path: Path) -> None:
    with infinity.Init(config=config(3, "nvme", str(tmp_path))):
        model: Any = hf_model("llama")
        model.resize_token_embeddings(101, mean_resizing=False)
    engine, *_ = infinity.initialize(model=model, config=config(3, "nvme", str(tmp_path)))
    with engine:
        assert infinity.state(model.lm_head.weight).master.shape == (101, 32)
        assert torch.equal(
            infinity.state(model.model.embed_tokens.weight).master[:96], hf_model("llama").model.embed_tokens.weight
        )
        step_once(engine, 100)


def test_resizing_embeddings_afterwards_is_an_error_with_the_way_out(engine: Any) -> None:
    model = engine.module
    with pytest.raises(StateError, match=r"model\.embed_tokens\.weight is partitioned"):
        model.resize_token_embeddings(101)
    message = r"embed_tokens\.weight has shape \(96, 32\).*data of shape \(101, 32\).*before infinity\.initialize"
    with pytest.raises(StateError, match=message), infinity.modify(model):
        model.resize_token_embeddings(101, mean_resizing=False)
    # The head was replaced by a new one.
    message = r"lm_head\.weight has joined the model after infinity\.initialize\(\).*change the model before"
    with pytest.raises(StateError, match=message):
        step_once(engine)
    with pytest.raises(StateError, match=message):
        engine.state_dict()


def test_data_that_is_assigned_is_kept_by_modify_and_refused_by_read(engine: Any) -> None:
    weight = engine.module.model.norm.weight
    with infinity.modify(weight):
        weight.data = torch.full((32,), 1.5)
    assert (infinity.state(weight).master == 1.5).all()
    with pytest.raises(StateError, match=r"norm\.weight was changed inside infinity\.read"), infinity.read(weight):
        weight.data = torch.zeros(32)
    assert (infinity.state(weight).master == 1.5).all()
    step_once(engine)


class Repacks(nn.Module):
    """A layer that gives its weight other data when it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data * 2
        return self.linear(x)


def test_data_assigned_inside_forward_is_told_to_be_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log._said.discard("data-assigned")
    model = nn.Sequential(Repacks(), nn.Linear(8, 8))
    engine, *_ = infinity.initialize(model=model, config=config(3, "nvme", str(tmp_path)))
    with engine:
        before = infinity.state(model[0].linear.weight).master
        with torch.no_grad(), caplog.at_level("WARNING", "infinity"):
            engine(torch.ones(2, 8))
        assert "0.linear.weight.data was assigned while the parameter was whole" in caplog.text
        assert torch.equal(infinity.state(model[0].linear.weight).master, before)


def test_weights_are_initialised_anew_in_place(engine: Any) -> None:
    model = engine.module
    step_once(engine)
    torch.manual_seed(5)
    with infinity.modify(model):
        for name, param in model.named_parameters():
            if "proj" in name:
                nn.init.normal_(param, std=0.5)
    torch.manual_seed(5)
    for name, param in model.named_parameters():
        if "proj" in name:
            assert torch.equal(infinity.state(param).master, nn.init.normal_(torch.empty(param.shape), std=0.5))
    step_once(engine)


def test_a_copy_of_the_model_is_whole_and_free_of_the_engine(engine: Any) -> None:
    with pytest.raises(StateError, match=r"infinity\.read"):
        copy.deepcopy(engine.module)
    with infinity.read(engine.module):
        twin = copy.deepcopy(engine.module)
    assert all(type(param) is nn.Parameter for param in twin.parameters())
    before = engine.coordinator.mismatches
    batch = tokens(0, 0)
    expected = engine(input_ids=batch, labels=batch).loss
    loss = twin(input_ids=batch, labels=batch).loss
    assert abs(float(loss.detach()) - float(expected.detach())) <= 1e-6
    loss.backward()
    assert all(param.grad is not None for param in twin.parameters())
    assert engine.coordinator.mismatches == before
    engine.backward(expected)
    engine.step()


def copy_on_one_rank(rank: int, world_size: int, folder: str) -> Tensor | None:
    """The copy runs on rank 0 alone: it must not wait for others."""
    engine, *_ = infinity.initialize(model=hf_model("llama"), config=config(3, "nvme", folder))
    with engine:
        with infinity.read(engine.module):
            twin = copy.deepcopy(engine.module) if rank == 0 else None
        text = write(twin, 0) if twin is not None else None
        step_once(engine)
        return text


def test_a_copy_generates_on_one_rank_alone(tmp_path: Path, rank_pools: Any) -> None:
    text, nothing = rank_pools[2].run(copy_on_one_rank, str(tmp_path))
    assert torch.equal(text, write(hf_model("llama"), 0))
    assert nothing is None


def policy_and_reference(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A policy learns while a frozen reference, on the same drive, is asked in between."""
    reference_model: Any = hf_model("llama", seed=1).requires_grad_(False)
    reference, *_ = infinity.initialize(model=reference_model, config=config(3, "nvme", folder))
    policy, *_ = infinity.initialize(model=hf_model("llama"), config=config(3, "nvme", folder))
    kinds = reference.memory().peak
    with pytest.raises(StateError, match="nothing to step"):
        reference.step()
    answers = []
    with policy:
        for step in range(2):
            batch = tokens(step, rank)
            with torch.no_grad():
                answers.append(reference(input_ids=batch, labels=batch).loss)
            policy.backward(policy(input_ids=batch, labels=batch).loss)
            policy.step()
        masters = [infinity.state(param).master for param in policy.module.parameters()]
    # One goes, the other stays in use.
    with torch.no_grad(), reference:
        answers.append(reference(input_ids=tokens(5, rank), labels=tokens(5, rank)).loss)
    return {"answers": answers, "masters": masters, "kinds": kinds}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_policy_and_a_frozen_reference_share_a_process(world_size: int, tmp_path: Path, rank_pools: Any) -> None:
    model: Any = hf_model("llama")
    frozen: Any = hf_model("llama", seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    for step in range(2):
        for rank in range(world_size):
            (model(input_ids=tokens(step, rank), labels=tokens(step, rank)).loss / world_size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for rank, result in enumerate(rank_pools[world_size].run(policy_and_reference, str(tmp_path))):
        for ours, param in zip(result["masters"], model.parameters(), strict=True):
            assert float((ours - param.detach()).abs().max()) <= 1e-6
        for step, answer in zip((0, 1, 5), result["answers"], strict=True):
            expected = frozen(input_ids=tokens(step, rank), labels=tokens(step, rank)).loss
            assert abs(float(answer) - float(expected.detach())) <= 1e-5
        held = {kind for kinds in result["kinds"].values() for kind, nbytes in kinds.items() if nbytes}
        assert not held & {"grad", "full_grad", "exp_avg", "exp_avg_sq"}


def test_two_engines_that_share_a_weight_are_refused(engine: Any, tmp_path: Path) -> None:
    other = hf_model("llama")
    other.lm_head.weight = engine.module.lm_head.weight
    with pytest.raises(ConfigError, match=r"lm_head\.weight belongs to another engine"):
        infinity.initialize(model=other, config=config(3, "nvme", str(tmp_path)))


def test_a_model_whose_chosen_parameters_are_frozen_is_refused(tmp_path: Path) -> None:
    model = hf_model("llama").requires_grad_(False)
    with pytest.raises(ConfigError, match="given to train"):
        infinity.initialize(
            model=model, config=config(3, "nvme", str(tmp_path)), model_parameters=[*model.lm_head.parameters()]
        )
