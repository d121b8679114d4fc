"""What an engine can do, on the simulated accelerator: with the values of the CPU, and without a race.

Each test's function runs in one process with the accelerator, and in it an engine on the CPU where it is to be compared
with. `tests/test_accelerator_matrix.py` has the placements; here are the features.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import infinity
from infinity.engine import Engine
from infinity.errors import StateError, TierMemoryError
from infinity.memory.tiers.device import Device
from infinity.plan.filling import in_process
from tests.accelerator_matrix import TIGHT, PlainCase
from tests.engine import test_adamw8bit, test_experts, test_muon
from tests.memory.test_pages import private_dirty_nbytes
from tests.support import accelerator
from tests.support.accelerator.process import AcceleratedProcess
from tests.support.cells import kept
from tests.support.clock import garbage_collector_spared
from tests.support.host_accesses import host_accesses_are_declared
from tests.support.models import token_batch
from tests.support.oracle import CLIP, Result, collect, join, settings, train
from tests.support.simulated_device import SimulatedDevice, engines_use
from tests.support.spawn import run_ranks

ROOT = Path(__file__).parents[2]


class Unified(SimulatedDevice):
    """A device whose memory is the CPU's."""

    own_memory = False


class Allocating(SimulatedDevice):
    """A device whose driver pins only what it allocates."""

    pinning = "allocation"


def raceless(act: Callable[..., Any], device: type[Device], *args: Any) -> Any:
    """Call `act` where engines use the device; races are an error."""
    torch.set_num_threads(1)
    with engines_use(device), host_accesses_are_declared():
        value = act(*args)
    assert not accelerator.races(), "\n".join(map(str, accelerator.races()[:3]))
    return value


def batch(engine: Engine, number: int) -> dict[str, Tensor]:
    return {name: ids.to(engine.device) for name, ids in token_batch(0, number, positions=8).items()}


def step(engine: Engine, number: int) -> None:
    engine.backward(engine(**batch(engine, number)))
    engine.step()


def made(config: dict[str, Any], case: PlainCase | None = None) -> Engine:
    """An engine for a case, on the device that engines use now."""
    case = case or PlainCase()
    model = case.model()
    return infinity.initialize(model=model, config=config, model_parameters=case.groups(model))[0]


def digest(engine: Engine) -> str:
    result = Result()
    collect(engine, result)
    return result.digest


def on_cpu(act: Callable[..., Any], *args: Any) -> Any:
    """What `act` gives with an engine on the CPU."""
    with engines_use(Device):
        return act(*args)


def both(act: Callable[..., Any], *args: Any) -> Any:
    """What `act` gives on the device, which must be what it gives on the CPU."""
    found = act(*args)
    assert found == on_cpu(act, *args)
    return found


TIERS = ("gpu", "cpu", "nvme")


def fp16_overflows(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """The first scale is too large: steps are skipped until it fits, then weights move."""

    def act(tier: str) -> tuple[str, int, float]:
        config = settings(folder, param=tier, optimizer=tier, dtype="fp16", accumulation=2, clip=CLIP, zero=TIGHT)
        config["fp16"]["initial_scale_power"] = 24
        config["fp16"]["hysteresis"] = 1
        applied = 0
        with made(config) as engine:
            for micro in range(24):
                step(engine, micro)
                applied += engine.was_step_applied()
            return digest(engine), applied, engine.loss_scale

    found = {both(act, tier) for tier in tiers}
    assert len(found) == 1
    ((_, applied, scale),) = found
    assert 0 < applied < 12 and scale < 2**24


class Checkpointed(PlainCase):
    """As the case, of which the program computes a block again."""

    def model(self) -> nn.Module:
        model = super().model()
        for block in model.blocks:
            block.forward = _again(block.forward)
        return model


def _again(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def checkpointing(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """Blocks are computed again; what they need for it lies on each tier."""

    def act(home: str, case: PlainCase) -> str:
        section: dict[str, Any] = {"every": 1}
        if home in ("cpu", "nvme"):
            section["offload"] = {"device": home, "nvme_path": folder, "buffer_count": 2}
        more = {"activation_checkpointing": section} if home != "none" else {}
        config = settings(folder, param="cpu", optimizer="nvme", dtype="bf16", accumulation=2, **more)
        return train(case, config, steps=2).digest

    homes = [("none", PlainCase()), *((home, PlainCase()) for home in tiers), ("none", Checkpointed())]
    assert len({both(act, *each) for each in homes}) == 1


def tiles(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """Wide weights are executed tile by tile."""

    def act(tier: str) -> str:
        config = settings(folder, param=tier, optimizer=tier, accumulation=2, zero={**TIGHT, "tile_parameters": 200})
        return train(PlainCase(), config, steps=2).digest

    assert len({both(act, tier) for tier in tiers}) == 1


class TiledLoss(PlainCase):
    """The head's loss without logits, and a tiled MLP."""

    def model(self) -> nn.Module:
        model = super().model()
        model.forward = _tiled_forward.__get__(model)
        return model


def _tiled_forward(self: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
    x = self.embedding(input_ids) + self.positions[: input_ids.shape[-1]]
    for block in self.blocks:
        x = block(x)
    x = infinity.tiled_mlp(self.fixed, x, tile_tokens=5)
    return infinity.tiled_cross_entropy(self.norm(x), self.head, labels, shift=True, tile_tokens=5)


def tiled_loss(folder: str, tiers: Sequence[str] = TIERS) -> None:
    def act(tier: str) -> str:
        config = settings(folder, param=tier, optimizer=tier, dtype="bf16", zero=TIGHT)
        return train(TiledLoss(), config, steps=2).digest

    assert len({both(act, tier) for tier in tiers}) == 1


def constructed(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """`infinity.Init`."""

    def act(tier: str) -> str:
        config = settings(folder, param=tier, optimizer=tier, dtype="bf16", zero=TIGHT)
        torch.manual_seed(0)
        with infinity.Init(config=config):
            model = PlainCase().model()
        engine, *_ = infinity.initialize(model=model, config=config, model_parameters=PlainCase().groups(model))
        with engine:
            step(engine, 0)
            return digest(engine)

    expected = act_plain(folder)
    assert {both(act, tier) for tier in tiers} == {expected}


def act_plain(folder: str) -> str:
    """A step of a model that was built as usual."""
    with made(settings(folder, dtype="bf16", zero=TIGHT)) as engine:
        step(engine, 0)
        return digest(engine)


def saved_and_loaded(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """From the device or the CPU to either, with another placement; then two further steps."""
    place = {"gpu": "nvme", "nvme": "cpu", "cpu": "gpu"}

    def config(tier: str) -> dict[str, Any]:
        return settings(f"{folder}/nvme", param=tier, optimizer=tier, dtype="bf16", accumulation=1, zero=TIGHT)

    def save(tier: str, where: str) -> str:
        with made(config(tier)) as engine:
            for number in range(2):
                step(engine, number)
            engine.save_checkpoint(where)
            engine.export(f"{where}/export")
            step(engine, 2)
            return digest(engine)

    def load(tier: str, where: str) -> str:
        with made(config(tier)) as engine:
            assert engine.load_checkpoint(where)[0] is not None
            step(engine, 2)
            return digest(engine)

    exports, digests = set(), set()
    for number, tier in enumerate(tiers):
        for name, at in (("device", lambda act, *args: act(*args)), ("cpu", on_cpu)):
            where = f"{folder}/{name}-{number}"
            digests.add(at(save, tier, where))
            digests.add(load(place[tier], where))
            digests.add(on_cpu(load, place[tier], where))
            (file,) = Path(where, "export").glob("*.safetensors")
            exports.add(file.read_bytes())
    assert len(digests) == len(exports) == 1


def accessed(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """read, modify and state, on every tier, between and before steps."""

    def act(tier: str) -> tuple[str, str]:
        seen = []
        config = settings(folder, param=tier, optimizer=tier, dtype="bf16", accumulation=2, zero=TIGHT)
        with made(config) as engine:
            params = dict(engine.module.named_parameters())
            weight = params["blocks.0.up.weight"]
            for micro in range(4):
                engine.backward(engine(**batch(engine, micro)))
                seen.append(infinity.state(weight).grad)
                engine.step()
                with infinity.read(weight):
                    seen.append(weight.detach().clone())
            with infinity.modify([weight, params["norm.weight"]]):
                weight.mul_(0.5)
                params["norm.weight"].add_(1)
            infinity.state(weight).exp_avg = infinity.state(weight).exp_avg * 2
            for micro in range(4, 6):
                step(engine, micro)
            # Whatever the dtype, the same text for the same bits.
            return digest(engine), repr([each.float().cpu().tolist() for each in seen])

    assert len({both(act, tier) for tier in tiers}) == 1


def hugging_face(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """A model of transformers, loaded by slices: trained, and generating."""
    from transformers import AutoModelForCausalLM

    from tests.support.hub import hf_config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(hf_config("llama")).save_pretrained(f"{folder}/model")

    def act(tier: str) -> tuple[str, list[int]]:
        config = settings(f"{folder}/nvme", param=tier, optimizer=tier, zero=TIGHT)
        model = infinity.load_hf(f"{folder}/model", config, attn_implementation="eager")
        engine, *_ = infinity.initialize(model=model, config=config)
        with engine:
            ids = token_batch(0, 0, positions=8)["input_ids"].to(engine.device)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            made = engine.module.generate(
                input_ids=ids[:1, :4], attention_mask=torch.ones_like(ids[:1, :4]), max_new_tokens=4, do_sample=False,
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
            return digest(engine), tuple(made[0].tolist())

    assert len({both(act, tier) for tier in tiers}) == 1


def two_engines(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """Two engines take turns, an evaluation stands between backward and step, and a forward is for nothing."""

    def act() -> list[str]:
        first = made(settings(f"{folder}/1", param="nvme", optimizer="cpu", dtype="bf16", zero=TIGHT))
        second = made(settings(f"{folder}/2", param="cpu", optimizer="nvme", zero=TIGHT))
        with first, second:
            for number in range(3):
                for engine in (first, second):
                    engine.backward(engine(**batch(engine, number)))
                for engine in (second, first):
                    engine.eval()
                    with torch.no_grad():
                        engine(**batch(engine, 9))
                    engine.train()
                    engine.step()
            return [digest(first), digest(second)]

    def alone(tier: str, optimizer: str, dtype: str) -> str:
        config = settings(folder, param=tier, optimizer=optimizer, dtype=dtype, zero=TIGHT)
        return train(PlainCase(), config, steps=3).digest

    assert both(act) == [alone("nvme", "cpu", "bf16"), alone("cpu", "nvme", "fp32")]


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("a failure in backward")


def fails_in_backward(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """The pass is abandoned; the training goes on as if it had not been."""

    def act(tier: str, fails: bool) -> str:
        config = settings(folder, param=tier, optimizer=tier, dtype="bf16", zero=TIGHT)
        with made(config) as engine:
            for number in range(3):
                if fails and number:
                    handle = engine.module.blocks[0].register_forward_hook(lambda *given: Fails.apply(given[-1]))
                    loss = engine(**batch(engine, number))
                    with pytest.raises(ArithmeticError, match="a failure in backward"):
                        engine.backward(loss)
                    handle.remove()
                    engine.zero_grad()
                step(engine, number)
            return digest(engine)

    assert len({both(act, tier, fails) for tier in tiers for fails in (False, True)}) == 1


def on_a_side_stream(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """The whole program on another stream than the default one."""
    for tier in tiers:
        config = settings(folder, param=tier, optimizer=tier, dtype="bf16", accumulation=2, clip=CLIP, zero=TIGHT)
        expected = train(PlainCase(), config, steps=3).digest
        with torch.Stream(torch.device("simulated", 0)):
            assert train(PlainCase(), config, steps=3).digest == expected


class OnCpu(PlainCase):
    """The program builds its model and its batches where it wants them."""

    def model(self) -> nn.Module:
        with torch.device("cpu"):
            return super().model()

    def losses(self, call: Any, rank: int, micro: int) -> Iterator[Tensor]:
        with torch.device("cpu"):
            ids = token_batch(rank, micro, positions=8)
        yield call(**{name: value.to(call.device) for name, value in ids.items()})


def under_a_default_device(folder: str, tiers: Sequence[str] = TIERS) -> None:
    for tier in tiers:
        config = settings(folder, param=tier, optimizer=tier, dtype="fp16", clip=CLIP, zero=TIGHT)
        expected = train(OnCpu(), config, steps=2).digest
        torch.set_default_device("meta")
        try:
            assert train(OnCpu(), config, steps=2).digest == expected
        finally:
            torch.set_default_device(None)


def plain(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """A training on each tier."""

    def act(tier: str) -> str:
        config = settings(folder, param=tier, optimizer=tier, dtype="bf16", accumulation=2, clip=CLIP, zero=TIGHT)
        return train(PlainCase(), config, steps=3).digest

    assert len({both(act, tier) for tier in tiers}) == 1


def one_memory(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """A device that shares the CPU's memory: nothing is copied to offload it, and the plan counts one memory."""
    plain(folder)
    copied, counted = {}, {}
    for tier in tiers:
        config = settings(folder, param=tier, optimizer=tier, dtype="bf16", zero=TIGHT)
        with made(config) as engine:
            ids = batch(engine, 0)
            engine.backward(engine(**ids))
            engine.step()
            engine.synchronize()
            accelerator.reset()
            engine.backward(engine(**ids))
            engine.step()
            engine.synchronize()
            copied[tier] = sum(each.nbytes for each in accelerator.log() if each.kind in ("copy up", "copy down"))
            counted[tier] = in_process(engine.plan.bytes_by_tier(), accelerator=engine.plan.request.accelerator)
    # The rest are numbers: the loss, norms.
    assert copied["gpu"] == copied["cpu"] < 500 < copied["nvme"], copied
    assert counted["cpu"] >= counted["gpu"] > 0


class Rows(Dataset[Any]):
    """What a worker reads, with the memory that it alone has; it takes its time, so that the program trains beside."""

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        time.sleep(0.05)
        return torch.randn(2, 1024), os.getpid(), private_dirty_nbytes()

    def __len__(self) -> int:
        return 24


class Wide(nn.Module):
    """Some 20 MB of parameters in bf16, with states of six times as much."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


def forked_beside(folder: str) -> None:
    """Workers of a data loader that are forked in a training have little more of their own than those before it."""
    loader = DataLoader(Rows(), batch_size=None, num_workers=4, multiprocessing_context="fork", prefetch_factor=1)

    def most(use: Callable[[Tensor], None]) -> int:
        held: dict[int, int] = {}
        # A worker that collects garbage writes to all objects of the program, 80 MB of them.
        with garbage_collector_spared():
            for rows, worker, nbytes in loader:
                use(rows)
                held[worker] = max(nbytes, held.get(worker, 0))
        assert len(held) == 4 and os.getpid() not in held
        return max(held.values())

    before = most(lambda rows: None)
    for tier in ("cpu", "nvme"):
        config = settings(folder, param=tier, optimizer=tier, dtype="bf16")
        engine, *_ = infinity.initialize(model=Wide(), config=config)
        with engine:

            def use(rows: Tensor, engine: Engine = engine) -> None:
                engine.backward(engine(rows.to(engine.device, torch.bfloat16)))
                engine.step()

            use(torch.randn(2, 1024))
            found = most(use)
        assert found - before <= 5 << 20, f"{tier}: {found / 1e6:.1f} MB, before the engine {before / 1e6:.1f} MB"


def runs_out_of_memory(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """One allocation of a run fails, wherever: the error has the ledger, and where it says so training goes on."""

    def act(fails_at: int) -> tuple[str, int, list[str]]:
        words = []
        with made(settings(folder, param="cpu", optimizer="cpu", dtype="bf16", clip=CLIP, zero=TIGHT)) as engine:
            begin = accelerator.memory_stats()["allocations"]
            accelerator.fail_at(fails_at)
            while engine.global_steps < 2:
                ids = batch(engine, engine.global_steps) if not fails_at else given[engine.global_steps]
                try:
                    engine.backward(engine(**ids))
                    engine.step()
                except TierMemoryError as error:
                    words.append(str(error))
                    if "cannot go on" in words[-1]:
                        with pytest.raises(StateError, match="was cut short"):
                            engine(**ids)
                        return "", 0, words
                    engine.zero_grad()
            accelerator.fail_at(0)
            allocations = accelerator.memory_stats()["allocations"] - begin
            return digest(engine), allocations, words

    given = [
        {name: ids.to("simulated") for name, ids in token_batch(0, number, positions=8).items()} for number in range(2)
    ]
    expected, allocations, _ = act(0)
    drawn = random.Random(0)
    for _ in range(8):
        found, _, words = act(drawn.randrange(1, allocations - 10))
        assert len(words) == 1 and ("asked" in words[0] or "gpu" in words[0]), words
        assert found in ("", expected)


def muon(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """Matrices are made orthogonal on the device, wherever their momentum lies."""

    def act(tier: str) -> str:
        config = test_muon.configuration(folder, param=tier, optimizer=tier, dtype="bf16", clip=CLIP, zero=TIGHT)
        with infinity.initialize(model=PlainCase().model(), config=config)[0] as engine:
            for number in range(3):
                step(engine, number)
            return test_muon.digest(test_muon.states(engine))

    assert len({both(act, tier) for tier in tiers}) == 1


def coded(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """Moments in 8 bits, wherever they live; the maps of codes come to the device once."""

    def act(tier: str) -> str:
        config = settings(folder, param=tier, optimizer=tier, dtype="bf16", clip=CLIP, zero=TIGHT)
        config["optimizer"] = {"type": "AdamW8bit", "params": {"lr": 1e-3, "min_8bit_size": 500}}
        with infinity.initialize(model=PlainCase().model(), config=config)[0] as engine:
            assert any(engine.plan.rule_of(group).block > 1 for group in engine.plan.sub_groups)
            for number in range(3):
                step(engine, number)
            return test_adamw8bit.digest(test_adamw8bit.states(engine))

    assert len({both(act, tier) for tier in tiers}) == 1


def experts(folder: str, tiers: Sequence[str] = TIERS) -> None:
    """Experts a few at a time: the next one's copy to the device is under way while one is computed with."""

    def act(tier: str) -> str:
        model = test_experts.build("qwen3_moe")
        config = test_experts.configuration(folder, model, tiled=True, param=tier, optimizer=tier, clip=CLIP)
        with infinity.initialize(model=model, config=config)[0] as engine:
            test_experts.train(engine, 0, 2)
            return test_experts.digest(test_experts.states(engine))

    assert len({both(act, tier) for tier in tiers}) == 1


ACTS: dict[str, tuple[Callable[..., None], type[Device]]] = {
    "fp16 that overflows": (fp16_overflows, SimulatedDevice),
    "activation checkpointing": (checkpointing, SimulatedDevice),
    "tiled weights": (tiles, SimulatedDevice),
    "a tiled loss": (tiled_loss, SimulatedDevice),
    "a model built in parts": (constructed, SimulatedDevice),
    "checkpoints and exports": (saved_and_loaded, SimulatedDevice),
    "access to values": (accessed, SimulatedDevice),
    "a model of transformers": (hugging_face, SimulatedDevice),
    "two engines": (two_engines, SimulatedDevice),
    "a failure in backward": (fails_in_backward, SimulatedDevice),
    "a side stream": (on_a_side_stream, SimulatedDevice),
    "a default device": (under_a_default_device, SimulatedDevice),
    "memory that runs out": (runs_out_of_memory, SimulatedDevice),
    "Muon": (muon, SimulatedDevice),
    "Muon in one memory": (muon, Unified),
    "moments in 8 bits": (coded, SimulatedDevice),
    "moments in 8 bits in one memory": (coded, Unified),
    "experts": (experts, SimulatedDevice),
    "one memory": (one_memory, Unified),
    "pinning by allocation": (plain, Allocating),
}


SUITE = (
    "fp16 that overflows", "activation checkpointing", "checkpoints and exports", "access to values",
    "a failure in backward", "memory that runs out", "pinning by allocation", "Muon", "moments in 8 bits", "experts",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tiers"),
    kept([(name, tiers) for name in ACTS for tiers in (TIERS, TIERS[::2])], [(name, TIERS[::2]) for name in SUITE]),
    ids=lambda given: given if isinstance(given, str) else len(given),
)
def test_on_the_accelerator(process: AcceleratedProcess, tmp_path: Path, name: str, tiers: tuple[str, ...]) -> None:
    act, device = ACTS[name]
    process.run(raceless, act, device, str(tmp_path), tiers)


def of_ranks(rank: int, world: int, folder: str) -> None:
    """gloo moves CPU memory: collectives are staged there."""
    accelerator.load()
    accelerator.configure()
    accelerator.reset()
    join(world)

    def act(stage: int, dtype: str, tier: str) -> tuple[str, list[float]]:
        param = tier if stage == 3 else "gpu"
        config = settings(folder, stage=stage, param=param, optimizer=tier, dtype=dtype, accumulation=2, clip=CLIP)
        result = train(PlainCase(), config, rank=rank, steps=2)
        return result.digest, result.norms

    for stage, (dtype, tier) in enumerate([("fp16", "gpu"), ("bf16", "cpu"), ("fp32", "nvme"), ("bf16", "nvme")]):
        raceless(both, SimulatedDevice, act, stage, dtype, tier)


def test_two_ranks_with_collectives_of_the_cpu(process: AcceleratedProcess, tmp_path: Path) -> None:
    """At every stage. In two processes of their own, for these have the accelerator for good."""
    run_ranks(of_ranks, 2, str(tmp_path))


ALONE = """
import sys
from tests.engine.test_accelerator import forked_beside, raceless
from tests.support import accelerator
from tests.support.simulated_device import SimulatedDevice
accelerator.load()
raceless(forked_beside, SimulatedDevice, sys.argv[1])
"""


@pytest.mark.matrix
def test_workers_of_a_data_loader(process: AcceleratedProcess, tmp_path: Path) -> None:
    """In a process of its own: one of a pool may not have children."""
    command = [sys.executable, "-W", "ignore", "-c", ALONE, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
