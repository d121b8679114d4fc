"""Packed experts a few at a time: the bits of the eager forward of whole ones, and nothing read that nobody chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

import infinity
from infinity.engine import Engine
from infinity.plan.types import Kind, Tier
from tests.conftest import RankPools
from tests.support.cells import covered
from tests.support.oracle import digest, io_nbytes, join, settings

VOCABULARY = 128
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4,
        "head_dim": 16, "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "gpt_oss": {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    # One product of all experts, of which none is left out.
    "llama4_text": {
        "intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": 32, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1, "head_dim": 16,
    },
}  # fmt: skip


def build(family: str, **more: Any) -> nn.Module:
    """A small model of a family, eager, with routers that choose."""
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **more})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, param in model.named_parameters():
        if "experts" in name or "router" in name:
            nn.init.normal_(param, std=0.05)
    model.set_experts_implementation("eager")
    return model.train()


def batch(step: int, rank: int = 0, rows: int = 2, tokens: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


def experts_numel(model: nn.Module) -> int:
    """Elements of the packed weights of the last layer."""
    stacks = [[param for param in module.parameters(recurse=False) if param.ndim == 3] for module in model.modules()]
    return sum(param.numel() for param in [each for each in stacks if each][-1])


def configuration(
    folder: str | Path, model: nn.Module, *, tiled: bool, together: int = 0, **options: Any
) -> dict[str, Any]:  # fmt: skip
    """A quarter of a layer's experts may be gathered at once, or so many of them are a unit; or, with the same other
    units, a layer's are whole. (How a model is cut decides where autograd adds up gradients of inputs.)
    """
    numel = experts_numel(model)
    bounds = {"stage3_max_live_parameters": numel // 4}
    if together:
        experts = next(param.shape[0] for param in model.parameters() if param.ndim == 3)
        bounds = {"tile_parameters": together * (numel // experts)}
    zero = {**bounds, **({} if tiled else {"tile_parameters": 0}), **options.pop("zero", {})}
    return settings(folder, zero=zero, **{"param": "nvme", "optimizer": "nvme", **options})


def train(engine: Engine, rank: int, steps: int, accumulation: int = 1) -> list[float]:
    losses = []
    for step in range(steps * accumulation):
        loss = engine(**{name: ids.to(engine.device) for name, ids in batch(step, rank).items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def states(engine: Engine) -> dict[str, Tensor]:
    """All masters and first moments. Collective."""
    found = {}
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        found[f"{name} master"] = state.master
        if param.requires_grad:
            found[f"{name} exp_avg"] = state.exp_avg
    return found


def run(
    rank: int, world: int, folder: str, family: str, rows: list[dict[str, Any]]
) -> list[tuple[list[float], str]]:  # fmt: skip
    """Losses and digest of each row's run."""
    join(world)
    found = []
    for row in rows:
        checkpointed = row.pop("checkpointed", False)
        model = build(family)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointed == "reentrant"})
        engine, *_ = infinity.initialize(model=model, config=configuration(folder, model, **row))
        with engine:
            slots = [slot for layout in engine.plan.layouts for slot in layout.slots]
            assert any(slot.is_tile and "experts" in slot.name for slot in slots) is row["tiled"]
            losses = train(engine, rank, 3, row.get("accumulation", 1))
            found.append((losses, digest(states(engine))))
            if row["tiled"] and not checkpointed and not row.get("together"):
                live = experts_numel(model) // 4 * (4 if row["dtype"] == "fp32" else 2)
                assert engine.store.ledger.peak[Tier.GPU, Kind.FULL] <= live
        assert model.config._experts_implementation == "eager"
    return found


@pytest.mark.parametrize(
    *covered(family=list(FAMILIES), dtype=["fp32", "bf16"], accumulation=[1, 2], world=[1, 2], clip=[0.0, 0.05])
)
def test_experts_a_few_at_a_time_have_the_bits_of_whole_ones(
    rank_pools: RankPools, tmp_path: Path, family: str, dtype: str, accumulation: int, world: int, clip: float
) -> None:
    """Also where one rank has no token for an expert, several experts are a unit, or blocks are computed again."""
    common = {"dtype": dtype, "accumulation": accumulation, "clip": clip}
    grads = {"offload_gradients": {"device": "nvme"}}
    rows: list[dict[str, Any]] = [
        {**common, "tiled": False}, {**common, "tiled": True}, {**common, "tiled": True, "zero": grads},
        {**common, "tiled": True, "checkpointed": "plain"},
        {**common, "tiled": True, "checkpointed": "reentrant", "param": "cpu", "optimizer": "cpu"},
    ]  # fmt: skip
    several: list[dict[str, Any]] = [{**common, "tiled": tiled, "together": 3} for tiled in (False, True)]
    for each in (rows, several):
        for found in rank_pools[world].run(run, str(tmp_path), family, each):
            assert len({str(losses) for losses, _ in found}) == len({held for _, held in found}) == 1, found


def test_only_what_is_chosen_is_read_and_has_a_gradient_written(tmp_path: Path) -> None:
    """64 experts of 1.2 MB in bf16, 2 for each of 8 tokens: read once in forward, and at most once in backward."""
    sizes = {
        "num_experts": 64, "num_experts_per_tok": 2, "hidden_size": 512, "moe_intermediate_size": 384, "head_dim": 128,
        "num_hidden_layers": 1,
    }  # fmt: skip
    model = build("qwen3_moe", **sizes).bfloat16()
    zero = {"offload_gradients": {"device": "nvme"}, "stage3_prefetch_bucket_size": 2_000_000}
    config = configuration(tmp_path, model, tiled=True, dtype="bf16", zero=zero)
    used: list[int] = []
    experts = next(module for module in model.modules() if hasattr(module, "_apply_gate"))
    experts.register_forward_pre_hook(lambda module, args: used.append(args[1].unique().numel()))
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        plan = engine.plan
        cut = [layout for layout in plan.layouts if not plan.placement.units[layout.index].whole]
        others = sum(layout.nbytes for layout in cut if not layout.routed)
        (each,) = {layout.nbytes for layout in cut if layout.routed}
        assert sum(layout.routed for layout in cut) == 64 and each == 2 * 3 * 512 * 384
        for step in range(3):
            engine.synchronize()
            engine.store.settle()
            begin = io_nbytes()
            loss = engine(**batch(step, rows=1, tokens=8)).loss
            middle = io_nbytes()
            engine.backward(loss)
            engine.store.settle()
            end = io_nbytes()
            chosen = used[-1] * each
            assert 0 < used[-1] < 20
            # What the step has left in memory is not read.
            assert 0 < middle[0] - begin[0] <= 1.1 * chosen + others
            assert end[0] - middle[0] <= 1.1 * chosen + others
            assert end[1] - begin[1] <= 1.1 * chosen + 2 * others
            engine.step()


def test_a_checkpoint_and_an_export_are_those_of_whole_experts(tmp_path: Path) -> None:
    model, ids = build("gpt_oss"), batch(0)["input_ids"]
    engine, *_ = infinity.initialize(model=model, config=configuration(tmp_path, model, tiled=True))
    with engine:
        train(engine, 0, 2)
        engine.save_checkpoint(str(tmp_path / "saved"))
        engine.export(tmp_path / "export", dtype="fp32")
        held, packed = digest(states(engine)), "model.layers.1.mlp.experts.gate_up_proj"
        with infinity.read(model):
            assert torch.equal(model.get_parameter(packed), infinity.state(model.get_parameter(packed)).master)
        assert model.eval().generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 15)
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        after = train(engine, 0, 2)
        engine.close(keep_weights=True)
    assert model.config._experts_implementation == "eager"
    with torch.no_grad():
        assert not torch.equal(model(input_ids=ids).logits, logits)
    other = build("gpt_oss")
    engine, *_ = infinity.initialize(model=other, config=configuration(tmp_path, other, tiled=False))
    with engine:
        engine.load_checkpoint(str(tmp_path / "saved"))
        assert digest(states(engine)) == held
        with torch.no_grad():
            assert torch.equal(other.eval()(input_ids=ids).logits, logits)
        assert train(engine, 0, 2) == after
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
    loaded.set_experts_implementation("eager")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, logits)


@pytest.mark.parametrize("case", ["frozen", "8 bits", "raises"])
def test_other_ways_to_train(tmp_path: Path, case: str) -> None:
    """Frozen experts, moments in 8 bits, and a forward that raised between two experts."""
    found = []
    for tiled in (False, True):
        model = build("mixtral")
        config = configuration(tmp_path, model, tiled=tiled)
        if case == "frozen":
            for name, param in model.named_parameters():
                param.requires_grad_("experts" not in name)
        if case == "8 bits":
            config["optimizer"] = {"type": "AdamW8bit", "params": {"min_8bit_size": 1000}}
        engine, *_ = infinity.initialize(model=model, config=config)
        with engine:
            losses = train(engine, 0, 2)
            if case == "raises":
                calls = iter(range(3))

                def fails(module: nn.Module, args: Any, calls: Iterator[int] = calls) -> None:
                    if next(calls) == 2:
                        raise RuntimeError("the third expert")

                hook = model.model.layers[1].mlp.experts.act_fn.register_forward_pre_hook(fails)
                with pytest.raises(RuntimeError, match="the third expert"):
                    engine(**batch(7))
                hook.remove()
            found.append((losses, train(engine, 0, 2), digest(states(engine))))
    assert found[0] == found[1]


def adapted(
    rank: int, world: int, folder: str, family: str, packed: list[str], rows: list[dict[str, Any]]
) -> list[tuple[list[float], Tensor]]:  # fmt: skip
    """Losses of each row's run, the last without adapters, and what is trained."""
    import peft

    join(world)
    found = []
    for row in rows:
        checkpointed, old = row.pop("checkpointed", None), row.pop("old", False)
        targets = {"target_parameters": [f"experts.{name}" for name in packed], "target_modules": ["q_proj"]}
        model = peft.get_peft_model(build(family), peft.LoraConfig(r=4, lora_alpha=16, **targets))
        torch.manual_seed(1)
        for name, param in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(param, std=0.05)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointed == "reentrant"})
            model.enable_input_require_grads()
        with pytest.MonkeyPatch.context() as patch:
            if old:
                patch.delattr(peft.tuners.lora.layer.ParamWrapper, "get_delta_factors")
                patch.setattr(peft.tuners.lora.layer.ParamWrapper, "_activate_lora", _as_before(peft))
            engine, *_ = infinity.initialize(model=model, config=configuration(folder, build(family), **row))
            with engine:
                slots = [slot for layout in engine.plan.layouts for slot in layout.slots]
                cut = row["tiled"] and not old and family != "llama4_text"
                assert any(slot.is_tile and "experts" in slot.name for slot in slots) is cut
                losses = train(engine, rank, 3)
                with model.disable_adapter(), torch.no_grad():
                    losses.append(engine(**batch(9)).loss.item())
                held = [infinity.state(param).master.flatten() for param in model.parameters() if param.requires_grad]
                found.append((losses, torch.cat(held)))
        assert not [module for module in model.modules() if "_activate_lora" in vars(module)]
    return found


def _as_before(peft: Any) -> Any:
    """`_activate_lora` of a peft that knows no factors."""
    @contextmanager
    def activate(self: Any, active: list[str]) -> Iterator[None]:
        proxy = peft.tuners.lora.layer._LoraParameterProxy(self.get_delta_weight(active[0]))
        nn.utils.parametrize.register_parametrization(self.get_base_layer(), self.parameter_name, proxy)
        try:
            yield
        finally:
            self._remove_parametrizations()

    return activate


@pytest.mark.parametrize(
    ("family", "world", "packed"),
    [("mixtral", 2, ["gate_up_proj", "down_proj"]), ("gpt_oss", 1, ["down_proj"]), ("llama4_text", 1, ["down_proj"])],
)
def test_adapters_of_packed_experts_train_a_few_experts_at_a_time(
    rank_pools: RankPools, tmp_path: Path, family: str, world: int, packed: list[str]
) -> None:
    """As peft trains whole ones, whose weights it adds the adapters' product to; Llama-4's stay whole."""
    pytest.importorskip("peft")
    rows: list[dict[str, Any]] = [
        {"tiled": False}, {"tiled": True}, {"tiled": True, "old": True},
        {"tiled": True, "checkpointed": "plain"}, {"tiled": True, "checkpointed": "reentrant"},
    ]  # fmt: skip
    for (losses, held), *others in rank_pools[world].run(adapted, str(tmp_path), family, packed, rows):
        for other_losses, other_held in others:
            assert other_losses == pytest.approx(losses, abs=1e-6)
            assert float((other_held - held).abs().max()) <= 1e-6
