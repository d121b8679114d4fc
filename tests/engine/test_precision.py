"""torch.autocast by configuration is the loop that people write by hand; gradients add up and travel as configured."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, StateError
from tests.support.oracle import ADAM, Case, difference, join, reference, settings, train


class ByHand(Case):
    """The plain module under autocast; an engine does that itself."""

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        with nullcontext() if isinstance(call, Engine) else torch.autocast("cpu", torch.bfloat16):
            yield from super().losses(call, rank, micro)


AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
CELLS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2, "optimizer": "cpu", "accumulation": 2},
    {"stage": 3, "param": "nvme", "optimizer": "nvme", "accumulation": 2},
]


def compare(rank: int, world: int, folder: str) -> list[float]:
    """How far the weights of each cell are from autocast by hand; the last one's from a run without."""
    join(world)
    found = []
    for cell in CELLS:
        fits = {"world": world, "accumulation": cell.get("accumulation", 1), "steps": 3}
        result = train(ByHand(), settings(folder, torch_autocast=AUTOCAST, **cell), rank=rank, steps=3)
        found.append(difference(result, reference(ByHand(), **fits))[0])
    return [*found, difference(result, reference(Case(), **fits))[0]]


@pytest.mark.parametrize("world", [1, 2])
def test_autocast_is_the_loop_by_hand(rank_pools: Any, tmp_path: Path, world: int) -> None:
    for *by_hand, without in rank_pools[world].run(compare, str(tmp_path)):
        assert max(by_hand) <= 1e-6 < 1e-4 < without, by_hand


def test_autocast_to_fp16_scales_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    twin = copy.deepcopy(model)
    optimizer, scaler = torch.optim.AdamW(twin.parameters(), **ADAM), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    config = {
        "train_micro_batch_size_per_gpu": 4, "torch_autocast": {"enabled": True, "dtype": "fp16"},
        "fp16": {"initial_scale_power": 8, "hysteresis": 1}, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
    }  # fmt: skip
    with infinity.initialize(model=model, config=config)[0] as engine:
        for step in range(5):
            x = torch.randn(4, 16) * (1e6 if step == 2 else 1.0)
            with torch.autocast("cpu", torch.float16):
                loss = twin(x).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            engine.backward(engine(x).square().mean())
            engine.step()
            assert engine.loss_scale == scaler.get_scale()
        assert (engine.skipped_steps, engine.loss_scale) == (1, 128)
        for param, other in zip(engine.module.parameters(), twin.parameters(), strict=True):
            assert (param - other).abs().max() <= 1e-6


def half() -> Any:
    config = {"fp16": {"enabled": True}, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4}
    return infinity.initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), config=config)[0]


def test_an_unscaled_gradient_is_refused_until_it_is_thrown_away() -> None:
    x = torch.randn(4, 8).half()
    with half() as engine:
        engine(x).mean().backward()
        with pytest.raises(StateError, match=r"loss scale.*zero_grad\(\)"):
            engine.step()
        assert engine.micro_steps == 0
        engine.zero_grad()
        for _ in range(2):
            engine.backward(engine(x).mean())
            engine.step()
        assert engine.was_step_applied() and (engine.global_steps, engine.micro_steps) == (1, 2)


def test_a_pass_without_gradients_of_parameters_is_nobodys_mistake() -> None:
    x = torch.randn(4, 8).half().requires_grad_()
    with half() as engine:
        for _ in range(2):
            (saliency,) = torch.autograd.grad(engine(x).mean(), x)
            assert saliency.any()
            engine.backward(engine(x).mean())
            engine.step()
        assert engine.was_step_applied()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_autocast_of_16_bit_weights_is_refused(name: str) -> None:
    config = {"torch_autocast": AUTOCAST, name: {"enabled": True}}
    with pytest.raises(ConfigError, match=rf"torch_autocast.enabled and {name}.enabled are both true: .* fp32 weights"):
        infinity.initialize(model=nn.Linear(4, 4), config=config)


class Given(nn.Module):
    """Its weight's gradient is what it is given, in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512))

    def forward(self, grad: Tensor) -> Tensor:
        return F.linear(self.weight, grad.to(self.weight.dtype))


def gradient(rank: int, world: int, options: dict[str, Any], micros: int) -> Tensor:
    """What has been accumulated and summed of bf16 gradients of which each has few bits in common with the others."""
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micros, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"}, **options,
    }  # fmt: skip
    with infinity.initialize(model=Given(), config=config)[0] as engine:
        for micro in range(micros):
            engine.backward(engine(given(rank, micro)), scale_wrt_gas=False)
            if micro < micros - 1:
                engine.step()
        # Undo the average over ranks.
        return infinity.state(engine.module.weight).grad.float() * world


def given(rank: int, micro: int) -> Tensor:
    return torch.randn(512, generator=torch.Generator().manual_seed(10 * rank + micro)).bfloat16()


def total(dtype: torch.dtype, ranks: int = 1, micros: int = 1) -> Tensor:
    """Every rank's own sum, then theirs, in one type."""
    own = []
    for rank in range(ranks):
        own.append(given(rank, 0).to(dtype))
        for micro in range(1, micros):
            own[-1] = own[-1] + given(rank, micro)
    for more in own[1:]:
        own[0] = own[0] + more
    return own[0].float()


HALF = {"data_types": {"grad_accum_dtype": "bf16"}}


@pytest.mark.parametrize("stage", [1, 3])
def test_micro_batches_add_up_in_fp32_unless_told_otherwise(stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    assert torch.equal(gradient(0, 1, zero, 4), total(torch.float32, micros=4))
    assert torch.equal(gradient(0, 1, {**zero, **HALF}, 4), total(torch.bfloat16, micros=4))
    assert not torch.equal(total(torch.bfloat16, micros=4), total(torch.float32, micros=4))
    own = {**zero, "managed_gradient_accumulation": False}
    with infinity.initialize(model=Given(), config={"bf16": {"enabled": True}, **own})[0] as engine:
        assert engine.plan.request.grad_dtype == "fp32", "nobody knows how many the program adds up"


def sums(rank: int, world: int) -> list[Tensor]:
    join(world)
    zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    fp32 = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    return [gradient(rank, world, {**zero, **options}, 1) for options in ({}, fp32)]


def test_gradients_travel_in_the_models_type_unless_told_otherwise(rank_pools: Any) -> None:
    for half, whole in rank_pools[2].run(sums):
        assert torch.equal(half, total(torch.bfloat16, ranks=2))
        assert torch.equal(whole, total(torch.float32, ranks=2))
        assert not torch.equal(half, whole)


def outputs(loss: Any) -> dict[str, Any]:
    """What programs pass instead of the loss, by what they are told."""
    scores = torch.full((2, 3), 17.0)
    return {
        r"CausalLMOutput: pass \.loss$": CausalLMOutput(loss=loss, logits=scores),
        r"CausalLMOutput: its \.loss is None, so call the model with labels$": CausalLMOutput(logits=scores),
        r'dict: pass its \["loss"\]$': {"loss": loss, "logits": scores},
        r"tuple of 2: pass the loss alone$": (loss, scores),
        r"float: pass the tensor itself, not its \.item\(\)$": loss.item(),
        r"a tensor of shape \(2, 3\): reduce it, as with \.mean\(\)$": scores * loss,
        r"a tensor of shape \(\) without a gradient: .*do not detach it$": loss.detach(),
        r"NoneType: pass the loss$": None,
    }


def test_what_is_no_loss_is_told_what_to_pass_and_shows_no_values() -> None:
    with infinity.initialize(model=nn.Linear(8, 1), config={})[0] as engine:
        loss = engine(torch.randn(4, 8)).mean()
        for told, given in outputs(loss).items():
            with pytest.raises(StateError, match=f"needs a loss of one element that requires a gradient, got {told}"):
                engine.backward(given)
        engine.backward(loss)
        engine.step()
        assert engine.was_step_applied()


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_a_batch_norm_of_16_bits_keeps_its_statistics_in_32(tier: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    plain = copy.deepcopy(model)
    for module in (plain[0], plain[3]):
        module.bfloat16()
    masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, **ADAM, fused=True)
    section = {"device": tier, "nvme_path": str(tmp_path)}
    config = {
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 3, "offload_param": section, "offload_optimizer": section},
    }  # fmt: skip
    with infinity.initialize(model=model, config=config)[0] as engine:
        for step in range(2):
            x = torch.randn(2, 3, 8, 8).bfloat16()
            out, expected = engine(x), plain(x)
            assert out.dtype is torch.bfloat16
            assert torch.equal(out, expected), step
            engine.backward(out.float().square().mean())
            engine.step()
            expected.float().square().mean().backward()
            for param, master in zip(plain.parameters(), masters, strict=True):
                master.grad, param.grad = param.grad.bfloat16().float(), None
            optimizer.step()
            for param, master in zip(plain.parameters(), masters, strict=True):
                param.data.copy_(master.bfloat16())
        for at in (1, 4):
            assert model[at].running_var.dtype is torch.float32
            assert torch.equal(model[at].running_var, plain[at].running_var)
