"""AdamW with moments in 8 bits: with bitsandbytes' bits on one rank, on every tier and any ranks alike."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, StateError
from infinity.ops.codes import decoded, encoded
from infinity.plan.types import BLOCK_NUMEL, CODED_MOMENTS, Key, Kind, Tier
from infinity.step.norms import clip_factor
from tests import tensor_matrix
from tests.conftest import RankPools
from tests.support.bnb import exact_root
from tests.support.cells import kept
from tests.support.models import tiny_llama, token_batch
from tests.support.oracle import digest, join, settings

bitsandbytes = pytest.importorskip("bitsandbytes")

RATE = 1e-3
# Most weights of TinyLlama have more elements, the smallest of its matrices and its norms fewer.
SIZE = 1025
TINY = {"sub_group_size": 1}
CODED = [kind.value for kind in CODED_MOMENTS]


def configuration(folder: str | Path, params: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    config = settings(folder, **options)
    config["optimizer"] = {"type": "AdamW8bit", "params": {"lr": RATE, "min_8bit_size": SIZE, **(params or {})}}
    return config


class Sizes(nn.Module):
    """Parameters of 1,000, 4,096 and 8,192 + 77 elements (two beside each other), a block without a gradient, and an
    embedding.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(128, 40)
        self.small = nn.Parameter(0.1 * torch.randn(1000))
        self.even = nn.Linear(64, 64, bias=False)
        self.odd = nn.Parameter(0.1 * torch.randn(8192 + 77))
        self.next = nn.Parameter(0.1 * torch.randn(4096 + 5))
        self.head = nn.Linear(40, 128)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.table(x).mean(1) + self.small.view(-1, 40).sum(0) * 0.01
        found = found + self.even(torch.tanh(self.odd[512 : 512 + 64]))[:40] * self.odd[8192:].mean()
        found = found * self.next[-40:] + self.next[:40]
        return nn.functional.cross_entropy(self.head(torch.tanh(found)), y) + self.odd[:256].square().sum()


def vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(128, (4, 9), generator=generator), torch.randint(128, (4,), generator=generator)


def check_states(model: nn.Module, expected: nn.Module, theirs: Any) -> int:
    """Compare weights and states with bitsandbytes', bit for bit; return the number of parameters in 8 bits."""
    coded = 0
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        state, held = infinity.state(param), theirs.state[other]
        assert torch.equal(state.master, other.detach()), name
        if held["state1"].dtype is torch.uint8:
            coded += 1
            for kind in CODED:
                assert torch.equal(state.full(kind), held[kind]), (name, kind)
        else:
            assert torch.equal(state.exp_avg, held["state1"]) and torch.equal(state.exp_avg_sq, held["state2"]), name
    return coded


@pytest.mark.parametrize("given", ["configuration", "instance", "paged", "override", "clipped"])
def test_a_model_in_fp32_is_stepped_as_bitsandbytes_steps_it(tmp_path: Path, given: str) -> None:
    clip = 0.05 if given == "clipped" else 0.0
    model = Sizes()
    expected = copy.deepcopy(model)
    theirs = bitsandbytes.optim.AdamW8bit(expected.parameters(), lr=RATE)
    options: dict[str, Any] = {"config": settings(tmp_path, param="cpu", optimizer="nvme", zero=TINY, clip=clip)}
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    if given in ("configuration", "clipped"):
        options["config"]["optimizer"] = {"type": "AdamW8bit", "params": {"lr": RATE}}
    else:
        kind = bitsandbytes.optim.PagedAdamW8bit if given == "paged" else bitsandbytes.optim.AdamW8bit
        options["optimizer"] = kind(model.parameters(), lr=RATE)
    if given == "override":
        for each in (model, expected):
            manager.register_module_override(each.table, "weight", {"optim_bits": 32})
    try:
        engine, optimizer, *_ = infinity.initialize(model=model, **options)
        with engine:
            for step in range(50):
                engine.backward(engine(*vectors(step)))
                engine.step()
                expected(*vectors(step)).backward()
                factor = clip_factor(engine.get_global_grad_norm() or 0.0, clip)
                assert not clip or factor < 1.0
                with exact_root(), torch.no_grad():
                    for param in expected.parameters():
                        param.grad *= factor
                    theirs.step()
                theirs.zero_grad()
            assert check_states(model, expected, theirs) == (4 if given == "override" else 5)
            kept = optimizer.state[model.odd]
            assert sorted(kept) == ["absmax1", "absmax2", "state1", "state2", "step"] and kept["absmax1"].shape == (33,)
    finally:
        manager.module_weight_config_triple.clear()
        manager.pid2config.clear()
        manager.index2config.clear()


def test_with_its_own_root_one_step_differs_in_weights_alone(tmp_path: Path) -> None:
    model = Sizes()
    expected = copy.deepcopy(model)
    theirs = bitsandbytes.optim.AdamW8bit(expected.parameters(), lr=RATE)
    config = settings(tmp_path)
    config["optimizer"] = {"type": "AdamW8bit", "params": {"lr": RATE}}
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        engine.backward(engine(*vectors(0)))
        engine.step()
        expected(*vectors(0)).backward()
        theirs.step()
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert (infinity.state(param).master - other.detach()).abs().max() <= 1e-7
            for kind in CODED if theirs.state[other]["state1"].dtype is torch.uint8 else ():
                assert torch.equal(infinity.state(param).full(kind), theirs.state[other][kind])


def test_a_model_in_bf16_has_the_rule_on_its_masters(tmp_path: Path) -> None:
    config = configuration(tmp_path, dtype="bf16", param="nvme", optimizer="nvme")
    engine, *_ = infinity.initialize(model=tiny_llama().bfloat16(), config=config)
    with engine:
        expected = tiny_llama()
        with torch.no_grad():
            for other, param in zip(expected.parameters(), engine.module.parameters(), strict=True):
                other.copy_(infinity.state(param).master)
        theirs = bitsandbytes.optim.AdamW8bit(expected.parameters(), lr=RATE, min_8bit_size=SIZE)
        for step in range(20):
            engine.backward(engine(**token_batch(0, step)))
            for other, param in zip(expected.parameters(), engine.module.parameters(), strict=True):
                other.grad = infinity.state(param).grad
            engine.step()
            with exact_root():
                theirs.step()
        assert check_states(engine.module, expected, theirs) > 10


def train(engine: Engine, steps: int, accumulation: int = 1, first: int = 0) -> None:
    """Every rank the same batches, so that sums of gradients are equal on one rank and on two."""
    for step in range(first, first + steps * accumulation):
        engine.backward(engine(**{name: ids.to(engine.device) for name, ids in token_batch(0, step).items()}))
        engine.step()


def states(engine: Engine) -> dict[str, Tensor]:
    """All masters, and what the optimizer keeps. Collective."""
    rules, found = engine.plan.request.rules, {}
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        kinds = [kind.value for kind in rules[state._param.rule].moments if state.trainable]
        found |= {f"{name} {kind}": state.full(kind) for kind in ["master", *kinds]}
    return found


def hashes(rank: int, world: int, folder: str, rows: list[dict[str, Any]]) -> list[str]:
    """The digest of each row's run."""
    join(world)
    found = []
    for row in rows:
        top = {key: row.pop(key) for key in ("overlap", "speculative_step") if key in row}
        zero = {**TINY, **row.pop("zero", {})}
        config = {**configuration(folder, row.pop("params", None), zero=zero, **row), **top}
        engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
        with engine:
            train(engine, 4, row.get("accumulation", 1))
            found.append(digest(states(engine)))
    return found


HOMES = [("gpu", "gpu"), ("cpu", "cpu"), ("nvme", "nvme"), ("gpu", "nvme")]


CELLS = list(itertools.product(["fp32", "bf16", "fp16"], [0.0, 0.05], [1, 2]))


@pytest.mark.parametrize(
    ("dtype", "clip", "accumulation"), kept(CELLS, [("fp32", 0.0, 1), ("bf16", 0.05, 1), ("fp16", 0.0, 2)])
)
def test_placement_stage_ranks_and_time_change_no_bit(
    rank_pools: RankPools, tmp_path: Path, dtype: str, clip: float, accumulation: int
) -> None:
    common = {"dtype": dtype, "clip": clip, "accumulation": accumulation, "parallel": {"reduce": "step"}}
    rows: list[dict[str, Any]] = [{**common, "param": param, "optimizer": optimizer} for param, optimizer in HOMES]
    rows += [{**common, "stage": stage, "optimizer": "nvme" if stage == 1 else "cpu"} for stage in (0, 1, 2)]
    nvme = {**common, "param": "nvme", "optimizer": "nvme"}
    rows += [
        {**nvme, "overlap": False}, {**nvme, "speculative_step": True, "zero": {"sub_group_size": 20_000}},
        {**nvme, "zero": {"sub_group_size": 10**9, "offload_gradients": {"device": "nvme"}}},
        {**common, "param": "cpu", "optimizer": "cpu", "speculative_step": True},
    ]  # fmt: skip
    found = {world: rank_pools[world].run(hashes, str(tmp_path), copy.deepcopy(rows))[0] for world in (1, 2)}
    assert all(len(set(each)) == 1 for each in found.values()), found
    # The norm of two ranks is added up in another order than that of one, and sums of several gradients are rounded on
    # their way between ranks.
    assert clip or accumulation > 1 or found[1] == found[2], found


def on_axes(rank: int, world: int, tensor: int, folder: str, load: str, save: str) -> dict[str, Tensor]:
    """Load a checkpoint of any axes, or train two steps; save; return all states."""
    join(world)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = configuration(
        folder, {"min_8bit_size": 4096}, param="cpu", optimizer="nvme", zero={"sub_group_size": 100_000}
    )
    model = tensor_matrix.build("llama", num_hidden_layers=1, **sizes)
    engine, *_ = infinity.initialize(model=model, config={**config, "parallel": {"tensor": tensor}})
    with engine:
        if load:
            engine.load_checkpoint(load)
        for step in range(0 if load else 2):
            engine.backward(engine(**tensor_matrix.batch(step, 0)).loss)
            engine.step()
        engine.save_checkpoint(save)
        return states(engine)


def test_checkpoints_pass_between_axes(rank_pools: RankPools, tmp_path: Path) -> None:
    """Trained on a tensor axis of two, loaded on one rank, saved there, loaded on two data ranks, and back."""
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    trained = rank_pools[2].run(on_axes, 2, str(tmp_path), "", first)[0]
    assert any(name.endswith("absmax2") and value.any() for name, value in trained.items())
    for world, tensor, load, save in ((1, 1, first, second), (2, 1, second, third), (2, 2, third, first)):
        found = rank_pools[world].run(on_axes, tensor, str(tmp_path), load, save)[0]
        assert digest(found) == digest(trained), (world, tensor)


def saved(rank: int, world: int, folder: str, params: dict[str, Any]) -> dict[str, Tensor]:
    join(world)
    engine, *_ = infinity.initialize(
        model=tiny_llama(), config=configuration(folder, params, param="nvme", optimizer="nvme", dtype="bf16")
    )
    with engine:
        train(engine, 3)
        engine.save_checkpoint(f"{folder}/saved")
        return states(engine)


def loaded(
    rank: int, world: int, folder: str, stage: int, params: dict[str, Any], model: str
) -> tuple[dict[str, Tensor], str]:
    """What was loaded, and the digest after three more steps."""
    join(world)
    config = configuration(folder, params, stage=stage, optimizer="cpu", dtype="bf16", zero=TINY)
    engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
    with engine:
        engine.load_checkpoint(f"{folder}/{model}")
        found = states(engine)
        train(engine, 3, first=3)
        return found, digest(states(engine))


def test_checkpoints_load_at_other_ranks_and_stages_and_go_on(rank_pools: RankPools, tmp_path: Path) -> None:
    expected = rank_pools[2].run(saved, str(tmp_path), {})[0]
    again = set()
    for world, stage in ((1, 1), (2, 0), (2, 3)):
        values, after = rank_pools[world].run(loaded, str(tmp_path), stage, {}, "saved")[0]
        assert digest(values) == digest(expected), (world, stage)
        again.add(after)
    assert len(again) == 1
    # What the other run keeps in 32 bits is what the codes stand for, and the other way round.
    wide, _ = rank_pools[1].run(loaded, str(tmp_path), 1, {"optim_bits": 32}, "saved")[0]
    names = [name.removesuffix("state1") for name in expected if name.endswith("state1")]
    for name in names:
        for which, kind in enumerate(("exp_avg", "exp_avg_sq")):
            codes, scales = expected[f"{name}state{which + 1}"], expected[f"{name}absmax{which + 1}"]
            assert torch.equal(wide[f"{name}{kind}"].flatten(), decoded(codes.flatten(), scales, which)), name
    rank_pools[1].run(saved, str(tmp_path), {"optim_bits": 32})
    narrow, _ = rank_pools[1].run(loaded, str(tmp_path), 1, {}, "saved")[0]
    wide, _ = rank_pools[1].run(loaded, str(tmp_path), 1, {"optim_bits": 32}, "saved")[0]
    for name in names:
        codes, scales = encoded(wide[f"{name}exp_avg_sq"].flatten(), 1)
        assert torch.equal(narrow[f"{name}state2"].flatten(), codes) and torch.equal(narrow[f"{name}absmax2"], scales)


def test_nothing_is_cut_inside_a_block(tmp_path: Path) -> None:
    zero = {"sub_group_size": 1000, "tile_parameters": 2000}
    config = configuration(tmp_path, {"min_8bit_size": 4096}, param="nvme", optimizer="nvme", dtype="bf16", zero=zero)
    engine, *_ = infinity.initialize(model=Sizes(), config=config)
    with engine:
        plan, coded = engine.plan, 0
        assert any(layout.is_tile for layout in plan.layouts)
        for layout in plan.layouts:
            if plan.request.rules[layout.rule].block == BLOCK_NUMEL:
                assert not any(slot.offset % BLOCK_NUMEL or slot.start % BLOCK_NUMEL for slot in layout.slots)
        for group in plan.sub_groups:
            sections = plan.partition(Key(Kind.STATES, group.index)).sections
            if plan.rule_of(group).block == BLOCK_NUMEL:
                coded += 1
                assert not any(piece.start % BLOCK_NUMEL or piece.numel % BLOCK_NUMEL for piece in group.slices)
                sizes = {section.kind: section.numel for section in sections}
                assert sizes[Kind.ABSMAX_1] * BLOCK_NUMEL == sizes[Kind.CODES_1] == group.numel
        assert coded > 10
        engine.backward(engine(*vectors(0)))
        engine.step()
        assert engine.store.ledger.most[Tier.GPU] <= plan.nbytes_by_tier()[Tier.GPU]


def test_states_are_read_and_assigned(tmp_path: Path) -> None:
    engine, optimizer, *_ = infinity.initialize(
        model=tiny_llama(), config=configuration(tmp_path, param="cpu", optimizer="nvme", zero=TINY)
    )
    with engine:
        train(engine, 2)
        param = engine.module.head.weight
        state = infinity.state(param)
        assert state.state1.dtype is torch.uint8 and state.absmax1.shape == (12,)
        assert 0 < state.exp_avg.abs().max() <= state.absmax1.max() and state.exp_avg_sq.shape == (96, 32)
        with pytest.raises(StateError, match="computed from state1, absmax1, state2, absmax2"):
            state.exp_avg = torch.zeros(96, 32)
        with pytest.raises(ValueError, match=r"absmax1 of head.weight has shape \(12,\)"):
            state.absmax1 = torch.zeros(13)
        held = {key: value.clone() for key, value in optimizer.state[param].items()}
        before, scales = state.exp_avg, state.absmax1
        # Of a power of two each, so that products are exact.
        factors = 2.0 ** torch.arange(12.0)
        state.absmax1 = factors * scales
        assert torch.equal(state.exp_avg, (before.view(12, 256) * factors[:, None]).view(96, 32))
        assert torch.equal(state.local("absmax1"), factors * scales)
        optimizer.state[param].clear()
        assert not state.absmax2.any() and not state.state1.any() and not optimizer.state[param]
        # As bitsandbytes has them, with the values of all codes beside.
        optimizer.state[param] = {**held, "qmap1": torch.zeros(256), "qmap2": torch.zeros(256)}
        assert torch.equal(state.exp_avg, before) and float(optimizer.state[param]["step"]) == 2
        small = optimizer.state[engine.module.norm.weight]
        assert sorted(small) == ["state1", "state2", "step"] and small["state1"].dtype is torch.float32


def test_a_step_that_is_not_finite_unchecked_keeps_blocks(tmp_path: Path) -> None:
    config = {**configuration(tmp_path, optimizer="cpu"), "check_grad_overflow": False}
    engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
    with engine:
        train(engine, 1)
        before = states(engine)
        engine.backward(engine(**token_batch(0, 0)) * float("nan"))
        engine.step()
        # Rows that no token names have a gradient of zero, and their weights decay.
        after = states(engine)
        changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert changed == {"embedding.weight master", "positions master"}
        assert all(value.isfinite().all() for value in after.values())


def test_a_group_or_a_parameter_says_32_bits(tmp_path: Path) -> None:
    model = tiny_llama()
    model.embedding.weight.optim_bits = 32  # type: ignore[assignment]
    groups: list[dict[str, Any]] = [
        {"params": [model.head.weight], "optim_bits": 32, "lr": 0.1},
        {"params": [param for param in model.parameters() if param is not model.head.weight]},
    ]
    engine, *_ = infinity.initialize(model=model, config=configuration(tmp_path), model_parameters=groups)
    with engine:
        train(engine, 1)
        kept = {name for name in states(engine) if name.endswith("state1")}
        assert "head.weight state1" not in kept and "embedding.weight state1" not in kept
        assert "positions state1" in kept


def refusals() -> Iterator[tuple[str, Callable[[Path, nn.Module], Any]]]:
    def coded(parallel: dict[str, Any] | None = None, **params: Any) -> Callable[[Path, nn.Module], Any]:
        return lambda folder, model: infinity.initialize(model=model, config=configuration(folder, params))

    def given(change: Callable[[nn.Module], dict[str, Any]], **options: Any) -> Callable[[Path, nn.Module], Any]:
        def act(folder: Path, model: nn.Module) -> None:
            optimizer = bitsandbytes.optim.AdamW(model.parameters(), optim_bits=8, **options)
            for key, value in change(model).items():
                setattr(optimizer.args, key, value)
            infinity.initialize(model=model, config=settings(folder), optimizer=optimizer)

        return act

    yield "amsgrad", coded(amsgrad=True)
    yield "max_unorm", coded(max_unorm=1.0)
    yield "optim_bits", coded(optim_bits=4)
    yield "min_8bit_size", coded(min_8bit_size=-1)
    yield "max_unorm is 0.5 for parameter 0 of group 0", given(lambda model: {"max_unorm": 0.5})
    yield "skip_zeros is True", given(lambda model: {"skip_zeros": True})


@pytest.mark.parametrize(("words", "act"), list(refusals()), ids=lambda given: given if isinstance(given, str) else "")
def test_what_is_not_done_is_refused_by_name(tmp_path: Path, words: str, act: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        act(tmp_path, tiny_llama())


def cut(rank: int, world: int, folder: str) -> str:
    join(world)
    try:
        config = {**configuration(folder, {"min_8bit_size": 1}), "parallel": {"tensor": 2}}
        infinity.initialize(model=tensor_matrix.build("llama"), config=config)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_tensor_axis_that_cuts_blocks_is_refused_by_name(rank_pools: RankPools, tmp_path: Path) -> None:
    text = rank_pools[2].run(cut, str(tmp_path))[0]
    assert "parallel.tensor cuts model." in text and "inside blocks of 256" in text and "min_8bit_size" in text
