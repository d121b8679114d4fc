"""Muon for hidden matrices and AdamW for the rest: with torch's bits on one rank, on every tier and any ranks alike."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.optim.muon import MuonHyper, MuonRule, orthogonal
from infinity.optim.update_rules import Segment, StepSlice
from infinity.plan.layout import Overlap, Slot
from infinity.plan.types import Key, Kind, Tier
from tests import tensor_matrix
from tests.conftest import RankPools
from tests.engine import test_experts
from tests.support.cells import covered
from tests.support.models import tiny_llama, token_batch
from tests.support.oracle import digest, join, settings

# Rates as a run has them: the iteration amplifies what rounding flips in directions that a gradient hardly has.
RATE = 1e-3
TINY = {"sub_group_size": 1}


def by_muon(model: nn.Module) -> list[str]:
    """The names of TinyLlama's hidden matrices: those of the blocks and the positions, which no module embeds."""
    return [
        name for name, param in model.named_parameters()
        if param.ndim == 2 and (name.startswith("blocks.") or name == "positions")
    ]  # fmt: skip


def configuration(folder: str, params: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    config = settings(folder, **options)
    config["optimizer"] = {"type": "Muon", "params": {"lr": RATE, **(params or {})}}
    return config


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's two, with the hyper-parameters of `configuration`."""
    named, hidden = dict(model.named_parameters()), by_muon(model)
    rest = [param for name, param in named.items() if name not in hidden]
    return [
        torch.optim.Muon([named[name] for name in hidden], lr=RATE),
        torch.optim.AdamW(rest, lr=RATE, weight_decay=0.1, fused=True),
    ]


def train(engine: Engine, rank: int = 0, steps: int = 20, first: int = 0) -> None:
    for step in range(first, first + steps):
        engine.backward(engine(**{name: ids.to(engine.device) for name, ids in token_batch(rank, step).items()}))
        engine.step()


def states(engine: Engine) -> dict[str, Tensor]:
    """All masters, and what the optimizers keep. Collective."""
    groups = engine.optimizer.param_groups
    muon = {id(param): group["use_muon"] for group in groups for param in group["params"]}
    found = {}
    for name, param in engine.module.named_parameters():
        kinds = ["momentum_buffer"] if muon.get(id(param)) else ["exp_avg", "exp_avg_sq"] if param.requires_grad else []
        found |= {f"{name} {kind}": getattr(infinity.state(param), kind) for kind in ["master", *kinds]}
    return found


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items() if name.endswith("master"))


@pytest.mark.parametrize("given", ["configuration", "instances", "instances turned round"])
def test_a_model_in_fp32_is_stepped_as_torch_steps_it(tmp_path: Path, given: str) -> None:
    expected = tiny_llama()
    own = optimizers(expected)
    for step in range(20):
        expected(**token_batch(0, step)).backward()
        for each in own:
            each.step()
            each.zero_grad()
    model = tiny_llama()
    if given == "configuration":
        options: dict[str, Any] = {"config": configuration(str(tmp_path), param="nvme", optimizer="nvme")}
    else:
        several = optimizers(model)[:: 1 if given == "instances" else -1]
        config = settings(tmp_path, param="cpu", optimizer="nvme")
        options = {"config": config, "optimizer": several}
    engine, optimizer, *_ = infinity.initialize(model=model, **options)
    with engine:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        for step in range(20):
            train(engine, steps=1, first=step)
            schedule.step()
        for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            held = own[name not in by_muon(model)].state[other]
            for kind, value in {**held, "master": other.detach()}.items():
                if kind != "step":
                    assert torch.equal(getattr(infinity.state(param), kind), value), (name, kind)
            assert sorted(optimizer.state[param]) == sorted(held)


def test_a_model_in_bf16_has_the_rule_on_its_masters(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(
        model=tiny_llama().bfloat16(), config=configuration(str(tmp_path), dtype="bf16", optimizer="cpu")
    )
    with engine:
        expected = tiny_llama()
        with torch.no_grad():
            for other, param in zip(expected.parameters(), engine.module.parameters(), strict=True):
                other.copy_(infinity.state(param).master)
        own = optimizers(expected)
        for step in range(20):
            engine.backward(engine(**token_batch(0, step)))
            for other, param in zip(expected.parameters(), engine.module.parameters(), strict=True):
                other.grad = infinity.state(param).grad
            engine.step()
            for each in own:
                each.step()
        for (name, other), param in zip(expected.named_parameters(), engine.module.parameters(), strict=True):
            assert torch.equal(infinity.state(param).master, other), name


def hashes(rank: int, world: int, folder: str, rows: list[dict[str, Any]]) -> tuple[list[str], dict[str, Tensor]]:
    """The digest of each row's run, and the values of the last."""
    join(world)
    found, values = [], dict[str, Tensor]()
    for row in rows:
        top = {key: row.pop(key) for key in ("overlap", "speculative_step") if key in row}
        params = row.pop("params", {})
        zero = {**TINY, **row.pop("zero", {})}
        config = {**configuration(folder, params, zero=zero, **row), **top}
        engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
        with engine:
            train(engine, rank, steps=4 * row.get("accumulation", 1))
            values = states(engine)
        found.append(digest(values))
    return found, values


HOMES = [("gpu", "gpu"), ("cpu", "cpu"), ("nvme", "nvme"), ("gpu", "nvme")]


@pytest.mark.parametrize(*covered(dtype=["fp32", "bf16", "fp16"], clip=[0.0, 0.05], accumulation=[1, 2], world=[1, 2]))
def test_placement_stage_and_time_change_no_bit(
    rank_pools: RankPools, tmp_path: Path, dtype: str, clip: float, accumulation: int, world: int
) -> None:
    # Stages 0 and 1 add up over ranks once a step.
    common = {"dtype": dtype, "clip": clip, "accumulation": accumulation, "parallel": {"reduce": "step"}}
    rows: list[dict[str, Any]] = [{**common, "param": param, "optimizer": optimizer} for param, optimizer in HOMES]
    rows += [{**common, "stage": stage, "optimizer": "nvme" if stage == 1 else "cpu"} for stage in (0, 1, 2)]
    nvme = {**common, "param": "nvme", "optimizer": "nvme"}
    rows += [
        {**nvme, "overlap": False}, {**nvme, "speculative_step": True, "zero": {"sub_group_size": 20_000}},
        {**nvme, "zero": {"sub_group_size": 10**9, "offload_gradients": {"device": "nvme"}}},
        {**common, "param": "cpu", "optimizer": "cpu", "speculative_step": True},
    ]  # fmt: skip
    found, _ = rank_pools[world].run(hashes, str(tmp_path), rows)[0]
    assert len(set(found)) == 1, found


def test_ranks_give_one_result(rank_pools: RankPools, tmp_path: Path) -> None:
    """In fp32 that of one rank but for the order of sums; the iteration in bf16 makes more of that."""
    for dtype, bound in (("fp32", 1e-6), ("bf16", 5e-4)):
        rows = {
            world: [{"optimizer": "cpu", "params": {"ns_dtype": dtype}, "accumulation": 4 // world}]
            for world in (1, 2, 4)
        }
        single, *several = (rank_pools[world].run(same_batches, str(tmp_path), rows[world])[0] for world in rows)
        for values in several:
            assert apart(single, values) <= bound


def same_batches(rank: int, world: int, folder: str, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Twenty steps of four batches each, however many ranks share them."""
    join(world)
    (row,) = rows
    engine, *_ = infinity.initialize(model=tiny_llama(), config=configuration(folder, **row))
    with engine:
        for step in range(20):
            for micro in range(rank, 4, world):
                engine.backward(engine(**token_batch(micro, step)))
                engine.step()
        return states(engine)


def matrices_of(name: str, value: Tensor, split: dict[str, Any]) -> list[Tensor]:
    """The matrices that a packed weight is stepped as."""
    found = [value] if value.ndim == 2 else list(value)
    for part in set(name.split(".")) & split.keys():
        found = [piece for each in found for piece in each.split(split[part])]
    return [each.contiguous().clone() for each in found]


def stack(
    rank: int, world: int, folder: str, family: str, split: dict[str, Any], rows: list[dict[str, Any]]
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Masters of a mixture after three steps of each row's run; on one rank those of torch's Muon, matrix by matrix."""
    join(world)
    found = []
    for row in rows:
        model = test_experts.build(family)
        config = test_experts.configuration(folder, model, **row)
        # As the program may write it: equal parts by their number.
        halves = {name: 2 if name == "gate_up_proj" else parts for name, parts in split.items()}
        precise = {"ns_dtype": "fp32"} if world > 1 else {}
        config["optimizer"] = {"type": "Muon", "params": {"lr": RATE, "split": halves, **precise}}
        engine, optimizer, *_ = infinity.initialize(model=model, config=config)
        with engine:
            named = dict(model.named_parameters())
            hidden = {id(param) for group in optimizer.param_groups if group["use_muon"] for param in group["params"]}
            names = [name for name, param in named.items() if id(param) in hidden]
            assert any(named[name].ndim == 3 for name in names)
            own = {name: matrices_of(name, infinity.state(named[name]).master, split) for name in names}
            plain = torch.optim.Muon([nn.Parameter(each) for matrices in own.values() for each in matrices], lr=RATE)
            leaves = iter(plain.param_groups[0]["params"])
            own = {name: [next(leaves) for _ in matrices] for name, matrices in own.items()}
            for step in range(3):
                ids = test_experts.batch(step)
                engine.backward(engine(**{name: each[rank :: world] for name, each in ids.items()}).loss)
                for name, matrices in own.items() if world == 1 else ():
                    grads = matrices_of(name, infinity.state(named[name]).grad, split)
                    for each, grad in zip(matrices, grads, strict=True):
                        each.grad = grad
                engine.step()
                plain.step()
            masters = {name: infinity.state(param).master for name, param in named.items()}
            found.append({f"{name} master": master for name, master in masters.items()})
            for name, matrices in own.items() if world == 1 else ():
                for one, other in zip(matrices_of(name, masters[name], split), matrices, strict=True):
                    assert torch.equal(one, other), name
    return found


@pytest.mark.parametrize(
    ("family", "split"), [("mixtral", {"gate_up_proj": [96, 96], "o_proj": [16, 48]}), ("gpt_oss", {})]
)
def test_packed_weights_are_stepped_matrix_by_matrix(
    rank_pools: RankPools, tmp_path: Path, family: str, split: dict[str, Any]
) -> None:
    """Experts one by one, and what `split` names, cut into sub-groups or not, gathered whole or a few at a time."""
    whole = [{"tiled": False, "zero": TINY}, {"tiled": False, "param": "cpu", "optimizer": "cpu"}]
    rows: list[dict[str, Any]] = [*whole, {"tiled": True}]
    single = rank_pools[1].run(stack, str(tmp_path), family, split, rows)[0]
    assert len({digest(found) for found in single}) == 1
    for found in rank_pools[2].run(stack, str(tmp_path), family, split, rows):
        assert len({digest(each) for each in found}) == 1


def on_shards(rank: int, world: int, tensor: int, folder: str, row: dict[str, Any]) -> dict[str, Tensor]:
    """Ten steps of two batches each, however many ranks share them or a layer."""
    join(world)
    data = world // tensor
    config = configuration(folder, {"ns_dtype": "fp32"}, accumulation=2 // data, **row)
    engine, *_ = infinity.initialize(
        model=tensor_matrix.build("llama"), config={**config, "parallel": {"tensor": tensor}}
    )
    with engine:
        for step in range(10):
            for micro in range(engine._runtime.groups.data.index, 2, data):
                engine.backward(engine(**tensor_matrix.batch(step, micro)).loss)
                engine.step()
        return states(engine)


def test_shards_give_one_result(rank_pools: RankPools, tmp_path: Path) -> None:
    """On a tensor axis a matrix is put together of its shards, beside data ranks too, cut into sub-groups or not."""
    cut = {"param": "nvme", "optimizer": "nvme", "zero": TINY}
    single = rank_pools[1].run(on_shards, 1, str(tmp_path), cut)[0]
    for world in (2, 4):
        rows = (cut, {"stage": 0, "optimizer": "cpu"})
        first, second = (rank_pools[world].run(on_shards, 2, str(tmp_path), row)[0] for row in rows)
        assert digest(first) == digest(second)
        assert apart(single, first) <= 1e-6


def test_a_step_that_is_not_finite_is_skipped_unchecked_too(tmp_path: Path) -> None:
    config = {**configuration(str(tmp_path), optimizer="cpu"), "check_grad_overflow": False}
    engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
    with engine:
        before = digest(states(engine))
        engine.backward(engine(**token_batch(0, 0)) * float("inf"))
        engine.step()
        assert not engine.was_step_applied() and digest(states(engine)) == before


def missing(rank: int, world: int, folder: str) -> list[bool]:
    """Parameters without a gradient are not stepped; one that has a gradient on the other rank alone is."""
    join(world)
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(24, 24, bias=False) for name in ("both", "one", "none")})
    engine, *_ = infinity.initialize(model=model, config=configuration(folder, stage=2, optimizer="cpu"))
    before = {name: infinity.state(layer.weight).master for name, layer in model.items()}
    with engine:
        x = torch.randn(3, 24, generator=torch.Generator().manual_seed(rank))
        loss = model["both"](x).square().mean() + (model["one"](x).square().mean() if rank else 0.0)
        engine.backward(loss)
        engine.step()
        return [torch.equal(infinity.state(layer.weight).master, before[name]) for name, layer in model.items()]


def test_a_matrix_without_a_gradient_keeps_its_values(rank_pools: RankPools, tmp_path: Path) -> None:
    for world in (1, 2):
        expected = [False, world == 1, True]
        assert rank_pools[world].run(missing, str(tmp_path)) == [expected] * world


def saved(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    join(world)
    config = configuration(folder, param="nvme", optimizer="nvme", dtype="bf16")
    engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
    with engine:
        train(engine, rank, steps=3)
        engine.save_checkpoint(f"{folder}/saved")
        return states(engine)


def loaded(rank: int, world: int, folder: str, stage: int) -> tuple[dict[str, Tensor], str]:
    """What was loaded, and the digest after three more steps."""
    join(world)
    config = configuration(folder, stage=stage, optimizer="cpu", dtype="bf16", zero=TINY)
    engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
    with engine:
        engine.load_checkpoint(f"{folder}/saved")
        found = states(engine)
        train(engine, rank, steps=3, first=3)
        return found, digest(states(engine))


def test_checkpoints_load_at_other_ranks_and_stages_and_go_on(rank_pools: RankPools, tmp_path: Path) -> None:
    expected = rank_pools[2].run(saved, str(tmp_path))[0]
    again = {}
    for world, stage in ((1, 1), (2, 0), (2, 3)):
        values, again[world, stage] = rank_pools[world].run(loaded, str(tmp_path), stage)[0]
        assert digest(values) == digest(expected), (world, stage)
    assert again[2, 0] == again[2, 3]


def test_each_matrix_is_in_one_sub_group_and_has_room(tmp_path: Path) -> None:
    config = configuration(str(tmp_path), param="nvme", optimizer="nvme", dtype="bf16", zero={"sub_group_size": 5000})
    engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
    with engine:
        plan, whole = engine.plan, 0
        for group in plan.sub_groups:
            kinds = [section.kind for section in plan.partition(Key(Kind.STATES, group.index)).sections]
            assert (Kind.MOMENTUM_BUFFER in kinds) is plan.rule_of(group).matrices is (Kind.EXP_AVG not in kinds)
            for piece in group.slices if plan.rule_of(group).matrices else ():
                for slot in plan.layouts[piece.unit].slots:
                    begin, end = slot.offset, slot.offset + slot.numel
                    inside = piece.start <= begin and end <= piece.stop
                    assert inside or end <= piece.start or piece.stop <= begin
                    whole += inside
        assert whole == len(by_muon(engine.module))
        # The largest is 32 x 96; two of it and two squares of the shorter side, in bf16.
        assert plan.pools.matrix_nbytes == 2 * (2 * 32 * 96 + 2 * 32 * 32)
        train(engine, steps=2)
        assert engine.store.ledger.most[Tier.GPU] <= plan.nbytes_by_tier()[Tier.GPU]


class Named(nn.Module):
    """Weights by what decides who steps them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 16)
        self.positions = nn.Embedding(8, 16)
        self.inner = nn.Linear(16, 16)
        self.conv = nn.Conv1d(16, 16, 1)
        self.patch_embed = nn.Linear(16, 16, bias=False)
        self.marked = nn.Linear(16, 16, bias=False)
        self.marked.weight.use_muon = False  # type: ignore[assignment]
        self.head = nn.Linear(16, 8, bias=False)
        self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.out = nn.Linear(16, 24, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.out


def test_hidden_matrices_are_found_unless_the_program_names_them(tmp_path: Path) -> None:
    def stepped(**given: Any) -> set[str]:
        model = Named()
        groups = given.pop("groups", lambda model: None)(model)
        config = configuration(str(tmp_path), {"muon_lr": 0.02, "adam_lr": 3e-4})
        engine, optimizer, *_ = infinity.initialize(model=model, config=config, model_parameters=groups)
        with engine:
            names = {id(param): name for name, param in model.named_parameters()}
            rates = {group["use_muon"]: group["lr"] for group in optimizer.param_groups}
            assert rates == {True: 0.02, False: 3e-4}
            return {
                names[id(param)] for group in optimizer.param_groups if group["use_muon"] for param in group["params"]
            }

    assert stepped() == {"inner.weight"}
    both = stepped(groups=lambda model: [
        {"params": [model.out.weight], "use_muon": True}, {"params": [model.inner.weight, model.inner.bias]},
        {"params": [model.marked.weight], "use_muon": False},
    ])  # fmt: skip
    assert both == {"out.weight", "inner.weight"}


def refusals() -> Iterator[tuple[str, Callable[[str, nn.Module], Any]]]:
    def muon(**params: Any) -> Callable[[str, nn.Module], Any]:
        return lambda folder, model: infinity.initialize(model=model, config=configuration(folder, params))

    def given(make: Callable[[nn.Module], Any]) -> Callable[[str, nn.Module], Any]:
        return lambda folder, model: infinity.initialize(model=model, config=settings(folder), optimizer=make(model))

    def later(change: Callable[[Any], Any]) -> Callable[[str, nn.Module], Any]:
        def act(folder: str, model: nn.Module) -> None:
            engine, optimizer, *_ = infinity.initialize(model=model, config=configuration(folder))
            with engine:
                change(optimizer)
                train(engine, steps=1)

        return act

    yield "ns_method", muon(ns_method="gram")
    yield "per_head_muon", muon(per_head_muon=True)
    yield "ns_steps", muon(ns_steps=0)
    yield "split.down: .* is not split into 5: its matrices have 32 rows", muon(split={"down": 5})
    yield "split.qkvs: no weight of this name", muon(split={"qkvs": 2})
    yield "optimizer.params.split", muon(split={"down": 1})
    yield "neither a matrix nor a stack", lambda folder, model: infinity.initialize(
        model=model, config=configuration(folder),
        model_parameters=[{"params": [param for param in model.parameters() if param.ndim == 1], "use_muon": True}],
    )  # fmt: skip
    yield "adjust_lr_fn", muon(adjust_lr_fn="mine")
    yield "torch.optim.Muon for some parameters and one other", given(
        lambda model: [torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())]
    )
    yield "a parameter is in two", given(lambda model: [*optimizers(model)[:1], torch.optim.AdamW(model.parameters())])
    yield "has the states of the other", later(lambda made: made.param_groups[0].update(use_muon=False))
    yield 'ns_dtype was "bf16"', later(lambda made: made.param_groups[0].update(ns_dtype="fp32"))
    yield 'take None, "original"', later(lambda made: made.param_groups[0].update(adjust_lr_fn="mine"))


@pytest.mark.parametrize(("words", "act"), list(refusals()), ids=lambda given: given if isinstance(given, str) else "")
def test_what_is_not_done_is_refused_by_name(tmp_path: Path, words: str, act: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        act(str(tmp_path), tiny_llama())


def test_the_program_and_the_thread_behind_it_take_turns_with_the_memory(tmp_path: Path) -> None:
    """Small units are stepped by the program, which sees them, while the thread is still at others."""
    rule, hyper = MuonRule(), MuonHyper(1e-3, 0.0, 0.95, True, (3.4445, -4.775, 2.0315), 1e-7, 5, None)
    side, generator = 64, torch.Generator().manual_seed(0)
    groups: Any = (None, None)
    rule.place(torch.empty(8 * side**2, dtype=torch.uint8), *groups)

    def slices() -> list[StepSlice]:
        generator.manual_seed(1)
        slot = Slot("matrix", (side, side), 0, side**2, 0)
        segment = Segment(0, side**2, 0, 1, Overlap(slot, 0, 0, side**2))
        made = [torch.randn(2, side**2, generator=generator) for _ in range(200)]
        return [StepSlice(segment, hyper, param, grad, [torch.zeros(side**2)], None, None) for param, grad in made]

    expected, found = slices(), slices()
    rule.step(expected, grad_scale=1.0, grad_bound=math.inf)
    threads = [
        threading.Thread(target=rule.step, args=(found[at::2],), kwargs={"grad_scale": 1.0, "grad_bound": math.inf})
        for at in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.param, other.param)


@pytest.mark.parametrize("shape", [(7, 7), (5, 33), (33, 5), (1, 9), (0, 4)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_iteration_is_torchs(shape: tuple[int, int], steps: int) -> None:
    """Whatever the number of steps, in whose memory the result then lies, and for a matrix that is zero."""
    zeropower = torch.optim._muon._zeropower_via_newtonschulz  # type: ignore[attr-defined]
    for matrix in (torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.zeros(shape)):
        hyper = MuonHyper(1e-3, 0.0, 0.95, True, (3.4445, -4.775, 2.0315), 1e-7, steps, None)
        room = torch.full((2 * matrix.numel() + 2 * min(shape) ** 2 + 99,), float("nan"), dtype=torch.bfloat16)
        room[: matrix.numel()] = matrix.flatten()
        found = orthogonal(room, shape, hyper)
        assert torch.equal(found.view(shape), zeropower(matrix, hyper.ns_coefficients, steps, hyper.eps))


def test_momentum_in_chunks_has_the_bits_of_whole_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length: torch steps the end of a stretch in another loop."""
    expected = hashes(0, 1, str(tmp_path), [{"optimizer": "cpu"}])[0]
    monkeypatch.setattr("infinity.optim.muon._CHUNK_NUMEL", 61)
    assert hashes(0, 1, str(tmp_path), [{"optimizer": "cpu"}])[0] == expected
