"""Claim: whatever ends a program, the newest complete checkpoint loads; what is damaged is found and named.

    python benchmarks/checkpoint_faults.py [--saves 100] [--trainings 50] [--folder DIR] [--full DIR]

--saves programs are killed (SIGKILL) at seeded random moments of a save: every other one overwrites the same two tags
again and again, the rest give each checkpoint a new one and keep two. --trainings programs are killed at random moments
of training with asynchronous saves, every third of them of two ranks, of which one or both are killed. Each program
first resumes where the one before was killed: it must find the newest checkpoint that is complete, nothing older than
what was reported as saved, and hold bit by bit what was saved.

Then bytes are flipped: in every file of a checkpoint the first, the last and seeded random ones, each alone. Each load
must fail and name the file. --full is a folder on a small file system (such as a tmpfs of 40 MiB), which is filled.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from support.killing import Life, Program, digest, engine_of, train
from support.machine import describe
from support.table import Table, claim

import infinity
from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import broken, check_files, complete, read_manifest
from infinity.errors import CheckpointError, TransferError

# Long enough for a few saves behind the program.
_TRAINING_SECONDS = 0.8


def main() -> int:
    """Kill, flip and fill; returns how many claims do not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--trainings", type=int, default=50)
    parser.add_argument("--flips", type=int, default=20, help="random bytes of each file")
    parser.add_argument("--width", type=int, default=512, help="of the model's eight square layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--full", help="folder on a small file system")
    given = parser.parse_args()
    print(describe())
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        wrong = _kills(folder, given, chance)
        wrong += _flips(folder / "flips", given, chance)
    if given.full:
        wrong += _fills(Path(given.full), given.width)
    return wrong


def _kills(folder: Path, given: argparse.Namespace, chance: random.Random) -> int:
    table = Table("kills:d", "inside a save:d", "unfinished:d", "resumed:d", "lost:d", name_width=28)
    rows = {
        "saves, new tags": [Life(folder / "new", given.width, asynchronous=False, tags=0)],
        "saves, two tags": [Life(folder / "two", given.width, asynchronous=False, tags=2)],
        "training, 1 rank": [
            Life(folder / "one", given.width, asynchronous=True, tags=0),
            Life(folder / "nvme", given.width, asynchronous=True, tags=0, nvme=True),
        ],
        "training, 2 ranks": [Life(folder / "both", given.width, asynchronous=True, tags=0, ranks=2)],
    }
    third = given.trainings // 3
    counts = (given.saves - given.saves // 2, given.saves // 2, given.trainings - third, third)
    wrong = 0
    for (name, lives), count in zip(rows.items(), counts, strict=True):
        if not count:
            continue
        results = [_kill(lives[turn % len(lives)], chance) for turn in range(count)]
        total = [sum(column) for column in zip(*results, strict=True)]
        table.row(name, *total)
        wrong += total[4] + (count - total[3])
    claim("every program resumed from the newest complete checkpoint, bit by bit, and none was lost", not wrong)
    return wrong


def _kill(life: Life, chance: random.Random) -> list[int]:
    """One program's life: (1, killed inside a save, left an unfinished one, resumed rightly, lost a checkpoint)."""
    saved = life.folder / "saved"
    before = [(path.name, manifest.number) for path, manifest in complete(saved)]
    program = Program(life)
    tag, same = program.hear("resumed")
    right = same and tag == (before[0][0] if before else None)
    if not right:
        print(f"  resumed from {tag} ({'equal' if same else 'DIFFERENT'}), complete were {before}")
    # Twice, so that there is always one to lose.
    for _ in range(2):
        (announced,) = program.hear("saving")
        began = time.monotonic()
        program.hear("saved")
        lasted = time.monotonic() - began
    if life.asynchronous:
        time.sleep(chance.uniform(0, _TRAINING_SECONDS))
    else:
        (announced,) = program.hear("saving")
        time.sleep(chance.uniform(0, lasted))
    ended = program.kill(chance)
    said = program.heard()
    program.close()
    after = complete(saved)
    # What a save in the foreground has reported is there; of those behind only what was waited for.
    reported = [words[1] for words in said if words[0] == "saved"]
    numbers = [int(manifest.engine["counters"]["global_steps"]) for _, manifest in after]
    lost = not after or (bool(reported) and not life.asynchronous and max(numbers) < max(reported))
    lost = lost or (bool(before) and after[0][1].number < before[0][1])
    begun = max((words[1] for words in said if words[0] == "saving"), default=announced)
    inside = begun not in numbers
    return [1, int(inside), int(bool(broken(saved)) or _leftovers(saved)), int(right), int(lost or not ended)]


def _leftovers(saved: Path) -> bool:
    """Whether a folder of a complete checkpoint has files of a save that did not come to its end."""
    for folder, manifest in complete(saved):
        if any(manifest.id not in path.name for path in folder.iterdir() if path.name != "manifest.json"):
            return True
    return False


def _flips(folder: Path, given: argparse.Namespace, chance: random.Random) -> int:
    life = Life(folder, given.width, asynchronous=False, tags=0)
    table = Table("bytes:d", "flips:d", "found and named:d", name_width=44)
    wrong = 0
    with engine_of(life) as engine:
        train(engine, life.width, 0)
        engine.save_checkpoint(folder / "saved", "tag", client_state={"more": torch.ones(3)})
        held = digest(engine)
        files = [*sorted((folder / "saved" / "tag").iterdir()), folder / "saved" / "latest"]
        for path in files:
            size = path.stat().st_size
            places = sorted({0, size - 1, *(chance.randrange(size) for _ in range(given.flips))})
            found = sum(_flip(engine, path, place, chance) for place in places)
            table.row(path.name, size, len(places), found)
            wrong += len(places) - found
        engine.load_checkpoint(folder / "saved")
        wrong += digest(engine) != held
    claim("every flipped byte is found, with the file's name, and the checkpoint loads once it is mended", not wrong)
    return wrong


def _flip(engine: infinity.Engine, path: Path, place: int, chance: random.Random) -> bool:
    """Flip bits of one byte, load, and mend it."""
    with open(path, "rb") as file:
        file.seek(place)
        byte = file.read(1)[0]
        _put(path, place, byte ^ chance.randrange(1, 256))
        try:
            engine.load_checkpoint(path.parent if path.name == "latest" else path.parent.parent)
            said = "nothing was found"
        except CheckpointError as error:
            said = str(error)
        _put(path, place, byte)
    if path.name not in said:
        print(f"  {path.name}, byte {place}: {said}")
    return path.name in said


def _put(path: Path, place: int, byte: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(bytes([byte]))


def _fills(folder: Path, width: int) -> int:
    """Save until the file system is full, in the foreground and behind."""
    wrong = 0
    for asynchronous in (False, True):
        life = Life(folder, width, asynchronous, tags=0)
        (folder / "saved").mkdir(exist_ok=True)
        with engine_of(life) as engine:
            error = None
            while error is None and engine.global_steps < 100:
                train(engine, width, engine.global_steps)
                try:
                    # Retention would make room.
                    engine.save_checkpoint(folder / "saved" / "all", f"{engine.global_steps}")
                    engine.finish_saving()
                except TransferError as caught:
                    error = caught
            print(f"  {'behind the program' if asynchronous else 'in the foreground'}: {error}")
            newest, manifest = complete(folder / "saved" / "all")[0]
            with ExtentReader(newest, manifest, check_files(newest, read_manifest(newest))) as reader:
                verified = sum(reader.verify()) > 0
            intact = verified and not broken(folder / "saved" / "all")
            intact = intact and int(newest.name) == engine.global_steps - 1
            train(engine, width, engine.global_steps)
            shutil.rmtree(newest)
            engine.save_checkpoint(folder / "saved" / "all", "after", asynchronous=False)
            wrong += not (intact and error is not None and error.errno == 28)
        shutil.rmtree(folder / "saved")
    claim("a full drive is an error that says so; what was saved is intact, and training goes on", not wrong)
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
