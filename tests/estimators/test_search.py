"""A found configuration fits, is the fastest of what fits, and is what the engine would do with it."""

from __future__ import annotations

import dataclasses

import pytest

from estimators.estimate import PROCESS_NBYTES, SYSTEM_NBYTES, Machine, estimate
from estimators.report import duration, format_report, to_choose
from estimators.search import Choice, Wish, _by_budget, fitting, largest, search, usual
from estimators.traffic import Link
from infinity.errors import ConfigError
from infinity.plan.hardware import ASSUMED
from infinity.plan.types import SAVE_BLOCK_NBYTES, SAVE_BLOCKS, Tier
from tests.support.cells import kept

GB = 10**9


def wish(gpu: float, ram: float, nvme: float | None, model: object = "llama-3.2-1b", **options: object) -> Wish:
    machine = Machine(int(gpu * GB), int(ram * GB), None if nvme is None else int(nvme * GB))
    return Wish(model, machine, {"sequence": 512, **options})


def test_a_large_accelerator_takes_everything():
    found = search(wish(80, 64, 500)).estimate
    assert found.fits
    assert not found.plan.nvme_nbytes
    assert set(found.plan.placement.states) == {Tier.GPU}
    assert not found.work.checkpointing


@pytest.mark.parametrize(
    ("gpu", "ram", "nvme"), kept([(16, 64, 500), (8, 16, 500), (6, 8, 100), (4, 24, None)], [(16, 64, 500)])
)
def test_what_is_found_fits_and_no_usual_placement_that_fits_is_faster(gpu, ram, nvme):
    asked = wish(gpu, ram, nvme)
    found = search(asked)
    assert found.estimate.fits
    for tier in Tier:
        limit = asked.machine.capacity(1).of(tier)
        assert limit is None or found.estimate.peak(tier) <= limit
    for checkpointing in (False, True):
        for name, other in usual(dataclasses.replace(asked, checkpointing=checkpointing)):
            drive = nvme is not None or not other.plan.nvme_nbytes
            assert not other.fits or not drive or found.seconds <= other.outline.seconds, name


@pytest.mark.matrix
def test_less_memory_never_makes_a_run_faster():
    seconds = [search(wish(8, ram, 500)).seconds for ram in (64, 24, 12)]
    assert seconds == sorted(seconds)


def test_the_found_configuration_is_planned_as_it_was_found():
    asked = wish(8, 16, 500)
    found = search(asked)
    # The loss in tiles is the program's, not the file's.
    tiled = found.estimate.work.tiled_loss
    again = estimate(asked.model, found.config, machine=asked.machine, sequence=512, tiled_loss=tiled)
    assert again == found.estimate
    assert again.fits


@pytest.mark.matrix
def test_nothing_that_fits_is_answered_with_what_lacks_the_least():
    found = search(wish(24, 16, 500, model="llama-3.1-70b"))
    assert not found.estimate.fits
    assert found.lacking > 0
    assert Tier.CPU in found.estimate.excess


def test_ranks_on_the_cpu_share_one_memory():
    found = search(Wish("gpt2", Machine(None, 16 * GB, 100 * GB, accelerator=False), {"ranks": 2})).estimate
    assert found.fits
    assert found.peak(Tier.GPU) + found.peak(Tier.CPU) <= (found.capacity.process or 0)


@pytest.mark.matrix
def test_the_largest_model_is_the_last_that_fits():
    member, deepest = largest(wish(8, 12, 100, model="gpt2"))
    assert member is not None
    assert member.estimate.model.name in ("gpt2-large", "gpt2-xl")
    assert deepest.estimate.fits
    values = deepest.estimate.model.values or {}
    more = {**values, "n_layer": round(values["n_layer"] * 1.1) + 1}
    assert not search(wish(8, 12, 100, model=more)).estimate.fits


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine(), r"--gpu 24GB, or --no-gpu .* and the memory of each node \(--ram 64GB\)"),
        (Machine(cpu_nbytes=256 * GB, nvme_nbytes=2000 * GB), "accelerator .--gpu 24GB"),
        (Machine(gpu_nbytes=24 * GB), "each node .--ram 64GB.; without --nvme there is no drive"),
        (Machine(accelerator=False), "--ram 64GB"),
    ],
)
@pytest.mark.parametrize("search", [search, largest])
def test_memory_that_nobody_has_named_is_not_searched(machine, words, search):
    with pytest.raises(ConfigError, match=words):
        search(Wish("llama-3.1-70b", machine, {}))


DEEP = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 4000,
}  # fmt: skip


def test_inputs_of_recomputed_layers_leave_the_device_where_that_makes_the_step_shorter():
    """Beside a slow processor: what they leave holds states, which the accelerator steps."""
    slow = ASSUMED.model_copy(update={"adam_seconds": {name: 20 * s for name, s in ASSUMED.adam_seconds.items()}})
    asked = wish(16, 128, None, model=DEEP, sequence=16_384, profile=slow)
    found = search(asked)
    assert found.config["activation_checkpointing"] == {"every": 1, "offload": {"device": "cpu"}}
    near = [choice for choice in fitting(asked) if choice.estimate.offloaded is None]
    assert near
    assert found.seconds < 0.95 * min(choice.seconds for choice in near)
    usual_processor = dataclasses.replace(asked, options={"sequence": 16_384})
    assert search(usual_processor).config["activation_checkpointing"] == {"every": 1}


def test_inputs_on_a_drive_are_traffic_time_and_wear():
    config = {"bf16": {"enabled": True}, "activation_checkpointing": {"every": 1}}
    drive = {"device": "nvme", "nvme_path": "/drive"}
    away = {**config, "activation_checkpointing": {"every": 1, "offload": drive}}
    plain, found = (estimate(DEEP, each, sequence=16_384) for each in (config, away))
    assert found.offloaded is not None
    assert found.traffic.total(Link.NVME_WRITE) == found.offloaded.nbytes
    assert found.outline.nvme_written_nbytes == pytest.approx(found.offloaded.nbytes, rel=1e-3)
    assert found.outline.days_to_endurance is not None
    assert plain.outline.days_to_endurance is None
    assert found.outline.seconds > plain.outline.seconds
    assert "endurance" in format_report(found)


def test_inputs_of_recomputed_layers_leave_the_device_where_nothing_else_fits():
    model = DEEP
    drive = {"device": "nvme", "nvme_path": "nvme"}
    for ram, sequence, section in (
        (32, 4096, {"every": 1}),
        (32, 32_768, {"every": 1, "offload": {"device": "cpu"}}),
        (7, 32_768, {"every": 1, "offload": drive}),
    ):
        found = search(wish(8, ram, 400, model=model, sequence=sequence))
        assert found.estimate.fits
        assert found.config["activation_checkpointing"] == section
    kept = dataclasses.replace(wish(8, 32, 400, model=model, sequence=32_768), checkpointing=False)
    assert not search(kept).estimate.fits


def test_a_remainder_too_small_to_be_written_is_no_budget():
    """What activations leave of memory may be less than the hundredth of a GB in which limits are written."""
    held = estimate("gpt2", "{}", machine=Machine(accelerator=False)).activations
    assert held is not None
    beside = SYSTEM_NBYTES + PROCESS_NBYTES + SAVE_BLOCKS * SAVE_BLOCK_NBYTES
    asked = Wish("gpt2", Machine(None, beside + held.nbytes + 5 * 10**6, accelerator=False), {}, dtype="fp32")
    limits = [choice.config["memory"]["cpu"]["max_bytes"] for choice in _by_budget(asked)]
    assert limits
    assert "0GB" not in limits


def test_a_drive_for_activations_alone_has_a_folder_to_be_named():
    drive = {"device": "nvme", "nvme_path": "nvme"}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "activation_checkpointing": {"every": 1}}
    away = {**config, "activation_checkpointing": {"every": 1, "offload": drive}}
    told = ["\n".join(to_choose(Choice(each, estimate(DEEP, each)))) for each in (config, away)]
    assert ["--nvme-path FOLDER" in text for text in told] == [False, True]


def test_long_times_are_written_out():
    assert [duration(days * 86_400) for days in (8.18, 68_700)] == ["8.18 days", "68,700 days"]
