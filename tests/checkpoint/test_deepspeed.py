"""Checkpoints that DeepSpeed 0.19.8 wrote load into any engine with the values that DeepSpeed itself had.

`tests/data/make_deepspeed_checkpoints.py` made them, and wrote down masters, moments, counters and the next losses.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from infinity.deepspeed.utils import zero_to_fp32 as shim
from safetensors.torch import load_file

import infinity
from infinity.cli.main import main as infinity_main
from infinity.errors import CheckpointError
from infinity.integrations.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
)
from tests.support.deepspeed_model import SAVED_STEPS, STEPS, Tied, batch, config, groups

SAVED = Path(__file__).parents[1] / "data" / "deepspeed_checkpoints"
CELLS = sorted(path.name for path in SAVED.iterdir())
CLIENT = {"epoch": 3, "best": 0.25, "note": "after four steps", "seen": [1, (2, 3)]}
TAG = f"global_step{SAVED_STEPS}"


def engine_of(world: int, stage: int, dtype: str, tier: str, folder: str) -> Any:
    """An engine whose weights are others than the checkpoint's."""
    section = config(stage, dtype, world)
    section["log_level"] = "error"
    home = {"device": tier, "nvme_path": folder} if tier == "nvme" else {"device": tier}
    section["zero_optimization"]["offload_optimizer"] = home
    if stage == 3:
        section["zero_optimization"]["offload_param"] = home
    model = Tied()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    engine, *_ = infinity.initialize(model=model, model_parameters=groups(model), config=section)
    return engine


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    """All values in full, under the names of `expected.safetensors`. Collective."""
    found = {}
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        for kind in ("master", "exp_avg", "exp_avg_sq") if param.requires_grad else ("master",):
            found[f"{name}.{kind if param.requires_grad else 'frozen'}"] = getattr(state, kind).clone()
    return {**found, **{f"{name}.buffer": buffer.clone() for name, buffer in engine.module.named_buffers()}}


def load(rank: int, world: int, cell: str, stage: int, dtype: str, tier: str, folder: str, options: Any) -> Any:
    """Load, look at everything, train on; what `test_...` compares."""
    with engine_of(world, stage, dtype, tier, folder) as engine:
        path, client = engine.load_checkpoint(str(SAVED / cell), **options)
        found = {
            "path": path, "client": client, "values": values_of(engine), "lr": engine.get_lr(),
            "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps],
            "loss_scale": float(engine.loss_scale), "last": engine.lr_scheduler.state_dict(),
            "weight_decay": [group["weight_decay"] for group in engine.optimizer.param_groups], "losses": [],
        }  # fmt: skip
        for step in range(SAVED_STEPS, STEPS):
            loss = engine(batch(rank, world, step))
            engine.backward(loss)
            engine.step()
            found["losses"].append(float(loss.detach()))
        found["steps"] = engine.global_steps
        return found


def expected(cell: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((SAVED / cell / "expected.json").read_text()), load_file(SAVED / cell / "expected.safetensors")


@pytest.mark.parametrize(
    ("cell", "world", "stage", "tier"),
    [
        ("zero1-bf16", 2, 1, "cpu"), ("zero1-bf16", 1, 3, "cpu"), ("zero2-bf16", 2, 2, "nvme"),
        ("zero2-bf16-universal", 2, 3, "nvme"), ("zero3-bf16", 3, 3, "nvme"), ("zero3-bf16-universal", 1, 2, "cpu"),
        ("zero3-bf16-one", 2, 3, "cpu"), ("zero3-fp32", 2, 3, "cpu"), ("zero2-fp32", 3, 2, "cpu"),
        ("zero2-fp16", 2, 3, "cpu"),
    ],
)  # fmt: skip
def test_a_run_of_deepspeeds_goes_on_to_the_bit(
    cell: str, world: int, stage: int, tier: str, tmp_path: Path, rank_pools: Any
) -> None:
    said, values = expected(cell)
    dtype = cell.split("-")[1]
    results = rank_pools[world].run(load, cell, stage, dtype, tier, str(tmp_path), {})
    for found in results:
        assert found["path"] == str(SAVED / cell / TAG)
        assert torch.equal(found["client"].pop("mask"), torch.arange(5)) and found["client"] == CLIENT
        assert found["counters"] == [said[key] for key in ("global_steps", "global_samples", "skipped_steps")] + [4]
        assert found["lr"] == said["lr"] and found["last"] == {"last_batch_iteration": said["last_batch_iteration"]}
        assert found["loss_scale"] == (said["loss_scale"] if dtype == "fp16" else 1.0)
        assert found["weight_decay"] == said["weight_decay"] and found["steps"] == STEPS
        assert found["values"].keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(found["values"][name].to(value.dtype), value), name
    losses = [sum(each) / world for each in zip(*(found["losses"] for found in results), strict=True)]
    # In fp16 ours overflows earlier: it adds the ranks' gradients before it divides by their number.
    compared = 1 if dtype == "fp16" else STEPS - SAVED_STEPS
    assert losses[:compared] == pytest.approx(said["losses"][:compared], rel=1e-4 if world == 2 else 1e-3)
    assert losses[0] == pytest.approx(said["losses"][0], rel=1e-4)


def load_partly(rank: int, world: int, folder: str) -> Any:
    """The three options that leave something out, each with an engine that has made a step of its own."""
    found = []
    every = ({"load_module_only": True}, {"load_optimizer_states": False}, {"load_lr_scheduler_states": False})
    for options in every:
        with engine_of(world, 3, "bf16", "cpu", folder) as engine:
            engine.backward(engine(batch(rank, world, 0)))
            engine.step()
            before, lr = values_of(engine), engine.get_lr()
            _, client = engine.load_checkpoint(str(SAVED / "zero2-bf16"), tag=TAG, **options)
            found.append((before, lr, values_of(engine), engine.get_lr(), engine.global_steps, client["epoch"],
                          engine.lr_scheduler.state_dict()["last_batch_iteration"]))  # fmt: skip
    return found


def test_options_leave_out_what_they_say(tmp_path: Path, rank_pools: Any) -> None:
    said, values = expected("zero2-bf16")
    ((module, weights, schedule),) = [rank_pools[1].run(load_partly, str(tmp_path))[0]]
    for before, _, after, *_ in (module, weights, schedule):
        moments = [name for name in values if "exp_avg" in name]
        taken = after if before is schedule[0] else before
        for name, value in values.items():
            wanted = taken[name] if name in moments and before is not schedule[0] else value
            assert torch.equal(after[name].to(value.dtype), wanted.to(value.dtype)), name
    before, lr, _, lr_after, steps, epoch, last = module
    assert (lr_after, steps, last, epoch) == (lr, 1, 0, 3)
    *_, steps, epoch, last = weights
    assert (steps, last) == (said["global_steps"], said["last_batch_iteration"])
    *_, steps, epoch, last = schedule
    assert (steps, last) == (said["global_steps"], 0)


def refuse_and_go_on(rank: int, world: int, folder: str, damaged: str, weights: str) -> Any:
    """A refused load leaves the engine as it was; `resume` takes a checkpoint of DeepSpeed's."""
    with engine_of(world, 2, "bf16", "cpu", folder) as engine:
        before = values_of(engine)
        with pytest.raises(CheckpointError, match="2 ranks saved it, and 1 files") as refused:
            engine.load_checkpoint(damaged)
        after = values_of(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        engine.backward(engine(batch(rank, world, 0)))
        engine.step()
        with pytest.raises(CheckpointError, match=r"no optimizer .* load_optimizer_states=False"):
            engine.load_checkpoint(weights)
        engine.load_checkpoint(weights, load_optimizer_states=False)
        master = expected("zero2-bf16")[1]["words.weight.master"]
        assert torch.equal(values_of(engine)["words.weight.master"], master.bfloat16().float())
        path, client = engine.resume(str(SAVED / "zero1-bf16"))
        assert engine.save_checkpoint(folder).startswith("global_step")
        return str(refused.value), Path(path).name, client["epoch"], engine.global_steps


def test_a_refused_load_changes_nothing_and_resume_takes_one(tmp_path: Path, rank_pools: Any) -> None:
    damaged = shutil.copytree(SAVED / "zero2-bf16", tmp_path / "damaged")
    next((damaged / TAG).glob("*rank_1_*")).unlink()
    weights = shutil.copytree(damaged, tmp_path / "weights", ignore=shutil.ignore_patterns("*optim*"))
    results = rank_pools[2].run(refuse_and_go_on, str(tmp_path / "out"), str(damaged), str(weights))
    for said, name, epoch, steps in results:
        assert "1" in said and (name, epoch, steps) == (TAG, 3, SAVED_STEPS)


@pytest.mark.parametrize("cell", ["zero2-bf16", "zero3-bf16-universal"])
def test_the_commands_read_one(cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, values = expected(cell)
    saved, folder = str(SAVED / cell), str(SAVED / cell / TAG)
    assert infinity_main(["ckpt", "inspect", saved]) == 0
    shown = capsys.readouterr().out
    assert "DeepSpeed 0.19.8" in shown and "139 parameters trained, 48 frozen" in shown and "AdamW" in shown
    assert infinity_main(["ckpt", "inspect", folder, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["counters"]["global_steps"] == SAVED_STEPS and facts["tied"] == {"head.weight": "words.weight"}
    assert infinity_main(["ckpt", "verify", folder]) == 0
    assert "complete, and every checksum matches; 8 tensors" in capsys.readouterr().out
    assert infinity_main(["ckpt", "diff", saved, saved]) == 2
    assert "DeepSpeed" in capsys.readouterr().err
    assert infinity_main(["export", saved, str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in values.items():
        tensor, _, kind = name.rpartition(".")
        if kind in ("master", "frozen", "buffer"):
            assert torch.equal(exported[tensor].to(value.dtype), value), name
    model = Tied()
    assert load_state_dict_from_zero_checkpoint(model, saved) is model
    assert torch.equal(model.head.weight, values["words.weight.master"]) and int(model.seen) == SAVED_STEPS


def test_the_files_of_one_are_found_in_the_order_of_ranks(tmp_path: Path) -> None:
    """As Lightning asks for them."""
    for rank in (10, 2, 0, 1):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    found = [Path(file).name.split("_")[3] for file in get_optim_files(tmp_path)]
    assert found == ["0", "1", "2", "10"]
    assert get_model_state_file(tmp_path, 2) == str(tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"no file zero_pp_rank_0_mp_rank_00_model_states.pt"):
        get_model_state_file(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"no files .*infinity ckpt inspect"):
        get_optim_files(tmp_path / "elsewhere")


def save_ours(rank: int, world: int, folder: str) -> Any:
    with engine_of(world, 3, "bf16", "cpu", folder) as engine:
        engine.backward(engine(batch(rank, world, 0)))
        engine.step()
        assert engine.save_checkpoint(folder) == "global_step1"
        return values_of(engine)


def test_our_folders_have_the_script(tmp_path: Path, rank_pools: Any) -> None:
    out, target = tmp_path / "out", tmp_path / "target"
    values, _ = rank_pools[2].run(save_ours, str(out))
    script = [sys.executable, "zero_to_fp32.py"]
    done = subprocess.run([*script, ".", str(target), "-t", "global_step1"], cwd=out, check=False)
    assert done.returncode == 0
    found = torch.load(target / "pytorch_model.bin", weights_only=True)
    assert torch.equal(found["head.weight"], values["words.weight.master"]) and found["seen"].dtype is torch.int64
    assert all(torch.equal(found[name[:-7]], value) for name, value in values.items() if name.endswith(".master"))
    failed = subprocess.run([*script, ".", "o", "-t", "other"], cwd=out, capture_output=True, text=True, check=False)
    assert failed.returncode == 2 and "no complete checkpoint 'other'" in failed.stderr

    assert shim.get_fp32_state_dict_from_zero_checkpoint is get_fp32_state_dict_from_zero_checkpoint
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(out), lazy_mode=True)
    assert torch.equal(lazy["inner.weight"].contiguous(), values["inner.weight.master"])
    trained = get_fp32_state_dict_from_zero_checkpoint(str(out), exclude_frozen_parameters=True)
    assert "fixed.weight" not in trained and "seen" in trained
    convert_zero_checkpoint_to_state_dict(out, target, "bf16", max_shard_size=200)
    index = json.loads((target / "pytorch_model.bin.index.json").read_text())["weight_map"]
    shard = torch.load(target / index["head.weight"], weights_only=True)
    assert index.keys() == found.keys() and torch.equal(shard["words.weight"], values["words.weight.master"].bfloat16())
    convert_zero_checkpoint_to_fp32_state_dict(out, tmp_path / "safe", safe_serialization=True)
    assert torch.equal(load_file(tmp_path / "safe" / "model.safetensors")["norm.bias"], values["norm.bias.master"])
