"""Every training benchmark runs at toy size, and what the scripts share computes what it says."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.plan.hardware import assumed, save_profile

ROOT = Path(__file__).resolve().parents[1]
TINY = "--model tiny --rounds 1 --steps 1 --warmup 1 --positions 16"


def output_of(script: str, arguments: str, folder: Path) -> str:
    """What a script prints; it must leave the folder empty."""
    command = [sys.executable, f"benchmarks/{script}.py", *arguments.split(), "--folder", str(folder)]
    reply = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert reply.returncode == 0, reply.stderr
    assert not reply.stderr, reply.stderr
    assert not list(folder.iterdir())
    return reply.stdout


def row(text: str, name: str) -> list[str]:
    """The words of the first line that begins with a name."""
    return next(line for line in text.splitlines() if line.startswith(name)).removeprefix(name).split()


@pytest.mark.matrix
def test_hooks_prints_the_overhead_of_a_unit(tmp_path):
    figures = row(output_of("hooks", "--units 4 --rounds 2 --ranks 1 --only cpu", tmp_path), "1 rank, cpu")
    gathering, plain, ours, beyond = figures[:4]
    assert int(gathering) == 4
    assert float(plain) > 0
    assert float(ours) - float(plain) == pytest.approx(float(beyond), abs=0.2)


@pytest.mark.matrix
def test_units_compares_a_unit_of_two_sizes(tmp_path):
    text = output_of("units", "--units 2,4 --rounds 1 --only bounded", tmp_path)
    assert all(float(figure) > 0 for figure in row(text, "bounded, 4 units"))
    assert text.count("a unit of 4 costs") == 3


@pytest.mark.matrix
def test_tensor_functions_compares_with_dtensor(tmp_path):
    text = output_of("tensor_functions", "--layers 1 --rounds 1", tmp_path)
    # Attention and MLP: a sum of each in both directions. DTensor sums the gradients of every projection.
    assert float(row(text, "ours")[-1]) == 4
    assert float(row(text, "dtensor")[-1]) > 4


@pytest.mark.matrix
def test_pipeline_executor_compares_with_torchs_runtime(tmp_path):
    for tries_left in (2, 1, 0):
        text = output_of("pipeline_executor", "--micro-batches 4 --rounds 2", tmp_path)
        plausible = True
        for schedule in ("1f1b", "interleaved, 2 chunks"):
            loop, _ = map(float, row(text, f"{schedule}: loop"))
            for name in ("ours", "torch"):
                beside, beyond, _, _, wall = map(float, row(text, f"{schedule}: {name}"))
                # With messages it takes longer, where no neighbour was busy during the one and not during the other.
                plausible &= wall > beside > loop > 0 < beyond
        if plausible:
            break
        assert tries_left, text
    assert re.search(r"a message alone, CPU time: isend \d+ us, irecv \d+ us, wait \d+ us", text)


@pytest.mark.matrix
def test_step_prints_time_and_bytes_of_a_tier(tmp_path):
    text = output_of("step", "--numel 65536 --only infinity:cpu --steps 1 --fio-gib 0.03", tmp_path)
    assert "0 M parameters, bf16" in text
    # Nothing of this tier is on the drive, so that bounds by the drive's rates are left out.
    seconds, nanoseconds, read, written, _, _, _, moved = map(float, row(text, "infinity:cpu"))
    assert seconds >= 0
    assert nanoseconds > 0
    assert read == written == moved == 0


# Two processes that import transformers and train.
@pytest.mark.matrix
@pytest.mark.slow
def test_train_compares_the_peak_with_the_plan(tmp_path):
    text = output_of("train", f"{TINY} --only infinity:nvme", tmp_path)
    planned, on_nvme = map(float, text.split("on NVMe")[1].split("infinity:nvme")[1].split()[1:3])
    assert planned > 0
    assert on_nvme > 0
    assert "DIFFERS" not in text
    tokens_a_second = float(row(text, "infinity:nvme")[0])
    assert tokens_a_second > 0


# Four processes that import transformers and train.
@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_train_says_what_the_drive_takes_from_computation(tmp_path):
    text = output_of("train", f"{TINY} --only infinity:cpu,infinity:nvme", tmp_path)
    assert "infinity:cpu+fio" not in text
    assert text.count("beyond compute") == 3
    beside, rate, cost, taken, nbytes = map(
        float, re.search(r"beside fio (\S+) s at (\S+) GB/s: (\S+) s a GB, (\S+) s for (\S+) GB", text).groups()
    )
    assert beside > 0
    assert rate > 0
    assert taken == pytest.approx(cost * nbytes, abs=0.02)


# Imports transformers and trains.
@pytest.mark.matrix
@pytest.mark.slow
def test_timeline_prints_what_a_recording_costs(tmp_path):
    keep = tmp_path.parent / "kept.html"
    text = output_of("timeline", f"--model tiny --steps 2 --positions 16 --keep {keep}", tmp_path)
    assert "2 of each" in text
    assert "computing, copying and waiting explain" in text
    for suffix in (".html", ".json"):
        assert keep.with_suffix(suffix).stat().st_size > 10_000


# Two processes that import transformers and train.
@pytest.mark.matrix
@pytest.mark.slow
def test_peers_do_the_same_work(tmp_path):
    text = output_of("peers", f"{TINY} --only torch:plain,infinity:memory", tmp_path)
    assert "infinity:memory / torch:plain" in text
    assert "DIFFERS" not in text


# A process that imports transformers and trains.
@pytest.mark.matrix
@pytest.mark.slow
def test_predict_compares_each_step_with_what_was_foretold(tmp_path):
    save_profile(assumed(accelerator=False), tmp_path / "profile.json")
    drive = tmp_path / "drive"
    drive.mkdir()
    words = f"--model tiny --warmup 1 --steps 1 --profile {tmp_path / 'profile.json'}"
    text = output_of("predict", f"{words} --only fp32-cpu", drive)
    predicted, measured = map(float, row(text, "fp32-cpu")[:2])
    assert predicted > 0
    assert measured > 0
    assert "every error <= 30%" in text


@pytest.fixture
def support(monkeypatch):
    """The package that the scripts share, as they import it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: importlib.import_module(f"support.{name}")


def test_a_step_takes_as_long_as_its_slowest_rank(support):
    first, second = {"seconds": [[1.0, 2.0], [3.0, 1.0]]}, {"seconds": [[2.0, 4.0], [1.0, 0.5]]}
    compare = support("compare")
    assert compare.step_seconds([[first, second]]) == (6.0 + 4.0) / 2
    assert compare.step_seconds([[first, second]], phase=1) == (4.0 + 1.0) / 2


def test_bytes_a_parameter_are_summed_over_ranks_and_phases(support):
    rank = {"moved": [[[10, 1], [20, 2]]]}
    assert support("compare").moved_a_parameter([[rank, rank]], 10) == (6.0, 0.6)


def test_a_profile_reaches_the_configuration(support, monkeypatch, tmp_path):
    arguments = ["train.py", "--profile", "drive.json", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    compare = support("compare")
    with compare.task_options(compare.arguments("").parse_args()) as options:
        config = support("with_infinity").configuration({**options, "contender": "infinity:nvme"})
    assert config["hardware_profile"] == "drive.json"


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_a_fio_that_fails_is_an_error(support, tmp_path):
    machine = support("machine")
    with (
        pytest.raises(subprocess.CalledProcessError),
        machine._mixed(str(tmp_path), 1 / 64, 60) as process,
    ):
        process.kill()
        machine._rates(process, stopped=True)
    assert not list(tmp_path.iterdir())


def test_other_losses_are_said(support, capsys):
    values = {name: [[{"losses": losses}]] for name, losses in {"a": [1.0, 2.0], "b": [1.0, 2.5]}.items()}
    support("compare").check_losses(values, 0.1)
    line_a, line_b = capsys.readouterr().out.splitlines()[1:]
    assert "DIFFERS" not in line_a
    assert "DIFFERS by 0.5" in line_b


def test_a_rank_that_fails_is_an_error_with_its_output(support):
    launch = support("launch")
    with pytest.raises(launch.TaskError, match="no_such_task"):
        launch.run_ranks("no_such_task", {}, world_size=2)


def test_the_kernel_counts_what_is_written_past_the_page_cache(support, tmp_path):
    machine = support("machine")
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        # A new name may take a page of its folder, which counts too.
        before = machine.io_nbytes()[1]
        file.write(b"x" * (1 << 20))
        assert machine.io_nbytes()[1] - before in (0, 1 << 20)


@pytest.mark.matrix
def test_checkpoint_faults_kills_flips_and_finds(tmp_path):
    """A slice of the 150 kills that the script makes by default."""
    text = output_of("checkpoint_faults", "--saves 4 --trainings 2 --flips 1 --width 64", tmp_path)
    assert sum(int(row(text, name)[0]) for name in ("saves, new tags", "saves, two tags", "training, 1 rank")) == 6
    assert text.count("holds") == 2
    assert "NO" not in text


@pytest.mark.matrix
def test_checkpoint_async_prints_what_a_save_costs(tmp_path):
    text = output_of("checkpoint_async", "--numel 65536 --tokens 16 --rounds 1", tmp_path)
    _, usual, slowest, call, _, at_once = map(float, row(text, "cpu"))
    assert min(usual, slowest, at_once) > 0
    assert call >= 0
