"""`infinity bench`: a profile of this machine, within its time, and nothing left behind whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity.command import drive_rates, rates
from infinity.command.bench import show
from infinity.command.drive_rates import measure_drive
from infinity.command.folder import look
from infinity.errors import ConfigError
from infinity.plan.hardware import ASSUMED, HardwareProfile, load_profile, save_profile

ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "infinity", "bench", "--drive", str(folder), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=folder.parent, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow
def test_a_profile_is_written_and_shown_and_the_drive_is_left_empty(tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    began = time.monotonic()
    process = start(drive, "--seconds", "6", "--output", "made.json", "--tbw", "600")
    shown, progress = process.communicate(timeout=100)
    assert process.returncode == 0, progress
    # What was asked for and the start of torch, on a machine that does something else as well.
    assert time.monotonic() - began < 60
    assert not list(drive.iterdir())
    profile = load_profile(tmp_path / "made.json")
    (measured,) = profile.drives
    assert min(measured.read_rate, measured.write_rate, measured.mixed_rate, profile.copy_rate) > 1e6
    assert measured.endurance_nbytes == 600 * 10**12
    assert set(profile.adam_seconds) == {"fp32", "bf16", "fp16"}
    assert profile.compute["fp32"].rate > 1e8
    assert str(drive) in shown
    assert "blocks of" in progress


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_measurement_leaves_nothing(tmp_path, number):
    drive = tmp_path / "drive"
    drive.mkdir()
    script = (
        "import signal, sys\nfrom infinity.command import bench\n"
        "from infinity.command.drive_rates import measure_drive\n"
        "signal.signal(signal.SIGTERM, bench._terminated)\n"
        "measure_drive(sys.argv[1], seconds=60, tell=lambda text: print(text, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(drive)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    assert "writing" in process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    process.stdout.close()
    assert not list(drive.iterdir())


def test_a_drive_is_never_filled(tmp_path, monkeypatch):
    sizes = []
    real = drive_rates._nameless

    def nameless(folder, nbytes):
        sizes.append(nbytes)
        return real(folder, nbytes)

    place = look(tmp_path)
    free = 300 << 20
    small = type(place)(**{name: getattr(place, name) for name in place.__slots__} | {"free_nbytes": free})
    monkeypatch.setattr(drive_rates, "_nameless", nameless)
    monkeypatch.setattr(drive_rates, "look", lambda path: small)
    measured = measure_drive(tmp_path, seconds=0.5, settings=((1 << 20, 8),))
    assert sizes and max(sizes) <= free // 4
    assert (measured.block_nbytes, measured.queue_depth) == (1 << 20, 8)
    assert not list(tmp_path.iterdir())


def test_a_drive_without_room_is_refused_with_the_numbers(tmp_path, monkeypatch):
    place = look(tmp_path)
    tiny = type(place)(**{name: getattr(place, name) for name in place.__slots__} | {"free_nbytes": 1 << 20})
    monkeypatch.setattr(drive_rates, "look", lambda path: tiny)
    with pytest.raises(ConfigError, match="1 MB are free"):
        measure_drive(tmp_path / "made", seconds=0.5)
    # The folder that was made for it is gone again.
    assert not (tmp_path / "made").exists()


def test_a_rate_and_a_fixed_part_are_found_from_two_measurements():
    numel, fixed, rate = 1000, 2e-6, 1e9
    taken = {tokens: fixed * numel + 6 * numel * tokens / rate for tokens in (100, 400)}
    found = rates.fit(numel, {tokens: 6 * numel * tokens for tokens in taken}, taken)
    assert found.rate == pytest.approx(rate)
    assert found.parameter_seconds == pytest.approx(fixed)


def test_a_measurement_that_makes_no_sense_gives_one_rate():
    found = rates.fit(1000, {100: 1e6, 400: 4e6}, {100: 0.5, 400: 0.4})
    assert found.rate == pytest.approx(4e6 / 0.4)
    assert found.parameter_seconds == 0


def test_what_takes_long_is_not_repeated():
    calls = []
    assert rates.repeat(lambda: calls.append(time.sleep(0.05)), 0.01) >= 0.05
    assert len(calls) == 1
    rates.repeat(lambda: calls.append(None), 0.01)
    assert len(calls) > 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seconds", "1"], "at least 5"),
        (["--tbw", "1", "--tbw", "2"], "2 times for 1 drives"),
        (["--output", "nowhere/profile.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(tmp_path, words, sentence):
    process = start(tmp_path, *words)
    shown, said = process.communicate(timeout=60)
    assert (process.returncode, shown) == (2, "")
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_a_profile_survives_its_file(tmp_path):
    path = tmp_path / "profile.json"
    save_profile(ASSUMED, path)
    assert load_profile(path) == ASSUMED
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    assert "assumed, not measured: every rate" in show(ASSUMED)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read"),
        ("{", "not a hardware profile"),
        ('{"cores": 1}', "memory_nbytes: Field required"),
        (json.dumps({**HardwareProfile.model_validate(ASSUMED).model_dump(), "corse": 1}), "corse"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_remedy(tmp_path, text, sentence):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_profile(path)
    assert "infinity bench" in str(caught.value)
