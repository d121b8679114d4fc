"""`--lora`: the plan of a frozen model with peft's adapters, what it keeps of activations, and a file that trains."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

import infinity
from estimators.activations import activations
from estimators.cli import main
from estimators.estimate import Estimate, Machine, estimate
from estimators.model import Lora, described
from estimators.search import Wish, largest, search
from estimators.trees import known
from infinity import measure_activations
from infinity.errors import ConfigError
from infinity.plan.plan import Plan
from infinity.plan.types import Kind, Tier
from tests.estimators.test_activations import FEW_BLOCKS, LLAMA, OTHERS, on_meta
from tests.estimators.test_cli import FOUR_BLOCKS
from tests.estimators.test_equals_plan import BOUNDS, CONFIGS, MOE, NVME, SMALL, at, values_of
from tests.estimators.test_equals_plan import MODELS as SIZES
from tests.support.cells import cover, kept
from tests.support.spawn import run_ranks

GB = 10**9
DENSE = {"llama": SMALL, "qwen2": SIZES["qwen2"], "gpt2": SIZES["gpt2"]}
# Where peft has no default, or adapts more than linear layers.
NAMED = {
    "mixtral": (SIZES["mixtral"], ["q_proj", "v_proj"]), "qwen3_moe": (MOE["qwen3_moe"], ["o_proj"]),
    "deepseek_v3": (OTHERS["DeepSeek"][2], ["q_b_proj", "kv_b_proj"]),
    "phi3": ({**SMALL, "pad_token_id": 0}, ["qkv_proj"]),
}  # fmt: skip


def wrapped(model_type: str, sizes: dict[str, Any], rank: int, targets: Any = None) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **sizes))
    return peft.get_peft_model(model, lora_config(model_type, rank, targets))


def lora_config(model_type: str, rank: int, targets: Any = None) -> peft.LoraConfig:
    return peft.LoraConfig(r=rank, target_modules=targets, fan_in_fan_out=model_type == "gpt2")


def engine_plan(model: Any, config: dict[str, Any]) -> Plan:
    with infinity.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, **config})[0] as engine:
        return engine.plan


def planned(model_type: str, sizes: dict[str, Any], config: dict[str, Any], ranks: int = 1, **lora: Any) -> Estimate:
    return estimate(
        values_of(model_type, sizes), {"train_micro_batch_size_per_gpu": 1, **config}, ranks=ranks,
        ranks_per_node=ranks, machine=Machine(accelerator=False), **lora,
    )  # fmt: skip


def check(plan: Plan, found: Plan) -> None:
    assert found.bytes_by_tier() == plan.bytes_by_tier()
    assert found == plan
    assert found.fingerprint() == plan.fingerprint()


@pytest.mark.parametrize("model_type", DENSE)
@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_the_estimate_is_the_engines_plan_of_the_model_that_peft_wraps(model_type, targets, tmp_path):
    configs = [config for ranks, config in CONFIGS.values() if ranks == 1]
    configs.append({"zero_optimization": {"stage": 3, "offload_param": NVME, "tile_parameters": 900}})
    for config in configs:
        plan = engine_plan(wrapped(model_type, DENSE[model_type], 16, targets), at(str(tmp_path), config))
        check(plan, planned(model_type, DENSE[model_type], config, lora=16, lora_targets=targets).plan)


@pytest.mark.parametrize("model_type", NAMED)
def test_of_named_layers_it_is_the_plan_too(model_type, tmp_path):
    sizes, targets = NAMED[model_type]
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, **BOUNDS}}
    plan = engine_plan(wrapped(model_type, sizes, 4, targets), config)
    check(plan, planned(model_type, sizes, config, lora=4, lora_targets=targets).plan)


def ranks_plan(rank: int, world_size: int, folder: str, config: dict[str, Any]) -> Plan:
    return engine_plan(wrapped("llama", SMALL, 16), at(folder, config))


@pytest.mark.matrix
def test_of_two_ranks_it_is_the_plan_too(tmp_path):
    config = CONFIGS["stage 3 on NVMe, accumulating"][1]
    plans = run_ranks(ranks_plan, 2, str(tmp_path), config)
    check(plans[0], planned("llama", SMALL, config, ranks=2, lora=16).plan)


def test_default_targets_are_pefts():
    """peft cannot adapt a mixture's stacked experts by name, and asks for names there."""
    for model_type in known():
        peft_has = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type)
        sizes = {**SMALL, **DENSE.get(model_type, {}), **NAMED.get(model_type, ({},))[0]}
        model = described({"model_type": model_type, **sizes}).with_adapters(Lora.of(4))
        if peft_has is None or model_type == "mixtral":
            with pytest.raises(ConfigError, match="no default targets"):
                _ = model.adapted_layers
        else:
            assert model.adapted_layers == set(peft_has)


def test_mixtral_has_no_default_in_peft_either():
    with torch.device("meta"), pytest.raises(ValueError, match="target_modules"):
        wrapped("mixtral", SIZES["mixtral"], 4)


def test_frozen_weights_have_no_gradients_and_no_states():
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    found = estimate("llama-3.1-8b", {"bf16": {"enabled": True}, "zero_optimization": zero}, lora=16)
    # Two adapters a layer: of 4096 to 4096, and of 4096 to 1024.
    trained = 32 * 16 * (4096 + 4096 + 4096 + 1024)
    assert found.trained_numel == trained
    assert found.plan.numel == 8_030_261_248 + trained
    held = found.at_rest
    assert held[Tier.CPU][Kind.EXP_AVG] == pytest.approx(4 * trained, rel=0.01)
    assert sum(held[Tier.CPU].values()) < 16 * trained
    assert held[Tier.GPU].get(Kind.GRAD, 0) < 4 * trained
    # Forward, and the gradients of inputs: a third less than training all.
    whole = estimate("llama-3.1-8b", {"bf16": {"enabled": True}, "zero_optimization": zero})
    assert found.flops == pytest.approx(whole.flops * 2 / 3, rel=0.05)
    assert found.outline.seconds < 0.75 * whole.outline.seconds
    assert found.activations.nbytes < whole.activations.nbytes


# As in test_activations: of each block's kinds, with adapters on some layers and on all.
BLOCKS = {
    **{name: (name, "sdpa", {}, None) for name in ("Llama", "Qwen2", "Qwen3", "GPT2")},
    **{name: (*OTHERS[name], None) for name in ("Gemma2", "Gemma3")},
    **{name: (*OTHERS[name], ["v_proj", "o_proj"]) for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe")},
    "Phi3": (*OTHERS["Phi3"], ["qkv_proj"]),
    "DeepSeek": (*OTHERS["DeepSeek"], ["q_b_proj", "kv_b_proj", "o_proj"]),
}  # fmt: skip


CELLS = [
    (case, targets, checkpointing)
    for case, targets, checkpointing in product(BLOCKS, ("some", "all-linear"), (False, True))
    if targets == "some" or case not in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "DeepSeek")
]


@pytest.mark.parametrize(("case", "targets", "checkpointing"), kept(CELLS, cover(CELLS, lambda cell: cell)))
def test_what_a_frozen_model_keeps_is_within_a_tenth_of_measured_shapes(case, targets, checkpointing):
    name, attention, sizes, some = BLOCKS[case]
    sizes = {**sizes, **({"vocab_size": 100, "num_hidden_layers": 2} if case in OTHERS else FEW_BLOCKS[name == "GPT2"])}
    model = on_meta(name, attention, "bf16", checkpointing, **sizes)
    named = some if targets == "some" else targets
    config = lora_config(model.config.model_type, 8, named)
    adapters = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    ids = torch.zeros(2, 300, dtype=torch.int64)
    measured = measure_activations(adapters, {"input_ids": ids, "labels": ids})
    values = json.loads(model.config.to_json_string())
    layers = described(values).with_adapters(Lora.of(8, named)).adapted_layers
    closed = activations(
        values, batch=2, sequence=300, compute_dtype="bf16", checkpointing=checkpointing, attention=attention,
        adapted=layers, rank=8,
    )  # fmt: skip
    assert closed.nbytes == pytest.approx(measured.nbytes, rel=0.1), (closed.parts, measured.parts)
    assert sum(closed.parts.values()) == closed.nbytes
    whole = activations(
        values, batch=2, sequence=300, compute_dtype="bf16", checkpointing=checkpointing, attention=attention
    )
    assert closed.saved_nbytes < whole.saved_nbytes


def test_the_first_blocks_input_is_no_checkpoint_of_autograds():
    """Nothing before it is trained, so that it needs no gradient, and stays on the device."""
    inputs = [
        activations({**LLAMA}, batch=1, sequence=64, compute_dtype="bf16", checkpointing=True, adapted=layers).inputs
        for layers in (None, frozenset({"q_proj"}))
    ]
    assert inputs == [4, 3]


@pytest.mark.parametrize("words", [[], ["--fit"]])
def test_the_saved_file_trains_a_model_with_adapters(words, tmp_path, capsys):
    file = tmp_path / "found.json"
    command = ["qwen2.5-0.5b", "--lora", "4", *words, "--gpu", "4GB", "--ram", "5GB", "--sequence", "512"]
    assert main([*command, "--save", str(file)]) == 0
    said = capsys.readouterr()
    code = "model = peft.get_peft_model(model, peft.LoraConfig(r=4))"
    for text in (said.out, said.err):
        assert "Choose optimizer.params.lr yourself: 0.0001" in text
        assert code in text
    said_so = "LoRA of rank 4 on q_proj, v_proj, peft's default: 0.3 M parameters are trained"
    assert said_so in " ".join(said.out.split())
    scope: dict[str, Any] = {"peft": peft, "model": transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **SMALL)
    )}  # fmt: skip
    torch.manual_seed(0)
    exec(code, scope)
    model = scope["model"]
    tokens = torch.randint(96, (1, 12))
    engine, *_ = infinity.initialize(model=model, config=str(file))
    with engine:
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        assert len(trained) == 2 * 2 * SMALL["num_hidden_layers"]
        before = {name: infinity.state(param).master.clone() for name, param in model.named_parameters()}
        for _ in range(3 * engine.gradient_accumulation_steps()):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        moved = {
            name
            for name, param in model.named_parameters()
            if not torch.equal(infinity.state(param).master, before[name])
        }
        assert moved == set(trained)


def test_a_search_finds_more_room_for_adapters_than_for_all():
    machine = Machine(1300 * 10**6, 3300 * 10**6, None)
    model = described(FOUR_BLOCKS)
    whole, adapters = (
        search(Wish(model.with_adapters(lora), machine, {"sequence": 4096})) for lora in (None, Lora.of(16))
    )
    assert not whole.estimate.fits
    assert adapters.estimate.fits
    tiles = adapters.estimate.work.tiled_loss
    again = estimate(FOUR_BLOCKS, adapters.config, machine=machine, sequence=4096, lora=16, tiled_loss=tiles)
    assert again == adapters.estimate


@pytest.mark.matrix
def test_the_largest_model_is_searched_for_with_its_adapters():
    wish = Wish(described("gpt2").with_adapters(Lora.of(16)), Machine(4 * GB, 8 * GB, None), {"sequence": 512})
    for choice in largest(wish):
        assert choice is not None
        assert choice.estimate.lora == {"rank": 16, "targets": ["c_attn"]}


def test_json_has_the_adapters(capsys):
    config = '{"zero_optimization": {"stage": 3}}'
    assert main(["gpt2", "--lora", "8", "--lora-targets", "c_attn, c_fc", "--config", config, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["lora"] == {"rank": 8, "targets": ["c_attn", "c_fc"]}
    assert told["trained_parameters"] == 12 * 8 * (768 + 2304 + 768 + 3072)
    assert main(["gpt2", "--config", config, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["lora"] is None
    assert told["trained_parameters"] == told["parameters"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora": 0}, "positive whole number"),
        ({"lora": True}, "positive whole number"),
        ({"lora_targets": "c_attn"}, "give their rank"),
        ({"lora": 8, "lora_targets": ["lm_head"]}, "no linear layer 'lm_head'"),
    ],
)
def test_wrong_adapters_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        estimate("gpt2", "{}", **options)


def test_a_module_is_wrapped_by_the_program():
    with torch.device("meta"):
        model = wrapped("llama", SMALL, 4)
        plain = model.get_base_model()
    with pytest.raises(ConfigError, match=r"peft\.get_peft_model"):
        estimate(plain, "{}", lora=4)
    assert estimate(model, "{}", machine=Machine(accelerator=False)).plan == planned("llama", SMALL, {}, lora=4).plan
