"""Programs that do more than train, under a pipeline: what each computes has the bits of one rank that accumulates.

    python -m tests.pipeline_loops [--loops fp16,tiles] [--json FILE]

Each loop changes the configuration, the model or what the program calls between steps; it runs on one rank, and on two
ranks under each schedule.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

import infinity
from tests.pipeline_matrix import (
    ADAM,
    CELL_SECONDS,
    FEW,
    OVER_AXES,
    TIGHT,
    batches,
    build,
    configuration,
    digests,
    exchanged,
)
from tests.support.oracle import join
from tests.support.spawn import RankPool

COUNT, STEPS = 4, 3


def _whole(model: nn.Module) -> nn.Module:
    return model


def _frozen_front(model: nn.Module) -> nn.Module:
    """The first stage of two or four trains nothing."""
    model.model.embed_tokens.requires_grad_(False)
    for block in model.model.layers[:2]:
        block.requires_grad_(False)
    return model


def _frozen_half(model: nn.Module) -> nn.Module:
    """Frozen blocks between trained ones, and frozen norms in trained blocks."""
    model.model.layers[1].requires_grad_(False)
    for block in model.model.layers:
        block.input_layernorm.requires_grad_(False)
    return model


def _adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.normal_(std=0.02)
    return model


def _adapted_back(model: nn.Module) -> nn.Module:
    """Adapters in the last block only: no other stage trains anything."""
    torch.manual_seed(5)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[3], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


def _recomputes_itself(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _nothing(engine: Any, step: int) -> None:
    pass


def _evaluates(engine: Any, step: int) -> list[str]:
    return [float(engine.eval_batch(batches(50 + step, count=count))).hex() for count in (3, 1)]


def _changes_rate(engine: Any, step: int) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-3 / (step + 2)


def _reports(engine: Any, step: int) -> None:
    for by_unit in (False, True):
        assert "PARAM" in str(engine.memory(by_unit=by_unit)).upper()
    engine.synchronize()


def _norms(engine: Any, step: int) -> dict[str, str]:
    return {name: norm.hex() for name, norm in sorted(engine.get_grad_norms().items())}


def _moves_states(engine: Any, step: int) -> None:
    engine.offload_states(device="nvme")
    if step:
        engine.reload_states()


@dataclass(frozen=True)
class Loop:
    """A program. between: what it calls after each step, which may return what must be alike. top, zero: keys of the
    configuration. compiles: it calls `engine.compile`. timed: it records its second step. calls: how often each block
    of a trained model is called for a micro-batch, where that is held.
    """

    model: Callable[[nn.Module], nn.Module] = _whole
    between: Callable[[Any, int], Any] = _nothing
    top: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    compiles: bool = False
    timed: bool = False
    calls: int = 0


def _checkpointed(**keys: Any) -> dict[str, Any]:
    return {"activation_checkpointing": {"every": 1, **keys}}


FP16 = {"dtype": "fp16", "clip": 0.5}
LOOPS: dict[str, Loop] = {
    "plain": Loop(calls=1),
    "recomputed": Loop(top=_checkpointed(), calls=2),
    "every second recomputed": Loop(top=_checkpointed(every=2)),
    "recomputed from NVMe": Loop(top=_checkpointed(offload={"device": "nvme"}), calls=2),
    "recomputed by the model": Loop(model=_recomputes_itself, calls=2),
    "compiled": Loop(compiles=True),
    "fp16": Loop(given=FP16, top={"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "fp16 overflows": Loop(
        given=FP16, top={"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}, between=_norms
    ),
    "autocast": Loop(top={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "first stage frozen": Loop(model=_frozen_front),
    "some frozen": Loop(model=_frozen_half, given={"clip": 0.5}),
    "adapters": Loop(model=_adapted, given={"clip": 0.5}),
    "adapters at the end": Loop(model=_adapted_back),
    "adapters and recomputed": Loop(model=_adapted, top=_checkpointed()),
    "tiles": Loop(zero={"tile_parameters": 1000}),
    "persistent": Loop(zero={"stage3_param_persistence_threshold": 2000}),
    "evaluated between": Loop(between=_evaluates),
    "rate changed": Loop(between=_changes_rate),
    "scheduler": Loop(top={"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}),
    "reports": Loop(between=_reports),
    "norms by parameter": Loop(between=_norms),
    "states moved": Loop(between=_moves_states),
    "timeline": Loop(timed=True),
    "without overlap": Loop(zero={"overlap_comm": False}),
    "experts": Loop(family="mixtral"),
}  # fmt: skip


def run(name: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """What a loop computes on this rank."""
    loop = LOOPS[name]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as drive, ExitStack() as stack:
        given = {"stage": 3, "param": "cpu", "optimizer": "nvme", **loop.given}
        config = configuration(drive, parallel, count=COUNT, zero={**TIGHT, **loop.zero}, **given) | loop.top
        config["optimizer"] = {"type": "AdamW", "params": ADAM}
        model = loop.model(build(loop.family, **FEW, **loop.sizes))
        engine, *_ = infinity.initialize(model=model, config=config)
        stack.enter_context(engine)
        if loop.compiles:
            engine.compile(backend="aot_eager")
        calls = _counted(model) if loop.calls else {}
        told: list[Any] = []
        strays: list[int] = []
        for step in range(STEPS):
            with ExitStack() as inner:
                if loop.timed and step == 1:
                    inner.enter_context(engine.timeline(Path(drive) / f"{engine.global_rank}.json"))
                loss = float(engine.train_batch(batches(step, count=COUNT))).hex()
            told += [loss, engine.get_global_grad_norm().hex(), engine.skipped_steps, engine.loss_scale]
            strays.append(engine.coordinator.mismatches)
            told.append(loop.between(engine, step))
        found = sorted({*calls.values()} - {0})
        return {"told": told, "digests": digests(engine), "strays": strays,
                "calls": [each / STEPS / COUNT for each in found]}  # fmt: skip


def _counted(model: nn.Module) -> dict[str, int]:
    """By the path of a block, how often its inside has computed from now on."""
    calls: dict[str, int] = {}
    for path, module in model.named_modules():
        if path.endswith("self_attn"):

            def count(*_: Any, path: str = path) -> None:
                calls[path] = calls.get(path, 0) + 1

            module.register_forward_pre_hook(count)
    return calls


def on_one(rank: int, world: int, names: Sequence[str]) -> dict[str, Any]:
    """Each loop on one rank; the error's text where it fails."""
    return {name: run(name, {}) for name in names}


def compare_loops(
    rank: int, world: int, expected: dict[str, Any], schedules: Sequence[tuple[str, int]] = OVER_AXES
) -> list[dict[str, Any]]:
    """Each loop under each schedule."""
    join(world)
    rows: list[dict[str, Any]] = []
    for name, (schedule, virtual) in itertools.product(expected, schedules):
        began = time.monotonic()
        parallel = {"pipeline": world, "schedule": schedule, "virtual_stages": virtual}
        found = run(name, parallel)
        everyone = exchanged(found)
        if rank == 0:
            wanted = expected[name]
            apart = {
                key for each in everyone for key, digest in each["digests"].items() if digest != wanted["digests"][key]
            }
            missing = wanted["digests"].keys() - {key for each in everyone for key in each["digests"]}
            alike = all(each["told"] == wanted["told"] for each in everyone)
            calls = sorted({number for each in everyone for number in each["calls"]})
            row = {
                "loop": name, "schedule": schedule, "apart": sorted(apart)[:5], "missing": sorted(missing)[:5],
                "told alike": alike, "calls": calls, "strays": [each["strays"] for each in (wanted, *everyone)],
                "seconds": round(time.monotonic() - began, 1),
            }  # fmt: skip
            if not alike:
                row["told"], row["wanted"] = everyone[0]["told"], wanted["told"]
            row["right"] = alike and not apart and not missing and (not calls or calls == [LOOPS[name].calls])
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def all_loops(names: Sequence[str] = tuple(LOOPS), schedules: Sequence[tuple[str, int]] = OVER_AXES) -> list[Any]:
    """Each loop in processes of its own where one fails."""
    rows: list[Any] = []
    with RankPool(1) as one, RankPool(2) as two:
        for name in names:
            try:
                expected = one.run(on_one, [name], timeout=CELL_SECONDS)[0]
                rows += two.run(compare_loops, expected, schedules, timeout=CELL_SECONDS)[0]
            except AssertionError as error:
                rows.append({"loop": name, "why": str(error)[-3000:], "right": False})
                print(name, str(error)[-3000:], flush=True)
    return rows


def main() -> None:
    """Run the loops, print a line each, and write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began, rows = time.monotonic(), all_loops(given.loops.split(","))
    right = sum(row["right"] for row in rows)
    print(f"{right} of {len(rows)} right", flush=True)
    if given.json:
        facts = {
            "date": date.today().isoformat(), "command": " ".join(["python -m tests.pipeline_loops", *sys.argv[1:]]),
            "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
            "seconds": round(time.monotonic() - began), "rows": rows,
        }  # fmt: skip
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(right < len(rows))


if __name__ == "__main__":
    main()
