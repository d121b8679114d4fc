"""What an engine does about checkpoints by itself: at signals, when it gives up, and where it resumes."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint import format
from infinity.checkpoint.format import complete, find
from infinity.distributed.consistency import run_on_all_ranks
from infinity.errors import CheckpointError, ConfigError, NonFiniteError
from tests.support.checkpoints import assert_same, contents
from tests.support.models import mlp, vector_batch

ROOT = Path(__file__).parents[2]


def start(folder: Path | None, ranks: int = 1, **checkpoint: Any) -> infinity.Engine:
    config = {
        "train_batch_size": 4 * ranks, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "max_skipped_steps": 3,
        "checkpoint": {**({"path": str(folder)} if folder else {}), **checkpoint},
    }  # fmt: skip
    return infinity.initialize(mlp(), config)[0]


def step(engine: infinity.Engine, number: int = 1, poison: float = 1.0) -> None:
    engine.backward(engine(**vector_batch(engine.global_rank, number)) * poison)
    engine.step()


def test_a_signal_ends_the_program_with_status_0_behind_the_running_step(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    engine = start(tmp_path, on_signal=["SIGUSR1", "SIGTERM"])
    with pytest.raises(SystemExit) as ended, engine:
        step(engine)
        loss = engine(**vector_batch(0, 2))
        os.kill(os.getpid(), signal.SIGUSR1)
        engine.backward(loss)
        assert not complete(tmp_path)
        engine.step()
    assert ended.value.code == 0 and engine.global_steps == 2
    assert find(tmp_path).name == "global_step2"
    assert signal.getsignal(signal.SIGUSR1) is before and signal.getsignal(signal.SIGTERM) is not engine
    with start(tmp_path) as resumed:
        assert resumed.resume()[0] == str(tmp_path / "global_step2")
        assert resumed.global_steps == 2


def test_what_a_program_keeps_in_the_engine_is_in_every_checkpoint(tmp_path):
    with pytest.raises(SystemExit), start(tmp_path, on_signal=["SIGUSR1"]) as engine:
        place = {"batch": 0}
        engine.client_state = lambda: {"place": dict(place)}
        for place["batch"] in (1, 2):
            step(engine, place["batch"])
            engine.save_checkpoint(tmp_path, f"at{place['batch']}", {"own": 1} if place["batch"] == 2 else None)
        os.kill(os.getpid(), signal.SIGUSR1)
        place["batch"] = 3
        step(engine, 3)
    with start(tmp_path) as engine:
        assert engine.resume()[1] == {"place": {"batch": 3}}
        assert engine.load_checkpoint(tmp_path, "at1")[1] == {"place": {"batch": 1}}
        assert engine.load_checkpoint(tmp_path, "at2")[1] == {"own": 1}
        engine.client_state = {"epoch": 2}
        for number in (1, 2, 3):
            with pytest.raises(NonFiniteError) if number == 3 else nullcontext():
                step(engine, number, poison=float("nan"))
        assert engine.resume()[1] == {"epoch": 2}


def test_a_second_signal_of_the_kind_finds_the_handler_from_before(tmp_path):
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with start(tmp_path, on_signal=["SIGUSR2"]) as engine:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert not heard
            os.kill(os.getpid(), signal.SIGUSR2)
            assert heard == [signal.SIGUSR2]
            engine.close()
        assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_an_engine_outside_of_the_main_thread_says_that_it_hears_nothing(tmp_path, caplog):
    engines: list[infinity.Engine] = []
    with caplog.at_level(logging.WARNING, "infinity"):
        other = threading.Thread(target=lambda: engines.append(start(tmp_path, on_signal=["SIGTERM"])))
        other.start()
        other.join()
    assert "cannot be heard" in caplog.text
    engines[0].close()


PROGRAM = """
import os, sys, time
from pathlib import Path
from tests.checkpoint.test_preemption import start, step
folder = Path(sys.argv[1])
with start(folder, ranks=2, on_signal=["SIGTERM"]) as engine:
    for number in range(10_000):
        step(engine, number)
        (folder / f"at{engine.global_rank}").write_text(str(number))
raise SystemExit("it was never told to end")
"""


@pytest.mark.matrix
def test_a_signal_to_one_rank_ends_all_of_them_at_the_same_step(tmp_path):
    """Real processes, of which one is sent SIGTERM."""
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(29_000 + os.getpid() % 900), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    try:
        waited = threading.Event()
        while not all((tmp_path / f"at{rank}").exists() for rank in range(2)):
            assert all(process.poll() is None for process in ranks)
            waited.wait(0.02)
        ranks[1].send_signal(signal.SIGTERM)
        told = [process.communicate(timeout=60)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], "\n".join(told)
        assert "a signal on another rank: step" in told[0]
        ((folder, manifest),) = complete(tmp_path)
        assert len(manifest.ranks) == 2 and folder.name == f"global_step{manifest.engine['counters']['global_steps']}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def give_up(rank: int, world: int, folder: str) -> str:
    with start(Path(folder), world, **{"async": True}) as engine:
        step(engine)
        engine.save_checkpoint(folder, "good")
        for number in (2, 3):
            step(engine, number, poison=float("nan"))
        with pytest.raises(NonFiniteError) as caught:
            step(engine, 4, poison=float("nan"))
        # The weights are good, and so is the engine.
        step(engine, 5)
    return str(caught.value)


def test_too_many_skipped_steps_save_the_last_good_one(tmp_path, two_ranks):
    for text in two_ranks.run(give_up, str(tmp_path)):
        assert f"They are saved as global_step4-emergency in {tmp_path}." in text
        assert "the gradient of" in text
    assert_same(contents(tmp_path, "good"), contents(tmp_path, "global_step4-emergency"))
    assert find(tmp_path).name == "global_step4-emergency"


def test_without_a_folder_the_error_says_which_key_names_one(tmp_path):
    (tmp_path / "file").write_text("")
    told = {None: r"checkpoint\.path", tmp_path / "file" / "x": r"They could not be saved: .*file"}
    for folder, text in told.items():
        with start(folder) as engine:
            for number in (2, 3):
                step(engine, number, poison=float("nan"))
            with pytest.raises(NonFiniteError, match=text):
                step(engine, 4, poison=float("nan"))


def test_resume_passes_over_what_is_damaged_or_unfinished_and_says_why(tmp_path, caplog):
    with start(tmp_path, keep_last=0) as engine:
        for number in range(1, 5):
            step(engine, number)
            engine.save_checkpoint(tmp_path, client_state={"number": number})
        newest = tmp_path / "global_step4"
        (newest / "manifest.json").unlink()
        (states,) = (tmp_path / "global_step3").glob("*.states.bin")
        data = bytearray(states.read_bytes())
        data[len(data) // 2] ^= 4
        states.write_bytes(data)
        step(engine, 5)
    with start(tmp_path) as engine:
        with caplog.at_level(logging.INFO, "infinity"):
            folder, client = engine.resume()
        assert folder == str(tmp_path / "global_step2") and client == {"number": 2} and engine.global_steps == 2
        assert f"not resumed from {newest}: it has no manifest" in caplog.text
        assert f"not resumed from {tmp_path / 'global_step3'}" in caplog.text and states.name in caplog.text
        step(engine, 3)
        assert_whole(engine, tmp_path)
        for left in tmp_path.glob("*/manifest.json"):
            left.write_text("{}\n")
        with pytest.raises(CheckpointError, match="none of its 4 checkpoints can be loaded"):
            engine.resume()


def test_resume_does_not_begin_anew_where_latest_names_what_is_damaged(tmp_path):
    with start(tmp_path) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path)
        whole, manifest = tmp_path / "global_step1", (tmp_path / "global_step1" / "manifest.json").read_bytes()
        (whole / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"none of its 1 checkpoints can be loaded.*no manifest"):
            engine.resume()
        whole.rename(tmp_path / "away")
        with pytest.raises(CheckpointError, match="`latest` names global_step1, and there is nothing of it"):
            engine.resume()
        (tmp_path / "away" / "manifest.json").write_bytes(manifest)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "away").rename(tmp_path / "elsewhere" / "global_step1")
        whole.symlink_to(tmp_path / "elsewhere" / "global_step1")
        assert engine.resume()[0] == str(whole)
        (tmp_path / "latest").write_text("")
        assert engine.resume()[0] == str(whole)


def test_a_manifest_of_another_program_is_no_damaged_checkpoint(tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"name": "app"}')
    with start(tmp_path) as engine:
        assert engine.resume() == (None, {})
        engine.save_checkpoint(tmp_path)
    assert (tmp_path / "web" / "manifest.json").exists()


def test_a_drive_that_cannot_read_the_client_state_is_passed_over(tmp_path, monkeypatch):
    with start(tmp_path) as engine:
        for number in (1, 2):
            step(engine, number)
            engine.save_checkpoint(tmp_path, client_state={"values": torch.arange(3), "number": number})
        real = format.read_metadata

        def read(path: Path, *nbytes_max: int) -> bytes:
            if path.name.endswith(".safetensors") and path.parent.name == "global_step2":
                raise OSError(errno.EIO, "Input/output error")
            return real(path, *nbytes_max)

        monkeypatch.setattr(format, "read_metadata", read)
        assert engine.resume()[1]["number"] == 1


def refuse(rank: int, world: int, folder: str) -> str:
    with start(Path(folder), world) as engine, pytest.raises(CheckpointError) as caught:
        run_on_all_ranks(engine.groups, "a job", lambda: os.listdir("nowhere") if rank else None, path=folder)
    return str(caught.value)


def test_what_the_system_refuses_is_one_kind_of_error_on_all_ranks(tmp_path, two_ranks):
    first, second = two_ranks.run(refuse, str(tmp_path))
    assert "rank 1 failed with CheckpointError" in first and "No such file" in first and "No such file" in second


def assert_whole(engine: infinity.Engine, folder: Path) -> None:
    """It saves again, and what it saves is the newest."""
    engine.save_checkpoint(folder, "after")
    assert find(folder).name == "after"


def test_resume_finds_nothing_in_an_empty_folder_and_needs_one(tmp_path, caplog):
    with start(tmp_path) as engine, caplog.at_level(logging.INFO, "infinity"):
        assert engine.resume() == (None, {})
        assert engine.resume(tmp_path / "none") == (None, {})
        assert "the run begins" in caplog.text
    engine = infinity.initialize(mlp(), {"train_batch_size": 4})[0]
    with engine, pytest.raises(ConfigError, match=r"checkpoint\.path"):
        engine.resume()


@pytest.mark.parametrize(
    ("checkpoint", "complaint"),
    [
        ({"on_signal": ["SIGTERM"]}, "checkpoint.path"), ({"on_signal": ["TERM"], "path": "x"}, "TERM is no signal"),
        ({"on_signal": "SIGKILL", "path": "x"}, "no program can hear SIGKILL"), ({"bandwidth_share": 0}, "above 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(checkpoint, complaint):
    with pytest.raises(ConfigError, match=complaint):
        infinity.initialize(mlp(), {"train_batch_size": 4, "checkpoint": checkpoint})
