"""Programs that share sequences as accelerate's contract has it (`sp_size`) train as one rank does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate.data_loader
import accelerate.test_utils
import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard, skip_first_batches
from transformers import LlamaConfig, LlamaForCausalLM

from infinity import deepspeed
from infinity.errors import ConfigError
from infinity.integrations.deepspeed import clients, ulysses
from tests.clients.run import ROOT, run_client, run_together
from tests.clients.trainer_matrix import ALL, SAVES
from tests.clients.trl_cells import tokenizer
from tests.conftest import RankPools
from tests.support.oracle import join

register = ulysses.UlyssesSPAttentionHF.register_with_transformers
TWICE = {**SAVES, "max_steps": 6, "gradient_accumulation_steps": 2}
UNEVEN = {"uneven": True, "rows": 32, "acts": ALL, "arguments": TWICE}
SHARED = {**UNEVEN, "sequence": 2, "stage": 3, "offload": "nvme"}
PACKED = {"packing": True, "packing_strategy": "wrapped", "max_length": 16}


def alike(found: dict[str, Any], alone: dict[str, Any], *, resumed: bool = False) -> None:
    """All losses and norms are those of one rank; those of a run that has resumed are its last ones."""
    assert found["engine"] == "infinity.engine.engine" and alone["engine"].startswith(("torch.", "transformers."))
    for column in ("losses", "norms", "acts"):
        values = found.get(column, [])
        expected = alone.get(column, [])
        assert values == pytest.approx(expected[-3:] if resumed else expected, abs=1e-5)
    assert len(found["losses"]) >= 3


@pytest.mark.timeout(300)
def test_trainer_and_sft_trainer_share_sequences(tmp_path: Path) -> None:
    """Labels lie unevenly, two micro-batches a step, evaluated in between, saved, resumed; packed samples in TRL."""
    alone, sft_alone = run_together(1, {
        "trainer_cells": [UNEVEN], "trl_cells": [{"trainer": "sft", "arguments": PACKED}],
    })  # fmt: skip
    folder = str(tmp_path / "saved")
    (shared, resumed), sft = run_together(2, {
        "trainer_cells": [{**SHARED, "folder": folder}, {**SHARED, "folder": folder, "resume": "checkpoint-3"}],
        "trl_cells": [{"trainer": "sft", "arguments": PACKED, "stage": 2, "offload": "cpu", "sequence": 2}],
    })  # fmt: skip
    alike(shared, alone[0])
    alike(resumed, alone[0], resumed=True)
    assert resumed["losses"] == shared["losses"][-3:] and resumed["evals"] == shared["evals"][-2:]
    alike(sft[0], sft_alone[0])


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_two_groups_of_two_ranks_train_as_one_rank_on_batches_in_their_order() -> None:
    """Batches 0 and 1 are those of the first group, 2 and 3 those of the second, and both take a step together."""
    places = [first + batch for first in range(0, 16, 4) for batch in (0, 2, 1, 3)]
    order = [2 * place + row for place in places for row in range(2)]
    arguments = {**SAVES, "max_steps": 6}
    (alone,) = run_client("tests.clients.trainer_cells", 1, json.dumps([{**UNEVEN, "order": order}]))
    cell = {**SHARED, "stage": 1, "order": list(range(32)), "arguments": arguments}
    (shared,) = run_client("tests.clients.trainer_cells", 4, json.dumps([cell]))
    alike(shared, alone)


def adapter(rank: int, size: int = 2, *, count: int = 3, **more: Any) -> ulysses.UlyssesSPDataLoaderAdapter:
    """Of a loader of `count` batches [1, 4] of numbers that say whose they are: rank, batch and place."""
    ulysses.mpu.initialize_sequence_parallel(size)
    rows = [
        {"input_ids": 100 * rank + 10 * batch + torch.arange(4), "position_ids": torch.arange(4),
         "labels": 100 * rank + 10 * batch + torch.arange(4), **more}
        for batch in range(count)
    ]  # fmt: skip
    rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
    group, place = ulysses.mpu.get_sequence_parallel_group(), ulysses.mpu.get_sequence_parallel_rank()
    return ulysses.UlyssesSPDataLoaderAdapter(DataLoaderShard(rows, batch_size=1), place, group, size, "cpu")


def batches(rank: int, world: int) -> dict[str, Any]:
    join(world)
    loader = adapter(rank)
    first = next(iter(loader))
    last = [loader.end_of_dataloader for _ in loader]
    skipped = ulysses.skipping(skip_first_batches)(loader, 3)
    return {
        "length": len(loader), "ids": [part["input_ids"].tolist() for part in loader], "first": first, "last": last,
        "skipped": [part["input_ids"].tolist() for part in skipped], "left": len(skipped),
        "skipped again": [part["input_ids"].tolist() for part in skipped.without_first(1, skip_first_batches)],
    }  # fmt: skip


def test_ranks_of_a_group_take_turns_with_their_batches(rank_pools: RankPools) -> None:
    for rank, found in enumerate(rank_pools[4].run(batches)):
        # Ranks 2 and 3 are a group of their own.
        own = rank // 2 * 200 + rank % 2 * 2
        ids = [[[own + of + place for place in (0, 1)]] for batch in (0, 10, 20) for of in (batch, batch + 100)]
        assert found["ids"] == ids and found["length"] == 6
        assert found["skipped"] == ids[3:] and found["left"] == 3
        assert found["skipped again"] == ids[4:]
        # accelerate takes a step where its loader ends, which is behind the last part.
        assert found["last"] == [False] * 5 + [True]
        part = found["first"]
        assert "labels" not in part and part["position_ids"].tolist() == [[rank % 2 * 2, rank % 2 * 2 + 1]]
        assert part["shift_labels"].tolist() == [[own + 1, -100 if rank % 2 else own + 2]]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def evaluated(rank: int, world: int, built: bool) -> list[Any]:
    """Whether batches are cut in evaluation; the logits of a part there; what attention became."""
    join(world)
    ids = torch.arange(8)[None]
    part = {"input_ids": ids[:, 4 * rank : 4 * rank + 4], "position_ids": ids[:, 4 * rank : 4 * rank + 4]}
    found: list[Any] = []
    for whole in (False, True):
        if built:
            with deepspeed.zero.Init(config_dict_or_path={**CONFIG, "zero_optimization": {"stage": 3}}):
                model = llama()
        else:
            model = llama()
        mpu = register(model, "sdpa", 2, micro_batch_size=1, disable_in_eval=whole)
        config = {**CONFIG, "zero_optimization": {"stage": 3 if built else 1}}
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
        with engine:
            assert deepspeed.utils.groups._get_sequence_parallel_group() is mpu.get_sequence_parallel_group()
            assert engine.train_batch_size() == 1 and model.config._attn_implementation == "sdpa"
            engine.eval()
            with torch.no_grad():
                found.append(engine(**({"input_ids": ids} if whole else part)).logits.clone())
    return found


@pytest.mark.parametrize("built", [False, True])
def test_evaluation_is_cut_as_it_was_asked_for(rank_pools: RankPools, built: bool) -> None:
    """Also of a model that was built under `zero.Init`, which knows of no axis yet."""
    first, second = rank_pools[2].run(evaluated, built)
    assert torch.equal(first[1], second[1])
    assert float((torch.cat([first[0], second[0]], 1) - first[1]).abs().max()) <= 1e-6


def refusals(rank: int, world: int) -> list[str]:
    join(world)
    model = llama()
    found = []

    def text_of(call: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            call()
        found.append(str(caught.value))

    text_of(lambda: register(model, None, 3))
    text_of(lambda: register(model, None, 2, seq_length=7, seq_length_is_variable=False))
    register(model, None, 2)
    text_of(lambda: deepspeed.initialize(model=model, config=CONFIG))
    text_of(lambda: deepspeed.initialize(model=model, config={**CONFIG, "sequence_parallel_size": 4}, mpu=ulysses.mpu))
    # What is wrong with the batches of one rank is said on both.
    text_of(lambda: list(adapter(rank, **({} if rank else {"position_ids": None}))))
    odd = torch.arange(5)
    text_of(lambda: list(adapter(rank, **({"input_ids": odd, "position_ids": odd} if rank else {}))))
    text_of(lambda: list(adapter(rank, count=3 + rank)))
    text_of(lambda: list(adapter(rank, input_ids=None)))
    dist.barrier()
    return found


def test_what_cannot_be_shared_is_refused_by_name(rank_pools: RankPools) -> None:
    said = (
        "does not divide the 2 ranks: set sp_size to a divisor of 2", "pad batches to 8 tokens",
        "give initialize() the mpu", "leave the key out, which mpu says already",
        "the batches of the loader have no position_ids", "a batch of 5 tokens cannot be cut into 2 parts",
        "and rank 1 has one more", "the loader gives position_ids, labels",
    )  # fmt: skip
    for texts in rank_pools[2].run(refusals):
        for text, part in zip(texts, said, strict=True):
            assert part in text, text


def test_accelerates_loader_is_wrapped_once() -> None:
    clients.adapt()
    once = accelerate.data_loader.skip_first_batches
    clients.adapt()
    assert accelerate.data_loader.skip_first_batches is once


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_accelerates_own_script_runs_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model stands in an offline cache under its name."""
    folder = tmp_path / "hub" / "models--hf-internal-testing--tiny-random-LlamaForCausalLM"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder / "snapshots" / ("0" * 40))
    tokenizer().save_pretrained(folder / "snapshots" / ("0" * 40))
    launch = tmp_path / "launch.yaml"
    launch.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 2\n"
        "machine_rank: 0\nmixed_precision: 'no'\ndeepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 1}\n"
    )
    script = Path(accelerate.test_utils.__file__).parent / "scripts/external_deps/test_ds_alst_ulysses_sp.py"
    command = [
        sys.executable, "-m", "infinity", "run", "--as-deepspeed", "accelerate", "launch", "--config_file", str(launch),
        "-m", "tests.support.clients_without_cuda", str(script),
    ]  # fmt: skip
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    reply = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert reply.returncode == 0, reply.stderr[-4000:]
    losses = [line for line in reply.stdout.splitlines() if "loss=tensor" in line]
    assert "DL orig: 4 samples" in reply.stdout and len(losses) == 4
