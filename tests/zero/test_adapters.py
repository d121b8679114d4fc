"""Adapters and frozen weights: peft as it is, `requires_grad` that changes, quantized weights as opaque bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM

import infinity
from infinity.errors import ConfigError, StateError
from tests.support.hub import hf_model, lora

STEPS = 3
HYPER = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}


def config(folder: str, dtype: str = "fp32") -> dict[str, Any]:
    drive = {"device": "nvme", "nvme_path": folder}
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "zero_optimization": {
            "stage": 3, "offload_param": drive, "offload_optimizer": drive, "stage3_param_persistence_threshold": 0,
        },
        **precision,
    }  # fmt: skip


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank))


def with_lora(model: Any) -> Any:
    torch.manual_seed(3)
    return lora(model, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")


def checksums(model: Any) -> dict[str, str]:
    """SHA-256 of every frozen weight's values."""
    return {
        name: hashlib.sha256(infinity.state(param).master.numpy().tobytes()).hexdigest()
        for name, param in model.named_parameters()
        if not param.requires_grad
    }


def train_lora(rank: int, world_size: int, folder: str, drive: str) -> dict[str, Any]:
    settings = config(drive)
    model = with_lora(infinity.load_hf(folder, settings))
    engine, *_ = infinity.initialize(model=model, config=settings)
    with engine:
        before = checksums(model)
        for step in range(STEPS):
            batch = tokens(step, rank)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        engine.synchronize()
        trained = sum(layout.numel for layout in engine.plan.layouts if layout.trainable)
        memory = engine.memory()
        return {
            "masters": {name: infinity.state(param).master for name, param in model.named_parameters()},
            "frozen": (before, checksums(model)),
            "now": memory.now, "peak": memory.peak,
            "trained_here": trained // world_size,
            "held_here": sum(layout.numel for layout in engine.plan.layouts) // world_size,
        }  # fmt: skip


def test_peft_lora_on_two_ranks_and_nvme_equals_peft_in_one_process(tmp_path: Path, rank_pools: Any) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    plain = with_lora(AutoModelForCausalLM.from_pretrained(tmp_path))
    optimizer = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], **HYPER)
    for step in range(STEPS):
        for rank in range(2):
            (plain(input_ids=tokens(step, rank), labels=tokens(step, rank)).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for result in rank_pools[2].run(train_lora, str(tmp_path), str(tmp_path / "drive")):
        for name, param in plain.named_parameters():
            assert float((result["masters"][name] - param.detach()).abs().max()) <= 1e-6, name
        before, after = result["frozen"]
        assert before == after
        assert len(before) == 21
        # The ledger: gradients and moments of what is trained, and not a byte more; the base is on the drive.
        trained = 4 * result["trained_here"]
        for kinds in (result["now"], result["peak"]):
            of = lambda kind: sum(tier.get(kind, 0) for tier in kinds.values())  # noqa: B023, E731
            assert of("grad") == of("exp_avg") == of("exp_avg_sq") == trained
        assert result["now"]["nvme"]["param"] == 4 * result["held_here"] > 8 * trained


def on_experts() -> Any:
    """Packed experts with LoRA on them, which peft puts in place for the time of each call."""
    torch.manual_seed(3)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings: dict[str, Any] = {"init_lora_weights": False, "target_parameters": experts}
    return lora(hf_model("mixtral"), lora_alpha=8, target_modules=["q_proj"], **settings)


@pytest.mark.parametrize(
    ("stage", "home"), [(0, "none"), (1, "cpu"), (2, "nvme"), (3, "none"), (3, "cpu"), (3, "nvme")]
)
def test_peft_lora_on_packed_experts_has_peft_s_own_bits(stage: int, home: str, tmp_path: Path) -> None:
    plain = on_experts()
    losses, grads = [], {}
    optimizer = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], **HYPER)
    for step in range(STEPS):
        losses.append(plain(input_ids=tokens(step, 0), labels=tokens(step, 0)).loss)
        losses[-1].backward()
        grads = grads or {name: param.grad.clone() for name, param in plain.named_parameters() if param.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
    settings = config(str(tmp_path))
    zero = settings["zero_optimization"]
    zero.update(stage=stage, offload_optimizer=zero["offload_optimizer"] | {"device": home if stage else "none"})
    zero.update(offload_param=zero["offload_param"] | {"device": home if stage == 3 else "none"})
    model = on_experts()
    with infinity.initialize(model=model, config={**settings, "gradient_clipping": 0})[0] as engine:
        for step in range(STEPS):
            loss = engine(input_ids=tokens(step, 0), labels=tokens(step, 0)).loss
            engine.backward(loss)
            if step == 0:
                assert torch.equal(loss, losses[0])
                assert all(torch.equal(infinity.state(model.get_parameter(name)).grad, grads[name]) for name in grads)
            assert abs(float(loss.detach() - losses[step].detach())) <= 1e-5
            engine.step()
        found = engine.state_dict()
    for name, param in plain.named_parameters():
        assert float((found[name] - param.detach()).abs().max()) <= (1e-5 if param.requires_grad else 0), name


def toggled(rank: int, world_size: int, drive: str) -> list[Tensor]:
    """Freezes a block and an embedding for two steps in the middle."""
    engine, *_ = infinity.initialize(model=hf_model("llama"), config=config(drive))
    with engine:
        for step in range(6):
            freeze(engine.module, step)
            batch = tokens(step, rank)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        return [infinity.state(param).master for param in engine.module.parameters()]


def freeze(model: Any, step: int) -> None:
    model.model.layers[0].requires_grad_(step not in (2, 3))
    model.model.layers[1].mlp.up_proj.weight.requires_grad = step not in (1, 2)
    model.model.embed_tokens.weight.requires_grad_(step != 3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_frozen_for_a_while_rests_as_in_torch(world_size: int, tmp_path: Path, rank_pools: Any) -> None:
    plain = hf_model("llama")
    optimizer = torch.optim.AdamW(plain.parameters(), **HYPER)
    for step in range(6):
        freeze(plain, step)
        for rank in range(world_size):
            (plain(input_ids=tokens(step, rank), labels=tokens(step, rank)).loss / world_size).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for masters in rank_pools[world_size].run(toggled, str(tmp_path)):
        worst = max(float((a - b.detach()).abs().max()) for a, b in zip(masters, plain.parameters(), strict=True))
        assert worst <= 2e-6


def thaw(rank: int, world_size: int, drive: str) -> tuple[str, bool]:
    model = hf_model("llama")
    model.model.layers[0].requires_grad_(False)
    engine, *_ = infinity.initialize(model=model, config=config(drive))
    with engine:
        weight = model.model.layers[0].mlp.down_proj.weight
        before = infinity.state(weight).master
        weight.requires_grad_(True)
        batch = tokens(0, rank)
        message = ""
        try:
            engine.backward(engine(input_ids=batch, labels=batch).loss)
        except StateError as error:
            message = str(error)
        weight.requires_grad_(False)
        engine.zero_grad()
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        return message, torch.equal(infinity.state(weight).master, before)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_weight_thawed_without_states_is_an_error_that_names_it(
    world_size: int, tmp_path: Path, rank_pools: Any
) -> None:
    for message, unchanged in rank_pools[world_size].run(thaw, str(tmp_path)):
        assert message.startswith("model.layers.0.mlp.down_proj.weight did not require a gradient")
        assert "freeze it until you want it" in message
        assert unchanged


class Packed(nn.Parameter):
    """A weight in int8 with attributes of its own, as quantizing libraries make them."""

    scale: float


class PackedLinear(nn.Module):
    """A frozen linear layer that unpacks its weight when it is used."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = float(linear.weight.detach().abs().max()) / 127
        packed = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = Packed(packed, requires_grad=False)
        self.weight.scale = scale

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Packed
        return x @ (self.weight.to(x.dtype) * self.weight.scale).T


class WithAdapters(nn.Module):
    """Packed layers, each with a small trained path beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bases = nn.ModuleList(PackedLinear(nn.Linear(24, 24)) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(24, 4, bias=False) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(4, 24, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.bases, self.downs, self.ups, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x.float().square().mean()


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank))


def train_packed(rank: int, world_size: int, drive: str) -> dict[str, Any]:
    model = WithAdapters()
    engine, *_ = infinity.initialize(model=model, config=config(drive))
    with engine:
        for step in range(STEPS):
            engine.backward(engine(inputs(step, rank)))
            engine.step()
        with infinity.read(model):
            packed = [base.weight.detach().clone() for base in model.bases]
        return {
            "packed": packed,
            "masters": [infinity.state(p).master for p in model.parameters() if p.requires_grad],
            "dtypes": {layout.dtype for layout in engine.plan.layouts if not layout.trainable},
        }


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_quantized_base_is_opaque_bytes_under_adapters(world_size: int, tmp_path: Path, rank_pools: Any) -> None:
    plain = WithAdapters()
    trained = [param for param in plain.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, **HYPER)
    for step in range(STEPS):
        for rank in range(world_size):
            (plain(inputs(step, rank)) / world_size).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for result in rank_pools[world_size].run(train_packed, str(tmp_path)):
        assert result["dtypes"] == {"int8"}
        assert all(torch.equal(a, b.weight) for a, b in zip(result["packed"], plain.bases, strict=True))
        assert max(float((a - b.detach()).abs().max()) for a, b in zip(result["masters"], trained, strict=True)) <= 1e-6


@pytest.fixture
def wrapped() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)), requires_grad=False)
    return model


def test_weights_that_wrap_other_tensors_are_refused(wrapped: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"0\.weight is a TwoTensor, which wraps other tensors"):
        infinity.initialize(model=wrapped, config={})
