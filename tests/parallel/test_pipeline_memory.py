"""A pipeline holds what its plan says: micro-batches in flight, what autograd saves, boundaries, deferred work."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import infinity
from estimators.estimate import Machine, estimate
from infinity.plan.activations import StageActivations
from infinity.plan.pipeline import activations_in_flight, held_behind
from infinity.plan.types import Kind
from tests.conftest import RankPools
from tests.pipeline_matrix import SCHEDULES
from tests.support.cells import kept
from tests.support.oracle import join

SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
COUNT, BATCH, SEQUENCE = 8, 2, 96
WITHIN = 0.05
HEADERS_NBYTES = 4 * 2048


class Saved:
    """Counts the bytes of memory that autograd keeps between forward and backward, parameters left out."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._held: dict[int, tuple[int, int]] = {}
        self.nbytes = self.most = 0
        self._params: set[int] = set()

    def hooks(self) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            self._params = {param.untyped_storage().data_ptr() for param in self._module.parameters()}
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
            address, nbytes = storage.data_ptr(), storage.nbytes()
        if address in self._params or tensor.dtype is torch.int64 or not nbytes:
            return kept
        users, _ = self._held.get(address, (0, nbytes))
        self._held[address] = users + 1, nbytes
        self.nbytes += 0 if users else nbytes
        self.most = max(self.most, self.nbytes)
        weakref.finalize(kept, self._gone, address)
        return kept

    def _gone(self, address: int) -> None:
        users, nbytes = self._held.pop(address)
        if users > 1:
            self._held[address] = users - 1, nbytes
        else:
            self.nbytes -= nbytes


class _Kept:
    """A tensor that autograd has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def configuration(parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": COUNT, "parallel": parallel,
        "zero_optimization": {"stage": 0}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **more,
    }  # fmt: skip


def run(parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Train two steps; returns what the second has held."""
    torch.set_num_threads(1)
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    engine, *_ = infinity.initialize(model=model, config=configuration(parallel, **more))
    ids = torch.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % 160
    batches = [{"input_ids": ids, "labels": ids}] * COUNT
    with engine:
        engine.train_batch(batches)
        saved = Saved(engine.module)
        with saved.hooks():
            engine.train_batch(batches)
        report = engine.memory()
        place = engine.plan.pipeline.place
        assert report.now["gpu"].get(Kind.ACTIVATION.value, 0) == 0
        assert report.pipeline.in_flight == report.pipeline.boundary == report.pipeline.deferred == 0
        return {
            "index": place.index, "in flight": report.pipeline.in_flight_most, "saved": saved.most,
            "planned in flight": activations_in_flight(place.tables)[place.index],
            "reported": str(report), "boundary": report.pipeline.boundary_most,
            "deferred": report.pipeline.deferred_most,
            "ledger": report.peak["gpu"].get(Kind.ACTIVATION.value, 0), "values": json.loads(config.to_json_string()),
        }  # fmt: skip


def run_all(
    rank: int, world: int, settings: list[tuple[str, int, dict[str, Any]]]
) -> list[dict[str, Any]]:
    join(world)
    return [
        run({"pipeline": world, "schedule": schedule, "virtual_stages": virtual}, **more)
        for schedule, virtual, more in settings
    ]


def planned(world: int, values: dict[str, Any], schedule: str, virtual: int, index: int, **more: Any) -> Any:
    parallel = {"pipeline": world, "schedule": schedule, "virtual_stages": virtual}
    found = estimate(
        values, configuration(parallel, **more), ranks=world, sequence=SEQUENCE, machine=Machine(accelerator=False)
    )
    return found.stages[index]


def peak(held: StageActivations, saved: tuple[int, ...], deferred: tuple[int, ...]) -> float:
    return max(held_behind([moment.action for moment in held.moments], saved, deferred))


def boundaries(held: StageActivations, given: dict[str, Any]) -> tuple[int, ...]:
    """Bytes by stage of the tensors that come into it and go out."""
    nbytes, last = BATCH * SEQUENCE * SIZES["hidden_size"] * (2 if given else 4), len(held.saved) - 1
    own = {moment.action.stage for moment in held.moments}
    return tuple(nbytes * ((stage > 0) + (stage < last)) if stage in own else 0 for stage in range(last + 1))


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("world", "schedules", "more"),
    kept(
        [(2, SCHEDULES, {}), (2, SCHEDULES, {"bf16": {"enabled": True}}), (4, SCHEDULES, {}), (2, SCHEDULES[::2], {})],
        [(2, SCHEDULES[::2], {})],
    ),
)
def test_the_step_holds_what_the_plan_says(
    world: int, schedules: tuple[tuple[str, int], ...], more: dict[str, Any], rank_pools: RankPools
) -> None:
    """Micro-batches in flight exactly; what autograd saves, and what waits for weight gradients, within 5 %."""
    settings = [(*schedule, more) for schedule in schedules]
    for found in rank_pools[world].run(run_all, settings, timeout=480):
        for (schedule, virtual, more), own in zip(settings, found, strict=True):
            assert f"{own['in flight']} at most" in own["reported"]
            where = f"{schedule} {virtual} {more} at {own['index']} of {world}"
            estimated = planned(world, own["values"], schedule, virtual, own["index"], **more)
            held = estimated.held
            nothing = (0,) * len(held.saved)
            assert own["in flight"] == own["planned in flight"] == held.in_flight, where
            assert own["saved"] == pytest.approx(peak(held, held.saved, nothing), rel=WITHIN), where
            # The gradient of the table of words, which the first part leaves, waits with them; the plan has it among
            # whole gradients.
            table = SIZES["vocab_size"] * SIZES["hidden_size"] * (2 if more else 4) if own["index"] == 0 else 0
            deferred = peak(held, nothing, held.deferred)
            assert own["deferred"] == pytest.approx(deferred + (table if deferred else 0), rel=WITHIN), where
            # How many buffers of messages are in use at a time depends on the ranks' speeds. What comes in counts as a
            # boundary here, whether or not autograd saves it, too; and the losses.
            kept, most = peak(held, held.kept, nothing), peak(held, boundaries(held, more), nothing)
            assert kept <= own["boundary"] <= most + held.buffers + 8 * COUNT, where
            # In the first step the shapes of messages come to that.
            booked = most + held.buffers + 8 * COUNT + HEADERS_NBYTES + own["deferred"]
            assert max(own["boundary"], own["deferred"]) <= own["ledger"] <= booked, where
