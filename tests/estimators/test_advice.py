"""`--fit` advises as a friend would: the most tokens a second that fit, and that the drive bears."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from estimators.cli import main
from estimators.estimate import Machine
from estimators.report import advised
from estimators.search import TOKENS_MAX, Wish, advise, days_of_training, lasts, search, tokens_a_second
from infinity.plan.hardware import ASSUMED
from infinity.plan.types import Kind
from tests.estimators.test_cli import FOUR_BLOCKS

GB = 10**9
LITTLE = ["--gpu", "2.2GB", "--ram", "3.8GB"]
DRIVE = ("--nvme", "1TB")


def wish(gpu: float, ram: float, nvme: float | None, **options: object) -> Wish:
    machine = Machine(int(gpu * GB), int(ram * GB), None if nvme is None else int(nvme * GB))
    return Wish("qwen2.5-0.5b", machine, {"sequence": 512, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--gpu", "3GB", "--ram", "8.9GB"),
            ("gradients (bf16) are", "with low-rank adapters on a frozen model", "8 bits (--optimizer AdamW8bit)"),
        ),
        (
            ("--gpu", "2GB", "--ram", "4.45GB", "--micro-batches", "2"),
            ("gradients (fp32) are", "It would fit with gradients that add up in bf16"),
        ),
        ((*DRIVE, "--lora", "8", "--sequence", "262144"), ("activations are",)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_what_would_fit(capsys, options, said, tmp_path):
    """Without a drive, the gradient of each trained parameter is in memory."""
    (tmp_path / "config.json").write_text(json.dumps(FOUR_BLOCKS))
    small = [str(tmp_path), "--gpu", "1.3GB", "--ram", "3.4GB"]
    model = small if len(options) > 4 else ["qwen2.5-0.5b", *LITTLE]
    assert main([*model, "--sequence", "512", *options]) == 1
    text = " ".join(capsys.readouterr().out.split())
    for words in said:
        assert words in text


def test_moments_in_8_bits_are_advised_only_where_no_optimizer_is_asked_for(capsys, tmp_path):
    file = tmp_path / "found.json"
    machine = ["--gpu", "3GB", "--ram", "8.9GB", "--sequence", "512"]
    assert main(["qwen2.5-0.5b", "--fit", *machine, "--save", str(file)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "With AdamW nothing fits here. With moments in 8 bits" in text and "It fits." in text
    assert json.loads(file.read_text())["optimizer"]["type"] == "AdamW8bit"
    assert main(["qwen2.5-0.5b", "--fit", *machine, "--optimizer", "AdamW"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "With AdamW nothing fits here" not in text and "8 bits (--optimizer AdamW8bit)" in text


def test_a_search_takes_another_optimizer(tmp_path):
    held = {}
    for kind, kept in (("AdamW", 8), ("AdamW8bit", 2.03125), ("Lion", 4)):
        found = search(dataclasses.replace(wish(24, 64, None), optimizer=kind))
        assert found.config["optimizer"]["type"] == kind and found.estimate.fits
        states = [each for each in found.estimate.plan.partitions if each.key.kind is Kind.STATES]
        held[kind] = sum(section.nbytes for each in states for section in each.sections) / found.estimate.plan.numel
        assert held[kind] == pytest.approx(kept + 2, abs=0.01), held
    with pytest.raises(SystemExit):
        main(["qwen2.5-0.5b", "--fit", "--optimizer", "Adam"])
    (tmp_path / "plain.json").write_text("{}")
    assert main(["qwen2.5-0.5b", "--config", str(tmp_path / "plain.json"), "--optimizer", "Lion"]) == 2


def test_gradients_that_memory_has_no_room_for_go_to_the_drive(capsys):
    assert main(["qwen2.5-0.5b", *LITTLE, *DRIVE, "--sequence", "512"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"gradients \(bf16\) in CPU memory \(\d+ %\) and on NVMe \(\d+ %\)", text), text


def test_a_table_says_what_spares_activations(capsys):
    assert main(["qwen2.5-0.5b", "--sequence", "32768"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Most of it is activations." in text
    assert "loss and MLPs in tiles (infinity.tile_sequence(model))" in text
    assert main(["qwen2.5-0.5b", "--sequence", "128"]) == 0
    assert "Most of it" not in capsys.readouterr().out


def test_batches_grow_as_far_as_they_fit():
    asked = wish(24, 64, None)
    advice, plain = advise(asked), search(asked)
    best = advice.best.estimate
    assert best.fits
    assert best.work.batch > 1
    assert best.accumulation > 1
    assert best.work.tokens * best.accumulation <= TOKENS_MAX
    assert tokens_a_second(advice.best) > 2 * tokens_a_second(plain)


def test_a_batch_that_is_asked_for_is_kept():
    assert {choice.estimate.work.batch for choice in advise(wish(24, 64, None, batch=2)).choices} == {2}


def test_the_choices_fit_differ_and_are_the_fastest_first():
    choices = advise(wish(6, 8, None)).choices
    assert 1 < len(choices) <= 3
    assert all(choice.estimate.fits for choice in choices)
    speeds = [tokens_a_second(choice) for choice in choices]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.matrix
def test_a_drive_that_wears_out_is_not_used_where_anything_else_fits():
    """States on NVMe are written at every step; in memory they are slower here, and last."""
    advice = advise(wish(3, 16, 500))
    assert advice.lasting
    assert all(lasts(choice) for choice in advice.choices)


@pytest.mark.matrix
def test_what_cannot_last_is_said():
    drives = tuple(drive.model_copy(update={"endurance_nbytes": 5 * 10**12}) for drive in ASSUMED.drives)
    weak = ASSUMED.model_copy(update={"drives": drives})
    asked = wish(4, 5, 100)
    asked = dataclasses.replace(asked, options={**asked.options, "profile": weak})
    advice = advise(asked)
    days = [days_of_training(choice) or 0 for choice in advice.choices]
    assert not advice.lasting
    assert max(days) < 365
    assert days[0] == max(days)
    assert "None lets the drive last 365 days of 8 hours" in advised(advice)


def test_fit_shows_the_three_best_and_saves_the_first(tmp_path, capsys):
    file = tmp_path / "found.json"
    machine = ["--gpu", "6GB", "--ram", "8GB", "--sequence", "512"]
    assert main(["qwen2.5-0.5b", "--fit", *machine, "--save", str(file)]) == 0
    text = capsys.readouterr().out
    table = text.split("\n\n")[1].splitlines()
    assert table[0].split()[:3] == ["parameters,", "optimizer", "tokens/s"]
    assert 2 < len(table) <= 4
    saved = json.loads(file.read_text())
    batch = f"{saved['train_micro_batch_size_per_gpu']} x {saved.get('gradient_accumulation_steps', 1)}"
    assert batch in table[1]
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.matrix
@pytest.mark.parametrize("options", [["--gpu", "1GB", "--ram", "4GB"]])
def test_advice_where_nothing_fits_says_what_it_takes(options, capsys):
    assert main(["llama-3.1-8b", "--fit", *options]) == 1
    assert "It takes accelerators of" in capsys.readouterr().out


def test_activations_on_another_tier_are_shown_where_they_are_worth_it_only():
    """Here they would be a hundredth slower than the same placement without."""
    asked = Wish("qwen2.5-0.5b", Machine(8 * GB, 16 * GB, None), {"sequence": 4096})
    choices = advise(asked).choices
    assert any(choice.estimate.work.checkpointing for choice in choices)
    assert all(choice.estimate.offloaded is None for choice in choices)
