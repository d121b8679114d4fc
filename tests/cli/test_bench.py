"""`infinity bench`: a profile of this machine, within its time, and nothing left behind whatever ends it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity.cli import bench
from infinity.cli import bench as drive_rates
from infinity.cli import bench as rates
from infinity.cli.bench import measure_drive, show
from infinity.cli.main import main
from infinity.errors import ConfigError
from infinity.memory.folder import look
from infinity.memory.tiers.device import Device
from infinity.plan.hardware import ASSUMED, ASSUMED_CPU, Compute, HardwareProfile, load_profile, save_profile
from tests.support.cells import kept

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_profile_is_written_and_shown_and_the_drive_is_left_empty(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # A third of the work, which in bf16 takes seconds a pass; and the threads of this process stay as they are.
    block = bench.TransformerBlock
    monkeypatch.setattr(bench, "TransformerBlock", lambda hidden, _, heads: block(hidden, 32, heads))
    monkeypatch.setattr(bench, "set_threads", lambda *_: None)
    drive = tmp_path / "drive"
    drive.mkdir()
    began = time.monotonic()
    code = main(["bench", "--drive", str(drive), "--seconds", "5", "--output", "made.json", "--tbw", "600"])
    shown, progress = capsys.readouterr()
    assert code == 0, progress
    # What was asked for, on a machine that does something else as well.
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


@pytest.mark.parametrize("number", kept([signal.SIGTERM, signal.SIGINT, signal.SIGKILL], [signal.SIGTERM]))
def test_an_interrupted_measurement_leaves_nothing(tmp_path, number):
    drive = tmp_path / "drive"
    drive.mkdir()
    script = (
        "import signal, sys\nfrom infinity.cli import bench\n"
        "from infinity.cli.bench import measure_drive\n"
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
        measure_drive(tmp_path, seconds=0.5)
    assert not list(tmp_path.iterdir())


class Clock:
    """Time that passes only where something slow is done: a machine that is as slow as a test wants it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rates, "time", clock)
    monkeypatch.setattr(drive_rates, "time", clock)
    return clock


@pytest.mark.parametrize(("each", "seconds"), [(1.0, 2.5), (0.4, 1.0), (0.9, 1.0)])
def test_a_measurement_ends_in_its_time(clock, each, seconds):
    assert rates.repeat(lambda: clock.spend(each), seconds) == pytest.approx(each)
    assert clock.now <= seconds


def test_computation_on_a_slow_machine_keeps_to_its_time(clock, monkeypatch):
    real = rates.TransformerBlock.forward

    def slow(self, *tensors):
        clock.spend(1.0)
        return real(self, *tensors)

    monkeypatch.setattr(rates.TransformerBlock, "forward", slow)
    assert rates.compute("fp32", Device.detect(0), 2.0).rate > 0
    assert clock.now <= 2.0


def test_a_slow_drive_keeps_to_its_time_with_fewer_settings(clock, monkeypatch, tmp_path):
    tried = []

    def slow(file, nbytes, buffer, setting, seconds):
        tried.append(setting)
        clock.spend(1.0)
        return 1e8, 1e8, 1e8

    monkeypatch.setattr(drive_rates, "_rates", slow)
    monkeypatch.setattr(drive_rates, "FILE_NBYTES", 64 << 20)
    measured = measure_drive(tmp_path, seconds=4.0)
    assert clock.now <= 4.0
    # The best is measured once more.
    assert tried[-1] == tried[0] == (measured.block_nbytes, measured.queue_depth)


@pytest.mark.parametrize("text", ["", "weights", '{"train_batch_size": 8}', None])
def test_what_is_no_profile_is_never_overwritten(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *_, **__: ASSUMED)
    output = tmp_path / "model.json"
    if text is None:
        output.symlink_to("nowhere")
    else:
        output.write_text(text)
    assert main(["bench", "--output", str(output)]) == 2
    assert "is no profile and is not overwritten; name another file" in capsys.readouterr().err
    assert output.is_symlink() if text is None else output.read_text() == text


def test_an_older_profile_gives_way_to_the_new_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *_, **__: ASSUMED)
    output = tmp_path / "profile.json"
    save_profile(ASSUMED.model_copy(update={"host": "older"}), output)
    assert main(["bench", "--output", str(output)]) == 0
    assert load_profile(output) == ASSUMED


@pytest.mark.parametrize(
    ("name", "sentence"), [("drive", "there is no such folder; name one"), ("file", "is no folder; name one")]
)
def test_no_folder_is_made_to_be_measured(tmp_path, name, sentence, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *_, **__: ASSUMED)
    (tmp_path / "file").write_text("")
    assert main(["bench", "--drive", str(tmp_path / name), "--output", str(tmp_path / "profile.json")]) == 2
    assert sentence in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ConfigError, match=sentence.split(";")[0]):
        measure_drive(tmp_path / name, seconds=0.5)
    assert not (tmp_path / "drive").exists()


def test_a_person_can_read_a_profile():
    profile = ASSUMED_CPU.model_copy(update={"assumptions": ("network_rate",), "compute": {
        "fp32": Compute(rate=152e9, parameter_seconds=0.25e-9), "bf16": Compute(rate=1288e9)}})  # fmt: skip
    lines = show(profile).splitlines()
    rows = [[cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in lines]
    assert ["transformer block", "152 GFLOP/s", "1,288 GFLOP/s", "-"] in rows
    assert ["and for 1 B parameters", "0.25 s", "-", "-"] in rows
    assert ["Adam step of 1 B parameters", "0.50 s", "0.45 s", "0.55 s"] in rows
    assert lines[-1] == "assumed, not measured: the network between ranks, 10.00 GB/s"


def test_a_rate_and_a_fixed_part_are_found_from_two_measurements():
    numel, fixed, rate = 1000, 2e-6, 1e9
    taken = {tokens: fixed * numel + 6 * numel * tokens / rate for tokens in (100, 400)}
    found = rates.fit_rates(numel, {tokens: 6 * numel * tokens for tokens in taken}, taken)
    assert found.rate == pytest.approx(rate)
    assert found.parameter_seconds == pytest.approx(fixed)


def test_a_measurement_that_makes_no_sense_gives_one_rate():
    found = rates.fit_rates(1000, {100: 1e6, 400: 4e6}, {100: 0.5, 400: 0.4})
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
def test_what_cannot_be_measured_is_one_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--drive", str(tmp_path), *words]) == 2
    shown, said = capsys.readouterr()
    assert shown == ""
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
        ("{", "cannot be read: Expecting property name"),
        ("[]", "not a hardware profile"),
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
