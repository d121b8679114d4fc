"""Ranks that share each sequence compute what one rank computes: sums in another order, and nothing else."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

import infinity
from estimators.activations import activations
from infinity.distributed import collectives
from infinity.engine import Engine
from infinity.engine.activation_forecast import LiveBytes
from infinity.errors import ConfigError, StateError
from tests.conftest import RankPools
from tests.support.cells import kept
from tests.support.oracle import digest, join, settings

VOCABULARY, STEPS, ROWS, TOKENS = 96, 10, 2, 32
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Class, core of attention, and sizes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "sdpa", {"tie_word_embeddings": True}),
    "one head": ("llama", "eager", {"num_key_value_heads": 1}),
    # Neither of two and four ranks divides its key-value heads.
    "six heads": ("llama", "sdpa", {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}),
    "qwen3": ("qwen3", "sdpa", {}),
    "gemma3": ("gemma3_text", "eager", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral": ("mistral", "sdpa", {"sliding_window": 8}),
    "gpt_oss": ("gpt_oss", "eager", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
HABITS = ("padded", "padded left", "packed", "in one part", "accumulated", "recomputed", "uneven")


def build(family: str, **more: Any) -> Any:
    name, core, sizes = FAMILIES[family]
    config = AutoConfig.for_model(name, **{**COMMON, **sizes, **more})
    config._attn_implementation = core
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for param_name, param in model.named_parameters():
        if "sinks" in param_name or "experts" in param_name:
            nn.init.normal_(param, std=0.05)
    return model.train()


def batch(step: int, habit: str = "") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    tokens = TOKENS - 3 if habit == "uneven" else TOKENS
    ids = torch.randint(3, VOCABULARY, (ROWS, tokens), generator=generator)
    found: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if habit.startswith("padded"):
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][0, :9] = 0
        found["attention_mask"][0, tokens if habit.endswith("left") else 23 :] = 0
        found["labels"][found["attention_mask"] == 0] = -100
    elif habit == "packed":
        places = [torch.arange(count) for count in (11, 9, tokens - 20)]
        found["position_ids"] = torch.cat(places).expand(ROWS, -1)
        found["labels"][:, [11, 20]] = -100
        found["use_cache"] = False
    elif habit == "in one part":
        found["labels"][:, 8:] = -100
    return found


def configuration(folder: str, sequence: int, **more: Any) -> dict[str, Any]:
    config = settings(folder, clip=1.0, sequence_parallel_size=sequence, **more)
    return {**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}}}


def mean(loss: Tensor, engine: Engine) -> float:
    """Over the ranks of a sequence."""
    losses = collectives.exchange([loss.item()], engine.groups.sequence)
    return sum(row[0] for row in losses) / len(losses)


def masters(engine: Engine) -> dict[str, Tensor]:
    return {name: infinity.state(param).master.clone() for name, param in engine.module.named_parameters()}


def run(
    rank: int, world: int, folder: str, family: str, habit: str, rows: list[dict[str, Any]]
) -> list[tuple[list[float], float, dict[str, Tensor], str]]:  # fmt: skip
    """Losses, the last norm, weights and their digest of each row's run, all ranks to one sequence."""
    join(world)
    found = []
    for row in rows:
        model = build(family)
        if habit == "recomputed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        accumulation = 3 if habit == "accumulated" else 1
        config = configuration(folder, world, accumulation=accumulation, **row)
        engine, *_ = infinity.initialize(model=model, config=config)
        with engine:
            assert engine.data_size == 1 and engine.train_batch_size() == ROWS * accumulation
            losses = []
            for part in engine.sequence_batches(batch(step, habit) for step in range(STEPS * accumulation)):
                loss = engine(**part).loss
                engine.backward(loss)
                engine.step()
                losses.append(mean(loss, engine))
            weights = masters(engine)
            found.append((losses, engine.get_global_grad_norm(), weights, digest(weights)))
        file: Any = sys.modules[type(model).__module__]
        assert file.ALL_ATTENTION_FUNCTIONS is transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    return found


SUITE = [
    ("llama", "uneven", 4), ("one head", "padded left", 2), ("six heads", "accumulated", 4), ("qwen3", "packed", 2),
    ("gemma3", "packed", 4), ("mistral", "recomputed", 2), ("gpt_oss", "padded", 2), ("llama", "in one part", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "habit", "world"),
    kept([(family, habit, world) for family in FAMILIES for habit in HABITS for world in (2, 4)], SUITE),
)
def test_ranks_of_a_sequence_train_as_one_rank(
    rank_pools: RankPools, tmp_path: Path, family: str, habit: str, world: int
) -> None:
    """At every stage, on every tier of one with the same bits."""
    (alone,), *_ = rank_pools[1].run(run, str(tmp_path), family, habit, [{}])
    rows: list[dict[str, Any]] = [
        {}, {"param": "nvme", "optimizer": "nvme"}, {"param": "cpu", "optimizer": "cpu"},
        *({"stage": stage, "optimizer": home} for stage, home in ((0, "gpu"), (1, "nvme"), (2, "cpu"))),
    ]  # fmt: skip
    ranks = rank_pools[world].run(run, str(tmp_path), family, habit, rows)
    assert len({held for each in ranks for *_, held in each[:3]}) == 1
    for losses, norm, weights, _ in ranks[0]:
        # A loss of 4.5 has the last digit 4.8e-7, and ranks add up in another order.
        assert losses == pytest.approx(alone[0], abs=2e-6)
        assert norm == pytest.approx(alone[1], rel=1e-6)
        assert max(float((weights[name] - alone[2][name]).abs().max()) for name in weights) <= 1e-6


class Plain(nn.Module):
    """A model of a program's own, whose attention calls the function, or does not."""

    def __init__(self, *, exchanges: bool) -> None:
        super().__init__()
        self.exchanges = exchanges
        self.table = nn.Embedding(VOCABULARY, 32)
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor, **_: Any) -> Tensor:
        x = self.table(input_ids)
        heads = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if self.exchanges:
            core = F.scaled_dot_product_attention
            y = infinity.sequence_attention(self, core, *heads, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(*heads, is_causal=True)
        logits = self.out(x + y.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum") / num_items_in_batch


def train_plain(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    join(world)
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=Plain(exchanges=True), config=configuration(folder, world))
    with engine:
        for part in engine.sequence_batches(batch(step) for step in range(4)):
            engine.backward(engine(**part))
            engine.step()
        return masters(engine)


def test_a_model_of_a_programs_own_calls_one_function(rank_pools: RankPools, tmp_path: Path) -> None:
    (alone,) = rank_pools[1].run(train_plain, str(tmp_path))
    for weights in rank_pools[2].run(train_plain, str(tmp_path)):
        assert max(float((weights[name] - alone[name]).abs().max()) for name in alone) <= 1e-6


def evaluate(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Of a run along a sequence axis: what evaluation gives in between, and what a save is worth elsewhere."""
    join(world)
    config = configuration(folder, world)
    engine, *_ = infinity.initialize(model=build("llama"), config=config)
    ids = batch(77)["input_ids"]
    with engine:
        for part in engine.sequence_batches(batch(step) for step in range(2)):
            loss = engine(**part).loss
            engine.backward(loss)
            engine.eval()
            with torch.no_grad():
                logits = engine(input_ids=ids).logits
                words = engine.module.generate(ids[:, :5], max_new_tokens=4, do_sample=False)
                (whole,) = engine.sequence_batches([{"input_ids": ids}])
            assert whole["input_ids"].shape == ids.shape
            engine.train()
            engine.step()
        engine.save_checkpoint(f"{folder}/saved")
        return {"logits": logits.clone(), "words": words, "weights": masters(engine)}


def load(rank: int, world: int, folder: str) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """A save, loaded with all ranks to a sequence, and trained on from the engine's own loader."""
    join(world)
    data = [{name: value[0] for name, value in batch(step).items()} for step in range(8)]
    engine, _, loader, _ = infinity.initialize(
        model=build("llama"), config=configuration(folder, world), training_data=data
    )
    with engine:
        engine.load_checkpoint(f"{folder}/saved")
        weights = masters(engine)
        assert next(iter(loader))["input_ids"].shape == (ROWS, TOKENS // world)
        losses = [float(engine.train_batch()) for _ in range(3)]
        return weights, losses, masters(engine)


def test_evaluation_is_whole_and_a_checkpoint_is_that_of_any_axis(rank_pools: RankPools, tmp_path: Path) -> None:
    (alone,) = rank_pools[1].run(evaluate, str(tmp_path / "1"))
    for found in rank_pools[2].run(evaluate, str(tmp_path / "2")):
        assert torch.equal(found["words"], alone["words"])
        assert float((found["logits"] - alone["logits"]).abs().max()) <= 1e-5
    loaded = {world: rank_pools[world].run(load, str(tmp_path / "2"))[0] for world in (1, 2, 4)}
    for weights, losses, trained in loaded.values():
        assert digest(weights) == digest(found["weights"])
        assert losses == pytest.approx(loaded[1][1], abs=2e-6)
        assert max(float((trained[name] - loaded[1][2][name]).abs().max()) for name in trained) <= 1e-6


def count(rank: int, world: int, folder: str, family: str) -> list[int]:
    """Elements that this rank sends to others in attention, of each exchange of a forward and a backward."""
    join(world)
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        exchange = collectives.all_to_all

        def counted(rows: Tensor, parts: Tensor, *rest: Any) -> Any:
            sent.append(parts.numel() - parts[0].numel())
            return exchange(rows, parts, *rest)

        patch.setattr(collectives, "all_to_all", counted)
        engine, *_ = infinity.initialize(model=build(family), config=configuration(folder, world))
        with engine:
            (part,) = engine.sequence_batches([batch(0)])
            engine.backward(engine(**part).loss)
            engine.step()
    return sent


@pytest.mark.parametrize(("family", "shared"), [("llama", 2 / 8), ("one head", 2 / 8), ("six heads", 6 / 12)])
def test_a_rank_sends_what_the_paper_says(
    rank_pools: RankPools, tmp_path: Path, family: str, shared: float
) -> None:
    """(2 + 2 g) N h / P x (P - 1) / P elements a layer and direction, g the share of key-value heads, repeated ones
    counted: one head is sent to each of two ranks.
    """
    hidden, ranks = 8 * FAMILIES[family][2].get("num_attention_heads", 8), 2
    a_layer = (2 + 2 * shared) * ROWS * TOKENS * hidden / ranks * (ranks - 1) / ranks
    for sent in rank_pools[ranks].run(count, str(tmp_path), family):
        assert len(sent) == 2 * 2 * COMMON["num_hidden_layers"]
        assert math.isclose(sum(sent), 2 * COMMON["num_hidden_layers"] * a_layer)


def foreseen(rank: int, world: int, folder: str, core: str) -> tuple[int, int, int]:
    """Bytes of a part's activations: by the closed form, on shapes before the start, and as a forward makes them."""
    join(world)
    tokens, model = 512, build("llama", max_position_embeddings=512)
    model.set_attn_implementation(core)
    values = model.config.to_dict()
    config = configuration(folder, world, memory={"activations": {"sequence_length": tokens}})
    ids = torch.randint(3, VOCABULARY, (ROWS, tokens), generator=torch.Generator().manual_seed(0))
    engine, *_ = infinity.initialize(model=model, config={**config, "train_micro_batch_size_per_gpu": ROWS})
    with engine:
        assert "measured" in engine.memory().activations_source
        on_shapes = engine.memory().activations_predicted
        live = LiveBytes(model, [], lambda _: None)
        (part,) = engine.sequence_batches([{"input_ids": ids, "labels": ids}])
        with live.counting():
            output = engine(**part)
        counted = live.found("").nbytes
        engine.backward(output.loss)
        engine.step()
    closed = activations(values, batch=ROWS, sequence=tokens, compute_dtype="fp32", attention=core, parts=world)
    return closed.nbytes, on_shapes, counted


@pytest.mark.parametrize("core", ["sdpa", "eager"])
def test_the_activations_of_a_part_are_foreseen(rank_pools: RankPools, tmp_path: Path, core: str) -> None:
    """Within a tenth, as without an axis."""
    for closed, on_shapes, counted in rank_pools[2].run(foreseen, str(tmp_path), core):
        assert closed == pytest.approx(counted, rel=0.1)
        assert on_shapes == pytest.approx(counted, rel=0.02)


def refusals(rank: int, world: int, folder: str) -> list[str]:
    join(world)

    def text_of(model: nn.Module, kind: type[Exception] = ConfigError, **given: Any) -> str:
        with pytest.raises(kind) as caught:
            engine, *_ = infinity.initialize(model=model, config=configuration(folder, world, **given.pop("more", {})))
            with engine:
                parts = engine.sequence_batches([given.pop("batch", batch(0))])
                for part in parts:
                    engine(**{**part, **given})
        return str(caught.value)

    mamba = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)
    masked = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return [
        text_of(build("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)),
        text_of(build("llama", attention_dropout=0.1)),
        text_of(build("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})),
        text_of(build("llama"), position_ids=None),
        text_of(build("llama"), batch=batch(rank)),
        text_of(build("llama"), attention_mask=torch.ones(ROWS, 1, TOKENS, TOKENS, dtype=torch.bool)),
        text_of(Plain(exchanges=False), StateError),
        text_of(build("llama"), more={"parallel": {"tensor": 2}}),
        text_of(transformers.MambaForCausalLM(mamba)),
        text_of(transformers.BertForMaskedLM(masked)),
    ]


REFUSED = (
    "does not divide the 3 attention heads of LlamaForCausalLM: set it to 1",
    "drops out attention (0.1)", "scales its rotary positions", "engine.sequence_batches(loader)",
    "were given different batches (input_ids, labels)", "of shape [batch, tokens]", "infinity.sequence_attention(self",
    "beside parallel.tensor or parallel.pipeline", "pass a state from token to token", "this model's is ForMaskedLM",
)  # fmt: skip


def test_what_would_compute_something_else_is_refused_by_name(rank_pools: RankPools, tmp_path: Path) -> None:
    for texts in rank_pools[2].run(refusals, str(tmp_path)):
        for text, said in zip(texts, REFUSED, strict=True):
            assert said in text, text


def test_ranks_that_it_does_not_divide_are_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 3}
    with pytest.raises(ConfigError, match="does not divide the 1 ranks: set it to 1, or start 3 ranks"):
        infinity.initialize(model=Plain(exchanges=True), config=config)
