"""Mutated files through every door: each ends in a value or in one error of ours. Run by hand; a cut is in the suite.

    python -m tests.hostile_doors [COUNT] [--seed N] [--output FILE]

A door reads files that others wrote: a configuration, a model's folder, a hostfile, a profile, a checkpoint of ours or
of DeepSpeed's. For each case one file of a door is replaced by a mutation of its values, by damaged bytes, or by
something that is no file (a pipe, a folder, links that lead nowhere or in a circle). A raw error and a hang (over
SECONDS_MAX) are listed with their seed; a crash ends the process, which the exit status and the missing JSON show.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.checkpoint.format import MANIFEST
from infinity.cli.main import main as command
from infinity.errors import InfinityError
from infinity.ops.crc32c import checksum
from infinity.plan.hardware import ASSUMED, save_profile
from tests.checkpoint.hostile import body_of
from tests.support.hostile import damaged, headed, mutated, sealed
from tests.support.hub import hf_model

ROOT = Path(__file__).resolve().parents[1]
SAVED = ROOT / "tests/data/deepspeed_checkpoints"
SECONDS_MAX = 30
# What one case may map: a size in a file must not fill the machine.
ADDRESS_NBYTES_MAX = 40 << 30
ESTIMATED = ("llama", "gpt2", "mixtral", "qwen2")


@dataclass(frozen=True)
class Door:
    """A folder with good files, of which `victims` are mutated, and what reads it."""

    folder: Path
    victims: tuple[Path, ...]
    enter: Callable[[Path], Any]


def doors(root: Path) -> dict[str, Door]:
    """Make the good files of every door below `root`."""
    found = {}

    def add(
        name: str, victims: Callable[[Path], Any], make: Callable[[Path], Any], enter: Callable[[Path], Any]
    ) -> None:
        folder = root / name.replace(" ", "_")
        folder.mkdir()
        make(folder)
        found[name] = Door(folder, tuple(sorted(victims(folder))), enter)

    shipped = ROOT / "examples/configs"
    add("configuration", lambda at: at.glob("*.json"), lambda at: _copies(shipped.glob("*.json"), at),
        lambda path: _run("config", "explain", path))  # fmt: skip
    add("initialize", lambda at: at.glob("*.json"), _write_settings, _initialize)
    add("model", lambda at: at.glob("*.json"), _save_model, _load_model)
    add("weights", lambda at: [*at.glob("*.safetensors"), *at.glob("*index.json")], _save_model, _load_model)
    add("estimate", lambda at: at.glob("*.json"), _write_models,
        lambda path: _run("estimate", path, "--config", shipped / "nvme_offload.json"))  # fmt: skip
    offload = shipped / "nvme_offload.json"
    add("profile", lambda at: at.glob("*.json"), lambda at: save_profile(ASSUMED, at / "profile.json"),
        lambda path: _run("estimate", "gpt2", "--config", offload, "--profile", path))  # fmt: skip
    add("hostfile", lambda at: at.glob("hosts"), lambda at: (at / "hosts").write_text("a slots=8\nb slots=8 # spare\n"),
        _read_hosts)  # fmt: skip
    add("checkpoint", lambda at: [at / "latest", *at.glob("*/*")], _save_checkpoint, _read_checkpoint)
    for name in ("zero2-bf16", "zero3-fp32", "zero2-bf16-universal"):
        add(name, lambda at: (path for path in at.rglob("*") if path.is_file()),
            lambda at, name=name: shutil.copytree(SAVED / name, at, dirs_exist_ok=True),
            _read_theirs)  # fmt: skip
    return found


def go(count: int, seed: int = 0) -> dict[str, Any]:
    """Try `count` cases, the doors in turn; return counts by door and end, and what is wrong."""
    counts, wrong = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as root, _limits():
        made = doors(Path(root))
        _ENGINE.clear()
        for case in range(seed, seed + count):
            name = list(made)[case % len(made)]
            chance = random.Random(case)
            victim = chance.choice(made[name].victims)
            with _replaced(victim, chance) as how:
                end = _attempt(made[name].enter, victim)
            counts[f"{name}: {end if end in ('read', 'refused') else 'wrong'}"] += 1
            if end not in ("read", "refused"):
                wrong.append(f"case {case}, {name}, {victim.relative_to(root)} ({how}): {end}")
        for engine in _ENGINE:
            engine.close()
    return {"cases": count, "first_seed": seed, "counts": dict(sorted(counts.items())), "wrong": wrong}


_PLAIN = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
# The engine that checkpoints are loaded into.
_ENGINE: list[Any] = []


def _attempt(enter: Callable[[Path], Any], victim: Path) -> str:
    """Return "read", "refused", or what went wrong."""
    began = time.monotonic()
    signal.alarm(SECONDS_MAX)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = enter(victim)
        end = "read" if code in (0, 1, None) else "refused" if code == 2 else f"exit code {code}"
    except InfinityError:
        end = "refused"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        end = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    return end if time.monotonic() - began < SECONDS_MAX else f"{end} (after {time.monotonic() - began:.0f} s)"


@contextlib.contextmanager
def _replaced(victim: Path, chance: random.Random) -> Iterator[str]:
    """Put something else in a file's place for the time of a block; yields what."""
    data = victim.read_bytes()
    manifest = victim.with_name(MANIFEST)
    vouching = manifest.read_bytes() if manifest.is_file() else None
    draw = chance.random()
    try:
        if draw < 0.1:
            victim.unlink()
            how = chance.choice(list(_NO_FILES))
            _NO_FILES[how](victim)
        elif draw < 0.3 or victim.suffix not in (".json", ".safetensors"):
            how = "damaged"
            victim.write_bytes(damaged(data, chance))
        elif victim.suffix == ".safetensors":
            how = "header"
            end = 8 + int.from_bytes(data[:8], "little")
            victim.write_bytes(headed(mutated(json.loads(data[8:end]), chance), data[end:], chance))
        elif ".rank-" in victim.name or victim.name == MANIFEST:
            how = "sealed values"
            victim.write_bytes(sealed(mutated(body_of(victim), chance)))
        else:
            how = "values"
            victim.write_bytes(mutated(json.loads(data), chance))
        if ".rank-" in victim.name and victim.is_file() and how != "1 TB" and not victim.is_symlink():
            _vouch(victim)
        yield how
    finally:
        if victim.is_dir() and not victim.is_symlink():
            victim.rmdir()
        victim.unlink(missing_ok=True)
        victim.write_bytes(data)
        if vouching is not None:
            manifest.write_bytes(vouching)


def _vouch(index: Path) -> None:
    """Make the manifest vouch for the one rank's index, so that its values are looked at."""
    manifest = index.with_name(MANIFEST)
    body = body_of(manifest)
    body["ranks"][0].update(nbytes=index.stat().st_size, crc32c=checksum(index.read_bytes()))
    manifest.write_bytes(sealed(json.dumps(body).encode()))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


_NO_FILES: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo, "a folder": Path.mkdir, "a circle": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"), "nothing": lambda path: None, "empty": Path.touch,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"), "1 TB": _sparse,
}  # fmt: skip


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """A case that hangs raises, and one that asks for all memory gets a MemoryError, in the block."""

    def hangs(*_: Any) -> None:
        raise TimeoutError(f"nothing for {SECONDS_MAX} s")

    before, limits = signal.signal(signal.SIGALRM, hangs), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_NBYTES_MAX, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)


def _run(*words: Any) -> int:
    return command([str(word) for word in words])


def _copies(paths: Any, folder: Path) -> None:
    for path in paths:
        shutil.copyfile(path, folder / path.name)


def _settings(folder: Path) -> dict[str, Any]:
    drive = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_batch_size": 2, "watchdog_seconds": 60, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}, "bf16": {"enabled": False},
        "zero_optimization": {"stage": 3, "offload_optimizer": drive, "sub_group_size": 1000},
        "aio": {"queue_depth": 8, "block_size": 65536}, "memory": {"cpu": {"max_bytes": "4GB"}},
    }  # fmt: skip


def _write_settings(folder: Path) -> None:
    (folder / "settings.json").write_text(json.dumps(_settings(folder / "drive")))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def _initialize(path: Path) -> None:
    engine, *_ = infinity.initialize(model=_model(), config=str(path))
    engine.close()


def _read_hosts(path: Path) -> int:
    """Ask for a machine that the file does not name, which is found out once it is read."""
    code = _run("run", "--hostfile", path, "--include", "nowhere:0", __file__)
    return 0 if "no machine 'nowhere'" in sys.stderr.getvalue() else code  # type: ignore[attr-defined]


def _save_model(folder: Path) -> None:
    hf_model("llama").save_pretrained(folder, max_shard_size="40KB")


def _load_model(victim: Path) -> None:
    model = infinity.load_hf(victim.parent, {})
    for param in model.parameters():
        param.sum()


def _write_models(folder: Path) -> None:
    for name in ESTIMATED:
        (folder / f"{name}.json").write_text(hf_model(name).config.to_json_string())


def _save_checkpoint(folder: Path) -> None:
    with infinity.initialize(model=_model(), config=_PLAIN)[0] as engine:
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        engine.save_checkpoint(folder, tag="a", client_state={"epoch": 3, "mask": torch.arange(5)})


def _read_checkpoint(victim: Path) -> int:
    folder = victim.parent if victim.name == "latest" else victim.parents[1]
    if not _ENGINE:
        _ENGINE.append(infinity.initialize(model=_model(), config=_PLAIN)[0])
    codes = {_run("ckpt", inputs, folder) for inputs in ("inspect", "verify")}
    _ENGINE[0].load_checkpoint(folder)
    return max(codes)


def _read_theirs(victim: Path) -> int:
    folder = victim
    while folder.parent.name not in ("zero2-bf16", "zero3-fp32", "zero2-bf16-universal"):
        folder = folder.parent
    return max(_run("ckpt", inputs, folder.parent) for inputs in ("inspect", "verify"))


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    found = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m tests.hostile_doors", *sys.argv[1:]]),
        "machine": platform.machine(), "torch": torch.__version__, **go(given.count, given.seed),
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    text = json.dumps(found, indent=1)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
