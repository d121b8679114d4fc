"""A model with the section `sparse_attention` trains as the same model with an explicit dense mask."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import infinity
from infinity.config.sparse_attention import SparseAttention
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.plan.block_layouts import BlockLayout
from infinity.tiling import sparse_attention as module
from tests.conftest import RankPools
from tests.parallel.test_sequence import ROWS, TOKENS, batch, build, masters
from tests.support.cells import kept
from tests.support.oracle import digest, join, settings

HEADS, STEPS = 8, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"mode": "dense", "block": 8},
    "fixed": {"mode": "fixed", "block": 2, "different_layout_per_head": True, "num_different_global_patterns": 4},
    "variable": {"mode": "variable", "block": 3, "num_random_blocks": 1, "local_window_blocks": [1, 2]},
    "bigbird": {"mode": "bigbird", "block": 4, "num_random_blocks": 1, "different_layout_per_head": True},
    "bslongformer": {"mode": "bslongformer", "block": 4, "num_sliding_window_blocks": 2},
}  # fmt: skip
SEED = 11


def configuration(folder: str, **more: Any) -> dict[str, Any]:
    config = settings(folder, clip=1.0, **more)
    return {**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}}}


def blocks_of(keys: dict[str, Any], tokens: int = TOKENS) -> Tensor:
    """The layout as pairs, [1, heads, tokens, tokens]."""
    section = SparseAttention.of(keys)
    layout = BlockLayout(section, HEADS, -(-tokens // section.block), random.Random(SEED).sample)
    tables = torch.stack([torch.from_numpy(layout.table(head)) for head in range(HEADS)])
    return tables.repeat_interleave(section.block, 1).repeat_interleave(section.block, 2)[None, :, :tokens, :tokens]


class Explicit:
    """Gives the layers of a model, in place of their masks, ones of its own: what a layout leaves of them."""

    def __init__(self, model: Any, keys: dict[str, Any]) -> None:
        self.keys = keys
        layers = keys.get("layers", "all")
        for index, layer in enumerate(model.model.layers):
            if layers == "all" or index in layers:
                layer.self_attn.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask, tokens = kwargs["attention_mask"], kwargs["hidden_states"].shape[1]
        pairs = blocks_of(self.keys, tokens)
        if mask is None:
            # What a core by itself takes None for.
            mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if mask.dtype == torch.bool:
            return args, {**kwargs, "attention_mask": mask & pairs}
        return args, {**kwargs, "attention_mask": mask.masked_fill(~pairs, torch.finfo(mask.dtype).min)}


def run(
    rank: int, world: int, folder: str, family: str, habit: str, keys: dict[str, Any], explicit: bool,
    more: dict[str, Any],
) -> tuple[list[float], dict[str, Tensor], int]:  # fmt: skip
    """Losses, weights and blocks computed, of a run with the section or with dense masks."""
    join(world)
    torch.manual_seed(SEED)
    with torch.random.fork_rng():
        model = build(family)
    if explicit:
        Explicit(model, keys)
    if habit == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = configuration(folder, **more, **({} if explicit else {"sparse_attention": keys}))
    engine, *_ = infinity.initialize(model=model, config=config)
    before = module.computed["blocks"]
    with engine:
        losses = []
        for part in engine.sequence_batches(batch(step, habit) for step in range(STEPS)):
            loss = engine(**part).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        weights = masters(engine)
    file: Any = sys.modules[type(model).__module__]
    assert file.ALL_ATTENTION_FUNCTIONS is transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    return losses, weights, module.computed["blocks"] - before


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# Not Gemma with padding in front: its eager core gives padding, of which the first token is predicted, the mean of all.
CELLS = [(family, layout, habit) for family in ("llama", "mistral", "gemma3", "gpt_oss") for layout in LAYOUTS
         for habit in ("", "padded left", "packed", "uneven")
         if (family, habit) != ("gemma3", "padded left")]  # fmt: skip
SUITE = [
    ("llama", "fixed", ""), ("llama", "bigbird", ""), ("llama", "fixed", "padded left"), ("mistral", "dense", "packed"),
    ("mistral", "bslongformer", ""), ("gpt_oss", "variable", "padded left"), ("gemma3", "dense", ""),
    ("llama", "variable", "uneven"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "layout", "habit"), kept(CELLS, SUITE))
def test_a_model_trains_as_with_an_explicit_mask(tmp_path: Path, family: str, layout: str, habit: str) -> None:
    keys = LAYOUTS[layout]
    if habit == "uneven":
        keys = {**keys, "block": 5}
    wanted = run(0, 1, str(tmp_path), family, habit, keys, True, {})
    found = run(0, 1, str(tmp_path), family, habit, keys, False, {})
    assert found[0] == pytest.approx(wanted[0], abs=2e-6)
    assert apart(found[1], wanted[1]) <= 1e-6
    assert found[2] > 0 and wanted[2] == 0


@pytest.mark.parametrize(("family", "layout", "habit"), [
    ("llama", "fixed", "padded left"), ("mistral", "bigbird", "packed"), ("gpt_oss", "dense", ""),
])  # fmt: skip
def test_ranks_of_a_sequence_have_the_heads_of_their_layouts(
    rank_pools: RankPools, tmp_path: Path, family: str, layout: str, habit: str
) -> None:
    keys = LAYOUTS[layout]
    ((_, alone, blocks),) = rank_pools[1].run(run, str(tmp_path), family, habit, keys, False, {})
    more = {"sequence_parallel_size": 2}
    ranks = rank_pools[2].run(run, str(tmp_path), family, habit, keys, False, more)
    for _, weights, _ in ranks:
        assert apart(weights, alone) <= 1e-6
    assert sum(each[2] for each in ranks) == blocks


def test_ranks_that_divide_heads_have_those_of_their_layouts(rank_pools: RankPools, tmp_path: Path) -> None:
    keys = LAYOUTS["fixed"]
    ((_, alone, blocks),) = rank_pools[1].run(run, str(tmp_path), "llama", "", keys, False, {})
    ranks = rank_pools[2].run(run, str(tmp_path), "llama", "", keys, False, {"parallel": {"tensor": 2}})
    for _, weights, _ in ranks:
        assert apart(weights, alone) <= 1e-6
    assert sum(each[2] for each in ranks) == blocks


def test_recomputed_layers_have_the_same_bits(tmp_path: Path) -> None:
    keys = LAYOUTS["bigbird"]
    plain = run(0, 1, str(tmp_path), "llama", "", keys, False, {})
    again = run(0, 1, str(tmp_path), "llama", "recomputed", keys, False, {})
    assert digest(again[1]) == digest(plain[1])
    # The blocks of each layer's forward, and of its second one.
    assert again[2] == 2 * plain[2]


def test_layers_without_a_layout_see_what_the_mask_leaves(tmp_path: Path) -> None:
    keys = {**LAYOUTS["bslongformer"], "layers": [1]}
    wanted = run(0, 1, str(tmp_path), "llama", "padded left", keys, True, {})
    found = run(0, 1, str(tmp_path), "llama", "padded left", keys, False, {})
    assert apart(found[1], wanted[1]) <= 1e-6
    every = run(0, 1, str(tmp_path), "llama", "padded left", LAYOUTS["bslongformer"], False, {})
    assert apart(found[1], every[1]) > 1e-6


def test_evaluation_goes_over_blocks_and_a_call_with_a_cache_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, ids = LAYOUTS["bslongformer"], batch(7)["input_ids"]
    plain = build("llama").eval()
    with torch.no_grad():
        words = plain.generate(ids[:, :9], max_new_tokens=4, do_sample=False)
        whole = plain(input_ids=ids).logits
        Explicit(plain, keys)
        wanted = plain(input_ids=ids).logits
    config = configuration(str(tmp_path), sparse_attention=keys, log_level="info")
    with caplog.at_level("INFO", "infinity"):
        engine, *_ = infinity.initialize(model=build("llama"), config=config)
    assert "LlamaForCausalLM is causal: it sees the lower half of the layout" in caplog.text
    with engine, torch.no_grad():
        engine.eval()
        assert torch.allclose(engine(input_ids=ids).logits, wanted, atol=1e-6)
        assert torch.equal(engine.module.generate(ids[:, :9], max_new_tokens=4, do_sample=False), words)
        assert torch.allclose(engine(input_ids=ids, use_cache=True).logits, whole, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(engine.module(input_ids=ids).logits, whole, atol=1e-6), "closed, it is the model's own"


def test_a_model_without_an_order_has_the_whole_layout(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "intermediate_size": 32, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
    }  # fmt: skip
    keys = {**LAYOUTS["fixed"], "horizontal_global_attention": True}
    config = configuration(str(tmp_path), sparse_attention=keys)
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    ids = torch.randint(64, (ROWS, TOKENS))
    torch.manual_seed(0)
    plain = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    plain.bert.encoder.layer[0].attention.self.register_forward_pre_hook(
        lambda layer, args, kwargs: (args[:1], {**kwargs, "attention_mask": blocks_of(keys)}), with_kwargs=True
    )
    wanted = plain(input_ids=ids).logits
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        assert torch.allclose(engine(input_ids=ids).logits, wanted, atol=1e-6)


def refused(folder: Path, model: nn.Module, keys: dict[str, Any], **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        engine: Engine
        engine, *_ = infinity.initialize(model=model, config=configuration(str(folder), sparse_attention=keys))
        with engine:
            engine(**{**batch(0), **given})
    return str(caught.value)


def test_what_is_not_of_blocks_is_refused_by_name(tmp_path: Path) -> None:
    keys = LAYOUTS["fixed"]
    square = torch.ones(ROWS, 1, TOKENS, TOKENS, dtype=torch.bool)
    t5 = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    phimoe = transformers.PhimoeConfig(
        vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, sliding_window=8,
    )  # fmt: skip
    for text, said in (
        (refused(tmp_path, build("llama", attention_dropout=0.1), keys), "drops out attention (0.1)"),
        (refused(tmp_path, build("llama"), keys, attention_mask=square), "takes one of [batch, tokens]"),
        (refused(tmp_path, build("llama"), {**keys, "layers": [0, 2]}), "have attention are [0, 1]"),
        (refused(tmp_path, nn.Linear(2, 2), keys), "Linear has no model of transformers"),
        (refused(tmp_path, transformers.T5ForConditionalGeneration(t5), keys), "attention to other inputs"),
        (refused(tmp_path, build("llama"), {**LAYOUTS["variable"], "num_random_blocks": 12}), "blocks is 12, and"),
        # Its layers have a window in the mask alone.
        (refused(tmp_path, transformers.PhimoeForCausalLM(phimoe), keys), "do not tell attention how long"),
    ):
        assert said in text, text


def test_a_stated_length_asks_for_no_dense_mask(tmp_path: Path) -> None:
    """The mask of a window of a million tokens would be a terabyte: such a batch is measured when it comes."""
    config = configuration(str(tmp_path), sparse_attention={"mode": "dense"})
    config["memory"] = {"activations": {"sequence_length": 1 << 20}}
    engine: Engine
    engine, *_ = infinity.initialize(model=build("mistral"), config=config)
    with engine:
        assert float(engine(**batch(0)).loss.detach()) > 0
