"""Damaged files through whole loads, in a process that is watched for what it opens and writes outside their folder.

    python -m tests.checkpoint.watched manifests FOLDER [COUNT]    load_checkpoint, `ckpt verify` and `export` of each
    python -m tests.checkpoint.watched headers FOLDER [COUNT]      load_hf and load_checkpoint of each

FOLDER is empty, or holds what `tests.checkpoint.hostile.save` makes. Prints a JSON object: how often each outcome came,
and `wrong`, which has a line for whatever else happened.

Python tells of each open, link, rename and removal by its audit events; all opens of the engine, of its queues and of
safetensors (read here from bytes) are Python's own. Opens by native code are seen by inotify: at every place to which
the mutations' names lead lies a file that nobody has a reason to touch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import random
import shutil
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import infinity
from infinity.checkpoint.format import find
from infinity.checkpoint.weight_files import WeightFolder
from infinity.cli.main import main as command
from infinity.errors import CheckpointError, ConfigError, StateError
from tests.checkpoint import cells
from tests.checkpoint.exporting import config, tokens
from tests.checkpoint.hostile import CELLS, body_of, change_index, change_manifest, copied
from tests.support.hostile import damaged, headed, mutated, sealed
from tests.support.hub import hf_model

DECOYS = ("x", "outside.bin", "b")
_WRITING = {
    "os.rename", "os.link", "os.symlink", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.mkfifo", "shutil.rmtree", "shutil.copyfile", "shutil.move", "subprocess.Popen", "os.system",
}  # fmt: skip
# What an interpreter reads at any time, and what the engine asks the system.
_SYSTEM = ("/proc/", "/sys/", "/dev/", *{f"{os.path.realpath(p)}/" for p in (sys.prefix, sys.base_prefix)},
           f"{Path(__file__).resolve().parents[2]}/")  # fmt: skip


class Watch:
    """While `armed`, events outside `readable` (files and folders) and `writable` (folders) are in `found`."""

    def __init__(self, readable: list[Path], writable: list[Path], decoys: list[Path]) -> None:
        self.found: list[str] = []
        self.seen = Counter[str]()
        self.armed = False
        self._readable = [os.path.realpath(path) for path in readable]
        self._writable = [os.path.realpath(path) for path in writable]
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watched: dict[int, Path] = {}
        for path in decoys:
            # Opened, read, changed, linked (its attributes change), moved or removed.
            number = self._libc.inotify_add_watch(self._inotify, os.fsencode(path), 0xFFF)
            assert number >= 0, os.strerror(ctypes.get_errno())
            self._watched[number] = path
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a block."""
        self.touched()
        self.armed = True
        try:
            yield
        finally:
            self.armed = False
            self.found += [f"inotify: {path}" for path in self.touched()]

    def touched(self) -> list[Path]:
        """Decoys that anybody has touched since the last call."""
        try:
            data = os.read(self._inotify, 1 << 16)
        except BlockingIOError:
            return []
        found, at = [], 0
        while at < len(data):
            number, _, _, length = struct.unpack_from("iIII", data, at)
            found.append(self._watched[number])
            at += 16 + length
        return found

    def _hear(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.armed or (event not in _WRITING and event != "open"):
            return
        self.seen[event] += 1
        paths = [os.fsdecode(each) for each in values[:2] if isinstance(each, str | bytes | os.PathLike)]
        if event == "open":
            paths, flags = paths[:1], values[2]
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        else:
            writes = True
        for path in paths:
            real = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
            if not self._may(os.path.realpath(path) if event == "open" else real, writes=writes):
                self.found.append(f"{event} {'w' if writes else 'r'} {path}")

    def _may(self, path: str, *, writes: bool) -> bool:
        own = self._writable if writes else [*self._writable, *self._readable]
        return any(path == place or path.startswith(place + "/") for place in own) or (
            path == "/dev/null" or (not writes and path.startswith(_SYSTEM))
        )


class Outcomes:
    """What came of each attempt."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.wrong: list[str] = []

    def attempt(self, name: str, seed: int, work: Callable[[], Any], *declared: type[BaseException]) -> bool:
        """Whether it succeeded; anything that was not declared is wrong."""
        try:
            work()
        except declared as error:
            self.counts[f"{name}: {type(error).__name__}"] += 1
            return False
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{Path(where.filename).name}:{where.lineno}"
            self.wrong.append(f"{name} of seed {seed}: {type(error).__name__} at {at}: {str(error)[:300]}")
            return False
        self.counts[f"{name}: done"] += 1
        return True


def place_decoys(root: Path, source: Path) -> list[Path]:
    """Files that names lead to from a checkpoint's folder, or from an export's: good ones, so that reading succeeds."""
    found = []
    for folder in (root, root / "in", root / "in" / "saved", root / "in" / "exports"):
        folder.mkdir(exist_ok=True)
        for name in DECOYS:
            shutil.copyfile(source, folder / name)
            found.append(folder / name)
    return found


def aimed(text: bytes, root: Path, chance: random.Random) -> bytes:
    """A body with a name in it that leads to a decoy."""
    name = chance.choice(["../x", "../../outside.bin", str(root / "outside.bin"), "../exports/b", "..", "../../../x"])
    marks = [b'"origin":null', b'"config.json"', b'"weights":null', b".frozen.bin", b".states.bin", b".client.safet"]
    mark = chance.choice([mark for mark in marks if mark in text] or [b'"'])
    quoted = json.dumps(name).encode()
    if mark == b'"origin":null':
        return text.replace(mark, b'"origin":' + json.dumps(str(root)).encode())
    if mark == b'"weights":null':
        return text.replace(mark, b'"weights":{%s:[]}' % quoted)
    if mark == b'"config.json"':
        return text.replace(mark, quoted)
    # The whole name that ends so, wherever it stands.
    end = text.find(mark)
    begin = text.rfind(b'"', 0, end)
    whole = text[begin : text.find(b'"', end) + 1]
    return text.replace(whole, quoted) if mark != b'"' else text


def damage(source: Path, target: Path, root: Path, chance: random.Random) -> None:
    """A copy with a changed manifest, or a changed index for which the manifest vouches."""
    copied(source, target)
    path = target / "manifest.json"
    body = body_of(path)
    kind = chance.random()
    if kind < 0.1:
        path.write_bytes(damaged(path.read_bytes(), chance))
    elif kind < 0.45:
        rank = chance.randrange(len(body["ranks"]))
        index = body_of(target / body["ranks"][rank]["name"])
        text = mutated(index, chance)
        if chance.random() < 0.3:
            text = aimed(json.dumps(index, separators=(",", ":")).encode(), root, chance)
        body = change_index(target, body, rank, text)
        change_manifest(target, json.dumps(body).encode())
    elif kind < 0.7:
        change_manifest(target, aimed(json.dumps(body, separators=(",", ":")).encode(), root, chance))
    else:
        path.write_bytes(sealed(mutated(body, chance)))


def manifests(bases: Path, root: Path, count: int) -> tuple[Outcomes, Watch]:
    """Each of `count` damaged checkpoints is loaded, verified and exported."""
    outcomes = Outcomes()
    good = bases / "bf16-1"
    sources = sorted(path.parent for path in bases.glob("*/*/manifest.json"))
    place, exports = root / "in" / "saved" / "a", root / "in" / "exports"
    decoys = place_decoys(root, next(good.glob("*/*.frozen.bin")))
    with cells.engine_of(root / "nvme", CELLS[0], seed=9) as engine:
        watch = Watch([place.parent / "latest", place], [exports / "out", root / "nvme"], decoys)
        watch_made_folders(watch, exports)
        assert engine.load_checkpoint(good)[0] and list(cells.train(engine, 1))
        (place.parent / "latest").write_text("a\n")
        for seed in range(count):
            chance = random.Random(seed)
            shutil.rmtree(place, ignore_errors=True)
            shutil.rmtree(exports / "out", ignore_errors=True)
            source = chance.choice(sources)
            damage(source, place, root, chance)
            loads = source.parent.name != "hub"
            with watch.watching():
                if loads:
                    outcomes.attempt("load", seed, lambda: engine.load_checkpoint(place.parent), CheckpointError)
                outcomes.attempt("verify", seed, lambda: quiet("ckpt", "verify", place))
                outcomes.attempt("export", seed, lambda: quiet("export", place, exports / "out"))
            if loads and seed % 5 == 0:
                go_on(engine, good, outcomes, seed)
    return outcomes, watch


def watch_made_folders(watch: Watch, exports: Path) -> None:
    """An export makes its folder beside `out`, under a name of its own."""
    plain = watch._may
    place = os.path.realpath(exports)

    def may(path: str, *, writes: bool) -> bool:
        # The folder itself is synced.
        return path.startswith(f"{place}/.out.") or (path == place and not writes) or plain(path, writes=writes)

    watch._may = may  # type: ignore[method-assign]


def go_on(engine: Any, good: Path, outcomes: Outcomes, seed: int) -> None:
    """After whatever has failed the engine trains, or says that it is broken and is whole after a load."""
    try:
        list(cells.train(engine, 1))
        outcomes.counts["goes on: trains"] += 1
    except StateError as error:
        if "no load has succeeded since" not in str(error):
            raise
        outcomes.counts["goes on: says that it is broken"] += 1
    except (TypeError, ValueError, ArithmeticError) as error:
        outcomes.counts[f"goes on: {type(error).__name__}"] += 1
    outcomes.attempt("mend", seed, lambda: engine.load_checkpoint(good))
    outcomes.attempt("train", seed, lambda: list(cells.train(engine, 1)))


def quiet(*words: object) -> None:
    """A command, which answers with 0, 1 or 2."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = command([str(word) for word in words])
    assert code in (0, 1, 2), code


def headers(bases: Path, root: Path, count: int) -> tuple[Outcomes, Watch]:
    """Each of `count` damaged folders of weights is loaded by load_hf, and into an engine that lives on."""
    outcomes = Outcomes()
    place = root / "in" / "saved" / "a"
    place.mkdir(parents=True)
    model = hf_model("llama")
    model.config.save_pretrained(place)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    cut = len(values) // 2
    for number, names in enumerate((list(values)[:cut], list(values)[cut:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: values[name] for name in names}, place / file, {"format": "pt"})
    files = sorted(place.glob("*.safetensors"))
    originals = {path: path.read_bytes() for path in files}
    index_path = place / "model.safetensors.index.json"
    index = {"metadata": {}, "weight_map": {n: files[list(values).index(n) >= cut].name for n in values}}
    decoys = place_decoys(root, files[0])
    settings = config(str(root / "nvme"), "fp32", tier="cpu")
    engine = infinity.initialize(model=hf_model("llama", 1), config=settings)[0]
    watch = Watch([place], [root / "nvme"], decoys)
    with engine:
        for seed in range(count):
            chance = random.Random(seed)
            for path, data in originals.items():
                path.write_bytes(data)
            text = json.dumps(index).encode()
            if chance.random() < 0.25:
                text = mutated(index, chance) if chance.random() < 0.6 else text.replace(
                    files[0].name.encode(), chance.choice((b"../x", b"../../outside.bin", str(root / "x").encode()))
                )  # fmt: skip
            else:
                path = chance.choice(files)
                data = originals[path]
                end = 8 + int.from_bytes(data[:8], "little")
                header = json.loads(data[8:end])
                whole = chance.random() < 0.15
                path.write_bytes(damaged(data[: end + 8], chance) + data[end + 8 :] if whole
                                 else headed(mutated(header, chance), data[end:], chance))  # fmt: skip
            index_path.write_bytes(text)
            with watch.watching():
                outcomes.attempt("load_hf", seed, lambda: load_hf(place, settings), ConfigError)
                outcomes.attempt("load", seed, lambda: engine.load_checkpoint(place), CheckpointError, ConfigError)
                outcomes.attempt("read", seed, lambda: read_all(place), ConfigError)
            if seed % 20 == 0:
                outcomes.attempt("train", seed, lambda: train(engine))
    return outcomes, watch


def train(engine: Any) -> None:
    """A step."""
    engine.backward(engine(input_ids=tokens(0), labels=tokens(0)).loss)
    engine.step()


def load_hf(folder: Path, settings: Any) -> None:
    """A model whose values are read: one that is never initialized reads them as they are touched."""
    model = infinity.load_hf(folder, settings)
    for param in model.parameters():
        param.sum()
    del model
    gc.collect()


def read_all(folder: Path) -> None:
    """Every value that is there."""
    weights = WeightFolder(folder)
    try:
        for tensor in weights.tensors.values():
            tensor.whole()
    finally:
        weights.close()


def planted(root: Path, watch: Watch) -> list[str]:
    """What the watch says of opens and writes outside: by Python, and by native code."""
    target = root / "outside.bin"
    with watch.watching():
        open(target, "rb").close()
        with contextlib.suppress(OSError):
            os.link(target, root / "linked")
        (root / "made").write_text("x")
    told = watch.found
    watch.found = []
    libc = ctypes.CDLL(None)
    with watch.watching():
        os.close(libc.open(os.fsencode(target), os.O_RDONLY))
    told, watch.found = told + watch.found, []
    return told


def main(what: str, folder: str, count: str = "500") -> None:
    """See the module's text."""
    torch.set_num_threads(1)
    bases = Path(folder)
    root = (bases / f"watched-{what}").absolute()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    if what == "manifests":
        assert find(bases / "bf16-1") is not None, f"make the checkpoints in {folder} first"
    outcomes, watch = {"manifests": manifests, "headers": headers}[what](bases, root, int(count))
    found = list(watch.found)
    watch.found = []
    told = {
        "counts": dict(sorted(outcomes.counts.items())), "wrong": outcomes.wrong, "outside": found,
        "seen": dict(watch.seen), "planted": planted(root, watch),
    }  # fmt: skip
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
