"""An engine without an optimizer holds its weights and nothing else, runs the model, and says why it does not train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import infinity
from infinity.config import DEEPSPEED, STRICT
from infinity.errors import ConfigError, StateError
from infinity.plan.types import Kind, Tier
from tests.support.cells import kept
from tests.support.models import TinyLlama, token_batch
from tests.support.oracle import Case, join, settings, train
from tests.support.private_memory import own_nbytes
from tests.support.spawn import RankPool, run_ranks
from tests.zero.test_transformers import config_of

HOMES = [(0, "gpu"), (1, "gpu"), (2, "cpu"), (2, "nvme"), (3, "gpu"), (3, "cpu"), (3, "nvme")]


def reference_config(
    folder: Path, stage: int = 3, home: str = "gpu", dtype: str = "bf16", **top: Any
) -> dict[str, Any]:  # fmt: skip
    config = settings(folder, stage=stage, param=home, optimizer=home, dtype=dtype, **top)
    del config["optimizer"]
    return config


def reference_engine(folder: Path, model: nn.Module, **options: Any) -> Any:
    engine, optimizer, _, scheduler = infinity.initialize(
        model=model, config=reference_config(folder, **options), conventions=DEEPSPEED
    )
    assert optimizer is None and scheduler is None and engine.optimizer is None and engine.lr_scheduler is None
    return engine


def kinds(engine: Any) -> set[Kind]:
    return {kind for (_, kind), nbytes in engine._runtime.store.ledger.now.items() if nbytes}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("stage", "home"), HOMES)
def test_it_runs_the_model_and_keeps_no_states(stage: int, home: str, dtype: str, tmp_path: Path) -> None:
    case = Case()
    plain = case.model().to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    with torch.no_grad():
        wanted = plain(**token_batch(0, 0, positions=8))
    with reference_engine(tmp_path, case.model(), stage=stage, home=home, dtype=dtype) as engine:
        for mode in (True, False):
            engine.train(mode)
            for _ in range(2):
                with torch.no_grad():
                    assert torch.equal(engine(**token_batch(0, 0, positions=8)), wanted)
            # With a graph, too, which goes with the loss.
            assert torch.equal(engine(**token_batch(0, 0, positions=8)), wanted)
        assert not kinds(engine) & {Kind.GRAD, Kind.REMAINDER, Kind.MASTER, Kind.EXP_AVG, Kind.FULL_GRAD}
        assert not engine.plan.sub_groups and "none of them trained" in engine.plan.explain()
        state = engine.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name
        with infinity.read(engine.module):
            assert torch.equal(engine.module.positions, plain.positions)
        assert engine.get_lr() == [] and engine.get_global_grad_norm() == 0.0
        engine.store.check()


def test_what_needs_an_optimizer_says_why_and_what_to_do(tmp_path: Path) -> None:
    with reference_engine(tmp_path, Case().model()) as engine:
        loss = engine(**token_batch(0, 0, positions=8))
        for verb in (lambda: engine.backward(loss), engine.step):
            with pytest.raises(StateError, match=r"made without an optimizer.*pass one to infinity.initialize"):
                verb()
        # A plain backward would be dropped where the program expects to train.
        with pytest.raises(StateError, match=r"optimizer: it keeps no gradients.*requires_grad_\(False\)"):
            loss.backward()
        assert all(param.grad is None for param in engine.module.parameters())
        engine.zero_grad()
        with torch.no_grad():
            assert torch.equal(engine(**token_batch(0, 0, positions=8)), loss)


def test_gradients_flow_through_a_model_that_is_frozen(tmp_path: Path) -> None:
    """As through a reward model: to the inputs, while the weights get none."""
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    inputs = [torch.ones(2, 8, requires_grad=True) for _ in range(2)]
    with reference_engine(tmp_path, model.requires_grad_(False), home="cpu", dtype="fp32") as engine:
        engine(inputs[0]).sum().backward()
    plain(inputs[1]).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize("home", ["gpu", "cpu", "nvme"])
def test_it_generates(home: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("llama")).to(torch.bfloat16)
    ids = torch.arange(6).view(1, 6)
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    with reference_engine(tmp_path, model, home=home) as engine:
        found = engine.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(found, wanted)
        engine.export(tmp_path / "exported")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(again.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0), wanted)


def test_null_means_none_in_any_configuration(tmp_path: Path) -> None:
    config = {**reference_config(tmp_path), "optimizer": None}
    for conventions in (STRICT, DEEPSPEED):
        engine, optimizer, *_ = infinity.initialize(model=Case().model(), config=config, conventions=conventions)
        engine.close()
        assert optimizer is None
    # The program's own counts all the same, and AdamW stays the default of infinity's own programs.
    config.pop("optimizer")
    for given, name, conventions in (
        ({"optimizer": torch.optim.Adagrad}, "Adagrad", DEEPSPEED), ({}, "AdamW", STRICT),
    ):  # fmt: skip
        given["conventions"] = conventions
        engine, optimizer, *_ = infinity.initialize(model=Case().model(), config=config, **given)
        engine.close()
        assert optimizer.kind == name


def test_a_scheduler_has_nothing_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    with caplog.at_level("WARNING", "infinity"):
        reference_engine(tmp_path, Case().model(), scheduler=section, log_level="warning").close()
    assert "scheduler has no effect: there is no optimizer" in caplog.text
    with pytest.raises(ConfigError, match="lr_scheduler has no optimizer"):
        infinity.initialize(
            model=Case().model(), config=reference_config(tmp_path), conventions=DEEPSPEED,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_loads_what_a_training_run_saves_and_gives_weights_to_one(dtype: str, tmp_path: Path) -> None:
    config = settings(tmp_path, dtype=dtype, optimizer="cpu")
    trained: list[dict[str, torch.Tensor]] = []

    def look(engine: Any) -> None:
        engine.save_checkpoint(tmp_path / "trained")
        trained.append(engine.state_dict())

    train(Case(), config, steps=2, look=look)
    with reference_engine(tmp_path, Case().model(), home="nvme", dtype=dtype) as engine:
        assert engine.load_checkpoint(tmp_path / "trained")[0] is not None
        assert engine.global_steps == 2
        for name, value in engine.state_dict().items():
            assert torch.equal(value, trained[0][name]), name
        engine.save_checkpoint(tmp_path / "weights")
    other = Case().model()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    engine, *_ = infinity.initialize(model=other, config=config)
    with engine:
        engine.load_checkpoint(tmp_path / "weights")
        for name, value in engine.state_dict().items():
            assert torch.equal(value, trained[0][name]), name
        engine.backward(engine(**token_batch(0, 0, positions=8)))
        engine.step()


def test_the_estimate_is_the_plan(tmp_path: Path) -> None:
    config = {**reference_config(tmp_path, home="cpu"), "optimizer": None}
    model = Case().model()
    sized = infinity.estimate(Case().model(), config).plan
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        assert sized.bytes_at_home() == engine.plan.bytes_at_home()
        assert not sized.sub_groups


def ranks_run(rank: int, world: int, folder: str, stage: int, home: str) -> tuple[float, set[str]]:
    join(world)
    with reference_engine(Path(folder), Case().model(), stage=stage, home=home) as engine:
        with torch.no_grad():
            loss = float(engine(**token_batch(rank, 0, positions=8)))
        tag = engine.save_checkpoint(folder)
        engine.load_checkpoint(folder, tag)
        with torch.no_grad():
            assert float(engine(**token_batch(rank, 0, positions=8))) == loss
        return loss, {kind.value for kind in kinds(engine)}


@pytest.mark.parametrize(("stage", "home"), [(0, "gpu"), (1, "gpu"), (2, "cpu"), (3, "gpu"), (3, "cpu"), (3, "nvme")])
def test_two_ranks_share_the_weights(stage: int, home: str, tmp_path: Path, rank_pools: dict[int, RankPool]) -> None:
    plain = Case().model().to(torch.bfloat16)
    found = rank_pools[2].run(ranks_run, str(tmp_path), stage, home)
    for rank, (loss, held) in enumerate(found):
        assert loss == float(plain(**token_batch(rank, 0, positions=8)).detach())
        assert held <= {"param", "full", "pool"}


# What a model of 25 million parameters in bf16 may take: 2 bytes each, and a twentieth more.
NUMEL_MIN, SHARE_MAX = 20_000_000, 1.05
# Bounds of what is gathered and fetched at a time, which a plan of a small model would not have.
NARROW = dict.fromkeys(("stage3_max_live_parameters", "stage3_prefetch_bucket_size"), 1_000_000)


def large(folder: Path, home: str) -> Any:
    torch.manual_seed(0)
    model = TinyLlama(dim=512, layers=8, hidden=1408).to(torch.bfloat16)
    return reference_engine(folder, model, home=home, zero=NARROW)


@pytest.mark.parametrize("home", ["gpu", "cpu", "nvme"])
def test_it_takes_the_bytes_of_its_weights(home: str, tmp_path: Path) -> None:
    with large(tmp_path, home) as engine, torch.no_grad():
        numel = sum(param.numel() for param in engine.module.parameters())
        assert numel > NUMEL_MIN
        engine.eval()
        engine(**token_batch(0, 0, positions=8))
        now = dict(engine._runtime.store.ledger.now)
        # Pools of moves and what is gathered at the time are bounded by the configuration, not by the model.
        moving = sum(nbytes for (_, kind), nbytes in now.items() if kind in (Kind.POOL, Kind.FULL))
        held = sum(now.values()) - moving
        planned = sum(sum(table.values()) for table in engine.plan.bytes_at_home().values())
        assert held <= SHARE_MAX * 2 * numel
        assert planned <= SHARE_MAX * 2 * numel + engine.plan.pools.gathered_nbytes
        assert moving <= 24e6
        if home == "nvme":
            assert now[Tier.NVME, Kind.PARAM] > 0.95 * 2 * numel


def grown(rank: int, world: int, folder: str, home: str) -> tuple[int, int]:
    """Bytes by which this process grows with an engine that has run its model, and the model's parameters."""
    torch.set_num_threads(1)
    for _ in range(2):
        # The first engine loads what a process loads once.
        before = own_nbytes()
        with large(Path(folder), home) as engine, torch.no_grad():
            engine.eval()
            for _ in range(2):
                engine(**token_batch(0, 0, positions=8))
            found = own_nbytes() - before, sum(param.numel() for param in engine.module.parameters())
    return found


@pytest.mark.parametrize("home", kept(["gpu", "cpu", "nvme"], ["nvme"]))
def test_the_process_grows_by_the_weights(home: str, tmp_path: Path) -> None:
    ((growth, numel),) = run_ranks(grown, 1, str(tmp_path), home)
    on_drive = home == "nvme"
    # Beside the weights lie what is gathered at a time, and on NVMe the pool.
    assert growth <= (0 if on_drive else SHARE_MAX * 2 * numel) + 24e6
